"""Which Arrow type does a text such as "list<float32>" or "timestamp[us, tz=UTC]" name?"""

from __future__ import annotations

import re
from typing import Any

WORD = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*)")
NUMBER = re.compile(r"\s*(\d+)")
NESTED = {"list": "list_", "large_list": "large_list", "list_view": "list_view", "array": "list_"}
UNITS = ("s", "ms", "us", "ns")
SPELLINGS = {
    "str": "string",
    "utf8": "string",
    "large_utf8": "large_string",
    "bytes": "binary",
    "boolean": "bool_",
    "bool": "bool_",
    "int": "int64",
    "float": "float32",
    "double": "float64",
    "halffloat": "float16",
    "date": "date32",
}
"""As Arrow prints its types, "float" is the one of 32 bits."""
SIMPLE = re.compile(
    r"(u?int(8|16|32|64)|float(16|32|64)|bool_|string|large_string|string_view|binary|large_binary|binary_view"
    r"|date32|date64|null)"
)
DEPTH = 50


def type_of_text(text: str) -> Any:
    """ValueError: it names none, and why."""
    parser = _Parser(text)
    found = parser.type(0)
    if parser.rest():
        raise ValueError(f"{parser.rest()!r} is left over")
    return found


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rest(self) -> str:
        return self._text[self._at :].strip()

    def type(self, depth: int) -> Any:
        import pyarrow as pa

        if depth > DEPTH:
            raise ValueError("it is nested too deeply")
        word = self._word()
        name = SPELLINGS.get(word.lower(), word.lower())
        if name in NESTED or name == "fixed_size_list":
            return self._list(name, depth)
        if name == "struct":
            return pa.struct(self._fields(depth))
        if name == "map":
            self._need("<")
            key = self.type(depth + 1)
            self._need(",")
            found = pa.map_(key, self.type(depth + 1))
            self._need(">")
            return found
        if name in ("timestamp", "duration", "time32", "time64"):
            return self._timed(name)
        if name in ("decimal128", "decimal256", "decimal"):
            return self._decimal(name)
        if name in ("binary", "fixed_size_binary") and self._is("["):
            size = self._number()
            self._need("]")
            return pa.binary(size)
        if not SIMPLE.fullmatch(name):
            raise ValueError(f"there is no type {word!r}")
        unit = {"date32": "[day]", "date64": "[ms]"}.get(name)
        if unit:
            self._is(unit)
        return getattr(pa, name)()

    def _list(self, name: str, depth: int) -> Any:
        """list<float32>, list<item: float>, fixed_size_list<float32, 768>, fixed_size_list<item: float>[768]."""
        import pyarrow as pa

        self._need("<")
        before = self._at
        label = WORD.match(self._text, self._at)
        self._at = label.end() if label else before
        if not label or not self._is(":"):
            self._at = before
        inner = self.type(depth + 1)
        size = self._number() if name == "fixed_size_list" and self._is(",") else None
        self._need(">")
        if name == "fixed_size_list" and size is None:
            self._need("[")
            size = self._number()
            self._need("]")
        return pa.list_(inner, size) if size is not None else getattr(pa, NESTED[name])(inner)

    def _fields(self, depth: int) -> list[tuple[str, Any]]:
        self._need("<")
        found = []
        while True:
            name = self._word()
            self._need(":")
            found.append((name, self.type(depth + 1)))
            if not self._is(","):
                break
        self._need(">")
        return found

    def _timed(self, name: str) -> Any:
        import pyarrow as pa

        unit, zone = ("ms" if name == "time32" else "us"), None
        if self._is("["):
            unit = self._word()
            if self._is(","):
                self._is("tz=")
                end = self._text.find("]", self._at)
                zone, self._at = self._text[self._at : end].strip(), end if end >= 0 else self._at
            self._need("]")
        allowed = {"time32": ("s", "ms"), "time64": ("us", "ns")}.get(name, UNITS)
        if unit not in allowed:
            raise ValueError(f"{name} counts {' or '.join(allowed)}, not {unit!r}")
        return pa.timestamp(unit, zone) if zone else getattr(pa, name)(unit)

    def _decimal(self, name: str) -> Any:
        import pyarrow as pa

        self._need("(")
        digits = self._number()
        scale = self._number() if self._is(",") else 0
        self._need(")")
        most = 76 if name == "decimal256" else 38
        if not 1 <= digits <= most:
            raise ValueError(f"{name} has 1 to {most} digits, not {digits}")
        return (pa.decimal256 if name == "decimal256" else pa.decimal128)(digits, scale)

    # pieces

    def _is(self, piece: str) -> bool:
        at = self._at + len(self._text[self._at :]) - len(self._text[self._at :].lstrip())
        if not self._text.startswith(piece, at):
            return False
        self._at = at + len(piece)
        return True

    def _need(self, piece: str) -> None:
        if not self._is(piece):
            raise ValueError(f"{piece!r} is missing before {self.rest()!r}" if self.rest() else f"{piece!r} is missing")

    def _word(self) -> str:
        found = WORD.match(self._text, self._at)
        if found is None:
            raise ValueError(f"a name is missing before {self.rest()!r}" if self.rest() else "a name is missing")
        self._at = found.end()
        return found[1]

    def _number(self) -> int:
        found = NUMBER.match(self._text, self._at)
        if found is None:
            raise ValueError(f"a number is missing before {self.rest()!r}")
        self._at = found.end()
        return int(found[1])
