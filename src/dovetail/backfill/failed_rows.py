"""Failed rows: capture of the exception in a worker, error records on disk, and RowFailed, raised to the caller."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.backfill.task import NO_FRAGMENT, FailedRow, row_place
from dovetail.engines.exception_summary import drop_traceback, summarize_exception
from dovetail.errors import Call, Problem, RunError, Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.backfill.store import TableStore

MAX_MESSAGE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 4_000
MAX_EXCEPTION_BYTES = 64 << 10


def capture_failure(offset: int, error: BaseException) -> FailedRow:
    """A failed row of an unknown fragment. Never raises; drops the traceback of the exception."""
    detail = summarize_exception(error).detail
    if len(detail) > MAX_TRACEBACK_CHARS:
        head = MAX_TRACEBACK_CHARS // 4
        left = f"\n... {len(detail) - MAX_TRACEBACK_CHARS + 40} characters omitted ...\n"
        detail = f"{detail[:head]}{left}{detail[-(MAX_TRACEBACK_CHARS - head - len(left)) :]}"
    drop_traceback(error)
    return FailedRow(NO_FRAGMENT, offset, _type_name(error), _message(error), detail, _pickle_exception(error))


def _type_name(error: BaseException) -> str:
    return str(type(error).__name__)


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # user code may raise anything
        return "__str__ of the exception failed"
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 3]}..."


def _pickle_exception(error: BaseException) -> bytes:
    """The pickled exception, if it can be unpickled; exceptions with their own __init__ often cannot."""
    found = _pickle_if_loadable(error)
    if found:
        return found
    has = {name: value for name, value in vars(error).items() if _pickle_if_loadable(value)}
    return _pickle_if_loadable((type(error), _message(error), has)) or _pickle_if_loadable(
        (type(error), _message(error), {})
    )


def _pickle_if_loadable(value: object) -> bytes:
    import cloudpickle

    try:
        found: bytes = cloudpickle.dumps(value)
        back = cloudpickle.loads(found) if len(found) <= MAX_EXCEPTION_BYTES else None
    except BaseException:  # user code may raise anything
        return b""
    return found if type(back) is type(value) or type(back).__qualname__ == type(value).__qualname__ else b""


def rebuild_exception(kind: type[BaseException], message: str, has: dict[str, object]) -> BaseException:
    """Create an exception of that type without calling its __init__, whose arguments are unknown."""
    made = kind.__new__(kind)
    made.args = (message,)
    vars(made).update(has)
    return made


ROW_FAILED = "DT435"
TOO_MANY_FAILED_ROWS = "DT436"


@dataclass(frozen=True, slots=True)
class RowError:
    """A failed row: its value is NULL, and `retry_errors` computes it again."""

    column: str
    row: int
    """Row address: fragment << 32 | offset, like `_rowaddr`."""
    fragment: int
    offset: int
    error: str
    """Name of the exception type."""
    message: str
    traceback: str = field(default="", repr=False)

    @property
    def place(self) -> str:
        """The row as messages show it."""
        return row_place(self.fragment, self.offset)


def to_json_line(failed: FailedRow) -> str:
    record = {
        "fragment": failed.fragment,
        "offset": failed.offset,
        "error": failed.error_type,
        "message": failed.message,
        "traceback": failed.traceback,
    }
    return json.dumps(record, ensure_ascii=True) + "\n"


def read_error_files(store: TableStore, folder: str, column: str) -> dict[str, list[RowError]]:
    """File name -> its failed rows. Each row of a fragment and input is listed once, from the last file; truncated
    lines are ignored."""
    found: dict[str, list[RowError]] = {}
    seen: set[tuple[str, int]] = set()
    for name in sorted(store.names(folder), reverse=True):
        key = name.partition(".")[0]
        rows = [row for row in map(_parse_error_line, _split_lines(store.get(f"{folder}/{name}"))) if row is not None]
        fresh = [_public_view(column, row) for row in rows if (key, row.address) not in seen]
        seen.update((key, row.address) for row in rows)
        found[name] = fresh
    return found


def _public_view(column: str, row: FailedRow) -> RowError:
    return RowError(column, row.address, row.fragment, row.offset, row.error_type, row.message, row.traceback)


def _parse_error_line(line: str) -> FailedRow | None:
    try:
        record: dict[str, Any] = json.loads(line)
        return FailedRow(record["fragment"], record["offset"], record["error"], record["message"], record["traceback"])
    except (ValueError, KeyError, TypeError):
        return None


def _split_lines(data: bytes | None) -> Iterable[str]:
    return () if data is None else data.decode("utf-8", "replace").splitlines()


class RowFailed(RunError):
    """A row failed and ended the backfill (on_error="fail"). The error is also of the type that the function raised."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        RunError.__init__(self, problems)
        self.row = self.fragment = self.offset = -1
        self.error_type = ""


