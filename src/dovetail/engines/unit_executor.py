"""Setup, execution and teardown of the stage objects that a worker hosts under one name."""

from __future__ import annotations

import inspect
from contextlib import nullcontext, suppress
from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.control.engine import CONTROL_METHODS
from dovetail.engines.barrier import run_barrier
from dovetail.engines.call_timeout import SoftTimeout
from dovetail.engines.exception_summary import summarize_exception
from dovetail.engines.object_loader import bound_call, load_object
from dovetail.engines.stage_calls import Step
from dovetail.engines.stage_chain import ActiveMessage, MessageOutcome, run_message, run_message_async
from dovetail.pipeline.stage_code import StageCode
from dovetail.pipeline.stage_function import is_async

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dovetail.control.events import CallFailure
    from dovetail.control.payload import Writer
    from dovetail.engines.barrier import BarrierRows, EmitChunk
    from dovetail.engines.epoch_starts import EpochStarts
    from dovetail.engines.exception_summary import ExceptionSummary
    from dovetail.engines.item_keys import Keys
    from dovetail.engines.result_stream import StorePiece
    from dovetail.engines.stage_chain import ReloadItems
    from dovetail.engines.worker_context import BreadcrumbCell, Worker

T = TypeVar("T")
SOFT_TIMEOUT = SoftTimeout()
"""One per process, because a process has one alarm timer."""


def make_executor(work: Any, worker: Worker, slots: int = 1) -> UnitExecutor:
    """Import texts and instantiate classes. `work` is a tuple of stages, or a single class, function or object."""
    stages = work if isinstance(work, tuple) else (StageCode(worker.unit, work),)
    codes = [one if isinstance(one, StageCode) else one.code() for one in stages]
    return UnitExecutor([_StageObject(code, worker) for code in codes], slots)


class _StageObject:
    """The object of one stage."""

    def __init__(self, stage: StageCode, worker: Worker) -> None:
        self.name = stage.name
        try:
            self.target, each = load_object(stage.run, self.name, stage.args, stage.kwargs)
        except BaseException as error:
            _add_note(error, f"while stage {self.name!r} was created")
            raise
        self.worker = worker.for_stage(self.name)
        self.is_async = is_async(self.target)
        self.step = Step(
            self.name,
            bound_call(self.target),
            each=each,
            batch_size=stage.batch_size,
            barrier=stage.barrier,
            retry=stage.retry,
            timeout_s=stage.timeout_s,
            failure_rules=stage.failure_rules,
        )
        if self.step.timeout_s is not None and not (self.is_async or self.step.barrier):
            self.step.fn = partial(SOFT_TIMEOUT.call_one, self.step.fn, self.step.timeout_s)

    @property
    def owner(self) -> str:
        """The stage, or the instance of an actor, in notes of exceptions."""
        return self.worker.label or f"stage {self.name!r}"


