"""Retry of the failed items of an earlier run, in front of the unit that failed and into the same sink."""

from __future__ import annotations

import base64
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.data.commit_log import read_commit_log
from dovetail.errors import ConfigError, Problem, did_you_mean
from dovetail.observe.run_folder import find_run, read_json_object, run_reference, write_atomically
from dovetail.runtime.run_lock import check_owner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.payload import Segment
    from dovetail.data.commit_log import CommitLogContents
    from dovetail.observe.run_folder import RunFolder
    from dovetail.runtime.sites import RunEngine
    from dovetail.streaming.settings import UnitSpec

BAD_ROW = "BadRow"
ITEMS_PER_SEGMENT = 64


class FailedItemRetry:
    """What an earlier run set aside."""

    def __init__(self, what: str | Path, sink: object) -> None:
        """`sink`: instead of the one that the run had."""
        self.folder = find_run(str(what))
        check_owner(self.folder)
        self._commits = read_commit_log(self.folder.commit_log)
        self.notes: list[str] = []
        """What cannot be run again, as lines for people."""
        self._check()
        self.items = self._load_items()
        self.sink = sink if sink is not None else recorded_sinks(self._commits, exists="append")
        if sink is None and self._commits.header.get("functions"):
            fixes = ("give it again: sink=the function, or {leaf: ...} for all that it had",)
            message = f"results of run {self.folder.id} went to a function, and nobody knows which"
            raise ConfigError(Problem("DT388", message, fixes=fixes))
        if not self.items:
            why = self.notes or ["it set nothing aside"]
            fixes = (f"dovetail status {run_reference(self.folder.path)} shows what it set aside",)
            message = f"there is nothing of run {self.folder.id} to run again"
            raise ConfigError(Problem("DT388", message, tuple(why), fixes))

    def _check(self) -> None:
        run = self.folder.id
        if self._commits.header and self._commits.finished is None:
            fix = f"dovetail run --resume {run_reference(self.folder.path)}"
            raise ConfigError(Problem("DT388", f"run {run} has not come to its end: finish it first", fixes=(fix,)))
        marker = read_json_object(self._marker)
        by = marker.get("by")
        if by and (marker.get("done") or self._other_commits().finished is not None):
            message = f"what run {run} set aside was run again already, by run {by}"
            fix = f"dovetail run --retry-errors {by}"
            raise ConfigError(Problem("DT388", message, fixes=(f"{fix} runs what that one set aside",)))

    def check_not_started(self, goes_on: str | None) -> None:
        """Somebody else may have begun with it, and not come to the end; `goes_on`: the run that is resumed."""
        by = read_json_object(self._marker).get("by")
        if by and by != goes_on and self._other_commits().header:
            message = f"run {by} has begun to run what run {self.folder.id} set aside, and has not come to its end"
            fixes = (f"dovetail run --resume {by}",)
            raise ConfigError(Problem("DT388", message, fixes=fixes))

    def _other_commits(self) -> CommitLogContents:
        """Of who began with it; empty if that is gone."""
        return read_commit_log(Path(str(read_json_object(self._marker).get("folder"))) / self.folder.commit_log.name)

    @property
    def _marker(self) -> Path:
        return self.folder.errors.parent / "retried.json"

    def _load_items(self) -> list[tuple[str, tuple[int, ...], Any]]:
        """Unit, key and item: as many of a key as were set aside (an item may have come by two ways), and only those
        whose epochs count. Lines of an epoch that was computed again tell the same items once more."""
        left = Counter(
            (unit, tuple(key or ())) for entry in self._commits.entries.values() for unit, key in entry.aside
        )
        found: list[tuple[str, tuple[int, ...], Any]] = []
        bad = 0
        unreadable: list[str] = []
        for line in reversed(self._error_lines()):  # the last ones are of the time that counts
            unit, key = str(line.get("unit")), tuple(line.get("key") or ())
            if self._commits.header and not left[unit, key]:
                continue
            kept = "item" in line or "item_pickle" in line
            left[unit, key] -= kept or "place" in line
            if line.get("error") == BAD_ROW and "place" in line:
                bad += 1
            elif "item" in line:
                found.append((unit, key, line["item"]))
            elif kept:
                try:
                    item = pickle.loads(base64.b64decode(line["item_pickle"]))  # noqa: S301 - the user's own
                    found.append((unit, key, item))
                except Exception as error:  # whatever became of their classes
                    unreadable.append(f"{type(error).__name__}: {error}")
        self._add_notes(bad, unreadable, sum(count for count in left.values() if count > 0))
        return found[::-1]

    def _add_notes(self, bad: int, unreadable: list[str], lost: int) -> None:
        if bad:
            rows = "1 row" if bad == 1 else f"{bad} rows"
            self.notes.append(f"{rows} that could not be parsed: mend the source, and run it anew")
        if unreadable:
            self.notes.append(f"{len(unreadable)} items cannot be unpickled here any more: {unreadable[0]}")
        if lost:
            self.notes.append(f"{lost} items are not kept: they were too large, or could not be pickled")

    def _error_lines(self) -> list[dict[str, Any]]:
        try:
            text = self.folder.errors.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        found = []
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # torn
        return [line for line in found if isinstance(line, dict)]

    def segments(self, workers: RunEngine, works: Sequence[UnitSpec]) -> dict[str, list[Segment]]:
        """Unit -> its input."""
        by_unit: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        for unit, key, item in self.items:
            by_unit.setdefault(_current_unit(unit, works), []).append((key, item))
        found: dict[str, list[Segment]] = {}
        for unit, pairs in by_unit.items():
            pairs.sort(key=lambda pair: pair[0])
            for start in range(0, len(pairs), ITEMS_PER_SEGMENT):
                keys, items = zip(*pairs[start : start + ITEMS_PER_SEGMENT], strict=True)
                segment = workers.store(list(keys), list(items))
                segment.first = keys[0]
                found.setdefault(unit, []).append(segment)
        return found

    def mark_retried(self, by: RunFolder, *, done: bool = False) -> None:
        """So that nobody adds the same results twice."""
        text = json.dumps({"by": by.id, "folder": str(by.path), "done": done})
        write_atomically(self._marker, text + "\n")


def recorded_sinks(told: CommitLogContents, **changes: Any) -> Any:
    """The files that a run writes, as `dt.run` takes them; None: it writes none."""
    before = told.header.get("sinks") or {}
    sinks = {label: {**about["spec"], **changes} for label, about in before.items()}
    return sinks.get("") or sinks or None


def _current_unit(name: str, works: Sequence[UnitSpec]) -> str:
    """The unit of today that begins with the same stage."""
    for work in works:
        if work.name == name or work.stages[0] == name.split("+")[0]:
            return work.name
    names = [work.name for work in works]
    message = f"items were set aside by {name!r}, and the pipeline has no such unit now{did_you_mean(name, names)}"
    fixes = ("run them with the pipeline as it was: same stages, same names, same fuse",)
    raise ConfigError(Problem("DT388", message, (f"its units are: {', '.join(names)}",), fixes))
