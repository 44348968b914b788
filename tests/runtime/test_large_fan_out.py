"""A call that returns very many results: memory of the worker and of the driver, and exactly-once delivery."""

from __future__ import annotations

import json
import resource
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.engines import result_stream
from runtime.aids import run_of
from runtime.kills import Killed, make_rows
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

ROWS = 5
FAN_OUT = 2_000
RESULTS = [1_000_000 * row + number for row in range(ROWS) for number in range(FAN_OUT)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls store their results in many pieces."""
    monkeypatch.setattr(result_stream, "MAX_PIECE_ITEMS", 150)


def explode(items: list[int]) -> Iterator[int]:
    for item in items:
        yield from range(1_000_000 * item, 1_000_000 * item + FAN_OUT)


def explode_but_fail_for_3(items: list[int]) -> Iterator[int]:
    for number in explode(items):
        if number == 3_000_000 + FAN_OUT - 10:
            raise ValueError(number)
        yield number


async def explode_async(items: list[int]) -> AsyncIterator[int]:
    for number in explode(items):
        yield number


@dt.each
async def explode_each(item: int) -> AsyncIterator[int]:
    for number in explode([item]):
        yield number


@dt.each
def add_one(item: int) -> int:
    return item + 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("run", [explode, explode_async, explode_each])
@pytest.mark.parametrize("ordered", [False, True])
def test_all_results_of_a_large_call_are_delivered_once(run: Any, ordered: bool) -> None:
    found = list(run_of(dt.Stage("explode", run, batch_size=1), source=range(ROWS), ordered=ordered))
    assert (found if ordered else sorted(found)) == RESULTS


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("fuse", [False, True])
def test_results_of_a_large_call_pass_the_next_stage(fuse: bool) -> None:
    stages = [dt.Stage("explode", explode, batch_size=1), dt.Stage("add", add_one, fuse=fuse)]
    run = run_of(*stages, source=range(ROWS), ordered=True)
    assert list(run) == [item + 1 for item in RESULTS]
    assert len(run.stats.units) == (1 if fuse else 2)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("sink", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_file_has_all_results_of_a_large_call(tmp_path: Path, sink: str, ordered: bool) -> None:
    def rows(items: list[int]) -> Iterator[dict[str, int]]:
        return ({"n": number} for number in explode(items))

    path = tmp_path / sink
    run_of(dt.Stage("rows", rows, batch_size=1), source=range(ROWS), sink=path, ordered=ordered).wait()
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        found = pq.read_table(path)["n"].to_pylist()
    else:
        found = [json.loads(line)["n"] for line in path.read_text().splitlines()]
    assert (found if ordered else sorted(found)) == RESULTS


@pytest.mark.usefixtures("small_pieces")
def test_results_before_a_failure_of_their_call_are_not_delivered() -> None:
    stage = dt.Stage("explode", explode_but_fail_for_3, batch_size=1, retries=1, on_error="skip")
    run = run_of(stage, source=range(ROWS))
    assert sorted(run) == [number for number in RESULTS if number // 1_000_000 != 3]
    assert [error.item for error in run.errors] == [3]


@pytest.mark.usefixtures("small_pieces")
def test_large_results_of_one_call_go_to_files_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.engines.local.result_packer import ResultPacker

    monkeypatch.setattr(ResultPacker, "max_memory_bytes", 100_000)

    def texts(items: list[int]) -> Iterator[bytes]:
        return (bytes([number % 256]) * 2000 for number in range(FAN_OUT))

    found = list(run_of(dt.Stage("texts", texts), source=[0], ordered=True))
    assert [(item[0], len(item)) for item in found] == [(number % 256, 2000) for number in range(FAN_OUT)]


def test_a_generator_of_one_large_result_per_item_keeps_the_keys_of_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result may then be named after its item (`worker.item_keys`), whatever its size."""
    monkeypatch.setattr(result_stream, "MAX_PIECE_BYTES", 100)

    class Keys:
        def setup(self, worker: Any) -> None:
            self.worker = worker

        def __call__(self, items: list[bytes]) -> list[tuple[int, ...]]:
            return list(self.worker.item_keys)

    def enlarge(items: list[int]) -> Iterator[bytes]:
        return (bytes([item]) * 1000 for item in items)

    stages = [dt.Stage("enlarge", enlarge, batch_size=10), dt.Stage("keys", Keys, batch_size=10, fuse=False)]
    assert sorted(run_of(*stages, source=range(50))) == [(number,) for number in range(50)]


@pytest.mark.parametrize("fuse", [False, True])
def test_results_stored_in_pieces_are_committed_once_across_a_kill(tmp_path: Path, fuse: bool) -> None:
    rows = 400
    make_rows(tmp_path / "in.jsonl", rows)
    given = {"source": str(tmp_path / "in.jsonl"), "sink": str(tmp_path / "out.jsonl")}
    killed = Killed(tmp_path, {**given, "pipeline": "explode", "fuse": fuse, "sleep": 0.004})
    killed.committed()
    killed.resume()
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == [{"id": row, "k": k} for row in range(rows) for k in range(40)]


class ReportsPeak:
    def __call__(self, items: list[int]) -> Iterator[int]:
        yield from range(items[0])
        yield -resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.processes
def test_ten_million_results_of_one_call_need_little_memory_in_the_worker() -> None:
    items = 10_000_000 if LONG else 1_000_000
    count = peak_kb = 0
    for number in run_of(dt.Stage("explode", ReportsPeak, batch_size=1), source=[items]):
        count += number >= 0
        peak_kb = max(peak_kb, -number)
    assert count == items
    assert 0 < peak_kb < 100_000, "a million results held as a whole take 150 MB more"
