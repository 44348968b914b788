"""Recommended num_proc, num_gpus and num_cpus per kind of operator for a cluster (`dovetail recipe advise`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.errors import InfeasibleError
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage import Stage
from dovetail.resources.resources import Resources
from dovetail.scheduling.planner import plan as make_plan

if TYPE_CHECKING:
    from dovetail.resources.cluster import Cluster
    from dovetail.scheduling.plan import Plan

LIGHT_MODEL_SIZES, HEAVY_MODEL_SIZES = ("500MB", "1500MB"), ("2GB", "4GB", "8GB")
"""GPU memory of typical light and heavy models."""
CONCURRENT_OPERATORS = 7
MAX_CPUS_PER_WORKER = 8
"""More CPUs do not help an operator that is not written for them."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Settings of one kind of operator that has the machine to itself."""

    what: str
    memory: str
    """Value of `memory` in a recipe; empty: none."""
    workers: int
    workers_per_card: tuple[int, ...]
    gpus: float
    cpus: int
    concurrent_workers: tuple[int, ...]
    """Workers of each operator if CONCURRENT_OPERATORS of them run at the same time."""

    @property
    def lines(self) -> str:
        """The settings as text of a recipe with auto_op_parallelism: false."""
        settings = [f"memory: '{self.memory}'"] if self.memory else []
        settings += [f"num_proc: {self.workers}"]
        settings += [f"num_gpus: {self.gpus:g}"] if self.gpus else []
        return ", ".join([*settings, f"num_cpus: {self.cpus}"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "memory": self.memory or None,
            "num_proc": self.workers,
            "num_gpus": self.gpus,
            "num_cpus": self.cpus,
            "workers_per_card": list(self.workers_per_card),
            "each_of_seven_at_once": list(self.concurrent_workers),
        }


def recommend(cluster: Cluster) -> list[Recommendation]:
    """Recommendations for light and heavy models, whole cards and CPU operators, as far as they fit."""
    found = []
    if any(node.gpus for node in cluster.nodes):
        rows = [(f"light model, {size}", size) for size in LIGHT_MODEL_SIZES] + [
            (f"heavy model, {size}", size) for size in HEAVY_MODEL_SIZES
        ]
        found += [_recommendation(what, Resources(gpu_memory=size), size, cluster) for what, size in rows]
        found.append(_recommendation("a card for each worker", Resources(gpus=1), "", cluster))
    found.append(_recommendation("CPU operator", Resources(cpus=1), "", cluster))
    return [row for row in found if row is not None]


def _recommendation(what: str, one: Resources, memory: str, cluster: Cluster) -> Recommendation | None:
    plan = _plan_operators(one, cluster)
    if plan is None:
        return None
    unit = plan.units[0]
    cpus = 1
    if unit.shape.cards:  # idle CPUs feed the GPUs, as long as that does not reduce the number of workers
        for more in range(2, MAX_CPUS_PER_WORKER + 1):
            other = _plan_operators(Resources(cpus=more, gpus=one.gpus, gpu_memory=one.gpu_memory), cluster)
            if other is None or other.units[0].workers < unit.workers:
                break
            plan, cpus = other, more
    seats = plan.seats[plan.units[0].stages[0]]
    counts = Counter((seat.node, card) for seat in seats for card in seat.gpus)
    share = seats[0].shares[0] if seats and seats[0].shares else 0.0
    per_card = tuple(count for _, count in sorted(counts.items()))
    together = _plan_operators(one, cluster, CONCURRENT_OPERATORS)
    at_once = tuple(unit.workers for unit in together.units) if together is not None else ()
    return Recommendation(what, memory, plan.units[0].workers, per_card, share, cpus, at_once)


def _plan_operators(one: Resources, cluster: Cluster, operators: int = 1) -> Plan | None:
    stages = [Stage(f"operator_{number}", "any:operator", one, rate=1.0, fuse=False) for number in range(operators)]
    try:
        return make_plan(Pipeline(stages, "advice"), cluster, mode="streaming")
    except InfeasibleError:
        return None
