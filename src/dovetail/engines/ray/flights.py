"""How much may be on its way between nodes? As much as Ray's object stores hold without writing it to their disks.

What goes to another agent lies in the store of its node and in that of the other, until it is taken out there.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from dovetail.engines.local.payload import extent
from dovetail.engines.ray.wire import ABOUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.engines.ray.links import Link
    from dovetail.engines.ray.refs import Away

    About = tuple[int, int, tuple[int, ...]]
    """Key, items and sizes of a payload."""

SHARE = 4
"""One part in so many of a node's store may be filled by what comes, or by what goes; one payload may always fly."""


class Flight(NamedTuple):
    """Payloads that one agent gives to another, together."""

    number: int
    source: Link
    target: Link
    payloads: list[Away]
    """Held until it is over, so that the source has them when it is asked."""
    about: list[About]
    size: int


class Flights:
    """For the thread of the loop, or who holds the engine's lock."""

    def __init__(self, stores: Mapping[str, int]) -> None:
        """`stores`: node -> bytes of its object store, as far as known."""
        self._stores = stores
        self._waiting: deque[Flight] = deque()
        self._going: dict[int, Flight] = {}
        self._numbers = count(1)
        self._bytes: Counter[tuple[str, str]] = Counter()

    def ask(self, source: Link, target: Link, payloads: list[tuple[Away, About]]) -> None:
        refs, about = [ref for ref, _ in payloads], [one for _, one in payloads]
        target.tell(("comes", [key for key, _, _ in about]))
        size = sum(extent(sizes) for _, _, sizes in about)
        self._waiting.append(Flight(next(self._numbers), source, target, refs, about, size))
        self.go_on()

    def over(self, _target: Link, number: int) -> None:
        """It has come to its end, one way or the other."""
        self._end(number)
        self.go_on()

    def lacks(self, target: Link, keys: list[int]) -> None:
        """These did not come: whoever needs them there is to ask again."""
        for flight in (*self._going.values(), *self._waiting):
            if flight.target is target:
                _not_there(flight, keys)

    def go_on(self) -> None:
        """Whoever has room begins, in order; call it also when somebody is lost."""
        for number, flight in list(self._going.items()):
            if flight.source.dead:  # Ray may look for it for a minute
                _lose(flight)
            if flight.source.dead or flight.target.dead:
                self._end(number)
        full: set[tuple[str, str]] = set()
        for _ in range(len(self._waiting)):
            flight = self._waiting.popleft()
            if flight.source.dead:
                _lose(flight)
            if flight.source.dead or flight.target.dead:
                continue
            if full.isdisjoint(_ends(flight)) and all(self._has_room(end, flight.size) for end in _ends(flight)):
                self._begin(flight)
            else:
                full.update(_ends(flight))
                self._waiting.append(flight)

    def _has_room(self, end: tuple[str, str], size: int) -> bool:
        store = self._stores.get(end[0], 0)
        return not store or not self._bytes[end] or self._bytes[end] + size <= store // SHARE

    def _begin(self, flight: Flight) -> None:
        self._going[flight.number] = flight
        self._bytes.update(dict.fromkeys(_ends(flight), flight.size))
        flight.source.flush()
        given = flight.source.give([ref.key for ref in flight.payloads])
        flight.target.tell(("fetch", flight.number, flight.about, flight.target.beside(given)), ABOUT * 2)

    def _end(self, number: int) -> None:
        flight = self._going.pop(number, None)
        if flight is not None:
            self._bytes.subtract(dict.fromkeys(_ends(flight), flight.size))


def _lose(flight: Flight) -> None:
    """Who gives it is gone."""
    keys = [key for key, _, _ in flight.about]
    _not_there(flight, keys)
    if not flight.target.dead:
        flight.target.tell(("lost", keys))


def _not_there(flight: Flight, keys: list[int]) -> None:
    for ref in flight.payloads:
        if ref.copy_key in keys and flight.target in ref.copies:
            ref.copies.remove(flight.target)


def _ends(flight: Flight) -> tuple[tuple[str, str], tuple[str, str]]:
    return (flight.source.node, "out"), (flight.target.node, "in")
