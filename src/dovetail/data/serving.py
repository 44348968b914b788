"""How do requests become the input of a run that has no end, and how does each get its own results back?

Requests are numbered as they enter the stream. Results carry the number in their keys. A result whose key is a plain
number came by a way on which nothing was dropped or multiplied: if there is one for every way through the pipeline,
nothing more can come. For all others, the end of their epoch says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import Unreadable, Unsendable
from dovetail.control.events import InputEnded, ItemsArrived
from dovetail.data.tickets import ItemFailed, ServiceClosed, Ticket, TooManyRequests, item_failed
from dovetail.errors import Problem

if TYPE_CHECKING:
    from dovetail.control.commands import Deliver, Pull, SetAside
    from dovetail.control.segments import Segment
    from dovetail.data.ends import Store

Refuse = Callable[[Ticket, BaseException], None]


class QueueSource:
    """Requests, as many at a time as the stream asks for. Whoever submits sends, and what others submitted meanwhile:
    no thread of its own, nothing to wake."""

    def __init__(self, store: Store, most: int, refuse: Refuse) -> None:
        """At most so many are pending; `refuse` is told of those that cannot be sent, and must not block."""
        self._store = store
        self._most = most
        self._refuse = refuse
        self._lock = Lock()
        self._room = Condition(self._lock)
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()
        """Not asked for yet, oldest first."""
        self._sending = Lock()
        self._asked = 0
        self._cut = 1
        self._position = 0
        self.pending = 0
        """Requests without an answer."""
        self.sent: dict[int, Ticket] = {}
        """Those in the stream, by their number."""
        self._closed: BaseException | None = None
        self.error: BaseException | None = None
        """A source that fails ends the run; this one never does: what cannot be sent is its ticket's matter."""
        self._finishing = False
        self._ended = False

    # --- whoever asks

    def submit(self, ticket: Ticket, *, block: bool = True, timeout: float | None = None) -> None:
        """Waits for room; without `block`, or after the timeout, TooManyRequests. ServiceClosed: no more are taken."""
        with self._room:
            if self.pending >= self._most and not (block and self._room.wait_for(self._has_room, timeout)):
                raise _too_many(self.pending)
            if self._closed is not None:
                raise self._closed
            self.pending += 1
            self._waiting[ticket] = None
        ticket.add_done_callback(self._answered)
        self._send()

    def _has_room(self) -> bool:
        return self.pending < self._most or self._closed is not None

    def _answered(self, ticket: Any) -> None:
        """Also of those that were given up: whatever waits of them is not sent."""
        with self._room:
            self.pending -= 1
            self._waiting.pop(ticket, None)
            self._room.notify()

    def refuse_more(self, why: BaseException) -> None:
        """Nothing is taken any more; what was is still sent."""
        with self._room:
            self._closed = self._closed or why
            self._room.notify_all()

    def finish(self) -> None:
        """After what waits is sent, the input is at its end."""
        self._finishing = True
        self._send()

    def take_all(self) -> list[Ticket]:
        """Whatever has no answer yet, out of our hands."""
        with self._lock:
            left = [*self.sent.values(), *self._waiting]
            self.sent.clear()
            self._waiting.clear()
        return left

    # --- the stream

    def pull(self, pull: Pull) -> None:
        with self._lock:
            self._asked += pull.items
            self._cut = max(1, pull.cut)
        self._send()

    def close(self) -> None:
        self.refuse_more(closed("is over"))

    def _send(self) -> None:
        """By whoever comes first; others leave theirs to them."""
        while self._to_do() and self._sending.acquire(blocking=False):
            try:
                while tickets := self._next():
                    self._post(tickets)
                if self._finishing and not self._waiting and not self._ended:
                    self._ended = True
                    self._store.post(InputEnded(self._position))
            finally:
                self._sending.release()

    def _to_do(self) -> bool:
        if self._waiting:
            return self._asked > 0
        return self._finishing and not self._ended

    def _next(self) -> list[Ticket]:
        with self._lock:
            count = min(self._asked, self._cut, len(self._waiting))
            tickets = list(islice(self._waiting, count))
            for ticket in tickets:
                del self._waiting[ticket]
            self._asked -= count
        return tickets

    def _post(self, tickets: list[Ticket]) -> None:
        """As one segment; those that cannot be sent are told so, and take no number."""
        first = self._position
        segment, sent = self._stored(first, tickets)
        with self._lock:
            self._asked += len(tickets) - len(sent)
            for number, ticket in enumerate(sent, first):
                ticket.item = None
                self.sent[number] = ticket
        self._position += len(sent)
        if segment is not None:
            self._store.post(ItemsArrived(first, [segment]))

    def _stored(self, first: int, tickets: list[Ticket]) -> tuple[Segment | None, list[Ticket]]:
        left = tickets
        while left:
            try:
                return self._store.store(range(first, first + len(left)), [ticket.item for ticket in left]), left
            except Unsendable as error:
                at = error.index if error.index >= 0 else self._bad_one(first, left)
                self._refuse(left[at], _unsendable(error.error_text))
            except Exception as error:  # the user's item: anything can happen while it is packed
                at = self._bad_one(first, left)
                self._refuse(left[at], _unsendable(f"{type(error).__name__}: {error}"))
            left = left[:at] + left[at + 1 :]
        return None, []

    def _bad_one(self, first: int, tickets: list[Ticket]) -> int:
        """Where it is not known: the first that cannot be stored alone."""
        for at, ticket in enumerate(tickets[:-1]):
            try:
                self._store.store(range(first, first + 1), [ticket.item])
            except Exception:
                return at
        return len(tickets) - 1


