"""Tracer (`open_tracer`): samples of rows before and after each operator, written by workers and merged per operator.

`Traced` goes around an operator. Each worker writes the samples that it sees into a part file of its own, one line at a
time, so that a worker that is killed leaves whole lines. `gather` makes one file per operator of them: every row once,
in the order of the source.

    mappers                  {"original_text", "processed_text"} of rows whose text changed
    filters, selectors       the rows that they dropped, filters with their stats
    deduplicators            {"dup1", "dup2"}: a row that is kept, and the first that repeats it; one pair per cluster.
                             (Data-Juicer's `document_deduplicator` takes the largest clusters, its MinHash the first;
                             here it is always the first, in the order of the source.)
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
from typing import Any, Self
from urllib.parse import quote

from dovetail.engines.object_loader import bound_call
from dovetail.engines.unit_executor import _call_setup
from dovetail.engines.worker_context import Worker
from dovetail.pipeline.code_hash import CODE_DEPTH_LIMIT, _describe_code
from dovetail.pipeline.stage import is_async
from dovetail.recipes.operators.base import HASH_FIELD, DatasetOperator, Deduplicator, Filter, Mapper, Row, Selector

PARTS_FOLDER = ".parts"
NODE_MARK_PREFIX = "node-"
MAX_ARRAY_ITEMS = 1000
"""Of larger arrays only the beginning is shown."""

RowKey = tuple[int, ...]


class SampleWriter:
    """What one worker writes of one operator."""

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
        """Of a row of the running call; without an engine, a number that grows."""
        keys = self._worker.item_keys
        if place < len(keys):
            return keys[place]
        self._calls += 1
        return (self._calls,)

    def mark_node(self, node: str) -> None:
        """Leaves a mark, so that it can be told which nodes do not see the folder."""
        if self._folder_exists() and node:
            try:
                (self._folder / f"{NODE_MARK_PREFIX}{quote_name(node)}").touch()
            except OSError:
                return

    def add(self, key: RowKey, sample: Mapping[str, Any]) -> None:
        """Once, however often the row is run here."""
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
            return os.write(self._file, line) == len(line)  # in one piece, whenever we are killed
        except OSError:
            return False

    def _folder_exists(self) -> bool:
        """Whether the folder is there. On another machine a missing one is not made: nobody would find it there."""
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
    """JSON to be read by people. Half of a surrogate pair has no form in UTF-8, but one in JSON."""
    text = json.dumps(_to_jsonable(data), ensure_ascii=False, separators=(", ", ": "))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _to_jsonable(value: Any) -> Any:
    """What JSON can hold of it; of bytes how many they are."""
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
    """As a part of a file's name; no two names are told alike."""
    return quote(name, safe="")


