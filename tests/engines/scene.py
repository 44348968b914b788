"""Rigs and scenes of the contract suite: how a test controls an engine, and checks of every event."""

from __future__ import annotations

import asyncio
import os
import pathlib
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.control.commands import RunBatches, StartWorker
from dovetail.control.engine import WorkerLostError
from dovetail.control.events import BatchesDone, BatchesReturned, WorkerLost, WorkerReady, WorkerStopped
from dovetail.resources.seat import Seat
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from dovetail.control.commands import EngineCommand, HostedObject
    from dovetail.control.engine import Engine
    from dovetail.control.events import Event
    from dovetail.control.payload import Segment
    from dovetail.engines.simulated.world import ItemOutcome, Key
    from dovetail.pipeline.stage_code import StageCode

NODE = "node-0"
SEVERAL_CHECKS_S = 0.6
"""A worker that waits so long has looked for a deadlock at least twice."""
E = TypeVar("E")


@dataclass(frozen=True)
class Held:
    """The item is processed when the rig releases it, or after a long time of a virtual clock."""


@dataclass(frozen=True)
class Does:
    """Behaviour of a hosted object by item key; all other items are passed on."""

    items: Mapping[Key, ItemOutcome | Held] = field(default_factory=dict)
    setup_error: str = ""


class Notebook:
    """A hosted object with methods."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)

    def note(self, line: str, *, times: int = 1) -> int:
        self.lines += [line] * times
        return len(self.lines)

    async def note_later(self, line: str) -> int:
        await asyncio.sleep(0)
        return self.note(line)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def tear(self) -> None:
        raise ValueError("torn")


class Server:
    """A hosted object whose methods wait until a file exists."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._arrays: list[Any] = []

    def health(self) -> str:
        return "fine"

    def note(self, line: str) -> list[str]:
        self._lines.append(line)
        return self._lines

    def negate(self, array: Any, *, name: str) -> tuple[Any, str]:
        if name:
            self._arrays.append(array)
        array_before = array.copy()
        array *= -1
        result = array.copy()
        array[:] = array_before
        return result, name

    def kept(self) -> list[float]:
        """The first numbers of the arguments of `negate`."""
        return [float(array[0]) for array in self._arrays]

    def wait_for(self, path: str) -> str:
        Path(f"{path}.begun").touch()
        while not Path(path).exists():
            time.sleep(0.005)
        return "waited"

    async def wait_for_async(self, path: str) -> None:
        Path(f"{path}.begun").touch()
        try:
            while not Path(path).exists():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            Path(f"{path}.cancelled").touch()
            raise


class PlainServer(Server):
    """Server without a method that takes no slot."""

    health = None  # type: ignore[assignment]


class Caller:
    """A hosted object that calls object "a" of worker 2: for each item, and in its teardown object "book"."""

    def setup(self, worker: Any) -> None:
        self._worker = worker

    def __call__(self, items: list[Key]) -> list[Key]:
        for _ in items:
            self._worker.call(2, "a", "__str__").result(PATIENCE_S)
        return items

    def teardown(self) -> None:
        self._worker.call(2, "book", "note", "from a teardown").result(PATIENCE_S)


class Neighbour:
    """A hosted object that calls other objects, of its own and of other workers."""

    def setup(self, worker: Any) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self.inside = self.peak = 0

    def call(self, name: str, method: str, *args: Any, **named: Any) -> Any:
        return self._worker.call(self._worker.id, name, method, *args, **named)

    def ask(self, name: str, method: str, *args: Any, **named: Any) -> Any:
        return self.call(name, method, *args, **named).result()

    async def ask_later(self, name: str, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self.call(name, method, *args))

    def repeat(self, count: int, name: str, method: str, *args: Any) -> list[Any]:
        futures = [self.call(name, method, *args) for _ in range(count)]
        return [future.result() for future in futures]

    def ask_worker(self, worker: int, name: str, method: str, *args: Any, rank: int = 0) -> Any:
        return self._worker.call_rank(worker, rank, name, method, *args).result(PATIENCE_S)

    def ask_after(self, seconds: float, worker: int, name: str, method: str, *args: Any) -> Any:
        time.sleep(seconds)
        return self.ask_worker(worker, name, method, *args)

    def tell(self, worker: int, name: str, method: str, *args: Any) -> None:
        """Make a call, and do not wait for it."""
        self._worker.call(worker, name, method, *args)
        time.sleep(SEVERAL_CHECKS_S)

    def outcomes(self, worker: int, count: int, name: str, method: str, *args: Any) -> list[str]:
        """Types of the results of several calls, all made at once; "lost" for a lost worker."""
        futures = [self._worker.call(worker, name, method, *args) for _ in range(count)]
        ends = [future.exception(PATIENCE_S) or future.result() for future in futures]
        return ["lost" if isinstance(end, WorkerLostError) else type(end).__name__ for end in ends]

    def results(self, worker: int, count: int, name: str, method: str, *args: Any) -> list[Any]:
        futures = [self._worker.call(worker, name, method, *args) for _ in range(count)]
        return [future.result(PATIENCE_S) for future in futures]

    def write_after(self, worker: int, count: int, path: str) -> None:
        """Make calls to another worker, one by one, then write a file."""
        for _ in range(count):
            self.ask_worker(worker, "other", "give_back", 1)
        pathlib.Path(path).touch()

    def double(self, values: Any) -> Any:
        """Change the argument in place, and return it."""
        values *= 2
        return values

    def doubled_elsewhere(self, worker: int, items: int) -> tuple[int, int]:
        """The sums of an array, and of what another worker made of it."""
        import numpy as np

        mine = np.ones(items)
        doubled = self.ask_worker(worker, "other", "double", mine)
        doubled += 1  # results are writable, too
        return int(mine.sum()), int(doubled.sum())

    def shares(self, name: str) -> bool:
        """Whether the other object gets and returns the very object that it is given."""
        something = threading.Lock()  # cannot be pickled
        return self.ask(name, "give_back", something) is something

    def give_back(self, value: Any) -> Any:
        return value

    def linger(self, seconds: float) -> None:
        with self._lock:
            self.inside += 1
            self.peak = max(self.peak, self.inside)
        time.sleep(seconds)
        with self._lock:
            self.inside -= 1

    def busiest(self) -> int:
        return self.peak


