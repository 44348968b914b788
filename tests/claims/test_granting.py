"""Several keepers in one thread, by chance: do their grants and workers ever exceed the machine, and do they settle?"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from claims.test_sharing import cpu, gpu, owner
from dovetail.claims.account import Account
from dovetail.claims.granting import stepped
from dovetail.claims.sharing import shares_of
from dovetail.control.commands import StartWorker
from dovetail.control.events import Reserved, WorkerStopped
from dovetail.resources.amounts import Amounts, amounts_of, capacity_of, minus, plus, within
from dovetail.resources.ledger import Ledger
from dovetail.streaming.reserve import Reserve

if TYPE_CHECKING:
    from dovetail.claims.owner import Owner
    from dovetail.resources.seat import Seat

MACHINE = dt.Cluster.of("1x(8cpu, 64GB, 2xL40S:48GB)")
CAPACITY = capacity_of(MACHINE)


class Toy:
    """A run that starts whatever fits, and drains what it must, some time after it heard of it."""

    def __init__(self, row: Owner) -> None:
        self.row = row
        self.account = Account(CAPACITY, row.limit)
        self.reserve = Reserve()
        self.ledger = Ledger(MACHINE)
        self.workers: dict[int, Seat] = {}
        self.inbox: list[Reserved] = []
        self.number = 0

    def begin(self) -> None:
        self.account = Account(CAPACITY, self.row.limit)
        self.reserve = Reserve(seat for seat in _reserved(self.row.limit))

    def acts(self, random: Random, kinds: tuple[Seat, ...]) -> None:
        """One step of its loop: hears one word, starts some, loses some."""
        events: list[Reserved | WorkerStopped] = []
        if self.inbox:
            events.append(self.inbox.pop(0))
            self.reserve = Reserve(events[0].seats)  # type: ignore[union-attr]
        over = self.reserve.over(MACHINE, amounts_of(self.workers.values()))
        for number, seat in list(self.workers.items()):
            if (over and not over.keys().isdisjoint(amounts_of((seat,))) and random.random() < 0.5) or (
                random.random() < 0.05
            ):
                del self.workers[number]
                self.ledger.give_back(seat)
                events.append(WorkerStopped(number))
        starts = []
        for seat in kinds:
            if self.reserve.leaves(self.ledger.free_on(seat.node), seat) and self.ledger.takes(seat):
                self.number += 1
                self.workers[self.number] = seat
                starts.append(StartWorker(self.number, (seat,), ()))
        self.account.saw(events, starts)


def _reserved(limit: Amounts) -> tuple[Seat, ...]:
    from dovetail.resources.amounts import seats_of

    return seats_of(minus(CAPACITY, limit))


class Machine:
    """The ledger, without the file."""

    def __init__(self) -> None:
        self.toys: dict[str, Toy] = {}

    def turn(self, toy: Toy) -> None:
        rows = [other.row for other in self.toys.values()]
        if toy.row.waiting:
            toy.row, share = stepped(MACHINE, rows, toy.row, {})
            if share is not None and within(share.need, toy.row.limit):
                toy.row = replace(toy.row, waiting=False)
                toy.begin()
            return
        toy.row, _ = stepped(MACHINE, rows, replace(toy.row, held=toy.account.held), toy.account.believes)
        event = toy.account.tell(toy.row.limit)
        if event is not None:
            toy.inbox.append(event)

    def check(self) -> None:
        granted: Amounts = {}
        held: Amounts = {}
        for toy in self.toys.values():
            granted = plus(granted, toy.row.granted)
            mine = amounts_of(toy.workers.values())
            held = plus(held, mine)
            assert within(mine, toy.row.granted), (mine, toy.row)
            assert toy.account.held == mine
        assert within(granted, CAPACITY)
        assert within(held, CAPACITY)


KINDS = (cpu(1), gpu(250, 0, 100), gpu(250, 1, 100), cpu(0.5))


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
    shares = shares_of(MACHINE, rows)
    for toy in machine.toys.values():
        assert not toy.row.waiting
        assert toy.row.limit == shares[toy.row.id].amounts
        assert toy.row.granted == toy.row.limit


def test_a_limit_counts_until_a_later_one_was_heard() -> None:
    account = Account(CAPACITY, CAPACITY)
    half = {key: amount // 2 for key, amount in CAPACITY.items()}
    told = account.tell(half)
    assert told is not None
    assert account.tell(half) is None
    assert account.believes == CAPACITY
    account.saw([], [StartWorker(1, (cpu(6),), ())])
    assert account.saw([told], [])
    assert account.believes == {**half, ("node-0", -1, "cpu_milli"): 6000}
    assert account.saw([WorkerStopped(1)], [])
    assert account.believes == half
    assert not account.saw([told, WorkerStopped(7)], [])
