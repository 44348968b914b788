"""Worker handle passed to setup(worker), and the context of the call that is running."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.engines.item_keys import NO_KEYS, as_tuples, slice_keys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Future

    from dovetail.engines.item_keys import Keys
    from dovetail.engines.result_stream import ResultStream
    from dovetail.resources.seat import Seat


class BreadcrumbCell(Protocol):
    """Words that describe the running call of a slot, readable after its worker died: a memoryview of shared memory,
    cast to "q".

    Words: message (-1: none), index of the first item of the call, whether that index is exact, position of the stage.
    Behind a fused stage that changed the item count, the index counts the output of that stage and is not exact.
    """

    def __getitem__(self, number: int, /) -> int: ...

    def __setitem__(self, number: int, value: int, /) -> None: ...


class CallContext:
    """State of a slot: the keys of its stage's input, and the breadcrumb with the position of the running call.

    The call loop stores the index in the breadcrumb before every call anyway, so the keys cost nothing until they are
    read.
    """

    __slots__ = ("breadcrumb", "keys", "results", "size")

    def __init__(
        self, breadcrumb: BreadcrumbCell, keys: Keys = NO_KEYS, size: int = 1, results: ResultStream | None = None
    ) -> None:
        self.breadcrumb = breadcrumb
        self.keys = keys
        self.size = size
        self.results = results
        """Stores large results of the call; None: they stay in memory."""


CURRENT_CALL: ContextVar[CallContext | None] = ContextVar("dovetail_call", default=None)
"""Context of this thread or task; each slot has its own."""


@dataclass(eq=False)
class Worker:
    """Passed to `setup(worker)`; an object may keep it."""

    id: int
    unit: str
    stage: str = ""
    """The stage being set up: each of several fused stages gets its own Worker."""
    node: str = ""
    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    seat: Seat | None = None
    gpus: tuple[int, ...] = ()
    """Its GPUs, as indices into the devices that this process sees: 0, 1, ... A rank of a gang also sees the GPUs of
    the other ranks on its node; `gpus[0]` is `local_rank`, unless ranks share GPUs."""
    cpus: float = 1.0
    memory_bytes: int = 0
    """Requested memory; 0: not specified."""
    index: int = 0
    """Index of this instance of an actor among those of its role."""
    incarnation: int = 1
    """Number of starts of an actor: 1, and one more after every restart."""
    actors: Any = None
    """Handles of the roles of the system of an actor, by name."""
    context: bytes = b""
    """See `StartWorker.context`."""
    label: str = ""
    """Its name in messages, such as "trainer[0]"; empty: the unit and the id. Set it in `setup`."""
    caller: Callable[..., Future[Any]] | None = None
    """Sends calls to other workers (worker, rank, hosted, method, arguments); set by the engine."""
    call_here: Callable[[str, str, tuple[Any, ...], dict[str, Any]], Future[Any]] | None = None
    """Calls objects of this process (hosted, method, args, kwargs); set by the engine."""
    run_async: Callable[[Awaitable[Any]], Any] | None = None
    """Awaits in the event loop in which the async methods of this process run; set by the engine."""

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        """Call a method of an object that a worker hosts; returns a future of the result.

        The call takes a slot of the object; calls of one caller to one object start in the order in which they were
        made. Arguments and result are copied, except between two objects of one process (`worker` is this worker's own
        id), which share them: an object that keeps or changes an argument keeps or changes that of its caller.
        """
        return self.call_rank(worker, 0, hosted, method, *args, **named)

    def call_rank(self, worker: int, rank: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        """Like `call`, on one rank of a gang; `call` is for rank 0."""
        if self.caller is None:
            raise RuntimeError("this engine does not pass calls from worker to worker")
        return self.caller(worker, rank, hosted, method, *args, **named)

    @property
    def item_keys(self) -> tuple[tuple[int, ...], ...]:
        """Keys of the items of the call that is running in this thread or task; for idempotent writes. Empty outside of
        a call and in threads that the call started itself (`asyncio.to_thread` and tasks inherit them)."""
        call = CURRENT_CALL.get()
        if call is None:
            return ()
        first = call.breadcrumb[1]
        return as_tuples(slice_keys(call.keys, first, first + call.size))

    def for_stage(self, stage: str) -> Worker:
        return replace(self, stage=stage)
