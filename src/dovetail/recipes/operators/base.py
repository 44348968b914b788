"""Base classes of operators: Mapper, TextMapper, Filter, DatasetOperator, Deduplicator, Selector, Grouper.

A row is a dict. The names of its text and image fields (`text_key`, ...) are set after an operator is created, so that
its `__init__` has only its own parameters, with Data-Juicer's names and defaults. Rows are changed in place. A row that
an operator cannot process raises `BadField`: the row fails, and the others continue."""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.pipeline.code_hash import code_hash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.engines.worker_context import Worker

Row = dict[str, Any]
STATS_FIELD = "__dj__stats__"
"""Field with the stats of filters, one entry per statistic."""
HASH_FIELD = "__dj__hash__"
"""Field with the hash of a deduplicator, between its two stages; never part of the results."""


class BadField(ValueError):
    """A field of a row is missing or has the wrong type."""


class Operator:
    """Base class of all operators."""

    extra: ClassVar[str] = ""
    """The extra of this package that it requires, such as "recipes"."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Import names of the modules that it requires."""
    batch_size: ClassVar[int] = 1
    """Default number of rows per call. 1: `__call__` gets a row; more: a list of rows."""
    shared_intermediates: ClassVar[tuple[str, ...]] = ()
    """Intermediates of a text ("words", "lines") that adjacent operators compute once."""

    text_key: str = "text"
    image_key: str = "images"
    image_bytes_key: str = "image_bytes"
    recipe_parameters: Mapping[str, Any] = MappingProxyType({})
    """Parameters as in the recipe; part of its identity for profiles."""
    use_shared_cache: bool = False
    """Whether an adjacent operator needs one of `shared_intermediates`, too."""

    def __call__(self, row: Any) -> Any:
        """Process a row, or a list of rows if `batch_size` is more than 1."""
        raise NotImplementedError

    def setup(self, worker: Worker) -> None:
        """Load models and tables, once per worker, before the first row. Not in `__init__`, which also runs when a
        recipe is only planned."""

    def columns(self) -> tuple[str, ...]:
        """Required fields, checked before the run starts. Dots separate the keys of nested mappings."""
        return (self.text_key,)

    def missing_assets(self) -> str:
        """Required files that are missing on this machine; empty if none."""
        return ""

    def code_key(self) -> str:
        """Identity for profiles (`pipeline/code_hash.py`)."""
        fields = (self.text_key, self.image_key, self.image_bytes_key)
        return f"{code_hash(type(self))} {sorted(self.recipe_parameters.items())!r} {fields!r}"

    def text_of(self, row: Row) -> str:
        try:
            text = row[self.text_key]
        except KeyError:
            raise missing_field(row, self.text_key) from None
        if type(text) is not str:
            raise not_a_string(self.text_key, text)
        return text


def missing_field(row: Row, field: str) -> BadField:
    there = ", ".join(repr(name) for name in list(row)[:20])
    return BadField(f"no field {field!r}; fields of the row: {there or 'none'}")


def not_a_string(field: str, value: object) -> BadField:
    return BadField(f"field {field!r} is {type(value).__name__}, not a string")


class Mapper(Operator):
    """Changes rows: returns a row, or an iterator of several rows or none."""

    def __call__(self, row: Row) -> Row | Iterator[Row]:
        raise NotImplementedError


class TextMapper(Mapper):
    """Changes the text of each row."""

    def change(self, text: str) -> str:
        raise NotImplementedError

    def __call__(self, row: Row) -> Row:
        row[self.text_key] = self.change(self.text_of(row))
        return row


