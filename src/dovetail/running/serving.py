"""How does a pipeline answer requests? As a run without an end, in which everybody gets their own results back."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import weakref
from collections import deque
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Self

from dovetail.control.events import CancelRun
from dovetail.data.serving import closed
from dovetail.data.tickets import Deadlines, ItemFailed, ServiceClosed, Ticket, TooManyRequests
from dovetail.errors import ConfigError, Problem, shown
from dovetail.pipeline.durations import parse_duration
from dovetail.running.served import Served, served

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from dovetail.observe.summary import Summary
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.scheduling.plan import Plan

__all__ = ["ItemFailed", "Service", "ServiceClosed", "Ticket", "TooManyRequests", "serve"]

IN_FLIGHT = 1024
"""Requests that `map` has pending, at most."""
AT_EXIT_S = 10.0
DETAIL_LINES = 12


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
    found = served(
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

    def __init__(self, parts: Served) -> None:
        self.plan = parts.plan
        self.folder = parts.folder
        self._parts = parts
        self._source = parts.source
        self._deadlines = Deadlines()
        self._why: BaseException = closed("is drained")
        """What those are told who have no answer at its end."""
        self._over = Event()
        self._crash: BaseException | None = None
        parts.sink.crash = self._cannot_answer
        _SERVING.add(self)
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
    ) -> Ticket:
        """A future of what the pipeline makes of the item: its result, None if a stage dropped it. With `many` it is
        the list of all results, in order. Where too many are pending it waits, at most `timeout` seconds; with
        `block=False` it raises TooManyRequests. `deadline` is for this request: seconds, or "500ms"."""
        deadline_s = self._parts.deadline_s if deadline is None else _seconds(deadline)
        ticket = Ticket(item, many=many, deadline_s=deadline_s)
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

    def map(self, items: Iterable[Any], *, many: bool = False, in_flight: int = IN_FLIGHT) -> Iterator[Any]:
        """Results in the order of the items; no more are read than `in_flight` ahead. An item that failed raises where
        its result would come; those after it are given up."""
        most = max(1, min(in_flight, self._parts.max_pending))
        tickets: deque[Ticket] = deque()
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
    def stats(self) -> Summary:
        """What happened so far; `print(service.stats)` shows it as a table."""
        if not self.done:
            self._parts.refresh()
        from dovetail.observe.history import History  # late: to serve it is not needed
        from dovetail.observe.summary import summary

        return summary(History.load(self.folder))

    def __repr__(self) -> str:
        return f"<Service {self.folder.name}: {'over' if self.done else f'{self.pending} pending'}>"

    # --- ends

    def drain(self, timeout: float | None = None) -> None:
        """Takes no more requests, answers all that are pending, and ends. Raises RunError if the service failed."""
        self._source.refuse_more(closed("is drained: it takes no more requests"))
        self._source.finish()
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self.pending} requests are still pending after {timeout} s")
        self._finish()

    def cancel(self, reason: str = "asked") -> None:
        """Stops now; whoever waits for an answer gets ServiceClosed."""
        self._why = closed(f"was cancelled: {reason}")
        self._source.refuse_more(self._why)
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
            self._over.wait(AT_EXIT_S)
            raise

    def _drive(self) -> None:
        try:
            self._parts.go()
        except BaseException as error:
            self._crash = error
        finally:
            failed = self._failed()
            why = self._why if failed is None else failed
            self._source.refuse_more(why)
            self._source.close()
            self._parts.sink.end(why)
            self._deadlines.close()
            self._over.set()
            _SERVING.discard(self)

    def _cannot_answer(self, error: BaseException) -> None:
        """Something is wrong with an answer, and nobody knows whose it was."""
        self._crash = self._crash or error
        self._parts.engine.post(CancelRun(f"answers cannot be read: {type(error).__name__}"))

    def _failed(self) -> BaseException | None:
        """What went wrong, for everybody who waits."""
        if self._crash is not None:
            error: str = f"{type(self._crash).__name__}: {self._crash}"
            return ServiceClosed(Problem("DT376", f"the service broke down: {error}", fixes=_fixes(self.folder)))
        found = self._parts.why_failed()
        if found is None:
            return None
        lines = [line for line in found[1].splitlines() if line.strip()][-DETAIL_LINES:]
        return ServiceClosed(Problem("DT376", f"the service failed: {found[0]}", tuple(lines), _fixes(self.folder)))

    def _finish(self) -> None:
        failed = self._failed()
        if failed is not None:
            raise failed from self._crash


def _seconds(deadline: float | str) -> float:
    try:
        return parse_duration(deadline)
    except ValueError as error:
        raise ConfigError(Problem("DT375", f"deadline={shown(deadline)} {error}", fixes=('deadline="2s"',))) from None


def _fixes(folder: Path) -> tuple[str, ...]:
    return (f"dovetail status {folder.name} shows the whole run",)


_SERVING: weakref.WeakSet[Service] = weakref.WeakSet()


def _end_all() -> None:
    """A script that ends while a service goes: workers are stopped, and the run's folder says so."""
    for service in list(_SERVING):
        print(f"service {service.folder.name} is cancelled: the program ended", file=sys.stderr)  # noqa: T201
        service.cancel("the program ended")
    for service in list(_SERVING):
        service._over.wait(AT_EXIT_S)  # noqa: SLF001


atexit.register(_end_all)
os.register_at_fork(after_in_child=_SERVING.clear)  # what a driver forks serves nothing
