"""Rows of the claim store: an owner to and from a row, GPUs matched by UUID, nodes by id; SQL statements.

GPUs are identified by their uuid where it is known (CUDA_VISIBLE_DEVICES hides some from a run), else by position.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.claims.owner import Owner, ProcessId
from dovetail.resources.amounts import HOST, seats_from_amounts, sum_seats
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats

CardUuids = dict[str, list[str]]
"""Node -> uuid of each of its GPUs."""


def card_uuids(cluster: Cluster) -> CardUuids:
    return {node.name: [gpu.uuid for gpu in node.gpus] for node in cluster.nodes if node.gpus}


def remap_cards(owner: Owner, theirs: CardUuids, ours: CardUuids) -> Owner:
    """The owner with its GPUs at this process's positions; GPUs that this process does not see are left out."""
    if theirs == ours:
        return owner
    places = {
        (node, card): _card_position(uuid, card, ours.get(node, []))
        for node, uuids in theirs.items()
        for card, uuid in enumerate(uuids)
    }
    return replace(
        owner,
        need=_remap_seats(owner.need, places),
        ideal=None if owner.ideal is None else _remap_seats(owner.ideal, places),
        granted=_remap_amounts(owner.granted, places),
        limit=_remap_amounts(owner.limit, places),
        held=_remap_amounts(owner.held, places),
        cap=None if owner.cap is None else _remap_amounts(owner.cap, places),
    )


def _card_position(uuid: str, card: int, ours: Sequence[str]) -> int | None:
    if uuid in ours and uuid:
        return ours.index(uuid)
    known = bool(uuid) and all(ours)
    return None if known or card >= len(ours) else card


def _remap_amounts(amounts: Amounts, places: Mapping[tuple[str, int], int | None]) -> Amounts:
    found: Amounts = {}
    for (node, card, what), amount in amounts.items():
        place = HOST if card == HOST else places.get((node, card))
        if place is not None:
            found[node, place, what] = amount
    return found


def _remap_seats(seats: Seats, places: Mapping[tuple[str, int], int | None]) -> Seats:
    return tuple(_remap_seat(seat, places) for seat in seats)


def _remap_seat(seat: Seat, places: Mapping[tuple[str, int], int | None]) -> Seat:
    there = ((share, places.get((seat.node, share.card))) for share in seat.cards)
    return seat._replace(cards=tuple(share._replace(card=place) for share, place in there if place is not None))


APPLICATION_ID = 0x44544C47
"""Marks the SQLite files of Dovetail."""
SCHEMA_VERSION = 2
COLUMNS = (
    *("id", "machine", "name", "pid", "born", "space", "since", "heartbeat", "waiting"),
    *("need", "ideal", "granted", "limits", "held", "cap", "labels", "cards"),
)
CREATE_SQL = f"CREATE TABLE claims ({COLUMNS[0]} TEXT PRIMARY KEY, {', '.join(COLUMNS[1:])})"
SELECT_SQL = f"SELECT {', '.join(COLUMNS)} FROM claims WHERE machine = ? ORDER BY since, id"  # noqa: S608 - our own names
UPSERT_SQL = f"INSERT OR REPLACE INTO claims VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608
DELETE_SQL = "DELETE FROM claims WHERE id = ?"


def owner_to_row(
    owner: Owner, machine: str, cards: CardUuids, names: Mapping[str, str] | None = None
) -> tuple[Any, ...]:
    """`names`: local name of a node -> its name in rows, where they differ."""
    owner = rename_nodes(owner, names) if names else owner
    pid, born, space = owner.process
    amounts = [_seats_to_json(seats_from_amounts(each)) for each in (owner.granted, owner.limit, owner.held)]
    times = (owner.since, owner.heartbeat, int(owner.waiting))
    return (
        owner.id,
        machine,
        owner.name,
        pid,
        born,
        space,
        *times,
        _seats_to_json(owner.need),
        None if owner.ideal is None else _seats_to_json(owner.ideal),
        *amounts,
        None if owner.cap is None else _seats_to_json(seats_from_amounts(owner.cap)),
        None if owner.required_labels is None else json.dumps(owner.required_labels),
        json.dumps(cards),
    )


class InvalidRowError(ValueError):
    """A row that `owner_to_row` did not write."""


def owner_from_row(row: tuple[Any, ...], cards: CardUuids, names: Mapping[str, str] | None = None) -> Owner:
    """Owner of a row, for a process with these GPUs; `names`: name of a node in rows -> local name."""
    try:
        owner = _parse_row(row, cards)
        return rename_nodes(owner, names) if names else owner
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRowError(f"invalid row: {row!r:.200}: {error!r}") from None


def _parse_row(row: tuple[Any, ...], cards: CardUuids) -> Owner:
    found = dict(zip(COLUMNS, row, strict=True))
    ideal, cap, labels = found["ideal"], found["cap"], found["labels"]
    owner = Owner(
        id=found["id"],
        name=found["name"],
        process=ProcessId(found["pid"], found["born"], found["space"]),
        since=found["since"],
        need=_seats_from_json(found["need"]),
        ideal=None if ideal is None else _seats_from_json(ideal),
        granted=sum_seats(_seats_from_json(found["granted"])),
        limit=sum_seats(_seats_from_json(found["limits"])),
        held=sum_seats(_seats_from_json(found["held"])),
        waiting=bool(found["waiting"]),
        heartbeat=found["heartbeat"],
        cap=None if cap is None else sum_seats(_seats_from_json(cap)),
        required_labels=None if labels is None else tuple(map(str, json.loads(labels))),
    )
    return remap_cards(owner, json.loads(found["cards"]), cards)


def rename_nodes(owner: Owner, names: Mapping[str, str]) -> Owner:
    """The owner with other names for its nodes."""

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


def _seats_to_json(seats: Seats) -> str:
    return json.dumps([seat.to_dict() for seat in seats], separators=(",", ":"))


def _seats_from_json(text: str) -> Seats:
    return tuple(Seat.from_dict(data) for data in json.loads(text))
