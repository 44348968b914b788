"""The plan of an actor system in the form in which runs claim resources, and back. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.actors.actor_plan import PlannedProcess
from dovetail.scheduling.plan import Plan, UnitPlan
from dovetail.scheduling.stage_rates import ASSUMED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.actors.actor_plan import ActorPlan
    from dovetail.actors.colocation import Bundle
    from dovetail.resources.seat import Seat

MODE = "actors"


def to_claim_plan(plan: ActorPlan, bundles: Sequence[Bundle]) -> Plan:
    """Units for a claim, one per kind of process, with the minimum that the system needs to start and the maximum that
    it can use."""
    units, seats = [], {}
    for bundle in bundles:
        for template, per_bundle in bundle.processes:
            mine = [process for process in plan.processes if process.template.unit == template.unit]
            units.append(
                UnitPlan(
                    name=template.unit,
                    shape=template.shape,
                    rate=1.0,
                    low=bundle.low * per_bundle,
                    high=bundle.high * per_bundle,
                    stages=(template.unit,),
                    workers=len(mine),
                    rate_source=ASSUMED,
                )
            )
            seats[template.unit] = tuple(seat for process in mine for seat in process.seats)
    return Plan(
        name=plan.name,
        mode=MODE,
        requested=MODE,
        reason="all roles run at the same time",
        cluster=plan.cluster,
        units=tuple(units),
        seats=seats,
        rate=None,
        bound=None,
        bottleneck=None,
        binding=None,
        use={},
        fragmentation=0.0,
        idle_gpus=plan.idle_gpus,
        headroom=0.0,
        warnings=plan.warnings,
    )


def planned_processes(plan: Plan, bundles: Sequence[Bundle]) -> list[PlannedProcess]:
    """The processes of a granted plan, with the index of each instance."""
    found = []
    for bundle in bundles:
        for template, _ in bundle.processes:
            seats = plan.seats[template.unit]
            for number, first in enumerate(range(0, len(seats), template.ranks)):
                instances = tuple(
                    (role, number * per_process + position)
                    for role, per_process in template.instances
                    for position in range(per_process)
                )
                own: tuple[Seat, ...] = tuple(seats[first : first + template.ranks])
                found.append(PlannedProcess(template, own, instances))
    return found
