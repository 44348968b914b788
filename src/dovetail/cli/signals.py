"""Ctrl-C and SIGTERM during `dovetail run`: the first drains the run, the second cancels it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    import dovetail as dt

SIGNAL_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class SignalHandler:
    """Within the `with` block these signals are the run's."""

    def __init__(self) -> None:
        self.run: dt.Run | None = None
        self.first_signal: int = 0
        """The first signal that came."""
        self._count = 0
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """As shells and service managers know it: 143 after SIGTERM, else 130."""
        return 128 + signal.SIGTERM if self.first_signal == signal.SIGTERM else 128 + signal.SIGINT

    def __enter__(self) -> Self:
        for number in SIGNAL_NAMES:
            if signal.getsignal(number) != signal.SIG_IGN:  # of a job in the background: nobody means us
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of handlers
        self.first_signal = self.first_signal or number
        word = SIGNAL_NAMES[signal.Signals(number)]
        self._count += 1
        if self.run is None or self.run.done or self._count > 2:
            raise KeyboardInterrupt
        if self._count == 1:
            _write_stderr(f"\ndraining: what is in hand is finished; {word} again stops now\n")
            self.run.drain(word)
            return
        self.run.cancel(f"{word} twice")
        raise KeyboardInterrupt  # out of whatever we wait for, such as somebody who does not read our output


def _write_stderr(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode())  # print would fail, if the signal came while something is printed
