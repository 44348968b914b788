"""Test harness: a stream on the simulated engine with all its steps, and a stream that a test steps itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import dovetail as dt
from dovetail.control.commands import Deliver, Note, Pull, RunBatches, StartWorker, StopWorker
from dovetail.control.events import BatchesDone, InputEnded, ItemsArrived, WorkerReady
from dovetail.control.loop import run_loop
from dovetail.control.payload import Segment
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, World
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs
from stage_functions import same
from streaming.random_runs import LedgerCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.control.lifecycle import RunState
    from dovetail.engines.simulated.world import Key, ScriptedEvent
    from dovetail.streaming.state import UnitState
    from dovetail.streaming.worker_pool import Suspect

C = TypeVar("C")
SMALL = "1x(8cpu, 64GB)"
UNTRACKED = {"tracked": False}
"""Setting of a world that counts items instead of tracking their keys: for long runs."""
Step = tuple[float, list["Event"], list["Command"]]


def stage(name: str, **settings: Any) -> dt.Stage:
    """A stage with one CPU that is never fused."""
    cpus = settings.pop("cpus", 1)
    needs = settings.pop("resources", None) or dt.Resources(cpus=cpus)
    return dt.Stage(name, same, needs, **({"fuse": False} | settings))


class StepLog(LedgerCheck):
    """All steps of a run, with a check after each."""

    def __init__(self, stream: StreamController, after_step: Callable[[StreamController], None] | None) -> None:
        super().__init__(stream)
        self.steps: list[Step] = []
        self.after_step = after_step

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        super().on_step(now, events, commands)
        self.steps.append((now, list(events), list(commands)))
        if self.after_step is not None:
            self.after_step(self.stream)


@dataclass
class SimulatedRun:
    """A simulated run that has ended, with all its steps and deliveries."""

    stream: StreamController
    engine: SimulatedEngine
    data: SimulatedData
    log: StepLog

    @property
    def run_state(self) -> RunState:
        return self.stream.state.run_state

    @property
    def error(self) -> str:
        return self.stream.state.error

    @property
    def seconds(self) -> float:
        return self.engine.now()

    def all(self, kind: type[C]) -> list[C]:
        """Every command of one kind."""
        return [command for _, _, commands in self.log.steps for command in commands if type(command) is kind]

    def timed(self, kind: type[C]) -> list[tuple[float, C]]:
        return [(now, command) for now, _, commands in self.log.steps for command in commands if type(command) is kind]

    def events(self, kind: type[C]) -> list[tuple[float, C]]:
        return [(now, event) for now, events, _ in self.log.steps for event in events if type(event) is kind]

    def messages(self, unit: str) -> list[RunBatches]:
        return [command for command in self.all(RunBatches) if command.hosted == unit]

    def starts(self, unit: str) -> list[tuple[float, StartWorker]]:
        return [(now, start) for now, start in self.timed(StartWorker) if start.hosted[0].name == unit]

    def stops(self, unit: str) -> list[tuple[float, StopWorker]]:
        mine = {start.worker for _, start in self.starts(unit)}
        return [(now, stop) for now, stop in self.timed(StopWorker) if stop.worker in mine]

    def notes(self, text: str) -> list[Note]:
        return [note for note in self.all(Note) if text in note.text]

    def out(self, leaf: str) -> Counter[Key]:
        return Counter(self.data.outputs.get(leaf, []))

    def failed(self) -> Counter[Key]:
        return Counter(part_keys(record.part for record in self.data.failed_items))


def numbers(items: int) -> Counter[Key]:
    return Counter((number,) for number in range(items))


def simulate_stages(
    stages: Sequence[dt.Stage],
    behaviours: Mapping[str, Behaviour],
    items: int | None,
    *,
    cluster: str | dt.Cluster = SMALL,
    options: StreamOptions | None = None,
    mode: Any = "streaming",
    script: tuple[ScriptedEvent, ...] = (),
    resume: Sequence[Deliver] = (),
    after_step: Callable[[StreamController], None] | None = None,
    source: Mapping[str, Any] | None = None,
    limit_s: float = 50_000.0,
    world: Mapping[str, Any] | None = None,
) -> SimulatedRun:
    """Plan the stages, simulate the run to its end, and return everything about it."""
    there = dt.Cluster.of(cluster) if isinstance(cluster, str) else cluster
    pipeline = dt.Pipeline(list(stages))
    plan = dt.plan(pipeline, there, mode)
    works = unit_specs(pipeline, plan)
    known = {work.name: behaviours.get(work.name, Behaviour(0.1)) for work in works}
    setting: dict[str, Any] = {"tracked": True, **(world or {})}
    engine = SimulatedEngine(World(known, script=script, **setting), there, limit_s=limit_s)
    data = SimulatedData(engine, items, **(source or {}))
    stream = StreamController(works, plan, options or StreamOptions(), resume)
    log = StepLog(stream, after_step)
    dropped = run_loop(stream, engine, data, [log])
    if dropped:
        raise dropped[0][1]
    assert engine.workers == 0
    return SimulatedRun(stream, engine, data, log)


def assert_no_idle_worker(stream: StreamController) -> None:
    """Assert that no worker is idle while a batch that may be sent waits for it."""
    state = stream.state
    if state.is_ending:
        return
    for unit in state.units:
        if unit.queue.ready and unit.pool.free_count:
            assert not unit.has_space_downstream(), f"{unit} could send and does not"
        if unit.suspects and unit.pool.find_idle() is not None:
            assert all(may_wait(unit, suspect) for suspect in unit.suspects), f"{unit} has idle workers and suspects"


def may_wait(unit: UnitState, suspect: Suspect) -> bool:
    """Whether failed items may wait although a worker is idle: for a larger one, a sound one, or the end of a trial."""
    if suspect.memory_bytes:
        return True
    if not suspect.needs_sound_worker:
        return False
    if suspect.broke_worker and unit.failures.trial is not None:
        return True
    return unit.waits_for_sound_worker(suspect) and not any(map(unit.is_sound, unit.pool.idle_workers()))


@dataclass
class ManualStream:
    """A stream that gets its events from the test."""

    stream: StreamController
    now: float = 0.0
    commands: list[Command] = field(default_factory=list)
    segments: int = 0

    @classmethod
    def of(
        cls,
        stages: Sequence[dt.Stage],
        cluster: str = SMALL,
        options: StreamOptions | None = None,
        mode: Any = "streaming",
        resume: Sequence[Deliver] = (),
    ) -> ManualStream:
        pipeline = dt.Pipeline(list(stages))
        plan = dt.plan(pipeline, dt.Cluster.of(cluster), mode)
        return cls(StreamController(unit_specs(pipeline, plan), plan, options or StreamOptions(replan=False), resume))

    def step(self, *events: Event, after: float = 0.0) -> list[Command]:
        self.now += after
        found = self.stream.step(self.now, list(events))
        self.commands += found
        return found

    def begin(self) -> list[Command]:
        """Start, and report all first workers as ready."""
        return self.step(*[WorkerReady(start.worker, 1.0) for start in of_kind(self.step(), StartWorker)])

    def segment(self, items: int, node: str = "", size_bytes: int = 0) -> Segment:
        self.segments += 1
        return Segment(self.segments, items, size_bytes, node)

    def items(self, *sizes: int, ends: bool = False, node: str = "") -> list[Command]:
        """Answer the last pull with segments of these sizes."""
        first = of_kind(self.commands, Pull)[-1].first
        arrived: list[Event] = [ItemsArrived(first, [self.segment(size, node) for size in sizes])]
        return self.step(*arrived, *([InputEnded(first + sum(sizes))] if ends else []))

    def done(
        self, message: RunBatches, *, out: int | None = None, seconds: float = 1.0, node: str = ""
    ) -> list[Command]:
        given = message.items if out is None else out
        segments = [self.segment(given, node)] if given else []
        return self.step(BatchesDone(message.worker, message.message, segments, seconds))


def of_kind(commands: Sequence[Command], kind: type[C]) -> list[C]:
    return [command for command in commands if type(command) is kind]
