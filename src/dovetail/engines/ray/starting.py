"""How does an agent come to be on a node?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dovetail.engines.ray.agent import GROUPS, Agent
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.control.commands import Hosted


FIX_RUNTIME_ENV = "correct runtime_env= of the stage; for variables alone env= is enough"


def kind_of(hosted: Iterable[Hosted]) -> str:
    """The runtime_env that the stages ask for, as a text; those of a unit agree on it."""
    found: dict[str, Any] = {}
    for one in hosted:
        for stage in one.work if isinstance(one.work, tuple) else ():
            found |= getattr(stage, "runtime_env", None) or {}
    return json.dumps(found, sort_keys=True, default=str) if found else ""


def check_runtime_env(hosted: Hosted) -> None:
    """ConfigError: Ray does not take it."""
    kind = kind_of([hosted])
    if not kind:
        return
    try:
        ray.runtime_env.RuntimeEnv(**json.loads(kind))
    except Exception as error:  # whatever its many parts raise
        message = f"the runtime_env of stage {hosted.name!r} cannot be used: {error}"
        raise ConfigError(Problem("DT403", message, fixes=(FIX_RUNTIME_ENV,))) from None


def start_agent(node_id: str, kind: str) -> Any:
    """Its handle, at once. It takes nothing of what Ray counts: the run's placement groups do."""
    made = ray.remote(concurrency_groups=GROUPS)(Agent)
    return made.options(
        num_cpus=0,
        num_gpus=0,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        runtime_env=json.loads(kind) if kind else None,
    ).remote()
