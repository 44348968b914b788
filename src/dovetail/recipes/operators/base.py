"""Base classes of operators: Mapper, TextMapper, Filter, DatasetOperator, Deduplicator, Selector, Grouper.

A row is a dict. Which of its fields hold texts and images is set after an operator is made (`text_key`, ...), so that
its `__init__` has its own parameters only, with Data-Juicer's names and defaults. Rows are changed in place. What
cannot be done with a row is raised (`BadField`): the row is set aside, and all others go on.
"""

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
"""The field with what filters found, one entry per figure."""
HASH_FIELD = "__dj__hash__"
"""The field with what a deduplicator compares, between its two stages; it never leaves a recipe."""


class BadField(ValueError):
    """A field of a row is missing, or is not what an operator works on."""


class Operator:
    """What all kinds have in common."""

    extra: ClassVar[str] = ""
    """The extra of this package that it needs, such as "recipes"."""
    needs: ClassVar[tuple[str, ...]] = ()
    """The modules that this extra must bring, by their import names."""
    batch_size: ClassVar[int] = 1
    """Rows per call if nobody says otherwise. 1: `__call__` gets a row; more: a list of rows."""
    shared_intermediates: ClassVar[tuple[str, ...]] = ()
    """Intermediates it gets from `shared.py` ("words", "lines"): neighbours that need the same one make it once."""

    text_key: str = "text"
    image_key: str = "images"
    image_bytes_key: str = "image_bytes"
    recipe_parameters: Mapping[str, Any] = MappingProxyType({})
    """Its parameters as the recipe has them, which tell it apart from others of its class."""
    use_shared_cache: bool = False
    """Whether a neighbour in the same worker needs one of `shares`, too."""

    def __call__(self, row: Any) -> Any:
        """What becomes of a row, or of a list of rows if `batch_size` is more than 1."""
        raise NotImplementedError

    def setup(self, worker: Worker) -> None:
        """Once per worker, before the first row: models, compiled tables. Never in `__init__`, which also runs where
        a recipe is only planned."""

    def columns(self) -> tuple[str, ...]:
        """The fields that rows must have; a missing one is told before anything starts. Dots go into mappings."""
        return (self.text_key,)

    def missing_assets(self) -> str:
        """What it needs besides packages, and is not on this machine; empty if nothing is missing."""
        return ""

    def code_key(self) -> str:
        """What makes it what it is, for what was measured of it to be found again (`pipeline/code.py`)."""
        fields = (self.text_key, self.image_key, self.image_bytes_key)
        return f"{code_hash(type(self))} {sorted(self.recipe_parameters.items())!r} {fields!r}"

    def text_of(self, row: Row) -> str:
        try:
            text = row[self.text_key]
        except KeyError:
            raise missing_field(row, self.text_key) from None
        if type(text) is not str:
            raise not_a_text(self.text_key, text)
        return text


def missing_field(row: Row, field: str) -> BadField:
    there = ", ".join(repr(name) for name in list(row)[:20])
    return BadField(f"there is no field {field!r}; the row has {there or 'none'}")


def not_a_text(field: str, value: object) -> BadField:
    return BadField(f"field {field!r} is {type(value).__name__}, not a text")


class Mapper(Operator):
    """Changes rows: each becomes one, or an iterator of several or none."""

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
    """Measures rows, and keeps those whose figures are in range."""

    min_closed_interval: bool = True
    max_closed_interval: bool = True
    reversed_range: bool = False

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        """Writes its figures into `stats`, except those that are there already."""
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
        """Whether it is between both, or, with `reversed_range`, whether it is not: then the ends are turned around,
        too, so that what lies on a closed end is kept either way, as in Data-Juicer."""
        reverse = self.reversed_range
        kept = True
        if low is not None:
            kept = value >= low if self.min_closed_interval is not reverse else value > low
        if kept and high is not None:
            kept = value <= high if self.max_closed_interval is not reverse else value < high
        return kept is not reverse


class DatasetOperator(Operator):
    """Needs all rows before it gives any. `rows` can be passed over as often as wanted, and holds few of them in memory
    at a time: keep what you need of a row, not the row."""

    def process_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        raise NotImplementedError

    def check(self, row: Row) -> None:
        """Raises BadField for a row that it could not choose among others: it is set aside before, by itself."""
        if not isinstance(row, dict):
            raise BadField(f"the row is {type(row).__name__}, not a mapping")
        for field in self.columns():
            value: Any = row
            for name in [field] if field in row else field.split("."):
                if not isinstance(value, dict) or name not in value:
                    raise missing_field(row, field)
                value = value[name]


class Deduplicator(DatasetOperator):
    """Keeps the first of rows that are alike: they are hashed in parallel, then compared in one place."""

    def compute_hash(self, row: Row) -> Any:
        """What is compared, as small as can be: bytes, or a tuple of numbers."""
        raise NotImplementedError

    def originals(self, hashes: Iterable[Any]) -> Sequence[int]:
        """For each row the number of the row that it repeats: its own, if it is kept. Rows are numbered from 0."""
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
    """Keeps some rows, in an order of its own. If that is not the order in which they came, the chosen rows are held in
    memory until they leave."""

    def select_rows(self, rows: Iterable[Row]) -> Sequence[int]:
        """Which rows, counted from 0, in the order in which they leave."""
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
    """Makes one row of several: each field becomes a list."""

    def groups(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        raise NotImplementedError

    def process_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        for group in self.groups(rows):
            yield rows_to_columns(group)


def rows_to_columns(rows: Sequence[Row]) -> Row:
    """Field -> its values in all rows, None where a row has none. What filters found of each is not kept."""
    fields = dict.fromkeys(field for row in rows for field in row if field != STATS_FIELD)
    return {field: [row.get(field) for row in rows] for field in fields}