class AsyncNeighbour(Neighbour):
    """The same, with all methods in one event loop."""

    async def __call__(self, items: list[Key]) -> list[Key]:
        return items


class Rig(ABC):
    """An engine under test, and the operations that depend on its implementation."""

    engine: Engine

    @abstractmethod
    def hosted(self, name: str, slots: int) -> HostedObject: ...

    @abstractmethod
    def segment(self, keys: list[Key]) -> Segment: ...

    @abstractmethod
    def read(self, segment: Segment) -> list[Key]: ...

    @abstractmethod
    def kill(self, worker: int) -> None:
        """Kill a worker with SIGKILL."""

    def knows_pids(self, worker: int, ranks: int) -> bool:
        """Whether the pids of a worker are known; true if its workers are no processes."""
        return True

    @abstractmethod
    def runs(self, worker: int, message: int) -> bool:
        """Whether a call of this message is running."""

    @abstractmethod
    def let_go(self) -> None: ...

    @abstractmethod
    def processes(self) -> int:
        """Number of worker processes that exist now."""


Units = dict[str, "type[Notebook | Server | Caller | Neighbour] | Does | tuple[StageCode, ...]"]


class Scene:
    """A test's view of an engine: sends commands, waits for conditions and checks every event against the contract."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.engine = rig.engine
        self.log: list[Event] = []
        self._ended: set[int] = set()
        self._open: dict[int, int] = {}
        self._numbers = count(1)

    def submit(self, *commands: EngineCommand) -> None:
        self.engine.submit(commands)

    def start(self, worker: int, *names: str, slots: int = 1, ranks: int = 1) -> None:
        hosted = tuple(self.rig.hosted(name, slots) for name in names)
        self.submit(StartWorker(worker, (Seat(NODE, 100),) * ranks, hosted))

    def ready(self, worker: int, *names: str, slots: int = 1, ranks: int = 1) -> None:
        self.start(worker, *names, slots=slots, ranks=ranks)
        self.until(lambda: any(event.worker == worker for event in self.all(WorkerReady)), f"worker {worker} is ready")
        self.until(lambda: self.rig.knows_pids(worker, ranks), f"the pids of worker {worker} are known")

    def message(
        self, worker: int, name: str, *segments: list[int], batch_size: int = 1, cut: int = 100, spool: bool = False
    ) -> int:
        """Send source items by number."""
        parts = [(self.rig.segment([(n,) for n in numbers]), 0, len(numbers)) for numbers in segments]
        items = sum(map(len, segments))
        return self.send(RunBatches(next(self._numbers), worker, name, parts, items, batch_size, cut, spool))

    def send(self, command: RunBatches) -> int:
        if command.worker not in self._ended:
            self._open[command.message] = command.worker
        self.submit(command)
        return command.message

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.log if isinstance(event, kind)]

    def listen(self, timeout_s: float = 0.05) -> list[Event]:
        events = self.engine.poll(timeout_s)
        for event in events:
            self.log.append(event)
            self._check(event)
        return events

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"timeout: waited until {what}; received {self.log}"
            self.listen()

    def done(self, message: int) -> BatchesDone:
        self.until(lambda: message not in self._open, f"message {message} is answered")
        (found,) = [event for event in self.all(BatchesDone) if event.message == message]
        return found

    def lost(self, worker: int) -> WorkerLost:
        self.until(lambda: worker in self._ended, f"worker {worker} is gone")
        (found,) = [event for event in self.all(WorkerLost) if event.worker == worker]
        return found

    def stopped(self, worker: int) -> None:
        self.until(lambda: worker in self._ended, f"worker {worker} is gone")
        assert worker in [event.worker for event in self.all(WorkerStopped)]

    def keys(self, done: BatchesDone) -> list[Key]:
        return [key for segment in done.segments for key in self.rig.read(segment)]

    def result(self, future: Future[E]) -> E:
        self.until(future.done, "the call is answered")
        return future.result(0)

    def error(self, future: Future[object]) -> BaseException | None:
        self.until(future.done, "the call is answered")
        return future.exception(0)

    def running(self, worker: int, message: int) -> None:
        self.until(lambda: self.rig.runs(worker, message), f"message {message} runs")

    def _check(self, event: Event) -> None:
        worker = getattr(event, "worker", None)
        assert worker is None or worker not in self._ended, f"{event} after the end of the worker: {self.log}"
        if isinstance(event, BatchesDone | BatchesReturned):
            assert self._open.pop(event.message, None) == worker, f"{event} answers nothing: {self.log}"
        if isinstance(event, WorkerLost | WorkerStopped):
            left = [message for message, of in self._open.items() if of == worker]
            assert not (left and isinstance(event, WorkerStopped)), f"{event}, but {left} are not answered: {self.log}"
            self._ended.add(event.worker)
            for message in left:
                del self._open[message]
