"""Whether any registered worker can run a job: "no worker can run this", what it needs and what the workers have. Pure.

A worker registers what it has as `WorkerInfo.details["resources"]`: `Cluster.to_dict()` of a cluster with one node, or
the specification of a node (`Node.spec`). Without it, the worker is not limited.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, Problem, did_you_mean
from dovetail.jobs.batch import unmarked_shape
from dovetail.jobs.job import NO_RESOURCES
from dovetail.resources.cluster import Cluster
from dovetail.resources.fit import Fit
from dovetail.resources.free_resources import NodeKind
from dovetail.scheduling.diagnose.misfit import misfit_reasons

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.jobs.store import WorkerInfo
    from dovetail.resources.cluster import Node
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape

NO_WORKER = "DT616"
WORKERS_SHOWN = 5


def placement_problem(queue: str, shape: Shape, workers: Sequence[WorkerInfo]) -> Problem | None:
    """The reason why none of these workers can ever run such a job; None if one can."""
    if not workers:
        message = f"no worker can run this: no worker is running for the queue {queue!r}"
        return Problem(NO_WORKER, message, fixes=(f"dovetail worker --queue URL --queues {queue} --app pkg.module",))
    serving = [worker for worker in workers if queue in worker.queues]
    if not serving:
        known = sorted({name for worker in workers for name in worker.queues})
        message = f"no worker can run this: none serves the queue {queue!r}{did_you_mean(queue, known)}"
        evidence = (f"queues with workers: {', '.join(known)}",)
        fixes = (f"dovetail worker --queue URL --queues {queue} --app pkg.module", f'queue="{known[0]}"')
        return Problem(NO_WORKER, message, evidence, fixes)
    shape = unmarked_shape(shape)
    if shape == NO_RESOURCES:
        return None
    if shape.rank == NO_RESOURCES:
        slots = sum(worker.slots for worker in serving)
        if slots >= shape.ranks:
            return None
        message = f"no worker can run this: it has {shape.ranks} ranks, and the workers of its queue have {slots} slots"
        return Problem(NO_WORKER, message, fixes=(f"ranks={slots}", "start another worker")) if slots else None
    fit = Fit(shape.rank)
    lines, fitting = [], 0
    for worker in serving:
        node = worker_node(worker.details)
        if node is None:
            return None
        free = NodeKind(node).untouched()
        fitting += fit.capacity(free)
        if fitting >= shape.ranks:
            return None
        if fit.assignments(free):
            lines.append(f"{worker.id} has {node.spec(exact=False)}: {fit.capacity(free)} of {shape.ranks} ranks fit")
            continue
        reasons = "; ".join(misfit_reasons(fit, free)) or "does not fit"
        lines.append(f"{worker.id} has {node.spec(exact=False)}: {reasons}")
    if len(lines) > WORKERS_SHOWN:
        lines[WORKERS_SHOWN:] = [f"and {len(lines) - WORKERS_SHOWN} more workers"]
    message = f"no worker can run this: it needs {shape.describe() or 'nothing'}"
    fixes = ("request less: resources=dt.Resources(...)", "start a worker on a machine that has it")
    return Problem(NO_WORKER, message, tuple(lines), fixes)


def worker_capacity(details: Mapping[str, object]) -> FreeResources | None:
    """All resources of a worker; None if they are not limited, or not known."""
    node = worker_node(details)
    return None if node is None else NodeKind(node).untouched()


def worker_node(details: Mapping[str, object]) -> Node | None:
    """The node that a worker offers; None: not limited, or not known."""
    found = details.get("resources")
    if isinstance(found, dict):
        return _node_of_data(json.dumps(found, sort_keys=True))
    return _parsed(found) if isinstance(found, str) else None


@lru_cache(1000)
def _node_of_data(text: str) -> Node | None:
    try:
        return Cluster.from_dict(json.loads(text)).nodes[0]
    except (ConfigError, KeyError, TypeError, ValueError, IndexError):  # written by another version
        return None


@lru_cache(1000)
def _parsed(spec: str) -> Node | None:
    try:
        return Cluster.parse(f"1x{spec}").nodes[0]
    except ConfigError:  # written by another version
        return None