class TracedOperator:
    """An operator that is watched: it is set up, called and torn down as the operator itself, and has all of its
    attributes (to read: what is to be set is set before).

    `folder` is the folder `trace`, which `begin` makes; `name` is the operator's in the name of its file. The first
    `limit` samples that a worker sees are written when they are made. After that a call costs one look at a flag more.
    What goes wrong with a sample (a full disk, a row that has no form) is never the row's fault: it is left out.
    """

    def __new__(cls, operator: Any = None, *_: object, **__: object) -> Self:
        """Of an operator whose calls are awaited, one whose calls are awaited."""
        awaited = cls is TracedOperator and operator is not None and is_async(operator)
        made: Any = object.__new__(_AsyncTracedOperator if awaited else cls)
        return made  # type: ignore[no-any-return]

    def __init__(self, operator: Any, name: str, folder: str, limit: int) -> None:
        self.__setstate__((operator, name, folder, limit, socket.gethostname()))

    def __getstate__(self) -> tuple[Any, str, str, int, str]:
        return self.operator, self.name, self.folder, self.limit, self._host

    def __setstate__(self, state: tuple[Any, str, str, int, str]) -> None:
        self.operator, self.name, self.folder, self.limit, self._host = state
        self._run: Callable[..., Any] = bound_call(self.operator)
        self._samples = SampleWriter(self.name, self.folder, self.limit, self._host)
        whole = getattr(self.operator, "operator", None)
        self._is_barrier = isinstance(whole, DatasetOperator)
        """Whether it is not an operator, but that part of one which is called with all rows."""
        self._observed: Any = whole if self._is_barrier else self.operator
        # an operator that needs all rows is watched in `choose`: its own calls only make hashes
        self._is_done = self.limit <= 0 or (isinstance(self.operator, DatasetOperator) and not self._is_barrier)
        self._drops = not isinstance(self.operator, Mapper)
        self._changes = not isinstance(self.operator, Filter)
        self._text_key = getattr(self.operator, "text_key", "text")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "operator":
            raise AttributeError(name)
        return getattr(self.operator, name)

    def code_key(self) -> str:
        """By what `dovetail.pipeline.code_hash` tells it: the operator, so that what was measured of it counts with and
        without tracing."""
        own = getattr(self.operator, "code_key", None)
        # one less, as within `each`, which most operators are run by
        return str(own()) if callable(own) else _describe_code(self.operator, CODE_DEPTH_LIMIT - 1)

    def setup(self, worker: Worker) -> Any:
        """What comes back is to be awaited if that of the operator is."""
        self._samples.mark_node(worker.node)
        inner = getattr(self.operator, "setup", None)
        return _call_setup(inner, worker) if callable(inner) else None

    def teardown(self) -> Any:
        self._samples.close()
        inner = getattr(self.operator, "teardown", None)
        return inner() if callable(inner) else None

    # --- row by row

    def __call__(self, item: Any) -> Any:
        if self._is_done:
            return self._run(item)
        if type(item) is dict:
            text = item.get(self._text_key) if self._changes else None
            result = self._run(item)
            if result is item and (not self._changes or item.get(self._text_key) == text):
                return result  # nothing to show, as of most rows
            return self._after([(item, text)], result)
        if self._is_barrier:
            return self.process_rows(item)
        before = self._before(item)
        return self._after(before, self._run(item))

    def _before(self, item: Any) -> list[tuple[Any, Any]]:
        """The rows of a call with their texts: both may be changed in place, or taken out of the list."""
        rows = item if isinstance(item, list) else [item]
        if not self._changes:
            return [(row, None) for row in rows]
        key = self._text_key
        return [(row, row.get(key) if isinstance(row, dict) else None) for row in rows]

    def _after(self, before: list[tuple[Any, Any]], result: Any) -> Any:
        """The result, which is used up if it is an iterator, and then another one."""
        given = result
        if hasattr(type(result), "__next__"):
            result = list(result)
            given = iter(result)
        try:
            if isinstance(result, list):
                self._several(before, result)
            else:
                self._one(before[0], 0, result)
        except Exception:  # whatever a user's row does when it is looked at
            self._is_done = True
        self._is_done = self._is_done or self._samples.is_full
        return given

    def _several(self, before: list[tuple[Any, Any]], results: list[Any]) -> None:
        if len(before) == 1 and len(results) != 1:
            if results:
                for number, result in enumerate(results):
                    self._one(before[0], 0, result, number)
            else:
                self._one(before[0], 0, None)
        elif len(before) == len(results):
            for place, (one, result) in enumerate(zip(before, results, strict=True)):
                self._one(one, place, result)
        else:
            kept = {id(result) for result in results}
            for place, one in enumerate(before):
                self._one(one, place, one[0] if id(one[0]) in kept else None)

    def _one(self, before: tuple[Any, Any], place: int, result: Any, *more: int) -> None:
        row, text = before
        if result is None:
            if self._drops:
                self._samples.add(self._samples.key(place), row)
        elif self._changes and isinstance(result, dict) and text is not None:
            processed = result.get(self._text_key)
            if processed != text:
                sample = {"original_text": text, "processed_text": processed}
                self._samples.add((*self._samples.key(place), *more), sample)

    # --- all rows at once

    def process_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        operator = self._observed
        if isinstance(operator, Deduplicator):
            return self._observe_method("originals", _DuplicatePairs(self._samples, operator.originals), rows)
        if isinstance(operator, Selector):
            return self._observe_method("numbers", _DroppedRows(self._samples, operator.select_rows), rows)
        chosen: Iterator[Row] = operator.process_rows(rows)
        return chosen

    def _observe_method(self, method: str, watch: _DuplicatePairs | _DroppedRows, rows: Iterable[Row]) -> Iterator[Row]:
        """An attribute of this very object: the operator's `choose` finds it in place of its method."""
        setattr(self._observed, method, watch.find)
        try:
            yield from self._observed.process_rows(_ObservedRows(rows, watch.on_row))
        finally:
            delattr(self._observed, method)


