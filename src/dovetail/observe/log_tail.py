"""Observer that follows the log files of workers and prints their lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dovetail.control.commands import StartWorker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import TextIO

    from dovetail.control.commands import Command
    from dovetail.control.events import Event

POLL_INTERVAL_S = 0.2
MAX_READ_BYTES = 1 << 16
"""Bytes per file and poll: more is not readable anyway."""


class LogTail:
    """Observer that prints the output of workers."""

    def __init__(self, logs: Path, to: TextIO | None = None) -> None:
        self._logs = logs
        self._stream = to or sys.stderr
        self._units: dict[str, str] = {}
        """Worker number, as in the file name -> unit."""
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}
        self._next = float("-inf")

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002
        for command in commands:
            if type(command) is StartWorker:
                self._units[str(command.worker)] = "+".join(hosted.name for hosted in command.hosted)
        if now >= self._next:
            self._next = now + POLL_INTERVAL_S
            self._poll()

    def close(self, now: float) -> None:  # noqa: ARG002
        while self._poll():
            pass
        for path, rest in self._rest.items():
            if rest:
                self._show(path, [rest])
        self._rest.clear()

    def _poll(self) -> bool:
        """Whether there was new output."""
        new = False
        for path in sorted(self._logs.glob("*.log")) if self._logs.is_dir() else ():
            at = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                data = file.read(MAX_READ_BYTES)
            if data:
                new = True
                self._read[path] = at + len(data)
                *lines, self._rest[path] = (self._rest.get(path, b"") + data).split(b"\n")
                self._show(path, lines)
        return new

    def _show(self, path: Path, lines: Sequence[bytes]) -> None:
        worker, _, rank = path.stem.partition(".")
        who = f"{self._units.get(worker, 'worker')} {worker}" + (f" rank {rank}" if rank else "")
        for line in lines:
            self._stream.write(f"[{who}] {line.decode(errors='replace')}\n")
        self._stream.flush()
