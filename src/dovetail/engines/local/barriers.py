"""What becomes of the one message of a barrier inside a worker? Its payloads are opened one after another, and what
comes out is packed or written as it comes, so that neither is in memory as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.control.engine import Unreadable
from dovetail.control.events import Failure
from dovetail.control.splits import BLANK, BadRow
from dovetail.engines import rows
from dovetail.engines.batches import Outcome
from dovetail.engines.keys import as_tuples
from dovetail.engines.local.agreed import IN_FILE, reading_of_file
from dovetail.engines.local.payload import extent
from dovetail.engines.whole import AllRows, chunk_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.engines.keys import Keys
    from dovetail.engines.local.frames import Frame

MOST_ROWS = 2048
MOST_BYTES = 16 << 20
"""Of results that wait to be packed."""


class Input:
    """The payloads of a frame: those in files are opened when their turn comes, the others are mapped already."""

    def __init__(self, frame: Frame, bodies: Sequence[tuple[Any, Sequence[Any]]], load: Callable[..., Any]) -> None:
        self._payloads, parts = frame.head[6], frame.head[7]
        self._bodies = bodies
        self._unpickled = load
        self.read_s = 0.0
        self.items = sum(stop - start for _, start, stop in parts)
        self.size = sum(extent(sizes) for _, sizes, _ in self._payloads)
        first = self._load(parts[0][0])
        self._from_files = first[3]
        first[2]()
        self.rows = AllRows(self.load, parts, _is_odd, from_files=self._from_files)

    def load(self, number: int) -> tuple[Keys, list[Any], Callable[[], object]]:
        keys, items, close, _ = self._load(number)
        return keys, items, close

    def _load(self, number: int) -> tuple[Keys, list[Any], Callable[[], object], bool]:
        kind, sizes, place = self._payloads[number]
        close: Callable[[], object] = _nothing
        if kind == IN_FILE:
            reading = reading_of_file(place[0], place[1], sizes)
            keys, items = self._unpickled(reading.stream, reading.buffers)
            close = reading.close
        else:
            keys, items = self._unpickled(*self._bodies[number])
        is_split = type(items) is not list
        if is_split:
            items, took = rows.read(items)
            self.read_s += took
        return keys, items, close, is_split

    def odd(self) -> list[rows.Odd]:
        """What no stage gets to see, of what was passed over."""
        found = []
        for at, item in sorted(self.rows.odd.items()):
            if item is BLANK:
                found.append(rows.Odd(at, ""))
            elif type(item) is BadRow:
                found += [rows.Odd(at, odd.error, odd.verdict) for odd in rows.odd_ones([item], at)]
            else:
                found.append(rows.Odd(at, f"the item cannot be unpickled: {item.error_text}"))
        return found

    def chunk(self, cut: int) -> int:
        return chunk_of(cut, self.items, self.size, MOST_ROWS, MOST_BYTES)

    def outcome(self, count: int, seconds: float, failures: list[Failure]) -> Outcome:
        """As of any other message; what came out of it is packed already."""
        found = Outcome([], [], failures, seconds, [(0 if failures else self.items, count, seconds)])
        odd = [] if failures else [one for one in self.odd() if one.error]
        keys = self.rows.keys() if odd else []
        for at, error, verdict in odd:
            found.failures.append(Failure(at, at + 1, error, keys=as_tuples(keys[at : at + 1]), verdict=verdict))
        return found


def _is_odd(item: Any) -> bool:
    return item is BLANK or isinstance(item, Unreadable)


def _nothing() -> None:
    pass
