"""Contract suite on the local engine."""

from __future__ import annotations

import builtins
import os
import signal
import time
from pathlib import Path
from tempfile import mkdtemp
from threading import Event as Never
from typing import TYPE_CHECKING, assert_never

import pytest

from dovetail.control.commands import HostedObject
from dovetail.control.events import LossCause
from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.simulated.world import Gives, Hangs, Kills, OutOfMemory, Raises, Slow
from dovetail.pipeline.stage_code import StageCode
from engines import scene
from engines.contract import ProcessContract
from engines.scene import Does, Held, Rig, Units
from runtime.aids import workers_of
from waiting import knows_pids, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.payload import Segment
    from dovetail.engines.simulated.world import Key
    from engines.contract import SceneOf


BY_VALUE = (scene,)


def outcome_of(does: Does, key: Key, wait: Callable[[], object]) -> list[Key]:
    """The result of an item, or its failure."""
    match does.items.get(key, Gives(1)):
        case Gives(n):
            return [key] if n == 1 else [(*key, child) for child in range(n)]
        case Raises(text):
            kind, _, message = text.partition(": ")
            raise getattr(builtins, kind)(message)
        case Kills(LossCause.EXIT, code):
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


class LocalDoing:
    """Hosted object with the behaviour of a test; held items wait for a file."""

    def __init__(self, does: Does, gate: str) -> None:
        self._does = does
        self._gate = gate

    def setup(self) -> None:
        if self._does.setup_error:
            raise RuntimeError(self._does.setup_error)

    def __call__(self, items: list[Key]) -> list[Key]:
        return [out for key in items for out in outcome_of(self._does, key, self._wait)]

    def _wait(self) -> None:
        while not os.path.exists(self._gate):  # noqa: PTH110
            time.sleep(0.005)


class LocalRig(Rig):
    engine_type: type[LocalEngine] = LocalEngine

    def __init__(self, units: Units) -> None:
        self._folder = Path(mkdtemp())
        self._gate = self._folder / "gate"
        self.engine: LocalEngine = self.engine_type(self._folder)
        self._works = {
            name: LocalDoing(does, str(self._gate)) if isinstance(does, Does) else does for name, does in units.items()
        }

    def hosted(self, name: str, slots: int) -> HostedObject:
        return HostedObject(name, self._works[name], slots)

    def segment(self, keys: list[Key]) -> Segment:
        return self.engine.store(list(keys), keys)

    def read(self, segment: Segment) -> list[Key]:
        return self.engine.load(segment)[1]

    def kill(self, worker: int) -> None:
        os.kill(self._pid(worker), signal.SIGKILL)

    def knows_pids(self, worker: int, ranks: int) -> bool:
        return knows_pids(self.engine, worker, ranks)

    def _pid(self, worker: int) -> int:
        (pid,) = self.engine.processes()[worker][1]
        return pid

    def runs(self, worker: int, message: int) -> bool:
        return message in self.engine.running(worker)

    def let_go(self) -> None:
        self._gate.touch()

    def processes(self) -> int:
        return len(workers_of(self._folder))


@pytest.mark.usefixtures("by_value")
class TestLocalEngine(ProcessContract):
    def rig(self, units: Units) -> Rig:
        return LocalRig(units)

    def test_a_hosted_object_has_its_environment_variables(self, scene_of: SceneOf) -> None:
        code = StageCode("book", scene.Notebook, env={"ITS_OWN": "1"}, runtime_env={"env_vars": {"ALSO": "2"}})
        there = scene_of(book=(code,))
        there.ready(1, "book")
        assert there.result(there.engine.call(1, "book", "variable", "ITS_OWN")) == "1"
        assert there.result(there.engine.call(1, "book", "variable", "ALSO")) == "2"

    def test_calls_between_workers_do_not_pass_through_the_driver(self, scene_of: SceneOf) -> None:
        there = scene_of(one=scene.Neighbour, other=scene.Neighbour)
        there.ready(1, "one")
        there.ready(2, "other")
        assert there.result(there.engine.call(1, "one", "ask_worker", 2, "other", "give_back", 7)) == 7
        written = Path(mkdtemp()) / "written"
        there.engine.call(1, "one", "write_after", 2, 10, str(written))
        until(written.exists, "the calls are answered while the driver does not poll")
