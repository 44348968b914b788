"""Payloads an agent holds or expects, and the messages that wait for them. Node side.

A worker gets its messages in the order they were sent: one that waits for its input delays the ones behind it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import RunBatches, StopWorker
from dovetail.control.payload import Segment
from dovetail.engines.local.payload_table import SpoolRef
from dovetail.engines.ray.protocol import OUTPUT_TO_DRIVER, SPOOL_OUTPUT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.ray.protocol import Op


class AgentPayloads:
    """Thread: that of the session; `read` and `is_coming` from any."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._held: dict[int, Segment] = {}
        """Key -> payload. Own payloads have the id of their segment as key, copies have negative keys of the driver."""
        self._expected: set[int] = set()
        self._waiting: dict[int, deque[Op]] = {}
        """Worker -> queued messages, and its stop operation, in order."""
        self.output_to_driver: set[int] = set()
        """Ids of messages whose output is sent to the driver."""

    # --- payloads

    def keep(self, segment: Segment) -> int:
        """Keep the output of a worker; its key."""
        self._held[segment.id] = segment
        return segment.id

    def put(self, key: int, items: int, sizes: tuple[int, ...], data: bytes | memoryview) -> None:
        self._held[key] = self._engine.adopt(items, sizes, data)
        self._expected.discard(key)

    def put_file(self, key: int, items: int, size: int, place: tuple[str, int, tuple[int, ...]]) -> None:
        self._held[key] = Segment(-key, items, size, "", SpoolRef(*place))

    def expect(self, keys: Iterable[int]) -> None:
        self._expected.update(keys)

    def is_coming(self, key: int) -> bool:
        return key in self._expected

    def holds(self, key: int) -> bool:
        return key in self._held

    def free(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._held.pop(key, None)
            self._expected.discard(key)

    def read(self, keys: Iterable[int]) -> list[bytes]:
        """Bytes of payloads; KeyError if one was freed."""
        return [self._engine.read_raw(self._held[key]) for key in keys]

    # --- messages

    def run(self, op: Op) -> bool:
        """Run a message, or queue it until its input has arrived; False if some input is neither held nor expected."""
        _, message, worker, *_, flags, _items, _starts, parts = op
        if flags & OUTPUT_TO_DRIVER:
            self.output_to_driver.add(message)
        if any(key not in self._held and key not in self._expected for key, _, _ in parts):
            self.output_to_driver.discard(message)
            return False  # lost meanwhile
        queue = self._waiting.get(worker)
        if queue is None and all(key in self._held for key, _, _ in parts):
            self._engine.submit([self._command(op)])
        else:
            self._waiting.setdefault(worker, deque()).append(op)
        return True

    def stop(self, worker: int, drain: bool, reason: str) -> None:
        if drain and worker in self._waiting:
            self._waiting[worker].append(("stop", worker, reason))
            return
        self._waiting.pop(worker, None)
        self._engine.submit([StopWorker(worker, drain, reason)])

    def cancel(self, message: int, worker: int) -> bool:
        """Remove a message from the queue; False if its worker has it already."""
        queue = self._waiting.get(worker, ())
        found = next((op for op in queue if op[0] == "run" and op[1] == message), None)
        if found is None:
            return False
        self._waiting[worker].remove(found)
        self.output_to_driver.discard(message)
        self._hand_over(worker)
        return True

    def on_worker_gone(self, worker: int) -> None:
        for op in self._waiting.pop(worker, ()):
            if op[0] == "run":
                self.output_to_driver.discard(op[1])

    def on_arrived(self) -> None:
        """Hand over the messages whose input is complete now."""
        for worker in list(self._waiting):
            self._hand_over(worker)

    def drop_missing(self, keys: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Payloads will not arrive: drop the messages that need them, and return (worker, message) of each."""
        lost = set(keys)
        self._expected -= lost
        for worker, queue in list(self._waiting.items()):
            for op in [op for op in queue if op[0] == "run" and any(key in lost for key, _, _ in op[-1])]:
                queue.remove(op)
                self.output_to_driver.discard(op[1])
                yield worker, op[1]
            self._hand_over(worker)

    def _hand_over(self, worker: int) -> None:
        queue = self._waiting[worker]
        ready: list[Any] = []
        while queue:
            op = queue[0]
            if op[0] == "stop":
                ready.append(StopWorker(worker, True, op[2]))
            elif all(key in self._held for key, _, _ in op[-1]):
                ready.append(self._command(op))
            else:
                break
            queue.popleft()
        if not queue:
            del self._waiting[worker]
        if ready:
            self._engine.submit(ready)

    def _command(self, op: Op) -> RunBatches:
        _, message, worker, hosted, batch_size, cut, flags, items, starts, parts = op
        held = [(self._held[key], start, stop) for key, start, stop in parts]
        spool = bool(flags & SPOOL_OUTPUT)
        return RunBatches(message, worker, hosted, held, items, batch_size, cut, spool, starts)
