"""Recording of every controller step, and replay against a fresh controller."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from dovetail.control.codec import decode_command, decode_event, encode
from dovetail.control.commands import Deliver, HostedObject
from dovetail.errors import ConfigError, Problem
from dovetail.machine.private_files import open_private
from dovetail.observe.run_folder import cannot_write_error
from dovetail.resources.seat import Seat
from dovetail.scheduling.plan import Plan
from dovetail.scheduling.replan.cost_benefit import ReplanRules
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, UnitSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dovetail.control.commands import Command
    from dovetail.control.engine import Controller
    from dovetail.control.events import Event
    from dovetail.resources.seat import Seats

REPLAY_VERSION = 2
"""Version of the recording format. Increase it when a type or field name in replay.log changes. Version 1: release
0.1."""
RECORD_HINT = "dovetail simulate FILE --record writes one: replay.log in the run's folder"


class ReplayRecorder:
    """Observer that writes every step: time, events and resulting commands."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """`header`: plain data from which the same controller can be created again."""
        try:
            self._file = os.fdopen(
                open_private(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8", buffering=1 << 16
            )
            self._write({"version": REPLAY_VERSION, "header": dict(header)})
        except OSError as error:
            raise cannot_write_error(path, error) from None

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        step = [now, [encode(event) for event in events], [encode(command) for command in commands]]
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
class ReplayDifference:
    """The first step that differs."""

    step: int
    now: float
    recorded: list[Any]
    replayed: list[Any]

    def lines(self) -> list[str]:
        """The first command that differs, in both versions."""
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
class ReplayResult:
    """Comparison of a recording with the decisions of a new controller."""

    header: dict[str, Any]
    steps: int
    """Number of compared steps, including the differing one."""
    commands: int
    difference: ReplayDifference | None = None

    @property
    def is_same(self) -> bool:
        return self.difference is None


def replay(path: Path, make_controller: Callable[[dict[str, Any]], Controller]) -> ReplayResult:
    """Feed a recording to a controller made from its header, until they differ or the recording ends."""
    lines = _read_lines(path)
    header = next(lines, None)
    if not isinstance(header, dict) or "version" not in header or not isinstance(header.get("header"), dict):
        fixes = (RECORD_HINT,)
        raise ConfigError(Problem("DT305", "is not a recording of a run", fixes=fixes, place=str(path)))
    if header["version"] != REPLAY_VERSION:
        text = (
            f"has recording format version {header['version']!r}, and this version of Dovetail replays only "
            f"version {REPLAY_VERSION}"
        )
        fixes = ("record the run again with --record, or replay it with the version of Dovetail that recorded it",)
        raise ConfigError(Problem("DT305", text, fixes=fixes, place=str(path)))
    controller = make_controller(header["header"])
    steps = commands = 0
    for line in lines:
        if not isinstance(line, list) or len(line) != 3:
            break
        now, events, recorded = line
        made = controller.step(now, [decode_event(event) for event in events])
        # through JSON, so that both sides have the same form whatever a note contains
        replayed = json.loads(json.dumps([encode(command) for command in made]))
        steps += 1
        commands += len(replayed)
        if not _is_same_json(recorded, replayed):
            return ReplayResult(header["header"], steps, commands, ReplayDifference(steps - 1, now, recorded, replayed))
    return ReplayResult(header["header"], steps, commands)


def _is_same_json(one: object, other: object) -> bool:
    """Compare as text, so that NaN equals itself."""
    return one == other or json.dumps(one) == json.dumps(other)


def _read_lines(path: Path) -> Iterator[Any]:
    """The lines of a file up to the first partial line: steps behind a gap cannot be compared."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    return
    except OSError as error:
        fixes = (RECORD_HINT,)
        problem = Problem("DT305", f"cannot be read: {error.strerror}", fixes=fixes, place=str(path))
        raise ConfigError(problem) from None


def controller_record(
    units: Sequence[UnitSpec], plan: Plan, options: StreamOptions, resume: Sequence[Deliver] = (), reserved: Seats = ()
) -> dict[str, Any]:
    """Convert to plain data, recursively."""
    return {
        "units": [_spec_to_dict(unit) for unit in units],
        "plan": plan.to_dict(),
        "options": asdict(options),
        "resume": [encode(deliver) for deliver in resume],
        "reserved": [seat.to_dict() for seat in reserved],
    }


def controller_from_record(header: Mapping[str, Any]) -> StreamController:
    """A fresh controller in the recorded initial state."""
    options = StreamOptions(**{**header["options"], "rules": ReplanRules(**header["options"]["rules"])})
    resume = [command for command in map(decode_command, header["resume"]) if isinstance(command, Deliver)]
    plan = Plan.from_dict(header["plan"])
    units = [_spec_from_dict(data, plan) for data in header["units"]]
    reserved = tuple(map(Seat.from_dict, header.get("reserved", ())))
    return StreamController(units, plan, options, resume, reserved)


def _spec_to_dict(unit: UnitSpec) -> dict[str, Any]:
    """Settings of a unit, without its part of the plan, which is recorded with the plan."""
    plain = {item.name: getattr(unit, item.name) for item in fields(unit) if item.name != "plan"}
    return plain | {"hosted": [unit.hosted.name, unit.hosted.slots], "parents": list(unit.parents)}


def _spec_from_dict(data: Mapping[str, Any], plan: Plan) -> UnitSpec:
    name, slots = data["hosted"]
    planned = next(unit for unit in plan.units if unit.name == name)
    hosted = HostedObject(name, slots=slots)
    return UnitSpec(planned, **{**data, "hosted": hosted, "parents": tuple(data["parents"])})
