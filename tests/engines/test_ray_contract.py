"""Contract suite on the Ray engine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.control.commands import HostedObject
from engines import scene, test_local_contract
from engines.contract import ProcessContract
from engines.scene import NODE, Does, Rig, Units
from engines.test_local_contract import LocalDoing, LocalRig

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.control.payload import Segment
    from dovetail.engines.ray.engine import RayEngine
    from ray_aids import FakeCluster

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("by_value")]
BY_VALUE = (scene, test_local_contract)


def engine_on(node_id: str, folder: Path, **more: Any) -> RayEngine:
    """An engine whose only node, NODE, is the Ray node with this id."""
    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.engines.ray.agent_pool import RayRunContext
    from dovetail.engines.ray.engine import RayEngine
    from dovetail.engines.ray.shared_storage import write_marker
    from dovetail.resources.cluster import Node

    home = DriverContext(tuple(sys.path), os.getcwd(), {})  # noqa: PTH109
    nodes = {NODE: Node(NODE, 4000)}
    return RayEngine(folder, RayRunContext("test", nodes, {NODE: node_id}, home, write_marker(folder), **more))


class RayRig(LocalRig):
    engine: RayEngine  # type: ignore[assignment]

    def __init__(self, units: Units, node_id: str, folder: Path) -> None:
        self._folder = folder
        self._gate = folder / "gate"
        self.engine = engine_on(node_id, folder)
        self._works = {
            name: LocalDoing(does, str(self._gate)) if isinstance(does, Does) else does for name, does in units.items()
        }

    def hosted(self, name: str, slots: int) -> HostedObject:
        return HostedObject(name, self._works[name], slots)

    def segment(self, keys: list[Any]) -> Segment:
        return self.engine.store(list(keys), keys)


class TestRayEngine(ProcessContract):
    @pytest.fixture(autouse=True)
    def _on_a_node(self, ray_cluster: FakeCluster, tmp_path: Path) -> None:
        from dovetail.engines.ray.attachment import RayAddress, attach

        attach(RayAddress.parse(f"ray:{ray_cluster.address}"))
        self._node_id = ray_cluster.nodes["d"].node_id
        self._tmp = tmp_path

    def rig(self, units: Units) -> Rig:
        return RayRig(units, self._node_id, self._tmp)
