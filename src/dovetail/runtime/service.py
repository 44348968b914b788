"""`dt.serve`: a pipeline that answers requests; the assembly of the service and its `Service` handle."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import weakref
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Self

import dovetail
from dovetail.control.events import CancelRun
from dovetail.control.lifecycle import RunState
from dovetail.data.interfaces import SourceAndSink
from dovetail.data.request_queue import (
    DeadlineWatch,
    ItemFailed,
    RequestFuture,
    RequestSource,
    ResponseSink,
    ServiceClosed,
    TooManyRequests,
    service_closed_error,
)
from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.local.process_setup import PAYLOAD_MEMORY_DIVISOR
from dovetail.errors import ConfigError, Problem, did_you_mean, short_repr
from dovetail.observe.control_socket import ControlSocket
from dovetail.observe.recorder import Recorder, RunDescription
from dovetail.observe.run_folder import create_run
from dovetail.pipeline.durations import parse_duration
from dovetail.pipeline.pipeline import Pipeline
from dovetail.runtime.admission import admit
from dovetail.runtime.assembly import load_item, load_key, refresh_status, remove_run_folder, undo_on_error
from dovetail.runtime.delayed_telemetry import DelayedTelemetry
from dovetail.runtime.length_check import with_length_check
from dovetail.runtime.run_loop import run_with_observers
from dovetail.scheduling.plan import Plan
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from dovetail.observe.run_folder import RunFolder
    from dovetail.observe.summary import RunSummary
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.admission import Admission
    from dovetail.streaming.settings import UnitSpec

LOOP_TICK_S = 1.0
HOP_S = 0.0002
FIRST_REPLAN_S = 1.0
BATCHES_PER_EPOCH = 8
"""While there is more to do than can be done: who asked for something that was dropped waits for about so many batches,
and about one batch of so many is not full."""
STREAMING_MODE = "streaming"


@dataclass(frozen=True)
class ServiceParts:
    """The parts of a service."""

    plan: Plan
    folder: Path
    engine: LocalEngine
    source: RequestSource
    sink: ResponseSink
    run_loop: Callable[[], None]
    """Drives it to its end."""
    failure: Callable[[], tuple[str, str] | None]
    """Error and details."""
    refresh: Callable[[], None]
    """Writes down how it stands now."""
    deadline_s: float | None
    max_pending: int


def prepare_service(
    pipeline: Pipeline,
    engine: str,
    cluster: Cluster | str,
    *,
    plan: Plan | None,
    max_wait: float | str,
    max_pending: int,
    deadline: float | str | None,
    run_dir: str | Path | None,
    wait: bool,
    pin_cpus: bool,
) -> ServiceParts:
    problems = [
        *_pipeline_errors(pipeline, engine, plan),
        *_duration_errors(max_wait=max_wait, deadline=deadline),
        *_other_errors(max_pending, run_dir, wait=wait, pin_cpus=pin_cpus),
    ]
    if problems:
        raise ConfigError(problems)
    alone = plan or make_plan(pipeline, cluster, STREAMING_MODE)
    options = _stream_options(parse_duration(max_wait), alone.cluster)
    planned = partial(make_plan, pipeline, mode=STREAMING_MODE) if plan is None else None
    with undo_on_error() as undo:
        folder = create_run(alone.name, run_dir)
        undo.append(partial(remove_run_folder, folder))
        place = admit(folder.id, alone, planned, wait=wait)
        undo.append(place.release)
        works = tuple(_as_served_unit(work) for work in unit_specs(pipeline, place.plan))
        limits = (None if deadline is None else parse_duration(deadline), max_pending)
        return _assemble(works, place, folder, options, limits, pin_cpus=pin_cpus)


# --- what was given


def _pipeline_errors(pipeline: object, engine: object, plan: object) -> Iterator[Problem]:
    if engine != "local":
        hint = did_you_mean(str(engine), ("local",))
        yield Problem("DT331", f"there is no engine {short_repr(engine)} that serves{hint}", fixes=('engine="local"',))
    if not isinstance(pipeline, Pipeline):
        yield Problem(
            "DT337", f"{short_repr(pipeline)} is not a Pipeline", fixes=('dt.Pipeline([dt.Stage("name", fn)])',)
        )
        return
    for stage in pipeline:
        if stage.barrier:
            message = f"stage {stage.name!r} waits for the end of its input (barrier=True), and requests have no end"
            yield Problem("DT375", message, fixes=("leave it out: dt.run runs pipelines with barriers",))
    if plan is None:
        return
    if not isinstance(plan, Plan):
        yield Problem("DT338", f"plan={short_repr(plan)} is not a Plan", fixes=("plan=dt.plan(pipeline, cluster)",))
    elif sorted(name for unit in plan.units for name in unit.stages) != sorted(stage.name for stage in pipeline):
        yield Problem("DT338", "the plan is for another pipeline", fixes=("plan=dt.plan(pipeline, cluster)",))
    elif len(plan.waves) > 1:
        message = f"the plan runs {len(plan.waves)} waves one after another, and requests have no end"
        yield Problem("DT375", message, fixes=('plan=dt.plan(pipeline, cluster, mode="streaming")',))


def _duration_errors(**given: object) -> Iterator[Problem]:
    for name, value in given.items():
        if value is None and name == "deadline":
            continue
        try:
            parse_duration(value)
        except ValueError as error:
            yield Problem("DT375", f"{name}={short_repr(value)} {error}", fixes=(f'{name}="20ms"',))


def _other_errors(max_pending: object, run_dir: object, **booleans: object) -> Iterator[Problem]:
    if isinstance(max_pending, bool) or not isinstance(max_pending, int) or max_pending < 1:
        message = f"max_pending={short_repr(max_pending)} is not a whole number from 1 on"
        yield Problem("DT375", message, fixes=("max_pending=10_000",))
    if run_dir is not None and not isinstance(run_dir, str | os.PathLike):
        yield Problem("DT375", f"run_dir={short_repr(run_dir)} is not a path", fixes=('run_dir="runs/today"',))
    for name, value in booleans.items():
        if not isinstance(value, bool):
            yield Problem("DT375", f"{name}={short_repr(value)} is not True or False", fixes=(f"{name}=True",))


# --- what it becomes


def _stream_options(max_wait_s: float, cluster: Cluster) -> StreamOptions:
    options = StreamOptions(
        serving=True,
        eager=True,
        max_wait_s=max_wait_s,
        hop_s=HOP_S,
        first_replan_s=FIRST_REPLAN_S,
        target_epoch_batches=BATCHES_PER_EPOCH,
        payloads_survive=True,
    )
    memory = sum(node.memory_bytes for node in cluster.nodes)
    if not memory:
        return options
    return replace(options, byte_budget=min(options.byte_budget, memory // PAYLOAD_MEMORY_DIVISOR))


def _as_served_unit(work: UnitSpec) -> UnitSpec:
    """One request that fails is told so, and harms nobody."""
    stages: Any = work.hosted.definition
    hosted = replace(work.hosted, definition=tuple(with_length_check(stage) for stage in stages))
    return replace(work, skip_failed=True, hosted=hosted)


def results_per_request(works: tuple[UnitSpec, ...]) -> int:
    """From the source to leaves: how many results a request has, if nothing is dropped or multiplied."""
    ways: dict[str, int] = {}
    for work in works:  # parents first
        ways[work.name] = sum(ways[name] for name in work.parents) if work.parents else 1
    inner = {name for work in works for name in work.parents}
    return sum(count for name, count in ways.items() if name not in inner)


def _assemble(
    works: tuple[UnitSpec, ...],
    place: Admission,
    folder: RunFolder,
    options: StreamOptions,
    limits: tuple[float | None, int],
    *,
    pin_cpus: bool,
) -> ServiceParts:
    plan = place.plan
    memory_bytes = sum(node.memory_bytes for node in plan.cluster.nodes)
    engine = LocalEngine(
        folder.path, plan.cluster, memory_bytes=memory_bytes // PAYLOAD_MEMORY_DIVISOR, pin_cpus=pin_cpus
    )
    try:
        engine.prepare([work.hosted for work in works])
        stream = StreamController(works, plan, options, reserved=place.reserved)
        recorder = _recorder(folder, plan, stream, engine)
    except BaseException:
        engine.close()
        raise
    measuring = DelayedTelemetry(engine, works, plan.cluster, recorder)
    sink = ResponseSink(engine, results_per_request(works))
    source = sink.source = RequestSource(engine, limits[1], sink.reject)
    door = ControlSocket(folder.path, partial(_on_control_command, engine, source))
    door.start()

    def go() -> None:
        measuring.start()
        try:
            keepers = place.claim_observers(engine.post)
            run_with_observers(
                stream, engine, SourceAndSink(source, sink), recorder, [recorder], keepers=keepers, beat_s=LOOP_TICK_S
            )
        finally:
            measuring.stop()
            door.close()
            place.release()

    failed, looked_at = partial(_failure, stream), partial(refresh_status, recorder, engine)
    return ServiceParts(plan, folder.path, engine, source, sink, go, failed, looked_at, *limits)


def _on_control_command(engine: LocalEngine, source: RequestSource, do: str, reason: str) -> None:
    """Somebody outside says `dovetail drain` or `cancel`: what is pending is answered, or told."""
    source.close_intake(service_closed_error(f"is ended ({reason}): it takes no more requests"))
    if do == "drain":
        source.finish()
    else:
        engine.post(CancelRun(reason))


def _failure(stream: StreamController) -> tuple[str, str] | None:
    board = stream.state
    return (board.error, board.error_detail) if board.run_state is RunState.FAILED else None


def _recorder(folder: RunFolder, plan: Plan, stream: StreamController, engine: LocalEngine) -> Recorder:
    about = RunDescription(plan.name, "dt.serve", "local", plan.cluster.spec(), version=dovetail.__version__)
    return Recorder(
        folder,
        about,
        stream.view,
        stream.workers,
        plan=plan.to_json(),
        item=partial(load_item, engine),
        key=partial(load_key, engine),
    )


__all__ = ["ItemFailed", "Service", "ServiceClosed", "RequestFuture", "TooManyRequests", "serve"]

MAX_IN_FLIGHT = 1024
"""Requests that `map` has pending, at most."""
EXIT_TIMEOUT_S = 10.0
MAX_TRACEBACK_LINES = 12


def serve(
    pipeline: Pipeline,
    engine: str = "local",
    cluster: Cluster | str = "auto",
    *,
    plan: Plan | None = None,
    max_wait: float | str = "20ms",
    max_pending: int = 10_000,
    deadline: float | str | None = None,
    run_dir: str | Path | None = None,
    wait: bool = True,
    pin_cpus: bool = False,
) -> Service:
    """Starts the pipeline in processes on this machine and returns at once; requests wait until workers are ready.

    A batch that is not full goes when its oldest item has waited `max_wait`. At most `max_pending` requests are without
    an answer at a time. A request that has none after its `deadline` fails with TimeoutError. Use it in a `with` block:
    leaving it answers what is pending, and ends the service.
    """
    found = prepare_service(
        pipeline,
        engine,
        cluster,
        plan=plan,
        max_wait=max_wait,
        max_pending=max_pending,
        deadline=deadline,
        run_dir=run_dir,
        wait=wait,
        pin_cpus=pin_cpus,
    )
    return Service(found)


class Service:
    """Answers requests until it is drained or cancelled; from any thread. Leaving a `with` block drains it, also by
    Ctrl-C, and a second Ctrl-C cancels; another exception cancels it at once."""

    def __init__(self, parts: ServiceParts) -> None:
        self.plan = parts.plan
        self.folder = parts.folder
        self._parts = parts
        self._source = parts.source
        self._deadlines = DeadlineWatch()
        self._close_reason: BaseException = service_closed_error("is drained")
        """What those are told who have no answer at its end."""
        self._over = Event()
        self._crash: BaseException | None = None
        parts.sink.on_crash = self._on_bad_answer
        _ACTIVE_SERVICES.add(self)
        self._thread = Thread(target=self._drive, name=f"dovetail-{parts.plan.name}", daemon=True)
        self._thread.start()

    # --- requests

    def submit(
        self,
        item: Any,
        *,
        many: bool = False,
        deadline: float | str | None = None,
        block: bool = True,
        timeout: float | None = None,
    ) -> RequestFuture:
        """A future of what the pipeline makes of the item: its result, None if a stage dropped it. With `many` it is
        the list of all results, in order. Where too many are pending it waits, at most `timeout` seconds; with
        `block=False` it raises TooManyRequests. `deadline` is for this request: seconds, or "500ms"."""
        deadline_s = self._parts.deadline_s if deadline is None else _parse_deadline(deadline)
        ticket = RequestFuture(item, many=many, deadline_s=deadline_s)
        self._source.submit(ticket, block=block, timeout=timeout)
        if deadline_s is not None:
            self._deadlines.watch(ticket)
        return ticket

    async def ask(self, item: Any, *, many: bool = False, deadline: float | str | None = None) -> Any:
        """The same for asyncio: waits for the result. Whoever cancels the task gives the request up."""
        try:
            ticket = self.submit(item, many=many, deadline=deadline, block=False)
        except TooManyRequests:
            ticket = await asyncio.to_thread(self.submit, item, many=many, deadline=deadline)
        return await asyncio.wrap_future(ticket)

    def map(self, items: Iterable[Any], *, many: bool = False, in_flight: int = MAX_IN_FLIGHT) -> Iterator[Any]:
        """Results in the order of the items; no more are read than `in_flight` ahead. An item that failed raises where
        its result would come; those after it are given up."""
        most = max(1, min(in_flight, self._parts.max_pending))
        tickets: deque[RequestFuture] = deque()
        try:
            for item in items:
                if len(tickets) >= most:
                    yield tickets.popleft().result()
                tickets.append(self.submit(item, many=many))
            while tickets:
                yield tickets.popleft().result()
        finally:
            for ticket in tickets:
                ticket.cancel()

    # --- how it stands

    @property
    def pending(self) -> int:
        """Requests without an answer."""
        return self._source.pending

    @property
    def ready(self) -> bool:
        """Whether every unit has a worker that is set up; requests may come before that, and wait."""
        engine = self._parts.engine
        there = {unit for worker, (unit, _) in engine.processes().items() if engine.is_ready(worker)}
        return not self.done and there >= {unit.name for unit in self.plan.units}

    @property
    def done(self) -> bool:
        return self._over.is_set()

    @property
    def stats(self) -> RunSummary:
        """What happened so far; `print(service.stats)` shows it as a table."""
        if not self.done:
            self._parts.refresh()
        from dovetail.observe.history import RunHistory  # late: to serve it is not needed
        from dovetail.observe.summary import summarize_run

        return summarize_run(RunHistory.load(self.folder))

    def __repr__(self) -> str:
        return f"<Service {self.folder.name}: {'over' if self.done else f'{self.pending} pending'}>"

    # --- ends

    def drain(self, timeout: float | None = None) -> None:
        """Takes no more requests, answers all that are pending, and ends. Raises RunError if the service failed."""
        self._source.close_intake(service_closed_error("is drained: it takes no more requests"))
        self._source.finish()
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self.pending} requests are still pending after {timeout} s")
        self._finish()

    def cancel(self, reason: str = "asked") -> None:
        """Stops now; whoever waits for an answer gets ServiceClosed."""
        self._close_reason = service_closed_error(f"was cancelled: {reason}")
        self._source.close_intake(self._close_reason)
        self._parts.engine.post(CancelRun(reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self.cancel(f"left with {type(error).__name__}")
            self._over.wait()
            return
        try:
            self.drain()
        except KeyboardInterrupt:
            self.cancel("Ctrl-C")
            self._over.wait(EXIT_TIMEOUT_S)
            raise

    def _drive(self) -> None:
        try:
            self._parts.run_loop()
        except BaseException as error:
            self._crash = error
        finally:
            failed = self._failed()
            why = self._close_reason if failed is None else failed
            self._source.close_intake(why)
            self._source.close()
            self._parts.sink.end(why)
            self._deadlines.close()
            self._over.set()
            _ACTIVE_SERVICES.discard(self)

    def _on_bad_answer(self, error: BaseException) -> None:
        """Something is wrong with an answer, and nobody knows whose it was."""
        self._crash = self._crash or error
        self._parts.engine.post(CancelRun(f"answers cannot be read: {type(error).__name__}"))

    def _failed(self) -> BaseException | None:
        """What went wrong, for everybody who waits."""
        if self._crash is not None:
            error: str = f"{type(self._crash).__name__}: {self._crash}"
            return ServiceClosed(Problem("DT376", f"the service broke down: {error}", fixes=_status_fix(self.folder)))
        found = self._parts.failure()
        if found is None:
            return None
        lines = [line for line in found[1].splitlines() if line.strip()][-MAX_TRACEBACK_LINES:]
        return ServiceClosed(
            Problem("DT376", f"the service failed: {found[0]}", tuple(lines), _status_fix(self.folder))
        )

    def _finish(self) -> None:
        failed = self._failed()
        if failed is not None:
            raise failed from self._crash


def _parse_deadline(deadline: float | str) -> float:
    try:
        return parse_duration(deadline)
    except ValueError as error:
        raise ConfigError(
            Problem("DT375", f"deadline={short_repr(deadline)} {error}", fixes=('deadline="2s"',))
        ) from None


def _status_fix(folder: Path) -> tuple[str, ...]:
    return (f"dovetail status {folder.name} shows the whole run",)


_ACTIVE_SERVICES: weakref.WeakSet[Service] = weakref.WeakSet()


def _cancel_all_at_exit() -> None:
    """A script that ends while a service goes: workers are stopped, and the run's folder says so."""
    for service in list(_ACTIVE_SERVICES):
        print(f"service {service.folder.name} is cancelled: the program ended", file=sys.stderr)  # noqa: T201
        service.cancel("the program ended")
    for service in list(_ACTIVE_SERVICES):
        service._over.wait(EXIT_TIMEOUT_S)  # noqa: SLF001


atexit.register(_cancel_all_at_exit)
os.register_at_fork(after_in_child=_ACTIVE_SERVICES.clear)  # what a driver forks serves nothing
