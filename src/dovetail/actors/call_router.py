"""Routing of calls to instances: destination, waiting for restarts, and retries.

The driver and every worker have a router; `send` is the call of the engine or of the worker. A worker has another
number after every restart, so the results of an earlier incarnation never arrive as those of a later one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from threading import RLock, Timer
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dovetail.actors.instance_directory import InstanceState, instance_name
from dovetail.control.engine import CallNotSentError, CallOptions, DeadlineExceededError, WorkerLostError
from dovetail.engines.local.call_waits import WaitableCall
from dovetail.errors import ActorLostError, CallTimeoutError, Problem, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from dovetail.actors.instance_directory import Directory, InstanceAddress, RoleEntry

LOST, LATE = "DT520", "DT521"


class SendCall(Protocol):
    """Port for sending calls: `Engine.call_with`, or its counterpart in a worker."""

    def __call__(
        self, options: CallOptions, worker: int, hosted: str, method: str, /, *args: Any, **named: Any
    ) -> Future[Any]: ...


class CallHere(NamedTuple):
    """Port for direct calls of objects in this process."""

    worker: int
    rank: int
    call: Callable[[str, str, tuple[Any, ...], dict[str, Any]], Future[Any]]
    """(hosted, method, args, named); its futures can be awaited."""


class CallSettings(NamedTuple):
    """Settings of calls: `handle.options(...)`."""

    deadline_s: float | None = None
    retries: int = 0
    """Number of times that an idempotent method is called again after its instance died."""


class CallFuture(Future[Any]):
    """Result of a call. `await` it in a coroutine, or wait with `result()`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Future[Any] | None = None
        """The future of the engine; None while the call waits for its instance."""

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._wait(timeout))

    def _wait(self, timeout: float | None) -> float | None:
        """Wait for the engine's future, which this thread completes: that saves a change of threads. Returns the
        seconds that are left."""
        sent = self.sent
        if sent is None or self.done():
            return timeout
        began = time.monotonic()
        with suppress(CancelledError, TimeoutError):
            sent.exception(timeout)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - began))

    def cancel(self) -> bool:
        """Cancel the call: one that has not begun never runs; the result of a running one is dropped."""
        if not super().cancel():
            return self.cancelled()
        if self.sent is not None:
            self.sent.cancel()
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        sent = self.sent
        if isinstance(sent, WaitableCall):  # in a worker: the wait may be part of a cycle
            return sent.awaited_as(self).__await__()
        return asyncio.wrap_future(self).__await__()


class CallFutures:
    """Results of the same call to several instances, in the order of the instances."""

    def __init__(self, futures: Sequence[CallFuture]) -> None:
        self._futures = tuple(futures)

    def result(self, timeout: float | None = None) -> list[Any]:
        """All results; raises the first error. `timeout` limits the wait for all of them together."""
        end = None if timeout is None else time.monotonic() + timeout
        return [future.result(None if end is None else max(0.0, end - time.monotonic())) for future in self._futures]

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def __iter__(self) -> Any:
        return iter(self._futures)

    def __len__(self) -> int:
        return len(self._futures)

    def __getitem__(self, position: int) -> CallFuture:
        return self._futures[position]

    def __await__(self) -> Generator[Any, None, list[Any]]:
        async def wait() -> list[Any]:
            return [await future for future in self._futures]

        return wait().__await__()


class ActorCall:
    """A call in progress."""

    __slots__ = (
        "args",
        "choose",
        "deadline_at",
        "future",
        "index",
        "lost_workers",
        "method",
        "named",
        "rank",
        "retries",
        "role",
        "timer",
        "worker",
    )

    def __init__(
        self,
        role: str,
        index: int,
        rank: int,
        method: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        settings: CallSettings,
        choose: Callable[[], int] | None = None,
    ) -> None:
        """`choose` selects another instance for a repeated call; None: always the same."""
        self.role, self.index, self.rank, self.method = role, index, rank, method
        self.args, self.named, self.choose = args, named, choose
        self.deadline_at = None if settings.deadline_s is None else time.monotonic() + settings.deadline_s
        self.retries = settings.retries
        self.future = CallFuture()
        self.worker = -1
        """The worker to which it was sent last."""
        self.lost_workers: frozenset[int] = frozenset()
        """Workers that were lost while they had the call, or before it was sent."""
        self.timer: Timer | None = None

    def finish(self, value: Any) -> None:
        self.stop_timer()
        with suppress(InvalidStateError):  # cancelled
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        self.stop_timer()
        with suppress(InvalidStateError):  # cancelled
            self.future.set_exception(error)

    def start_timer(self, on_deadline: Callable[[ActorCall], None]) -> None:
        if self.deadline_at is not None and self.timer is None:
            self.timer = Timer(max(0.0, self.deadline_at - time.monotonic()), on_deadline, (self,))
            self.timer.daemon = True
            self.timer.start()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def options(self) -> CallOptions:
        if self.deadline_at is None:
            return CallOptions(self.rank)
        return CallOptions(self.rank, max(0.0, self.deadline_at - time.monotonic()))


