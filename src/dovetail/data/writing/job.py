"""What does the end of a sink have to know?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.data.writing.sorting import as_they_came, in_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dovetail.control.writing import Piece
    from dovetail.data.writing.parts import PartReader
    from dovetail.data.writing.sorting import Stretch


@dataclass(frozen=True, slots=True)
class Old:
    """What was there before, and comes first."""

    path: Path
    size: int
    """Bytes of it that count."""


@dataclass(frozen=True, slots=True)
class Job:
    reader: PartReader
    pieces: Sequence[Piece]
    out: Path
    """Folder in which files are made that get their names when all is done."""
    run_id: str
    place: str
    """The sink, as messages call it."""
    kind: str
    packing: str | None
    ordered: bool
    shard_bytes: int | None
    columns: tuple[str, ...] | None
    compression: str | None
    old: Old | None = None

    def stretches(self) -> Iterator[Stretch]:
        return in_order(self.pieces, self.reader.told) if self.ordered else as_they_came(self.pieces)

    def path(self, number: int) -> Path:
        """Where file `number` is made."""
        return self.out / f"{number:05d}"
