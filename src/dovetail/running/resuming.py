"""How does a run go on that another driver began? What was committed counts; all else is computed again."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import Deliver, SetAside
from dovetail.control.segments import Segment
from dovetail.data.commits import Told, read
from dovetail.errors import ConfigError, DovetailError, Problem
from dovetail.observe.folder import find_run, read_object, write_atomically
from dovetail.observe.naming import name_for
from dovetail.running.hold import Hold, check_owner
from dovetail.scheduling.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dovetail.data.commits import Entry
    from dovetail.data.ends import Outputs
    from dovetail.running.sites import Workers
    from dovetail.streaming.work import Work

NOTHING = Segment(0, 0)
"""Of what was set aside only the number matters when a run goes on."""


class AlreadyFinished(ConfigError):
    """Of a run that has come to its end there is nothing to go on with."""


class Earlier:
    """A run that was begun before."""

    def __init__(self, what: str | Path) -> None:
        self.folder = find_run(str(what))
        check_owner(self.folder)
        self.hold = Hold(self.folder)
        try:
            self.told: Told = read(self.folder.commit_log)
            self._check()
        except BaseException:
            self.hold.let_go()
            raise

    def _check(self) -> None:
        header = read_object(self.folder.header)
        run = self.folder.id
        if not self.told.beginning:
            message = f"run {run} cannot go on: its results went to whoever iterated over it, and are not kept"
            fixes = ('run it again with a sink: sink="out.jsonl", or --sink out.jsonl',)
            raise ConfigError(Problem("DT383", message, fixes=fixes))
        if self.told.finished is not None:
            if header.get("status") != "finished":  # its driver died in its last moment
                header |= {"status": "finished", "error": ""}
                write_atomically(self.folder.header, json.dumps(header, indent=1, default=str) + "\n")
            self._remove_parts()
            left = ", ".join(self.told.finished) or "nothing"
            message = f"run {run} is finished already: {left}"
            raise AlreadyFinished(Problem("DT384", message, fixes=("leave --resume out to run it again",)))

    def _remove_parts(self) -> None:
        """Of a run that is finished nobody needs them; its driver may have died before it removed them."""
        from dovetail.data.sinks import SinkSpec, open_sink

        for label, about in (self.told.beginning.get("sinks") or {}).items():
            with suppress(OSError, DovetailError):
                open_sink(
                    SinkSpec(**about["spec"]), self.folder.id, self.folder.path / "parts" / (label or "all")
                ).discard()

    # --- is it still the same?

    def check_again(self, retried: str | None) -> None:
        """A run of what another one set aside goes on with just that."""
        before, run = self.told.beginning.get("again"), self.folder.id
        if before == retried:
            return
        if before:
            message = f"run {run} runs what run {before} set aside"
            fixes = (f"dovetail run --resume {name_for(self.folder.path)}",)
        else:
            message = f"run {run} does not run what another one set aside"
            fixes = (f"dovetail run --resume {name_for(self.folder.path)}",)
        raise ConfigError(Problem("DT388", message, fixes=fixes))

    def check_source(self, now: dict[str, object], *, force: bool) -> list[str]:
        """What changed since, as lines for people; without `force` that is an error."""
        before = self.told.beginning.get("source") or {}
        if not before and not now:
            return []
        from dovetail.data.sources import changes

        found = changes(before, now)
        if found and not force:
            run = self.folder.id
            risk = "--force-resume goes on all the same: rows that moved are read twice or never"
            evidence = (*found, f"{len(self.told.entries)} epochs of it are done")
            fixes = (
                "put the source back as it was",
                f"dovetail run --resume {name_for(self.folder.path)} --force-resume",
                "or run it anew",
            )
            raise ConfigError(Problem("DT386", f"the source of run {run} has changed since ({risk})", evidence, fixes))
        return found

    def check_sinks(self, sinks: dict[str, dict[str, Any]], functions: list[str]) -> None:
        """What is written already was written for these: same paths, same settings, functions at the same leaves."""
        called = self.told.beginning.get("functions") or []
        if called != functions:
            evidence = (f"then a function for: {_leaves(called)}", f"now for: {_leaves(functions)}")
            fixes = ("give the same sinks as at the beginning: sink=...",)
            raise ConfigError(Problem("DT387", f"run {self.folder.id} began with another sink", evidence, fixes))
        before = {label: about["spec"] for label, about in (self.told.beginning.get("sinks") or {}).items()}
        now = json.loads(json.dumps(sinks))  # as it reads in the log
        if before != now:
            evidence = (f"then: {_shown(before)}", f"now: {_shown(now)}")
            fixes = ("name the same sink with the same settings, or run it anew without --resume",)
            raise ConfigError(Problem("DT387", f"run {self.folder.id} began with another sink", evidence, fixes))

    @property
    def units(self) -> list[tuple[str, int]]:
        """With their waves, as whoever wrote to the commit log last had them."""
        return [(str(name), int(wave)) for name, wave in self.told.beginning.get("units") or ()]

    def check_units(self, works: Sequence[Work]) -> bool:
        """Whether what is done can be used by these units. Without a spool it does not matter who they are; a spool,
        or what an earlier run set aside, was numbered for the units that the run had then."""
        entries = self.told.entries.values()
        again = bool(entries) and self.told.beginning.get("again")
        numbered = again or any(entry.spooled or entry.wave for entry in entries)
        if not numbered or self.units == units_of(works):
            return True
        then = sorted(stage for name, _ in self.units for stage in name.split("+"))
        now = sorted(stage for work in works for stage in work.stages)
        if then != now:
            evidence = (f"then: {', '.join(then)}", f"now: {', '.join(now)}")
            message = f"run {self.folder.id} has spooled items for stages that the pipeline does not have now"
            fixes = ("go on with the stages as they were: same names", "or run it anew without --resume")
            raise ConfigError(Problem("DT389", message, evidence, fixes))
        return False

    def plan(self) -> Plan:
        """The one that it had last."""
        return Plan.from_json(self.folder.plan.read_text(encoding="utf-8"))

    # --- what is done

    def done(self, engine: Workers, outputs: Outputs) -> tuple[list[Deliver], list[int]]:
        """What counts, and the numbers of the entries that do not: something of what they tell is gone."""
        lost = [number for number, entry in self.told.entries.items() if not entry.lasting]
        for label, sink in outputs.files.items():
            numbers = [number for number, entry in self.told.entries.items() for _ in entry.outputs.get(label, ())]
            pieces = [piece for entry in self.told.entries.values() for piece in entry.outputs.get(label, ())]
            lost += [number for number, there in zip(numbers, sink.there(pieces), strict=True) if not there]
        delivers = []
        for number, entry in self.told.entries.items():
            deliver = _deliver(entry, engine) if number not in lost else None
            if deliver is None:
                lost.append(number)
            else:
                delivers.append(deliver)
        gone = set(lost)
        if gone:
            self._without_what_came_of(gone, delivers)
        return delivers, sorted(gone)

    def _without_what_came_of(self, lost: set[int], delivers: list[Deliver]) -> None:
        """Of what is lost in one wave, later waves have to be done again too: their input is numbered anew."""
        waves = [self.told.entries[number].wave for number in lost]
        later = [number for number, entry in self.told.entries.items() if entry.wave > min(waves)]
        spools = any(entry.spooled for entry in self.told.entries.values())
        if spools and later:
            lost.update(later)
            delivers[:] = [deliver for deliver in delivers if deliver.wave <= min(waves)]

    def marks(self) -> dict[int, object]:
        return {entry.first: entry.mark for entry in self.told.entries.values() if entry.mark is not None}


def units_of(works: Sequence[Work]) -> list[tuple[str, int]]:
    return [(work.name, work.wave) for work in works]


def _deliver(entry: Entry, engine: Workers) -> Deliver | None:
    """As it was; None: something of its spool is not there any more."""
    spooled: dict[str, list[Segment]] = {}
    for unit, kept in entry.spooled.items():
        segments = [engine.from_keepsake(one) for one in kept]
        if None in segments:
            return None
        spooled[unit] = [segment for segment in segments if segment is not None]
    outputs = {"": [Segment(0, entry.given)]} if entry.given else {}
    found = Deliver(entry.wave, entry.epoch, entry.first, entry.last, outputs, spooled)
    found.aside = [SetAside(str(unit), (NOTHING, 0, 0), "") for unit, _ in entry.aside]
    return found


def _shown(sinks: dict[str, dict[str, Any]]) -> str:
    """Each with the settings that somebody has given."""
    found = []
    for label, spec in sorted(sinks.items()):
        settings = [f"{key}={value!r}" for key, value in spec.items() if key not in ("path", "format") and value]
        found.append(f"{label}: " * bool(label) + " ".join([str(spec["path"]), *settings]))
    return ", ".join(found) or "none"


def _leaves(labels: list[str]) -> str:
    return ", ".join(label or "all leaves" for label in labels) or "none"
