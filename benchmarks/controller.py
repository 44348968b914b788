"""CPU cost of the controller per event, by number of workers.

    python benchmarks/controller.py --workers 10,1000,10000 --json result.json

An event is a finished message with the commands that follow from it: mostly the next message for that worker. There is
no engine: a run with simulated workers is recorded first, then replayed to a new controller, which is timed, one event
per step. It makes the same decisions again, because it is pure.
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
WARM_UP_EVENTS = 3
"""Events per worker that are not counted; after them, all workers are busy and rates are known."""


def _same(items: list[object]) -> list[object]:
    return items


class Recording:
    """A run without an engine: every command is answered at its simulated time. Records the steps."""

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
        self._pending: list[tuple[float, int, Event]] = []
        self._free_at: dict[int, float] = {}
        self._unit: dict[int, str] = {}

    def stream(self) -> StreamController:
        return StreamController(unit_specs(self.pipeline, self.plan), self.plan, self.options)

    def record(self, events: int) -> None:
        """Run until this many messages are finished."""
        stream, now = self.stream(), 0.0
        self._answer(now, stream.step(now, []))
        self.steps.append((now, []))
        while self.done < events:
            wake = stream.wake_at()
            now = min(self._pending[0][0], now + 1e9 if wake is None else max(now, wake))
            events_now: list[Event] = []
            if self._pending[0][0] <= now:
                events_now.append(heapq.heappop(self._pending)[2])
                self.done += type(events_now[0]) is BatchesDone
            self.steps.append((now, events_now))
            self._answer(now, stream.step(now, events_now))

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
        heapq.heappush(self._pending, (at, next(self._numbers), event))

    def _segment(self, items: int) -> Segment:
        return Segment(next(self._numbers), items, 100 * items)


def measure(workers: int, events_per_worker: int, least: int, options: StreamOptions) -> dict[str, Any]:
    """Replay a recorded run, timed from when all workers are busy."""
    recording = Recording(workers, options)
    count_of_workers = sum(unit.workers for unit in recording.plan.units)
    warm = max(WARM_UP_EVENTS * count_of_workers, least // 10)
    recording.record(warm + max(events_per_worker * count_of_workers, least))
    stream = recording.stream()
    gc.collect()
    gc.freeze()  # the recording belongs to the benchmark, not to the controller
    done = step = 0
    while done < warm:
        now, events_now = recording.steps[step]
        stream.step(now, events_now)
        done += bool(events_now) and type(events_now[0]) is BatchesDone
        step += 1
    rest = recording.steps[step:]
    began = time.process_time()
    for now, events_now in rest:
        stream.step(now, events_now)
    spent = time.process_time() - began
    gc.unfreeze()
    return {
        "workers": count_of_workers,
        "events": recording.done - warm,
        "steps": len(rest),
        "virtual_s": rest[-1][0] - rest[0][0],
        "cpu_s": spent,
        "us_per_event": 1e6 * spent / (recording.done - warm),
    }


def row(workers: int, events_per_worker: int, least: int, repeat: int) -> dict[str, Any]:
    """Median of several runs; and one run with replanning, whose cost per replan grows with the number of workers."""
    runs = [measure(workers, events_per_worker, least, StreamOptions(replan=False)) for _ in range(repeat)]
    found = sorted(runs, key=lambda run: run["us_per_event"])[len(runs) // 2]
    return found | {"with_replans_us": measure(workers, events_per_worker, least, StreamOptions())["us_per_event"]}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--workers", default="10,1000,10000")
    arguments.add_argument("--events", type=int, default=10, help="per worker")
    arguments.add_argument("--least", type=int, default=50_000, help="minimum number of events")
    arguments.add_argument("--repeat", type=int, default=3)
    asked = arguments.parse_args()
    rows = [row(int(workers), asked.events, asked.least, asked.repeat) for workers in asked.workers.split(",")]
    keys = ["workers", "events", "steps", "cpu_s", "us_per_event", "with_replans_us"]
    report.table(keys, [[found[key] for key in keys] for found in rows])
    growth = rows[-1]["us_per_event"] / rows[0]["us_per_event"]
    print(f"{growth:.2f} times the cost per event with the most workers, compared with the fewest")
    report.write(asked.json, {"rows": rows, "growth": growth})


if __name__ == "__main__":
    main()
