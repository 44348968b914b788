"""Placement benchmarks run on a small generated trace and write their keys."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from benchmarks.benchmark_runs import BENCHMARKS, run_benchmark, run_benchmark_here

DATA = Path(os.environ.get("DATA") or BENCHMARKS.parents[1] / "shared" / "data")

POLICIES = ("fgd", "best_fit", "dot_product", "packing", "clustering", "random")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """120 nodes, and pods that request nearly all of their GPUs."""
    folder = tmp_path / "openb"
    folder.mkdir()
    rng = random.Random(7)
    nodes = [
        f"node-{i},{rng.choice((32000, 96000))},262144,{rng.choice((2, 4, 8))},{rng.choice(('T4', 'G2'))}"
        for i in range(120)
    ]
    gpus = sum(int(line.split(",")[3]) for line in nodes)
    (folder / "openb_node_list_gpu_node.csv").write_text(
        "\n".join(["sn,cpu_milli,memory_mib,gpu,model", *nodes]) + "\n"
    )
    pods: list[str] = []
    asked = 0.0
    while asked < 0.95 * gpus:
        number, milli = rng.choice(((0, 0), (1, 250), (1, 460), (1, 1000), (1, 1000), (2, 1000)))
        pods.append(f"pod-{len(pods)},{rng.choice((1000, 4000, 6000))},8192,{number},{milli},")
        asked += number * milli / 1000
    header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec"
    (folder / "openb_pod_list_default.csv").write_text("\n".join([header, *pods]) + "\n")
    return tmp_path


def test_every_policy_is_measured_and_fragmentation_is_no_worse_than_random(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_benchmark_here("placement", tmp_path, monkeypatch, "--data", str(data), "--seeds", "2")["results"]
    assert set(results) == set(POLICIES)
    for measured in results.values():
        assert {"alloc_100", "alloc_130", "cpu_s"} <= set(measured)
        assert 0 < measured["alloc_100"] <= measured["alloc_130"] <= 100
    assert results["fgd"]["alloc_130"] >= results["random"]["alloc_130"]


def test_jobs_of_a_queue_allocate_about_as_much_as_placement_by_fragmentation(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_benchmark_here("jobs_placement", tmp_path, monkeypatch, "--data", str(data))["results"]
    assert results["jobs"]["alloc_130"] >= results["fgd"]["alloc_130"] - 2
    assert results["jobs"]["us_per_job"] > 0
    assert 1 <= results["jobs"]["claims_per_job"] <= 2, "a job is left to a better worker once"


@pytest.mark.bar
@pytest.mark.time_limit(900)
@pytest.mark.skipif(not (DATA / "openb").is_dir(), reason="needs the openb trace: make test-long DATA=../shared/data")
def test_the_bars_for_jobs_on_the_openb_trace_hold(tmp_path: Path) -> None:
    results = run_benchmark("jobs_placement", tmp_path, "--data", str(DATA), "--seeds", "1")["results"]
    assert results["jobs"]["alloc_130"] >= results["fgd"]["alloc_130"] - 0.3
    assert results["jobs"]["us_per_job"] <= 250


def test_a_queue_per_model_finds_more_loaded_models_than_a_choice_of_the_worker_by_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--loads", "0.1,0.4", "--jobs", "2000")
    results = run_benchmark_here("model_affinity", tmp_path, monkeypatch, *arguments)["results"]
    hits = {policy: [figures["hits"] for figures in by_load.values()] for policy, by_load in results.items()}
    assert hits["any"][0] < hits["affinity"][0] < hits["queues"][0]
    assert hits["affinity"][1] < hits["queues"][1]


def test_placement_by_fragmentation_leaves_less_fragmentation_than_best_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_benchmark_here("come_and_go", tmp_path, monkeypatch, "--events", "120", "--seeds", "2")["results"]
    assert set(results) == {"fgd", "packing_order", "best_fit"}
    assert all(0 < measured["allocated"] <= 1 for measured in results.values())
    assert results["fgd"]["fragmentation"] < results["best_fit"]["fragmentation"]


def test_placing_workers_one_by_one_fills_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run_benchmark_here("placement_scale", tmp_path, monkeypatch, "--nodes", "4,16")["rows"]
    assert [row["nodes"] for row in rows] == [4, 16]
    assert rows[0]["workers"] * 3.9 < rows[1]["workers"]
    assert all(row["cpu_s"] > 0 for row in rows)
