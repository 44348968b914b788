"""Claim store: grants each run its share in one transaction over the rows of all runs; the base of the machine and the
cluster store.

The rows are in a file of one machine (`sqlite_store`) or in the memory of a cluster (`cluster_store`). `wait` requests
a claim before a run begins, `updater` updates it while the run goes, and `fair_share` computes every grant.
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
"""Minimum interval for writing a row in which only the heartbeat has changed."""
STALE_HEARTBEAT_S = 60.0
"""Age of a heartbeat at which its process counts as dead, where its liveness cannot be checked otherwise."""


class ClaimRows(Protocol):
    """Storage of rows. The first value of a row is the id of its owner."""

    def read(self) -> list[Row]:
        """All rows, in the order of arrival of their owners."""

    def transact(self, decide: Callable[[list[Row]], tuple[list[str], Row | None, T]]) -> T:
        """In one transaction: pass all rows to `decide`, delete the rows of the owners it returns, and write the row it
        returns."""

    def delete(self, owner: str) -> None: ...

    def has_changed(self) -> bool:
        """Whether a row was written since the last call. Cheap."""

    def damaged_error(self, reason: str) -> DovetailError:
        """Error to raise for an invalid row."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Identity and limits of the run that requests a claim."""

    name: str
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    cap: Amounts | None = None
    """Maximum, whatever is free; None: no cap."""
    since: float | None = None
    """Wall-clock time of its first request, which decides its turn; None: now."""
    required_labels: tuple[str, ...] | None = None
    """Node labels that its stages require; None: not known."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The run may begin, within this limit."""

    owner: Owner
    reserved: Seats
    """Everything outside of its limit: for the controller and `remaining_cluster`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Other runs hold what the run needs, or are about to release more."""

    owner: Owner
    others: tuple[Owner, ...]
    can_begin: bool
    """Whether it could begin with what it has been granted so far."""
    will_fit: bool
    """Whether its minimum fits once the others have released their surplus."""
    foreign: Amounts = field(default_factory=dict)
    """Usage by programs that write no rows."""


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
        """`machine`: only owners with the same text share."""
        self.machine = machine
        self.cluster = cluster
        self.capacity = cluster_capacity(cluster)
        self._cards = card_uuids(cluster)
        self._names: Mapping[str, str] = {}
        self._rows = rows
        self._wall, self._alive, self._process = wall, alive, process

    # --- operations

    def request(
        self, about: ClaimRequest, need: Seats, ideal: Seats | None = None, *, accept_minimum: bool = False
    ) -> Grant | Wait:
        """Request a share beside the other owners, which see that it waits. Granted when its whole share is free; with
        `accept_minimum` as soon as its minimum is."""

        def decide(owners: list[Owner]) -> tuple[Owner, Grant | Wait]:
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
            if fits and share is not None and (accept_minimum or me.limit == share.amounts):
                me = replace(me, waiting=False)
                return me, Grant(me, self.reserved(me.limit))
            return me, Wait(me, tuple(others), fits, share is not None, foreign)

        return self._transact(decide)

    def update(self, me: Owner, held: Amounts, may_use: Amounts) -> Owner:
        """One step of an owner that has begun: its next grant and limit. See `fair_share.next_grant`."""

        def decide(owners: list[Owner]) -> tuple[Owner, Owner]:
            others = [owner for owner in owners if owner.id != me.id]
            mine = next((owner for owner in owners if owner.id == me.id), me)
            mine = replace(mine, need=me.need, ideal=me.ideal, cap=me.cap)
            mine = replace(mine, held=held, waiting=False, heartbeat=self._wall())
            found, _ = next_grant(self.cluster, [*others, mine], mine, may_use, self.foreign_usage([*others, mine]))
            return found, found

        return self._transact(decide)

    def release(self, owner: str) -> None:
        """Delete the claim of an owner."""
        self._rows.delete(owner)

    def owners(self) -> list[Owner]:
        """All owners whose process is alive, in the order of arrival."""
        try:
            return self._split_by_liveness(self._rows.read())[0]
        except InvalidRowError as error:
            raise self._rows.damaged_error(str(error)) from None

    def others(self, owner: str) -> list[Owner]:
        return [other for other in self.owners() if other.id != owner]

    def reserved(self, limit: Amounts) -> Seats:
        """Everything outside of a limit."""
        return seats_from_amounts(subtract_amounts(self.capacity, limit))

    def has_changed(self) -> bool:
        """Whether a row was written since the last call."""
        return self._rows.has_changed()

    def foreign_usage(self, owners: list[Owner]) -> Amounts:  # noqa: ARG002 - for subclasses
        """Usage by programs that write no rows; unknown on a single machine."""
        return {}

    # --- transactions

    def _transact(self, decide: Callable[[list[Owner]], tuple[Owner, T]]) -> T:
        def change(rows: list[Row]) -> tuple[list[str], Row | None, T]:
            owners, dead = self._split_by_liveness(rows)
            owner, answer = decide(owners)
            before = next((other for other in owners if other.id == owner.id), None)
            write = before is None or self._needs_write(before, owner)
            row = owner_to_row(owner, self.machine, self._cards, self._names) if write else None
            return [each.id for each in dead], row, answer

        try:
            return self._rows.transact(change)
        except InvalidRowError as error:
            raise self._rows.damaged_error(str(error)) from None

    def _split_by_liveness(self, rows: list[Row]) -> tuple[list[Owner], list[Owner]]:
        """Owners whose process is alive, and owners whose process is not."""
        names = {theirs: ours for ours, theirs in self._names.items()}
        found = [owner_from_row(row, self._cards, names) for row in rows]
        dead = [owner for owner in found if not self._is_alive(owner)]
        return [owner for owner in found if owner not in dead], dead

    def _is_alive(self, owner: Owner) -> bool:
        alive = self._alive(owner.process)
        return self._wall() - owner.heartbeat < self.stale_s if alive is None else alive

    def _needs_write(self, before: Owner, now: Owner) -> bool:
        beats = now.heartbeat - before.heartbeat >= self.heartbeat_s
        return beats or replace(before, heartbeat=0.0) != replace(now, heartbeat=0.0)
