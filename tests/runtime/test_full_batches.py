"""Full batches: a batch is filled across epochs, and only the end of the input leaves a partial one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from runtime.aids import CLUSTER
from runtime.kills import Killed, make_rows
from runtime.test_resume import as_rows

if TYPE_CHECKING:
    from pathlib import Path

    from ray_aids import FakeCluster

ROWS = 20_000
SIZES = [ROWS, pytest.param(100_000, marks=pytest.mark.long)]
CALLS: list[int] = []
ON_D = dt.Resources(cpus=1, labels={"fake": "d"})


def one_of_ten(row: int) -> dict[str, int] | None:
    return {"id": row} if row % 10 == 3 else None


def to_row(row: int) -> dict[str, int]:
    return {"id": row}


def batch_of_ten(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    CALLS.append(len(rows))
    return rows


def some_of_ten(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    """Returns another number of rows than it gets."""
    CALLS.append(len(rows))
    return [row for row in rows if row["id"] % 3]


def assert_full_but_one(sizes: list[int], rows: int) -> None:
    assert sum(sizes) == rows
    assert sum(size < 10 for size in sizes) <= 1, f"partial batches: {[size for size in sizes if size < 10]}"


def run_rows(rows: int, run: Any, **settings: Any) -> Any:
    CALLS.clear()
    stages = [dt.Stage("keep", dt.each(one_of_ten)), dt.Stage("batch", run, batch_size=10, fuse=False)]
    return dt.run(dt.Pipeline(stages), range(rows), profiles=False, **{"cluster": CLUSTER, **settings})


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("durable", [True, False])
def test_only_the_end_of_the_input_leaves_a_partial_batch(tmp_path: Path, rows: int, durable: bool) -> None:
    out = tmp_path / "out.jsonl"
    run = run_rows(rows, batch_of_ten, **({"sink": str(out)} if durable else {}))
    if durable:
        run.wait()
    found = [row["id"] for row in (as_rows(out) if durable else run)]
    assert sorted(found) == list(range(3, rows, 10))
    assert_full_but_one(CALLS, rows // 10)


@pytest.mark.usefixtures("in_process")
def test_a_function_that_drops_items_gets_full_batches_without_a_sink(tmp_path: Path) -> None:
    found = [row["id"] for row in run_rows(ROWS, some_of_ten)]
    assert sorted(found) == [number for number in range(3, ROWS, 10) if number % 3]
    assert_full_but_one(CALLS, ROWS // 10)


@pytest.mark.usefixtures("in_process")
def test_epochs_of_a_batch_that_drops_items_are_committed_together(tmp_path: Path) -> None:
    """Which of its results belong to which epoch is unknown, so now and then a partial batch separates epochs."""
    out = tmp_path / "out.jsonl"
    run_rows(ROWS, some_of_ten, sink=str(out)).wait()
    assert sorted(row["id"] for row in as_rows(out)) == [number for number in range(3, ROWS, 10) if number % 3]
    assert sum(size < 10 for size in CALLS) < 0.1 * len(CALLS)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("durable", [True, False])
def test_a_stage_may_end_its_batches_with_each_epoch(tmp_path: Path, durable: bool) -> None:
    CALLS.clear()
    batch = dt.Stage("batch", batch_of_ten, batch_size=10, partial_batches="epoch", fuse=False)
    stages = dt.Pipeline([dt.Stage("keep", dt.each(one_of_ten)), batch])
    sink = str(tmp_path / "out.jsonl") if durable else None
    run = dt.run(stages, range(ROWS), sink=sink, profiles=False, cluster=CLUSTER)
    found = [row["id"] for row in run]
    if durable:
        found = [row["id"] for row in as_rows(tmp_path / "out.jsonl")]
    assert sorted(found) == list(range(3, ROWS, 10))
    assert sum(size < 10 for size in CALLS) > 1, "no item waits for those of the next epoch"


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("order", ["", "run", "sink"])
@pytest.mark.parametrize("fits", [True, False])
def test_the_plan_of_a_run_warns_of_partial_batches_where_there_are_some(
    tmp_path: Path, order: str, fits: bool
) -> None:
    CALLS.clear()
    keep = dt.Stage("keep", dt.each(to_row if fits else one_of_ten), returns=1 if fits else None)
    stages = dt.Pipeline([keep, dt.Stage("batch", batch_of_ten, batch_size=10, fuse=False)])
    sink = {"path": str(tmp_path / "out.jsonl"), "ordered": order == "sink"}
    run = dt.run(stages, range(5_000), sink=sink, ordered=order == "run", profiles=False, cluster=CLUSTER)
    run.wait()
    has_partial = sum(size < 10 for size in CALLS) > 1
    assert has_partial == (bool(order) and not fits)
    fix = f"for full batches: --set {'sink.ordered' if order == 'sink' else 'ordered'}=false"
    assert any(note.endswith(fix) for note in run.plan.notes) == has_partial


def kill_and_resume(folder: Path, rows: int, **place: Any) -> None:
    make_rows(folder / "in.jsonl", rows)
    given = {"source": str(folder / "in.jsonl"), "sink": str(folder / "out.jsonl"), "pipeline": "one of ten"}
    killed = Killed(folder, {**given, "settings": {"ordered": False}, **place})
    killed.committed()
    sizes = folder / "sizes.log"
    assert {*sizes.read_text().split()} == {"10"}
    sizes.unlink()
    killed.resume()
    assert sorted(row["id"] for row in as_rows(folder / "out.jsonl")) == list(range(3, rows, 10))
    after = [int(size) for size in sizes.read_text().split()]
    assert after.count(10) >= len(after) - 1


@pytest.mark.parametrize("rows", SIZES)
def test_after_a_kill_and_a_resume_only_the_end_leaves_a_partial_batch(tmp_path: Path, rows: int) -> None:
    kill_and_resume(tmp_path, rows)


def own_size(rows: list[dict[str, int]]) -> list[int]:
    return [len(rows)] * len(rows)


@pytest.mark.ray
@pytest.mark.usefixtures("by_value")
def test_batches_are_full_on_ray(ray_cluster: FakeCluster) -> None:
    stages = [
        dt.Stage("keep", dt.each(one_of_ten), ON_D, workers=1),
        dt.Stage("batch", own_size, ON_D, workers=1, batch_size=10, fuse=False),
    ]
    engine = f"ray:{ray_cluster.address}"
    found = Counter(dt.run(dt.Pipeline(stages), range(5_003), profiles=False, engine=engine))
    assert found == {10: 500}


def with_size(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    return [{**row, "size": len(rows)} for row in rows]


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.usefixtures("by_value")
@pytest.mark.parametrize("rows", [20_000, 100_000])
def test_batches_are_full_on_ray_with_a_durable_sink(ray_cluster: FakeCluster, tmp_path: Path, rows: int) -> None:
    stages = [
        dt.Stage("keep", dt.each(one_of_ten), ON_D, workers=1),
        dt.Stage("batch", with_size, ON_D, workers=1, batch_size=10, fuse=False),
    ]
    sink, engine = str(tmp_path / "out.jsonl"), f"ray:{ray_cluster.address}"
    dt.run(dt.Pipeline(stages), range(rows), sink=sink, profiles=False, engine=engine).wait()
    found = as_rows(tmp_path / "out.jsonl")
    assert sorted(row["id"] for row in found) == list(range(3, rows, 10))
    counts = Counter(row["size"] for row in found)
    assert_full_but_one([size for size, count in counts.items() for _ in range(count // size)], rows // 10)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("rows", [20_000, 100_000])
def test_batches_are_full_on_ray_also_after_a_kill(ray_cluster: FakeCluster, tmp_path: Path, rows: int) -> None:
    kill_and_resume(tmp_path, rows, engine=f"ray:{ray_cluster.address}")
