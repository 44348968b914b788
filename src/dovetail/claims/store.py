"""Claim store: grants each run its share in one transaction over the rows of all runs; the base of the machine and the
cluster store.

Where the rows are kept is not decided here: a file of one machine (`ledger_db`), or the memory of a cluster.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dovetail.claims.fair_share import next_grant
from dovetail.claims.owner import Owner, is_alive, this_process
from dovetail.claims.serialization import InvalidRowError, card_uuids, owner_from_row, owner_to_row
from dovetail.resources.amounts import cluster_capacity, fits_within, seats_from_amounts, subtract_amounts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.claims.owner import ProcessId
    from dovetail.errors import DovetailError
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats

T = TypeVar("T")
Row = tuple[Any, ...]
HEARTBEAT_S = 5.0
"""A heartbeat that is the only news is not written more often."""
STALE_HEARTBEAT_S = 60.0
"""A heartbeat older than this is that of a process that is gone, where nothing else can tell."""


class ClaimRows(Protocol):
    """Where rows are kept. The first value of a row is its owner's id."""

    def read(self) -> list[Row]:
        """All of them, the first to come first."""

    def transact(self, decide: Callable[[list[Row]], tuple[list[str], Row | None, T]]) -> T:
        """Nobody else changes anything from the reading of the rows, which `decide` is given, until those it names are
        gone and the one it returns is written."""

    def delete(self, owner: str) -> None: ...

    def has_changed(self) -> bool:
        """Whether somebody wrote since this was last asked. Cheap."""

    def damaged_error(self, reason: str) -> DovetailError:
        """What to raise where a row is not one."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Who asks: the run as others are told of it."""

    name: str
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    cap: Amounts | None = None
    """Never more than this, whatever is free."""
    since: float | None = None
    """When it first asked, by the clock of the wall; None: now. Who asks again keeps its turn."""
    required_labels: tuple[str, ...] | None = None
    """Labels of nodes that its stages ask for; None: not known."""


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
    can_begin: bool
    """It could begin with what it has got so far."""
    will_fit: bool
    """There is room for it once the others have given back."""
    foreign: Amounts = field(default_factory=dict)
    """What is held by those who write no rows."""


class ClaimStore:
    """The owners of one machine or cluster."""

    scope = "this machine"
    stale_s, heartbeat_s = STALE_HEARTBEAT_S, HEARTBEAT_S

    def __init__(
        self,
        rows: ClaimRows,
        machine: str,
        cluster: Cluster,
        *,
        wall: Callable[[], float] = time.time,
        alive: Callable[[ProcessId], bool | None] = is_alive,
        process: Callable[[], ProcessId] = this_process,
    ) -> None:
        """`machine` is any text: only those who give the same one share."""
        self.machine = machine
        self.cluster = cluster
        self.capacity = cluster_capacity(cluster)
        self._cards = card_uuids(cluster)
        self._names: Mapping[str, str] = {}
        self._rows = rows
        self._wall, self._alive, self._process = wall, alive, process

    # --- what can be asked

    def request(
        self, about: ClaimRequest, need: Seats, ideal: Seats | None = None, *, hurry: bool = False
    ) -> Grant | Wait:
        """A place beside the others, who see that it waits. Granted when all of its share is free; with `hurry` as soon
        as its need is."""

        def asked(owners: list[Owner]) -> tuple[Owner, Grant | Wait]:
            now = self._wall()
            others = [owner for owner in owners if owner.id != about.id]
            mine = next((owner for owner in owners if owner.id == about.id), None)
            since = now if about.since is None else about.since
            me = mine or Owner(about.id, about.name, self._process(), since, need, ideal)
            me = replace(
                me, heartbeat=now, need=need, ideal=ideal, cap=about.cap, required_labels=about.required_labels
            )
            foreign = self.foreign_usage(owners)
            me, share = next_grant(self.cluster, [*others, me], me, {}, foreign)
            fits = share is not None and fits_within(share.need, me.limit)
            if fits and share is not None and (hurry or me.limit == share.amounts):
                me = replace(me, waiting=False)
                return me, Grant(me, self.reserved(me.limit))
            return me, Wait(me, tuple(others), fits, share is not None, foreign)

        return self._transact(asked)

    def update(self, me: Owner, held: Amounts, believes: Amounts) -> Owner:
        """One step of an owner that has begun: what it may use from now on. See `granting`."""

        def updated(owners: list[Owner]) -> tuple[Owner, Owner]:
            others = [owner for owner in owners if owner.id != me.id]
            mine = next((owner for owner in owners if owner.id == me.id), me)
            mine = replace(mine, need=me.need, ideal=me.ideal, cap=me.cap)
            mine = replace(mine, held=held, waiting=False, heartbeat=self._wall())
            found, _ = next_grant(self.cluster, [*others, mine], mine, believes, self.foreign_usage([*others, mine]))
            return found, found

        return self._transact(updated)

    def release(self, owner: str) -> None:
        """All of it is free for others."""
        self._rows.delete(owner)

    def owners(self) -> list[Owner]:
        """Everybody whose process is there, the first to come first."""
        try:
            return self._split_by_liveness(self._rows.read())[0]
        except InvalidRowError as error:
            raise self._rows.damaged_error(str(error)) from None

    def others(self, owner: str) -> list[Owner]:
        return [other for other in self.owners() if other.id != owner]

    def reserved(self, limit: Amounts) -> Seats:
        """Everything but this."""
        return seats_from_amounts(subtract_amounts(self.capacity, limit))

    def has_changed(self) -> bool:
        """Whether somebody wrote since this was last asked."""
        return self._rows.has_changed()

    def foreign_usage(self, owners: list[Owner]) -> Amounts:  # noqa: ARG002 - others have some
        """What is held by those who write no rows: on a machine nobody is known."""
        return {}

    # --- steps

    def _transact(self, decide: Callable[[list[Owner]], tuple[Owner, T]]) -> T:
        def change(rows: list[Row]) -> tuple[list[str], Row | None, T]:
            owners, void = self._split_by_liveness(rows)
            owner, answer = decide(owners)
            before = next((other for other in owners if other.id == owner.id), None)
            write = before is None or self._needs_write(before, owner)
            row = owner_to_row(owner, self.machine, self._cards, self._names) if write else None
            return [each.id for each in void], row, answer

        try:
            return self._rows.transact(change)
        except InvalidRowError as error:
            raise self._rows.damaged_error(str(error)) from None

    def _split_by_liveness(self, rows: list[Row]) -> tuple[list[Owner], list[Owner]]:
        """Those whose process is there, and those whose is gone."""
        names = {theirs: ours for ours, theirs in self._names.items()}
        found = [owner_from_row(row, self._cards, names) for row in rows]
        void = [owner for owner in found if not self._is_alive(owner)]
        return [owner for owner in found if owner not in void], void

    def _is_alive(self, owner: Owner) -> bool:
        there = self._alive(owner.process)
        return self._wall() - owner.heartbeat < self.stale_s if there is None else there

    def _needs_write(self, before: Owner, now: Owner) -> bool:
        beats = now.heartbeat - before.heartbeat >= self.heartbeat_s
        return beats or replace(before, heartbeat=0.0) != replace(now, heartbeat=0.0)
