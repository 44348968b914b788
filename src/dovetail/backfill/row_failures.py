"""What is kept of an exception that a row caused?"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.engines.failures import let_go, tell

if TYPE_CHECKING:
    from types import TracebackType

MESSAGE_CHARS = 2_000
TRACEBACK_CHARS = 4_000
EXCEPTION_BYTES = 64 << 10
OURS = __file__.removesuffix("row_failures.py")


@dataclass(slots=True)
class RowFailure:
    index: int
    """In the batch."""
    error_type: str
    message: str
    traceback: str
    """From the user's frame on."""
    exception: bytes
    """Pickled by cloudpickle, or else its type and what it has; b"": neither can be."""


def failure_of(index: int, error: BaseException) -> RowFailure:
    """Never raises, whatever the exception is like. Its frames are let go."""
    with suppress(BaseException):
        BaseException.with_traceback(error, _theirs(error.__traceback__))
    detail = tell(error).detail
    if len(detail) > TRACEBACK_CHARS:
        head = TRACEBACK_CHARS // 4
        left = f"\n... {len(detail) - TRACEBACK_CHARS + 40} characters left out ...\n"
        detail = f"{detail[:head]}{left}{detail[-(TRACEBACK_CHARS - head - len(left)) :]}"
    let_go(error)
    return RowFailure(index, _name(error), _message(error), detail, _pickled(error))


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """Without our own frames, if others are left: what we raised ourselves has no others."""
    first = trace
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
        trace = trace.tb_next
    return trace if trace is not None or first is None else None


def _name(error: BaseException) -> str:
    return str(type(error).__name__)


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # whatever a user's __str__ does
        return "its text cannot be shown: __str__ failed"
    return text if len(text) <= MESSAGE_CHARS else f"{text[: MESSAGE_CHARS - 3]}..."


def _pickled(error: BaseException) -> bytes:
    """Only what really comes back: exceptions with parameters of their own often pickle, and do not unpickle."""
    found = _coming_back(error)
    if found:
        return found
    has = {name: value for name, value in vars(error).items() if _coming_back(value)}
    return _coming_back((type(error), _message(error), has)) or _coming_back((type(error), _message(error), {}))


def _coming_back(value: object) -> bytes:
    import cloudpickle

    try:
        found: bytes = cloudpickle.dumps(value)
        back = cloudpickle.loads(found) if len(found) <= EXCEPTION_BYTES else None
    except BaseException:  # whatever a user's class does
        return b""
    return found if type(back) is type(value) or type(back).__qualname__ == type(value).__qualname__ else b""


def stand_in(kind: type[BaseException], message: str, has: dict[str, object]) -> BaseException:
    """An exception of that type that nobody raised: its own parameters are not known."""
    made = kind.__new__(kind)
    made.args = (message,)
    vars(made).update(has)
    return made
