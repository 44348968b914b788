"""Others hold a part of the machine: does a run keep to the rest, lose nothing, and grow when it may?"""

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
from streaming.rigs import Hand, go, nobody_idles, numbers, of_kind, stage

if TYPE_CHECKING:
    from dovetail.resources.amounts import Amounts
    from dovetail.streaming.controller import StreamController

CARDS = "1x(8cpu, 64GB, 2xL40S:48GB)"
L40S = 48 << 30


def cpus(count: int, node: str = "node-0") -> CapacityReserved:
    return CapacityReserved((Seat(node, 1000 * count),))


def held(stream: StreamController) -> Amounts:
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


# --- who goes


def sitting(number: int, unit: str, milli: int = 1000) -> StayingWorker:
    return StayingWorker(number, unit, {("n", -1, "cpu_milli"): milli})


def test_the_newest_of_the_unit_with_most_to_spare_goes_first() -> None:
    staying = [sitting(1, "a"), sitting(2, "a"), sitting(3, "b"), sitting(4, "b"), sitting(5, "b"), sitting(6, "a")]
    assert select_released(staying, {"a": 1, "b": 2}, {("n", -1, "cpu_milli"): 1}) == [6]
    assert select_released(staying, {"a": 1, "b": 1}, {("n", -1, "cpu_milli"): 1500}) == [6, 5]


def test_one_large_worker_goes_instead_of_many_small_ones() -> None:
    staying = [*[sitting(number, "small") for number in range(8)], sitting(8, "large", 4000), sitting(9, "large", 4000)]
    assert select_released(staying, {"small": 1, "large": 1}, {("n", -1, "cpu_milli"): 4000}) == [9]


def test_the_last_of_a_unit_stays_even_if_that_is_too_much() -> None:
    staying = [sitting(1, "a"), sitting(2, "b")]
    assert select_released(staying, {"a": 1, "b": 1}, {("n", -1, "cpu_milli"): 2000}) == []


def test_below_what_its_author_asked_for_only_if_nobody_else_can_go() -> None:
    staying = [sitting(1, "pinned"), sitting(2, "pinned"), sitting(3, "free"), sitting(4, "free")]
    lows = {"pinned": 2, "free": 1}
    assert select_released(staying, lows, {("n", -1, "cpu_milli"): 1000}) == [4]
    assert select_released(staying, lows, {("n", -1, "cpu_milli"): 2000}) == [4, 2]


# --- by hand


def test_workers_are_drained_and_nobody_takes_what_they_leave() -> None:
    hand = Hand.of([stage("a", rate=1.0)])
    hand.begin()
    said = hand.step(cpus(3))
    stops = of_kind(said, StopWorker)
    assert [stop.reason for stop in stops] == ["released for another run"] * 3
    said = hand.step(*[WorkerStopped(stop.worker) for stop in stops], after=1.0)
    assert not of_kind(said, StartWorker)
    assert len(hand.stream.state.workers) == 5
    hand.step(cpus(3), after=1.0)
    assert len(hand.stream.state.workers) == 5
    said = hand.step(CapacityReserved(), after=1.0)
    assert len(of_kind(said, StartWorker)) == 3


def test_what_others_hold_when_it_begins_is_left_alone() -> None:
    hand = Hand.of([stage("a", rate=1.0)])
    whole = hand.stream.plan
    works = unit_specs(dt.Pipeline([stage("a", rate=1.0)]), whole)
    reserved = (Seat("node-0", 6000), Seat("elsewhere", 1000))
    hand = Hand(controller_from_record(controller_record(works, whole, StreamOptions(replan=False), reserved=reserved)))
    starts = of_kind(hand.step(), StartWorker)
    assert len(starts) == 2
    hand.step(*[WorkerReady(start.worker) for start in starts])
    assert hand.stream.view(hand.now).use["CPUs"] == (2000, 8000)


def test_a_plan_that_leaves_room_for_others_is_followed() -> None:
    hand = Hand.of([stage("a", rate=1.0, workers=2)])
    works = unit_specs(dt.Pipeline([stage("a", rate=1.0, workers=2)]), hand.stream.plan)
    reserved = (Seat("node-0", 6000),)
    hand = Hand(
        controller_from_record(
            controller_record(works, hand.stream.plan, StreamOptions(replan=False), reserved=reserved)
        )
    )
    hand.step()
    assert any("as planned" in note.text for note in of_kind(hand.said, Note))


def test_a_drain_is_taken_back_when_the_others_go_again() -> None:
    hand = Hand.of([stage("a", rate=1.0)], options=StreamOptions())
    hand.begin()
    hand.items(64)
    hand.step(cpus(4))
    draining = [w for w in hand.stream.state.workers.values() if w.state is WorkerState.DRAINING]
    assert len(draining) == 4
    hand.step(after=1.0)
    assert all(w.state is WorkerState.DRAINING for w in draining)
    hand.step(CapacityReserved(), after=1.0)
    assert all(w.state is WorkerState.READY for w in draining)


