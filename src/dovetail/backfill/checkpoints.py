"""Checkpoints of a fragment beside the table: parts, attempt marks and error files; arithmetic of row ranges."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dovetail.backfill.failed_rows import to_json_line
from dovetail.backfill.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dovetail.backfill.task import FailedRow, FillSpec, RangeTask

PART_PREFIX, ATTEMPT_PREFIX, BROKEN_PREFIX, HANG_PREFIX, FINISHED_PREFIX = "p", "t", "b", "x", "f"
MIN_PARTS_TO_MERGE = 8


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """File with the computed rows [start, stop)."""

    start: int
    stop: int
    size_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{PART_PREFIX}.{self.start}.{self.stop}.{self.size_bytes}"


@dataclass(frozen=True, slots=True, order=True)
class AttemptMark:
    """Mark of rows that a worker of a run started. It is removed at the end, so a remaining mark means a death."""

    start: int
    stop: int
    run: str
    time: int = 1

    @property
    def name(self) -> str:
        return f"{ATTEMPT_PREFIX}.{self.start}.{self.stop}.{self.time}.{self.run}"


@dataclass(frozen=True, slots=True)
class BrokenMark:
    """Mark of rows that may have left their worker broken; they are computed alone by another worker."""

    start: int
    stop: int
    run: str
    replaced: int = 1
    """Workers in succession that were replaced, with no row that passed in between."""

    @property
    def name(self) -> str:
        return f"{BROKEN_PREFIX}.{self.start}.{self.stop}.{self.replaced}.{self.run}"


@dataclass(frozen=True, slots=True)
class HangMark:
    """Mark of a row whose call exceeded its timeout and could not be interrupted."""

    row: int
    run: str

    @property
    def name(self) -> str:
        return f"{HANG_PREFIX}.{self.row}.{self.run}"


@dataclass(slots=True)
class FragmentFiles:
    """Content of the checkpoint folder of a fragment."""

    parts: list[Part] = field(default_factory=list)
    tried: list[AttemptMark] = field(default_factory=list)
    broken: list[BrokenMark] = field(default_factory=list)
    hung: list[HangMark] = field(default_factory=list)
    finished: list[tuple[str, str]] = field(default_factory=list)
    """Complete data files that may not be committed yet, each with the hash of the values its other rows keep."""


def parse_file_names(names: Iterable[str]) -> FragmentFiles:
    """Parse file names; unknown files are ignored."""
    found = FragmentFiles()
    for name in names:
        kind, _, rest = name.partition(".")
        pieces = rest.split(".")
        if kind == FINISHED_PREFIX:
            before, _, name = ("", "", rest) if rest.startswith("dt-") else rest.partition(".")
            found.finished.append((name, before))
        elif kind == PART_PREFIX and len(pieces) == 3 and all(map(str.isdecimal, pieces)):
            found.parts.append(Part(int(pieces[0]), int(pieces[1]), int(pieces[2])))
        elif kind == ATTEMPT_PREFIX and len(pieces) >= 4 and all(map(str.isdecimal, pieces[:3])):
            found.tried.append(AttemptMark(int(pieces[0]), int(pieces[1]), ".".join(pieces[3:]), int(pieces[2])))
        elif kind == BROKEN_PREFIX and len(pieces) >= 4 and all(map(str.isdecimal, pieces[:3])):
            found.broken.append(BrokenMark(int(pieces[0]), int(pieces[1]), ".".join(pieces[3:]), int(pieces[2])))
        elif kind == HANG_PREFIX and len(pieces) >= 2 and pieces[0].isdecimal():
            found.hung.append(HangMark(int(pieces[0]), ".".join(pieces[1:])))
    found.parts.sort()
    return found


def finished_file_name(file: str, before: str = "") -> str:
    return f"{FINISHED_PREFIX}.{before}.{file}" if before else f"{FINISHED_PREFIX}.{file}"


def uncovered_ranges(parts: Iterable[Part], start: int, stop: int) -> list[tuple[int, int]]:
    """Ranges within [start, stop) that no part covers."""
    missing = []
    at = start
    for part in sorted(parts):
        if part.stop <= at:
            continue
        if part.start >= stop:
            break
        if part.start > at:
            missing.append((at, part.start))
        at = max(at, part.stop)
    if at < stop:
        missing.append((at, stop))
    return missing


def covering_parts(parts: Iterable[Part], rows: int) -> list[tuple[Part, int, int]]:
    """Parts that cover [0, rows), each with the rows to use; parts may overlap. Empty if there is a gap."""
    chosen = []
    at = 0
    waiting = sorted(parts)
    while at < rows:
        best = max((part for part in waiting if part.start <= at < part.stop), key=lambda part: part.stop, default=None)
        if best is None:
            return []
        end = min(best.stop, rows)
        chosen.append((best, at, end))
        at = end
    return chosen


def parts_to_merge(parts: Iterable[Part], end: int, most_bytes: int) -> list[Part]:
    """Small adjacent parts up to `end` to merge into one file; empty if there are few."""
    by_stop = {part.stop: part for part in sorted(parts)}
    run: list[Part] = []
    size, at = 0, end
    while at in by_stop:
        part = by_stop[at]
        size += part.size_bytes
        if size > most_bytes or part.start >= at:
            break
        run.append(part)
        at = part.start
    return run[::-1] if len(run) >= MIN_PARTS_TO_MERGE else []


def split_range(start: int, stop: int, pieces: int, least: int) -> list[tuple[int, int]]:
    """Split a range into about equal pieces of at least `rows` rows."""
    rows = stop - start
    pieces = max(1, min(pieces, rows // max(1, least)))
    edges = [start + rows * number // pieces for number in range(pieces + 1)]
    return list(pairwise(edges))


CARRIED_OVER = "before"
"""Infix of error files about rows that failed earlier and that this backfill does not compute."""


class PartMissingError(Exception):
    """A part is missing: its fragment was already written by another worker, or the part was damaged."""


class CheckpointStore:
    """Checkpoint folders of the fragments that a run fills."""

    def __init__(self, spec: FillSpec) -> None:
        self._spec = spec
        self._store = TableStore(spec.uri, spec.storage)

    def _folder(self, task: RangeTask) -> str:
        return f"{parts_folder(self._spec.folder, self._spec.parts)}/{task.checkpoint_key}"

    def scan(self, task: RangeTask) -> FragmentFiles:
        return parse_file_names(self._store.names(self._folder(task)))

    def mark(self, task: RangeTask, mark: AttemptMark | BrokenMark | HangMark) -> None:
        self._store.put(f"{self._folder(task)}/{mark.name}", b"")

    def unmark(self, task: RangeTask, mark: AttemptMark) -> None:
        self._store.delete(f"{self._folder(task)}/{mark.name}")

    def save_failures(self, task: RangeTask, failures: Sequence[FailedRow]) -> None:
        if failures:
            first, last = failures[0].offset, failures[-1].offset
            text = "".join(to_json_line(failure) for failure in failures)
            folder = errors_folder(self._spec.folder, self._spec.parts)
            self._store.put(f"{folder}/{task.key}.{first}.{last + 1}.jsonl", text.encode())

    def has_failures(self, task: RangeTask) -> bool:
        """Whether rows of its fragment failed in any call."""
        names = self._store.names(errors_folder(self._spec.folder, self._spec.parts))
        if any(name.startswith(f"{task.key}.") for name in names):
            return True
        if not self._spec.masked or task.only is not None:
            return False
        before = self._store.names(errors_folder(self._spec.folder, self._spec.identity))
        return any(name.startswith(f"{task.key}.{CARRIED_OVER}.") for name in before)

    def save(
        self, task: RangeTask, start: int, stop: int, batches: Sequence[Any], failures: Sequence[FailedRow]
    ) -> None:
        """Save a part. Errors are written first, because the rows of a part are not computed again."""
        self.save_failures(task, failures)
        if stop > start:
            data = serialize_batches(batches)
            self._store.put(f"{self._folder(task)}/{Part(start, stop, len(data)).name}", data)

    def load(self, task: RangeTask, part: Part) -> list[Any]:
        """Load a part. A damaged one (the machine crashed while writing) is deleted, and its rows are computed
        again."""
        import pyarrow as pa

        path = f"{self._folder(task)}/{part.name}"
        data = self._store.get(path)
        try:
            if data is not None and len(data) == part.size_bytes:
                return deserialize_batches(data)
        except pa.ArrowException:
            pass
        self._store.delete(path)
        raise PartMissingError(f"{part.name} of fragment {task.fragment}")

    def scratch_folder(self, task: RangeTask) -> str:
        """Folder on a local disk for files that are being written; empty in an object store."""
        return self._store.local_folder(self._folder(task))

    def mark_finished(self, task: RangeTask, name: str) -> None:
        """Record a complete data file, so that the next driver finds it if this one dies before the commit."""
        self._store.put(f"{self._folder(task)}/{name}", b"")

    def clean_up(self, task: RangeTask, run: str, reached: int, *, merge: bool) -> None:
        """Remove the marks of a task that ended before row `reached`, and merge small parts."""
        folder = self._folder(task)
        found = parse_file_names(self._store.names(folder))
        marks: list[AttemptMark | BrokenMark | HangMark] = [
            it for it in found.tried if it.run != run or _overlaps(it, task.start, reached)
        ]
        marks += [it for it in found.broken if it.run != run or not uncovered_ranges(found.parts, it.start, it.stop)]
        marks += [it for it in found.hung if it.run != run or not _is_unresolved(it.row, task, found.parts)]
        self._store.delete(*(f"{folder}/{it.name}" for it in marks))
        small = parts_to_merge(found.parts, _last_saved_row(task, found.parts), self._spec.part_bytes) if merge else []
        with suppress(PartMissingError):  # the missing part is computed again when needed
            self._merge(task, small)

    def _merge(self, task: RangeTask, small: Sequence[Part]) -> None:
        folder = self._folder(task)
        if small:
            batches = [batch for part in small for batch in self.load(task, part)]
            self.save(task, small[0].start, small[-1].stop, batches, ())
            self._store.delete(*(f"{folder}/{part.name}" for part in small))


def _overlaps(mark: AttemptMark, start: int, stop: int) -> bool:
    """Whether a mark has rows of [start, stop), which ended normally."""
    return mark.start < stop and mark.stop > start


def _is_unresolved(row: int, task: RangeTask, parts: Sequence[Part]) -> bool:
    """Whether the failure of a hung row is not recorded yet."""
    return not (task.start <= row < task.stop) or not any(part.start <= row < part.stop for part in parts)


def _last_saved_row(task: RangeTask, parts: Sequence[Part]) -> int:
    """End of the rows that parts of this task cover."""
    return max((part.stop for part in parts if task.start < part.stop <= task.stop), default=task.start)


def parts_folder(column: str, identity: str) -> str:
    return f"{column}/parts/{identity}"


def errors_folder(column: str, identity: str) -> str:
    return f"{column}/errors/{identity}"


# --- parts as bytes


def serialize_batches(batches: Sequence[Any]) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def deserialize_batches(data: bytes) -> list[Any]:
    import pyarrow as pa

    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return list(reader)


def slice_batches(batches: Iterable[Any], begin: int, start: int, stop: int) -> Iterator[tuple[Any, int]]:
    """Rows [start, stop) of batches whose first row is `begin`, each batch with the number of its first row."""
    at = begin
    for batch in batches:
        low, high = max(at, start), min(at + batch.num_rows, stop)
        if low < high:
            yield batch.slice(low - at, high - low), low
        at += batch.num_rows


def merge_kept_values(batch: Any, new: Any, old: Any, schema: Any) -> Any:
    """New values where computed, current values elsewhere."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def chosen(given: Any, before: Any) -> Any:
        try:
            return pc.if_else(new, given, before)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # types that Arrow does not support here
            places = pc.if_else(new, pa.array(range(rows)), pa.array(range(rows, 2 * rows)))
            return pa.concat_arrays([given, before]).take(places)

    rows = batch.num_rows
    arrays = [chosen(batch.column(number), old.column(number)) for number in range(len(schema))]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
