"""What is the largest worker that could be seated now?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.sizes import about_size, milli

if TYPE_CHECKING:
    from dovetail.resources.free import Free
    from dovetail.resources.ledger import Ledger


class Largest(NamedTuple):
    """All that one worker could get on one node; with most whole GPUs first, then a share of one, then CPUs."""

    node: str
    whole_gpus: int
    gpu_share_milli: int
    gpu_memory_bytes: int
    cpu_milli: int
    memory_bytes: int

    def describe(self) -> str:
        parts = []
        if self.whole_gpus:
            parts.append(f"{self.whole_gpus} whole GPU{'s' if self.whole_gpus > 1 else ''}")
        elif self.gpu_share_milli:
            parts.append(f"{milli(self.gpu_share_milli)} GPU")
        if parts and self.gpu_memory_bytes:
            parts[0] += (
                f" of {about_size(self.gpu_memory_bytes)}"
                if self.whole_gpus
                else f" with {about_size(self.gpu_memory_bytes)}"
            )
        parts.append(f"{milli(self.cpu_milli)} CPUs")
        if self.memory_bytes:
            parts.append(f"{about_size(self.memory_bytes)} memory")
        return f"{', '.join(parts)} (on {self.node})"


def largest_worker(ledger: Ledger) -> Largest:
    """The first of the nodes that could seat the largest worker."""
    known: dict[Free, tuple[int, ...]] = {}
    best: Largest | None = None
    for node, free in zip(ledger.cluster.nodes, ledger.free, strict=True):
        if free not in known:
            known[free] = _all_of(free)
        if best is None or known[free] > best[1:]:
            best = Largest(node.name, *known[free])
    assert best is not None, "a cluster has at least one node"
    return best


def _all_of(free: Free) -> tuple[int, ...]:
    cards = free.cards
    whole = [card for index, card in enumerate(cards.free) if cards.is_whole(index)]
    share = max((card.milli for card in cards.free), default=0)
    memory = (
        min((card.memory_bytes for card in whole), default=0)
        if whole
        else max((card.memory_bytes for card in cards.free if card.milli), default=0)
    )
    return len(whole), share, memory, free.cpu_milli, free.memory_bytes
