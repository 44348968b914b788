"""The ledger of a cluster: seats taken and released, with exact integer sums."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from dovetail.errors import LedgerError, Problem
from dovetail.resources.free_resources import FreeResources, NodeKind
from dovetail.resources.sizes import format_milli, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seat

CHANGES_LIMIT = 100_000


class Ledger:
    """The free state of every node of a cluster, and the seats that are taken.

    `changes` lists the nodes that changed, in order, so that caches per node refresh only these. When the list reaches
    its limit, it is cleared and `era` is incremented.
    """

    __slots__ = ("_free", "_index", "_seated", "changes", "cluster", "era")

    def __init__(self, cluster: Cluster, seats: Iterable[Seat] = ()) -> None:
        self.cluster = cluster
        self.changes: list[int] = []
        self.era = 0
        self._index = {node.name: index for index, node in enumerate(cluster.nodes)}
        self._seated: dict[Seat, int] = {}
        untouched: dict[object, FreeResources] = {}
        self._free: list[FreeResources] = []
        for node in cluster.nodes:
            alike = (node.usable_cpu_milli, node.memory_bytes, node.gpus, node.labels, node.custom)
            if alike not in untouched:
                untouched[alike] = NodeKind(node).untouched()
            self._free.append(untouched[alike])
        for seat in seats:
            self.take(seat)

    def copy(self) -> Ledger:
        """An independent ledger in the same state; nodes in the same state still share one object."""
        other = copy(self)
        other._become_independent()  # noqa: SLF001  its own class
        return other

    def _become_independent(self) -> None:
        self._free = self._free.copy()
        self._seated = self._seated.copy()
        self.changes = []
        self.era = 0

    @property
    def free(self) -> Sequence[FreeResources]:
        """Free resources of each node, in the order of the cluster."""
        return self._free

    def free_on(self, node: str) -> FreeResources:
        return self._free[self.position(node)]

    def position(self, node: str) -> int:
        """Position of the node in the cluster; LedgerError if it is not in the cluster."""
        try:
            return self._index[node]
        except KeyError:
            fix = f"one of: {', '.join(list(self._index)[:5])}" + (", ..." if len(self._index) > 5 else "")
            raise LedgerError(Problem("DT203", f"there is no node {node!r}", fixes=(fix,))) from None

    def has_node(self, node: str) -> bool:
        return node in self._index

    def seats(self) -> Iterator[Seat]:
        """All taken seats; a seat that is taken twice appears twice."""
        for seat, count in self._seated.items():
            for _ in range(count):
                yield seat

    def take(self, seat: Seat) -> None:
        """Take the seats of a worker; LedgerError, without any change, if they are not free."""
        if not self.try_take(seat):
            raise self._refused("DT201", seat, self.free_on(seat.node), "is taken")

    def try_take(self, seat: Seat) -> bool:
        """Take the seats of a worker if they are free; return whether they were taken."""
        index = self.position(seat.node)
        then = self._free[index].taken(seat)
        if then is None:
            return False
        self._seated[seat] = self._seated.get(seat, 0) + 1
        self._set(index, then)
        return True

    def give_back(self, seat: Seat) -> None:
        """Release a seat; LedgerError, without any change, if it is not taken."""
        index = self.position(seat.node)
        free = self._free[index]
        count = self._seated.get(seat, 0)
        if not count:
            raise self._refused("DT202", seat, free, "was not taken")
        if count == 1:
            del self._seated[seat]
        else:
            self._seated[seat] = count - 1
        self._set(index, free.given_back(seat))

    def _set(self, index: int, free: FreeResources) -> None:
        self._free[index] = free
        if len(self.changes) >= CHANGES_LIMIT:
            self.changes.clear()
            self.era += 1
        self.changes.append(index)

    def _refused(self, code: str, seat: Seat, free: FreeResources, what: str) -> LedgerError:
        cards = ", ".join(_card(f"#{share.card} ", *share[1:]) for share in seat.cards) or "no card"
        left = " + ".join(_card("", *card) for card in free.cards.free) or "none"
        evidence = (
            f"requested: {format_milli(seat.cpu_milli)} CPUs, {format_size(seat.memory_bytes)}, "
            f"{cards}{_custom(seat.custom)}",
            f"free:  {format_milli(free.cpu_milli)} CPUs, {format_size(free.memory_bytes)}, cards "
            f"{left}{_custom(free.custom)}",
        )
        fixes = ("place workers with a Placer, and give a seat back once",)
        return LedgerError(Problem(code, f"a seat on {seat.node!r} {what}", evidence, fixes))


def _card(name: str, share_milli: int, memory_bytes: int, nvdecs: int, nvencs: int) -> str:
    codecs = f" {nvdecs}/{nvencs} codecs" if nvdecs or nvencs else ""
    return f"{name}{format_milli(share_milli)} {format_size(memory_bytes)}{codecs}"


def _custom(amounts: tuple[tuple[str, int], ...]) -> str:
    return "".join(f", {format_milli(amount)} {name}" for name, amount in amounts)
