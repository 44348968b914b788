"""CPU cost of the controller per event, by number of workers.

    python benchmarks/controller.py --workers 10,1000,10000 --json result.json

An event is a message that comes back, and whatever the controller then commands: mostly the next message for that
worker. There is no engine: a run with made-up workers is written down first, and then told to a new controller that
is timed, one event per step. It decides the same again, because it is pure.
"""

from __future__ import annotations

import gc
import heapq
import random
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import dovetail as dt
import report
from dovetail.control.commands import Pull, RunBatches, StartWorker, StopWorker
from dovetail.control.events import BatchesDone, ItemsArrived, WorkerReady, WorkerStopped
from dovetail.control.payload import Segment
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event

    Step = tuple[float, list[Event]]

RATES = {"read": 4.0, "work": 1.0, "write": 2.0}
"""Items per second and worker."""
JITTER = 0.2
CPUS_PER_NODE = 10
WARM = 3
"""Events per worker that are not counted: by then all have work, and speeds are known."""


def _same(items: list[object]) -> list[object]:
    return items


class Rehearsal:
    """A run without an engine: every command is answered when its time has come."""

    def __init__(self, workers: int, options: StreamOptions) -> None:
        nodes = max(1, round(workers / CPUS_PER_NODE))
        stages = [dt.Stage(name, _same, dt.Resources(cpus=1), rate=rate, fuse=False) for name, rate in RATES.items()]
        self.pipeline = dt.Pipeline(stages, name="controller")
        self.plan = dt.plan(self.pipeline, f"{nodes}x({CPUS_PER_NODE}cpu, 40GB)")
        self.options = options
        self.steps: list[Step] = []
        self.done = 0
        self._chance = random.Random(1)
        self._numbers = count(1)
        self._coming: list[tuple[float, int, Event]] = []
        self._free_at: dict[int, float] = {}
        self._unit: dict[int, str] = {}

    def stream(self) -> StreamController:
        return StreamController(unit_specs(self.pipeline, self.plan), self.plan, self.options)

    def go(self, events: int) -> None:
        """Until so many messages have come back."""
        stream, now = self.stream(), 0.0
        self._answer(now, stream.step(now, []))
        self.steps.append((now, []))
        while self.done < events:
            wake = stream.wake_at()
            now = min(self._coming[0][0], now + 1e9 if wake is None else max(now, wake))
            told: list[Event] = []
            if self._coming[0][0] <= now:
                told.append(heapq.heappop(self._coming)[2])
                self.done += type(told[0]) is BatchesDone
            self.steps.append((now, told))
            self._answer(now, stream.step(now, told))

    def _answer(self, now: float, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, StartWorker):
                self._unit[command.worker] = command.hosted[0].name
                self._later(now + 1.0, WorkerReady(command.worker, 1.0))
            elif isinstance(command, RunBatches):
                seconds = command.items / RATES[command.hosted] * self._chance.uniform(1 - JITTER, 1 + JITTER)
                at = max(now, self._free_at.get(command.worker, 0.0)) + seconds
                self._free_at[command.worker] = at
                self._later(at, BatchesDone(command.worker, command.message, [self._segment(command.items)], seconds))
            elif isinstance(command, Pull):
                cut = max(1, command.segment_items)
                sizes = [min(cut, command.items - start) for start in range(0, command.items, cut)]
                self._later(now, ItemsArrived(command.first, [self._segment(size) for size in sizes]))
            elif isinstance(command, StopWorker):
                at = max(now, self._free_at.get(command.worker, 0.0))
                self._later(at, WorkerStopped(command.worker))

    def _later(self, at: float, event: Event) -> None:
        heapq.heappush(self._coming, (at, next(self._numbers), event))

    def _segment(self, items: int) -> Segment:
        return Segment(next(self._numbers), items, 100 * items)


def measure(workers: int, events_per_worker: int, least: int, options: StreamOptions) -> dict[str, Any]:
    """The same run once more, timed from when all have work."""
    rehearsal = Rehearsal(workers, options)
    count_of_workers = sum(unit.workers for unit in rehearsal.plan.units)
    warm = max(WARM * count_of_workers, least // 10)
    rehearsal.go(warm + max(events_per_worker * count_of_workers, least))
    stream = rehearsal.stream()
    gc.collect()
    gc.freeze()  # what was written down is the benchmark's, and no controller has it
    done = step = 0
    while done < warm:
        now, told = rehearsal.steps[step]
        stream.step(now, told)
        done += bool(told) and type(told[0]) is BatchesDone
        step += 1
    rest = rehearsal.steps[step:]
    began = time.process_time()
    for now, told in rest:
        stream.step(now, told)
    spent = time.process_time() - began
    gc.unfreeze()
    return {
        "workers": count_of_workers,
        "events": rehearsal.done - warm,
        "steps": len(rest),
        "virtual_s": rest[-1][0] - rest[0][0],
        "cpu_s": spent,
        "us_per_event": 1e6 * spent / (rehearsal.done - warm),
    }


def row(workers: int, events_per_worker: int, least: int, repeat: int) -> dict[str, Any]:
    """The median of several; and once with replanning, which looks at every worker now and then, however many events
    there were since."""
    runs = [measure(workers, events_per_worker, least, StreamOptions(replan=False)) for _ in range(repeat)]
    found = sorted(runs, key=lambda run: run["us_per_event"])[len(runs) // 2]
    return found | {"with_replans_us": measure(workers, events_per_worker, least, StreamOptions())["us_per_event"]}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--workers", default="10,1000,10000")
    arguments.add_argument("--events", type=int, default=10, help="per worker")
    arguments.add_argument("--least", type=int, default=50_000, help="events, however few workers there are")
    arguments.add_argument("--repeat", type=int, default=3)
    asked = arguments.parse_args()
    rows = [row(int(workers), asked.events, asked.least, asked.repeat) for workers in asked.workers.split(",")]
    keys = ["workers", "events", "steps", "cpu_s", "us_per_event", "with_replans_us"]
    report.table(keys, [[found[key] for key in keys] for found in rows])
    growth = rows[-1]["us_per_event"] / rows[0]["us_per_event"]
    print(f"{growth:.2f} x as much per event with the most workers as with the fewest")
    report.write(asked.json, {"rows": rows, "growth": growth})


if __name__ == "__main__":
    main()
