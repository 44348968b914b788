"""How is an owner written into the ledger of claims, and read back?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dovetail.claims.cards import seen_from
from dovetail.claims.owner import Owner, Process
from dovetail.resources.amounts import amounts_of, seats_of
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from dovetail.claims.cards import Uuids
    from dovetail.resources.seat import Seats

APPLICATION = 0x44544C47
"""Tells our files from those of others."""
VERSION = 1
COLUMNS = (
    *("id", "machine", "name", "pid", "born", "space", "since", "heartbeat", "waiting"),
    *("need", "ideal", "granted", "limits", "held", "cards"),
)
CREATE = f"CREATE TABLE claims ({COLUMNS[0]} TEXT PRIMARY KEY, {', '.join(COLUMNS[1:])})"
READ = f"SELECT {', '.join(COLUMNS)} FROM claims WHERE machine = ? ORDER BY since, id"  # noqa: S608 - our own names
WRITE = f"INSERT OR REPLACE INTO claims VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608
DELETE = "DELETE FROM claims WHERE id = ?"


def row_of(owner: Owner, machine: str, cards: Uuids) -> tuple[Any, ...]:
    pid, born, space = owner.process
    ideal = None if owner.ideal is None else _text(owner.ideal)
    amounts = [_text(seats_of(each)) for each in (owner.granted, owner.limit, owner.held)]
    times = (owner.since, owner.heartbeat, int(owner.waiting))
    return (
        owner.id,
        machine,
        owner.name,
        pid,
        born,
        space,
        *times,
        _text(owner.need),
        ideal,
        *amounts,
        json.dumps(cards),
    )


class BadRow(ValueError):
    """A row that no `row_of` made."""


def owner_of(row: tuple[Any, ...], cards: Uuids) -> Owner:
    """As it is seen by who has these cards."""
    try:
        return _owner_of(row, cards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRow(f"a row that cannot be read: {row!r:.200}: {error!r}") from None


def _owner_of(row: tuple[Any, ...], cards: Uuids) -> Owner:
    found = dict(zip(COLUMNS, row, strict=True))
    owner = Owner(
        id=found["id"],
        name=found["name"],
        process=Process(found["pid"], found["born"], found["space"]),
        since=found["since"],
        need=_seats(found["need"]),
        ideal=None if found["ideal"] is None else _seats(found["ideal"]),
        granted=amounts_of(_seats(found["granted"])),
        limit=amounts_of(_seats(found["limits"])),
        held=amounts_of(_seats(found["held"])),
        waiting=bool(found["waiting"]),
        heartbeat=found["heartbeat"],
    )
    return seen_from(owner, json.loads(found["cards"]), cards)


def _text(seats: Seats) -> str:
    return json.dumps([seat.to_dict() for seat in seats], separators=(",", ":"))


def _seats(text: str) -> Seats:
    return tuple(Seat.from_dict(data) for data in json.loads(text))
