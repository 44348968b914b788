"""The worker's side of an actor: makes the user's object, measures its calls, and gives it handles of other roles."""

from __future__ import annotations

import inspect
import pickle
import time
import traceback
from collections import deque
from contextlib import suppress
from functools import partial
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from dovetail.actors.instance_directory import instance_name
from dovetail.engines.object_loader import import_object
from dovetail.engines.unit_executor import call_setup, is_awaitable
from dovetail.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from dovetail.actors.call_router import ActorCallRouter
    from dovetail.actors.instance_directory import WorkerContext
    from dovetail.control.engine import CallOptions
    from dovetail.engines.worker_context import Worker

LATENCIES_KEPT = 512
RATE_WINDOW_S = 10.0
QUICK_HEALTH_S = 0.05
"""Time for which an answer waits for a health check; the outcome of a slower check is reported with a later
heartbeat."""


class CallRecord:
    """Calls of one instance: how many, how long, and which are running. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: dict[int, tuple[str, float]] = {}
        self._next = 0
        self._finished: deque[tuple[float, float]] = deque(maxlen=LATENCIES_KEPT)
        """(end, seconds) of the latest calls."""
        self.calls = 0
        self.failed = 0
        self._busy_s = 0.0
        """Time in which at least one call was running, up to the last moment without one."""
        self._busy_since = 0.0

    def begin(self, method: str) -> int:
        now = time.monotonic()
        with self._lock:
            self._next += 1
            if not self._running:
                self._busy_since = now
            self._running[self._next] = method, now
            return self._next

    def end(self, number: int, *, failed: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            _, began = self._running.pop(number)
            self._finished.append((now, now - began))
            self.calls += 1
            self.failed += failed
            if not self._running:
                self._busy_s += now - self._busy_since

    def snapshot(self) -> dict[str, Any]:
        now = time.monotonic()
        with self._lock:
            running = sorted(self._running.values(), key=lambda one: one[1])
            recent = [one for one in self._finished if one[0] > now - RATE_WINDOW_S]
            seconds = sorted(one[1] for one in self._finished)
            full_s = now - self._finished[0][0] if len(recent) == LATENCIES_KEPT else RATE_WINDOW_S
            busy_s = self._busy_s + (now - self._busy_since if self._running else 0.0)
        return {
            "calls": self.calls,
            "failed": self.failed,
            "busy_s": busy_s,
            "running": [(method, now - began) for method, began in running[:3]],
            "outstanding": len(running),
            "rate": len(recent) / max(full_s, 1e-3),
            "p50_s": _quantile(seconds, 0.5),
            "p95_s": _quantile(seconds, 0.95),
        }


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class HostedActor:
    """Wraps the object of a role. Its methods are found by name and measured; names that begin with `_dovetail_` are
    control calls, which do not wait for a slot."""

    def __init__(self, cls: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Created by the driver and pickled; `setup` initialises the rest in the worker."""
        self._make = cls
        self._args, self._kwargs = args, kwargs
        self._name = ""
        self._actor: Any = None
        self._health: HealthCheck | None = None
        self._worker: Worker
        self._record: CallRecord
        self._router: ActorCallRouter

    def setup(self, worker: Worker) -> None:
        """Create the object in the worker, and call its `setup(worker)`."""
        context: WorkerContext = pickle.loads(worker.context)  # noqa: S301 - from our driver
        role, worker.index = context.instances[worker.unit]
        worker.incarnation = context.incarnation
        worker.label = instance_name(role, worker.index)
        self._name = f"{worker.label}, incarnation {worker.incarnation}"
        self._worker = worker
        self._connect(worker, context)
        make = import_object(self._make, f"role {role!r}: cls=") if isinstance(self._make, str) else self._make
        actor = self._actor = make(*self._args, **self._kwargs)
        if getattr(actor, "worker", None) is None:
            with suppress(AttributeError, TypeError):  # an object with slots
                actor.worker = worker
        setup = getattr(actor, "setup", None)
        if callable(setup):
            self._finish(call_setup(setup, worker))
        on_restart = getattr(actor, "on_restart", None)
        if worker.incarnation > 1 and callable(on_restart):
            self._finish(on_restart())

    def _connect(self, worker: Worker, context: WorkerContext) -> None:
        from dovetail.actors.call_router import ActorCallRouter, CallHere
        from dovetail.actors.handles import ActorHandles

        self._record = CallRecord()
        self._router = ActorCallRouter(
            partial(_call_worker, worker),
            context.directory,
            sends_deadlines=False,
            here=None if worker.call_here is None else CallHere(worker.id, worker.rank, worker.call_here),
        )
        worker.actors = ActorHandles(self._router)

    def teardown(self) -> None:
        teardown = getattr(self._actor, "teardown", None)
        if callable(teardown):
            self._finish(teardown())

    def _finish(self, made: Any) -> Any:
        """Await the result of an async method in the event loop in which the others run."""
        if not inspect.isawaitable(made):
            return made
        if self._worker.run_async is None:
            raise RuntimeError("this engine does not run async methods")
        return self._worker.run_async(made)

    # --- calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        actor = self.__dict__["_actor"]
        try:
            method = getattr(actor, name)
        except AttributeError:
            known = [one for one in dir(actor) if not one.startswith("_")]
            kind = type(actor).__name__
            raise AttributeError(f"{kind} has no method {name!r}{did_you_mean(name, known)}") from None
        found = self.__dict__[name] = self._measured(name, method)
        return found

    def _measured(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        record = self._record

        def call(*args: Any, **named: Any) -> Any:
            number = record.begin(name)
            try:
                value = method(*args, **named)
            except BaseException as error:
                record.end(number, failed=True)
                self._add_notes(error)
                raise
            if is_awaitable(value):
                return finish(number, value)
            record.end(number)
            return value

        async def finish(number: int, value: Any) -> Any:
            try:
                found = await value
            except BaseException as error:
                record.end(number, failed=True)
                self._add_notes(error)
                raise
            record.end(number)
            return found

        async def call_async(*args: Any, **named: Any) -> Any:
            return await finish(record.begin(name), method(*args, **named))

        return call_async if inspect.iscoroutinefunction(method) else call

    def _add_notes(self, error: BaseException) -> None:
        with suppress(Exception):  # a user's exception can be anything
            frames = traceback.format_exception(type(error), error, error.__traceback__)
            error.add_note(f"raised by {self._name}; its traceback:\n" + "".join(frames).rstrip())

    # --- control calls

    def _dovetail_directory(self, pickled: bytes) -> None:
        self._router.update(pickle.loads(pickled))  # noqa: S301 - from our driver

    def _dovetail_status(self, check: bool = False, timeout_s: float = 1.0) -> dict[str, Any]:
        """Figures of its calls, and what is wrong by its `health` (None: the check is still running). `check`: begin a
        new check unless one is running."""
        found = self._record.snapshot()
        health = getattr(self._actor, "health", None)
        if not callable(health):
            return found
        if self._health is None or (check and self._health.is_finished):
            self._health = HealthCheck(health, self._finish)
        found["health"] = self._health.problem(timeout_s)
        return found


class HealthCheck:
    """One call of `health` in a thread of its own: one that blocks must not block other control calls."""

    def __init__(self, health: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        """`finish` awaits the result of an async method."""
        self._health, self._await = health, finish
        self._began = time.monotonic()
        self._done = Event()
        self._text = ""
        Thread(target=self._run, name="health", daemon=True).start()

    def _run(self) -> None:
        try:
            self._text = _health_text(self._await(self._health()))
        except BaseException as error:
            self._text = f"health: {type(error).__name__}: {error}"
        self._done.set()

    @property
    def is_finished(self) -> bool:
        return self._done.is_set()

    def problem(self, timeout_s: float) -> str | None:
        """The problem that the check found; empty if there is none, None if the outcome is not known yet."""
        if self._done.wait(min(timeout_s, QUICK_HEALTH_S)):
            return self._text
        seconds = time.monotonic() - self._began
        return f"health() has not returned for {seconds:.0f} s" if seconds >= timeout_s else None


def _call_worker(
    worker: Worker, options: CallOptions, number: int, hosted: str, method: str, /, *args: Any, **named: Any
) -> Future[Any]:
    return worker.call_rank(number, options.rank, hosted, method, *args, **named)


def _health_text(answer: object) -> str:
    """The problem of an instance whose `health` returned this value; empty if it is healthy."""
    return "health() returned False" if answer is False else ""
