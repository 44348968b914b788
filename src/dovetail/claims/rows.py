"""How is an owner written into the ledger of claims, and read back?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.claims.cards import seen_from
from dovetail.claims.owner import Owner, Process
from dovetail.resources.amounts import amounts_of, seats_of
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.claims.cards import Uuids
    from dovetail.resources.amounts import Amounts
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


def row_of(owner: Owner, machine: str, cards: Uuids, names: Mapping[str, str] | None = None) -> tuple[Any, ...]:
    """`names`: what a node is called in rows, where that is not our own name for it."""
    owner = renamed(owner, names) if names else owner
    pid, born, space = owner.process
    ideal = None if owner.ideal is None else _text(owner.ideal)
    if owner.cap is not None or owner.asks is not None:
        cap = None if owner.cap is None else _text(seats_of(owner.cap))
        ideal = json.dumps({"ideal": ideal, "cap": cap, "asks": owner.asks})
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


def owner_of(row: tuple[Any, ...], cards: Uuids, names: Mapping[str, str] | None = None) -> Owner:
    """As it is seen by who has these cards, and these names for the nodes of rows."""
    try:
        owner = _owner_of(row, cards)
        return renamed(owner, names) if names else owner
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRow(f"a row that cannot be read: {row!r:.200}: {error!r}") from None


def _owner_of(row: tuple[Any, ...], cards: Uuids) -> Owner:
    found = dict(zip(COLUMNS, row, strict=True))
    ideal, cap, asks = _ideal_and_more(found["ideal"])
    owner = Owner(
        id=found["id"],
        name=found["name"],
        process=Process(found["pid"], found["born"], found["space"]),
        since=found["since"],
        need=_seats(found["need"]),
        ideal=None if ideal is None else _seats(ideal),
        granted=amounts_of(_seats(found["granted"])),
        limit=amounts_of(_seats(found["limits"])),
        held=amounts_of(_seats(found["held"])),
        waiting=bool(found["waiting"]),
        heartbeat=found["heartbeat"],
        cap=None if cap is None else amounts_of(_seats(cap)),
        asks=None if asks is None else tuple(map(str, asks)),
    )
    return seen_from(owner, json.loads(found["cards"]), cards)


def _ideal_and_more(text: str | None) -> tuple[str | None, str | None, list[str] | None]:
    """Ideal, cap and asks are in one column, so that files of earlier versions stay readable."""
    if text is None or not text.startswith("{"):
        return text, None, None
    found = json.loads(text)
    return found["ideal"], found["cap"], found.get("asks")


def renamed(owner: Owner, names: Mapping[str, str]) -> Owner:
    """The same owner with other names for its nodes."""

    def seats(given: Seats) -> Seats:
        return tuple(seat._replace(node=names.get(seat.node, seat.node)) for seat in given)

    def amounts(given: Amounts) -> Amounts:
        return {(names.get(node, node), card, what): amount for (node, card, what), amount in given.items()}

    return replace(
        owner,
        need=seats(owner.need),
        ideal=None if owner.ideal is None else seats(owner.ideal),
        granted=amounts(owner.granted),
        limit=amounts(owner.limit),
        held=amounts(owner.held),
        cap=None if owner.cap is None else amounts(owner.cap),
    )


def _text(seats: Seats) -> str:
    return json.dumps([seat.to_dict() for seat in seats], separators=(",", ":"))


def _seats(text: str) -> Seats:
    return tuple(Seat.from_dict(data) for data in json.loads(text))
