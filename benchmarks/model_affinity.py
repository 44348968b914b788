"""What a choice of the worker by its loaded models would bring: hits and response times of a queue, in virtual time.

    python benchmarks/model_affinity.py --json result.json

Workers run one job at a time and keep some models (the least recently used one makes room); a job whose model is not
loaded loads it first. `any`: the worker is a random idle one, as the first that asks. `affinity`: an idle one that has
the model, if there is one. `queues`: each model belongs to one worker, as with a queue or a label per model. The load
is the share of time in which workers would be busy if no model had to be loaded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heappop, heappush
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

import report

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICIES = ("any", "affinity", "queues")
WORKERS, MODELS, KEPT = 8, 40, 5
RUN_S, LOAD_S = 1.0, 5.0
SKEW = 1.1


class Fleet:
    """Workers with their loaded models, and the jobs that wait."""

    def __init__(self, policy: str, random: Random) -> None:
        self.policy = policy
        self.hits = 0
        self.responses_s: list[float] = []
        self.running: list[tuple[float, int, float]] = []
        """A heap of (end, worker, arrival)."""
        self._random = random
        self._models: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(WORKERS)]
        self._idle = set(range(WORKERS))
        self._waiting: list[deque[tuple[float, int]]] = [deque() for _ in range(WORKERS if policy == "queues" else 1)]

    def submit(self, model: int, now: float) -> None:
        self._waiting[model % len(self._waiting)].append((now, model))
        self._start(now)

    def end(self) -> None:
        now, worker, arrived = heappop(self.running)
        self._idle.add(worker)
        self.responses_s.append(now - arrived)
        self._start(now)

    def _start(self, now: float) -> None:
        for number, waiting in enumerate(self._waiting):
            while waiting and (idle := self._candidates(number, waiting[0][1])):
                arrived, model = waiting.popleft()
                worker = self._random.choice(idle)
                self._idle.remove(worker)
                heappush(self.running, (now + self._time_s(worker, model), worker, arrived))

    def _candidates(self, number: int, model: int) -> Sequence[int]:
        if self.policy == "queues":
            return [number] if number in self._idle else []
        warm = [worker for worker in self._idle if model in self._models[worker]] if self.policy == "affinity" else []
        return sorted(warm or self._idle)

    def _time_s(self, worker: int, model: int) -> float:
        models = self._models[worker]
        is_loaded = model in models
        models[model] = None
        models.move_to_end(model)
        if len(models) > KEPT:
            models.popitem(last=False)
        self.hits += is_loaded
        return RUN_S if is_loaded else RUN_S + LOAD_S


def measure(policy: str, load: float, jobs: int, seed: int) -> dict[str, float]:
    random = Random(seed)
    weights = [1 / (rank + 1) ** SKEW for rank in range(MODELS)]
    fleet, now = Fleet(policy, random), 0.0
    for model in random.choices(range(MODELS), weights, k=jobs):
        now += random.expovariate(load * WORKERS / RUN_S)
        while fleet.running and fleet.running[0][0] <= now:
            fleet.end()
        fleet.submit(model, now)
    while fleet.running:
        fleet.end()
    return {"hits": fleet.hits / jobs, "mean_s": fmean(fleet.responses_s)}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--loads", default="0.05,0.1,0.2,0.4", help="shares, comma-separated")
    arguments.add_argument("--jobs", type=int, default=20_000)
    asked = arguments.parse_args()
    loads = [float(text) for text in asked.loads.split(",")]
    results = {policy: {f"{load:g}": measure(policy, load, asked.jobs, 1) for load in loads} for policy in POLICIES}
    rows = [
        (policy, load, figures["hits"], figures["mean_s"])
        for policy, by_load in results.items()
        for load, figures in by_load.items()
    ]
    report.table(["policy", "load", "share of hits", "mean response, s"], rows)
    report.write(asked.json, {"jobs": asked.jobs, "results": results})


if __name__ == "__main__":
    main()
