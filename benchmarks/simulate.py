"""CPU cost of a simulated batch, recording included, by number of workers.

python benchmarks/simulate.py --workers 100,1000,10000 --json result.json
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dovetail as dt
import report
from dovetail.runtime.simulation import simulate

BATCHES_PER_WORKER = 60
BATCHES = 60_000
"""At least, so that planning and starting do not count for much."""
SPREAD = 0.4


def _same(items: list[object]) -> list[object]:
    return items


def pipeline() -> dt.Pipeline:
    """Four stages with batches of 1 to 16 and calls of 0.5 to 2 s."""
    return dt.Pipeline(
        [
            dt.Stage("load", _same, dt.Resources(cpus=1), rate=2),
            dt.Stage("caption", _same, dt.Resources(cpus=1, gpus=0.25), batch_size=8, rate=4),
            dt.Stage("embed", _same, dt.Resources(cpus=1, gpus=0.5), batch_size=16, rate=12),
            dt.Stage("write", _same, dt.Resources(cpus=0.5), rate=2),
        ],
        name="scale",
    )


def cluster(nodes: int) -> dt.Cluster:
    return dt.Cluster.of(f"{nodes}x(32cpu, 128GB, 2xL40S:48GB)")


def workers_of(plan: dt.Plan) -> int:
    return sum(unit.workers for unit in plan.units)


def measure(workers: int) -> dict[str, Any]:
    """One run with about so many workers, in this process."""
    pipe = pipeline()
    per_node = workers_of(dt.plan(pipe, cluster(8))) / 8
    plan = dt.plan(pipe, cluster(max(1, math.ceil(workers / per_node))))
    count = workers_of(plan)
    batches_per_item = 1 + 1 / 8 + 1 / 16 + 1
    items = round(max(BATCHES_PER_WORKER * count, BATCHES) / batches_per_item)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        result = simulate(pipe, plan=plan, items=items, spread=SPREAD, seed=1, run_dir=f"{folder}/run")
        spent = time.process_time() - started
        lines = Path(folder, "run", "events.jsonl").read_bytes().count(b"\n")
    assert result.status == "finished", result.error
    assert result.delivered == items
    batches = _batches(result)
    return {
        "workers": count,
        "nodes": len(plan.cluster.nodes),
        "items": items,
        "batches": batches,
        "cpu_s": spent,
        "us_per_batch": 1e6 * spent / batches,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rate": result.rate,
        "bound": plan.bound,
        "share_of_bound": result.rate / plan.bound,
        "events": lines,
    }


def _batches(result: dt.Simulation) -> int:
    """Calls of the users' functions: what the units took in, in batches."""
    sizes = {stage.name: stage.batch_size for stage in pipeline()}
    return sum(math.ceil(unit.taken / sizes[unit.name]) for unit in result.summary.units)


def apart(workers: int) -> dict[str, Any]:
    """The same in a process of its own, so that its memory is its own."""
    ran = subprocess.run(
        [sys.executable, __file__, "--one", str(workers)], capture_output=True, text=True, check=False, timeout=3600
    )
    if ran.returncode:
        sys.exit(ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--workers", default="100,1000,10000", help="about so many; as many nodes as that takes")
    arguments.add_argument("--one", type=int, help="one size, in this process, as JSON")
    asked = arguments.parse_args()
    if asked.one is not None:
        print(json.dumps(measure(asked.one)))
        return
    rows = [apart(int(workers)) for workers in asked.workers.split(",")]
    keys = ["workers", "nodes", "batches", "cpu_s", "us_per_batch", "peak_mb", "share_of_bound"]
    report.table(keys, [[row[key] for key in keys] for row in rows])
    growth = rows[-1]["us_per_batch"] / rows[0]["us_per_batch"]
    print(f"{growth:.2f} x as much per batch with the most workers as with the fewest")
    result = {"rows": rows, "share_of_bound": min(row["share_of_bound"] for row in rows), "growth": growth}
    report.write(asked.json, result)


if __name__ == "__main__":
    main()
