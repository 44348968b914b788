"""Ctrl-C and SIGTERM of commands: what the first one does, and what the second.

During `dovetail run` the first drains the run, and the second cancels it (`SignalHandler`). `dovetail serve`, `actors`
and `worker` count them (`StopSignals`, `WorkerSignals`): the first ends their work in order, the second ends it at
once.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType, TracebackType

    import dovetail as dt

SIGNAL_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class SignalHandler:
    """Handles the signals of `dovetail run` within a `with` block."""

    def __init__(self) -> None:
        self.run: dt.Run | None = None
        self.first_signal: int = 0
        """The first signal received."""
        self._count = 0
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """143 after SIGTERM, else 130, as shells and service managers expect."""
        return 128 + signal.SIGTERM if self.first_signal == signal.SIGTERM else 128 + signal.SIGINT

    def __enter__(self) -> Self:
        for number in SIGNAL_NAMES:
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored in a background job
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of handlers
        self.first_signal = self.first_signal or number
        name = SIGNAL_NAMES[signal.Signals(number)]
        self._count += 1
        if self.run is None or self.run.done or self._count > 2:
            raise KeyboardInterrupt
        if self._count == 1:
            self.run.drain(name)
            _write_stderr(self.run.announce_drain(name))
            return
        self.run.cancel(f"{name} twice")
        raise KeyboardInterrupt  # leaves any blocking call, such as a write to a pipe that is not read


def _write_stderr(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode())  # print would fail if the signal interrupted another print


class _SignalHandlers:
    """Handlers of some signals within a `with` block, except of those that are ignored, as in a background job."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.count = 0
        self._numbers = tuple(numbers)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in self._numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of handlers
        self.count += 1


class StopSignals(_SignalHandlers):
    """Counts SIGINT and SIGTERM within a `with` block; the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        super().__init__((signal.SIGINT, signal.SIGTERM))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        super()._on_signal(number, frame)
        if self.count > 1:
            raise KeyboardInterrupt


class WorkerSignals(_SignalHandlers):
    """Counts Ctrl-C and SIGTERM within a `with` block."""

    def __init__(self) -> None:
        super().__init__(SIGNAL_NAMES)
        self.first_signal = 0

    @property
    def exit_code(self) -> int:
        """0 after a drain; after a second signal 143 for SIGTERM, else 130, as shells and service managers expect."""
        if self.count < 2:
            return 0
        return 128 + (signal.SIGTERM if self.first_signal == signal.SIGTERM else signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.first_signal = self.first_signal or number
        super()._on_signal(number, frame)
