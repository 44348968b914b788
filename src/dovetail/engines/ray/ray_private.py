"""Private names of Ray: every use of a name that Ray does not document is in this module.

A function returns None ("unknown") when the installed Ray does not have its private name, and its caller continues
without the information. `pyproject.toml` limits the Ray version to releases for which a test has found every name.
"""

from __future__ import annotations

import importlib
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Any

AUTO_INIT_MODULE = "ray._private.auto_init_hook"
LOCAL_START_ENVIRONMENT = {"RAY_prestart_worker_first_driver": "0"}
"""Set while a local Ray starts: otherwise Ray starts one idle worker process per CPU, and Dovetail needs one in all. An
environment variable, because Ray ignores one that it does not know, but aborts on an unknown `_system_config` entry."""


class PrivateName(Enum):
    """Each value is `module:attribute`."""

    GLOBAL_WORKER = "ray._private.worker:global_worker"
    AUTO_CONNECT = f"{AUTO_INIT_MODULE}:enable_auto_connect"
    AVAILABLE_PER_NODE = "ray._private.state:available_resources_per_node"
    TOTAL_PER_NODE = "ray._private.state:total_resources_per_node"
    JOBS = "ray._private.state:jobs"
    STATE_ACCESSOR = "ray._private.state:state._connect_and_get_accessor"
    GROUP_ROW = "ray.core.generated.gcs_pb2:PlacementGroupTableData.FromString"
    ACTOR_ROW = "ray.core.generated.gcs_pb2:ActorTableData.FromString"
    RESOURCE_STATE = "ray.core.generated.autoscaler_pb2:GetClusterResourceStateReply.FromString"
    READ_ADDRESS = "ray._private.utils:read_ray_address"
    LOCAL_NODE_IDS = "ray._private.services:find_node_ids"
    ENABLE_TOKEN = "ray._private.authentication.authentication_token_setup:maybe_enable_token_auth_if_token_available"  # noqa: S105 - a name
    CONFIG = "ray._raylet:Config.initialize"
    GCS_CLIENT = "ray._raylet:GcsClient"
    TEMP_DIR = "ray._common.utils:get_default_ray_temp_dir"
    LOCAL_PATHS = "ray.runtime_env.runtime_env:_validate_no_local_paths"
    KV_CLIENT = "ray.experimental.internal_kv:internal_kv_get_gcs_client"


PROBE_SCRIPT = """
import json, os, sys
address, timeout_s, sys.path[:] = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
try:
    from ray._raylet import GcsClient
except ImportError:
    os._exit(1)
print("ready", flush=True)
try:
    found = {"nodes": [node.hex() for node in GcsClient(address=address).get_all_node_info(timeout=timeout_s)]}
except Exception as error:
    found = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(found), flush=True)
os._exit(0)
"""
"""Asks the head at an address for its nodes, in a process of its own: a GCS client that gets no answer blocks for
10 to 40 s and prints to stderr. Arguments: address, timeout in seconds, sys.path as JSON. Output: a line "ready" after
the import, then one line of JSON."""


def find(name: PrivateName) -> Any:
    """The object that the name refers to; None if the installed Ray has no such name."""
    module, _, path = name.value.partition(":")
    try:
        found = importlib.import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError):
        return None
    return found


# --- the connection of this process


def current_node() -> Any:
    """Ray's object for the node that this process is connected to. Only its identity is used, to recognize a
    connection inherited through fork."""
    return getattr(find(PrivateName.GLOBAL_WORKER), "node", None)


def session_name() -> str | None:
    """Name of the Ray session that this process is connected to. `RuntimeContext.get_session_name` is public, but
    newer than the oldest supported Ray."""
    name = getattr(current_node(), "session_name", None)
    return None if name is None else str(name)


def set_auto_init(enabled: bool) -> bool | None:
    """Switch Ray's implicit `ray.init()` on or off; return the previous setting, None if Ray is not imported.

    Assigned, because Ray's own setting, RAY_ENABLE_AUTO_CONNECT, is read once, when Ray is imported: it cannot be
    limited to the time of a run, and the user's program may have imported Ray before."""
    module = sys.modules.get(AUTO_INIT_MODULE)
    before = getattr(module, "enable_auto_connect", None)
    if module is None or before is None:
        return None
    module.enable_auto_connect = enabled  # type: ignore[attr-defined]
    return bool(before)


