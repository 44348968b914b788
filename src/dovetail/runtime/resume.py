"""Resume of an unfinished run: checks that it is the same run, and restores committed epochs from commit.log."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import Deliver, FailedItem
from dovetail.control.payload import Segment
from dovetail.data.commit_log import CommitLogContents, read_commit_log
from dovetail.errors import UNSET, Change, ConfigError, Problem
from dovetail.observe.run_folder import (
    find_run,
    read_json_object,
    remove_temporary_files,
    run_reference,
    write_atomically,
)
from dovetail.observe.run_header import read_unstarted
from dovetail.runtime.run_lock import RunLock, check_only_owner_writes
from dovetail.scheduling.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dovetail.data.commit_log import CommitEntry
    from dovetail.data.interfaces import RunOutputs
    from dovetail.errors import Fix
    from dovetail.runtime.sites import RunEngine
    from dovetail.streaming.settings import UnitSpec

EMPTY_SEGMENT = Segment(0, 0)
"""Placeholder for the segment of a failed item of an earlier attempt; only the number of such items is used."""


def _new_run_fix(header: Mapping[str, Any]) -> Fix:
    """How to start the same run again: as it was started, by the command line or by a program."""
    more = header.get("more")
    asked = more.get("asked") if isinstance(more, dict) else None
    if isinstance(asked, dict) and isinstance(asked.get("file"), str):
        return f"dovetail run {shlex.quote(asked['file'])}  # a new run"
    return Change({"resume": UNSET}, note="a new run")


class AlreadyFinished(ConfigError):
    """The run is finished: there is nothing to resume."""


class ResumedRun:
    """An earlier run that is resumed."""

    def __init__(self, what: str | Path) -> None:
        self.folder = find_run(str(what))
        check_only_owner_writes(self.folder)
        self.lock = RunLock(self.folder)
        try:
            remove_temporary_files(self.folder.path)
            self.commits: CommitLogContents = read_commit_log(self.folder.commit_log)
            self._check()
        except BaseException:
            self.lock.release()
            raise

    def _check(self) -> None:
        header = read_json_object(self.folder.header)
        run = self.folder.id
        unstarted = read_unstarted(self.folder) or {}
        self.retried_folder: object = self.commits.header.get("again_folder") or unstarted.get("again_folder")
        """Folder of the run whose failed items this one processes, if it is a retry."""
        if not self.has_begun and not unstarted.get("durable"):
            message = f"run {run} cannot be resumed: it had no sink, so its results were not stored"
            fixes = ('start a new run with a sink: sink="out.jsonl", or --sink out.jsonl',)
            raise ConfigError(Problem("DT383", message, fixes=fixes))
        if self.commits.finished is not None:
            if header.get("status") != "finished":  # the driver died just before the end
                header |= {"status": "finished", "error": ""}
                write_atomically(self.folder.header, json.dumps(header, indent=1, default=str) + "\n")
            self._remove_parts()
            left = ", ".join(self.commits.finished) or "nothing"
            message = f"run {run} is already finished: {left}"
            raise AlreadyFinished(Problem("DT384", message, fixes=(_new_run_fix(header),)))

    @property
    def has_begun(self) -> bool:
        """Whether there is a commit log; otherwise the run was killed before it began, and starts from the
        beginning."""
        return bool(self.commits.header)

    def _remove_parts(self) -> None:
        """Removes the part files of a finished run, whose driver may have died before it did."""
        from dovetail.runtime.run_removal import file_sinks

        for sink in file_sinks(self.folder, self.commits):
            sink.discard()

    # --- checks that it is the same run

    def check_retry_of(self, retried: str | None) -> None:
        """A retry can only be resumed as a retry of the same run."""
        before, run = self.commits.header.get("again"), self.folder.id
        if before == retried:
            return
        retries = f"retries the failed items of run {before}" if before else "does not retry another run"
        message = f"run {run} {retries}"
        fixes = (f"dovetail run --resume {run_reference(self.folder.path)}",)
        raise ConfigError(Problem("DT388", message, fixes=fixes))

    def check_source(self, now: dict[str, object], *, force: bool) -> list[str]:
        """Changes of the source since the first start, as messages; without `force` they are an error."""
        before = self.commits.header.get("source") or {}
        if not before and not now:
            return []
        from dovetail.data.sources import source_changes

        found = source_changes(before, now)
        if found and not force:
            run = self.folder.id
            evidence = (*found, f"{len(self.commits.entries)} epochs are finished")
            fixes = (
                "restore the source",
                f"dovetail run --resume {run_reference(self.folder.path)} --force-resume"
                "   # rows that moved are read twice or not at all",
                "start a new run",
            )
            raise ConfigError(Problem("DT386", f"the source of run {run} has changed", evidence, fixes))
        return found

    def check_sinks(self, sinks: dict[str, dict[str, Any]], functions: list[str]) -> None:
        """Raises unless paths, settings and functions of the sinks are those of the first start."""
        called = self.commits.header.get("functions") or []
        if called != functions:
            evidence = (f"functions at first start: {_leaves_text(called)}", f"now: {_leaves_text(functions)}")
            fixes = ("pass the same sinks as at the first start: sink=...",)
            raise ConfigError(Problem("DT387", f"run {self.folder.id} was started with another sink", evidence, fixes))
        before = {label: about["spec"] for label, about in (self.commits.header.get("sinks") or {}).items()}
        now = json.loads(json.dumps(sinks))  # as stored in the log
        if before != now:
            evidence = (f"at first start: {_sinks_text(before)}", f"now: {_sinks_text(now)}")
            fixes = ("pass the same sink and settings, or start a new run without --resume",)
            raise ConfigError(Problem("DT387", f"run {self.folder.id} was started with another sink", evidence, fixes))

    @property
    def units(self) -> list[tuple[str, int]]:
        """Units and their waves, as last written to the commit log."""
        return [(str(name), int(wave)) for name, wave in self.commits.header.get("units") or ()]

    def check_units(self, units: Sequence[UnitSpec]) -> bool:
        """Whether finished work can be used with these units. It can if nothing is spooled; spooled items, and failed
        items that are retried, are numbered for the units of the first start."""
        entries = self.commits.entries.values()
        again = bool(entries) and self.commits.header.get("again")
        numbered = again or any(entry.spooled or entry.wave for entry in entries)
        if not numbered or self.units == unit_waves(units):
            return True
        then = sorted(stage for name, _ in self.units for stage in name.split("+"))
        now = sorted(stage for unit in units for stage in unit.stages)
        if then != now:
            evidence = (f"at first start: {', '.join(then)}", f"now: {', '.join(now)}")
            message = f"run {self.folder.id} has spooled items for stages that are no longer in the pipeline"
            fixes = ("resume with the original stage names", "start a new run without --resume")
            raise ConfigError(Problem("DT389", message, evidence, fixes))
        return False

    def plan(self) -> Plan:
        """The last plan of the run."""
        return Plan.from_json(self.folder.plan.read_text(encoding="utf-8"))

    # --- finished work

    def completed_deliveries(self, engine: RunEngine, outputs: RunOutputs) -> tuple[list[Deliver], list[int]]:
        """Deliveries that are complete, and the numbers of log entries whose files are lost."""
        gone = {number for number, entry in self.commits.entries.items() if not entry.durable}
        for label, sink in outputs.files.items():
            numbers = [number for number, entry in self.commits.entries.items() for _ in entry.outputs.get(label, ())]
            pieces = [piece for entry in self.commits.entries.values() for piece in entry.outputs.get(label, ())]
            gone |= {number for number, there in zip(numbers, sink.which_exist(pieces), strict=True) if not there}
        delivers = []
        for number, entry in self.commits.entries.items():
            deliver = _restored_delivery(entry, engine) if number not in gone else None
            if deliver is None:
                gone.add(number)
            else:
                delivers.append(deliver)
        if gone:
            self._void_later_waves(gone, delivers)
        return delivers, sorted(gone)

    def _void_later_waves(self, lost: set[int], delivers: list[Deliver]) -> None:
        """A loss in one wave voids all later waves, because their input is numbered again."""
        waves = [self.commits.entries[number].wave for number in lost]
        later = [number for number, entry in self.commits.entries.items() if entry.wave > min(waves)]
        spools = any(entry.spooled for entry in self.commits.entries.values())
        if spools and later:
            lost.update(later)
            delivers[:] = [deliver for deliver in delivers if deliver.wave <= min(waves)]

    def marks(self) -> dict[int, object]:
        return {entry.first: entry.mark for entry in self.commits.entries.values() if entry.mark is not None}


def unit_waves(units: Sequence[UnitSpec]) -> list[tuple[str, int]]:
    return [(unit.name, unit.wave) for unit in units]


def _restored_delivery(entry: CommitEntry, engine: RunEngine) -> Deliver | None:
    """The delivery of a log entry; None if a part of its spool is lost."""
    spooled: dict[str, list[Segment]] = {}
    for unit, kept in entry.spooled.items():
        segments = [engine.from_spool_record(one) for one in kept]
        if None in segments:
            return None
        spooled[unit] = [segment for segment in segments if segment is not None]
    outputs = {"": [Segment(0, entry.result_count)]} if entry.result_count else {}
    found = Deliver(entry.wave, entry.epoch, entry.first, entry.last, outputs, spooled, also=entry.also)
    found.failed_items = [FailedItem(str(unit), (EMPTY_SEGMENT, 0, 0), "") for unit, _ in entry.failed_items]
    return found


def _sinks_text(sinks: dict[str, dict[str, Any]]) -> str:
    """Sinks with the settings that were given."""
    found = []
    for label, spec in sorted(sinks.items()):
        settings = [f"{key}={value!r}" for key, value in spec.items() if key not in ("path", "format") and value]
        found.append(f"{label}: " * bool(label) + " ".join([str(spec["path"]), *settings]))
    return ", ".join(found) or "none"


def _leaves_text(labels: list[str]) -> str:
    return ", ".join(label or "all leaves" for label in labels) or "none"
