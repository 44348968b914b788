"""Controllers that share one machine in virtual time: they start, share and release."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dovetail as dt
from claims.test_fair_share import cpus_of, owner
from dovetail.claims.fair_share import next_grant
from dovetail.claims.shared_plan import min_seats, plan_around
from dovetail.claims.updater import LimitTracker
from dovetail.control.commands import DATA_COMMANDS, Note
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.world import Behaviour, World
from dovetail.resources.amounts import (
    Amounts,
    add_amounts,
    cluster_capacity,
    fits_within,
    seats_from_amounts,
    subtract_amounts,
    sum_seats,
)
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs
from streaming.harness import numbers, stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.claims.owner import Owner
    from dovetail.control.events import Event

MACHINE = dt.Cluster.of("1x(8cpu, 64GB, 2xL40S:48GB)")
CAPACITY = cluster_capacity(MACHINE)
TICK_S = 0.25


class Run:
    """One run, with an account instead of a keeper."""

    def __init__(self, name: str, stages: Sequence[dt.Stage], items: int, begins: float) -> None:
        self.pipeline = dt.Pipeline(list(stages))
        self.items, self.begins = items, begins
        self.row: Owner = owner(name, *min_seats(dt.plan(self.pipeline, MACHINE)), since=begins)
        self.stream: StreamController | None = None
        self.events: list[Event] = []
        self.shares: list[tuple[float, int, int]] = []

    def begin(self, now: float) -> None:
        reserved = seats_from_amounts(subtract_amounts(CAPACITY, self.row.limit))
        plan = plan_around(lambda cluster: dt.plan(self.pipeline, cluster), MACHINE, reserved)
        works = unit_specs(self.pipeline, plan)
        world = World({work.name: Behaviour(0.4, setup_s=0.3) for work in works}, tracked=True)
        self.engine = SimulatedEngine(world, MACHINE, limit_s=50_000)
        self.data = SimulatedData(self.engine, self.items)
        self.stream = StreamController(works, plan, StreamOptions(), reserved=reserved)
        self.account = LimitTracker(CAPACITY, self.row.limit)
        self.offset = now

    @property
    def done(self) -> bool:
        return self.stream is not None and self.stream.done

    @property
    def held(self) -> Amounts:
        if self.stream is None:
            return {}
        return sum_seats(seat for worker in self.stream.state.workers.values() for seat in worker.seats)

    def advance(self, until: float) -> None:
        """Its loop, up to this moment."""
        stream = self.stream
        assert stream is not None
        while not stream.done:
            now = self.engine.now()
            commands = stream.step(now, self.events)
            self.account.record(self.events, commands)
            self.engine.submit([c for c in commands if type(c) not in DATA_COMMANDS and type(c) is not Note])  # type: ignore[misc]
            self.data.submit([c for c in commands if type(c) in DATA_COMMANDS])  # type: ignore[misc]
            left = until - self.offset - self.engine.now()
            if left <= 1e-9:
                self.events = []
                return
            wake = stream.wake_at()
            self.events = self.engine.poll(left if wake is None else max(0.0, min(left, wake - self.engine.now())))

    def out(self, leaf: str) -> Counter[Any]:
        return Counter(self.data.outputs.get(leaf, []))


def together(runs: list[Run], seconds: float = 2_000.0) -> float:
    """All of them, tick by tick; what they hold is looked at after each. When it ended."""
    now = 0.0
    while not all(run.done for run in runs):
        now += TICK_S
        assert now < seconds, [(run.row.name, run.row.waiting) for run in runs]
        there = [run for run in runs if run.begins <= now and not run.done]
        for run in there:
            rows = [other.row for other in there]
            if run.stream is None:
                run.row, share = next_grant(MACHINE, rows, run.row, {})
                if share is not None and fits_within(share.need, run.row.limit):
                    run.row = replace(run.row, waiting=False)
                    run.begin(now)
                continue
            run.row, _ = next_grant(MACHINE, rows, replace(run.row, held=run.account.held), run.account.may_use)
            event = run.account.next_limit_event(run.row.limit)
            if event is not None:
                run.engine.post(event)
            run.advance(now)
        check(there)
        for run in there:
            run.shares.append((now, cpus_of(run.held), len({key[1] for key in run.held if key[1] >= 0})))
    return now


def check(there: list[Run]) -> None:
    total: Amounts = {}
    for run in there:
        assert fits_within(run.held, run.row.granted)
        if not run.done:
            total = add_amounts(total, run.row.granted)
    assert fits_within(total, CAPACITY)


def mean_cpus(run: Run, since: float, until: float) -> float:
    found = [cpus for now, cpus, _ in run.shares if since <= now < until]
    return sum(found) / len(found)


def test_two_that_start_together_share_and_finish() -> None:
    runs = [Run(name, [stage("x"), stage("y")], 600, 0.25) for name in "ab"]
    ended = together(runs)
    for run in runs:
        assert run.stream is not None
        assert run.stream.state.run_state is RunState.FINISHED
        assert run.out("y") == numbers(600)
    first = min(run.shares[-1][0] for run in runs)
    both = [mean_cpus(run, 15.0, first - 5) for run in runs]
    assert all(3000 <= cpus <= 4000 for cpus in both), both
    assert ended < 1.5 * 2 * 600 * 2 * 0.4 / 8


def test_one_that_comes_later_gets_its_share_soon_and_the_first_grows_again() -> None:
    first, second = Run("a", [stage("x")], 1500, 0.0), Run("b", [stage("x")], 150, 20.0)
    together([first, second])
    assert first.out("x") == numbers(1500)
    assert second.out("x") == numbers(150)
    assert mean_cpus(first, 15.0, 20.0) == 8000
    begun = second.shares[0][0]
    assert any(cpus == 4000 for now, cpus, _ in second.shares if now < begun + 7.0)
    ended = second.shares[-1][0]
    assert any(cpus == 8000 for now, cpus, _ in first.shares if ended < now < ended + 7.0)


def test_cards_are_handed_over_whole() -> None:
    needs = dt.Resources(cpus=0.5, gpus=0.25)
    runs = [Run(name, [stage("x", resources=needs)], 1200, begins) for name, begins in (("a", 0.0), ("b", 10.0))]
    together(runs)
    for run in runs:
        assert run.out("x") == numbers(1200)
    until = min(run.shares[-1][0] for run in runs)
    assert {cards for run in runs for now, _, cards in run.shares if 25.0 < now < until - 1} == {1}


def test_one_that_needs_more_than_is_left_waits_until_the_other_has_ended() -> None:
    first, second = Run("a", [stage("x", cpus=5, workers=1)], 40, 0.0), Run("b", [stage("x", cpus=4)], 40, 1.0)
    together([first, second])
    assert second.offset >= first.shares[-1][0]
    assert second.out("x") == numbers(40)
