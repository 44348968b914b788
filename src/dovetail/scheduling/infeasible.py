"""Why can a pipeline not be planned as asked, and which changes would make it work? Each was tried."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from dovetail.errors import InfeasibleError, Problem
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.shape import ShapeKind
from dovetail.resources.sizes import milli
from dovetail.scheduling.explain import Wish, more_nodes_text, problems_of
from dovetail.scheduling.packing import Filler, groups_of
from dovetail.scheduling.sizing import nodes_for

if TYPE_CHECKING:
    from dovetail.scheduling.packing import Groups
    from dovetail.scheduling.plan import UnitPlan

SHARES_MILLI = (500, 333, 250, 200, 125, 100, 50, 20, 10)


class Feasible(Protocol):
    """Whether every unit would get its least number of workers in a mode."""

    def __call__(self, units: list[UnitPlan], ledger: Ledger, mode: str) -> bool: ...


def explained(
    short: list[list[UnitPlan]], units: list[UnitPlan], ledger: Ledger, feasible: Feasible
) -> InfeasibleError:
    """Everything in the way of running each group of these units at once; `units` are all that the pipeline has."""
    problems = []
    for group in short:
        problems += _problems(group, ledger)
    if any(len(group) > 1 for group in short):
        fixes = _fixes(units, ledger, feasible)
        problems = [replace(p, fixes=fixes) if fixes and p.code in ("DT101", "DT102") else p for p in problems]
    return InfeasibleError(problems)


def _problems(units: list[UnitPlan], ledger: Ledger) -> list[Problem]:
    groups = groups_of(ledger)
    wishes = [Wish(_name(unit), unit.shape, _workers(unit, groups)) for unit in units]
    problems = _per_node_problems(units, ledger)
    told = {problem.message.split(":")[0] for problem in problems}
    problems += problems_of([wish for wish in wishes if wish.name not in told], ledger)
    if problems:
        return problems
    message = f"{len(units)} units fit one by one, but no way was found to seat them together"
    return [Problem("DT102", message, tuple(f"{w.name}: {w.workers} x ({w.shape.describe()})" for w in wishes))]


def _workers(unit: UnitPlan, groups: Groups) -> int:
    """The least workers that it has to have."""
    if unit.per_node is None:
        return unit.low
    return unit.per_node * sum(len(groups[free]) for free in nodes_for(unit.demand, groups))


def _name(unit: UnitPlan) -> str:
    return f"stage {unit.name!r}"


def _per_node_problems(units: list[UnitPlan], ledger: Ledger) -> list[Problem]:
    problems = []
    groups = groups_of(ledger)
    for unit in units:
        if unit.per_node is None:
            continue
        filler = Filler(unit.shape)
        able = nodes_for(unit.demand, groups)
        rooms_of = {free: filler.room(free) // unit.shape.ranks for free in able}
        short = [free for free in able if rooms_of[free] < unit.per_node]
        if able and not short:
            continue
        message = f"{_name(unit)}: workers_per_node={unit.per_node} does not fit on every node that could seat it"
        rooms = {rooms_of[free]: sum(len(groups[f]) for f in short if rooms_of[f] == rooms_of[free]) for free in short}
        evidence = [f"{nodes} nodes have room for {room}" for room, nodes in sorted(rooms.items())]
        evidence = evidence or [f"no node can seat one worker ({unit.shape.describe()})"]
        least = min(rooms, default=0)
        fixes = (f"workers_per_node={least}",) if least else ('workers="auto" instead',)
        problems.append(Problem("DT104", message, tuple(evidence), fixes))
    return problems


def _fixes(units: list[UnitPlan], ledger: Ledger, feasible: Feasible) -> tuple[str, ...]:
    """No counts, shares instead of whole GPUs, other modes, more nodes: whichever works, tried as it is written."""
    found = []
    pinned = [unit for unit in units if unit.low > 1 or unit.high is not None or unit.per_node is not None]
    if pinned and feasible([_freed(unit) for unit in units], ledger, "streaming"):
        found.append(f'workers="auto" for {_names(pinned)}')
    found += _shares(units, pinned, ledger, feasible)
    found += [f'mode="{mode}"' for mode in ("sequential", "waves") if feasible(units, ledger, mode)]
    found += _more_nodes(units, ledger, feasible)
    return tuple(fix if number == 0 else f"or {fix}" for number, fix in enumerate(found))


def _freed(unit: UnitPlan) -> UnitPlan:
    return replace(unit, low=1, high=None, per_node=None)


def _names(units: list[UnitPlan]) -> str:
    return ", ".join(stage for unit in units for stage in unit.stages)


def _shares(units: list[UnitPlan], pinned: list[UnitPlan], ledger: Ledger, feasible: Feasible) -> list[str]:
    """The largest share of a card that will do for those who ask for one whole card; their counts go, others stay."""
    whole = [unit for unit in units if unit.shape.kind is ShapeKind.WHOLE_NUMBERED_GPU and unit.shape.cards == 1]
    if not whole:
        return []
    counts = 'workers="auto", ' if any(unit in pinned for unit in whole) else ""
    for share in SHARES_MILLI:
        changed = [
            replace(_freed(unit), shape=replace(unit.shape, kind=ShapeKind.FRACTIONAL_GPU, gpu_milli=share))
            if unit in whole
            else unit
            for unit in units
        ]
        if feasible(changed, ledger, "streaming"):
            return [f"{counts}gpus={milli(share)} for {_names(whole)}"]
    return []


def _more_nodes(units: list[UnitPlan], ledger: Ledger, feasible: Feasible) -> list[str]:
    """How many more nodes like the largest one would do."""
    if any(unit.per_node is not None for unit in units):
        return []
    largest = max(ledger.cluster.nodes, key=lambda node: (len(node.gpus), node.usable_cpu_milli, node.memory_bytes))

    def enough(more: int) -> bool:
        extra = tuple(replace(largest, name=f"one more: {number}") for number in range(more))
        return feasible(units, Ledger(Cluster((*ledger.cluster.nodes, *extra)), ledger.seats()), "streaming")

    return more_nodes_text(largest, enough)
