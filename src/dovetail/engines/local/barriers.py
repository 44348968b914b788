"""What becomes of the one message of a barrier inside a worker? Its payloads are opened one after another, and what
comes out is packed or written as it comes, so that neither is in memory as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.control.engine import Unreadable
from dovetail.control.events import ASIDE, Failure
from dovetail.control.splits import BLANK, BadRow
from dovetail.control.writing import Unwritable
from dovetail.engines import rows
from dovetail.engines.batches import Outcome
from dovetail.engines.keys import as_tuple, as_tuples
from dovetail.engines.local.agreed import IN_FILE, reading_of_file
from dovetail.engines.local.opened import UNPICKLABLE, UNWRITABLE
from dovetail.engines.local.payload import extent
from dovetail.engines.whole import AllRows, chunk_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.control.engine import Unsendable
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
        self._refused: list[tuple[tuple[int, ...], str]] = []
        """Keys of results that cannot be sent on, and why."""
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

    def without(self, keys: Keys, items: list[Any], error: Unsendable) -> tuple[Keys, list[Any]]:
        """The rest of some results of which one cannot be sent on or written: the row it came from is set aside."""
        if error.index < 0:
            raise error
        why = UNWRITABLE if isinstance(error, Unwritable) else UNPICKLABLE
        self._refused.append((as_tuple(keys[error.index]), f"{why}: {error.error_text}"))
        stays = [index for index in range(len(items)) if index != error.index]
        return [keys[index] for index in stays], [items[index] for index in stays]

    def chunk(self, cut: int) -> int:
        return chunk_of(cut, self.items, self.size, MOST_ROWS, MOST_BYTES)

    def outcome(self, count: int, seconds: float, failures: list[Failure]) -> Outcome:
        """As of any other message; what came out of it is packed already."""
        given = count - len(self._refused)
        found = Outcome([], [], failures, seconds, [(0 if failures else self.items, given, seconds)])
        odd = [] if failures else [*(one for one in self.odd() if one.error), *self._set_aside()]
        keys = self.rows.keys() if odd else []
        for at, error, verdict in sorted(odd):
            found.failures.append(Failure(at, at + 1, error, keys=as_tuples(keys[at : at + 1]), verdict=verdict))
        return found

    def _set_aside(self) -> list[rows.Odd]:
        """The rows that gave what cannot be sent on, each once."""
        if not self._refused:
            return []
        places = {as_tuple(key): at for at, key in enumerate(self.rows.keys())}
        found = {}
        for key, why in self._refused:
            while key not in places:
                key = key[:-1]  # its parent's
            found[places[key]] = why
        return [rows.Odd(at, why, ASIDE) for at, why in found.items()]


def _is_odd(item: Any) -> bool:
    return item is BLANK or isinstance(item, Unreadable)


def _nothing() -> None:
    pass
