"""`dt.serve`: a run whose source is a queue of requests and whose sink answers them; and its handle, `Service`."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from dovetail.control.events import CancelRun
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
from dovetail.engines.payload_memory import limit_payload_memory
from dovetail.errors import Problem
from dovetail.observe.run_header import SERVICE
from dovetail.pipeline.durations import checked_duration, parse_duration
from dovetail.runtime.arguments import check_service_arguments
from dovetail.runtime.assembly import AdmittedRun, LaunchOptions, create_locked_run, describe_run, plan_on_site
from dovetail.runtime.length_check import with_length_check
from dovetail.runtime.run_handle import EXIT_TIMEOUT_S, MAX_TRACEBACK_LINES, RunHandle
from dovetail.runtime.sites import open_site
from dovetail.streaming.epoch_size import SERVICE_EPOCH_BATCHES
from dovetail.streaming.settings import FIRST_REPLAN_S, StreamOptions, unit_specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.assembly import ActiveRun
    from dovetail.runtime.sites import RunEngine
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import UnitSpec

__all__ = ["ItemFailed", "RequestFuture", "Service", "ServiceClosed", "TooManyRequests", "serve"]

STREAMING_MODE = "streaming"
MAX_IN_FLIGHT = 1024
"""Maximum number of requests that `map` has pending."""


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
    """Start the pipeline as a service and return at once; requests wait until workers are ready.

    An incomplete batch is processed when its oldest item has waited for `max_wait`. `max_pending` is the maximum number
    of unanswered requests. A request that is not answered within `deadline` fails with TimeoutError. Use the service in
    a `with` block: leaving it answers all pending requests and stops the service.
    """
    check_service_arguments(
        pipeline, engine, plan, max_wait, deadline, max_pending, run_dir, {"wait": wait, "pin_cpus": pin_cpus}
    )
    with ExitStack() as undo:
        site = open_site(engine, share=None, env_from=())
        site.check_runtime_envs(pipeline.stages)
        exclusive_plan, plan_for = plan_on_site(site, pipeline, plan, site.cluster(cluster), STREAMING_MODE)
        launch = LaunchOptions(progress=False, pin_cpus=pin_cpus, what=SERVICE)
        about = describe_run(site, exclusive_plan, launch, ())
        folder, lock = create_locked_run(about, run_dir, undo, {"durable": False})
        admission = site.admit(folder.id, exclusive_plan, plan_for, wait=wait)
        undo.callback(admission.release)
        options = site.adjust_options(_stream_options(parse_duration(max_wait), exclusive_plan.cluster), given=False)
        admitted = AdmittedRun(site, admission, folder, lock, options, launch)
        units = tuple(_as_served_unit(unit) for unit in unit_specs(pipeline, admission.plan))
        limits = _Limits(None if deadline is None else parse_duration(deadline), max_pending)
        service = _start_service(admitted, units, limits, undo)
        undo.pop_all()
    return service


@dataclass(frozen=True, slots=True)
class _Limits:
    deadline_s: float | None
    max_pending: int


def _start_service(admitted: AdmittedRun, units: tuple[UnitSpec, ...], limits: _Limits, undo: ExitStack) -> Service:
    engine = admitted.start_engine(undo)
    engine.prepare([unit.hosted for unit in units])
    sink = ResponseSink(engine, results_per_request(units))
    undo.callback(sink.end, service_closed_error("did not start"))
    source = sink.source = RequestSource(engine, limits.max_pending, sink.reject)
    active = admitted.connect(engine, units, undo, on_command=partial(_on_control_command, engine, source))
    return Service(active, source, sink, limits)


def _stream_options(max_wait_s: float, cluster: Cluster) -> StreamOptions:
    options = StreamOptions(
        serving=True,
        eager=True,
        max_wait_s=max_wait_s,
        first_replan_s=FIRST_REPLAN_S,
        target_epoch_batches=SERVICE_EPOCH_BATCHES,
    )
    return replace(options, byte_budget=limit_payload_memory(options.byte_budget, cluster))


def _as_served_unit(unit: UnitSpec) -> UnitSpec:
    """A request that fails does not affect the others."""
    stages: Any = unit.hosted.definition
    hosted = replace(unit.hosted, definition=tuple(with_length_check(stage) for stage in stages))
    return replace(unit, skip_failed=True, skip_deaths=True, hosted=hosted)


def results_per_request(units: tuple[UnitSpec, ...]) -> int:
    """Number of paths from the source to leaves: the results of a request, if no stage drops or multiplies items."""
    paths: dict[str, int] = {}
    for unit in units:  # parents first
        paths[unit.name] = sum(paths[name] for name in unit.parents) if unit.parents else 1
    inner = {name for unit in units for name in unit.parents}
    return sum(count for name, count in paths.items() if name not in inner)


def _on_control_command(engine: RunEngine, source: RequestSource, command: str, reason: str) -> None:
    """`dovetail drain` answers pending requests, `dovetail cancel` fails them."""
    source.close_intake(service_closed_error(f"was stopped ({reason}) and accepts no more requests"))
    if command == "drain":
        source.finish()
    else:
        engine.post(CancelRun(reason))


class Service(RunHandle):
    """A service that answers requests until it is drained or cancelled; methods may be called from any thread.

    Leaving a `with` block drains the service, also after Ctrl-C; a second Ctrl-C, or another exception, cancels it.
    """

    _noun = "service"

    def __init__(self, active: ActiveRun, source: RequestSource, sink: ResponseSink, limits: _Limits) -> None:
        super().__init__(active)
        self._active = active
        self._source = source
        self._sink = sink
        self._limits = limits
        self._deadlines = DeadlineWatch()
        self._close_reason: BaseException = service_closed_error("is drained")
        """The error of requests that are unanswered when the service ends."""
        sink.on_crash = self._on_bad_answer
        self._start()

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
        """Submit an item; return a future of its result, which is None if a stage dropped the item.

        With `many=True` the result is the list of all results, in order. If `max_pending` requests are unanswered, wait
        up to `timeout` seconds, or raise TooManyRequests at once with `block=False`. `deadline` applies to this request
        (seconds, or "500ms").
        """
        deadline_s = self._limits.deadline_s if deadline is None else _parse_deadline(deadline)
        ticket = RequestFuture(item, many=many, deadline_s=deadline_s)
        self._source.submit(ticket, block=block, timeout=timeout)
        if deadline_s is not None:
            self._deadlines.watch(ticket)
        return ticket

    async def ask(self, item: Any, *, many: bool = False, deadline: float | str | None = None) -> Any:
        """Submit an item and wait for its result, for asyncio. Cancelling the task cancels the request."""
        try:
            ticket = self.submit(item, many=many, deadline=deadline, block=False)
        except TooManyRequests:
            ticket = await asyncio.to_thread(self.submit, item, many=many, deadline=deadline)
        return await asyncio.wrap_future(ticket)

    def map(self, items: Iterable[Any], *, many: bool = False, in_flight: int = MAX_IN_FLIGHT) -> Iterator[Any]:
        """Yield results in the order of the items, with at most `in_flight` requests pending. A failed item raises at
        its position and cancels the requests after it."""
        most = max(1, min(in_flight, self._limits.max_pending))
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

    # --- status

    @property
    def pending(self) -> int:
        """Number of unanswered requests."""
        return self._source.pending

    @property
    def ready(self) -> bool:
        """Whether every unit has a worker that is set up. Requests submitted earlier wait for that."""
        engine = self._engine
        there = {unit for worker, (unit, _) in engine.processes().items() if engine.is_ready(worker)}
        return not self.done and there >= {unit.name for unit in self.plan.units}

    def __repr__(self) -> str:
        return f"<Service {self.folder.name}: {'stopped' if self.done else f'{self.pending} pending'}>"

    # --- end

    def drain(self, timeout: float | None = None) -> None:
        """Accept no more requests, answer all pending ones, and stop. Raises RunError if the service failed."""
        self._source.close_intake(service_closed_error("is drained and accepts no more requests"))
        self._source.finish()
        if not self._wait_until_over(timeout):
            raise TimeoutError(f"{self.pending} requests are still pending after {timeout} s")
        self._finish()

    def cancel(self, reason: str = "asked") -> None:
        """Stop now; unanswered requests fail with ServiceClosed."""
        self._close_reason = service_closed_error(f"was cancelled: {reason}")
        self._source.close_intake(self._close_reason)
        self._engine.post(CancelRun(reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self.cancel(f"left with {type(error).__name__}")
            self._wait_until_over()
            return
        try:
            self.drain()
        except KeyboardInterrupt:
            self.cancel("Ctrl-C")
            self._wait_until_over(EXIT_TIMEOUT_S)
            raise

    def _drive(self) -> None:
        self._active.drive(SourceAndSink(self._source, self._sink))

    def _close(self) -> None:
        failure = self._failed()
        reason = self._close_reason if failure is None else failure
        self._source.close_intake(reason)
        self._source.close()
        self._sink.end(reason)
        self._deadlines.close()

    def _on_bad_answer(self, error: BaseException) -> None:
        """An answer cannot be read, so that its request is unknown."""
        self._crash = self._crash or error
        self._engine.post(CancelRun(f"an answer cannot be read: {type(error).__name__}"))

    def _failed(self) -> BaseException | None:
        """The error for callers that wait for an answer."""
        if self._crash is not None:
            error: str = f"{type(self._crash).__name__}: {self._crash}"
            return ServiceClosed(Problem("DT376", f"the service crashed: {error}", fixes=_status_fix(self.folder)))
        found = self._active.failure
        if found is None:
            return None
        lines = [line for line in found.detail.splitlines() if line.strip()][-MAX_TRACEBACK_LINES:]
        return ServiceClosed(Problem("DT376", f"the service failed: {found}", tuple(lines), _status_fix(self.folder)))

    def _finish(self) -> None:
        failed = self._failed()
        if failed is not None:
            raise failed from self._crash


def _parse_deadline(deadline: float | str) -> float:
    return checked_duration("deadline", deadline, "DT375", "2s")


def _status_fix(folder: Path) -> tuple[str, ...]:
    return (f"dovetail status {folder.name}",)
