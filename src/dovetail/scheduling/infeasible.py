"""Why can a pipeline not be planned as asked, and which changes would make it work? Each was tried."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from dovetail.errors import InfeasibleError, Problem
from dovetail.resources.shape import ShapeKind
from dovetail.resources.sizes import milli
from dovetail.scheduling.explain import Wish, more_nodes, problems_of
from dovetail.scheduling.packing import Filler, groups_of
from dovetail.scheduling.sizing import nodes_for, size

if TYPE_CHECKING:
    from dovetail.resources.ledger import Ledger
    from dovetail.scheduling.plan import UnitPlan

SHARES_MILLI = (500, 333, 250, 200, 125, 100, 50, 20, 10)


class Chooser(Protocol):
    """Plans units in a mode, or raises an InfeasibleError."""

    def __call__(self, units: list[UnitPlan], ledger: Ledger, mode: str) -> object: ...


def explained(units: list[UnitPlan], ledger: Ledger, choose: Chooser) -> InfeasibleError:
    """Everything in the way of running these units at once."""
    problems = _per_node_problems(units, ledger)
    wishes = [Wish(_name(unit), unit.shape, unit.low) for unit in units if unit.per_node is None]
    problems += problems_of(wishes, ledger)
    if not problems:
        message = f"{len(units)} units fit one by one, but no way was found to seat them together"
        problems = [Problem("DT102", message, tuple(f"{w.name}: {w.workers} x ({w.shape.describe()})" for w in wishes))]
    if len(units) > 1:
        fixes = _fixes(units, wishes, ledger, choose)
        problems = [replace(p, fixes=fixes) if fixes and p.code in ("DT101", "DT102") else p for p in problems]
    return InfeasibleError(problems)


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
        short = [free for free in able if filler.room(free) < unit.per_node]
        if able and not short:
            continue
        message = f"{_name(unit)}: workers_per_node={unit.per_node} does not fit on every node that could seat it"
        rooms = {
            filler.room(free): sum(len(groups[f]) for f in short if filler.room(f) == filler.room(free))
            for free in short
        }
        evidence = [f"{nodes} nodes have room for {room}" for room, nodes in sorted(rooms.items())]
        evidence = evidence or [f"no node can seat one worker ({unit.shape.describe()})"]
        least = min(rooms, default=0)
        fixes = (f"workers_per_node={least}",) if least else ('workers="auto" instead',)
        problems.append(Problem("DT104", message, tuple(evidence), fixes))
    return problems


def _fixes(units: list[UnitPlan], wishes: list[Wish], ledger: Ledger, choose: Chooser) -> tuple[str, ...]:
    """Other modes, no counts, shares instead of whole GPUs, more nodes: whichever works."""
    found = []
    pinned = [unit for unit in units if unit.low > 1 or unit.high is not None or unit.per_node is not None]
    freed = [replace(unit, low=1, high=None, per_node=None) for unit in units]
    if pinned and size([unit.demand for unit in freed], ledger) is not None:
        found.append(f'workers="auto" for {_names(pinned)}')
    shared = _shared(freed, ledger)
    if shared is not None:
        share, whole = shared
        counts = 'workers="auto", ' if pinned else ""
        found.append(f"{counts}gpus={milli(share)} for {_names(whole)}")
    for mode in ("sequential", "waves"):
        try:
            choose(units, ledger, mode)
        except InfeasibleError:
            continue
        found.append(f'mode="{mode}"')
    found += more_nodes(wishes, ledger)
    return tuple(fix if number == 0 else f"or {fix}" for number, fix in enumerate(found))


def _names(units: list[UnitPlan]) -> str:
    return ", ".join(stage for unit in units for stage in unit.stages)


def _shared(units: list[UnitPlan], ledger: Ledger) -> tuple[int, list[UnitPlan]] | None:
    """The largest share of a card at which all units fit, for those that ask for one whole card."""
    whole = [unit for unit in units if unit.shape.kind is ShapeKind.WHOLE_NUMBERED_GPU and unit.shape.cards == 1]
    if not whole:
        return None
    for share in SHARES_MILLI:
        changed = [
            replace(unit, shape=replace(unit.shape, kind=ShapeKind.FRACTIONAL_GPU, gpu_milli=share))
            if unit in whole
            else unit
            for unit in units
        ]
        if size([unit.demand for unit in changed], ledger) is not None:
            return share, whole
    return None
