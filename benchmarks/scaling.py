"""Speed-up by number of workers, convergence to the best split, and accuracy of the prediction.

    python benchmarks/scaling.py --json result.json

Speed-up: a stage that computes, with two workers and with one; compared with two and one plain processes, in turn.
Autoscaling: two stages that sleep, 1 : 3, on eight CPUs; the rate after three replans, compared with the best of all
fixed splits. Prediction: the simulated rate of three pipelines that sleep, compared with the measured rate.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from functools import partial
from typing import Any, Literal

import dovetail as dt
import report
from dovetail.streaming.settings import StreamOptions

SPAWN = multiprocessing.get_context("spawn")
HOP_S = 0.0002
SPLIT_CPUS = 8
SPLIT_CLUSTER = f"1x({SPLIT_CPUS}cpu, 16GB)"
FAST_S, SLOW_S = 0.01, 0.03
REPLANS = 3
PREDICTED: dict[str, tuple[str, list[tuple[float, int]]]] = {
    "even": ("1x(4cpu, 8GB)", [(0.02, 1), (0.02, 1)]),
    "narrow": ("1x(6cpu, 8GB)", [(0.005, 1), (0.03, 1), (0.01, 1)]),
    "batched": ("1x(4cpu, 8GB)", [(0.004, 1), (0.08, 8)]),
}
"""Cluster, and seconds per call and items per call of each stage."""


def compute(rounds: int, items: list[int]) -> list[int]:
    for _ in range(rounds):
        sum(number * number for number in range(1000))
    return items


def sleep(seconds: float, items: list[int]) -> list[int]:
    time.sleep(seconds)
    return items


def run_of(stages: list[dt.Stage], items: int, cluster: str, options: StreamOptions | None = None) -> list[float]:
    """Arrival times of the results."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = dt.Pipeline(stages, name="scaling")
        run = dt.run(pipe, range(items), cluster=cluster, options=options, run_dir=f"{folder}/run", progress=False)
        arrivals = [time.perf_counter() for _ in run]
    assert len(arrivals) == items
    return arrivals


def rate_between(arrivals: list[float], first: float, last: float) -> float:
    """Results per second between two fractions of all results."""
    low, high = int(first * (len(arrivals) - 1)), int(last * (len(arrivals) - 1))
    return (high - low) / (arrivals[high] - arrivals[low])


# --- speed-up


def engine_rate(workers: int, items: int, rounds: int) -> float:
    stage = dt.Stage("compute", partial(compute, rounds), dt.Resources(cpus=1), workers=workers)
    return rate_between(run_of([stage], items, f"1x({workers}cpu, 8GB)"), 0.05, 0.95)


