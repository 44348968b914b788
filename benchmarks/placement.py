"""Share of a GPU cluster that each placement policy allocates, on the traces of "Beware of Fragmentation" (ATC'23).

python benchmarks/placement.py --trace default --policies fgd,best_fit --seeds 5 --json result.json
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import openb
import policies
import report

if TYPE_CHECKING:
    from pathlib import Path

    import dovetail as dt

MARKS = (95, 100, 110, 120, 130)
PUBLISHED = {
    "default": {
        "fgd": (95.23, 95.39),
        "best_fit": (92.86, 93.08),
        "dot_product": (90.62, 90.85),
        "packing": (91.78, 92.00),
        "clustering": (91.65, 91.88),
        "random": (86.30, 87.47),
    },
    "cpu100": {"fgd": (95.21, 95.35), "best_fit": (93.26, 93.44)},
    "gpuspec33": {"fgd": (87.84, 94.55), "best_fit": (80.40, 93.09)},
    "multigpu20": {"fgd": (95.53, 95.65), "best_fit": (93.73, 93.93)},
}


def replay(data: Path, trace: list[dt.Shape], policy: str, seed: int) -> dict[str, float]:
    """One pass over the arrivals; the share of all GPUs that is allocated, by the share that was asked for."""
    cluster = openb.cluster(data, seed)
    capacity = 1000 * sum(len(node.gpus) for node in cluster.nodes)
    arrivals = openb.arrivals(trace, capacity, seed)
    workload = openb.expected(trace)
    bins: dict[int, list[float]] = {}
    asked = used = 0
    started = time.process_time()
    seated = policies.Policy(policy, cluster, workload, seed)
    for pod in arrivals:
        milli = openb.asked_milli(pod)
        asked += milli
        if seated.seats(pod):
            used += milli
        bins.setdefault(round(asked / capacity * 100), []).append(used / capacity * 100)
    spent = time.process_time() - started
    return {f"alloc_{mark}": statistics.fmean(bins[mark]) for mark in MARKS if mark in bins} | {"cpu_s": spent}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--trace", default="default", choices=sorted(PUBLISHED))
    arguments.add_argument("--policies", default=",".join(policies.POLICIES))
    arguments.add_argument("--seeds", type=int, default=5)
    asked = arguments.parse_args()
    names = asked.policies.split(",")
    unknown = [name for name in names if name not in policies.POLICIES]
    if unknown or asked.seeds < 1:
        sys.exit(f"unknown policy {', '.join(unknown)}: one of {', '.join(policies.POLICIES)}, and at least one seed")
    trace = openb.pods(asked.data, asked.trace)
    results: dict[str, Any] = {}
    rows = []
    for name in names:
        runs = [replay(asked.data, trace, name, seed) for seed in range(asked.seeds)]
        results[name] = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        results[name]["alloc_130_std"] = statistics.pstdev(run["alloc_130"] for run in runs)
        published = PUBLISHED[asked.trace].get(name, ("", ""))
        shown = [results[name].get(f"alloc_{mark}", "-") for mark in MARKS]
        rows.append([name, *shown, results[name]["alloc_130_std"], *published, results[name]["cpu_s"]])
    print(f"allocated GPUs in %, trace {asked.trace}, mean of {asked.seeds} seeds, CPU-seconds per replay")
    report.table(["policy", *(f"@{mark}" for mark in MARKS), "std", "paper@100", "paper@130", "cpu_s"], rows)
    report.write(asked.json, {"trace": asked.trace, "seeds": asked.seeds, "results": results})


if __name__ == "__main__":
    main()
