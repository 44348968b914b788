"""How does an agent come to be on a node?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ray
from ray.runtime_env.runtime_env import RuntimeEnv, _validate_no_local_paths
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dovetail.engines.ray.agent import GROUPS, Agent
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dovetail.control.commands import Hosted


FIX_RUNTIME_ENV = "correct runtime_env= of the stage; for variables alone env= is enough"
FIXES_FOLDER = (
    "the address of a .zip that all nodes can read: s3://bucket/code.zip",
    'or ray.init(runtime_env={"working_dir": ...}) in your program, and engine="ray:auto"',
)


def kind_of(hosted: Iterable[Hosted]) -> str:
    """The runtime_env that the stages ask for, as a text; those of a unit agree on it."""
    found: dict[str, Any] = {}
    for one in hosted:
        for stage in one.work if isinstance(one.work, tuple) else ():
            found |= getattr(stage, "runtime_env", None) or {}
    return json.dumps(found, sort_keys=True, default=str) if found else ""


def check_runtime_env(name: str, runtime_env: Mapping[str, Any] | None) -> None:
    """ConfigError: Ray does not take it, or only from `ray.init`, which packs folders of this machine."""
    if not runtime_env:
        return
    try:
        made = RuntimeEnv(**json.loads(json.dumps(dict(runtime_env), default=str)))
    except Exception as error:  # whatever its many parts raise
        raise _cannot_be_used(name, error, FIX_RUNTIME_ENV) from None
    try:
        _validate_no_local_paths(made)
    except Exception as error:
        raise _cannot_be_used(name, error, *FIXES_FOLDER) from None


def _cannot_be_used(name: str, error: Exception, *fixes: str) -> ConfigError:
    return ConfigError(Problem("DT403", f"the runtime_env of stage {name!r} cannot be used: {error}", fixes=fixes))


def start_agent(node_id: str, kind: str) -> Any:
    """Its handle, at once. It takes nothing of what Ray counts: the run's placement groups do."""
    made = ray.remote(concurrency_groups=GROUPS)(Agent)
    try:
        return made.options(
            num_cpus=0,
            num_gpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env=json.loads(kind) if kind else None,
        ).remote()
    except (TypeError, ValueError) as error:
        if not kind:
            raise
        message = f"the runtime_env {kind} cannot be used: {error}"  # which no check has found
        raise ConfigError(Problem("DT403", message, fixes=(FIX_RUNTIME_ENV,))) from None
