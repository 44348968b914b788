"""Input of a barrier message in a worker: payloads that are opened one at a time, and results that cannot be sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.control.engine import UnreadableItem
from dovetail.control.events import VERDICT_SKIP
from dovetail.control.payload import BLANK_ROW, BadRow
from dovetail.engines.barrier import BarrierRows, output_chunk_items
from dovetail.engines.exception_summary import unsendable_text
from dovetail.engines.item_keys import as_tuple
from dovetail.engines.local import message_input
from dovetail.engines.local.payload_codec import layout_bytes
from dovetail.engines.local.protocol import KIND_FILE, map_file
from dovetail.engines.stage_chain import MessageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.control.engine import UnsendableItemError
    from dovetail.control.events import CallFailure
    from dovetail.engines.item_keys import Keys
    from dovetail.engines.local.protocol import Frame

MAX_CHUNK_ROWS = 2048
MAX_CHUNK_BYTES = 16 << 20
"""Maximum bytes of results that wait to be packed."""


class BarrierInput:
    """Payloads of a barrier message: those in files are opened one at a time, the others are already mapped."""

    def __init__(self, frame: Frame, bodies: Sequence[tuple[Any, Sequence[Any]]], load: Callable[..., Any]) -> None:
        self._payloads, parts = frame.head[6], frame.head[7]
        self._bodies = bodies
        self._unpack = load
        self.read_s = 0.0
        self._unsendable: list[tuple[tuple[int, ...], str]] = []
        """Keys of results that cannot be sent, with the reason."""
        self.items = sum(stop - start for _, start, stop in parts)
        self.size = sum(layout_bytes(sizes) for _, sizes, _ in self._payloads)
        first = self._load(parts[0][0])
        self._from_files = first[3]
        first[2]()
        self.rows = BarrierRows(self.load, parts, _is_skipped, from_files=self._from_files)

    def load(self, number: int) -> tuple[Keys, list[Any], Callable[[], object]]:
        keys, items, close, _ = self._load(number)
        return keys, items, close

    def _load(self, number: int) -> tuple[Keys, list[Any], Callable[[], object], bool]:
        kind, sizes, place = self._payloads[number]
        close: Callable[[], object] = _no_close
        if kind == KIND_FILE:
            reading = map_file(place[0], place[1], sizes)
            keys, items = self._unpack(reading.stream, reading.buffers)
            close = reading.close
        else:
            keys, items = self._unpack(*self._bodies[number])
        is_split = type(items) is not list
        if is_split:
            items, took = message_input.read_split(items)
            self.read_s += took
        return keys, items, close, is_split

    def skipped_items(self) -> list[message_input.SkippedItem]:
        """Skipped items among the rows read so far that no stage receives."""
        found = []
        for at, item in sorted(self.rows.skipped.items()):
            if item is BLANK_ROW:
                found.append(message_input.SkippedItem(at, ""))
            elif type(item) is BadRow:
                found += [
                    message_input.SkippedItem(at, odd.error, odd.verdict)
                    for odd in message_input.find_skipped([item], at)
                ]
            else:
                found.append(message_input.SkippedItem(at, f"the item cannot be unpickled: {item.error_text}"))
        return found

    def drop_unsendable(self, keys: Keys, items: list[Any], error: UnsendableItemError) -> tuple[Keys, list[Any]]:
        """Remove a result that cannot be sent or written; the row that it came from fails."""
        if error.index < 0:
            raise error
        self._unsendable.append((as_tuple(keys[error.index]), unsendable_text(error)))
        stays = [index for index in range(len(items)) if index != error.index]
        return [keys[index] for index in stays], [items[index] for index in stays]

    def chunk_items(self, cut: int) -> int:
        return output_chunk_items(cut, self.items, self.size, MAX_CHUNK_ROWS, MAX_CHUNK_BYTES)

    def outcome(self, count: int, seconds: float, failures: list[CallFailure]) -> MessageOutcome:
        """The outcome as for any other message; its results are already packed."""
        given = count - len(self._unsendable)
        found = MessageOutcome([], [], failures, seconds, [(0 if failures else self.items, given, seconds)])
        odd = [] if failures else [*(one for one in self.skipped_items() if one.error), *self._skipped_outputs()]
        keys = self.rows.keys() if odd else []
        found.failures += [message_input.failure_of_skipped(one, keys) for one in sorted(odd)]
        return found

    def _skipped_outputs(self) -> list[message_input.SkippedItem]:
        """The rows whose results cannot be sent, each once."""
        if not self._unsendable:
            return []
        places = {as_tuple(key): at for at, key in enumerate(self.rows.keys())}
        found = {}
        for key, why in self._unsendable:
            while key not in places:
                key = key[:-1]  # the key of its parent
            found[places[key]] = why
        return [message_input.SkippedItem(at, why, VERDICT_SKIP) for at, why in found.items()]


def _is_skipped(item: Any) -> bool:
    return item is BLANK_ROW or isinstance(item, UnreadableItem)


def _no_close() -> None:
    pass
