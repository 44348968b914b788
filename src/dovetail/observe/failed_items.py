"""Log of failed items (errors/errors.jsonl)."""

from __future__ import annotations

import base64
import json
import pickle
from typing import TYPE_CHECKING, Any

from dovetail.observe.journal import JOURNAL_VERSION, json_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.control.commands import FailedItem
    from dovetail.control.payload import SegmentSlice

MAX_ERRORS_BYTES = 2_000_000
MAX_ITEM_BYTES = 64_000


class FailedItemLog:
    """errors/errors.jsonl, created with the first failed item."""

    def __init__(
        self,
        path: Path,
        item: Callable[[SegmentSlice], object] | None = None,
        key: Callable[[SegmentSlice], tuple[int, ...]] | None = None,
        *,
        limit_bytes: int = MAX_ERRORS_BYTES,
    ) -> None:
        self.path = path
        self.item = item
        self.key = key
        self.limit_bytes = limit_bytes
        self.written = 0
        self.left_out = 0
        self._size = 0

    def write(self, now: float, items: list[FailedItem]) -> None:
        lines = []
        for entry in items:
            if self._size > self.limit_bytes:
                self.left_out += 1
                continue
            line = json_line({"v": JOURNAL_VERSION, "t": round(now, 6), **self._entry(entry)})
            if len(line) > self.limit_bytes - self._size:
                line = json_line(
                    {"v": JOURNAL_VERSION, "t": round(now, 6), "unit": entry.unit, "error": entry.error[:500]}
                )
            self._size += len(line)
            self.written += 1
            lines.append(line)
        if lines:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("ab") as file:
                file.writelines(lines)

    def _entry(self, entry: FailedItem) -> dict[str, Any]:
        kind, _, message = entry.error.partition(": ")
        segment, start, stop = entry.part
        data: dict[str, Any] = {
            "unit": entry.unit,
            "stage": entry.stage or entry.unit,
            "key": None if entry.key is None else list(entry.key),
            "error": kind[:500],
            "message": message[:4000],
            "detail": entry.detail[-16_000:],
            "attempts": entry.attempts,
            "part": [segment.id, start, stop],
        }
        if entry.place:
            data["place"] = entry.place
        if self.item is not None:
            try:
                if self.key is not None and entry.key is None:
                    data["key"] = list(self.key(entry.part))
                data |= encode_item(self.item(entry.part))
            except Exception as error:  # a user's object: reading or pickling it may raise anything
                data["item_lost"] = f"{type(error).__name__}: {error}"[:500]
        return data


def encode_item(item: object, limit_bytes: int = MAX_ITEM_BYTES) -> dict[str, Any]:
    """The item as JSON if JSON restores it exactly, else pickled; only the start of its repr if it is too large."""
    try:
        text = json.dumps(item, allow_nan=False)
        if len(text) <= limit_bytes and _survives_json(item) and json.loads(text) == item:
            return {"item": item}
    except (TypeError, ValueError, RecursionError):
        pass
    packed = pickle.dumps(item)
    if len(packed) <= limit_bytes:
        return {"item_pickle": base64.b64encode(packed).decode()}
    return {"item_lost": f"{len(packed)} bytes", "item_repr": repr(item)[:500]}


def _survives_json(item: object) -> bool:
    """Whether JSON restores the item exactly: it would not for subclasses of dict and similar."""
    if type(item) is dict:
        return all(type(key) is str and _survives_json(value) for key, value in item.items())
    if type(item) is list:
        return all(map(_survives_json, item))
    return item is None or type(item) in (str, int, float, bool)
