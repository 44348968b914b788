"""How do rows become lines of JSON, at less than what a plain loop with json.dumps costs?"""

from __future__ import annotations

import datetime
import json
import json.encoder
from typing import TYPE_CHECKING, Any

from dovetail.control.writing import Unwritable
from dovetail.data.writing.parts import PartWriter

if TYPE_CHECKING:
    from collections.abc import Callable

ENDING = "\n"


def plain(value: Any) -> Any:
    """Of what JSON has no form for, something it has one for: numpy's values, dates, times. TypeError: nothing."""
    kind = type(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if kind.__module__ == "numpy":
        found = value.tolist()
        if type(found) is not kind:
            return found
    hint = ": decode it, or write base64 of it" if isinstance(value, bytes | bytearray | memoryview) else ""
    hint = ": make it a sorted list" if isinstance(value, set | frozenset) else hint
    raise TypeError(f"JSON has no form for a {kind.__name__}{hint}")


def encoder() -> Callable[[Any], str]:
    """The very text of json.dumps(row, ensure_ascii=False). What json builds anew for every row is built once."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return json.JSONEncoder(ensure_ascii=False, default=plain).encode
    parts = make({}, plain, json.encoder.encode_basestring, None, ": ", ", ", False, False, True)
    join = "".join
    return lambda row: join(parts(row, 0))


class JsonlWriter(PartWriter):
    """One JSON value per line."""

    _encode: Callable[[Any], str] | None = None

    def encode(self, items: list[Any]) -> tuple[bytes, None]:
        one = self._encode
        if one is None:
            one = self._encode = encoder()
        try:
            lines = [one(row) for row in items]
        except Exception:  # whatever an item does when it is looked at: find which one
            self._encode = None  # it remembers what it was in the midst of
            raise _unwritable(items) from None
        lines.append("")
        # half of a surrogate pair has no form in UTF-8, but one in JSON, and that is just how Python writes it
        return ENDING.join(lines).encode("utf-8", "backslashreplace"), None


def _unwritable(items: list[Any]) -> Unwritable:
    for index, row in enumerate(items):
        try:
            encoder()(row)
        except Exception as error:  # as above
            return Unwritable(index, f"{type(error).__name__}: {error}")
    return Unwritable(-1, "a row could be written only when it was looked at again")
