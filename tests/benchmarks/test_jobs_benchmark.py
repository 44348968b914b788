"""The benchmark of the job queue runs and writes its keys; the figures that it must reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.benchmark_runs import run_benchmark
from redis_aids import server_program

if TYPE_CHECKING:
    from pathlib import Path

needs_redis = pytest.mark.skipif(server_program() is None, reason="redis-server is not installed")
SMALL = ("--jobs", "20", "--process-jobs", "5", "--repeat", "1", "--pickups", "2", "--kills", "1", "--idle", "0.1")
KEYS = (
    *("fork_ms", "jobs_per_s", "jobs_per_s_2_slots", "process_jobs_per_s", "submits_per_s", "p50_ms", "p99_ms"),
    "rerun_after_kill_s",
)
MARGINS = ("worker_us_per_job", "worker_us_per_job_2_slots", "process_ms_per_job", "idle_cpu_percent")
"""Differences, which may be 0 for a few jobs."""


def check_keys(found: dict[str, Any]) -> None:
    for key in KEYS:
        assert found[key] > 0, key
    assert set(MARGINS) <= set(found)


def test_jobs_on_sqlite_are_timed(tmp_path: Path) -> None:
    check_keys(run_benchmark("jobs", tmp_path, "--store", "sqlite", *SMALL))


@needs_redis
@pytest.mark.long
def test_jobs_on_redis_are_timed_beside_a_bare_hand_off(tmp_path: Path) -> None:
    found = run_benchmark("jobs", tmp_path, "--store", "redis", *SMALL)
    check_keys(found)
    assert found["p50_ratio"] == pytest.approx(found["p50_ms"] / found["brpop_p50_ms"])
    assert found["p99_ratio"] == pytest.approx(found["p99_ms"] / found["brpop_p99_ms"])


@needs_redis
@pytest.mark.bar
def test_the_bars_for_jobs_on_redis_hold(tmp_path: Path) -> None:
    found = run_benchmark("jobs", tmp_path, "--store", "redis")
    assert found["worker_us_per_job"] <= 70
    assert found["worker_us_per_job_2_slots"] <= 250
    assert found["process_ms_per_job"] <= 2.5
    assert found["p50_ratio"] <= 2
    assert found["p99_ratio"] <= 4
    assert found["rerun_after_kill_s"] <= 3


@needs_redis
@pytest.mark.long
def test_claims_on_redis_are_timed(tmp_path: Path) -> None:
    found = run_benchmark("jobs_claims", tmp_path, "--jobs", "600", "--shapes", "20", "--workers", "4")
    assert found["claim_us_600"] > 0
    assert found["claim_us_600_aged"] > 0


@needs_redis
@pytest.mark.bar
def test_the_bars_for_claims_on_redis_hold(tmp_path: Path) -> None:
    found = run_benchmark("jobs_claims", tmp_path)
    for kind in ("", "_aged"):
        assert found[f"claim_us_10000{kind}"] <= 200
        assert found[f"claim_us_100000{kind}"] <= 1.3 * found[f"claim_us_1000{kind}"]


@pytest.mark.bar
def test_the_bars_for_jobs_on_sqlite_hold(tmp_path: Path) -> None:
    found = run_benchmark("jobs", tmp_path, "--store", "sqlite")
    assert found["submits_per_s"] >= 10_000
    assert found["jobs_per_s"] >= 4_000
    assert found["p50_ms"] <= 20
    assert found["idle_cpu_percent"] < 1
    assert found["rerun_after_kill_s"] <= 3
