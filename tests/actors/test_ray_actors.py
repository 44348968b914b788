"""Contract suite of actor systems on Ray."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from actors.contract import TOKEN, ActorContract
from actors.fault_contract import FaultContract
from actors.test_local_actors import DRIVER
from ray_aids import driver, until_available_is
from runtime.aids import is_there
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from pathlib import Path

    import dovetail as dt
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

    def test_a_variable_of_one_role_does_not_reach_others(self, live: dt.LiveSystem) -> None:
        assert live.pool.one.variable(TOKEN).result(PATIENCE_S) is None


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
        assert ray_cluster.groups()
        script.kill()
        within_s = 2 if LONG else PATIENCE_S
        took = until(lambda: not any(map(is_there, pids)), "all actors have ended", within_s)
        until_available_is(ray_cluster, before, within_s - took)
        assert not ray_cluster.groups()
