"""Out of memory: which exceptions of user code count as such. Pure.

What follows: smaller batches (`streaming/result_handler.py`), more memory for the next attempt of a job
(`jobs/workers/retry_memory.py`). Worker-side code of all engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CHAIN_LENGTH = 20
GPU_MEMORY_PHRASES = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "HIP out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED: Out of memory",
)
HOST_MEMORY_PHRASES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def classify_memory_error(error: BaseException) -> tuple[bool, bool]:
    """Whether memory ran out, and whether it was GPU memory. Compares type names, because torch is not imported for
    this."""
    for one in related_exceptions(error):
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(one).__mro__):
            return True, True
        if isinstance(one, MemoryError):
            return True, False
        if isinstance(one, RuntimeError):
            text = exception_text(one)
            on_gpu = any(phrase in text for phrase in GPU_MEMORY_PHRASES)
            if on_gpu or any(phrase in text for phrase in HOST_MEMORY_PHRASES):
                return True, on_gpu
    return False, False


def related_exceptions(error: BaseException) -> Iterator[BaseException]:
    """The exception, its causes, and the members of exception groups."""
    waiting = [error]
    for _ in range(MAX_CHAIN_LENGTH):
        if not waiting:
            return
        one = waiting.pop()
        yield one
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions[:MAX_CHAIN_LENGTH]


def exception_text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # whatever the user's __str__ raises
        return "unprintable: __str__ failed"
