"""Wrappers and helper stages of recipes: barriers, row checks, lines to rows, removal of stats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dovetail.engines.unit_executor import call_setup
from dovetail.pipeline.code_hash import code_hash
from dovetail.recipes.operators.base import STATS_FIELD, DatasetOperator, Mapper, Operator, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.engines.worker_context import Worker


class BarrierStage:
    """The barrier stage of an operator that needs all rows."""

    def __init__(self, operator: DatasetOperator) -> None:
        self.operator = operator

    def setup(self, worker: Worker) -> None:
        self.operator.setup(worker)

    def code_key(self) -> str:
        return f"barrier {self.operator.code_key()}"

    def __call__(self, rows: Iterable[Row]) -> Iterator[Row]:
        return self.operator.process_rows(rows)


class RowCheck(Mapper):
    """The stage before a barrier: a row that the operator cannot use fails here, alone."""

    def __init__(self, operator: DatasetOperator) -> None:
        self.operator = operator

    def code_key(self) -> str:
        return f"check {self.operator.code_key()}"

    def __call__(self, row: Row) -> Row:
        self.operator.check(row)
        return row


class UnavailableOperator(Operator):
    """Placeholder of an operator that can be planned but not run in this environment."""

    def __init__(self, op: str) -> None:
        self.op = op

    def code_key(self) -> str:
        return self.op

    def __call__(self, row: Row) -> Row:  # noqa: ARG002
        raise RuntimeError(f"{self.op} cannot run on this machine")


class RunWrapper:
    """Base of wrappers around what a stage runs. Setup and teardown are those of the wrapped object."""

    run: Any

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def setup(self, worker: Worker) -> Any:
        """The result is awaitable if that of the wrapped object is."""
        inner = getattr(self.run, "setup", None)
        return call_setup(inner, worker) if callable(inner) else None

    def teardown(self) -> Any:
        inner = getattr(self.run, "teardown", None)
        return inner() if callable(inner) else None


class LinesToRows(RunWrapper):
    """The first operator of a recipe that reads lines of text: it gets them as rows."""

    def __init__(self, run: Callable[..., Any], text_key: str, *, by_row: bool) -> None:
        super().__init__(run)
        self.text_key = text_key
        self.by_row = by_row

    def code_key(self) -> str:
        return f"LinesToRows {code_hash(self.run)}"

    def __call__(self, given: Any) -> Any:
        if self.by_row:
            return self.run(self._row(given))
        return self.run(
            [self._row(line) for line in given] if isinstance(given, list) else _MappedRows(self._row, given)
        )

    def _row(self, line: Any) -> Row:
        return line if isinstance(line, dict) else {self.text_key: line}


class _MappedRows:
    """Rows made from lines, on every pass."""

    def __init__(self, make: Callable[[Any], Row], lines: Iterable[Any]) -> None:
        self._make = make
        self._lines = lines

    def __iter__(self) -> Iterator[Row]:
        return map(self._make, self._lines)

    def __len__(self) -> int:
        return len(self._lines)  # type: ignore[arg-type]


class StripStats(RunWrapper):
    """The last operator of a recipe that does not keep the stats of its filters."""

    def code_key(self) -> str:
        return f"StripStats {code_hash(self.run)}"

    def __call__(self, given: Any) -> Any:
        made = self.run(given)
        if isinstance(made, Iterator):
            return map(_strip_stats, made)
        for row in made if isinstance(made, list) else (made,):
            _strip_stats(row)
        return made


def _strip_stats(row: Any) -> Any:
    """A user's operator may return anything."""
    if isinstance(row, dict):
        row.pop(STATS_FIELD, None)
    return row


class PassThrough(Mapper):
    """The results, beside the stage of the stats."""

    def __init__(self, *, keep_stats: bool) -> None:
        self.keep_stats = keep_stats

    def __call__(self, row: Row) -> Row:
        if not self.keep_stats:
            row.pop(STATS_FIELD, None)
        return row


class StatsOnly(Mapper):
    """The stats of filters, for a file of their own."""

    def __call__(self, row: Row) -> Row:
        return {STATS_FIELD: row.get(STATS_FIELD) or {}}
