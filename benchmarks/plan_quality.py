"""Rate of cold plans against the best known rate, on sizing problems with known answers.

python benchmarks/plan_quality.py --problems ../shared/data/problems/cold.jsonl --json result.json
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import dovetail as dt
import report


def cluster_of(nodes: list[dict[str, Any]]) -> dt.Cluster:
    return dt.Cluster(
        tuple(
            dt.Node(f"node-{i}", round(node["cpus"] * 1000), gpus=(dt.Gpu(),) * node["gpus"])
            for i, node in enumerate(nodes)
        )
    )


def pipeline_of(stages: list[dict[str, Any]], rates: list[float]) -> dt.Pipeline:
    """One unit per stage: the problems say nothing of fusing."""
    return dt.Pipeline(
        [
            dt.Stage(s["name"], _same, dt.Resources(cpus=s["cpus"], gpus=s["gpus"]), rate=rate, fuse=False)
            for s, rate in zip(stages, rates, strict=True)
        ]
    )


def _same(items: list[object]) -> list[object]:
    return items


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    cluster = cluster_of(problem["nodes"])
    pipeline = pipeline_of(problem["stages"], problem["rates"])
    started = time.process_time()
    try:
        rate = dt.plan(pipeline, cluster, mode="streaming").rate or 0.0
    except dt.InfeasibleError:
        rate = 0.0
    spent = time.process_time() - started
    feasible = problem.get("feasible", True)
    known = problem.get("best_known") or 0.0
    share = rate / known if feasible else float(rate == 0.0)
    return {
        "name": problem["name"],
        "nodes": len(problem["nodes"]),
        "rate": rate,
        "best": known,
        "share": share,
        "cpu_s": spent,
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--problems", type=Path, help="default: problems/cold.jsonl of the data folder")
    asked = arguments.parse_args()
    path = asked.problems or asked.data / "problems" / "cold.jsonl"
    rows = [solve(json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    report.table(["problem", "nodes", "rate", "best known", "share", "cpu_s"], [list(row.values()) for row in rows])
    shares = [row["share"] for row in rows]
    result = {
        "mean": statistics.fmean(shares),
        "min": min(shares),
        "max_cpu_s": max(row["cpu_s"] for row in rows),
        "rows": rows,
    }
    print(
        f"mean {result['mean']:.4f}, min {result['min']:.4f} of the best known; at most {result['max_cpu_s']:.3f} CPU-s"
    )
    report.write(asked.json, result)


if __name__ == "__main__":
    main()
