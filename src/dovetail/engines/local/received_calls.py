"""Calls that a worker has received and not answered, for their cancellation."""

from __future__ import annotations

from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.local.protocol import Frame


class _CallState:
    __slots__ = ("cancel", "has_begun", "is_cancelled", "origin")

    def __init__(self, origin: tuple[int, int, int, int] | None) -> None:
        self.origin = origin
        """See `CallOptions.origin`."""
        self.has_begun = False
        self.is_cancelled = False
        self.cancel: Callable[[], object] | None = None
        """Cancels the running async method."""


class ReceivedCalls:
    """Thread: any."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._states: dict[int, _CallState] = {}

    def on_frame(self, frame: Frame) -> bool:
        """Remember a call. Whether the frame was the cancellation of a call, which is handled here."""
        head = frame.head
        if head[0] == "call":
            self.add(head[1], head[5] if len(head) > 5 else None)
        elif head[0] == "cancel_call":
            self.cancel(head[1])
            return True
        return False

    def add(self, number: int, origin: tuple[int, int, int, int] | None = None) -> None:
        """A call has been received."""
        self._states[number] = _CallState(origin)

    def find(self, caller: tuple[int, int], number: int) -> int | None:
        """The number that a call of a worker of another node has here; None: there is none, or it was answered."""
        for mine, state in list(self._states.items()):
            if state.origin is not None and state.origin[:3] == (*caller, number):
                return mine
        return None

    def depth_of(self, number: int) -> int:
        """How many callers wait for a call of a worker of another node."""
        state = self._states.get(number)
        return 0 if state is None or state.origin is None else state.origin[3]

    def begin(self, number: int, deadline: float) -> bool:
        """Whether the call is to be executed: it was not cancelled, and its deadline (0: none) has not passed."""
        with self._lock:
            state = self._states.get(number)
            if state is None:
                return False
            if deadline and monotonic() >= deadline:
                del self._states[number]
                return False
            state.has_begun = True
            return True

    def set_cancel(self, number: int, cancel: Callable[[], object]) -> None:
        """Set the function that cancels a running call; it is called at once if the call is cancelled already."""
        with self._lock:
            state = self._states[number]
            state.cancel = cancel
            is_cancelled = state.is_cancelled
        if is_cancelled:
            cancel()

    def cancel(self, number: int) -> bool:
        """Cancel a call: it does not begin, or its async method is cancelled. A sync method continues. Whether the call
        will never be answered, because it had not begun."""
        with self._lock:
            state = self._states.get(number)
            if state is None:
                return False
            if not state.has_begun:
                del self._states[number]
                return True
            state.is_cancelled = True
            cancel = state.cancel
        if cancel is not None:
            cancel()
        return False

    def end(self, number: int) -> None:
        self._states.pop(number, None)
