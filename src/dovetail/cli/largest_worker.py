"""Largest worker that fits on a cluster now."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.sizes import format_milli, format_size

if TYPE_CHECKING:
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.ledger import Ledger


class LargestWorker(NamedTuple):
    """The largest possible worker on one node: by whole GPUs, then the share of one GPU, then CPUs."""

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
            parts.append(f"{format_milli(self.gpu_share_milli)} GPU")
        if parts and self.gpu_memory_bytes:
            parts[0] += (
                f" of {format_size(self.gpu_memory_bytes)}"
                if self.whole_gpus
                else f" with {format_size(self.gpu_memory_bytes)}"
            )
        parts.append(f"{format_milli(self.cpu_milli)} CPUs")
        if self.memory_bytes:
            parts.append(f"{format_size(self.memory_bytes)} memory")
        return f"{', '.join(parts)} (on {self.node})"


def largest_worker(ledger: Ledger) -> LargestWorker:
    """The largest worker, on the first node that can hold it."""
    known: dict[FreeResources, tuple[int, ...]] = {}
    best: LargestWorker | None = None
    for node, free in zip(ledger.cluster.nodes, ledger.free, strict=True):
        if free not in known:
            known[free] = _free_amounts(free)
        if best is None or known[free] > best[1:]:
            best = LargestWorker(node.name, *known[free])
    assert best is not None, "a cluster has at least one node"
    return best


def _free_amounts(free: FreeResources) -> tuple[int, ...]:
    cards = free.cards
    whole = [card for index, card in enumerate(cards.free) if cards.is_whole(index)]
    share = max((card.milli for card in cards.free), default=0)
    memory = (
        min((card.memory_bytes for card in whole), default=0)
        if whole
        else max((card.memory_bytes for card in cards.free if card.milli), default=0)
    )
    return len(whole), share, memory, free.cpu_milli, free.memory_bytes
