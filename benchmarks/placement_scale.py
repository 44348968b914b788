"""CPU cost of placing the reference stages one by one, by cluster size.

    python benchmarks/placement_scale.py --nodes 128,1024,10000

"until one does not fit" places the six stages in turn until the first of them finds no seat; "until full" goes on with
the others until no stage finds one.
"""

from __future__ import annotations

import time
from typing import Any

import dovetail as dt
import report

STAGES = (
    dt.Resources(cpus=4),
    dt.Resources(cpus=1, gpus=0.25),
    dt.Resources(cpus=2, gpus=0.5),
    dt.Resources(cpus=4, gpus=1),
    dt.Resources(cpus=4, gpus=2),
    dt.Resources(cpus=2),
)


def fill(nodes: int) -> dict[str, Any]:
    cluster = dt.Cluster.parse(f"{nodes}x(128cpu, 8xgpu)")
    shapes = [stage.shape() for stage in STAGES]
    started = time.process_time()
    placer = dt.Placer(dt.Ledger(cluster), dt.FragmentationScore(dt.Workload((shape, 1) for shape in shapes)))
    workers = first_workers = 0
    first_cpu_s = 0.0
    wanted = shapes
    while wanted:
        seated = [shape for shape in wanted if placer.place(shape) is not None]
        workers += len(seated)
        if len(seated) < len(shapes) and not first_workers:
            first_workers, first_cpu_s = workers, time.process_time() - started
        wanted = seated
    spent = time.process_time() - started
    return {
        "nodes": nodes,
        "workers_until_one_does_not_fit": first_workers,
        "cpu_s_until_one_does_not_fit": first_cpu_s,
        "workers": workers,
        "cpu_s": spent,
        "us_per_worker": spent / workers * 1e6,
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--nodes", default="128,1024,10000")
    asked = arguments.parse_args()
    rows = [fill(int(nodes)) for nodes in asked.nodes.split(",")]
    report.table(
        ["nodes", "until one does not fit", "cpu_s", "until full", "cpu_s", "us/worker"],
        [list(row.values()) for row in rows],
    )
    report.write(asked.json, {"rows": rows})


if __name__ == "__main__":
    main()
