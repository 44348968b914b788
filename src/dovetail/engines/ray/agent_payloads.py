"""Payloads an agent holds or expects, and the messages that wait for them. Node side.

A worker gets its messages in the order they were sent: one that waits for its input holds up those behind it.
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
    """For the thread of the agent's loop; only `find` may be called from others."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._held: dict[int, Segment] = {}
        """Key -> payload: ours under the number of its segment, copies of others' under the driver's, negative."""
        self._expected: set[int] = set()
        self._waiting: dict[int, deque[Op]] = {}
        """Worker -> messages, and perhaps its stop, in order."""
        self.output_to_driver: set[int] = set()
        """Messages whose output goes to the driver."""

    # --- payloads

    def keep(self, segment: Segment) -> int:
        """One that a worker of ours gave; its key."""
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
        """Their bytes; KeyError: one is not here any more."""
        return [self._engine.read_raw(self._held[key]) for key in keys]

    # --- messages

    def run(self, op: Op) -> bool:
        """False: some of its input is neither here nor on its way."""
        _, message, worker, *_, flags, _items, parts = op
        if flags & OUTPUT_TO_DRIVER:
            self.output_to_driver.add(message)
        if any(key not in self._held and key not in self._expected for key, _, _ in parts):
            self.output_to_driver.discard(message)
            return False  # what was said to be lost meanwhile
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
        """Whether it had not been handed over yet; then it is forgotten."""
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
        """Something that messages may have waited for."""
        for worker in list(self._waiting):
            self._hand_over(worker)

    def drop_missing(self, keys: Iterable[int]) -> Iterator[tuple[int, int]]:
        """These will never come: the messages that wait for them, with their workers, are given up."""
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
        _, message, worker, hosted, batch_size, cut, flags, items, parts = op
        held = [(self._held[key], start, stop) for key, start, stop in parts]
        return RunBatches(message, worker, hosted, held, items, batch_size, cut, bool(flags & SPOOL_OUTPUT))
