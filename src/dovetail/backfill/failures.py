"""Which rows could not be computed, and why?"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.backfill.row_failures import stand_in
from dovetail.errors import Problem, RunError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.backfill.job import FailedRow
    from dovetail.backfill.store import Store

ROW_FAILED = "DT435"
TOO_MANY = "DT436"


@dataclass(frozen=True, slots=True)
class RowError:
    """A row that was set aside: its value is NULL, and `retry_errors` computes it again."""

    column: str
    row: int
    """Its address: fragment << 32 | offset, as `_rowaddr` has it."""
    fragment: int
    offset: int
    error: str
    """The exception's type."""
    message: str
    traceback: str = field(default="", repr=False)


def as_line(failed: FailedRow) -> str:
    told = {
        "fragment": failed.fragment,
        "offset": failed.offset,
        "error": failed.error_type,
        "message": failed.message,
        "traceback": failed.traceback,
    }
    return json.dumps(told, ensure_ascii=True) + "\n"


def read_errors(store: Store, folder: str, column: str) -> dict[str, list[RowError]]:
    """File of the folder -> rows it tells of, of the files of one fragment and input each row once; a torn line is
    none."""
    found: dict[str, list[RowError]] = {}
    seen: set[tuple[str, int]] = set()
    for name in sorted(store.names(folder), reverse=True):
        key = name.partition(".")[0]
        rows = [row for row in map(_row, _lines(store.get(f"{folder}/{name}"))) if row is not None]
        fresh = [RowError(column, row.address, *_told(row)) for row in rows if (key, row.address) not in seen]
        seen.update((key, row.address) for row in rows)
        found[name] = fresh
    return found


@dataclass(frozen=True, slots=True)
class _Row:
    fragment: int
    offset: int
    error: str
    message: str
    traceback: str

    @property
    def address(self) -> int:
        return self.fragment << 32 | self.offset


def _told(row: _Row) -> tuple[int, int, str, str, str]:
    return row.fragment, row.offset, row.error, row.message, row.traceback


def _row(line: str) -> _Row | None:
    try:
        told: dict[str, Any] = json.loads(line)
        return _Row(told["fragment"], told["offset"], told["error"], told["message"], told["traceback"])
    except (ValueError, KeyError, TypeError):
        return None


def _lines(data: bytes | None) -> Iterable[str]:
    return () if data is None else data.decode("utf-8", "replace").splitlines()


class RowFailed(RunError):
    """One row failed, and with on_error="fail" that ends the backfill. It is also of the exception's own type."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        RunError.__init__(self, problems)
        self.row = self.fragment = self.offset = -1
        self.error_type = ""


def row_failed(failed: FailedRow, column: str, committed: str, more: str = "") -> RowFailed:
    """Of the type of the exception that the function raised: so `except ValueError` works. `more`: what the call was
    given besides the column, as it is typed."""
    original = _original(failed)
    place = f"row {failed.address} (fragment {failed.fragment}, offset {failed.offset})"
    lines = tuple(line for line in failed.traceback.splitlines() if line.strip())[-8:]
    again = f'table.backfill("{column}"{more}'
    fixes = (
        f'{again}, on_error="skip")  leaves such rows NULL; table.errors("{column}") lists them',
        f"or mend the function and call it again; {committed}",
    )
    problem = Problem(ROW_FAILED, f"column {column!r}, {place}: {failed.error_type}: {failed.message}", lines, fixes)
    error = _like(original, problem) if original is not None else RowFailed(problem)
    error.row, error.fragment, error.offset = failed.address, failed.fragment, failed.offset
    error.error_type = failed.error_type
    error.__cause__ = original
    return error


def _original(failed: FailedRow) -> BaseException | None:
    if not failed.exception:
        return None
    import pickle

    try:
        found = pickle.loads(failed.exception)  # noqa: S301 - a worker of this very run made it
        found = stand_in(*found) if isinstance(found, tuple) else found
    except Exception:
        return None
    return found if isinstance(found, BaseException) else None


def _like(original: BaseException, problem: Problem) -> RowFailed:
    """Both at once, with what the original has. A type that does not go together with ours (its memory has another
    shape) is only the cause, and so are those that mean something to Python: SystemExit would end the caller, quietly.
    """
    if not isinstance(original, Exception) or isinstance(original, StopIteration | StopAsyncIteration):
        return RowFailed(problem)
    kind = type(original)
    own = {"__module__": kind.__module__, "__init__": _begin, "__str__": _text, "__reduce__": _plainly}
    try:
        made: RowFailed = type(kind.__name__, (RowFailed, kind), own)(problem)
        for name, value in {**_of_the_system(original), **vars(original)}.items():
            setattr(made, name, value)
        _begin(made, problem)
    except Exception:
        return RowFailed(problem)
    return made


def _of_the_system(original: Exception) -> dict[str, object]:
    names = ("errno", "strerror", "filename") if isinstance(original, OSError) else ()
    return {name: getattr(original, name) for name in names}


def _begin(error: RowFailed, problem: Problem) -> None:
    """Without the other type's own, which may want any arguments."""
    error.problems = (problem,)
    error.args = (problem.render(),)


def _text(error: RowFailed) -> str:
    return str(error.args[0])


def _plainly(error: RowFailed) -> tuple[type[RowFailed], tuple[tuple[Problem, ...]]]:
    """A class made here cannot be found by who unpickles it."""
    return RowFailed, (error.problems,)