def plain_rate(processes: int, items: int, rounds: int) -> float:
    """Rate of the same work in plain processes."""
    ready, go = SPAWN.Barrier(processes + 1), SPAWN.Barrier(processes + 1)
    share = items // processes
    workers = [SPAWN.Process(target=_run_plain, args=(ready, go, share, rounds)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    go.wait()
    for worker in workers:
        worker.join()
    return share * processes / (time.perf_counter() - began)


def _run_plain(ready: Any, go: Any, items: int, rounds: int) -> None:
    os.setsid()  # like workers: on a busy machine, Linux shares CPUs fairly between sessions
    ready.wait()
    go.wait()
    for number in range(items):
        compute(rounds, [number])


def speed_up(items: int, rounds: int, repeat: int) -> dict[str, Any]:
    """Medians of runs in turn, so that other load on the machine affects all of them."""
    rates: dict[str, list[float]] = {"one": [], "two": [], "bare_one": [], "bare_two": []}
    for _ in range(repeat):
        rates["one"].append(engine_rate(1, items, rounds))
        rates["bare_one"].append(plain_rate(1, items, rounds))
        rates["two"].append(engine_rate(2, items, rounds))
        rates["bare_two"].append(plain_rate(2, items, rounds))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    ours, bare = middle["two"] / middle["one"], middle["bare_two"] / middle["bare_one"]
    return {"speed_up": ours, "bare_speed_up": bare, "speed_up_ratio": ours / bare, "speed_up_rates": rates}


# --- autoscaling


def sleepers(workers: tuple[int, int] | None) -> list[dt.Stage]:
    fixed: tuple[int | Literal["auto"], ...] = workers or ("auto", "auto")
    both = (("fast", FAST_S, fixed[0]), ("slow", SLOW_S, fixed[1]))
    return [
        dt.Stage(name, partial(sleep, seconds), dt.Resources(cpus=1), workers=count, fuse=False)
        for name, seconds, count in both
    ]


def split_rate(fast: int, seconds: float) -> float:
    slow = SPLIT_CPUS - fast
    items = max(20, int(seconds * min(fast / FAST_S, slow / SLOW_S)))
    return rate_between(run_of(sleepers((fast, slow)), items, SPLIT_CLUSTER), 0.2, 0.9)


def settled_rate(seconds: float, replan_s: float, expected: float) -> float:
    """Rate after the third replan of a run that starts without known rates."""
    settled_s = REPLANS * replan_s
    options = StreamOptions(hop_s=HOP_S, eager=True, replan_every_s=replan_s)
    arrivals = run_of(sleepers(None), int((settled_s + seconds) * expected), SPLIT_CLUSTER, options)
    return rate_between([at for at in arrivals if at - arrivals[0] >= settled_s], 0.0, 0.9)


def autoscaling(seconds: float, replan_s: float, repeat: int) -> dict[str, Any]:
    """All fixed splits; then the best of them and an autoscaled run, in turn."""
    splits = {fast: split_rate(fast, seconds / 2) for fast in range(1, SPLIT_CPUS)}
    best = max(splits, key=lambda fast: splits[fast])
    both = [(settled_rate(seconds, replan_s, splits[best]), split_rate(best, seconds)) for _ in range(repeat)]
    found, fixed = (statistics.median(side) for side in zip(*both, strict=True))
    return {
        "splits": {f"{fast}+{SPLIT_CPUS - fast}": rate for fast, rate in splits.items()},
        "best_split": f"{best}+{SPLIT_CPUS - best}",
        "best_split_rate": fixed,
        "autoscaled_rate": found,
        "autoscaled_share": found / fixed,
    }


# --- prediction


def predicted(name: str, seconds: float) -> dict[str, Any]:
    cluster, calls = PREDICTED[name]
    stages = [
        dt.Stage(
            f"stage{at}",
            partial(sleep, call_s),
            dt.Resources(cpus=1),
            batch_size=batch,
            rate=batch / call_s,
            fuse=False,
        )
        for at, (call_s, batch) in enumerate(calls)
    ]
    pipe = dt.Pipeline(stages, name=name)
    plan = dt.plan(pipe, cluster)
    assert plan.rate is not None, "every stage has a rate"
    items = int(seconds * plan.rate)
    with tempfile.TemporaryDirectory() as folder:
        simulated = dt.simulate(pipe, plan=plan, items=items, spread=0.0, setup_s=0.1, run_dir=f"{folder}/run").rate
    arrivals = run_of(stages, items, cluster)
    reached = rate_between(arrivals, 0.1, 0.9)
    return {"pipeline": name, "simulated": simulated, "reached": reached, "error": abs(simulated / reached - 1)}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--items", type=int, default=300, help="items per run of the speed-up")
    arguments.add_argument("--rounds", type=int, default=100, help="loops per item: 100 take about 5 ms")
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=6.0, help="seconds per run of stages that sleep")
    arguments.add_argument("--replan", type=float, default=2.0, help="seconds between replans of the autoscaled run")
    asked = arguments.parse_args()
    result = speed_up(asked.items, asked.rounds, asked.repeat)
    report.table(
        ["speed-up of two workers", "of two plain processes", "ratio"],
        [[result["speed_up"], result["bare_speed_up"], result["speed_up_ratio"]]],
    )
    result |= autoscaling(asked.seconds, asked.replan, asked.repeat)
    report.table(["workers", "items per s"], [*result["splits"].items(), ("autoscaled", result["autoscaled_rate"])])
    print(f"autoscaled: {result['autoscaled_share']:.3f} of {result['best_split']}, measured in turn")
    rows = [predicted(name, asked.seconds) for name in PREDICTED]
    report.table(list(rows[0]), [list(row.values()) for row in rows])
    report.write(asked.json, result | {"predictions": rows, "prediction_error": max(row["error"] for row in rows)})


if __name__ == "__main__":
    main()
