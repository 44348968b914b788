"""Random sequences of claims in one thread: grants never exceed the machine, and settle at the shares."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

import dovetail as dt
from claims.test_fair_share import cpu, gpu, owner
from dovetail.claims.fair_share import fair_shares, next_grant
from dovetail.claims.updater import LimitTracker
from dovetail.control.commands import StartWorker
from dovetail.control.events import CapacityReserved, WorkerStopped
from dovetail.resources.amounts import (
    Amounts,
    add_amounts,
    cluster_capacity,
    fits_within,
    subtract_amounts,
    sum_seats,
)
from dovetail.resources.ledger import Ledger
from dovetail.streaming.reserved_capacity import ReservedCapacity
from waiting import LONG

if TYPE_CHECKING:
    from dovetail.claims.owner import Owner
    from dovetail.resources.seat import Seat

MACHINE = dt.Cluster.of("1x(8cpu, 64GB, 2xL40S:48GB)")
CAPACITY = cluster_capacity(MACHINE)


class Toy:
    """A run that starts whatever fits, and drains what it must, some time after it heard of it."""

    def __init__(self, row: Owner) -> None:
        self.row = row
        self.account = LimitTracker(CAPACITY, row.limit)
        self.reserve = ReservedCapacity()
        self.ledger = Ledger(MACHINE)
        self.workers: dict[int, Seat] = {}
        self.inbox: list[CapacityReserved] = []
        self.number = 0

    def begin(self) -> None:
        self.account = LimitTracker(CAPACITY, self.row.limit)
        self.reserve = ReservedCapacity(seat for seat in _reserved(self.row.limit))

    def acts(self, random: Random, kinds: tuple[Seat, ...]) -> None:
        """One step of its loop: hears one word, starts some, loses some."""
        events: list[CapacityReserved | WorkerStopped] = []
        if self.inbox:
            events.append(self.inbox.pop(0))
            self.reserve = ReservedCapacity(events[0].seats)  # type: ignore[union-attr]
        over = self.reserve.excess(MACHINE, sum_seats(self.workers.values()))
        for number, seat in list(self.workers.items()):
            if (over and not over.keys().isdisjoint(sum_seats((seat,))) and random.random() < 0.5) or (
                random.random() < 0.05
            ):
                del self.workers[number]
                self.ledger.give_back(seat)
                events.append(WorkerStopped(number))
        starts = []
        for seat in kinds:
            if self.reserve.allows(self.ledger.free_on(seat.node), seat) and self.ledger.try_take(seat):
                self.number += 1
                self.workers[self.number] = seat
                starts.append(StartWorker(self.number, (seat,), ()))
        self.account.record(events, starts)


def _reserved(limit: Amounts) -> tuple[Seat, ...]:
    from dovetail.resources.amounts import seats_from_amounts

    return seats_from_amounts(subtract_amounts(CAPACITY, limit))


class Machine:
    """The ledger, without the file."""

    def __init__(self) -> None:
        self.toys: dict[str, Toy] = {}

    def turn(self, toy: Toy) -> None:
        rows = [other.row for other in self.toys.values()]
        if toy.row.waiting:
            toy.row, share = next_grant(MACHINE, rows, toy.row, {})
            if share is not None and fits_within(share.need, toy.row.limit):
                toy.row = replace(toy.row, waiting=False)
                toy.begin()
            return
        toy.row, _ = next_grant(MACHINE, rows, replace(toy.row, held=toy.account.held), toy.account.may_use)
        event = toy.account.next_limit_event(toy.row.limit)
        if event is not None:
            toy.inbox.append(event)

    def check(self) -> None:
        granted: Amounts = {}
        held: Amounts = {}
        for toy in self.toys.values():
            granted = add_amounts(granted, toy.row.granted)
            mine = sum_seats(toy.workers.values())
            held = add_amounts(held, mine)
            assert fits_within(mine, toy.row.granted), (mine, toy.row)
            assert toy.account.held == mine
        assert fits_within(granted, CAPACITY)
        assert fits_within(held, CAPACITY)


KINDS = (cpu(1), gpu(250, 0, 100), gpu(250, 1, 100), cpu(0.5))


@settings(max_examples=settings().max_examples if LONG else min(10, settings().max_examples))
@given(st.integers(0, 10**9))
def test_grants_never_exceed_the_machine_and_settle_at_the_shares(seed: int) -> None:
    random = Random(seed)
    machine = Machine()
    for number in range(random.randint(1, 4)):
        need = random.choice(((cpu(1),), (cpu(1), gpu(250)), (gpu(500, 1),)))
        machine.toys[f"o{number}"] = Toy(owner(f"o{number}", *need, since=float(number)))
    for moment in range(600):
        toy = random.choice(list(machine.toys.values()))
        if random.random() < 0.5:
            machine.turn(toy)
        elif not toy.row.waiting:
            toy.acts(random, KINDS)
        if moment < 300 and random.random() < 0.01 and len(machine.toys) > 1:
            del machine.toys[random.choice(list(machine.toys))]
        machine.check()
    rows = [toy.row for toy in machine.toys.values()]
    shares = fair_shares(MACHINE, rows)
    for toy in machine.toys.values():
        assert not toy.row.waiting
        assert toy.row.limit == shares[toy.row.id].amounts
        assert toy.row.granted == toy.row.limit


def test_a_limit_counts_until_a_later_one_was_read() -> None:
    account = LimitTracker(CAPACITY, CAPACITY)
    half = {key: amount // 2 for key, amount in CAPACITY.items()}
    limit_event = account.next_limit_event(half)
    assert limit_event is not None
    assert account.next_limit_event(half) is None
    assert account.may_use == CAPACITY
    account.record([], [StartWorker(1, (cpu(6),), ())])
    assert account.record([limit_event], [])
    assert account.may_use == {**half, ("node-0", -1, "cpu_milli"): 6000}
    assert account.record([WorkerStopped(1)], [])
    assert account.may_use == half
    assert not account.record([limit_event, WorkerStopped(7)], [])
