"""Contract suite of actor systems on Ray."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from actors.contract import ActorContract
from actors.fault_contract import FaultContract
from actors.test_local_actors import DRIVER
from ray_aids import driver, until_available_is
from runtime.aids import is_there
from waiting import LONG, until

if TYPE_CHECKING:
    from pathlib import Path

    from ray_aids import FakeCluster

pytestmark = pytest.mark.ray
FAULT_LIMIT_S = 1200 if LONG else 300


def on_ray(request: pytest.FixtureRequest) -> dict[str, Any]:
    cluster: FakeCluster = request.getfixturevalue("ray_cluster")
    return {"engine": f"ray:{cluster.address}"}


class TestRayActors(ActorContract):
    @staticmethod
    def place(request: pytest.FixtureRequest) -> dict[str, Any]:
        return on_ray(request)


@pytest.mark.time_limit(FAULT_LIMIT_S)
class TestRayActorFaults(FaultContract):
    @staticmethod
    def place(request: pytest.FixtureRequest) -> dict[str, Any]:
        return on_ray(request)


@pytest.mark.time_limit
def test_a_killed_driver_leaves_no_process_and_no_placement_group(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    before = ray_cluster.available()
    place = json.dumps({"engine": f"ray:{ray_cluster.address}"})
    with driver(ray_cluster, tmp_path, DRIVER, PLACE=place) as script:
        script.says("] \n")
        pids = json.loads(script.output.partition("PIDS ")[2].partition("]")[0] + "]")
        script.kill()
        until(lambda: not any(map(is_there, pids)), "all actors have ended")
    until_available_is(ray_cluster, before, within_s=30)
