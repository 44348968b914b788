"""Benchmarks of the local engine run and write their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.benchmark_runs import run_benchmark, run_benchmark_here
from waiting import LONG

if TYPE_CHECKING:
    from pathlib import Path


def test_overhead_per_item_and_until_the_first_result(tmp_path: Path, compiled: Path) -> None:
    kinds = ("unfused", "fused", "each_unfused", "each_fused") if LONG else ("unfused", "each_fused")
    sizes = ("--items", "1000,21000", "--repeat", "1", "--kinds", ",".join(kinds), "--compiled", str(compiled))
    found = run_benchmark("overhead", tmp_path, "--engine", "local", *sizes)
    for kind in kinds:
        assert found[f"{kind}_us"] < 100, kind
    assert 0 < found["import_cpu_s"] < found["hello_cpu_s"]
    assert found["hello_extra_cpu_s"] == found["hello_cpu_s"] - found["import_cpu_s"]


def test_payloads_arrive_complete_and_leave_no_descriptors_open(tmp_path: Path) -> None:
    sizes = ("--arrays", "6", "--compared", "4", "--rounds", "1", "--mb", "1")
    kinds = ("new", "in_place", "read_only", "bytes") if LONG else ("new", "in_place")
    found = run_benchmark("payload", tmp_path, *sizes, "--kinds", ",".join(kinds))
    assert set(found["kinds"]) == set(kinds)
    for key in ("gb_per_s", "pipe_gb_per_s", "in_place_gb_per_s", "peak_mb", "ratio", "in_place_ratio"):
        assert found[key] > 0, key
    assert found["descriptors_before"] == found["descriptors_after"]
    assert {"shmem_before_mb", "shmem_after_mb"} <= set(found)


def test_calls_of_actors_are_timed(tmp_path: Path) -> None:
    found = run_benchmark("roles", tmp_path, "--engines", "local", "--calls", "20", "--arrays", "1", "--mb", "1")
    for key in ("local_call_us", "colocated_call_us", "worker_call_us", "calls_s", "array_ms", "pipe_array_ms"):
        assert found[key] > 0, key
    assert found["array_ratio"] == pytest.approx(found["pipe_array_ms"] / found["array_ms"])


def test_the_controller_is_timed_per_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_benchmark_here(
        "controller", tmp_path, monkeypatch, "--workers", "10,50", "--least", "1000", "--repeat", "1"
    )
    assert [row["workers"] for row in found["rows"]] == [10, 50]
    assert all(0 < row["us_per_event"] < 10_000 for row in found["rows"])
    assert all(row["events"] >= 1000 for row in found["rows"])


@pytest.mark.usefixtures("in_process")
def test_scaling_is_compared_with_plain_processes_fixed_splits_and_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, replan = ("0.5", "0.3") if LONG else ("0.3", "0.2")
    sizes = ("--items", "40", "--rounds", "5", "--repeat", "1", "--seconds", seconds, "--replan", replan)
    found = run_benchmark_here("scaling", tmp_path, monkeypatch, *sizes)
    assert found["speed_up_ratio"] > 0
    assert len(found["splits"]) == 7
    assert found["autoscaled_share"] > 0
    assert [row["pipeline"] for row in found["predictions"]] == ["even", "narrow", "batched"]
    assert all(row["simulated"] > 0 and row["reached"] > 0 for row in found["predictions"])


def test_predictions_are_compared_with_what_a_run_reaches(tmp_path: Path) -> None:
    found = run_benchmark("truth", tmp_path, "--only", "sleep", "--seconds", "0.5")
    (row,) = found["rows"]
    assert row["pipeline"] == "sleep"
    for key in ("probed", "profiled", "simulated", "reached", "after_small_run"):
        assert row[key] > 0, key
    assert set(found["within"]) == {"probed", "profiled", "simulated"}
    assert all(set(shares) == {"10", "15", "20"} for shares in found["within"].values())


@pytest.mark.bar
def test_the_bars_for_overhead_and_start_up_hold(tmp_path: Path) -> None:
    found = run_benchmark("overhead", tmp_path, "--engine", "local", "--repeat", "3")
    assert found["unfused_us"] <= 4
    assert found["fused_us"] <= 2
    assert found["hello_extra_cpu_s"] <= 0.3