class _AsyncTracedOperator(TracedOperator):
    """The same, of an operator whose calls are awaited."""

    async def __call__(self, item: Any) -> Any:
        if self._is_done:
            return await self._run(item)
        before = self._before(item)
        return self._after(before, await self._run(item))


class _ObservedRows(Sequence[Row]):
    """Rows that are shown to somebody on their way."""

    def __init__(self, rows: Any, saw: Callable[[int, Row], None]) -> None:
        self._rows, self._saw = rows, saw

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(self._rows):
            self._saw(number, row)
            yield row

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


class _DuplicatePairs:
    """Which rows repeat which: known after the first pass, shown in the second."""

    def __init__(self, samples: SampleWriter, originals: Callable[[Iterable[Any]], Sequence[int]]) -> None:
        self._samples, self._originals = samples, originals
        self._repeated: dict[int, int] = {}
        """The second row of a cluster -> its first."""
        self._firsts: dict[int, Row] = {}

    def find(self, hashes: Iterable[Any]) -> Sequence[int]:
        originals = self._originals(hashes)
        firsts: dict[int, Row] = {}
        for number, original in enumerate(originals):
            if original != number and original not in firsts:
                firsts[original] = {}
                self._repeated[number] = original
                if len(firsts) >= self._samples.limit:
                    break
        self._firsts = firsts
        return originals

    def on_row(self, number: int, row: Row) -> None:
        if number in self._firsts:
            self._firsts[number] = _without_hash(row)
        elif number in self._repeated:
            pair = {"dup1": self._firsts[self._repeated.pop(number)], "dup2": _without_hash(row)}
            self._samples.add((number,), pair)


class _DroppedRows:
    """Which rows a selector left out."""

    def __init__(self, samples: SampleWriter, numbers: Callable[[Iterable[Row]], Sequence[int]]) -> None:
        self._samples, self._numbers = samples, numbers
        self._kept = bytearray()
        self._known = False

    def find(self, rows: Iterable[Row]) -> Sequence[int]:
        numbers = self._numbers(rows)
        self._kept = bytearray(max(numbers, default=-1) + 1)
        for number in numbers:
            self._kept[number] = 1
        self._known = True
        return numbers

    def on_row(self, number: int, row: Row) -> None:
        if self._known and not self._samples.is_full and not (number < len(self._kept) and self._kept[number]):
            self._samples.add((number,), row)


def _without_hash(row: Row) -> Row:
    return {field: value for field, value in row.items() if field != HASH_FIELD}


# --- before and after the run


def prepare_trace_folder(folder: str) -> None:
    """Makes the folder `trace`, and takes away what an earlier run left in it. Not for a run that is resumed."""
    place = Path(folder)
    (place / PARTS_FOLDER).mkdir(parents=True, exist_ok=True)
    for old in (*place.glob("sample_trace-*.jsonl"), *(place / PARTS_FOLDER).iterdir()):
        old.unlink(missing_ok=True)


def merge_samples(
    folder: str, names: Sequence[str], limit: int, *, run_folder: str | Path = "", add: bool = False
) -> list[str]:
    """Makes `sample_trace-<name>.jsonl` of what workers wrote into `folder`, and removes that.

    Each has the first `limit` samples in the order of the source, or all there are; a row that was run again after a
    fault counts once. An operator without any has no file. `run_folder`: that of the run, to tell which nodes did not
    see the folder; `add`: of a run that is resumed, what is new goes behind what is there. Returns what a person should
    know, a line each.
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
    """Which nodes had workers of these operators, and left no mark."""
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
    return [f"traces lack the rows of {shown}: {place} is not seen there; a work_dir on a shared disk would be"]


def _remove_folder(parts: Path) -> None:
    import shutil

    shutil.rmtree(parts, ignore_errors=True)
