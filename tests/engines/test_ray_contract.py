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

    driver_context = DriverContext(tuple(sys.path), os.getcwd(), {})  # noqa: PTH109
    nodes = {NODE: Node(NODE, 4000)}
    return RayEngine(
        folder, RayRunContext("test", nodes, {NODE: node_id}, driver_context, write_marker(folder), **more)
    )


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


class TestCallsOfADriverOnAnotherMachine:
    """Calls of the driver as calls of Ray. All nodes of the tests are on this machine."""

    _on_a_node = TestRayEngine._on_a_node
    rig = TestRayEngine.rig
    scene_of = ProcessContract.scene_of

    @pytest.fixture(autouse=True)
    def _elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dovetail.engines.ray.agent_pool.machine_id", lambda: "another machine")

    test_a_call_on_a_hosted_object_returns_its_result = (
        ProcessContract.test_a_call_on_a_hosted_object_returns_its_result
    )
    test_a_call_that_raises_ends_with_its_exception = ProcessContract.test_a_call_that_raises_ends_with_its_exception
    test_calls_end_when_their_worker_does = ProcessContract.test_calls_end_when_their_worker_does
    test_calls_end_when_the_engine_is_closed = ProcessContract.test_calls_end_when_the_engine_is_closed
    test_a_call_from_the_polling_thread_is_sent_at_once = (
        ProcessContract.test_a_call_from_the_polling_thread_is_sent_at_once
    )
    test_calls_arrive_in_the_order_made = ProcessContract.test_calls_arrive_in_the_order_made
    test_a_drain_finishes_more_calls_than_a_busy_worker_has_room_for = (
        ProcessContract.test_a_drain_finishes_more_calls_than_a_busy_worker_has_room_for
    )
    test_a_drain_finishes_calls_made_before_it_and_refuses_later_ones = (
        ProcessContract.test_a_drain_finishes_calls_made_before_it_and_refuses_later_ones
    )
    test_a_call_that_waits_can_be_cancelled = ProcessContract.test_a_call_that_waits_can_be_cancelled
    test_a_call_of_health_takes_no_slot = ProcessContract.test_a_call_of_health_takes_no_slot
    test_a_running_sync_method_keeps_its_slot_when_its_call_is_cancelled = (
        ProcessContract.test_a_running_sync_method_keeps_its_slot_when_its_call_is_cancelled
    )
    test_a_running_async_method_is_cancelled_at_its_deadline = (
        ProcessContract.test_a_running_async_method_is_cancelled_at_its_deadline
    )
    test_large_arguments_and_results_are_passed = ProcessContract.test_large_arguments_and_results_are_passed
    test_every_rank_of_a_gang_can_be_called = ProcessContract.test_every_rank_of_a_gang_can_be_called
