"""Capacity reserved by other runs: which workers stop, and when the run grows again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

import dovetail as dt
from dovetail.control.commands import Note, StartWorker, StopWorker
from dovetail.control.events import CapacityReserved, WorkerReady, WorkerStopped
from dovetail.control.lifecycle import RunState, WorkerState
from dovetail.engines.simulated.world import Behaviour, JoinNode, PostEvent, ScriptedEvent
from dovetail.observe.replay import controller_from_record, controller_record
from dovetail.resources.amounts import (
    add_amounts,
    cluster_capacity,
    fits_within,
    min_amounts,
    seats_from_amounts,
    subtract_amounts,
    sum_seats,
)
from dovetail.resources.seat import CardShare, Seat
from dovetail.streaming.reserved_capacity import StayingWorker, select_released
from dovetail.streaming.settings import StreamOptions, unit_specs
from streaming.harness import ManualStream, assert_no_idle_worker, numbers, of_kind, simulate_stages, stage

if TYPE_CHECKING:
    from dovetail.resources.amounts import Amounts
    from dovetail.streaming.controller import StreamController

CARDS = "1x(8cpu, 64GB, 2xL40S:48GB)"
L40S = 48 << 30


def cpus(count: int, node: str = "node-0") -> CapacityReserved:
    return CapacityReserved((Seat(node, 1000 * count),))


def held_amounts(stream: StreamController) -> Amounts:
    return sum_seats(seat for worker in stream.state.workers.values() for seat in worker.seats)


# --- amounts

KEYS = st.tuples(st.sampled_from("ab"), st.sampled_from([-1, 0, 1]), st.sampled_from(["cpu_milli", "memory_bytes"]))
AMOUNTS = st.dictionaries(KEYS, st.integers(1, 9)).map(
    lambda found: {key: amount for key, amount in found.items() if key[1] < 0 or key[2] != "cpu_milli"}
)


@given(AMOUNTS, AMOUNTS)
def test_sums_and_differences_are_exact(one: Amounts, other: Amounts) -> None:
    assert sum_seats(seats_from_amounts(one)) == one
    assert subtract_amounts(add_amounts(one, other), other) == one
    assert add_amounts(subtract_amounts(one, other), min_amounts(one, other)) == one
    assert fits_within(one, add_amounts(one, other))


# --- workers that are stopped


def staying_worker(number: int, unit: str, milli: int = 1000) -> StayingWorker:
    return StayingWorker(number, unit, {("n", -1, "cpu_milli"): milli})


def test_the_newest_worker_of_the_unit_with_the_largest_surplus_is_stopped_first() -> None:
    staying = [
        staying_worker(1, "a"),
        staying_worker(2, "a"),
        staying_worker(3, "b"),
        staying_worker(4, "b"),
        staying_worker(5, "b"),
        staying_worker(6, "a"),
    ]
    assert select_released(staying, {"a": 1, "b": 2}, {("n", -1, "cpu_milli"): 1}) == [6]
    assert select_released(staying, {"a": 1, "b": 1}, {("n", -1, "cpu_milli"): 1500}) == [6, 5]


def test_one_large_worker_is_stopped_instead_of_many_small_ones() -> None:
    staying = [
        *[staying_worker(number, "small") for number in range(8)],
        staying_worker(8, "large", 4000),
        staying_worker(9, "large", 4000),
    ]
    assert select_released(staying, {"small": 1, "large": 1}, {("n", -1, "cpu_milli"): 4000}) == [9]


def test_the_last_worker_of_a_unit_stays_on_reserved_capacity() -> None:
    staying = [staying_worker(1, "a"), staying_worker(2, "b")]
    assert select_released(staying, {"a": 1, "b": 1}, {("n", -1, "cpu_milli"): 2000}) == []


def test_the_minimum_count_of_a_unit_is_given_up_last() -> None:
    staying = [
        staying_worker(1, "pinned"),
        staying_worker(2, "pinned"),
        staying_worker(3, "free"),
        staying_worker(4, "free"),
    ]
    lows = {"pinned": 2, "free": 1}
    assert select_released(staying, lows, {("n", -1, "cpu_milli"): 1000}) == [4]
    assert select_released(staying, lows, {("n", -1, "cpu_milli"): 2000}) == [4, 2]


# --- by manual


def test_workers_on_reserved_capacity_are_drained_and_not_replaced_there() -> None:
    manual = ManualStream.of([stage("a", rate=1.0)])
    manual.begin()
    commands = manual.step(cpus(3))
    stops = of_kind(commands, StopWorker)
    assert [stop.reason for stop in stops] == ["released for another run"] * 3
    commands = manual.step(*[WorkerStopped(stop.worker) for stop in stops], after=1.0)
    assert not of_kind(commands, StartWorker)
    assert len(manual.stream.state.workers) == 5
    manual.step(cpus(3), after=1.0)
    assert len(manual.stream.state.workers) == 5
    commands = manual.step(CapacityReserved(), after=1.0)
    assert len(of_kind(commands, StartWorker)) == 3


def test_capacity_reserved_at_the_start_is_not_used() -> None:
    manual = ManualStream.of([stage("a", rate=1.0)])
    whole = manual.stream.plan
    works = unit_specs(dt.Pipeline([stage("a", rate=1.0)]), whole)
    reserved = (Seat("node-0", 6000), Seat("elsewhere", 1000))
    manual = ManualStream(
        controller_from_record(controller_record(works, whole, StreamOptions(replan=False), reserved=reserved))
    )
    starts = of_kind(manual.step(), StartWorker)
    assert len(starts) == 2
    manual.step(*[WorkerReady(start.worker) for start in starts])
    assert manual.stream.view(manual.now).use["CPUs"] == (2000, 8000)


def test_a_plan_beside_reserved_capacity_is_followed() -> None:
    manual = ManualStream.of([stage("a", rate=1.0, workers=2)])
    works = unit_specs(dt.Pipeline([stage("a", rate=1.0, workers=2)]), manual.stream.plan)
    reserved = (Seat("node-0", 6000),)
    manual = ManualStream(
        controller_from_record(
            controller_record(works, manual.stream.plan, StreamOptions(replan=False), reserved=reserved)
        )
    )
    manual.step()
    assert any("as planned" in note.text for note in of_kind(manual.commands, Note))


def test_a_drain_is_cancelled_when_the_reservation_ends() -> None:
    manual = ManualStream.of([stage("a", rate=1.0)], options=StreamOptions())
    manual.begin()
    manual.items(64)
    manual.step(cpus(4))
    draining = [w for w in manual.stream.state.workers.values() if w.state is WorkerState.DRAINING]
    assert len(draining) == 4
    manual.step(after=1.0)
    assert all(w.state is WorkerState.DRAINING for w in draining)
    manual.step(CapacityReserved(), after=1.0)
    assert all(w.state is WorkerState.READY for w in draining)


def test_only_the_rest_of_a_partly_reserved_card_is_used() -> None:
    needs = dt.Resources(cpus=0.1, gpus=0.25)
    half = CapacityReserved((Seat("node-0", cards=(CardShare(0, 500, L40S // 2), CardShare(1, 1000, L40S, 3, 3))),))
    rig = simulate_stages(
        [stage("a", resources=needs)],
        {"a": Behaviour(1.0)},
        200,
        cluster=CARDS,
        script=(ScriptedEvent(5.0, PostEvent(half)),),
        after_step=assert_no_idle_worker,
    )
    assert rig.out("a") == numbers(200)
    late = [start for now, start in rig.starts("a") if now > 5.0]
    assert all(share.card == 0 for start in late for share in start.seats[0].cards)


def test_a_recycled_worker_has_no_successor_on_reserved_capacity() -> None:
    rig = simulate_stages(
        [stage("a", recycle=5)],
        {"a": Behaviour(0.5)},
        300,
        script=(ScriptedEvent(4.0, PostEvent(cpus(6))),),
        after_step=assert_no_idle_worker,
    )
    assert rig.out("a") == numbers(300)
    assert all(len(rig.stream.state.workers) <= 2 for now, _ in rig.starts("a") if now > 10)


def test_a_run_without_free_capacity_waits_for_the_end_of_a_reservation() -> None:
    manual = ManualStream.of([stage("a", rate=1.0)])
    works = unit_specs(dt.Pipeline([stage("a", rate=1.0)]), manual.stream.plan)
    manual = ManualStream(
        controller_from_record(
            controller_record(works, manual.stream.plan, StreamOptions(replan=False), reserved=(Seat("node-0", 8000),))
        )
    )
    assert not of_kind(manual.step(), StartWorker)
    assert not manual.stream.state.is_ending
    assert of_kind(manual.step(CapacityReserved(), after=1.0), StartWorker)


def test_the_last_worker_of_a_unit_moves_to_free_capacity() -> None:
    needs = dt.Resources(cpus=0.1, gpus=1)
    first = CapacityReserved((Seat("node-0", cards=(CardShare(0, 1000, L40S),)),))
    rig = simulate_stages(
        [stage("a", resources=needs, workers=1)],
        {"a": Behaviour(1.0, setup_s=3.0)},
        60,
        cluster=CARDS,
        script=(ScriptedEvent(5.0, PostEvent(first)),),
    )
    assert rig.out("a") == numbers(60)
    (_, one), (moved, other) = rig.starts("a")
    assert (one.seats[0].gpus, other.seats[0].gpus) == ((0,), (1,))
    assert moved < 6.0
    [(stopped, stop)] = [entry for entry in rig.stops("a") if entry[1].worker == one.worker]
    assert 8.0 <= stopped < 10.0, "it works until the other is ready"
    assert "released" in stop.reason


def test_a_starting_worker_on_reserved_capacity_gets_no_messages() -> None:
    manual = ManualStream.of([stage("a", rate=1.0, workers=(1, 2))], cluster="2x(1cpu, 4GB)")
    first, second = (start.worker for start in of_kind(manual.step(), StartWorker))
    nodes = {worker.id: worker.node for worker in manual.stream.state.workers.values()}
    manual.step(CapacityReserved((Seat(nodes[first], 1000), Seat(nodes[second], 1000))))
    [last] = [worker for worker in manual.stream.state.workers.values() if worker.state is WorkerState.STARTING]
    manual.step(
        CapacityReserved((Seat(last.node, 1000),)), WorkerStopped(first if last.id == second else second), after=1.0
    )
    starts = of_kind(manual.step(after=1.0), StartWorker)
    others = [worker for worker in manual.stream.state.workers.values() if worker is not last]
    assert len(others) == 1, starts
    manual.step(WorkerReady(last.id), after=1.0)
    manual.step(WorkerReady(others[0].id), after=1.0)
    assert last.state is WorkerState.STOPPING
    assert manual.stream.state.units_by_name["a"].pool.free_count == 1


# --- whatever is reserved, whenever

SHARE = st.integers(0, 4).map(lambda quarter: quarter * 250)


@st.composite
def reservations(draw: st.DrawFn) -> CapacityReserved:
    seats = []
    for node in ("node-0", "node-1", "gone"):
        cards = tuple(
            CardShare(card, milli, L40S * milli // 1000, milli // 400, milli // 400)
            for card, milli in enumerate((draw(SHARE), draw(SHARE)))
            if milli
        )
        seats.append(Seat(node, draw(st.integers(0, 8)) * 1000, draw(st.integers(0, 64)) << 30, cards))
    return CapacityReserved(tuple(seat for seat in seats if seat.cpu_milli or seat.cards))


@settings(max_examples=max(1, settings().max_examples // 5))
@given(
    times=st.lists(st.tuples(st.floats(0.0, 40.0), reservations()), min_size=1, max_size=5),
    recycle=st.sampled_from([None, 3]),
    seed=st.integers(0, 999),
    deaths=st.sampled_from([0.0, 60.0]),
    joins=st.booleans(),
)
def test_random_reservations_are_respected_and_lose_no_items(
    times: list[tuple[float, CapacityReserved]], recycle: int | None, seed: int, deaths: float, joins: bool
) -> None:
    times = sorted(times, key=lambda entry: entry[0])
    last = times[-1][1]
    cluster = dt.Cluster.of("2x(8cpu, 64GB, 2xL40S:48GB)")
    seen: list[tuple[float, bool, int]] = []

    def look(stream: StreamController) -> None:
        assert_no_idle_worker(stream)
        capacity = cluster_capacity(stream.fleet.cluster)
        over = subtract_amounts(
            add_amounts(held_amounts(stream), min_amounts(sum_seats(last.seats), capacity)), capacity
        )
        on_it = [w for w in stream.state.workers.values() if not over.keys().isdisjoint(sum_seats(w.seats))]
        minimum = all(len(stream.state.units_by_name[worker.unit].workers) == 1 for worker in on_it)
        seen.append((stream.state.now, minimum, len(stream.state.workers)))

    script = [ScriptedEvent(time, PostEvent(event)) for time, event in times]
    script += [ScriptedEvent(90.0, PostEvent(CapacityReserved()))]
    script += [ScriptedEvent(20.0, JoinNode(dt.Node("new", 2000)))] if joins else []
    rig = simulate_stages(
        [
            stage("a", recycle=recycle),
            stage("b", resources=dt.Resources(cpus=0.5, gpus=0.25, memory="1GB")),
            stage("c", resources=dt.Resources(cpus=2), batch_size=3),
        ],
        {
            "a": Behaviour(0.3, setup_s=0.5, deaths_per_hour=deaths),
            "b": Behaviour(0.6, setup_s=2.0),
            "c": Behaviour(0.5),
        },
        900,
        cluster=cluster,
        script=tuple(script),
        after_step=look,
        world={"seed": seed},
    )
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.out("c") == numbers(900)
    for since in (75.0, 80.0, 85.0):  # a worker that moves is counted twice for a while
        settled = [fine for now, fine, _ in seen if since < now < since + 5.0]
        assert any(settled) or not settled
    before = max((count for now, _, count in seen if 75.0 < now < 90.0), default=0)
    after = max((count for now, _, count in seen if now >= 90.0), default=before)
    assert after >= before
