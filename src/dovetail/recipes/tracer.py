"""Tracer (`open_tracer`): samples of rows before and after each operator, written by workers and merged per operator.

`trace_run` wraps what a stage runs. Each worker writes its samples to a part file of its own, one line per write, so
that a killed worker leaves complete lines. `merge_samples` makes one file per operator from them: every row once, in
the order of the source.

    mappers                  {"original_text", "processed_text"} of rows whose text changed
    filters, selectors       the rows that they dropped, filters with their stats
    deduplicators            {"dup1", "dup2"}: a row that is kept, and its first duplicate; one pair per cluster.
                             (Data-Juicer's `document_deduplicator` takes the largest clusters, its MinHash the first;
                             Dovetail always takes the first, in the order of the source.)
    groupers                 nothing: all rows are in the groups. (Data-Juicer compares rows with groups, and so shows
                             the first rows as if they had been dropped.)
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from dovetail.engines.object_loader import bound_call
from dovetail.engines.worker_context import Worker
from dovetail.pipeline.stage_function import is_async
from dovetail.recipes.operators.base import HASH_FIELD, Deduplicator, Filter, Mapper, Row, Selector
from dovetail.recipes.stage_wrappers import BarrierStage, RunWrapper

PARTS_FOLDER = ".parts"
NODE_MARK_PREFIX = "node-"
MAX_ARRAY_ITEMS = 1000
"""Larger arrays, and texts of unknown objects, are cut to this length."""

RowKey = tuple[int, ...]


class SampleWriter:
    """Writer of one worker's samples of one operator. Thread safe."""

    def __init__(self, name: str, folder: str, limit: int, host: str) -> None:
        self.limit = limit
        self.is_full = limit <= 0
        self._name, self._folder, self._host = name, Path(folder) / PARTS_FOLDER, host
        self._file: int | None = None
        self._keys: set[RowKey] = set()
        self._lock = Lock()
        self._worker = Worker(0, "")
        self._calls = 0

    def key(self, place: int) -> RowKey:
        """Key of a row of the running call; outside an engine, a counter."""
        keys = self._worker.item_keys
        if place < len(keys):
            return keys[place]
        self._calls += 1
        return (self._calls,)

    def mark_node(self, node: str) -> None:
        """Leave a file that shows that this node can write to the folder."""
        if self._folder_exists() and node:
            try:
                (self._folder / f"{NODE_MARK_PREFIX}{quote_name(node)}").touch()
            except OSError:
                return

    def add(self, key: RowKey, sample: Mapping[str, Any]) -> None:
        """Write a sample, unless this row has one: a row may run more than once after a failure."""
        with self._lock:
            if self.is_full or key in self._keys:
                return
            line = to_json_line({"key": key, "sample": sample})
            if not self._write(line):
                self.is_full = True
                return
            self._keys.add(key)
            self.is_full = len(self._keys) >= self.limit

    def _write(self, line: bytes) -> bool:
        try:
            if self._file is None:
                if not self._folder_exists():
                    return False
                path = self._folder / f"{quote_name(self._name)}.{os.urandom(8).hex()}.part"
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            return os.write(self._file, line) == len(line)  # one write, so that a kill leaves complete lines
        except OSError:
            return False

    def _folder_exists(self) -> bool:
        """Create the folder on the driver's machine only: on another machine the driver would not find it."""
        try:
            if socket.gethostname() == self._host:
                self._folder.mkdir(parents=True, exist_ok=True)
            return self._folder.is_dir()
        except OSError:
            return False

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def to_json_line(data: Mapping[str, Any]) -> bytes:
    """A line of JSON in UTF-8; lone surrogates, which UTF-8 cannot hold, become escapes."""
    text = json.dumps(_to_jsonable(data), ensure_ascii=False, separators=(", ", ": "))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _to_jsonable(value: Any) -> Any:
    """The value as JSON can hold it; bytes become their length."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, Mapping):
        return {str(key): _to_jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_jsonable(inner) for inner in value]
    if hasattr(value, "tolist") and getattr(value, "size", MAX_ARRAY_ITEMS + 1) <= MAX_ARRAY_ITEMS:
        return _to_jsonable(value.tolist())
    return str(value)[:MAX_ARRAY_ITEMS]


def quote_name(name: str) -> str:
    """The name as part of a file name; different names stay different."""
    return quote(name, safe="")


# --- wrappers


def trace_run(
    run: Callable[..., Any], name: str, folder: str, limit: int
) -> TracedOperator | AsyncTracedOperator | TracedBarrier:
    """Wrap what a stage runs, so that each worker writes its first `limit` samples to `folder`.

    `folder` is created by `prepare_trace_folder`; `name` is part of the file names.
    """
    if isinstance(run, BarrierStage):
        return TracedBarrier(run, name, folder, limit)
    return AsyncTracedOperator(run, name, folder, limit) if is_async(run) else TracedOperator(run, name, folder, limit)


class TracedRun(RunWrapper):
    """Base of the tracing wrappers. Pickles without its open file.

    Has the attributes of the wrapped object, and its identity for profiles: rates measured with and without tracing are
    the same. An error while a sample is written (a full disk, a row without a JSON form) never fails the row: the
    sample is left out.
    """

    def __init__(self, run: Callable[..., Any], name: str, folder: str, limit: int, host: str = "") -> None:
        super().__init__(run)
        self._arguments = (run, name, folder, limit, host or socket.gethostname())
        self._samples = SampleWriter(*self._arguments[1:])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "run":
            raise AttributeError(name)
        return getattr(self.run, name)

    def hashed_as(self) -> object:
        return self.run

    def setup(self, worker: Worker) -> Any:
        self._samples.mark_node(worker.node)
        return super().setup(worker)

    def teardown(self) -> Any:
        self._samples.close()
        return super().teardown()


class TracedOperator(TracedRun):
    """An operator that gets one row, or a list of rows. With all its samples, a call costs one more test of a flag."""

    def __init__(self, run: Callable[..., Any], name: str, folder: str, limit: int, host: str = "") -> None:
        super().__init__(run, name, folder, limit, host)
        self._call: Callable[..., Any] = bound_call(run)
        self._is_done = limit <= 0
        self._drops = not isinstance(run, Mapper)
        self._changes = not isinstance(run, Filter)
        self._text_key = getattr(run, "text_key", "text")

    def __call__(self, item: Any) -> Any:
        if self._is_done:
            return self._call(item)
        if type(item) is dict:
            text = item.get(self._text_key) if self._changes else None
            result = self._call(item)
            if result is item and (not self._changes or item.get(self._text_key) == text):
                return result  # no sample, as for most rows
            return self._add_samples([(item, text)], result)
        before = self._before(item)
        return self._add_samples(before, self._call(item))

    def _before(self, item: Any) -> list[tuple[Any, Any]]:
        """The rows of a call with their texts; kept, because the operator may change both in place."""
        rows = item if isinstance(item, list) else [item]
        if not self._changes:
            return [(row, None) for row in rows]
        key = self._text_key
        return [(row, row.get(key) if isinstance(row, dict) else None) for row in rows]

    def _add_samples(self, before: list[tuple[Any, Any]], result: Any) -> Any:
        """Returns the result; an iterator is replaced by one over the same rows."""
        returned = result
        if hasattr(type(result), "__next__"):
            result = list(result)
            returned = iter(result)
        try:
            if isinstance(result, list):
                self._add_list(before, result)
            else:
                self._add_row(before[0], 0, result)
        except Exception:  # a user's row may raise anything when it is read
            self._is_done = True
        self._is_done = self._is_done or self._samples.is_full
        return returned

    def _add_list(self, before: list[tuple[Any, Any]], results: list[Any]) -> None:
        if len(before) == 1 and len(results) != 1:
            if results:
                for number, result in enumerate(results):
                    self._add_row(before[0], 0, result, number)
            else:
                self._add_row(before[0], 0, None)
        elif len(before) == len(results):
            for place, (one, result) in enumerate(zip(before, results, strict=True)):
                self._add_row(one, place, result)
        else:
            kept = {id(result) for result in results}
            for place, one in enumerate(before):
                self._add_row(one, place, one[0] if id(one[0]) in kept else None)

    def _add_row(self, before: tuple[Any, Any], place: int, result: Any, *more: int) -> None:
        row, text = before
        if result is None:
            if self._drops:
                self._samples.add(self._samples.key(place), row)
        elif self._changes and isinstance(result, dict) and text is not None:
            processed = result.get(self._text_key)
            if processed != text:
                sample = {"original_text": text, "processed_text": processed}
                self._samples.add((*self._samples.key(place), *more), sample)


class AsyncTracedOperator(TracedOperator):
    """An operator with an async `__call__`."""

    async def __call__(self, item: Any) -> Any:
        if self._is_done:
            return await self._call(item)
        before = self._before(item)
        return self._add_samples(before, await self._call(item))


class TracedBarrier(TracedRun):
    """The barrier of a deduplicator or a selector. Other barriers, and operators with their own `process_rows`, run
    without samples."""

    run: BarrierStage

    def __call__(self, rows: Iterable[Row]) -> Iterator[Row]:
        operator = self.run.operator
        method = type(operator).process_rows
        if isinstance(operator, Deduplicator) and method is Deduplicator.process_rows:
            originals = operator.find_originals(rows)
            pairs = _DuplicatePairs(self._samples, originals)
            return operator.emit_originals(_ObservedRows(rows, pairs.on_row), originals)
        if isinstance(operator, Selector) and method is Selector.process_rows:
            selected = operator.select_rows(rows)
            dropped = _DroppedRows(self._samples, selected)
            return operator.emit_selected(_ObservedRows(rows, dropped.on_row), selected)
        return self.run(rows)


class _ObservedRows(Sequence[Row]):
    """Rows that are shown to a function while they are iterated."""

    def __init__(self, rows: Any, on_row: Callable[[int, Row], None]) -> None:
        self._rows, self._on_row = rows, on_row

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(self._rows):
            self._on_row(number, row)
            yield row

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


class _DuplicatePairs:
    """The first two rows of each cluster of duplicates."""

    def __init__(self, samples: SampleWriter, originals: Sequence[int]) -> None:
        self._samples = samples
        self._original_of: dict[int, int] = {}
        """The second row of a cluster -> its first."""
        self._firsts: dict[int, Row] = {}
        for number, original in enumerate(originals):
            if len(self._firsts) >= samples.limit:
                break
            if original != number and original not in self._firsts:
                self._firsts[original] = {}
                self._original_of[number] = original

    def on_row(self, number: int, row: Row) -> None:
        if number in self._firsts:
            self._firsts[number] = _without_hash(row)
        elif number in self._original_of:
            pair = {"dup1": self._firsts[self._original_of.pop(number)], "dup2": _without_hash(row)}
            self._samples.add((number,), pair)


class _DroppedRows:
    """Rows that a selector did not select."""

    def __init__(self, samples: SampleWriter, selected: Sequence[int]) -> None:
        self._samples = samples
        self._kept = bytearray(max(selected, default=-1) + 1)
        for number in selected:
            self._kept[number] = 1

    def on_row(self, number: int, row: Row) -> None:
        if not self._samples.is_full and not (number < len(self._kept) and self._kept[number]):
            self._samples.add((number,), row)


def _without_hash(row: Row) -> Row:
    return {field: value for field, value in row.items() if field != HASH_FIELD}


# --- before and after the run


def prepare_trace_folder(folder: str) -> None:
    """Create the folder `trace` and remove the samples of an earlier run. Not for a run that is resumed."""
    place = Path(folder)
    (place / PARTS_FOLDER).mkdir(parents=True, exist_ok=True)
    for old in (*place.glob("sample_trace-*.jsonl"), *(place / PARTS_FOLDER).iterdir()):
        old.unlink(missing_ok=True)


def merge_samples(
    folder: str, names: Sequence[str], limit: int, *, run_folder: str | Path = "", add: bool = False
) -> list[str]:
    """Merge the part files of `folder` into `sample_trace-<name>.jsonl`, and remove them.

    Each file has the first `limit` samples in the order of the source; a row that ran more than once counts once. An
    operator without samples has no file. With `add`, for a resumed run, new samples follow the existing ones.
    Returns notes for the user: the nodes of the run in `run_folder` that could not write to the folder.
    """
    from dovetail.observe.journal import read_json_lines
    from dovetail.observe.run_folder import write_atomically

    place = Path(folder)
    parts = sorted((place / PARTS_FOLDER).glob("*.part"))
    for name in dict.fromkeys(names):
        target = place / f"sample_trace-{quote_name(name)}.jsonl"
        found: dict[RowKey, Any] = {}
        for part in parts:
            if part.name.rsplit(".", 2)[0] == quote_name(name):
                found = {**dict(_read_samples(read_json_lines(part))), **found}
        before = read_json_lines(target) if add else []
        new = [sample for _, sample in sorted(found.items(), key=lambda pair: pair[0]) if sample not in before]
        if new or before:
            lines = [to_json_line(sample).decode() for sample in (*before, *new)[:limit]]
            write_atomically(target, "".join(lines))
    notes = _unreachable_node_notes(place, names, Path(run_folder)) if run_folder else []
    _remove_folder(place / PARTS_FOLDER)
    return notes


def _read_samples(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[RowKey, Any]]:
    for line in lines:
        key, sample = line.get("key"), line.get("sample")
        if isinstance(key, list) and all(isinstance(number, int) for number in key) and isinstance(sample, dict):
            yield tuple(key), sample


def _unreachable_node_notes(place: Path, names: Sequence[str], run_folder: Path) -> list[str]:
    """Nodes that ran these operators and left no mark in the folder."""
    from dovetail.observe.history import RunHistory

    ran: set[str] = set()
    for life in RunHistory.load(run_folder).worker_lifetimes.values():
        stages = life.unit.split("+")
        if life.ready is not None and any(stage.startswith(name) for stage in stages for name in names):
            ran |= {life.node, *life.nodes} - {""}
    lost = sorted(node for node in ran if not (place / PARTS_FOLDER / f"{NODE_MARK_PREFIX}{quote_name(node)}").exists())
    if not lost:
        return []
    shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    return [f"traces lack rows of {shown}: {place} does not exist there; use a work_dir on a shared file system"]


def _remove_folder(parts: Path) -> None:
    import shutil

    shutil.rmtree(parts, ignore_errors=True)
