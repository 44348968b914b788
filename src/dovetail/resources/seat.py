"""Seat: the node, CPUs, memory and card shares of one worker.

Named tuples, because placement makes and hashes them by the million: a frozen dataclass costs five times as much.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class CardShare(NamedTuple):
    """Share of one card that a worker takes."""

    card: int
    """Its position on the node."""
    milli: int = 0
    memory_bytes: int = 0
    nvdecs: int = 0
    nvencs: int = 0


class Seat(NamedTuple):
    """The place of one process: node, CPUs, memory, and its share of each card."""

    node: str
    cpu_milli: int = 0
    memory_bytes: int = 0
    cards: tuple[CardShare, ...] = ()
    custom: tuple[tuple[str, int], ...] = ()

    @property
    def gpus(self) -> tuple[int, ...]:
        """Positions of its cards on the node."""
        return tuple(share.card for share in self.cards)

    @property
    def shares(self) -> tuple[float, ...]:
        """Its share of each card."""
        return tuple(share.milli / 1000 for share in self.cards)

    def to_dict(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "cpu_milli": self.cpu_milli,
            "memory_bytes": self.memory_bytes,
            "cards": [share._asdict() for share in self.cards],
            "custom": dict(self.custom),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Seat:
        return cls(
            node=data["node"],
            cpu_milli=data["cpu_milli"],
            memory_bytes=data["memory_bytes"],
            cards=tuple(CardShare(**share) for share in data["cards"]),
            custom=tuple(sorted(data["custom"].items())),
        )


Seats = tuple[Seat, ...]
"""Place of one worker: one seat, or one per rank of a gang."""
