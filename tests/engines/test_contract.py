"""Does every engine that is here keep the contract?"""

from __future__ import annotations

import builtins
import os
import signal
from itertools import count
from threading import Event as Never
from typing import TYPE_CHECKING, assert_never

from dovetail.control.commands import Hosted
from dovetail.control.events import Cause
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.world import (
    Behaviour,
    Gives,
    Hangs,
    Key,
    Kills,
    Outcome,
    OutOfMemory,
    Raises,
    Slow,
    World,
)
from dovetail.resources.cluster import Cluster
from engines.contract import EngineContract
from engines.scene import Does, Held, Notebook, Rig, Units
from engines.subprocess_engine import FORK, SubprocessEngine, read, segment_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.segments import Segment


class SimulatedRig(Rig):
    def __init__(self, units: Units) -> None:
        self._units = units
        behaviours = {name: self._behaviour(does) for name, does in units.items()}
        self.engine: SimulatedEngine = SimulatedEngine(World(behaviours, tracked=True), Cluster.parse("1x(8cpu)"))

    def _behaviour(self, does: Does | type[Notebook]) -> Behaviour:
        if not isinstance(does, Does):
            return Behaviour(0.01)

        def item(key: Key, attempt: int) -> Outcome:
            found = does.items.get(key, Gives(1))
            return Slow(1000) if isinstance(found, Held) else found

        fails = bool(does.setup_error)
        return Behaviour(0.01, setup_s=0.1, setup_failures=float(fails), setup_error=does.setup_error, item=item)

    def hosted(self, name: str, slots: int) -> Hosted:
        does = self._units[name]
        return Hosted(name, None if isinstance(does, Does) else does, slots)

    def segment(self, keys: list[Key]) -> Segment:
        return self.engine.new_segment(len(keys), 0, "", keys)

    def read(self, segment: Segment) -> list[Key]:
        assert isinstance(segment.ref, list)
        return segment.ref

    def kill(self, worker: int) -> None:
        self.engine.kill(worker)

    def runs(self, worker: int, message: int) -> bool:
        return self.engine.runs(worker, message)

    def let_go(self) -> None:
        """What is held goes on by itself, much later."""

    def processes(self) -> int:
        return self.engine.workers


class Doing:
    """The real thing: does with items what a test says."""

    def __init__(self, does: Does) -> None:
        self._does = does
        self.gate = FORK.Event()

    def setup(self) -> None:
        if self._does.setup_error:
            raise RuntimeError(self._does.setup_error)

    def __call__(self, items: list[Key]) -> list[Key]:
        return [out for key in items for out in outcome_of(self._does, key, self.gate.wait)]


def outcome_of(does: Does, key: Key, wait: Callable[[], object]) -> list[Key]:
    """What really happens to an item."""
    match does.items.get(key, Gives(1)):
        case Gives(n):
            return [key] if n == 1 else [(*key, child) for child in range(n)]
        case Raises(text):
            kind, _, message = text.partition(": ")
            raise getattr(builtins, kind)(message)
        case Kills(Cause.EXIT, code):
            os._exit(code)
        case Kills():
            os.kill(os.getpid(), signal.SIGKILL)
        case Hangs():
            Never().wait()
        case Held():
            wait()
            return [key]
        case Slow() | OutOfMemory() as outcome:
            raise NotImplementedError(outcome)
        case other:
            assert_never(other)
    raise AssertionError(f"{key} came back")


class SubprocessRig(Rig):
    def __init__(self, units: Units) -> None:
        self.engine: SubprocessEngine = SubprocessEngine()
        self._works = {name: Doing(does) if isinstance(does, Does) else does for name, does in units.items()}
        self._numbers = count(-1, -1)

    def hosted(self, name: str, slots: int) -> Hosted:
        return Hosted(name, self._works[name], slots)

    def segment(self, keys: list[Key]) -> Segment:
        return segment_of(next(self._numbers), keys)

    def read(self, segment: Segment) -> list[Key]:
        return read(segment)

    def kill(self, worker: int) -> None:
        os.kill(self.engine.pid(worker), signal.SIGKILL)

    def runs(self, worker: int, message: int) -> bool:
        return self.engine.runs(worker) == message

    def let_go(self) -> None:
        for work in self._works.values():
            if isinstance(work, Doing):
                work.gate.set()

    def processes(self) -> int:
        return sum(is_there(pid) for pid in self.engine.pids)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class TestSimulatedEngine(EngineContract):
    def rig(self, units: Units) -> Rig:
        return SimulatedRig(units)


class TestSubprocessEngine(EngineContract):
    def rig(self, units: Units) -> Rig:
        return SubprocessRig(units)
