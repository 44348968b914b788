"""Random pipelines, clusters and failures for the simulated engine, and the expected results."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import dovetail as dt
from dovetail.control.commands import Note
from dovetail.control.loop import run_loop
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import (
    Behaviour,
    Gives,
    Hangs,
    Kills,
    KillWorker,
    Lognormal,
    LoseNode,
    OutOfMemory,
    Raises,
    ScriptedEvent,
    Slow,
    World,
)
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs
from stage_functions import same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.commands import Command, Deliver
    from dovetail.control.events import Event
    from dovetail.control.lifecycle import RunState
    from dovetail.engines.simulated.world import ItemOutcome, Key
    from dovetail.scheduling.plan import Plan

LIMIT_S = 500_000.0


class LedgerCheck:
    """Check the ledger after every step, and keep the notes."""

    def __init__(self, stream: StreamController) -> None:
        self.stream = stream
        self.notes: list[str] = []

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        self.notes += [command.text for command in commands if isinstance(command, Note)]
        fleet = self.stream.fleet
        for free in fleet.ledger.free:
            assert free.cpu_milli >= 0
            assert free.memory_bytes >= 0
            assert all(amount >= 0 for card in free.cards.free for amount in card)
        held = Counter(
            seat
            for worker in self.stream.state.workers.values()
            for seat in worker.seats
            if fleet.ledger.has_node(seat.node)
        )
        assert held == Counter(fleet.ledger.seats())
        for unit in self.stream.state.all_units:
            assert unit.queue.items >= 0
            assert unit.queue.bytes >= 0
            assert unit.items_in_flight >= 0

    def close(self, now: float) -> None:
        pass


@dataclass
class Case:
    """One random run: pipeline, cluster, plan and failures."""

    pipeline: dt.Pipeline
    cluster: dt.Cluster
    world: World
    items: int
    plan: Plan
    options: StreamOptions

    def outcome(self, unit: str, key: Key) -> int | None:
        """Number of items that this item finally becomes; None: it fails."""
        item = self.world.behaviours[unit].item
        assert item is not None
        if key in self.world.behaviours[unit].poison:
            return None
        last: ItemOutcome = Gives(1)
        for attempt in range(1, 6):
            last = item(key, attempt)
            if isinstance(last, Gives):
                return last.n
            if isinstance(last, Slow):
                return 1
        return None

    def expected(self, failed: Counter[tuple[str, Key]]) -> Counter[tuple[str, Key]]:
        """Output of the run if these items failed. Items that never succeed must be among the failed ones, items that
        never arrived must not; an item whose workers died may be."""
        works = unit_specs(self.pipeline, self.plan)
        arriving: dict[str, Counter[Key]] = {work.name: Counter() for work in works}
        out: Counter[tuple[str, Key]] = Counter()
        left = Counter(failed)
        parents = {name for work in works for name in work.parents}
        for work in works:
            if not work.parents:
                arriving[work.name].update((number,) for number in range(self.items))
            for key, count in arriving[work.name].items():
                gives = self.outcome(work.name, key)
                given_up = left.pop((work.name, key), 0)
                assert given_up <= count, f"{key} came {count} times to {work.name} and failed {given_up} times"
                if gives is None:
                    assert given_up == count, f"{key} cannot be done by {work.name} and did not fail"
                    continue
                children = [key] if gives == 1 else [(*key, child) for child in range(gives)]
                for child in children:
                    for other in works:
                        if work.name in other.parents:
                            arriving[other.name][child] += count - given_up
                    if work.name not in parents:
                        out[work.name, child] += count - given_up
        assert not left, f"failed and never arrived: {list(left)[:3]}"
        return +out


@dataclass
class Result:
    stream: StreamController
    data: SimulatedData
    watch: LedgerCheck

    @property
    def run_state(self) -> RunState:
        return self.stream.state.run_state

    def out(self) -> Counter[tuple[str, Key]]:
        return Counter((leaf, key) for leaf, keys in self.data.outputs.items() for key in keys)

    def failed(self) -> Counter[tuple[str, Key]]:
        keys = part_keys(record.part for record in self.data.failed_items)
        return Counter(zip((record.unit for record in self.data.failed_items), keys, strict=True))


def run(case: Case, resume: Sequence[Deliver] = ()) -> Result:
    engine = SimulatedEngine(case.world, case.cluster, limit_s=LIMIT_S)
    data = SimulatedData(engine, case.items)
    stream = StreamController(unit_specs(case.pipeline, case.plan), case.plan, case.options, resume)
    watch = LedgerCheck(stream)
    dropped = run_loop(stream, engine, data, [watch])
    assert not dropped, dropped[0][1]
    assert engine.workers == 0
    return Result(stream, data, watch)


def random_case(seed: int, *, failures: bool = True) -> Case:
    """A random case, determined by its seed."""
    random = Random(seed)
    stages = _stages(random)
    pipeline = dt.Pipeline(stages)
    nodes = random.randint(1, 4)
    gpus = "2xL40S:48GB"
    cluster = dt.Cluster.of(f"{nodes}x({random.choice((8, 16))}cpu, 64GB, {gpus})")
    mode = random.choice(("streaming", "sequential", "waves", "auto"))
    try:
        plan = dt.plan(pipeline, cluster, mode)
    except dt.InfeasibleError:
        plan = dt.plan(pipeline, cluster, "sequential")
    behaviours = {
        work.name: _behaviour(random, work.name, work.timeout_s is not None, failures)
        for work in unit_specs(pipeline, plan)
    }
    script = []
    if failures:
        names = list(behaviours)
        script += [
            ScriptedEvent(random.uniform(0, 60), KillWorker(random.choice(names), random.randint(0, 3)))
            for _ in range(random.randint(0, 6))
        ]
        lost = random.sample([node.name for node in cluster.nodes], random.randint(0, max(0, nodes - 1)))
        script += [ScriptedEvent(random.uniform(0, 60), LoseNode(name)) for name in lost]
    world = World(
        behaviours,
        seed=seed,
        script=tuple(script),
        breadcrumb_share=random.choice((1.0, 1.0, 0.5, 0.0)) if failures else 1.0,
        inexact_share=random.choice((0.0, 0.3)),
        tracked=True,
    )
    options = StreamOptions(
        ordered=random.random() < 0.3,
        target_epoch_batches=random.choice((1, 3, 20)),
        target_epoch_s=random.choice((0.01, 0.5)),
        queued_messages_per_slot=random.choice((1.0, 2.0)),
        byte_budget=random.choice((1, 10_000, 1 << 32)),
        max_wait_s=random.choice((None, 0.5)),
        target_message_s=random.choice((0.004, 3.0)),
        max_setup_failure_share=1.0,
    )
    return Case(pipeline, cluster, world, random.choice((0, 1, 7, 60, 200)), plan, options)


def _stages(random: Random) -> list[dt.Stage]:
    count = random.randint(1, 5)
    stages = []
    for index in range(count):
        if index == 0 or random.random() < 0.1:
            after = []
        else:
            after = random.sample([f"s{i}" for i in range(index)], random.randint(1, min(index, 2)))
        needs = random.choice(
            (dt.Resources(cpus=1), dt.Resources(cpus=1, memory="1GB"), dt.Resources(gpus=0.25), dt.Resources(gpus=1))
        )
        barrier = index > 0 and random.random() < 0.15
        stages.append(
            dt.Stage(
                f"s{index}",
                same,
                needs,
                batch_size=random.choice((1, 2, 5, 16)),
                after=after,
                rate=random.choice((None, 0.5, 2.0, 50.0)),
                slots=random.choice((None, 1, 3)),
                retries=random.choice((1, 2, 3)),
                on_error="skip",
                timeout=None if barrier else random.choice((None, None, "200s")),  # a barrier has no timeout
                barrier=barrier,
                recycle=random.choice((None, None, 5, "20s")),
                fuse=False,
            )
        )
    return stages


def _behaviour(random: Random, unit: str, has_timeout: bool, failures: bool) -> Behaviour:
    salt = random.getrandbits(30)
    bad = random.choice((0.0, 0.03)) if failures else 0.0
    fates: list[ItemOutcome] = [Raises("ValueError: bad"), Kills(), OutOfMemory(), Slow(10.0)]
    if has_timeout:
        fates.append(Hangs())
    fan = random.choice(((1,), (1,), (0, 1), (0, 1, 2, 3)))

    def item(key: Key, attempt: int) -> ItemOutcome:
        own = Random(f"{salt} {unit} {key}")
        chance, kind = own.random(), own.randrange(len(fates))
        if chance < bad:
            return fates[kind]
        if failures and chance < bad + 0.02 and attempt == 1:
            return Raises("OSError: only once")
        return Gives(own.choice(fan))

    return Behaviour(
        seconds_per_item=random.choice((0.01, 0.5, 2.0)),
        spread=Lognormal(0.5),
        setup_s=random.choice((0.0, 5.0)),
        deaths_per_hour=random.choice((0.0, 20.0)) if failures else 0.0,
        setup_failures=random.choice((0.0, 0.05)) if failures else 0.0,
        memory_items=random.choice((None, None, 3)) if failures else None,
        oom=random.choice(("death", "raise")),
        bytes_out=random.choice((0, 100)),
        poison=frozenset((random.randrange(200),) for _ in range(random.choice((0, 0, 1, 3))))
        if failures
        else frozenset(),
        item=item,
    )


def without_failures(case: Case) -> Case:
    return replace(case, world=replace(case.world, script=()))