class UnitExecutor:
    """The objects that a worker hosts under one name: those of a unit's stages, or a single object. Any number of
    threads, or tasks of one event loop, may call `run` at the same time, each with its own breadcrumb."""

    def __init__(self, hosted: list[_StageObject], slots: int) -> None:
        self._objects = hosted
        self._steps = [one.step for one in hosted]
        self._set_up_objects: list[_StageObject] = []
        self._has_timeout = any(step.timeout_s is not None and not step.barrier for step in self._steps)
        self.writer: Writer | None = None
        """Writes the results to their destination; None: results are sent on."""
        self.slots = slots
        self.stages = tuple(one.name for one in hosted)
        self.target: Any = hosted[-1].target
        """The object that receives calls; with several stages, that of the last stage."""
        self.is_async = hosted[0].is_async
        self.has_control_methods = any(callable(getattr(type(self.target), name, None)) for name in CONTROL_METHODS)
        first = hosted[0].step
        self.barrier = first if first.barrier and not first.each and not self.is_async else None
        """The step of a barrier stage, which gets all input at once; None: not a barrier."""
        for one in hosted if len(hosted) > 1 else ():
            if one.is_async:
                what = f"stage {one.name!r}: async stages cannot be fused with other stages"
                from dovetail.errors import PipelineError, Problem  # late: workers need it rarely

                raise PipelineError(Problem("DT034", what, (f"unit {'+'.join(self.stages)}",), ("fuse=False",)))

    @property
    def label(self) -> str:
        """The object that receives calls, in messages."""
        worker = self._objects[-1].worker
        return worker.label or f"{worker.unit} (worker {worker.id})"

    # --- setup and teardown

    def setup(self) -> None:
        """Set up all objects. Raises what a user's `setup` raises, after tearing down the objects that were set up."""
        _run_without_loop(self.setup_async())

    async def setup_async(self) -> None:
        """Like `setup`, in the event loop of an async object: `setup` may be a coroutine function."""
        for one in self._objects:
            setup = getattr(one.target, "setup", None)
            try:
                if callable(setup):
                    await _await_if_needed(call_setup(setup, one.worker))
            except BaseException as error:
                _add_note(error, f"in the setup of {one.owner}")
                await self.teardown_async()
                raise
            self._set_up_objects.append(one)

    def teardown(self) -> list[ExceptionSummary]:
        """Tear down all objects that were set up, last first. Exceptions are returned and do not stop the others.
        Idempotent."""
        return _run_without_loop(self.teardown_async())

    async def teardown_async(self) -> list[ExceptionSummary]:
        errors: list[ExceptionSummary] = []
        while self._set_up_objects:
            one = self._set_up_objects.pop()
            teardown = getattr(one.target, "teardown", None)
            try:
                if callable(teardown):
                    await _await_if_needed(teardown())
            except GeneratorExit:
                raise
            except BaseException as error:  # raised by user code
                _add_note(error, f"in the teardown of {one.owner}")
                errors.append(summarize_exception(error))
        return errors

    # --- messages

    def run(
        self,
        keys: Keys,
        items: list[Any],
        batch_size: int,
        breadcrumb: BreadcrumbCell,
        message: int,
        fresh: ReloadItems | None = None,
        starts: EpochStarts | None = None,
        store: StorePiece | None = None,
    ) -> MessageOutcome:
        """Run all items of a message. `fresh` reloads the items unmodified; without it, functions that modify items in
        place see their own changes when a failure makes fused stages run twice. `store` takes large results of a call
        while it is running."""
        assert not self.is_async, f"{self.stages} must be awaited"
        with SOFT_TIMEOUT if self._has_timeout else nullcontext(), ActiveMessage(breadcrumb, message) as active:
            return run_message(self._steps, keys, items, batch_size, active, fresh, starts, store)

    def run_barrier(
        self, rows: BarrierRows, breadcrumb: BreadcrumbCell, message: int, chunk: int, give: EmitChunk
    ) -> tuple[int, float, list[CallFailure]]:
        """Run a barrier stage on all of its input; see `barrier.run_barrier`."""
        assert self.barrier is not None, f"{self.stages} is no barrier"
        with ActiveMessage(breadcrumb, message) as active:
            return run_barrier(self.barrier, rows, active, chunk, give)

    async def run_async(
        self,
        keys: Keys,
        items: list[Any],
        batch_size: int,
        breadcrumb: BreadcrumbCell,
        message: int,
        fresh: ReloadItems | None = None,
        starts: EpochStarts | None = None,
        store: StorePiece | None = None,
    ) -> MessageOutcome:
        if not self.is_async:
            return self.run(keys, items, batch_size, breadcrumb, message, fresh, starts, store)
        with ActiveMessage(breadcrumb, message) as active:
            return await run_message_async(self._steps[0], keys, items, batch_size, active, fresh, starts, store)

    def call(self, method: str, /, *args: Any, **named: Any) -> Any:
        """Call one method of the object; the result may be awaitable."""
        return getattr(self.target, method)(*args, **named)


def is_awaitable(value: object) -> bool:
    """Like `inspect.isawaitable`, which takes several times as long for other values."""
    return hasattr(type(value), "__await__") or (isinstance(value, GeneratorType) and inspect.isawaitable(value))


def call_setup(setup: Callable[..., Any], worker: Worker) -> Any:
    """Call `setup(worker)`, or `setup()` if it takes no such parameter."""
    try:
        parameters = list(inspect.signature(setup).parameters.values())
    except (TypeError, ValueError):
        return setup(worker)
    if any(one.name == "worker" and one.kind is one.KEYWORD_ONLY for one in parameters):
        return setup(worker=worker)
    first = parameters[0] if parameters else None
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return setup()
    # a first parameter with a default and another name is not meant for the worker
    meant = first.default is first.empty or first.name == "worker"
    return setup(worker) if meant else setup()


async def _await_if_needed(made: Any) -> None:
    if inspect.isawaitable(made):
        await made


def _run_without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not suspend, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise TypeError("async setup and teardown require an `async def __call__`")


def _add_note(error: BaseException, text: str) -> None:
    with suppress(Exception):  # a user's exception can be anything
        error.add_note(text)
