"""Transfers of payloads between nodes, limited by the size of Ray's object stores.

A payload in transfer occupies the object stores of both nodes until the target agent has copied it. `driver_payloads`
requests transfers; `message_handlers` reports their end.
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

TRANSFER_STORE_DIVISOR = 4
"""Transfers into a node, and out of it, each occupy at most 1/4 of its object store; one transfer is always allowed."""


class Transfer(NamedTuple):
    """Payloads that one agent sends to another together."""

    number: int
    source: AgentLink
    target: AgentLink
    payloads: list[PayloadRef]
    """Referenced until the transfer is over, so that the source keeps them."""
    about: list[PayloadInfo]
    size: int


class TransferQueue:
    """Thread: loop only, or with the engine's lock."""

    def __init__(self, stores: Mapping[str, int]) -> None:
        """`stores`: node -> size of its object store in bytes, where known."""
        self._stores = stores
        self._waiting: deque[Transfer] = deque()
        self._active: dict[int, Transfer] = {}
        self._numbers = count(1)
        self._bytes: Counter[tuple[str, str]] = Counter()

    def request(self, source: AgentLink, target: AgentLink, payloads: list[tuple[PayloadRef, PayloadInfo]]) -> None:
        refs, about = [ref for ref, _ in payloads], [one for _, one in payloads]
        target.send(("expect", [key for key, _, _ in about]))
        size = sum(layout_bytes(sizes) for _, _, sizes in about)
        self._waiting.append(Transfer(next(self._numbers), source, target, refs, about, size))
        self.start_ready()

    def on_ended(self, _target: AgentLink, number: int) -> None:
        """A transfer has succeeded or failed."""
        self._end(number)
        self.start_ready()

    def on_missing(self, target: AgentLink, keys: list[int]) -> None:
        """Payloads did not arrive: the next message that needs them requests them again."""
        for transfer in (*self._active.values(), *self._waiting):
            if transfer.target is target:
                _forget_copies(transfer, keys)

    def start_ready(self) -> None:
        """Start the waiting transfers that fit, in order. Also called after a node was lost."""
        for number, transfer in list(self._active.items()):
            if transfer.source.lost_reason:  # Ray may wait a minute for it
                _lose_transfer(transfer)
            if transfer.source.lost_reason or transfer.target.lost_reason:
                self._end(number)
        full: set[tuple[str, str]] = set()
        for _ in range(len(self._waiting)):
            transfer = self._waiting.popleft()
            if transfer.source.lost_reason:
                _lose_transfer(transfer)
            if transfer.source.lost_reason or transfer.target.lost_reason:
                continue
            if full.isdisjoint(_endpoints(transfer)) and all(
                self._has_space(end, transfer.size) for end in _endpoints(transfer)
            ):
                self._begin(transfer)
            else:
                full.update(_endpoints(transfer))
                self._waiting.append(transfer)

    def _has_space(self, end: tuple[str, str], size: int) -> bool:
        store = self._stores.get(end[0], 0)
        return not store or not self._bytes[end] or self._bytes[end] + size <= store // TRANSFER_STORE_DIVISOR

    def _begin(self, transfer: Transfer) -> None:
        self._active[transfer.number] = transfer
        self._bytes.update(dict.fromkeys(_endpoints(transfer), transfer.size))
        transfer.source.flush()
        data = transfer.source.read_payloads([ref.key for ref in transfer.payloads])
        transfer.target.send(
            ("fetch", transfer.number, transfer.about, transfer.target.attach_object(data)), MESSAGE_OVERHEAD_BYTES * 2
        )

    def _end(self, number: int) -> None:
        transfer = self._active.pop(number, None)
        if transfer is not None:
            self._bytes.subtract(dict.fromkeys(_endpoints(transfer), transfer.size))


def _lose_transfer(transfer: Transfer) -> None:
    """The source agent is lost."""
    keys = [key for key, _, _ in transfer.about]
    _forget_copies(transfer, keys)
    if not transfer.target.lost_reason:
        transfer.target.send(("lost", keys))


def _forget_copies(transfer: Transfer, keys: list[int]) -> None:
    for ref in transfer.payloads:
        if ref.copy_key in keys and transfer.target in ref.copies:
            ref.copies.remove(transfer.target)


def _endpoints(transfer: Transfer) -> tuple[tuple[str, str], tuple[str, str]]:
    return (transfer.source.node, "out"), (transfer.target.node, "in")
