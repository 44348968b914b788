"""Worker handle passed to setup(worker), and the context of the call that is running."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.engines.item_keys import NO_KEYS, as_tuples, slice_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from dovetail.engines.item_keys import Keys
    from dovetail.resources.seat import Seat


class BreadcrumbCell(Protocol):
    """Where a slot is, for whoever finds its worker dead: a memoryview of shared memory, cast to "q".

    Message (-1: none), the first item of the call in it, whether that is exact, the position of the stage. Behind a
    fused stage that changed counts the item is counted in what that stage gave, and is not exact.
    """

    def __getitem__(self, number: int, /) -> int: ...

    def __setitem__(self, number: int, value: int, /) -> None: ...


class CallContext:
    """What a slot does: the keys of what its stage was given, and a crumb with the place of the running call in them.

    The loop over a message stores the crumb's index before every call anyway, so that knowing the keys costs nothing
    until somebody asks.
    """

    __slots__ = ("breadcrumb", "keys", "size")

    def __init__(self, crumb: BreadcrumbCell, keys: Keys = NO_KEYS, size: int = 1) -> None:
        self.breadcrumb = crumb
        self.keys = keys
        self.size = size


CURRENT_CALL: ContextVar[CallContext | None] = ContextVar("dovetail_call", default=None)
"""Of this thread or task: each slot has its own."""


@dataclass(eq=False)
class Worker:
    """Given to `setup(worker)`; an object may keep it."""

    id: int
    unit: str
    stage: str = ""
    """Whose setup this is: of fused stages each gets a Worker of its own."""
    node: str = ""
    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    seat: Seat | None = None
    gpus: tuple[int, ...] = ()
    """As this process sees them: 0, 1, ..."""
    cpus: float = 1.0
    memory_bytes: int = 0
    """What it asked for; 0: nothing was said."""
    caller: Callable[..., Future[Any]] | None = None
    """How the engine reaches other workers."""

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        """One method of an object that another worker hosts; its result comes in the future."""
        if self.caller is None:
            raise RuntimeError("this engine does not pass calls from worker to worker")
        return self.caller(worker, hosted, method, *args, **named)

    @property
    def item_keys(self) -> tuple[tuple[int, ...], ...]:
        """The keys of the items of the call that runs right now, in this thread or task; for writes that can be
        repeated. Empty outside of a call, and in threads that the call started by itself (`asyncio.to_thread` and
        tasks know them)."""
        call = CURRENT_CALL.get()
        if call is None:
            return ()
        first = call.breadcrumb[1]
        return as_tuples(slice_keys(call.keys, first, first + call.size))

    def for_stage(self, stage: str) -> Worker:
        return replace(self, stage=stage)
