"""Does a controller decide today what it decided then? The exact input of a run, written down and fed again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.control.wire import decode_event, encode_command, encode_event
from dovetail.errors import ConfigError, Problem
from dovetail.observe.folder import cannot_write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dovetail.control.commands import Command
    from dovetail.control.engine import Controller
    from dovetail.control.events import Event

VERSION = 1
RECORD = "dovetail simulate FILE --record writes one: replay.log in the run's folder"


class ReplayRecorder:
    """An observer that writes every step: the time, the events, and the commands they led to."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """`header` is whatever is needed to make the same controller again; plain data."""
        try:
            self._file = path.open("w", encoding="utf-8", buffering=1 << 16)
            self._write({"version": VERSION, "header": dict(header)})
        except OSError as error:
            raise cannot_write(path, error) from None

    def saw(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        step = [now, [encode_event(event) for event in events], [encode_command(command) for command in commands]]
        try:
            self._write(step)
        except BaseException:
            self._file.close()
            raise

    def _write(self, data: object) -> None:
        self._file.write(json.dumps(data, separators=(",", ":")) + "\n")

    def close(self, now: float) -> None:  # noqa: ARG002 - the port's
        self._file.close()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step that went another way."""

    step: int
    now: float
    recorded: list[Any]
    replayed: list[Any]

    def lines(self) -> list[str]:
        """The first command that differs, both ways."""
        at = next(
            (i for i, pair in enumerate(zip(self.recorded, self.replayed, strict=False)) if pair[0] != pair[1]),
            min(len(self.recorded), len(self.replayed)),
        )
        then, today = (json.dumps(side[at]) if at < len(side) else "nothing" for side in (self.recorded, self.replayed))
        return [
            f"step {self.step} at {self.now:g} s, command {at} of {len(self.recorded)} then, {len(self.replayed)} now",
            f"  then  {then}",
            f"  now   {today}",
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a recording and a fresh controller agree."""

    header: dict[str, Any]
    steps: int
    """That were compared, the differing one included."""
    commands: int
    difference: Difference | None = None

    @property
    def same(self) -> bool:
        return self.difference is None


def replay(path: Path, make_controller: Callable[[dict[str, Any]], Controller]) -> Comparison:
    """Feeds a recording to a controller made from its header, until they differ or the recording ends."""
    lines = _lines(path)
    header = next(lines, None)
    if not isinstance(header, dict) or header.get("version") != VERSION or not isinstance(header.get("header"), dict):
        fixes = (RECORD,)
        raise ConfigError(Problem("DT305", "is not the recording of a run", fixes=fixes, place=str(path)))
    controller = make_controller(header["header"])
    steps = commands = 0
    for line in lines:
        if not isinstance(line, list) or len(line) != 3:
            break
        now, events, recorded = line
        made = controller.step(now, [decode_event(event) for event in events])
        # through JSON, so that both sides have the same form whatever the controller put into a note
        replayed = json.loads(json.dumps([encode_command(command) for command in made]))
        steps += 1
        commands += len(replayed)
        if not _same(recorded, replayed):
            return Comparison(header["header"], steps, commands, Difference(steps - 1, now, recorded, replayed))
    return Comparison(header["header"], steps, commands)


def _same(one: object, other: object) -> bool:
    """Equal as text, so that NaN equals itself."""
    return one == other or json.dumps(one) == json.dumps(other)


def _lines(path: Path) -> Iterator[Any]:
    """The lines of a file up to one that is torn: what comes after a gap cannot be compared."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    return
    except OSError as error:
        fixes = (RECORD,)
        problem = Problem("DT305", f"cannot be read: {error.strerror}", fixes=fixes, place=str(path))
        raise ConfigError(problem) from None
