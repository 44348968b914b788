"""Summary of an exception raised by user code: one line, traceback, out-of-memory classification.

Handles any exception: one whose text raises, one with a million frames, one that ends processes. Nothing here raises.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dovetail.control.engine import UnsendableItemError
from dovetail.control.events import CallFailure
from dovetail.control.payload import UnwritableItemError
from dovetail.engines.item_keys import as_tuples, slice_keys
from dovetail.engines.out_of_memory import classify_memory_error, exception_text, related_exceptions
from dovetail.engines.result_stream import ResultsNotStoredError
from dovetail.pipeline.failure_rules import ANY_EXCEPTION, action_for, is_known_to_break_workers, type_names

if TYPE_CHECKING:
    from types import TracebackType

    from dovetail.engines.item_keys import Keys
    from dovetail.pipeline.failure_rules import FailureRules

UNPICKLABLE_TEXT, UNWRITABLE_TEXT = "the result cannot be pickled", "the result cannot be written"
UNPICKLABLE_HINT = (
    "hint: results are sent between processes; return data (numbers, texts, lists, dicts, arrays), and keep files, "
    "locks and connections in the object of a class, opened in its setup(worker)"
)
MAX_LINE_CHARS = 500
MAX_DETAIL_CHARS = 20_000
MAX_MESSAGE_DETAIL_CHARS = 400_000
"""Traceback bytes of all failures of a message together; beyond it, failures have one line only."""
MAX_FRAMES = 100
PACKAGE_FOLDER = __file__.removesuffix("engines/exception_summary.py")
OWN_FOLDERS = tuple(f"{PACKAGE_FOLDER}{name}/" for name in ("engines", "backfill", "jobs"))
IMPORT_FILES = ("<frozen importlib", importlib.__file__)


@dataclass(slots=True)
class ExceptionSummary:
    line: str
    """Type and message."""
    detail: str
    """The traceback, user frames only."""
    out_of_memory: bool
    on_gpu: bool


def summarize_exception(error: BaseException, *, detailed: bool = True) -> ExceptionSummary:
    try:
        out_of_memory, on_gpu = classify_memory_error(error)
        return ExceptionSummary(_summary_line(error), _traceback_text(error) if detailed else "", out_of_memory, on_gpu)
    except BaseException:  # nothing of a user's exception is reliable, not even its name
        return ExceptionSummary("unprintable exception", "", out_of_memory=False, on_gpu=False)


class FailureCollector:
    """Failures of one message."""

    __slots__ = ("_chars", "_keys", "_rules", "found")

    def __init__(self, keys: Keys, rules: FailureRules = ()) -> None:
        """`rules`: the stage's `on_failure`."""
        self.found: list[CallFailure] = []
        self._keys = keys
        self._rules = rules
        self._chars = 0

    def add(self, start: int, stop: int, error: BaseException, stage: str = "") -> None:
        """Add the failure of items [start, stop) of the message. Names the stage if the unit has several."""
        if isinstance(error, ResultsNotStoredError):
            raise error.__cause__ or error
        summary = summarize_exception(error, detailed=self._chars < MAX_MESSAGE_DETAIL_CHARS)
        detail = f"in stage {stage!r}\n{summary.detail}" if stage and summary.detail else summary.detail
        self._chars += len(detail)
        keys = as_tuples(slice_keys(self._keys, start, stop))
        failure = CallFailure(start, stop, summary.line, detail, summary.out_of_memory, summary.on_gpu, keys)
        if isinstance(error, UnsendableItemError):
            failure.error, failure.detail = unsendable_text(error), unsendable_hint(error)
        failure.stage = stage
        failure.worker_broken = is_worker_broken(error, self._rules)
        self.found.append(failure)
        drop_traceback(error)


def unsendable_text(error: UnsendableItemError) -> str:
    """Why the call whose result cannot be sent or written fails."""
    why = UNWRITABLE_TEXT if isinstance(error, UnwritableItemError) else UNPICKLABLE_TEXT
    return f"{why}: {error.error_text}"[:MAX_LINE_CHARS]


def unsendable_hint(error: UnsendableItemError) -> str:
    return "" if isinstance(error, UnwritableItemError) else UNPICKLABLE_HINT


def drop_traceback(error: BaseException) -> None:
    """Drop the frames: they keep objects alive, and an exception that is raised again would collect more and more."""
    BaseException.with_traceback(error, None)


def _summary_line(error: BaseException) -> str:
    name = type(error).__name__
    text = " ".join(exception_text(error)[: 4 * MAX_LINE_CHARS].split())
    line = f"{name}: {text}" if text else name
    return line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 3]}..."


def _traceback_text(error: BaseException) -> str:
    import traceback  # late: only needed after a failure

    try:
        theirs = _without_own_frames(error.__traceback__)
        summary = traceback.TracebackException(type(error), error, theirs, limit=-MAX_FRAMES, compact=True)
        text = "".join(summary.format()) + _main_guard_hint(error)
    except BaseException:  # the user's __str__, __notes__ and source files can all fail
        return _summary_line(error)
    if len(text) <= MAX_DETAIL_CHARS:
        return text
    head, tail = MAX_DETAIL_CHARS // 4, MAX_DETAIL_CHARS * 3 // 4 - 50
    return f"{text[:head]}\n... {len(text) - head - tail} characters omitted ...\n{text[-tail:]}"


def _main_guard_hint(error: BaseException) -> str:
    """A hint, if a global name is missing because its module assigns it only where it is run as a program."""
    trace = error.__traceback__
    if not isinstance(error, NameError) or not error.name or trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    line = _names_of_main_guard(trace.tb_frame.f_code.co_filename).get(error.name)
    if line is None:
        return ""
    where = f'line {line}, under `if __name__ == "__main__":`'
    return f"hint: {error.name} is assigned in {where}, which workers do not run; assign it before that line\n"


@lru_cache(maxsize=8)
def _names_of_main_guard(file: str) -> dict[str, int]:
    """Names that a module assigns where it is run as a program -> line."""
    import ast  # late: only needed after a failure
    import linecache

    found: dict[str, int] = {}
    with suppress(SyntaxError, ValueError, RecursionError):
        for part in ast.parse("".join(linecache.getlines(file))).body:
            if isinstance(part, ast.If) and ast.unparse(part.test) == "__name__ == '__main__'":
                for node in ast.walk(part):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        found.setdefault(node.id, node.lineno)
    return found


def is_worker_broken(error: BaseException, rules: FailureRules = ()) -> bool:
    """Whether an exception means that its worker is broken; see `on_failure` of a stage."""
    try:
        related = [(type_names(one), exception_text(one)) for one in related_exceptions(error)]
        found = (action_for(rules, names, text) for names, text in related)
        action = next(filter(None, found), None) or dict(rules).get(ANY_EXCEPTION)
        if action is not None:
            return action == "restart"
        known = any(is_known_to_break_workers(names, text) for names, text in related)
        return known and not classify_memory_error(error)[0]
    except BaseException:  # nothing of a user's exception is reliable
        return False


def user_traceback(error: BaseException) -> list[str]:
    """Entries of the traceback, without those of Dovetail at its top; all of them if there are no others."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((PACKAGE_FOLDER, *IMPORT_FILES)):
        trace = trace.tb_next
    return traceback.format_exception(type(error), error, trace or error.__traceback__)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames at the top of Dovetail and of the import of the user's module."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((*OWN_FOLDERS, *IMPORT_FILES)):
        trace = trace.tb_next
    return trace
