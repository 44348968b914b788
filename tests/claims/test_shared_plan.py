"""Plans for the free part of a machine, translated to the whole machine."""

from __future__ import annotations

import pytest

import dovetail as dt
from dovetail.claims.shared_plan import expand_plan, max_seats, min_seats, plan_around, remaining_cluster
from dovetail.control.commands import Note, StartWorker
from dovetail.resources.ledger import Ledger
from dovetail.resources.seat import CardShare, Seat
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs
from streaming.harness import of_kind, stage

MACHINE = dt.Cluster.of("1x(8cpu, 64GB, 3xL40S:48GB)")
L40S = 48 << 30


def seat_with(cpus: int, *cards: tuple[int, int], memory: int = 0) -> tuple[Seat, ...]:
    shares = tuple(CardShare(card, milli, L40S * milli // 1000) for card, milli in cards)
    return (Seat("node-0", 1000 * cpus, memory << 30, shares),)


@pytest.mark.parametrize(
    ("reserved", "expected"),
    [
        ((), "1x(8cpu, 64GB, 3xL40S)"),
        (seat_with(3, memory=16), "1x(5cpu, 48GB, 3xL40S)"),
        (seat_with(0, (0, 1000), (1, 500)), "1x(8cpu, 64GB, 1xL40S)"),
        (seat_with(0, (0, 1000), (1, 500), (2, 250)), "1x(8cpu, 64GB, 2xL40S)"),
        (seat_with(8, (0, 1000), (1, 1000), (2, 1000), memory=64), "1x(0cpu)"),
    ],
)
def test_what_is_left_of_a_machine(reserved: tuple[Seat, ...], expected: str) -> None:
    assert remaining_cluster(MACHINE, reserved).spec() == expected


def test_a_plan_for_the_rest_sits_on_the_right_cards_of_the_whole() -> None:
    reserved = seat_with(4, (0, 1000), (1, 1000))
    pipeline = dt.Pipeline([stage("a", rate=1.0, resources=dt.Resources(cpus=1, gpus=0.5))])
    plan = expand_plan(dt.plan(pipeline, remaining_cluster(MACHINE, reserved)), MACHINE, reserved)
    assert plan.cluster is MACHINE
    assert plan.workers == {"a": 2}
    assert {seat.gpus for seat in plan.seats["a"]} == {(2,)}
    assert "other runs use a part of this machine" in plan.warnings[-1]
    Ledger(MACHINE, [*reserved, *plan.seats["a"]])
    stream = StreamController(unit_specs(pipeline, plan), plan, StreamOptions(), reserved=reserved)
    first_commands = stream.step(0.0, [])
    assert len(of_kind(first_commands, StartWorker)) == 2
    assert "2 workers as planned" in [note.text for note in of_kind(first_commands, Note)]


def test_the_need_is_one_worker_of_each_unit_or_as_many_as_must_be() -> None:
    pipeline = dt.Pipeline([stage("a", cpus=0.5), stage("b", workers=2), stage("c", workers=(1, 3))])
    need = min_seats(dt.plan(pipeline, MACHINE))
    assert sorted(seat.cpu_milli for seat in need) == [500, 1000, 1000, 1000]


def test_of_waves_the_largest_counts() -> None:
    pipeline = dt.Pipeline([stage("a", cpus=5), stage("b", cpus=6)])
    need = min_seats(dt.plan(pipeline, MACHINE, "waves"))
    assert [seat.cpu_milli for seat in need] == [6000]


def test_a_run_whose_author_limits_every_unit_wants_no_more() -> None:
    pinned = dt.plan(dt.Pipeline([stage("a", workers=2), stage("b", workers=1)]), MACHINE)
    assert sum(seat.cpu_milli for seat in max_seats(pinned) or ()) == 3000
    assert max_seats(dt.plan(dt.Pipeline([stage("a", workers=2), stage("b")]), MACHINE)) is None


def test_where_only_parts_of_cards_are_left_the_run_begins_by_replanning() -> None:
    pipeline = dt.Pipeline(
        [
            stage("a", rate=1.0, resources=dt.Resources(cpus=1, gpus=0.5)),
            stage("b", rate=1.0, resources=dt.Resources(cpus=1, gpus=1)),
        ]
    )
    reserved = seat_with(4, (0, 1000), (1, 500))
    plan = plan_around(lambda cluster: dt.plan(pipeline, cluster, "streaming"), MACHINE, reserved)
    assert plan.cluster is MACHINE
    first_commands = StreamController(unit_specs(pipeline, plan), plan, StreamOptions(), reserved=reserved).step(
        0.0, []
    )
    seats = [start.seats[0] for start in of_kind(first_commands, StartWorker)]
    assert sorted(seat.gpus for seat in seats) == [(1,), (2,)]
    Ledger(MACHINE, [*reserved, *seats])
    with pytest.raises(dt.InfeasibleError):
        plan_around(lambda _: dt.plan(pipeline, "1x(1cpu)", "streaming"), MACHINE, ())