def test_of_a_card_only_what_is_left_is_used() -> None:
    needs = dt.Resources(cpus=0.1, gpus=0.25)
    half = CapacityReserved((Seat("node-0", cards=(CardShare(0, 500, L40S // 2), CardShare(1, 1000, L40S, 3, 3))),))
    rig = go(
        [stage("a", resources=needs)],
        {"a": Behaviour(1.0)},
        200,
        cluster=CARDS,
        script=(ScriptedEvent(5.0, PostEvent(half)),),
        after_step=nobody_idles,
    )
    assert rig.out("a") == numbers(200)
    late = [start for now, start in rig.starts("a") if now > 5.0]
    assert all(share.card == 0 for start in late for share in start.seats[0].cards)


def test_a_recycled_worker_has_no_successor_where_others_sit() -> None:
    rig = go(
        [stage("a", recycle=5)],
        {"a": Behaviour(0.5)},
        300,
        script=(ScriptedEvent(4.0, PostEvent(cpus(6))),),
        after_step=nobody_idles,
    )
    assert rig.out("a") == numbers(300)
    assert all(len(rig.stream.state.workers) <= 2 for now, _ in rig.starts("a") if now > 10)


def test_a_run_of_which_nothing_fits_waits_until_others_go() -> None:
    hand = Hand.of([stage("a", rate=1.0)])
    works = unit_specs(dt.Pipeline([stage("a", rate=1.0)]), hand.stream.plan)
    hand = Hand(
        controller_from_record(
            controller_record(works, hand.stream.plan, StreamOptions(replan=False), reserved=(Seat("node-0", 8000),))
        )
    )
    assert not of_kind(hand.step(), StartWorker)
    assert not hand.stream.state.is_ending
    assert of_kind(hand.step(CapacityReserved(), after=1.0), StartWorker)


def test_the_last_worker_of_a_unit_moves_to_where_nobody_else_sits() -> None:
    needs = dt.Resources(cpus=0.1, gpus=1)
    first = CapacityReserved((Seat("node-0", cards=(CardShare(0, 1000, L40S),)),))
    rig = go(
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


def test_one_that_was_still_starting_and_must_go_gets_no_work() -> None:
    hand = Hand.of([stage("a", rate=1.0, workers=(1, 2))], cluster="2x(1cpu, 4GB)")
    first, second = (start.worker for start in of_kind(hand.step(), StartWorker))
    nodes = {worker.id: worker.node for worker in hand.stream.state.workers.values()}
    hand.step(CapacityReserved((Seat(nodes[first], 1000), Seat(nodes[second], 1000))))
    [last] = [worker for worker in hand.stream.state.workers.values() if worker.state is WorkerState.STARTING]
    hand.step(
        CapacityReserved((Seat(last.node, 1000),)), WorkerStopped(first if last.id == second else second), after=1.0
    )
    starts = of_kind(hand.step(after=1.0), StartWorker)
    others = [worker for worker in hand.stream.state.workers.values() if worker is not last]
    assert len(others) == 1, starts
    hand.step(WorkerReady(last.id), after=1.0)
    hand.step(WorkerReady(others[0].id), after=1.0)
    assert last.state is WorkerState.STOPPING
    assert hand.stream.state.units_by_name["a"].pool.free_count == 1


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


@settings(max_examples=12)
@given(
    times=st.lists(st.tuples(st.floats(0.0, 40.0), reservations()), min_size=1, max_size=5),
    recycle=st.sampled_from([None, 3]),
    seed=st.integers(0, 999),
    deaths=st.sampled_from([0.0, 60.0]),
    joins=st.booleans(),
)
def test_random_reservations_lose_nothing_and_are_kept_to(
    times: list[tuple[float, CapacityReserved]], recycle: int | None, seed: int, deaths: float, joins: bool
) -> None:
    times = sorted(times, key=lambda entry: entry[0])
    last = times[-1][1]
    cluster = dt.Cluster.of("2x(8cpu, 64GB, 2xL40S:48GB)")
    seen: list[tuple[float, bool, int]] = []

    def look(stream: StreamController) -> None:
        nobody_idles(stream)
        capacity = cluster_capacity(stream.fleet.cluster)
        over = subtract_amounts(add_amounts(held(stream), min_amounts(sum_seats(last.seats), capacity)), capacity)
        on_it = [w for w in stream.state.workers.values() if not over.keys().isdisjoint(sum_seats(w.seats))]
        minimum = all(len(stream.state.units_by_name[worker.unit].workers) == 1 for worker in on_it)
        seen.append((stream.state.now, minimum, len(stream.state.workers)))

    script = [ScriptedEvent(time, PostEvent(event)) for time, event in times]
    script += [ScriptedEvent(90.0, PostEvent(CapacityReserved()))]
    script += [ScriptedEvent(20.0, JoinNode(dt.Node("new", 2000)))] if joins else []
    rig = go(
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
        1500,
        cluster=cluster,
        script=tuple(script),
        after_step=look,
        world={"seed": seed},
    )
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.out("c") == numbers(1500)
    for since in (75.0, 80.0, 85.0):  # one that moves is there twice for a while
        settled = [fine for now, fine, _ in seen if since < now < since + 5.0]
        assert any(settled) or not settled
    before = max((count for now, _, count in seen if 75.0 < now < 90.0), default=0)
    after = max((count for now, _, count in seen if now >= 90.0), default=before)
    assert after >= before