def make_row_failed(failed: FailedRow, skip: Call) -> RowFailed:
    """A RowFailed that is also of the type that the function raised, so that `except ValueError` works. `skip`: the
    call of `table.backfill` that leaves failed rows NULL."""
    column = skip.arguments[0]
    original = _load_exception(failed)
    lines = tuple(line for line in failed.traceback.splitlines() if line.strip())[-8:]
    fixes = (
        Text(skip, "  leaves such rows NULL; ", Call("table.errors", (column,)), " lists them"),
        "correct the function, then repeat the backfill; what is finished is committed",
    )
    problem = Problem(
        ROW_FAILED, f"column {column!r}, {failed.place}: {failed.error_type}: {failed.message}", lines, fixes
    )
    error = _merge_with_exception(original, problem) if original is not None else RowFailed(problem)
    error.row, error.fragment, error.offset = failed.address, failed.fragment, failed.offset
    error.error_type = failed.error_type
    error.__cause__ = original
    return error


def _load_exception(failed: FailedRow) -> BaseException | None:
    if not failed.exception:
        return None
    import pickle

    try:
        found = pickle.loads(failed.exception)  # noqa: S301 - pickled by a worker of this run
        found = rebuild_exception(*found) if isinstance(found, tuple) else found
    except Exception:
        return None
    return found if isinstance(found, BaseException) else None


def _merge_with_exception(original: BaseException, problem: Problem) -> RowFailed:
    """An error of both types with the attributes of the original. A type with an incompatible memory layout, or with a
    meaning to Python (SystemExit would end the caller silently), becomes only the cause."""
    if not isinstance(original, Exception) or isinstance(original, StopIteration | StopAsyncIteration):
        return RowFailed(problem)
    kind = type(original)
    own = {
        "__module__": kind.__module__,
        "__init__": _set_problem,
        "__str__": _error_text,
        "__reduce__": _reduce_to_row_failed,
    }
    try:
        made: RowFailed = type(kind.__name__, (RowFailed, kind), own)(problem)
        for name, value in {**_os_error_attributes(original), **vars(original)}.items():
            setattr(made, name, value)
        _set_problem(made, problem)
    except Exception:
        return RowFailed(problem)
    return made


def _os_error_attributes(original: Exception) -> dict[str, object]:
    names = ("errno", "strerror", "filename") if isinstance(original, OSError) else ()
    return {name: getattr(original, name) for name in names}


def _set_problem(error: RowFailed, problem: Problem) -> None:
    """Replaces the __init__ of the other type, whose arguments are unknown."""
    error.problems = (problem,)
    error.args = (problem.render(),)


def _error_text(error: RowFailed) -> str:
    return str(error.args[0])


def _reduce_to_row_failed(error: RowFailed) -> tuple[type[RowFailed], tuple[tuple[Problem, ...]]]:
    """Pickle as RowFailed: the dynamic class cannot be imported."""
    return RowFailed, (error.problems,)
