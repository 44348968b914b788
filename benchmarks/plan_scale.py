"""CPU cost of a cold plan of the reference pipeline, by cluster size and on the mixed nodes of the trace.

    python benchmarks/plan_scale.py --nodes 128,512,1024,10000 --peers --json result.json

With --peers the solver of cosmos-xenna (Rust) solves the same problem in the same run, in an environment of its own.
"""

from __future__ import annotations

import math
import time
from typing import Any

import dovetail as dt
import openb
import report
from peers.environment import run_in

PEER = ["cosmos-xenna==0.3.0", "tqdm"]


REFERENCE = {
    "download": dt.Resources(cpus=4),
    "quarter": dt.Resources(cpus=1, gpus=0.25),
    "half": dt.Resources(cpus=2, gpus=0.5),
    "whole": dt.Resources(cpus=4, gpus=1),
    "double": dt.Resources(cpus=4, gpus=2),
    "write": dt.Resources(cpus=2),
}


def reference() -> dt.Pipeline:
    """Six stages of equal speed; none can be fused with its neighbour."""
    return dt.Pipeline([dt.Stage(name, _same, resources, rate=1.0) for name, resources in REFERENCE.items()])


def _same(items: list[object]) -> list[object]:
    return items


def measure(name: str, cluster: dt.Cluster) -> dict[str, Any]:
    pipeline = reference()
    times = []
    plan = None
    for _ in range(3):
        started = time.process_time()
        plan = dt.plan(pipeline, cluster)
        times.append(time.process_time() - started)
    assert plan is not None
    return {
        "nodes": len(cluster.nodes),
        "cluster": name,
        "cpu_s": min(times),
        "rate": plan.rate,
        "bound": plan.bound,
        "share_of_bound": (plan.rate or math.nan) / (plan.bound or math.nan),
        "workers": sum(plan.workers.values()),
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--nodes", default="128,512,1024")
    arguments.add_argument("--peers", action="store_true", help="also run cosmos-xenna's solver (up to 1024 nodes)")
    asked = arguments.parse_args()
    sizes = [int(nodes) for nodes in asked.nodes.split(",")]
    rows = [measure("128 CPUs, 8 GPUs each", dt.Cluster.parse(f"{nodes}x(128cpu, 8xgpu)")) for nodes in sizes]
    if (asked.data / "openb").exists():
        rows.append(measure("the trace's", openb.cluster(asked.data, 0)))
    result: dict[str, Any] = {"rows": rows}
    header = ["nodes", "cluster", "cpu_s", "rate", "bound", "share", "workers"]
    if asked.peers:
        small = [nodes for nodes in sizes if nodes <= 1024]
        peers = run_in("xenna", PEER, "xenna_solve.py", [",".join(map(str, small))])
        by_nodes = {row["nodes"]: row for row in peers}
        for row in rows:
            peer = by_nodes.get(row["nodes"]) if row["cluster"] != "the trace's" else None
            row["peer_cpu_s"] = peer["cpu_s"] if peer else None
            row["peer_rate"] = peer["rate"] if peer else None
            row["peer_ratio"] = peer["cpu_s"] / row["cpu_s"] if peer else None
        header += ["peer cpu_s", "peer rate", "times faster"]
    report.table(header, [["-" if cell is None else cell for cell in row.values()] for row in rows])
    report.write(asked.json, result)


if __name__ == "__main__":
    main()
