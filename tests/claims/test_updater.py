"""Claim updater: what a run posts and reports, and what the store records of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import dovetail as dt
from claims.test_fair_share import cpu, cpus_of
from dovetail.claims.sqlite_store import ClaimRequest, Grant, MachineClaimStore
from dovetail.claims.updater import ClaimUpdater
from dovetail.control.commands import StartWorker
from dovetail.control.events import CapacityReserved, WorkerStopped
from dovetail.errors import EngineError, Problem
from dovetail.resources.amounts import sum_seats
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.claims.owner import Owner
    from dovetail.control.events import Event
    from dovetail.resources.amounts import Amounts

MACHINE = dt.Cluster.of("1x(8cpu, 64GB)")


class Counted(MachineClaimStore):
    """Counts the updates of a keeper."""

    def update(self, me: Owner, held: Amounts, believes: Amounts) -> Owner:
        self.updates.append(1)
        return super().update(me, held, believes)

    @property
    def updates(self) -> list[int]:
        return self.__dict__.setdefault("_looks", [])  # type: ignore[no-any-return]


def start_updater(
    path: Path, name: str, posted: list[Event], say: Callable[[str], None] = print
) -> tuple[Counted, ClaimUpdater]:
    book = Counted(path / "ledger.db", "here", MACHINE)
    grant = book.request(ClaimRequest(name), (cpu(1),), accept_minimum=True)
    assert isinstance(grant, Grant)
    return book, ClaimUpdater(book, grant, posted.append, say, every_s=0.2, poll_s=0.01)


def test_the_ledger_knows_what_a_run_holds(tmp_path: Path) -> None:
    book, keeper = start_updater(tmp_path, "a", [])
    keeper.on_step(0.0, [], [StartWorker(1, (cpu(2),), ()), StartWorker(2, (cpu(1),), ())])
    until(lambda: cpus_of(book.owners()[0].held) == 3000)
    keeper.on_step(1.0, [WorkerStopped(1)], [])
    until(lambda: cpus_of(book.owners()[0].held) == 1000)
    keeper.close(2.0)
    keeper.close(2.0)
    until(lambda: book.owners() == [])


def test_a_run_releases_the_share_of_a_newcomer_only_after_it_read_its_limit(tmp_path: Path) -> None:
    posted: list[Event] = []
    book, keeper = start_updater(tmp_path, "a", posted)
    keeper.on_step(0.0, [], [StartWorker(number, (cpu(1),), ()) for number in range(6)])
    newcomer = ClaimRequest("b")
    assert not isinstance(book.request(newcomer, (cpu(3),)), Grant)
    until(lambda: posted)
    assert sum_seats(posted[0].seats) == sum_seats([cpu(4)._replace(memory_bytes=32 << 30)])  # type: ignore[union-attr]
    assert not isinstance(book.request(newcomer, (cpu(3),), accept_minimum=True), Grant)
    keeper.on_step(1.0, posted[:1], [])
    keeper.on_step(1.0, [WorkerStopped(1)], [])
    until(lambda: isinstance(book.request(newcomer, (cpu(3),), accept_minimum=True), Grant))
    assert len(posted) == 1
    book.release(newcomer.id)
    until(lambda: len(posted) == 2)
    assert posted[1] == CapacityReserved(())
    keeper.close(2.0)


def damage(path: Path) -> None:
    """Replace the file between two transactions: one that is under way would complete in the replaced file."""
    garbage = path.with_name("garbage")
    garbage.write_bytes(b"x" * 5000)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        garbage.replace(path)


def test_a_damaged_ledger_is_reported_once_and_the_run_continues(tmp_path: Path) -> None:
    messages: list[str] = []
    book, keeper = start_updater(tmp_path, "a", [], messages.append)
    damage(tmp_path / "ledger.db")
    until(lambda: messages, "the damage is reported")
    keeper.on_step(0.0, [], [StartWorker(1, (cpu(2),), ())])
    looked = len(book.updates)
    until(lambda: len(book.updates) > looked + 2)
    assert len(messages) == 1
    assert "DT320" in messages[0]
    (tmp_path / "ledger.db").unlink()
    until(lambda: (tmp_path / "ledger.db").exists() and [cpus_of(owner.held) for owner in book.owners()] == [2000])
    keeper.close(1.0)


class Deaf(Counted):
    """A store that sometimes does not answer whether it has changed."""

    deaf = False

    def has_changed(self) -> bool:
        if self.deaf:
            raise EngineError(Problem("DT397", "no answer"))
        return super().has_changed()


def test_a_store_that_does_not_answer_is_reported_once_and_read_again(tmp_path: Path) -> None:
    messages: list[str] = []
    book = Deaf(tmp_path / "ledger.db", "here", MACHINE)
    grant = book.request(ClaimRequest("a"), (cpu(1),), accept_minimum=True)
    assert isinstance(grant, Grant)
    keeper = ClaimUpdater(book, grant, lambda _: None, messages.append, every_s=0.05, poll_s=0.01)
    until(lambda: book.updates)
    book.deaf = True
    until(lambda: messages)
    book.deaf = False
    looked = len(book.updates)
    until(lambda: len(book.updates) > looked + 2)
    assert ["no answer" in line for line in messages] == [True]
    keeper.close(1.0)
    until(lambda: book.owners() == [])


def test_a_cluster_that_changed_between_grant_and_start_is_reported(tmp_path: Path) -> None:
    posted: list[Event] = []
    book = Counted(tmp_path / "ledger.db", "here", MACHINE)
    grant = book.request(ClaimRequest("a"), (cpu(1),), accept_minimum=True)
    assert isinstance(grant, Grant)
    book.capacity = book.capacity | {("node-1", -1, "cpu_milli"): 4000}
    keeper = ClaimUpdater(book, grant, posted.append, every_s=0.05, poll_s=0.01)
    until(lambda: posted)
    keeper.close(1.0)
    assert posted[0] == CapacityReserved((cpu(4, "node-1"),))
