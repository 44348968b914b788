"""What does a stage of a recipe run, besides its operator?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dovetail.pipeline.code import code_hash
from dovetail.recipes.operators.base import STATS, Mapper, Operator, Row, Whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.engines.worker import Worker


class Choosing:
    """The part of an operator that needs all rows: a barrier."""

    def __init__(self, operator: Whole) -> None:
        self.operator = operator

    def setup(self, worker: Worker) -> None:
        self.operator.setup(worker)

    def code_key(self) -> str:
        return f"whole {self.operator.code_key()}"

    def __call__(self, rows: Iterable[Row]) -> Iterator[Row]:
        return self.operator.choose(rows)


class Checking(Mapper):
    """In front of what needs all rows: one that it could not use is set aside by itself."""

    def __init__(self, operator: Whole) -> None:
        self.operator = operator

    def code_key(self) -> str:
        return f"check {self.operator.code_key()}"

    def __call__(self, row: Row) -> Row:
        self.operator.check(row)
        return row


class NotHere(Operator):
    """Stands for an operator that can be planned here, and not run."""

    def __init__(self, op: str) -> None:
        self.op = op

    def code_key(self) -> str:
        return self.op

    def __call__(self, row: Row) -> Row:  # noqa: ARG002
        raise RuntimeError(f"{self.op} cannot run here")


class Around:
    """Something around what a stage runs: the same to the engine, to profiles and to whoever sets it up."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def setup(self, worker: Worker) -> None:
        inner = getattr(self.run, "setup", None)
        if inner is not None:
            inner(worker)

    def teardown(self) -> None:
        inner = getattr(self.run, "teardown", None)
        if inner is not None:
            inner()

    def code_key(self) -> str:
        return f"{type(self).__name__} {code_hash(self.run)}"


class FromLines(Around):
    """The first operator over lines of text, which it is given as rows."""

    def __init__(self, run: Callable[..., Any], text_key: str, *, by_row: bool) -> None:
        super().__init__(run)
        self.text_key = text_key
        self.by_row = by_row

    def __call__(self, given: Any) -> Any:
        if self.by_row:
            return self.run(self._row(given))
        return self.run([self._row(line) for line in given] if isinstance(given, list) else _Mapped(self._row, given))

    def _row(self, line: Any) -> Row:
        return line if isinstance(line, dict) else {self.text_key: line}


class _Mapped:
    """Rows made of lines whenever they are passed over."""

    def __init__(self, make: Callable[[Any], Row], lines: Iterable[Any]) -> None:
        self._make = make
        self._lines = lines

    def __iter__(self) -> Iterator[Row]:
        return map(self._make, self._lines)

    def __len__(self) -> int:
        return len(self._lines)  # type: ignore[arg-type]


class WithoutStats(Around):
    """The last operator of a recipe that does not keep what its filters found."""

    def __call__(self, given: Any) -> Any:
        made = self.run(given)
        if isinstance(made, Iterator):
            return map(_without, made)
        for row in made if isinstance(made, list) else (made,):
            _without(row)
        return made


def _without(row: Any) -> Any:
    """A user's operator may give anything."""
    if isinstance(row, dict):
        row.pop(STATS, None)
    return row


class Same(Mapper):
    """Rows as they are, where results and stats part."""

    def __init__(self, *, keep_stats: bool) -> None:
        self.keep_stats = keep_stats

    def __call__(self, row: Row) -> Row:
        if not self.keep_stats:
            row.pop(STATS, None)
        return row


class OnlyStats(Mapper):
    """What filters found, for a file of its own."""

    def __call__(self, row: Row) -> Row:
        return {STATS: row.get(STATS) or {}}
