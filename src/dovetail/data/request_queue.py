"""Requests to a running service: futures, deadlines, and the source and sink that carry requests and responses.

Requests are numbered as they enter the stream. Results carry the number in their keys. A result whose key is a plain
number took a path on which no item was dropped or multiplied: with one such result per path through the pipeline, the
request is complete. All other requests are complete at the end of their epoch.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import UnreadableItem, UnsendableItemError
from dovetail.control.events import InputEnded, ItemsArrived
from dovetail.errors import Problem, RunError

if TYPE_CHECKING:
    from dovetail.control.commands import Deliver, FailedItem, Pull
    from dovetail.control.payload import Segment
    from dovetail.data.interfaces import PayloadStore

MIN_DEADLINES_KEPT = 64
"""Minimum number of deadlines to keep."""
MAX_TRACEBACK_LINES = 12


class ItemFailed(RunError):
    """This item failed; the service continues."""

    def __init__(self, problem: Problem, stage: str = "", error: str = "", traceback: str = "") -> None:
        super().__init__(problem)
        self.stage = stage
        """The unit; fused stages are joined by +. Empty: it reached none."""
        self.error = error
        """Type and message of the exception."""
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[ItemFailed], tuple[Any, ...]]:
        return type(self), (self.problems[0], self.stage, self.error, self.traceback)


class TooManyRequests(RunError):
    """The maximum number of requests is pending."""


class ServiceClosed(RunError):
    """The service is drained, cancelled or failed and accepts no requests."""


class RequestFuture(Future[Any]):
    """One request. `result(timeout)` returns the result of the pipeline; `cancel()` cancels the request."""

    def __init__(self, item: Any, *, many: bool = False, deadline_s: float | None = None) -> None:
        super().__init__()
        self.item = item
        """Until it is sent."""
        self.many = many
        self.due = None if deadline_s is None else time.monotonic() + deadline_s
        self.deadline_s = deadline_s
        self.one_to_one_count = 0
        """Results that took a path on which no item was dropped or multiplied."""
        self.collected: list[tuple[tuple[int, ...], str, Any]] = []
        """Results so far, while more may come: key, leaf, result."""

    def resolve(self, result: Any) -> None:
        with suppress(InvalidStateError):  # cancelled, or its deadline passed
            self.set_result(result)

    def reject(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.set_exception(error)

    def complete(self) -> None:
        """Resolve the request with its results: no more will come."""
        found = self.collected
        if len(found) > 1:
            found.sort(key=lambda one: one[:2])
        results = [result for _, _, result in found]
        if self.many:
            self.resolve(results)
        elif len(results) > 1:
            self.reject(_several_results_error(len(results)))
        else:
            self.resolve(results[0] if results else None)


def _several_results_error(count: int) -> ItemFailed:
    message = f"the pipeline returned {count} results for this item; one was expected"
    fixes = ("submit(item, many=True) returns a list",)
    return ItemFailed(Problem("DT379", message, fixes=fixes))


def item_failed_error(stage: str, error: str, traceback: str, attempts: int) -> ItemFailed:
    lines = tuple([line for line in traceback.splitlines() if line.strip()][-MAX_TRACEBACK_LINES:])
    times = f", {attempts} times" if attempts > 1 else ""
    problem = Problem("DT378", f"this item failed in {stage}{times}: {error}", lines, ("fix the item or the stage",))
    return ItemFailed(problem, stage, error, traceback)


class DeadlineWatch:
    """Fails requests whose deadline passed. One thread, started with the first deadline, that sleeps until the next
    one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestFuture]] = []
        self._changed = Condition()
        self._numbers = 0
        self._purged = MIN_DEADLINES_KEPT
        self._thread: Thread | None = None
        self._closed = False

    def watch(self, ticket: RequestFuture) -> None:
        assert ticket.due is not None, "a ticket without a deadline"
        with self._changed:
            self._numbers += 1
            heapq.heappush(self._heap, (ticket.due, self._numbers, ticket))
            if len(self._heap) > self._purged:  # most are resolved already
                self._heap = [entry for entry in self._heap if not entry[2].done()]
                heapq.heapify(self._heap)
                self._purged = max(MIN_DEADLINES_KEPT, 2 * len(self._heap))
            if self._thread is None:
                self._thread = Thread(target=self._wait, name="dovetail-deadlines", daemon=True)
                self._thread.start()
            if self._heap and self._heap[0][2] is ticket:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _wait(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._heap or (left := self._heap[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left if self._heap else None)
                    continue
                ticket = heapq.heappop(self._heap)[2]
            ticket.reject(TimeoutError(f"no result within {ticket.deadline_s:g} s"))


RejectCallback = Callable[[RequestFuture, BaseException], None]


class RequestSource:
    """Source of requests, as many as the stream pulls. The submitting thread sends its request and those submitted
    meanwhile; no extra thread is needed."""

    def __init__(self, store: PayloadStore, most: int, refuse: RejectCallback) -> None:
        """At most `limit` requests are pending; `refuse` is called for requests that cannot be sent, and must not
        block."""
        self._store = store
        self._most = most
        self._reject = refuse
        self._lock = Lock()
        self._space = Condition(self._lock)
        self._waiting: OrderedDict[RequestFuture, None] = OrderedDict()
        """Not pulled yet, oldest first."""
        self._sending = Lock()
        self._requested = 0
        self._cut = 1
        self._position = 0
        self.pending = 0
        """Requests without a response."""
        self.sent: dict[int, RequestFuture] = {}
        """Requests in the stream, by number."""
        self._closed: BaseException | None = None
        self.error: BaseException | None = None
        """Always None: a source with an error ends the run, but here a request that cannot be sent only fails
        itself."""
        self._finishing = False
        self._ended = False

    # --- clients

    def submit(self, ticket: RequestFuture, *, block: bool = True, timeout: float | None = None) -> None:
        """Wait for space; without `block`, or after the timeout, raise TooManyRequests. Raises ServiceClosed if it
        accepts no requests."""
        with self._space:
            if self.pending >= self._most and not (block and self._space.wait_for(self._has_space, timeout)):
                raise _too_many_error(self.pending)
            if self._closed is not None:
                raise self._closed
            self.pending += 1
            self._waiting[ticket] = None
        ticket.add_done_callback(self._answered)
        self._send()

    def _has_space(self) -> bool:
        return self.pending < self._most or self._closed is not None

    def _answered(self, ticket: Any) -> None:
        """A request is resolved or cancelled; if it was not sent yet, it never will be."""
        with self._space:
            self.pending -= 1
            self._waiting.pop(ticket, None)
            self._space.notify()

    def close_intake(self, why: BaseException) -> None:
        """Accept no more requests; those accepted are still sent."""
        with self._space:
            self._closed = self._closed or why
            self._space.notify_all()

    def finish(self) -> None:
        """The input ends after the accepted requests are sent."""
        self._finishing = True
        self._send()

    def take_unanswered(self) -> list[RequestFuture]:
        """Remove and return all requests without a response."""
        with self._lock:
            left = [*self.sent.values(), *self._waiting]
            self.sent.clear()
            self._waiting.clear()
        return left

    # --- stream

    def pull(self, pull: Pull) -> None:
        with self._lock:
            self._requested += pull.items
            self._cut = max(1, pull.segment_items)
        self._send()

    def place_of(self, row: int) -> str:
        return f"request {row}"

    def close(self) -> None:
        self.close_intake(service_closed_error("is over"))

    def _send(self) -> None:
        """Send waiting requests. One thread at a time; others leave theirs to it."""
        while self._has_work() and self._sending.acquire(blocking=False):
            try:
                while tickets := self._next():
                    self._post(tickets)
                if self._finishing and not self._waiting and not self._ended:
                    self._ended = True
                    self._store.post(InputEnded(self._position))
            finally:
                self._sending.release()

    def _has_work(self) -> bool:
        if self._waiting:
            return self._requested > 0
        return self._finishing and not self._ended

    def _next(self) -> list[RequestFuture]:
        with self._lock:
            count = min(self._requested, self._cut, len(self._waiting))
            tickets = list(islice(self._waiting, count))
            for ticket in tickets:
                del self._waiting[ticket]
            self._requested -= count
        return tickets

    def _post(self, tickets: list[RequestFuture]) -> None:
        """Send as one segment; requests that cannot be sent fail and take no number."""
        first = self._position
        segment, sent = self._stored(first, tickets)
        with self._lock:
            self._requested += len(tickets) - len(sent)
            for number, ticket in enumerate(sent, first):
                ticket.item = None
                self.sent[number] = ticket
        self._position += len(sent)
        if segment is not None:
            self._store.post(ItemsArrived(first, [segment]))

    def _stored(self, first: int, tickets: list[RequestFuture]) -> tuple[Segment | None, list[RequestFuture]]:
        left = tickets
        while left:
            try:
                return self._store.store(range(first, first + len(left)), [ticket.item for ticket in left]), left
            except UnsendableItemError as error:
                at = error.index if error.index >= 0 else self._find_unsendable(first, left)
                self._reject(left[at], _unsendable_request_error(error.error_text))
            except Exception as error:  # a user's item: pickling it may raise anything
                at = self._find_unsendable(first, left)
                self._reject(left[at], _unsendable_request_error(f"{type(error).__name__}: {error}"))
            left = left[:at] + left[at + 1 :]
        return None, []

    def _find_unsendable(self, first: int, tickets: list[RequestFuture]) -> int:
        """The first request that cannot be stored alone, where the index is unknown."""
        for at, ticket in enumerate(tickets[:-1]):
            try:
                self._store.store(range(first, first + 1), [ticket.item])
            except Exception:
                return at
        return len(tickets) - 1


class ResponseSink:
    """Resolves requests with their results in its own thread, because callbacks of futures are user code."""

    def __init__(self, store: PayloadStore, ways: int) -> None:
        """`ways`: number of paths from the source to the leaves of the pipeline."""
        self._store = store
        self._ways = ways
        self.source: RequestSource | None = None
        self.on_crash: Callable[[BaseException], None] = lambda _: None
        """Called when responses cannot be delivered any more."""
        self._queue: SimpleQueue[Deliver | tuple[RequestFuture, BaseException] | BaseException] = SimpleQueue()
        self._thread = Thread(target=self._answer, name="dovetail-answers", daemon=True)
        self._thread.start()

    # --- loop thread

    def take(self, deliver: Deliver) -> None:
        self._queue.put(deliver)

    def has_space(self) -> bool:
        return True  # the number of pending requests is limited at submission

    def reject(self, ticket: RequestFuture, error: BaseException) -> None:
        """A request that never entered the stream."""
        self._queue.put((ticket, error))

    def end(self, why: BaseException) -> None:
        """No more results will come; requests without a response fail with this error."""
        self._queue.put(why)
        self._thread.join()

    # --- response thread

    def _answer(self) -> None:
        while True:
            entry = self._queue.get()
            if isinstance(entry, BaseException):
                break
            try:
                if isinstance(entry, tuple):
                    entry[0].reject(entry[1])
                else:
                    self._deliver(entry)
            except BaseException as error:  # results are user objects: reading one may raise anything
                self.on_crash(error)
        self._store.release_mappings()
        if self.source is not None:
            for ticket in self.source.take_unanswered():
                ticket.reject(entry)

    def _deliver(self, deliver: Deliver) -> None:
        assert self.source is not None, "results without a request"
        sent = self.source.sent
        for leaf, segments in deliver.outputs.items():
            for segment in segments:
                self._hand_out(sent, leaf, *self._store.load(segment))
        for failed in deliver.failed_items:
            ticket = sent.pop(self._number(failed), None)
            if ticket is not None:
                ticket.reject(item_failed_error(failed.unit, failed.error, failed.detail, failed.attempts))
        for number in range(deliver.first, deliver.last):
            ticket = sent.pop(number, None)
            if ticket is not None:
                ticket.complete()

    def _hand_out(self, sent: dict[int, RequestFuture], leaf: str, keys: Any, items: list[Any]) -> None:
        for key, item in zip(keys, items, strict=True):
            plain = type(key) is int
            number = key if plain else key[0]
            ticket = sent.get(number)
            if ticket is None:
                continue
            if type(item) is UnreadableItem:
                del sent[number]
                ticket.reject(_unreadable_result_error(leaf, item.error_text))
                continue
            ticket.collected.append(((key,) if plain else key, leaf, item))
            ticket.one_to_one_count += plain
            if ticket.one_to_one_count == self._ways:
                del sent[number]
                ticket.complete()

    def _number(self, failed: FailedItem) -> int:
        """Number of the request that an item came from."""
        if failed.key is not None:
            return failed.key[0]
        segment, start, _ = failed.part
        key = self._store.load(segment)[0][start]
        number: int = key[0] if isinstance(key, tuple) else key
        return number


def service_closed_error(why: str) -> ServiceClosed:
    return ServiceClosed(Problem("DT376", f"the service {why}", fixes=("dt.serve(pipeline) starts another one",)))


def _too_many_error(pending: int) -> TooManyRequests:
    message = f"{pending} requests are pending, the maximum"
    fixes = ("submit(item) without block=False waits", "dt.serve(pipeline, max_pending=100_000) allows more")
    return TooManyRequests(Problem("DT377", message, fixes=fixes))


def _unsendable_request_error(error: str) -> ItemFailed:
    message = f"this item cannot be sent to a worker: {error}"
    fixes = ("submit a path or a key from which a worker can load it",)
    return ItemFailed(Problem("DT378", message, fixes=fixes), error=error)


def _unreadable_result_error(stage: str, error: str) -> ItemFailed:
    message = f"the result of {stage} cannot be unpickled in the driver: {error}"
    fixes = ("return plain values, or objects of importable classes",)
    return ItemFailed(Problem("DT378", message, fixes=fixes), stage=stage, error=error)
