"""How do rows become lines of CSV or TSV, although not all of them have the same columns?"""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from dovetail.control.writing import Unwritable
from dovetail.data.writing.jsonl import encoder, plain
from dovetail.data.writing.parts import PartWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

DELIMITERS = {"csv": ",", "tsv": "\t"}
NATIVE = (str, int, float, bool, type(None), Decimal)
PLAIN = frozenset(NATIVE)


class CsvWriter(PartWriter):
    """The `meta` of its pieces is their columns."""

    def __init__(
        self, folder: Path, run_id: str, *, ordered: bool, delimiter: str, columns: tuple[str, ...] | None
    ) -> None:
        super().__init__(folder, run_id, ordered=ordered)
        self._delimiter = delimiter
        self._columns = columns
        self._nested: Callable[[Any], str] | None = None

    def encode(self, items: list[Any]) -> tuple[bytes, list[str]]:
        columns = list(self._columns) if self._columns is not None else columns_of(items)
        try:
            cell = self._cell
            rows = [
                [value if type(value := row.get(name)) in PLAIN else cell(value) for name in columns] for row in items
            ]
            return encoded(rows, self._delimiter), columns
        except Exception:  # whatever an item does when it is looked at: find which one
            self._nested = None
        raise self._unwritable(items, columns)

    def _cell(self, value: Any) -> Any:
        if isinstance(value, dict | list | tuple):
            return self._json(value)
        if isinstance(value, NATIVE):
            return value
        value = plain(value)
        return self._json(value) if isinstance(value, list) else value

    def _json(self, value: Any) -> str:
        if self._nested is None:
            self._nested = encoder()
        return self._nested(value)

    def _unwritable(self, items: list[Any], columns: list[str]) -> Unwritable:
        for index, row in enumerate(items):
            name = ""
            try:
                if not isinstance(row, Mapping):
                    return not_a_row(index, row)
                for name in columns:
                    encoded([[self._cell(row.get(name))]], self._delimiter)
            except Exception as error:  # as above
                self._nested = None
                return Unwritable(index, f"{type(error).__name__}: {error} (column {name!r})")
        return Unwritable(-1, "a row could be written only when it was looked at again")


def columns_of(items: Iterable[Any]) -> list[str]:
    """The keys of all rows, in the order of their first appearance. Unwritable: a row without, or with other keys."""
    columns: dict[str, None] = {}
    for index, row in enumerate(items):
        if not isinstance(row, Mapping):
            raise not_a_row(index, row)
        if row.keys() <= columns.keys():
            continue
        for name in row:
            if not isinstance(name, str):
                raise Unwritable(index, f"TypeError: a column's name is a text, not a {type(name).__name__}: {name!r}")
            columns[name] = None
    return list(columns)


def not_a_row(index: int, row: Any) -> Unwritable:
    return Unwritable(index, f"TypeError: a row of a table is a dict, not a {type(row).__name__}")


def encoded(rows: Iterable[Sequence[Any]], delimiter: str) -> bytes:
    """Lines end with a single newline, but values with a carriage return are quoted, too."""
    lines: list[str] = []

    class Lines:
        write = lines.append

    csv.writer(Lines, delimiter=delimiter, lineterminator="\r\n").writerows(rows)
    return "".join([line[:-2] + "\n" for line in lines]).encode()


def row_ends(data: bytes) -> array[int]:
    """Where each row ends: at a newline outside of quotes, that is, after an even number of them."""
    ends = array("q")
    begin = 0
    quotes = 0
    while (end := data.find(b"\n", begin)) >= 0:
        quotes += data.count(b'"', begin, end)
        begin = end + 1
        if quotes % 2 == 0:
            ends.append(begin)
    return ends


def with_columns(data: bytes, columns: Sequence[str], wanted: Sequence[str], delimiter: str) -> bytes:
    """The same rows with other columns; those that they do not have are empty."""
    places = {name: at for at, name in enumerate(columns)}
    chosen = [places.get(name, -1) for name in wanted]
    rows = [[row[at] if 0 <= at < len(row) else "" for at in chosen] for row in parsed(data, delimiter)]
    return encoded(rows, delimiter)


def parsed(data: bytes, delimiter: str) -> list[list[str]]:
    """The rows of a piece of CSV; a blank line is a row without values."""
    limit = csv.field_size_limit(1 << 40)  # a value may be as long as it is
    try:
        return list(csv.reader(io.StringIO(data.decode(), newline=""), delimiter=delimiter))
    finally:
        csv.field_size_limit(limit)
