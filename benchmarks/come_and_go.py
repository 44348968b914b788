"""Fragmentation and allocated GPUs after many runs started, changed size and ended on one shared mixed cluster.

    python benchmarks/come_and_go.py --events 400 --seeds 40 --first-seed 300 --json result.json

Workers start and stop one at a time on one ledger. Compared are fragmentation gradient descent as replans use it (fgd),
the packing order that replans used before it (packing_order: the node with the least idle GPU) and best fit. All
policies get the same events. A worker that does not fit waits, and is tried again after every stop. Differences to
packing_order are paired by seed: mean and standard error.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dovetail as dt
import policies
import report
from dovetail.scheduling.fragmentation import Fragmentation
from dovetail.scheduling.placement import GroupPlacer, stop_rank
from dovetail.scheduling.replan.targets import replan_score

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.resources.fit import CardAssignment
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.seat import Seats
    from dovetail.scheduling.placement import Score

CLUSTER = (
    "4x(64cpu, 256GB) + 8x(32cpu, 256GB, 4xL40S:48GB) + 4x(96cpu, 512GB, 8xA100:80GB) + 6x(16cpu, 128GB, 2xL4:24GB)"
)
SHAPES: dict[dt.Resources, int] = {
    dt.Resources(cpus=2): 6,
    dt.Resources(cpus=8, memory="16GB"): 2,
    dt.Resources(cpus=1, gpus=0.25): 6,
    dt.Resources(cpus=2, gpus=0.5): 4,
    dt.Resources(cpus=1, gpu_memory="20GB"): 2,
    dt.Resources(cpus=4, gpus=1): 5,
    dt.Resources(cpus=8, gpus=2): 2,
    dt.Resources(cpus=16, gpus=4): 1,
    dt.Resources(cpus=2, nvdecs=1): 3,
    dt.Resources(cpus=1, gpus=0.25, nvdecs=1): 2,
}
"""What units ask for, and how often."""
POLICIES = ("fgd", "packing_order", "best_fit")
TARGET_LOAD = 1.1
"""GPUs that all runs together ask for, as a share of the GPUs of the cluster."""
UNITS_PER_RUN = (1, 4)
WORKERS_PER_UNIT = (1, 12)


@dataclass(frozen=True, slots=True)
class Change:
    """A unit of a run gets another number of workers; 0 when the run ends."""

    unit: int
    shape: dt.Shape
    workers: int


def gpu_milli(shape: dt.Shape) -> int:
    """What one worker takes of GPUs; a request by memory counts as half of a GPU."""
    return shape.cards * (shape.gpu_milli or (500 if shape.gpu_memory_bytes else 0))


def changes(count: int, gpus: int, seed: int) -> Iterator[Change]:
    """The events of one history, independent of any placement."""
    chance = random.Random(f"come and go {seed}")
    shapes, weights = [resources.shape() for resources in SHAPES], list(SHAPES.values())
    runs: list[list[int]] = []
    units: dict[int, Change] = {}
    for _ in range(count):
        asked = sum(change.workers * gpu_milli(change.shape) for change in units.values())
        if not runs or asked < TARGET_LOAD * 1000 * gpus:
            first = max(units, default=-1) + 1
            run = list(range(first, first + chance.randint(*UNITS_PER_RUN)))
            runs.append(run)
            now = [Change(u, chance.choices(shapes, weights)[0], chance.randint(*WORKERS_PER_UNIT)) for u in run]
        elif chance.random() < 0.5:
            now = [Change(unit, units[unit].shape, 0) for unit in runs.pop(chance.randrange(len(runs)))]
        else:
            run = chance.choice(runs)
            now = [
                Change(unit, units[unit].shape, max(1, round(units[unit].workers * chance.uniform(0.5, 1.5))))
                for unit in run
            ]
        for change in now:
            units[change.unit] = change
            yield change


def packing_order(shape: dt.Shape, free: FreeResources, way: CardAssignment) -> int:  # noqa: ARG001
    """The node with the least idle GPU, then with the fewest idle CPUs."""
    return (1 << 24) - 1 - (2048 * free.cards.idle_milli + free.cpu_milli // 100)


@dataclass(slots=True)
class History:
    """One policy that follows the changes on its own ledger."""

    policy: str
    cluster: dt.Cluster
    ledger: dt.Ledger = field(init=False)
    score: Score = field(init=False)
    placer: dt.Placer = field(init=False)
    group_placers: dict[dt.Shape, GroupPlacer] = field(default_factory=dict)
    asked: dict[int, Change] = field(default_factory=dict)
    """Unit -> the workers that it should have now."""
    workers: dict[int, list[Seats]] = field(default_factory=dict)
    waiting: deque[tuple[int, dt.Shape]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.ledger = dt.Ledger(self.cluster)
        best_fit = self.policy == "best_fit"
        self.score = policies.BestFit(self.cluster) if best_fit else policies.RuleScore(packing_order)
        self.placer = dt.Placer(self.ledger, self.score)

    def apply(self, change: Change) -> None:
        self.asked[change.unit] = change
        if self.policy == "fgd":
            # expected is what the runs ask for now: workers that run and workers that wait
            self.score = replan_score(dt.Workload((one.shape, one.workers) for one in self.asked.values()))
            self.group_placers = {}
        mine = self.workers.setdefault(change.unit, [])
        waits = sum(unit == change.unit for unit, _ in self.waiting)
        missing = change.workers - len(mine) - waits
        self.waiting.extend([(change.unit, change.shape)] * missing)
        for _ in range(-missing):
            if waits:
                self.waiting.remove((change.unit, change.shape))
                waits -= 1
            else:
                self.placer.give_back(mine.pop(self.worker_to_stop(mine)))
        full: set[dt.Shape] = set()
        self.waiting = deque(item for item in self.waiting if item[1] in full or not self.start(*item, full))

    def start(self, unit: int, shape: dt.Shape, full: set[dt.Shape]) -> bool:
        """Place one more worker of a unit if it fits; remember its shape if it does not."""
        if isinstance(self.score, dt.FragmentationScore):
            seats = self.place_in_group(shape, self.score)
        else:
            seats = self.placer.place(shape)
        if seats is None:
            full.add(shape)
            return False
        self.workers[unit].append(seats)
        return True

    def place_in_group(self, shape: dt.Shape, score: dt.FragmentationScore) -> Seats | None:
        """As replans do: the best score, then the least idle capacity, then the first node."""
        if shape not in self.group_placers:
            self.group_placers[shape] = GroupPlacer(score, shape)
        placer = self.group_placers[shape]
        able = [(run, position) for position, free in enumerate(self.ledger.free) if (run := placer.run(free))]
        if not able:
            return None
        run, position = min(able, key=lambda one: (-one[0].score, one[0].tie, one[1]))
        seats = tuple(seat._replace(node=self.cluster.nodes[position].name) for seat in run.workers[0])
        for seat in seats:
            self.ledger.take(seat)
        return seats

    def worker_to_stop(self, workers: Sequence[Seats]) -> int:
        """The number of the worker to stop, by fragmentation or by the idle capacity of its node."""

        def rank(number: int) -> tuple[int, ...]:
            seat = workers[number][0]
            free, position = self.ledger.free_on(seat.node), self.ledger.position(seat.node)
            if isinstance(self.score, dt.FragmentationScore):
                return (*stop_rank(self.score, free, free.given_back(seat)), position, number)
            return (free.cards.idle_milli, free.cpu_milli, position, number)

        return max(range(len(workers)), key=rank)

    def measure(self, expected: Fragmentation) -> dict[str, float]:
        gpus = sum(len(node.gpus) for node in self.cluster.nodes)
        idle = sum(free.cards.idle_milli for free in self.ledger.free) / 1000
        fragments = sum(expected.of_free(free) for free in self.ledger.free)
        return {
            "allocated": 1 - idle / gpus,
            "fragmentation": fragments / (1000 * expected.weight * gpus),
            "waiting": float(len(self.waiting)),
        }


def follow(policy: str, events: int, seed: int) -> dict[str, float]:
    """Mean over the events after the first quarter, in which the cluster fills."""
    cluster = dt.Cluster.parse(CLUSTER)
    expected = Fragmentation(dt.Workload((resources.shape(), weight) for resources, weight in SHAPES.items()))
    history = History(policy, cluster)
    measured = []
    script = list(changes(events, sum(len(node.gpus) for node in cluster.nodes), seed))
    for number, change in enumerate(script):
        history.apply(change)
        if 4 * number >= len(script):
            measured.append(history.measure(expected))
    return {key: statistics.fmean(row[key] for row in measured) for key in measured[0]}


def paired_difference(values: list[float], base: list[float]) -> tuple[float, float]:
    """Mean difference and its standard error."""
    differences = [value - reference for value, reference in zip(values, base, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return statistics.fmean(differences), error


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--events", type=int, default=400, help="runs that start, change size or end")
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--first-seed", type=int, default=0)
    asked = arguments.parse_args()
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    histories = {policy: [follow(policy, asked.events, seed) for seed in seeds] for policy in POLICIES}
    base = [one["allocated"] for one in histories["packing_order"]]
    results: dict[str, dict[str, Any]] = {}
    for policy, measured in histories.items():
        results[policy] = {key: statistics.fmean(one[key] for one in measured) for key in measured[0]}
        mean, error = paired_difference([one["allocated"] for one in measured], base)
        results[policy] |= {"difference": mean, "standard_error": error}
    print(f"{asked.events} events, {asked.seeds} seeds from {asked.first_seed}; shares of all GPUs")
    report.table(
        ["policy", "allocated", "fragmented", "workers waiting", "to packing_order", "standard error"],
        [[name, *results[name].values()] for name in POLICIES],
    )
    report.write(asked.json, {"events": asked.events, "seeds": list(seeds), "results": results})


if __name__ == "__main__":
    main()
