"""Plans beside other runs: the unreserved part of a cluster, a plan for it, and the minimum and maximum seats of a
plan.

Positions of GPUs differ between the whole cluster and its unreserved part; `expand_plan` converts them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.errors import InfeasibleError
from dovetail.resources.amounts import CPU, CUSTOM_PREFIX, HOST, MEMORY, cluster_capacity, sum_seats
from dovetail.resources.free_resources import WHOLE_CARD_MILLI

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster, Node
    from dovetail.resources.seat import Seat, Seats
    from dovetail.scheduling.plan import Plan, UnitPlan


def remaining_cluster(cluster: Cluster, reserved: Seats) -> Cluster:
    """The unreserved part of a cluster. A GPU that is partly used by others is left out, unless there is no other."""
    taken = sum_seats(reserved)
    nodes = [_remaining_node(node, taken, _usable_cards(node, taken)) for node in cluster.nodes]
    useful = [node for node in nodes if node.usable_cpu_milli > 0 or node.gpus]
    return replace(cluster, nodes=tuple(useful or nodes[:1]))


def _remaining_node(node: Node, taken: Amounts, cards: list[int]) -> Node:
    cpu_milli = taken.get((node.name, HOST, CPU), 0)
    memory_bytes = taken.get((node.name, HOST, MEMORY), 0)
    custom = [(name, have - taken.get((node.name, HOST, CUSTOM_PREFIX + name), 0)) for name, have in node.custom]
    return replace(
        node,
        cpu_milli=max(node.kept_back_milli, node.cpu_milli - cpu_milli),
        memory_bytes=max(0, node.memory_bytes - memory_bytes),
        gpus=tuple(node.gpus[card] for card in cards),
        custom=tuple((name, left) for name, left in custom if left > 0),
    )


def _usable_cards(node: Node, taken: Amounts) -> list[int]:
    """Positions of the GPUs to plan with."""
    touched = {card for name, card, _ in taken if name == node.name}
    untouched = [card for card in range(len(node.gpus)) if card not in touched]
    partly = [card for card in range(len(node.gpus)) if taken.get((node.name, card, "milli"), 0) < WHOLE_CARD_MILLI]
    return untouched or partly


def expand_plan(
    plan: Plan, cluster: Cluster, reserved: Seats, why: str = "other runs use a part of this machine"
) -> Plan:
    """Plan for a whole cluster from a plan for its `remaining_cluster`, in which GPUs have other positions."""
    if not reserved:
        return plan
    taken = sum_seats(reserved)
    kept = {node.name: _usable_cards(node, taken) for node in cluster.nodes}

    def there(seat: Seat) -> Seat:
        shares = tuple(share._replace(card=kept[seat.node][share.card]) for share in seat.cards)
        return seat._replace(cards=shares)

    seats = {stage: tuple(map(there, mine)) for stage, mine in plan.seats.items()}
    warning = f"{why}: planned for {plan.cluster.spec(exact=False)} of {cluster.spec(exact=False)}"
    return replace(plan, cluster=cluster, seats=seats, warnings=(*plan.warnings, warning))


def plan_around(make: Callable[[Cluster], Plan], cluster: Cluster, reserved: Seats) -> Plan:
    """Plan for the unreserved part, converted to the whole cluster. Partly used GPUs cannot be planned with: if the
    pipeline needs them, plan as if the cluster were free; the run then begins with a replan."""
    try:
        return expand_plan(make(remaining_cluster(cluster, reserved)), cluster, reserved)
    except InfeasibleError:
        if not reserved:
            raise
        return make(cluster)


def max_seats(plan: Plan) -> Seats | None:
    """Maximum that a run can use; None if a unit has no maximum number of workers, or there are several waves."""
    if any(unit.high is None or unit.workers < unit.high for unit in plan.units):
        return None
    waves = [
        tuple(seat for unit in plan.units if unit.wave == wave for seat in plan.seats[unit.stages[0]])
        for wave in range(len(plan.waves))
    ]
    return waves[0] if len(waves) == 1 else None


def min_seats(plan: Plan) -> Seats:
    """Minimum of a run: the minimum number of workers of every unit, for the wave that needs most."""
    capacity = cluster_capacity(plan.cluster)
    waves = [
        tuple(seat for unit in plan.units if unit.wave == wave for seat in _min_unit_seats(plan, unit))
        for wave in range(len(plan.waves))
    ]
    return max(waves, key=lambda seats: sum(amount / capacity[key] for key, amount in sum_seats(seats).items()))


def required_labels(plan: Plan) -> tuple[str, ...]:
    """Node labels that the stages require."""
    return tuple(sorted({name for unit in plan.units for name, _ in unit.shape.labels}))


def _min_unit_seats(plan: Plan, unit: UnitPlan) -> Seats:
    seats = plan.seats[unit.stages[0]]
    return seats if unit.per_node is not None else seats[: unit.low * unit.shape.ranks]
