"""Transfers of payloads between nodes, limited by the size of Ray's object stores.

What goes to another agent lies in the store of its node and in that of the other, until it is taken out there.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from dovetail.engines.local.payload_codec import layout_bytes
from dovetail.engines.ray.protocol import MESSAGE_OVERHEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.engines.ray.agent_link import AgentLink
    from dovetail.engines.ray.driver_payloads import PayloadRef

    PayloadInfo = tuple[int, int, tuple[int, ...]]
    """Key, items and sizes of a payload."""

OBJECT_STORE_DIVISOR = 4
"""One part in so many of a node's store may be filled by what comes, or by what goes; one payload may always fly."""


class Transfer(NamedTuple):
    """Payloads that one agent gives to another, together."""

    number: int
    source: AgentLink
    target: AgentLink
    payloads: list[PayloadRef]
    """Held until it is over, so that the source has them when it is asked."""
    about: list[PayloadInfo]
    size: int


class TransferQueue:
    """For the thread of the loop, or who holds the engine's lock."""

    def __init__(self, stores: Mapping[str, int]) -> None:
        """`stores`: node -> bytes of its object store, as far as known."""
        self._stores = stores
        self._waiting: deque[Transfer] = deque()
        self._active: dict[int, Transfer] = {}
        self._numbers = count(1)
        self._bytes: Counter[tuple[str, str]] = Counter()

    def request(self, source: AgentLink, target: AgentLink, payloads: list[tuple[PayloadRef, PayloadInfo]]) -> None:
        refs, about = [ref for ref, _ in payloads], [one for _, one in payloads]
        target.send(("comes", [key for key, _, _ in about]))
        size = sum(layout_bytes(sizes) for _, _, sizes in about)
        self._waiting.append(Transfer(next(self._numbers), source, target, refs, about, size))
        self.start_ready()

    def on_over(self, _target: AgentLink, number: int) -> None:
        """It has come to its end, one way or the other."""
        self._end(number)
        self.start_ready()

    def on_missing(self, target: AgentLink, keys: list[int]) -> None:
        """These did not come: whoever needs them there is to ask again."""
        for flight in (*self._active.values(), *self._waiting):
            if flight.target is target:
                _forget_copies(flight, keys)

    def start_ready(self) -> None:
        """Whoever has room begins, in order; call it also when somebody is lost."""
        for number, flight in list(self._active.items()):
            if flight.source.lost_reason:  # Ray may look for it for a minute
                _lose_transfer(flight)
            if flight.source.lost_reason or flight.target.lost_reason:
                self._end(number)
        full: set[tuple[str, str]] = set()
        for _ in range(len(self._waiting)):
            flight = self._waiting.popleft()
            if flight.source.lost_reason:
                _lose_transfer(flight)
            if flight.source.lost_reason or flight.target.lost_reason:
                continue
            if full.isdisjoint(_endpoints(flight)) and all(
                self._has_space(end, flight.size) for end in _endpoints(flight)
            ):
                self._begin(flight)
            else:
                full.update(_endpoints(flight))
                self._waiting.append(flight)

    def _has_space(self, end: tuple[str, str], size: int) -> bool:
        store = self._stores.get(end[0], 0)
        return not store or not self._bytes[end] or self._bytes[end] + size <= store // OBJECT_STORE_DIVISOR

    def _begin(self, flight: Transfer) -> None:
        self._active[flight.number] = flight
        self._bytes.update(dict.fromkeys(_endpoints(flight), flight.size))
        flight.source.flush()
        given = flight.source.read_payloads([ref.key for ref in flight.payloads])
        flight.target.send(
            ("fetch", flight.number, flight.about, flight.target.attach_object(given)), MESSAGE_OVERHEAD_BYTES * 2
        )

    def _end(self, number: int) -> None:
        flight = self._active.pop(number, None)
        if flight is not None:
            self._bytes.subtract(dict.fromkeys(_endpoints(flight), flight.size))


def _lose_transfer(flight: Transfer) -> None:
    """Who gives it is gone."""
    keys = [key for key, _, _ in flight.about]
    _forget_copies(flight, keys)
    if not flight.target.lost_reason:
        flight.target.send(("lost", keys))


def _forget_copies(flight: Transfer, keys: list[int]) -> None:
    for ref in flight.payloads:
        if ref.copy_key in keys and flight.target in ref.copies:
            ref.copies.remove(flight.target)


def _endpoints(flight: Transfer) -> tuple[tuple[str, str], tuple[str, str]]:
    return (flight.source.node, "out"), (flight.target.node, "in")
