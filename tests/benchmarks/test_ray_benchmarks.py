"""Benchmarks run on a private Ray and write their keys."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.benchmark_runs import run_benchmark
from benchmarks.test_text import documents
from tally import Tally
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

ORPHAN = """
import subprocess, sys
spin = "import time\\nwhile time.process_time() < 0.5: pass\\nprint(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
child.stdout.readline()
sys.stdin.read()
child.kill()
"""


def run(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    return run_benchmark(name, folder, "--engine", "ray", *arguments)


def written(path: Path, count: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in documents(count))
    return path


def test_a_tally_counts_processes_that_no_parent_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE)
    began = time.monotonic()
    tally = Tally(process.pid)
    until(lambda: tally._totals and tally.total_s >= 0.45, "the CPU of both processes is counted")
    process.communicate()
    tally.stop()
    assert tally.total_s == pytest.approx(0.55, abs=0.3)
    assert tally.between(began, time.monotonic()) <= tally.total_s


@pytest.mark.ray
@pytest.mark.long
def test_overhead_on_ray_beside_actors_in_the_same_ray(tmp_path: Path) -> None:
    found = run("overhead", tmp_path, "--items", "1000,21000", "--repeat", "1")
    for kind in ("unfused_us", "fused_us", "unfused_64_us", "fused_64_us"):
        assert found[kind] < 200, kind
    assert found["batch_1_us"] == found["unfused_us"]
    assert found["batch_64_us"] == found["unfused_64_us"]
    assert found["peer_actors_us"] > 100
    assert found["start_cpu_s"] > 1


@pytest.mark.ray
@pytest.mark.long
def test_text_on_ray_twice_in_a_process(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", 500)
    found = run("text", tmp_path, "--source", str(source), "--repeat", "1", "--kinds", "plain,fused")
    assert found["kept"] == 350
    assert found["plain_cpu_s"] < found["warm_cpu_s"] < found["cpu_s"]
    assert found["warm_ratio"] == pytest.approx(found["warm_cpu_s"] / found["plain_cpu_s"])
    assert 0 < found["driver_cpu_s"] < found["cpu_s"]


@pytest.mark.bar
@pytest.mark.ray
def test_the_bars_for_overhead_on_ray_hold(tmp_path: Path) -> None:
    found = run("overhead", tmp_path, "--repeat", "3")
    assert found["batch_64_us"] <= 12
    assert found["batch_1_us"] <= 60
    assert found["times_less"] >= 50


@pytest.mark.bar
@pytest.mark.ray
def test_the_bars_for_calls_of_actors_hold(tmp_path: Path) -> None:
    found = run_benchmark("roles", tmp_path)
    assert found["local_ratio"] <= 0.25
    assert found["ray_ratio"] <= 1.3
    assert found["colocated_call_us"] <= 15
    assert found["calls_s"] >= 5000
    assert found["array_ratio"] >= 3


@pytest.mark.bar
@pytest.mark.ray
def test_the_bars_for_text_on_ray_hold(tmp_path: Path) -> None:
    """Except for the comparison with Ray Data, which needs another environment."""
    source = written(tmp_path / "rows.jsonl", 50_000)
    found = run("text", tmp_path, "--source", str(source), "--kinds", "plain,fused")
    assert found["kept"] == 35_000
    assert found["warm_ratio"] <= 1.35
