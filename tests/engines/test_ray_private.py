"""Private names of Ray: all exist in the installed Ray, and everything works without each of them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.engines.ray import ray_private
from dovetail.engines.ray.ray_private import PrivateName, find

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray_aids import FakeCluster

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.own_attachment
REPOSITORY = Path(__file__).parents[2]
FUNCTIONS: dict[PrivateName, Callable[[], Any]] = {
    PrivateName.GLOBAL_WORKER: ray_private.session_name,
    PrivateName.AUTO_CONNECT: lambda: None,
    PrivateName.AVAILABLE_PER_NODE: ray_private.available_resources_per_node,
    PrivateName.TOTAL_PER_NODE: ray_private.total_resources_per_node,
    PrivateName.JOBS: ray_private.job_rows,
    PrivateName.STATE_ACCESSOR: ray_private.placement_group_rows,
    PrivateName.GROUP_ROW: ray_private.placement_group_rows,
    PrivateName.ACTOR_ROW: lambda: ray_private.actor_rows("ALIVE"),
    PrivateName.RESOURCE_STATE: ray_private.pending_requests,
    PrivateName.READ_ADDRESS: ray_private.last_started_address,
    PrivateName.LOCAL_NODE_IDS: ray_private.local_node_ids,
    PrivateName.ENABLE_TOKEN: ray_private.enable_token_if_available,
    PrivateName.CONFIG: ray_private.reload_config,
    PrivateName.GCS_CLIENT: lambda: None,
    PrivateName.TEMP_DIR: ray_private.temp_dir,
    PrivateName.LOCAL_PATHS: lambda: ray_private.require_no_local_paths({"working_dir": "/here"}),
    PrivateName.KV_CLIENT: ray_private.kv_client,
}


def missing(monkeypatch: pytest.MonkeyPatch, *names: PrivateName) -> None:
    monkeypatch.setattr(ray_private, "find", lambda name: None if name in names else find(name))


@pytest.mark.parametrize("name", PrivateName)
def test_every_private_name_exists_in_the_installed_ray(name: PrivateName) -> None:
    assert find(name) is not None, f"{name.value} is missing in Ray {ray.__version__}"


@pytest.mark.parametrize("name", PrivateName)
def test_a_missing_name_is_unknown_and_no_error(name: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch, name)
    assert FUNCTIONS[name]() is None


@pytest.mark.parametrize("value", ["ray._private.no_such_module:name", "ray:no_such_name", "ray:nodes.no_such_name"])
def test_find_returns_none_for_modules_and_attributes_that_do_not_exist(value: str) -> None:
    class Name:
        def __init__(self) -> None:
            self.value = value

    assert find(Name()) is None  # type: ignore[arg-type]


def test_auto_init_is_unknown_where_ray_has_no_such_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_private, "AUTO_INIT_MODULE", "ray._private.no_such_module")
    assert ray_private.set_auto_init(False) is None


def test_the_raylet_is_unknown_outside_a_ray_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    assert ray_private.raylet_pid() is None
    monkeypatch.setenv("RAY_RAYLET_PID", "17")
    assert ray_private.raylet_pid() == 17


def test_no_other_module_uses_private_names_of_ray() -> None:
    private = re.compile(r"\bray\.(_private|_raylet|_common|core|experimental)\b|global_worker|_internal_kv")
    package = REPOSITORY / "src/dovetail"
    found = [
        f"{path.relative_to(package)}:{number}"
        for path in package.rglob("*.py")
        if path.name != "ray_private.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert found == []


def test_the_installed_ray_is_within_the_allowed_versions() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    [(low, high)] = re.findall(r'^ray = \["ray>=([0-9.]+),<([0-9.]+)"\]', text, re.MULTILINE)
    version, least, limit = (tuple(map(int, text.split(".")[:2])) for text in (ray.__version__, low, high))
    assert least <= version < limit


def test_the_cluster_is_discovered_without_any_private_name(
    ray_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.engines.ray.cluster_usage import read_cluster_usage
    from dovetail.engines.ray.discovery import discover

    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        known = discover()
        missing(monkeypatch, *PrivateName)
        found = discover(known=known.ids)
        usage = read_cluster_usage(found)
    finally:
        ray.shutdown()
    assert found.ids == known.ids
    assert found.cluster.nodes == known.cluster.nodes
    assert any("does not report usage per node" in note for note in found.notes)
    assert {use.node for use in usage.nodes} >= set(found.ids)


# --- texts of Ray that Dovetail compares


def contains(path: str, text: str) -> bool:
    return text.encode() in Path(ray.__file__).parent.joinpath(path).read_bytes()


def test_the_texts_that_are_matched_exist_in_the_installed_ray() -> None:
    from dovetail.engines.ray import local_cluster, message_handlers

    raylet, head = "core/src/ray/raylet/raylet", "core/src/ray/gcs/gcs_server"
    assert contains(raylet, message_handlers.NO_WORKER_MESSAGE)
    assert contains(head, message_handlers.NODE_DIED_MESSAGE)
    assert contains("exceptions.py", message_handlers.CREATION_MESSAGE)
    assert contains(raylet, local_cluster.BUSY_MARKER)
    assert contains("_private/utils.py", "ersion mismatch")
    assert contains("_private/utils.py", "was started with")
    assert contains("_raylet.so", "uthenticat")


def test_the_states_that_are_compared_exist_in_the_installed_ray() -> None:
    from ray.core.generated import gcs_pb2

    from dovetail.engines.ray.cluster_usage import ALIVE, PENDING_REASONS, WAITING_STATES
    from dovetail.engines.ray.discovery import HOLDING_STATES
    from dovetail.engines.ray.placement_groups import DECIDED_STATES

    groups = gcs_pb2.PlacementGroupTableData.PlacementGroupState.keys()
    assert {*HOLDING_STATES, "PENDING", "REMOVED"} <= set(groups)
    assert {*DECIDED_STATES, *PENDING_REASONS} <= set(gcs_pb2.PlacementGroupStats.SchedulingState.keys())
    assert {ALIVE, *WAITING_STATES} <= set(gcs_pb2.ActorTableData.ActorState.keys())