def reload_config() -> None:
    """Make Ray read RAY_AUTH_MODE again: it caches its configuration when it is imported."""
    initialize = find(PrivateName.CONFIG)
    if initialize is not None:
        initialize("")


def enable_token_if_available() -> bool | None:
    """Set RAY_AUTH_MODE=token if this user has a token; whether there is one."""
    enable = find(PrivateName.ENABLE_TOKEN)
    return None if enable is None else bool(enable(warn_if_disabled=False))


# --- this machine


def last_started_address() -> str | None:
    """Address of the cluster that the last `ray start` on this machine created or joined; empty if there is none."""
    read = find(PrivateName.READ_ADDRESS)
    if read is None:
        return None
    try:
        return str(read() or "")
    except OSError:
        return ""


def local_node_ids() -> set[str] | None:
    """Ids of the Ray nodes whose processes run on this machine."""
    node_ids = find(PrivateName.LOCAL_NODE_IDS)
    return None if node_ids is None else set(node_ids())


def temp_dir() -> Path | None:
    """Folder in which Ray keeps its session folders with logs."""
    folder = find(PrivateName.TEMP_DIR)
    return None if folder is None else Path(folder())


def raylet_pid() -> int | None:
    """Process id of the raylet that started this worker process."""
    pid = os.environ.get("RAY_RAYLET_PID", "")
    return int(pid) if pid.isdigit() else None


def require_no_local_paths(runtime_env: Any) -> None:
    """Raise if a runtime_env names a folder of this machine; None of that is checked where Ray has no such check."""
    validate = find(PrivateName.LOCAL_PATHS)
    if validate is not None:
        validate(runtime_env)


# --- the cluster


def available_resources_per_node() -> dict[str, dict[str, float]] | None:
    """Ray node id -> free amount of each resource. `ray.available_resources` is public and has only the sums."""
    read = find(PrivateName.AVAILABLE_PER_NODE)
    return None if read is None else read()


def total_resources_per_node() -> dict[str, dict[str, float]] | None:
    """Ray node id -> total amount of each resource, with those of placement groups, which `ray.nodes` leaves out."""
    read = find(PrivateName.TOTAL_PER_NODE)
    return None if read is None else read()


def placement_group_rows() -> list[Any] | None:
    """All rows of Ray's placement group table. The public call leaves the time of placement out."""
    parse, accessor = find(PrivateName.GROUP_ROW), find(PrivateName.STATE_ACCESSOR)
    if parse is None or accessor is None:
        return None
    return [parse(row) for row in accessor().get_placement_group_table()]


def actor_rows(state: str) -> list[Any] | None:
    """Rows of Ray's actor table in one state. The public call needs the dashboard and leaves the resources out."""
    parse, accessor = find(PrivateName.ACTOR_ROW), find(PrivateName.STATE_ACCESSOR)
    if parse is None or accessor is None:
        return None
    return [parse(row) for row in accessor().get_actor_table(None, state)]


def job_rows() -> list[dict[str, Any]] | None:
    """Rows of Ray's job table. The public call needs the dashboard."""
    read = find(PrivateName.JOBS)
    return None if read is None else list(read())


def pending_requests() -> list[tuple[dict[str, float], int]] | None:
    """Resources that tasks and actors request and have not got, with counts: Ray's table for its autoscaler."""
    parse = find(PrivateName.RESOURCE_STATE)
    client = getattr(find(PrivateName.GLOBAL_WORKER), "gcs_client", None)
    read = getattr(client, "get_cluster_resource_state", None)
    if parse is None or read is None:
        return None
    state = parse(read()).cluster_resource_state
    return [(dict(one.request.resources_bundle), one.count) for one in state.pending_resource_requests]


def kv_client() -> Any:
    """Client of the head with the `internal_kv_*` methods of its key-value store and `get_all_job_info`."""
    connect = find(PrivateName.KV_CLIENT)
    return None if connect is None else connect()
