"""Log of failed items (errors/errors.jsonl), and the delivery log of runs that are not durable."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
from typing import TYPE_CHECKING, Any

from dovetail.observe.journal import JOURNAL_VERSION, json_line, terminate_last_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.control.commands import Deliver, FailedItem
    from dovetail.control.payload import Segment, SegmentSlice

MAX_ERRORS_BYTES = 2_000_000
MAX_ITEM_BYTES = 64_000
MAX_DELIVERY_LOG_BYTES = 2_000_000
STAGE_PATTERN = re.compile(r"in stage '([^']+)'\n")
"""Prefix of the details of a failure in a fused unit."""
BAD_ROW_PATTERN = re.compile(r"BadRow: (.+?:\d+): ", re.DOTALL)
"""File and line of a row that could not be parsed."""


class DeliveryLog:
    """One line per Deliver, for runs that are not durable. For information only: written without fsync, and limited in
    size."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.durable = durable
        self.left_out = 0
        self._size = terminate_last_line(path)
        self._file = path.open("ab")

    def write(self, now: float, deliver: Deliver) -> None:
        if not self.durable and self._size > MAX_DELIVERY_LOG_BYTES:
            self.left_out += 1
            return
        data: dict[str, Any] = {"v": JOURNAL_VERSION, "t": round(now, 6), "wave": deliver.wave, "epoch": deliver.epoch}
        data |= {"first": deliver.first, "last": deliver.last, "items": _count_items(deliver.outputs)}
        data |= {"spooled": _count_items(deliver.spooled), "aside": len(deliver.failed_items)}
        self._size += self._file.write(json_line(data))
        if self.durable:
            self._file.flush()
            os.fsync(self._file.fileno())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _count_items(by_unit: dict[str, list[Segment]]) -> dict[str, int]:
    return {unit: sum(segment.items for segment in segments) for unit, segments in by_unit.items()}


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

    def write(self, now: float, aside: list[FailedItem]) -> None:
        lines = []
        for entry in aside:
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
            "stage": failed_stage(entry.unit, entry.detail),
            "key": None if entry.key is None else list(entry.key),
            "error": kind[:500],
            "message": message[:4000],
            "detail": entry.detail[-16_000:],
            "attempts": entry.attempts,
            "part": [segment.id, start, stop],
        }
        place = BAD_ROW_PATTERN.match(entry.error)
        if place:
            data["place"] = place[1]
        if self.item is not None:
            try:
                if self.key is not None and entry.key is None:
                    data["key"] = list(self.key(entry.part))
                data |= encode_item(self.item(entry.part))
            except Exception as error:  # a user's object: reading or pickling it may raise anything
                data["item_lost"] = f"{type(error).__name__}: {error}"[:500]
        return data


def failed_stage(unit: str, detail: str) -> str:
    """The stage of a unit that failed, if known."""
    if "+" not in unit:
        return unit
    found = STAGE_PATTERN.match(detail)
    return found[1] if found else unit


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
