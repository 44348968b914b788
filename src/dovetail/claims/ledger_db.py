"""Where do the runs of one machine write down what each may use? A small SQLite file that all of them share.

Every look is one transaction on a connection of its own: nothing is kept open, so threads, forks and a file that was
replaced do no harm. Whoever looks removes the rows of processes that are gone.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dovetail.claims import rows
from dovetail.claims.cards import uuids_of
from dovetail.claims.granting import stepped
from dovetail.claims.owner import Owner, Process
from dovetail.claims.process import is_there, this_process
from dovetail.errors import ConfigError, Problem
from dovetail.resources.amounts import capacity_of, minus, seats_of, within

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats

T = TypeVar("T")
BUSY_S = 10.0
BEAT_S = 5.0
"""A heartbeat that is the only news is not written more often."""
STALE_S = 60.0
"""A heartbeat older than this is that of a process that is gone, where nothing else can tell."""


@dataclass(frozen=True, slots=True)
class About:
    """Who asks: the run as others are told of it."""

    name: str
    id: str = field(default_factory=lambda: os.urandom(8).hex())


@dataclass(frozen=True, slots=True)
class Grant:
    """It may begin, within this."""

    owner: Owner
    reserved: Seats
    """What is not its own: for `Stream(reserved=...)` and `left_of`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Others hold what it needs, or are about to give more."""

    owner: Owner
    others: tuple[Owner, ...]
    fits: bool
    """It could begin with what it has got so far."""
    comes: bool
    """There is room for it once the others have given back."""


class ClaimBook:
    """The owners of one machine. `machine` is any text: only those who give the same one share."""

    def __init__(
        self,
        path: str | Path,
        machine: str,
        cluster: Cluster,
        *,
        wall: Callable[[], float] = time.time,
        alive: Callable[[Process], bool | None] = is_there,
    ) -> None:
        self.path = Path(path)
        self.machine = machine
        self.cluster = cluster
        self.capacity = capacity_of(cluster)
        self._cards = uuids_of(cluster)
        self._wall = wall
        self._alive = alive
        self._stamp: tuple[int, ...] = ()

    # --- what can be asked

    def ask(self, about: About, need: Seats, ideal: Seats | None = None, *, hurry: bool = False) -> Grant | Wait:
        """A place beside the others, who see that it waits. Granted when all of its share is free; with `hurry` as soon
        as its need is."""

        def asked(owners: list[Owner]) -> tuple[Owner, Grant | Wait]:
            now = self._wall()
            others = [owner for owner in owners if owner.id != about.id]
            mine = next((owner for owner in owners if owner.id == about.id), None)
            me = mine or Owner(about.id, about.name, this_process(), now, need, ideal)
            me, share = stepped(self.cluster, [*others, me], replace(me, heartbeat=now, need=need, ideal=ideal), {})
            fits = share is not None and within(share.need, me.limit)
            if fits and share is not None and (hurry or me.limit == share.amounts):
                me = replace(me, waiting=False)
                return me, Grant(me, self.reserved(me.limit))
            return me, Wait(me, tuple(others), fits, share is not None)

        return self._changing(asked)

    def update(self, me: Owner, held: Amounts, believes: Amounts) -> Owner:
        """One step of an owner that has begun: what it may use from now on. See `granting`."""

        def updated(owners: list[Owner]) -> tuple[Owner, Owner]:
            others = [owner for owner in owners if owner.id != me.id]
            mine = next((owner for owner in owners if owner.id == me.id), me)
            mine = replace(mine, held=held, ideal=me.ideal, waiting=False, heartbeat=self._wall())
            found, _ = stepped(self.cluster, [*others, mine], mine, believes)
            return found, found

        return self._changing(updated)

    def release(self, owner: str) -> None:
        """All of it is free for others."""
        self._writing(lambda db: db.execute(rows.DELETE, (owner,)))

    def owners(self) -> list[Owner]:
        """Everybody whose process is there, the first to come first."""
        return self._do("BEGIN", lambda db: self._known(db)[0] if _is_ours(db) else [])

    def others(self, owner: str) -> list[Owner]:
        return [other for other in self.owners() if other.id != owner]

    def reserved(self, limit: Amounts) -> Seats:
        """Everything but this."""
        return seats_of(minus(self.capacity, limit))

    def changed(self) -> bool:
        """Whether somebody wrote since this was last asked. Cheap: a look at the file, not into it."""
        try:
            found = self.path.stat()
            stamp: tuple[int, ...] = (found.st_ino, found.st_mtime_ns, found.st_size)
        except OSError:
            stamp = ()
        before, self._stamp = self._stamp, stamp
        return before != stamp

    # --- transactions

    def _changing(self, decide: Callable[[list[Owner]], tuple[Owner, T]]) -> T:
        def change(db: sqlite3.Connection) -> T:
            owners, void = self._known(db)
            db.executemany(rows.DELETE, [(owner.id,) for owner in void])
            owner, answer = decide(owners)
            before = next((other for other in owners if other.id == owner.id), None)
            if before is None or _worth_writing(before, owner):
                db.execute(rows.WRITE, rows.row_of(owner, self.machine, self._cards))
            return answer

        return self._writing(change)

    def _known(self, db: sqlite3.Connection) -> tuple[list[Owner], list[Owner]]:
        """Those whose process is there, and those whose is gone."""
        found = [rows.owner_of(row, self._cards) for row in db.execute(rows.READ, (self.machine,))]
        void = [owner for owner in found if not self._is_there(owner)]
        return [owner for owner in found if owner not in void], void

    def _is_there(self, owner: Owner) -> bool:
        there = self._alive(owner.process)
        return self._wall() - owner.heartbeat < STALE_S if there is None else there

    def _writing(self, action: Callable[[sqlite3.Connection], T]) -> T:
        def act(db: sqlite3.Connection) -> T:
            if not _is_ours(db):
                db.execute(rows.CREATE)
                db.execute(f"PRAGMA application_id = {rows.APPLICATION}")
                db.execute(f"PRAGMA user_version = {rows.VERSION}")
            return action(db)

        return self._do("BEGIN IMMEDIATE", act)

    def _do(self, begin: str, action: Callable[[sqlite3.Connection], T]) -> T:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
                db.execute(begin)
                answer = action(db)
                db.execute("COMMIT")
                return answer
        except (sqlite3.OperationalError, OSError) as error:
            raise self._unusable(error) from None
        except (sqlite3.DatabaseError, rows.BadRow) as error:
            raise self._foreign(str(error)) from None

    def _unusable(self, error: Exception) -> ConfigError:
        reason = getattr(error, "strerror", None) or str(error)
        folder = self.path.parent
        evidence = () if os.access(folder, os.W_OK) else (f"the folder {folder} cannot be written",)
        fixes = ("export DOVETAIL_HOME=/a/folder/of/yours, on a disk of this machine",)
        message = f"the ledger of this machine's runs cannot be used: {reason}"
        return ConfigError(Problem("DT321", message, evidence, fixes, str(self.path)))

    def _foreign(self, reason: str) -> ConfigError:
        message = "is not the ledger of this machine's runs, or is damaged"
        fixes = (f"when no run is going: rm {self.path}", "or export DOVETAIL_HOME=/a/folder/of/yours")
        return ConfigError(Problem("DT320", message, (reason,), fixes, str(self.path)))


def _is_ours(db: sqlite3.Connection) -> bool:
    """False for an empty file; what others made is refused."""
    [application] = db.execute("PRAGMA application_id").fetchone()
    [version] = db.execute("PRAGMA user_version").fetchone()
    if (application, version) == (rows.APPLICATION, rows.VERSION):
        return True
    [tables] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application or version or tables:
        raise sqlite3.DatabaseError(f"a database of another program or version, with {tables} tables")
    return False


def _worth_writing(before: Owner, now: Owner) -> bool:
    return replace(before, heartbeat=0.0) != replace(now, heartbeat=0.0) or now.heartbeat - before.heartbeat >= BEAT_S
