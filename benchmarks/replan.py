"""Rate after one replan of a drifting pipeline against the bound, and the number of restarts.

    python benchmarks/replan.py --problems ../shared/data/problems/drift.jsonl --peers --json result.json

Every problem has four sets of speeds. The first is planned from empty, each other replanned once from the allocation
before. With --peers the solver of cosmos-xenna does the same in an environment of its own.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import dovetail as dt
import report
from dovetail.scheduling.replan.snapshot import Replan, Snapshot, UnitSnapshot, WorkerSnapshot
from dovetail.scheduling.replan.steps import replan
from peers.environment import run_in
from plan_quality import cluster_of
from plan_scale import REFERENCE

PEER = ["cosmos-xenna==0.3.0", "tqdm"]


def applied(snapshot: Snapshot, result: Replan) -> tuple[WorkerSnapshot, ...]:
    """The workers after a replan. A LedgerError if they could not all be seated."""
    stopped = {stop.worker for stop in result.stops}
    stayed = [worker for worker in snapshot.workers if worker.worker not in stopped]
    first = max((worker.worker for worker in snapshot.workers), default=0) + 1
    started = [WorkerSnapshot(first + number, start.unit, start.seats) for number, start in enumerate(result.starts)]
    workers = (*stayed, *started)
    dt.Ledger(snapshot.cluster, (seat for worker in workers for seat in worker.seats))
    return workers


def rate_of(units: tuple[UnitSnapshot, ...], workers: tuple[WorkerSnapshot, ...]) -> float:
    """Counted here again, so that a replan cannot flatter itself."""
    counts = {unit.name: sum(worker.unit == unit.name for worker in workers) for unit in units}
    return min(counts[unit.name] * (unit.rate or 0.0) for unit in units)


def follow(problem: dict[str, Any]) -> list[dict[str, Any]]:
    """Step 0 from empty, then one replan per step."""
    cluster = cluster_of(problem["nodes"])
    workers: tuple[WorkerSnapshot, ...] = ()
    rows = []
    for number, step in enumerate(problem["steps"]):
        units = tuple(
            UnitSnapshot(stage["name"], dt.Resources(cpus=stage["cpus"], gpus=stage["gpus"]).shape(), rate=rate)
            for stage, rate in zip(problem["stages"], step["rates"], strict=True)
        )
        snapshot = Snapshot(cluster, units, workers)
        started = time.process_time()
        result = replan(snapshot)
        spent = time.process_time() - started
        before, workers = len(workers), applied(snapshot, result)
        share = rate_of(units, workers) / step["bound"]
        ops = result.changes / max(before, len(workers))
        rows.append({"name": problem["name"], "step": number, "nodes": len(cluster.nodes), "workers": len(workers)})
        rows[-1] |= {"share": share, "ops_per_worker": ops, "cpu_s": spent}
    return rows


def scale(nodes: int) -> dict[str, Any]:
    """The reference pipeline on many nodes: planned, then every speed between half and twice, one replan each."""
    cluster = dt.Cluster.parse(f"{nodes}x(128cpu, 8xgpu)")
    chance = random.Random(1)
    workers: tuple[WorkerSnapshot, ...] = ()
    worst, changes, rates = 0.0, [], dict.fromkeys(REFERENCE, 1.0)
    for number in range(4):
        units = tuple(UnitSnapshot(name, asked.shape(), rate=rates[name]) for name, asked in REFERENCE.items())
        snapshot = Snapshot(cluster, units, workers)
        started = time.process_time()
        result = replan(snapshot)
        spent = time.process_time() - started
        workers = applied(snapshot, result)
        if number:
            worst = max(worst, spent)
            changes.append(result.changes)
        rates = {name: chance.uniform(0.5, 2.0) for name in REFERENCE}
    return {"nodes": nodes, "cpu_s": worst, "changes": changes, "workers": len(workers)}


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    later = [row for row in rows if row["step"]]
    shares = [row["share"] for row in later]
    return {
        "mean": statistics.fmean(shares),
        "p10": statistics.quantiles(shares, n=10, method="inclusive")[0],
        "min": min(shares),
        "ops_per_worker": statistics.fmean(row["ops_per_worker"] for row in later),
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--problems", type=Path, help="default: problems/drift.jsonl of the data folder")
    arguments.add_argument("--nodes", type=int, default=1024, help="of the cluster on which the cost is measured")
    arguments.add_argument("--peers", action="store_true", help="also run cosmos-xenna's solver")
    asked = arguments.parse_args()
    path = (asked.problems or asked.data / "problems" / "drift.jsonl").resolve()
    problems = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    rows = [row for problem in problems for row in follow(problem)]
    report.table(["problem", "step", "nodes", "workers", "share", "ops", "cpu_s"], [list(row.values()) for row in rows])
    large = scale(asked.nodes)
    result: dict[str, Any] = summary(rows)
    result |= {"max_cpu_s": max(row["cpu_s"] for row in rows), "scale_cpu_s": large["cpu_s"], "scale": large}
    lines = [["dovetail", *(result[key] for key in ("mean", "p10", "min", "ops_per_worker"))]]
    if asked.peers:
        theirs = run_in("xenna", PEER, "xenna_replan.py", [str(path)])
        peer = summary(theirs)
        result["peer_unsolved"] = len(problems) - len({row["name"] for row in theirs})
        lines.append(["cosmos-xenna", *peer.values()])
        result |= {f"peer_{key}": value for key, value in peer.items()}
    report.table(["after one replan", "mean share", "p10", "min", "ops per worker"], lines)
    print(f"{asked.nodes} nodes: {large['cpu_s']:.3f} CPU-s; small: at most {result['max_cpu_s']:.3f} CPU-s")
    report.write(asked.json, result | {"rows": rows})


if __name__ == "__main__":
    main()
