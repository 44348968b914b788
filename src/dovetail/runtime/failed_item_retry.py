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
from dovetail.runtime.run_lock import check_only_owner_writes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.control.payload import Segment
    from dovetail.data.commit_log import CommitLogContents
    from dovetail.observe.run_folder import RunFolder
    from dovetail.runtime.sites import RunEngine
    from dovetail.streaming.settings import UnitSpec

BAD_ROW = "BadRow"
ITEMS_PER_SEGMENT = 64


def has_retryable_items(errors: Path) -> bool:
    """Whether errors.jsonl of a run has an item that a retry can process: rows that cannot be parsed are none."""
    return any(
        ("item" in line or "item_pickle" in line) and not _is_bad_row(line) for line in _read_error_lines(errors)
    )


def _is_bad_row(line: Mapping[str, Any]) -> bool:
    return line.get("error") == BAD_ROW and "place" in line


def _read_error_lines(errors: Path) -> list[dict[str, Any]]:
    try:
        text = errors.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # incomplete line
    return [line for line in found if isinstance(line, dict)]


class FailedItemRetry:
    """The failed items of an earlier run."""

    def __init__(self, what: str | Path, sink: object) -> None:
        """`sink` replaces the sink of the earlier run."""
        self.folder = find_run(str(what))
        check_only_owner_writes(self.folder)
        self._commits = read_commit_log(self.folder.commit_log)
        self.notes: list[str] = []
        """Items that cannot be retried, as messages."""
        self._check()
        self.items = self._load_items()
        self.sink = sink if sink is not None else recorded_sinks(self._commits, exists="append")
        if sink is None and self._commits.header.get("functions"):
            fixes = ("pass it again: sink=the function, or {leaf: ...} for all sinks",)
            message = f"the sink of run {self.folder.id} was a function, which is not stored"
            raise ConfigError(Problem("DT388", message, fixes=fixes))
        if not self.items:
            why = self.notes or ["no item failed"]
            fixes = (f"dovetail errors {run_reference(self.folder.path)}",)
            message = f"run {self.folder.id} has no failed items to retry"
            raise ConfigError(Problem("DT388", message, tuple(why), fixes))

    def _check(self) -> None:
        run = self.folder.id
        if self._commits.header and self._commits.finished is None:
            fix = f"dovetail run --resume {run_reference(self.folder.path)}"
            raise ConfigError(Problem("DT388", f"run {run} is not finished; finish it first", fixes=(fix,)))
        marker = read_json_object(self._marker)
        by = marker.get("by")
        if by and (marker.get("done") or self._other_commits().finished is not None):
            message = f"the failed items of run {run} were already retried by run {by}"
            fix = f"dovetail run --retry-errors {by}"
            raise ConfigError(Problem("DT388", message, fixes=(f"{fix} retries the items that failed again",)))

    def check_not_started(self, resumed: str | None) -> None:
        """Raises if another run has started the same retry and is not finished; `resumed`: the run that is resumed."""
        by = read_json_object(self._marker).get("by")
        if by and by != resumed and self._other_commits().header:
            message = f"run {by} has started to retry the failed items of run {self.folder.id} and is not finished"
            fixes = (f"dovetail run --resume {by}",)
            raise ConfigError(Problem("DT388", message, fixes=fixes))

    def _other_commits(self) -> CommitLogContents:
        """Commit log of the run that started the retry; empty if its folder was removed."""
        return read_commit_log(Path(str(read_json_object(self._marker).get("folder"))) / self.folder.commit_log.name)

    @property
    def _marker(self) -> Path:
        return self.folder.errors.parent / "retried.json"

    def _load_items(self) -> list[tuple[str, tuple[int, ...], Any]]:
        """Unit, key and item of every failed item in a committed epoch. A key can occur several times, because an item
        can arrive by two paths; errors.jsonl can list an item twice if its epoch was computed again."""
        left = Counter(
            (unit, tuple(key or ())) for entry in self._commits.entries.values() for unit, key in entry.failed_items
        )
        found: list[tuple[str, tuple[int, ...], Any]] = []
        bad = 0
        unreadable: list[str] = []
        for line in reversed(_read_error_lines(self.folder.errors)):  # the last entries belong to the committed attempt
            unit, key = str(line.get("unit")), tuple(line.get("key") or ())
            if self._commits.header and not left[unit, key]:
                continue
            kept = "item" in line or "item_pickle" in line
            left[unit, key] -= kept or "place" in line
            if _is_bad_row(line):
                bad += 1
            elif "item" in line:
                found.append((unit, key, line["item"]))
            elif kept:
                try:
                    item = pickle.loads(base64.b64decode(line["item_pickle"]))  # noqa: S301 - the user's own
                    found.append((unit, key, item))
                except Exception as error:  # the class may have changed or moved
                    unreadable.append(f"{type(error).__name__}: {error}")
        self._add_notes(bad, unreadable, sum(count for count in left.values() if count > 0))
        return found[::-1]

    def _add_notes(self, bad: int, unreadable: list[str], lost: int) -> None:
        if bad:
            rows = "1 row" if bad == 1 else f"{bad} rows"
            self.notes.append(f"{rows} could not be parsed: correct the source and start a new run")
        if unreadable:
            self.notes.append(f"{len(unreadable)} items cannot be unpickled: {unreadable[0]}")
        if lost:
            self.notes.append(f"{lost} items were not stored: too large, or not picklable")

    def segments(self, engine: RunEngine, units: Sequence[UnitSpec]) -> dict[str, list[Segment]]:
        """Input of each unit."""
        by_unit: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        for unit, key, item in self.items:
            by_unit.setdefault(_current_unit(unit, units), []).append((key, item))
        found: dict[str, list[Segment]] = {}
        for unit, pairs in by_unit.items():
            pairs.sort(key=lambda pair: pair[0])
            for start in range(0, len(pairs), ITEMS_PER_SEGMENT):
                keys, items = zip(*pairs[start : start + ITEMS_PER_SEGMENT], strict=True)
                segment = engine.store(list(keys), list(items))
                segment.first = keys[0]
                found.setdefault(unit, []).append(segment)
        return found

    def mark_retried(self, by: RunFolder, *, done: bool = False) -> None:
        """Prevents that the same results are added twice."""
        text = json.dumps({"by": by.id, "folder": str(by.path), "done": done})
        write_atomically(self._marker, text + "\n")


def recorded_sinks(commits: CommitLogContents, **changes: Any) -> Any:
    """The file sinks of a run, as `dt.run` takes them; None if there are none."""
    before = commits.header.get("sinks") or {}
    sinks = {label: {**about["spec"], **changes} for label, about in before.items()}
    return sinks.get("") or sinks or None


def _current_unit(name: str, units: Sequence[UnitSpec]) -> str:
    """The current unit that starts with the same stage."""
    for unit in units:
        if unit.name == name or unit.stages[0] == name.split("+")[0]:
            return unit.name
    names = [unit.name for unit in units]
    message = f"items failed in unit {name!r}, which the pipeline does not have now{did_you_mean(name, names)}"
    fixes = ("retry with the original pipeline: same stages, same names, same fuse",)
    raise ConfigError(Problem("DT388", message, (f"units: {', '.join(names)}",), fixes))
