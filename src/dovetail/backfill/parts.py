"""What of a fragment lies beside the table before it is committed? Parts, marks, and rows that were set aside."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dovetail.backfill.failures import as_line
from dovetail.backfill.ranges import Part, found_in, to_merge
from dovetail.backfill.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dovetail.backfill.job import FailedRow, FillJob, Task
    from dovetail.backfill.ranges import Found, Hung, Tried


BEFORE = "before"
"""In the name of a record of rows that failed earlier, and that this backfill does not compute."""


class Gone(Exception):
    """A part is not there any more: somebody has written its fragment already, or it was damaged."""


class PartStore:
    """The folder of each fragment."""

    def __init__(self, job: FillJob) -> None:
        self._job = job
        self._store = Store(job.uri, job.storage)

    def _folder(self, task: Task) -> str:
        return f"{parts_folder(self._job.folder, self._job.parts)}/{task.place}"

    def look(self, task: Task) -> Found:
        return found_in(self._store.names(self._folder(task)))

    def mark(self, task: Task, mark: Tried | Hung) -> None:
        self._store.put(f"{self._folder(task)}/{mark.name}", b"")

    def unmark(self, task: Task, mark: Tried) -> None:
        self._store.delete(f"{self._folder(task)}/{mark.name}")

    def set_aside(self, task: Task, failures: Sequence[FailedRow]) -> None:
        if failures:
            first, last = failures[0].offset, failures[-1].offset
            text = "".join(as_line(failure) for failure in failures)
            folder = errors_folder(self._job.folder, self._job.parts)
            self._store.put(f"{folder}/{task.key}.{first}.{last + 1}.jsonl", text.encode())

    def has_failures(self, task: Task) -> bool:
        """Whether rows of its fragment were set aside, by whomever."""
        names = self._store.names(errors_folder(self._job.folder, self._job.parts))
        if any(name.startswith(f"{task.key}.") for name in names):
            return True
        if not self._job.masked or task.only is not None:
            return False
        before = self._store.names(errors_folder(self._job.folder, self._job.identity))
        return any(name.startswith(f"{task.key}.{BEFORE}.") for name in before)

    def save(self, task: Task, start: int, stop: int, batches: Sequence[Any], failures: Sequence[FailedRow]) -> None:
        """The errors first: rows of a part are not computed again."""
        self.set_aside(task, failures)
        if stop > start:
            data = packed(batches)
            self._store.put(f"{self._folder(task)}/{Part(start, stop, len(data)).name}", data)

    def load(self, task: Task, part: Part) -> list[Any]:
        """One that is damaged (the machine died while it was written) is removed: its rows are computed again."""
        import pyarrow as pa

        path = f"{self._folder(task)}/{part.name}"
        data = self._store.get(path)
        try:
            if data is not None and len(data) == part.size_bytes:
                return unpacked(data)
        except pa.ArrowException:
            pass
        self._store.delete(path)
        raise Gone(f"{part.name} of fragment {task.fragment}")

    def finished(self, task: Task, name: str) -> None:
        """A data file is whole; if the driver dies before it is committed, the next one finds it."""
        self._store.put(f"{self._folder(task)}/{name}", b"")

    def tidy(self, task: Task, run: str, *, merge: bool) -> None:
        """Removes the marks of a task that came to its end, and makes one part of many small ones."""
        folder = self._folder(task)
        found = found_in(self._store.names(folder))
        marks: list[Tried | Hung] = [it for it in found.tried if it.run != run or _inside(it, task)]
        marks += [it for it in found.hung if it.run != run or not _is_open(it.row, task, found.parts)]
        self._store.delete(*(f"{folder}/{it.name}" for it in marks))
        small = to_merge(found.parts, _end_of(task, found.parts), self._job.part_bytes) if merge else []
        with suppress(Gone):  # whoever needs that part computes it again
            self._merge(task, small)

    def _merge(self, task: Task, small: Sequence[Part]) -> None:
        folder = self._folder(task)
        if small:
            batches = [batch for part in small for batch in self.load(task, part)]
            self.save(task, small[0].start, small[-1].stop, batches, ())
            self._store.delete(*(f"{folder}/{part.name}" for part in small))


def _inside(mark: Tried, task: Task) -> bool:
    """Whether a mark is this task's, which has come to an end without dying."""
    return mark.start < task.stop and mark.stop > task.start


def _is_open(row: int, task: Task, parts: Sequence[Part]) -> bool:
    """Whether a row that hung has not been settled yet."""
    return not (task.start <= row < task.stop) or not any(part.start <= row < part.stop for part in parts)


def _end_of(task: Task, parts: Sequence[Part]) -> int:
    """Up to where parts of this task reach."""
    return max((part.stop for part in parts if task.start < part.stop <= task.stop), default=task.start)


def parts_folder(column: str, identity: str) -> str:
    return f"{column}/parts/{identity}"


def errors_folder(column: str, identity: str) -> str:
    return f"{column}/errors/{identity}"


# --- parts as bytes


def packed(batches: Sequence[Any]) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def unpacked(data: bytes) -> list[Any]:
    import pyarrow as pa

    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return list(reader)


def joined(batches: Iterable[Any], begin: int, start: int, stop: int) -> Iterator[tuple[Any, int]]:
    """Of batches whose first row is `begin` the rows [start, stop), each batch with the number of its first row."""
    at = begin
    for batch in batches:
        low, high = max(at, start), min(at + batch.num_rows, stop)
        if low < high:
            yield batch.slice(low - at, high - low), low
        at += batch.num_rows


def masked_with(batch: Any, new: Any, old: Any, schema: Any) -> Any:
    """New values where there are some, and else what was there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def chosen(given: Any, before: Any) -> Any:
        try:
            return pc.if_else(new, given, before)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # of types that Arrow has no such function for
            places = pc.if_else(new, pa.array(range(rows)), pa.array(range(rows, 2 * rows)))
            return pa.concat_arrays([given, before]).take(places)

    rows = batch.num_rows
    arrays = [chosen(batch.column(number), old.column(number)) for number in range(len(schema))]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
