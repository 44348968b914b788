"""CPU cost of a simulated batch, recording included, by number of workers.

python benchmarks/simulate.py --workers 100,1000,10000 --json result.json
"""

from __future__ import annotations

import json
import math
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import dovetail as dt
import report
from dovetail.runtime.simulation import simulate
from process_cost import run_process

BATCHES_PER_WORKER = 60
MIN_BATCHES = 60_000
"""So that planning and start-up hardly count."""
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
    """One run with about this many workers, in this process."""
    pipe = pipeline()
    per_node = workers_of(dt.plan(pipe, cluster(8))) / 8
    plan = dt.plan(pipe, cluster(max(1, math.ceil(workers / per_node))))
    count = workers_of(plan)
    batches_per_item = 1 + 1 / 8 + 1 / 16 + 1
    items = round(max(BATCHES_PER_WORKER * count, MIN_BATCHES) / batches_per_item)
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
        "share_of_bound": result.rate / (plan.bound or math.nan),
        "events": lines,
    }


def _batches(result: dt.Simulation) -> int:
    """Number of calls of the stages' functions."""
    sizes = {stage.name: stage.batch_size for stage in pipeline()}
    return sum(math.ceil(unit.taken / sizes[unit.name]) for unit in result.summary.units)


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--workers", default="100,1000,10000", help="approximate numbers of workers")
    arguments.add_argument("--one", type=int, help="one number of workers, in this process, as JSON (internal)")
    asked = arguments.parse_args()
    if asked.one is not None:
        print(json.dumps(measure(asked.one)))
        return
    rows = [run_process([__file__, "--one", workers]).output for workers in asked.workers.split(",")]
    keys = ["workers", "nodes", "batches", "cpu_s", "us_per_batch", "peak_mb", "share_of_bound"]
    report.table(keys, [[row[key] for key in keys] for row in rows])
    growth = rows[-1]["us_per_batch"] / rows[0]["us_per_batch"]
    print(f"{growth:.2f} times the cost per batch with the most workers, compared with the fewest")
    result = {"rows": rows, "share_of_bound": min(row["share_of_bound"] for row in rows), "growth": growth}
    report.write(asked.json, result)


if __name__ == "__main__":
    main()