class InstanceCalls:
    """Calls to one instance."""

    __slots__ = ("lock", "outstanding", "waiting")

    def __init__(self) -> None:
        self.lock = RLock()
        """Held while a call is sent, so that calls arrive in the order made."""
        self.waiting: deque[ActorCall] = deque()
        self.outstanding = 0

    def on_direct_end(self, _sent: Future[Any]) -> None:
        with self.lock:
            self.outstanding -= 1


class ActorCallRouter:
    """Thread: any."""

    def __init__(
        self,
        send: SendCall,
        directory: Directory,
        *,
        sends_deadlines: bool,
        here: CallHere | None = None,
    ) -> None:
        """`sends_deadlines`: `send` ends calls at their deadlines. `here`: for calls within this process."""
        self._send = send
        self._here = here
        self._sends_deadlines = sends_deadlines
        self._directory = directory
        self._calls: dict[tuple[str, int], InstanceCalls] = {}
        self._turns: dict[str, int] = {}
        self._closed_reason = ""

    # --- directory

    def entry(self, role: str) -> RoleEntry:
        return self._directory.roles[role]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._directory.roles)

    def address(self, role: str, index: int) -> InstanceAddress:
        """IndexError if there never was such an instance."""
        return self._directory.roles[role].instances[index]

    def update(self, directory: Directory) -> None:
        """Install a newer directory: calls that waited for an instance are sent, or fail if it is dead."""
        if directory.version <= self._directory.version:
            return
        self._directory = directory
        self.send_waiting()

    def send_waiting(self) -> None:
        for calls in list(self._calls.values()):
            if calls.waiting:
                with calls.lock:
                    waiting, calls.waiting = calls.waiting, deque()
                    sent = [self._dispatch(call, calls) for call in waiting]
                for call, future in zip(waiting, sent, strict=True):
                    self._follow(call, calls, future)

    def close(self, reason: str) -> None:
        """Reject further calls; waiting ones fail."""
        self._closed_reason = self._closed_reason or reason
        for calls in list(self._calls.values()):
            with calls.lock:
                waiting, calls.waiting = calls.waiting, deque()
            for call in waiting:
                call.fail(self._lost_error(call, reason))

    # --- choice of an instance

    def indices(self, role: str) -> list[int]:
        """Instances that are part of the system, including dead ones that were not removed."""
        instances = self._directory.roles[role].instances
        return [index for index, one in enumerate(instances) if one.hosted and one.state is not InstanceState.DRAINING]

    def least_loaded(self, role: str) -> int:
        instances = self._directory.roles[role].instances
        if len(instances) == 1:
            return 0
        turn = self._turns[role] = self._turns.get(role, -1) + 1
        best, best_load = -1, (True, 0)
        count = len(instances)
        for offset in range(count):
            index = (turn + offset) % count
            one = instances[index]
            if not one.is_expected:
                continue
            calls = self._calls.get((role, index))
            load = (one.worker is None, 0 if calls is None else calls.outstanding + len(calls.waiting))
            if best < 0 or load < best_load:
                best, best_load = index, load
                if load == (False, 0):
                    break
        return best if best >= 0 else self._any_instance(role)

    def next_in_turn(self, role: str) -> int:
        instances = self._directory.roles[role].instances
        for _ in instances:
            turn = self._turns[role] = (self._turns.get(role, -1) + 1) % len(instances)
            if instances[turn].is_expected:
                return turn
        return self._any_instance(role)

    def _any_instance(self, role: str) -> int:
        """Any instance, for the error message when all of them are dead."""
        return next(iter(self.indices(role)), 0)

    def outstanding(self, role: str, index: int) -> int:
        """Number of unfinished calls of this router."""
        calls = self._calls.get((role, index))
        return 0 if calls is None else calls.outstanding + len(calls.waiting)

    # --- calls

    def call_directly(
        self, role: str, index: int, rank: int, method: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Future[Any] | None:
        """Call an instance in this process, which cannot be lost or restarted without its caller; None: it is in
        another one."""
        here = self._here
        if here is None:
            return None
        instances = self._directory.roles[role].instances
        address = instances[index]
        if address.worker != here.worker or rank != here.rank or self._closed_reason or not address.is_expected:
            return None
        if len(instances) == 1:  # there is only one instance, so the load does not matter
            return here.call(address.hosted, method, args, named)
        calls = self._calls.get((role, index))
        if calls is None:
            calls = self._calls.setdefault((role, index), InstanceCalls())
        with calls.lock:
            calls.outstanding += 1
        sent = here.call(address.hosted, method, args, named)
        sent.add_done_callback(calls.on_direct_end)
        return sent

    def submit(self, call: ActorCall) -> CallFuture:
        if not self._sends_deadlines:
            call.start_timer(self._on_deadline)
        self._route(call)
        return call.future

    def _route(self, call: ActorCall) -> None:
        if call.choose is not None and not self.address(call.role, call.index).is_expected:
            call.index = call.choose()
        calls = self._calls.get((call.role, call.index))
        if calls is None:
            calls = self._calls.setdefault((call.role, call.index), InstanceCalls())
        with calls.lock:
            sent = self._dispatch(call, calls)
        self._follow(call, calls, sent)

    def _dispatch(self, call: ActorCall, calls: InstanceCalls) -> Future[Any] | BaseException | None:
        """Send the call, or keep it until its instance is started; returns the engine's future, or an error. Hold the
        lock of the instance."""
        if call.future.done():  # cancelled, or too late
            return None
        address = self.address(call.role, call.index)
        if self._closed_reason or not address.is_expected:
            return self._lost_error(call, self._closed_reason or _state_text(address))
        worker = address.worker
        if worker is None or worker in call.lost_workers or calls.waiting:
            calls.waiting.append(call)
            call.start_timer(self._on_deadline)
            return None
        if self._sends_deadlines:
            call.stop_timer()
        call.worker = worker
        try:
            sent = self._send(call.options(), worker, address.hosted, call.method, *call.args, **call.named)
        except Exception as error:  # arguments that cannot be pickled
            return error
        call.future.sent = sent
        calls.outstanding += 1
        return sent

    def _follow(self, call: ActorCall, calls: InstanceCalls, sent: Future[Any] | BaseException | None) -> None:
        """Handle the result of `_dispatch`, without a lock: callbacks may make calls."""
        if isinstance(sent, Future):
            sent.add_done_callback(partial(self._on_done, call, calls))
        elif isinstance(sent, ActorLostError) and not self._closed_reason and self._can_move(call):
            self._route(call)
        elif sent is not None:
            call.fail(sent)

    def _can_move(self, call: ActorCall) -> bool:
        """Whether another instance may take a call that was not sent."""
        return call.choose is not None and self.address(call.role, call.choose()).is_expected

    def _on_done(self, call: ActorCall, calls: InstanceCalls, sent: Future[Any]) -> None:
        with calls.lock:
            calls.outstanding -= 1
        if sent.cancelled():
            call.future.cancel()
            return
        error = sent.exception()
        if error is None:
            call.finish(sent.result())
        elif isinstance(error, CallNotSentError):
            self._send_again(call)
        elif isinstance(error, WorkerLostError):
            self._on_lost(call)
        elif isinstance(error, DeadlineExceededError):
            self._on_deadline(call)
        else:
            call.fail(error)

    def _send_again(self, call: ActorCall) -> None:
        """Send it to the next incarnation, or to another instance if any may take it."""
        call.lost_workers |= {call.worker}
        call.future.sent = None
        if call.choose is not None:
            others = [index for index in self.indices(call.role) if self._may_answer(call, index)]
            call.index = min(others, key=partial(self.outstanding, call.role), default=call.index)
        self._route(call)

    def _may_answer(self, call: ActorCall, index: int) -> bool:
        address = self.address(call.role, index)
        return address.is_expected and address.worker is not None and address.worker not in call.lost_workers

    def _on_lost(self, call: ActorCall) -> None:
        """Handle a call whose instance died: it is unknown whether the method completed."""
        if call.retries > 0 and call.method in self.entry(call.role).methods.idempotent and not call.future.done():
            call.retries -= 1
            self._send_again(call)
            return
        call.fail(self._lost_error(call, "died during the call"))

    def _on_deadline(self, call: ActorCall) -> None:
        call.timer = None
        sent = call.future.sent
        address = self.address(call.role, call.index)
        where = "was not answered" if sent is not None else f"was not sent ({_state_text(address)})"
        name = instance_name(call.role, call.index)
        problem = Problem(
            LATE, f"{name}.{call.method}() {where} before its deadline", subject=Subject("role", call.role)
        )
        call.fail(CallTimeoutError(problem))
        if sent is not None:
            sent.cancel()

    def _lost_error(self, call: ActorCall, reason: str) -> ActorLostError:
        name = instance_name(call.role, call.index)
        incarnation = self.address(call.role, call.index).incarnation
        message = f"{name}, incarnation {incarnation}, {reason}: {call.method}()"
        return ActorLostError(Problem(LOST, message, subject=Subject("role", call.role)))


def _state_text(address: InstanceAddress) -> str:
    return f"is {address.state.value}" + (f" ({address.reason})" if address.reason else "")
