"""Contract suite on the simulated engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.commands import HostedObject
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.world import Behaviour, Gives, ItemOutcome, Key, Slow, World
from dovetail.resources.cluster import Cluster
from engines.contract import EngineContract
from engines.scene import Does, Held, Notebook, Rig, Scene, Units

if TYPE_CHECKING:
    from dovetail.control.payload import Segment


class SimulatedRig(Rig):
    def __init__(self, units: Units) -> None:
        self._units = units
        behaviours = {name: self._behaviour(does) for name, does in units.items()}
        self.engine: SimulatedEngine = SimulatedEngine(World(behaviours, tracked=True), Cluster.parse("1x(8cpu)"))

    def _behaviour(self, does: object) -> Behaviour:
        if not isinstance(does, Does):
            return Behaviour(0.01)

        def item(key: Key, attempt: int) -> ItemOutcome:
            found = does.items.get(key, Gives(1))
            return Slow(1000) if isinstance(found, Held) else found

        fails = bool(does.setup_error)
        return Behaviour(0.01, setup_s=0.1, setup_failures=float(fails), setup_error=does.setup_error, item=item)

    def hosted(self, name: str, slots: int) -> HostedObject:
        does = self._units[name]
        return HostedObject(name, None if isinstance(does, Does) else does, slots)

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
        """Held items continue by themselves, much later."""

    def processes(self) -> int:
        return self.engine.workers


class TestSimulatedEngine(EngineContract):
    def rig(self, units: Units) -> Rig:
        return SimulatedRig(units)

    def test_a_cancelled_call_that_has_not_begun_never_runs(self) -> None:
        scene = Scene(self.rig({"book": Notebook}))
        scene.start(1, "book")
        before, cancelled, after = (scene.engine.call(1, "book", "note", "x") for _ in range(3))
        cancelled.cancel()
        assert scene.result(before) == 1
        assert scene.result(after) == 2
