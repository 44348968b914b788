"""What is told of an exception in a user's code?

Whatever it is: one whose text cannot be had, one with a million frames, one that ends processes. Nothing here raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.control.events import Failure
from dovetail.engines.keys import as_tuples, slice_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from dovetail.engines.keys import Keys

LINE_CHARS = 500
DETAIL_CHARS = 20_000
DETAILS_CHARS = 400_000
"""Of all failures of a message together; then come lines only."""
FRAMES = 100
CHAIN = 20
OURS = __file__.removesuffix("failures.py")
ON_GPU = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "HIP out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED: Out of memory",
)
ON_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


@dataclass(slots=True)
class Told:
    line: str
    """Type and message."""
    detail: str
    """The traceback, of the user's frames."""
    out_of_memory: bool
    on_gpu: bool


def tell(error: BaseException, *, detailed: bool = True) -> Told:
    try:
        out_of_memory, on_gpu = memory(error)
        return Told(_line(error), _detail(error) if detailed else "", out_of_memory, on_gpu)
    except BaseException:  # nothing of a user's exception can be relied on, not even its name
        return Told("an exception that cannot be shown", "", out_of_memory=False, on_gpu=False)


class Failures:
    """Those of one message."""

    __slots__ = ("_chars", "_keys", "found")

    def __init__(self, keys: Keys) -> None:
        self.found: list[Failure] = []
        self._keys = keys
        self._chars = 0

    def add(self, start: int, stop: int, error: BaseException, stage: str = "") -> None:
        """Items [start, stop) of the message; the stage is named if the unit has several."""
        told = tell(error, detailed=self._chars < DETAILS_CHARS)
        detail = f"in stage {stage!r}\n{told.detail}" if stage and told.detail else told.detail
        self._chars += len(detail)
        keys = as_tuples(slice_of(self._keys, start, stop))
        self.found.append(Failure(start, stop, told.line, detail, told.out_of_memory, told.on_gpu, keys))
        let_go(error)


def let_go(error: BaseException) -> None:
    """Its frames hold what was in memory when it failed, and one that is raised again would gather more and more."""
    BaseException.with_traceback(error, None)


def _line(error: BaseException) -> str:
    name = type(error).__name__
    text = " ".join(_text(error)[: 4 * LINE_CHARS].split())
    line = f"{name}: {text}" if text else name
    return line if len(line) <= LINE_CHARS else f"{line[: LINE_CHARS - 3]}..."


def _detail(error: BaseException) -> str:
    import traceback  # only where something failed

    try:
        theirs = _below_ours(error.__traceback__)
        told = traceback.TracebackException(type(error), error, theirs, limit=-FRAMES, compact=True)
        text = "".join(told.format())
    except BaseException:  # the user's __str__, __notes__, source files: all of it can fail
        return _line(error)
    if len(text) <= DETAIL_CHARS:
        return text
    head, tail = DETAIL_CHARS // 4, DETAIL_CHARS * 3 // 4 - 50
    return f"{text[:head]}\n... {len(text) - head - tail} characters left out ...\n{text[-tail:]}"


def memory(error: BaseException) -> tuple[bool, bool]:
    """Whether memory ran out, and whether it was a card's. By names: torch is not imported for that."""
    for one in _family(error):
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(one).__mro__):
            return True, True
        if isinstance(one, MemoryError):
            return True, False
        if isinstance(one, RuntimeError):
            text = _text(one)
            on_gpu = any(phrase in text for phrase in ON_GPU)
            if on_gpu or any(phrase in text for phrase in ON_HOST):
                return True, on_gpu
    return False, False


def _family(error: BaseException) -> Iterator[BaseException]:
    """Itself, what it was raised from, and the members of groups."""
    waiting = [error]
    for _ in range(CHAIN):
        if not waiting:
            return
        one = waiting.pop()
        yield one
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions[:CHAIN]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # whatever a user's __str__ does
        return "its text cannot be shown: __str__ failed"


def _below_ours(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of our own at the top."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
        trace = trace.tb_next
    return trace
