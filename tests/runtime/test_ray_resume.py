"""Resume of a killed run on Ray, also by the other engine."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from runtime.kills import Killed, expected, make_rows, rows_of
from runtime.test_resume import SINKS, as_rows, in_some_order, kill_and_resume
from waiting import LONG, until

if TYPE_CHECKING:
    from pathlib import Path

    from ray_aids import FakeCluster

pytestmark = pytest.mark.ray
ROWS = 1500
CASES = [(sink, seed) for sink in SINKS for seed in range(10)] if LONG else [("out.jsonl", 0)]
WHERE: dict[str, str] = {} if LONG else {"fake": "d"}
"""Label of the workers: each node of a run costs an agent."""


def job(cluster: FakeCluster, folder: Path, sink: str = "out.jsonl", rows: int = ROWS, **options: Any) -> Killed:
    make_rows(folder / "in.jsonl", rows)
    given = {"source": str(folder / "in.jsonl"), "sink": str(folder / sink), "sleep": 0.0003, "labels": WHERE}
    return Killed(folder, {**given, "engine": f"ray:{cluster.address}", **options})


@pytest.mark.parametrize(("sink", "seed"), CASES)
def test_a_driver_killed_at_any_moment_resumes_exactly(
    ray_cluster: FakeCluster, tmp_path: Path, sink: str, seed: int
) -> None:
    fused = "fused" if seed % 2 else "rebatch"
    ordered = seed % 3 < 2
    killed = job(ray_cluster, tmp_path, sink, pipeline=fused, settings={"ordered": ordered})
    kill_and_resume(killed, Random(f"ray {sink} {seed}"), kills=2 if LONG else 1)
    found = as_rows(tmp_path / sink)
    assert (found if ordered else in_some_order(found)) == expected(ROWS)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= {"run", sink}, "parts are left"


@pytest.mark.parametrize("began_on", ["ray", pytest.param("local", marks=pytest.mark.long)])
def test_the_other_engine_can_resume_the_run(ray_cluster: FakeCluster, tmp_path: Path, began_on: str) -> None:
    """With results in parts, and what lies between two waves in the spool."""
    on_ray = f"ray:{ray_cluster.address}"
    engines = [on_ray, ""] if began_on == "ray" else ["", on_ray]
    killed = job(ray_cluster, tmp_path, rows=2500, pipeline="barrier", engine=engines[0], labels={})
    killed.committed()
    until(lambda: not ray_cluster.groups(), "what the killed driver held is given back")
    called = killed.called()
    killed.resume(engine=engines[1])
    rows = expected(2500)
    most = max(row["id"] for row in rows)
    assert as_rows(tmp_path / "out.jsonl") == [{**row, "most": most} for row in rows]
    assert killed.called() < called + 2500 * 6 // 7, "what was done is not done again"


@pytest.mark.long
@pytest.mark.parametrize("pipeline", ["barrier", "leaves", "diamond"])
@pytest.mark.parametrize("mode", ["sequential", "waves"])
def test_waves_killed_at_any_moment_resume_exactly(
    ray_cluster: FakeCluster, tmp_path: Path, pipeline: str, mode: str
) -> None:
    found = []
    for name, engine in (("local", ""), ("ray", f"ray:{ray_cluster.address}")):
        folder = tmp_path / name
        folder.mkdir()
        leaves = {"a": str(folder / "a.jsonl"), "b": str(folder / "b.jsonl")}
        sink: Any = leaves if pipeline == "leaves" else str(folder / "out.jsonl")
        killed = job(ray_cluster, folder, pipeline=pipeline, mode=mode, engine=engine)
        killed.options["sink"] = sink
        if engine:
            kill_and_resume(killed, Random(f"{pipeline} {mode}"), kills=2)
        else:
            killed.finish()
        found.append({path.name: rows_of(path) for path in folder.glob("*.jsonl") if path.name != "in.jsonl"})
    assert found[0]
    assert found[0] == found[1]
