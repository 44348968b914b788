"""Resume of an unfinished run: checks that it is the same run, and restores committed epochs from commit.log."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import Deliver, FailedItem
from dovetail.control.payload import Segment
from dovetail.data.commit_log import CommitLogContents, read_commit_log
from dovetail.errors import ConfigError, DovetailError, Problem
from dovetail.observe.run_folder import find_run, read_json_object, run_reference, write_atomically
from dovetail.runtime.run_lock import RunLock, check_owner
from dovetail.scheduling.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dovetail.data.commit_log import CommitEntry
    from dovetail.data.interfaces import RunOutputs
    from dovetail.runtime.sites import RunEngine
    from dovetail.streaming.settings import UnitSpec

EMPTY_SEGMENT = Segment(0, 0)
"""Of what was set aside only the number matters when a run goes on."""


class AlreadyFinished(ConfigError):
    """Of a run that has come to its end there is nothing to go on with."""


class ResumedRun:
    """A run that was begun before."""

    def __init__(self, what: str | Path) -> None:
        self.folder = find_run(str(what))
        check_owner(self.folder)
        self.lock = RunLock(self.folder)
        try:
            self.commits: CommitLogContents = read_commit_log(self.folder.commit_log)
            self._check()
        except BaseException:
            self.lock.release()
            raise

    def _check(self) -> None:
        header = read_json_object(self.folder.header)
        run = self.folder.id
        if not self.commits.header:
            message = f"run {run} cannot go on: its results went to whoever iterated over it, and are not kept"
            fixes = ('run it again with a sink: sink="out.jsonl", or --sink out.jsonl',)
            raise ConfigError(Problem("DT383", message, fixes=fixes))
        if self.commits.finished is not None:
            if header.get("status") != "finished":  # its driver died in its last moment
                header |= {"status": "finished", "error": ""}
                write_atomically(self.folder.header, json.dumps(header, indent=1, default=str) + "\n")
            self._remove_parts()
            left = ", ".join(self.commits.finished) or "nothing"
            message = f"run {run} is finished already: {left}"
            raise AlreadyFinished(Problem("DT384", message, fixes=("leave --resume out to run it again",)))

    def _remove_parts(self) -> None:
        """Of a run that is finished nobody needs them; its driver may have died before it removed them."""
        from dovetail.data.sinks import SinkSpec, open_sink

        for label, about in (self.commits.header.get("sinks") or {}).items():
            with suppress(OSError, DovetailError):
                open_sink(
                    SinkSpec(**about["spec"]), self.folder.id, self.folder.path / "parts" / (label or "all")
                ).discard()

    # --- is it still the same?

    def check_retry_of(self, retried: str | None) -> None:
        """A run of what another one set aside goes on with just that."""
        before, run = self.commits.header.get("again"), self.folder.id
        if before == retried:
            return
        if before:
            message = f"run {run} runs what run {before} set aside"
            fixes = (f"dovetail run --resume {run_reference(self.folder.path)}",)
        else:
            message = f"run {run} does not run what another one set aside"
            fixes = (f"dovetail run --resume {run_reference(self.folder.path)}",)
        raise ConfigError(Problem("DT388", message, fixes=fixes))

    def check_source(self, now: dict[str, object], *, force: bool) -> list[str]:
        """What changed since, as lines for people; without `force` that is an error."""
        before = self.commits.header.get("source") or {}
        if not before and not now:
            return []
        from dovetail.data.sources import source_changes

        found = source_changes(before, now)
        if found and not force:
            run = self.folder.id
            risk = "--force-resume goes on all the same: rows that moved are read twice or never"
            evidence = (*found, f"{len(self.commits.entries)} epochs of it are done")
            fixes = (
                "put the source back as it was",
                f"dovetail run --resume {run_reference(self.folder.path)} --force-resume",
                "run it anew",
            )
            raise ConfigError(Problem("DT386", f"the source of run {run} has changed since ({risk})", evidence, fixes))
        return found

    def check_sinks(self, sinks: dict[str, dict[str, Any]], functions: list[str]) -> None:
        """What is written already was written for these: same paths, same settings, functions at the same leaves."""
        called = self.commits.header.get("functions") or []
        if called != functions:
            evidence = (f"then a function for: {_leaves_text(called)}", f"now for: {_leaves_text(functions)}")
            fixes = ("give the same sinks as at the beginning: sink=...",)
            raise ConfigError(Problem("DT387", f"run {self.folder.id} began with another sink", evidence, fixes))
        before = {label: about["spec"] for label, about in (self.commits.header.get("sinks") or {}).items()}
        now = json.loads(json.dumps(sinks))  # as it reads in the log
        if before != now:
            evidence = (f"then: {_sinks_text(before)}", f"now: {_sinks_text(now)}")
            fixes = ("name the same sink with the same settings, or run it anew without --resume",)
            raise ConfigError(Problem("DT387", f"run {self.folder.id} began with another sink", evidence, fixes))

    @property
    def units(self) -> list[tuple[str, int]]:
        """With their waves, as whoever wrote to the commit log last had them."""
        return [(str(name), int(wave)) for name, wave in self.commits.header.get("units") or ()]

    def check_units(self, works: Sequence[UnitSpec]) -> bool:
        """Whether what is done can be used by these units. Without a spool it does not matter who they are; a spool,
        or what an earlier run set aside, was numbered for the units that the run had then."""
        entries = self.commits.entries.values()
        again = bool(entries) and self.commits.header.get("again")
        numbered = again or any(entry.spooled or entry.wave for entry in entries)
        if not numbered or self.units == unit_waves(works):
            return True
        then = sorted(stage for name, _ in self.units for stage in name.split("+"))
        now = sorted(stage for work in works for stage in work.stages)
        if then != now:
            evidence = (f"then: {', '.join(then)}", f"now: {', '.join(now)}")
            message = f"run {self.folder.id} has spooled items for stages that the pipeline does not have now"
            fixes = ("go on with the stages as they were: same names", "run it anew without --resume")
            raise ConfigError(Problem("DT389", message, evidence, fixes))
        return False

    def plan(self) -> Plan:
        """The one that it had last."""
        return Plan.from_json(self.folder.plan.read_text(encoding="utf-8"))

    # --- what is done

    def completed_deliveries(self, engine: RunEngine, outputs: RunOutputs) -> tuple[list[Deliver], list[int]]:
        """What counts, and the numbers of the entries that do not: something of what they tell is gone."""
        lost = [number for number, entry in self.commits.entries.items() if not entry.durable]
        for label, sink in outputs.files.items():
            numbers = [number for number, entry in self.commits.entries.items() for _ in entry.outputs.get(label, ())]
            pieces = [piece for entry in self.commits.entries.values() for piece in entry.outputs.get(label, ())]
            lost += [number for number, there in zip(numbers, sink.which_exist(pieces), strict=True) if not there]
        delivers = []
        for number, entry in self.commits.entries.items():
            deliver = _restored_delivery(entry, engine) if number not in lost else None
            if deliver is None:
                lost.append(number)
            else:
                delivers.append(deliver)
        gone = set(lost)
        if gone:
            self._void_later_waves(gone, delivers)
        return delivers, sorted(gone)

    def _void_later_waves(self, lost: set[int], delivers: list[Deliver]) -> None:
        """Of what is lost in one wave, later waves have to be done again too: their input is numbered anew."""
        waves = [self.commits.entries[number].wave for number in lost]
        later = [number for number, entry in self.commits.entries.items() if entry.wave > min(waves)]
        spools = any(entry.spooled for entry in self.commits.entries.values())
        if spools and later:
            lost.update(later)
            delivers[:] = [deliver for deliver in delivers if deliver.wave <= min(waves)]

    def marks(self) -> dict[int, object]:
        return {entry.first: entry.mark for entry in self.commits.entries.values() if entry.mark is not None}


def unit_waves(works: Sequence[UnitSpec]) -> list[tuple[str, int]]:
    return [(work.name, work.wave) for work in works]


def _restored_delivery(entry: CommitEntry, engine: RunEngine) -> Deliver | None:
    """As it was; None: something of its spool is not there any more."""
    spooled: dict[str, list[Segment]] = {}
    for unit, kept in entry.spooled.items():
        segments = [engine.from_spool_record(one) for one in kept]
        if None in segments:
            return None
        spooled[unit] = [segment for segment in segments if segment is not None]
    outputs = {"": [Segment(0, entry.result_count)]} if entry.result_count else {}
    found = Deliver(entry.wave, entry.epoch, entry.first, entry.last, outputs, spooled)
    found.failed_items = [FailedItem(str(unit), (EMPTY_SEGMENT, 0, 0), "") for unit, _ in entry.aside]
    return found


def _sinks_text(sinks: dict[str, dict[str, Any]]) -> str:
    """Each with the settings that somebody has given."""
    found = []
    for label, spec in sorted(sinks.items()):
        settings = [f"{key}={value!r}" for key, value in spec.items() if key not in ("path", "format") and value]
        found.append(f"{label}: " * bool(label) + " ".join([str(spec["path"]), *settings]))
    return ", ".join(found) or "none"


def _leaves_text(labels: list[str]) -> str:
    return ", ".join(label or "all leaves" for label in labels) or "none"