class Filter(Operator):
    """Computes stats of rows, and keeps rows whose stats are in range."""

    min_closed_interval: bool = True
    max_closed_interval: bool = True
    reversed_range: bool = False

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        """Add its stats to `stats`, unless they are already present."""
        raise NotImplementedError

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:
        raise NotImplementedError

    def __call__(self, row: Row) -> Row | None:
        stats = row.get(STATS_FIELD)
        if stats is None:
            stats = row[STATS_FIELD] = {}
        self.measure(row, stats)
        return row if self.keeps(row, stats) else None

    def in_range(self, value: float, low: float | None, high: float | None) -> bool:
        """Whether a value is in the range or, with `reversed_range`, outside of it. Then bounds are inverted, too, so
        that a value on a closed bound is kept either way, as in Data-Juicer."""
        reverse = self.reversed_range
        kept = True
        if low is not None:
            kept = value >= low if self.min_closed_interval is not reverse else value > low
        if kept and high is not None:
            kept = value <= high if self.max_closed_interval is not reverse else value < high
        return kept is not reverse


class DatasetOperator(Operator):
    """Needs all rows before it returns any. `rows` can be iterated any number of times and holds only a few rows in
    memory at a time: keep what you need from a row, not the row."""

    def process_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        raise NotImplementedError

    def check(self, row: Row) -> None:
        """Raise BadField for a row that it cannot process. Called in the stage before the barrier, for each row."""
        if not isinstance(row, dict):
            raise BadField(f"the row is {type(row).__name__}, not a mapping")
        for field in self.columns():
            value: Any = row
            for name in [field] if field in row else field.split("."):
                if not isinstance(value, dict) or name not in value:
                    raise missing_field(row, field)
                value = value[name]


class Deduplicator(DatasetOperator):
    """Keeps the first of duplicate rows: rows are hashed in parallel, then compared by one worker."""

    def compute_hash(self, row: Row) -> Any:
        """The value to compare, as small as possible: bytes, or a tuple of numbers."""
        raise NotImplementedError

    def originals(self, hashes: Iterable[Any]) -> Sequence[int]:
        """For each row the number of the row that it duplicates; its own number if it is kept. Rows start at 0."""
        raise NotImplementedError

    def __call__(self, row: Row) -> Row:
        row[HASH_FIELD] = self.compute_hash(row)
        return row

    def process_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        yield from self.emit_originals(rows, self.find_originals(rows))

    def find_originals(self, rows: Iterable[Row]) -> Sequence[int]:
        return self.originals(row[HASH_FIELD] for row in rows)

    def emit_originals(self, rows: Iterable[Row], originals: Sequence[int]) -> Iterator[Row]:
        for number, row in enumerate(rows):
            if originals[number] == number:
                del row[HASH_FIELD]
                yield row


class Selector(DatasetOperator):
    """Keeps some rows, in an order of its own. If that is not the order of the input, the selected rows are held in
    memory."""

    def select_rows(self, rows: Iterable[Row]) -> Sequence[int]:
        """Numbers of the selected rows, from 0, in the order of the output."""
        raise NotImplementedError

    def process_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        yield from self.emit_selected(rows, self.select_rows(rows))

    def emit_selected(self, rows: Iterable[Row], numbers: Sequence[int]) -> Iterator[Row]:
        if all(one < other for one, other in pairwise(numbers)):
            wanted = iter([*numbers, -1])
            following = next(wanted)
            for number, row in enumerate(rows):
                if number == following:
                    following = next(wanted)
                    yield row
            return
        chosen = set(numbers)
        kept = {number: row for number, row in enumerate(rows) if number in chosen}
        for number in numbers:
            yield kept[number]


class Grouper(DatasetOperator):
    """Makes one row from several: each field becomes a list."""

    def groups(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        raise NotImplementedError

    def process_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        for group in self.groups(rows):
            yield rows_to_columns(group)


def rows_to_columns(rows: Sequence[Row]) -> Row:
    """Field -> its values in all rows; None where a row does not have it. Stats of filters are dropped."""
    fields = dict.fromkeys(field for row in rows for field in row if field != STATS_FIELD)
    return {field: [row.get(field) for row in rows] for field in fields}
