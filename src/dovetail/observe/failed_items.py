"""Log of failed items (errors/errors.jsonl)."""

from __future__ import annotations

import base64
import json
import pickle
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dovetail.machine.private_files import append_to_private, make_private_folder
from dovetail.observe.journal import JOURNAL_VERSION, json_line, read_json_lines
from dovetail.text_format import cut_text, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from dovetail.control.commands import FailedItem
    from dovetail.control.payload import SegmentSlice

MAX_ERRORS_BYTES = 2_000_000
MAX_FAILED_ITEM_BYTES = 256 << 20
"""Size limit of the failed items that a durable run keeps for a retry."""
MAX_ITEM_BYTES = 64_000
MAX_SHOWN_CHARACTERS = 200
"""Length of an item in messages."""
MAX_PLACES = 1000
"""Maximum number of items whose place in the source is looked up, which opens a file."""


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
        self.place: Callable[[int], str] | None = None
        """Number of a source item -> its place in the source, for people."""
        self.limit_bytes = limit_bytes
        self.written = 0
        self.left_out = 0
        self._size = 0
        self._places = 0

    def write(self, now: float, items: list[FailedItem], *, ended_run: bool = False) -> None:
        """`ended_run`: the items were not skipped; the run failed with them."""
        more = {"ended_run": True} if ended_run else {}
        lines = []
        for entry in items:
            if self._size > self.limit_bytes:
                self.left_out += 1
                continue
            line = json_line({"v": JOURNAL_VERSION, "t": round(now, 6), **self._entry(entry), **more})
            if len(line) > self.limit_bytes - self._size:
                line = json_line(
                    {"v": JOURNAL_VERSION, "t": round(now, 6), "unit": entry.unit, "error": entry.error[:500], **more}
                )
            self._size += len(line)
            self.written += 1
            lines.append(line)
        if lines:
            make_private_folder(self.path.parent)
            with append_to_private(self.path) as file:
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
        if self.item is not None:
            try:
                if self.key is not None and entry.key is None:
                    data["key"] = list(self.key(entry.part))
                data |= encode_item(self.item(entry.part))
            except Exception as error:  # a user's object: reading or pickling it may raise anything
                data["item_lost"] = f"{type(error).__name__}: {error}"[:500]
        place = entry.place or self._find_place(data["key"])
        return data | {"place": place} if place else data

    def _find_place(self, key: list[int] | None) -> str:
        if not key or self.place is None or self._places >= MAX_PLACES:
            return ""
        self._places += 1
        with suppress(Exception):  # the file may be gone
            return self.place(key[0])
        return ""


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
        return {"item_pickle": base64.b64encode(packed).decode(), "item_repr": _safe_repr(item)}
    return {"item_lost": f"{len(packed)} bytes", "item_repr": _safe_repr(item)}


def _safe_repr(item: object) -> str:
    try:
        return repr(item)[:500]
    except Exception:  # a user's __repr__ may raise, and the item must be kept for a retry
        return f"a {type(item).__name__}"


def _survives_json(item: object) -> bool:
    """Whether JSON restores the item exactly: it would not for subclasses of dict and similar."""
    if type(item) is dict:
        return all(type(key) is str and _survives_json(value) for key, value in item.items())
    if type(item) is list:
        return all(map(_survives_json, item))
    return item is None or type(item) in (str, int, float, bool)


@dataclass(frozen=True, slots=True)
class RecordedFailure:
    """A failed item as the run folder has it."""

    unit: str
    stage: str
    """One of the stages of the unit, or the unit if it is not known."""
    error: str
    """Type of the exception."""
    message: str
    place: str = ""
    """Where it is in the source: "data/pages.jsonl:17" or "item 17"; empty: unknown."""
    item: str = ""
    """The item, shortened; empty: unknown."""
    traceback: str = ""
    attempts: int = 1
    ended_run: bool = False
    """The run failed with it; otherwise it was skipped."""
    key: tuple[int, ...] = ()
    """The number of the source item, followed by those of its children; empty: unknown."""

    @property
    def text(self) -> str:
        """Error and message on one line, shortened."""
        return cut_text(printable(": ".join(part for part in (self.error, self.message) if part)), MAX_SHOWN_CHARACTERS)


def append_failure(path: Path, failure: RecordedFailure) -> None:
    """Add an entry to errors.jsonl that no stage has reported."""
    entry = asdict(failure)
    entry["detail"] = entry.pop("traceback")
    make_private_folder(path.parent)
    with append_to_private(path) as file:
        file.write(json_line({"v": JOURNAL_VERSION, **{name: value for name, value in entry.items() if value}}))


def read_failures(path: Path) -> list[RecordedFailure]:
    """The entries of errors.jsonl."""
    return [_parse_failure(entry) for entry in read_json_lines(path)]


def _parse_failure(entry: Mapping[str, Any]) -> RecordedFailure:
    key, attempts = entry.get("key"), entry.get("attempts")
    number = f"item {'.'.join(map(str, key))}" if isinstance(key, list) else ""
    return RecordedFailure(
        unit=str(entry.get("unit", "?")),
        stage=printable(str(entry.get("stage") or entry.get("unit", "?"))),
        error=printable(str(entry.get("error", ""))),
        message=str(entry.get("message", "")),
        place=printable(str(entry.get("place") or number)),
        item=_item_text(entry),
        traceback=str(entry.get("detail", "")),
        attempts=attempts if isinstance(attempts, int) else 1,
        ended_run=bool(entry.get("ended_run")),
        key=tuple(number for number in key if isinstance(number, int)) if isinstance(key, list) else (),
    )


def _item_text(entry: Mapping[str, Any]) -> str:
    """Pickled items are not opened."""
    known = json.dumps(entry["item"], ensure_ascii=False) if "item" in entry else str(entry.get("item_repr", ""))
    return cut_text(printable(known), MAX_SHOWN_CHARACTERS)


def group_failures(failures: Iterable[RecordedFailure]) -> list[list[RecordedFailure]]:
    """Failures of the same stage with the same error, apart from numbers in its message.

    The largest group comes first; groups of the same size are in the order of the source.
    """
    groups: dict[tuple[str, str, str], list[RecordedFailure]] = {}
    for failure in failures:
        message = "".join("0" if c.isdigit() else c for c in failure.message)
        while "00" in message:
            message = message.replace("00", "0")
        groups.setdefault((failure.stage, failure.error, message), []).append(failure)
    return sorted(groups.values(), key=lambda group: (-len(group), min(failure.key for failure in group)))
