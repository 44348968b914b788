"""Selection of runs by name, status and kind, for `dovetail ls` and `dovetail rm`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

import click

from dovetail.cli.options import Decorator, SuggestingChoice, complete_run_names
from dovetail.observe.run_folder import RunFolder, number_field, read_json_object
from dovetail.observe.run_header import RUN_KINDS, run_kind
from dovetail.observe.run_status import KNOWN_STATUS, run_status
from dovetail.pipeline.durations import parse_duration

STATUSES = ("running", *sorted(KNOWN_STATUS - {"running"}), "lost")


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Conditions that a run must meet; an empty one is met by all."""

    name: str | None = None
    statuses: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def accepts(self, entry: dict[str, Any]) -> bool:
        """Whether an entry as made by `run_entry` meets all conditions."""
        if self.statuses and entry["status"] not in self.statuses:
            return False
        if self.kinds and entry["kind"] not in self.kinds:
            return False
        return self.name is None or _name_matches(self.name.lower(), entry)

    def __bool__(self) -> bool:
        return self.name is not None or bool(self.statuses or self.kinds)


def _name_matches(pattern: str, entry: dict[str, Any]) -> bool:
    has_wildcard = any(character in pattern for character in "*?[")
    pattern = pattern if has_wildcard else f"*{pattern}*"
    return any(fnmatchcase(text.lower(), pattern) for text in (entry["name"], entry["id"]))


def filter_options() -> Decorator:
    """--name, --status and --kind; the command gets `name`, `statuses` and `kinds`."""

    kind = click.option(
        "--kind", "kinds", multiple=True, type=SuggestingChoice(RUN_KINDS), help="Kind of work; may be repeated."
    )
    status = click.option(
        "--status",
        "statuses",
        multiple=True,
        type=SuggestingChoice(STATUSES),
        help="lost: the process of the run is gone. May be repeated.",
    )
    name = click.option(
        "--name",
        metavar="PATTERN",
        shell_complete=complete_run_names,
        help="A part of name or id, or a pattern with * and ?.",
    )
    return lambda function: name(status(kind(function)))


class Duration(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """Seconds of "90s", "12h" or "7d"."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_duration(value)
        except ValueError:
            self.fail(f"{value!r} is not a duration such as 90s, 12h or 7d", param, ctx)


class Since(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A point in time, as the text that was given: it is relative to the time at which the command runs."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            since_wall(value, 0.0)
        except ValueError:
            self.fail(f"{value!r} is not a duration such as 12h or 7d, nor a date such as 2026-11-16", param, ctx)
        return str(value)


def since_wall(text: str, wall: float) -> float:
    """The time that a duration before `wall`, or a date and time of the local time zone, means."""
    try:
        return wall - parse_duration(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def run_entry(run: RunFolder, wall: float) -> dict[str, Any]:
    """Summary of a run from run.json; the event log is not read."""
    header = read_json_object(run.header)
    progress = header.get("progress")
    done = progress if isinstance(progress, dict) else {}
    seconds, finished = number_field(done, "seconds"), int(number_field(done, "finished"))
    started = number_field(header, "started")
    return {
        "id": run.id,
        "name": str(header.get("name", "")),
        "kind": run_kind(header),
        "engine": str(header.get("engine", "")),
        "status": run_status(header, wall),
        "age_s": max(0.0, wall - started) if started else None,
        "idle_s": max(0.0, wall - _last_sign(run, header)),
        "items": finished,
        "total": done.get("total"),
        "unit": str(done.get("noun") or "items"),
        "rate": finished / seconds if seconds > 0 else None,
        "seconds": seconds,
        "virtual": bool(header.get("virtual")),
        "folder": str(run.path),
    }


def _last_sign(run: RunFolder, header: dict[str, Any]) -> float:
    """When the run ended, or was last known to run."""
    for key in ("ended", "heartbeat", "started"):
        found = number_field(header, key)
        if found:
            return found
    try:
        return run.path.stat().st_mtime
    except OSError:
        return 0.0
