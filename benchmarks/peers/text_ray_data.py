"""Runs in the peers' environment: the five text operators with Ray Data, JSONL in, JSONL out.

    python text_ray_data.py SOURCE

The first run from the start of the process to its exit, and a second one in the same process. All processes below this
one count.
"""

import ctypes
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = sys.path[0]  # of its workers
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import psutil
import ray
import ray.data

from text_operators import OPERATORS

CPUS = 2
PR_SET_CHILD_SUBREAPER = 36


def spent() -> float:
    """CPU seconds of this process and its descendants, including those that have ended."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system + used.children_user + used.children_system
    return total


def cleaned(line: dict[str, str]) -> list[dict[str, Any]]:
    """Parse a line and call all five operators: one row or none."""
    row: dict[str, Any] | None = json.loads(line["text"])
    for operator in OPERATORS:
        row = operator(row)  # type: ignore[arg-type]
        if row is None:
            return []
    return [row]  # type: ignore[list-item]


def run(source: str) -> int:
    """The fastest variant: `read_json` with a map or filter per operator takes twice the CPU."""
    folder = tempfile.mkdtemp()
    try:
        ray.data.read_text(source).flat_map(cleaned).write_json(folder, force_ascii=False)
        return sum(len(path.read_bytes().splitlines()) for path in Path(folder).iterdir())
    finally:
        shutil.rmtree(folder)


def main() -> dict[str, Any]:
    began = psutil.Process().create_time()
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    found: dict[str, Any] = {"started_cpu_s": spent(), "kept": run(sys.argv[1])}
    first_cpu_s, first_wall_s = spent(), time.time() - began
    again = time.perf_counter()
    assert run(sys.argv[1]) == found["kept"]
    found |= {"second_cpu_s": spent() - first_cpu_s, "second_wall_s": time.perf_counter() - again}
    ends_cpu_s, ends = spent(), time.perf_counter()
    ray.shutdown()
    used = psutil.Process().cpu_times()  # of its servers, what their end takes is not counted
    ending_s = max(0.0, used.user + used.system + used.children_user + used.children_system - ends_cpu_s)
    return found | {"cpu_s": first_cpu_s + ending_s, "wall_s": first_wall_s + time.perf_counter() - ends}


def end() -> None:
    """End all descendants, including processes that Ray leaves behind: orphans become children of this process."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)


ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
try:
    result = main()
finally:
    end()
print(json.dumps(result), flush=True)