class TicketSink:
    """Gives results to whom they belong, in a thread of its own: what is called when a ticket is done is not ours."""

    def __init__(self, store: Store, ways: int) -> None:
        """`ways`: how many ways lead from the source through the pipeline to its leaves."""
        self._store = store
        self._ways = ways
        self.source: QueueSource | None = None
        self.crash: Callable[[BaseException], None] = lambda _: None
        """Told when answers cannot be given any more."""
        self._queue: SimpleQueue[Deliver | tuple[Ticket, BaseException] | BaseException] = SimpleQueue()
        self._thread = Thread(target=self._answer, name="dovetail-answers", daemon=True)
        self._thread.start()

    # --- the loop's side

    def take(self, deliver: Deliver) -> None:
        self._queue.put(deliver)

    def has_room(self) -> bool:
        return True  # what is pending is bounded where it comes in

    def refuse(self, ticket: Ticket, error: BaseException) -> None:
        """A request that never came into the stream."""
        self._queue.put((ticket, error))

    def end(self, why: BaseException) -> None:
        """Nothing more comes; whoever has no answer by then gets this one."""
        self._queue.put(why)
        self._thread.join()

    # --- the answers

    def _answer(self) -> None:
        while True:
            said = self._queue.get()
            if isinstance(said, BaseException):
                break
            try:
                if isinstance(said, tuple):
                    said[0].refuse(said[1])
                else:
                    self._deliver(said)
            except BaseException as error:  # results are the user's objects: reading one may do anything
                self.crash(error)
        self._store.let_go()
        if self.source is not None:
            for ticket in self.source.take_all():
                ticket.refuse(said)

    def _deliver(self, deliver: Deliver) -> None:
        assert self.source is not None, "results, and nobody asked"
        sent = self.source.sent
        for leaf, segments in deliver.outputs.items():
            for segment in segments:
                self._hand_out(sent, leaf, *self._store.load(segment))
        for aside in deliver.aside:
            ticket = sent.pop(self._number(aside), None)
            if ticket is not None:
                ticket.refuse(item_failed(aside.unit, aside.error, aside.detail, aside.attempts))
        for number in range(deliver.first, deliver.last):
            ticket = sent.pop(number, None)
            if ticket is not None:
                ticket.complete()

    def _hand_out(self, sent: dict[int, Ticket], leaf: str, keys: Any, items: list[Any]) -> None:
        for key, item in zip(keys, items, strict=True):
            plain = type(key) is int
            number = key if plain else key[0]
            ticket = sent.get(number)
            if ticket is None:
                continue
            if type(item) is Unreadable:
                del sent[number]
                ticket.refuse(_unreadable(leaf, item.error_text))
                continue
            ticket.found.append(((key,) if plain else key, leaf, item))
            ticket.exact += plain
            if ticket.exact == self._ways:
                del sent[number]
                ticket.complete()

    def _number(self, aside: SetAside) -> int:
        """Of the request an item came from."""
        if aside.key is not None:
            return aside.key[0]
        segment, start, _ = aside.part
        key = self._store.load(segment)[0][start]
        number: int = key[0] if isinstance(key, tuple) else key
        return number


def closed(why: str) -> ServiceClosed:
    return ServiceClosed(Problem("DT376", f"the service {why}", fixes=("dt.serve(pipeline) starts another one",)))


def _too_many(pending: int) -> TooManyRequests:
    message = f"{pending} requests are pending, and no more are kept"
    fixes = ("submit(item) without block=False waits for room", "dt.serve(pipeline, max_pending=100_000) keeps more")
    return TooManyRequests(Problem("DT377", message, fixes=fixes))


def _unsendable(error: str) -> ItemFailed:
    message = f"this item cannot be sent to a worker: {error}"
    fixes = ("submit what a worker needs to make it there: a path, a key",)
    return ItemFailed(Problem("DT378", message, fixes=fixes), error=error)


def _unreadable(stage: str, error: str) -> ItemFailed:
    message = f"the result of {stage} came back and cannot be unpickled here: {error}"
    fixes = ("return plain values, or objects of importable classes",)
    return ItemFailed(Problem("DT378", message, fixes=fixes), stage=stage, error=error)
