"""Table of the plan of a recipe, one line per operator."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dovetail.scheduling.plan_report import MAX_WIDTH
from dovetail.text_format import fit_table

if TYPE_CHECKING:
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.seat import Seat
    from dovetail.scheduling.plan import Plan, UnitPlan

RATE_SOURCE_MARKS = {"measured": "^"}
MAX_CARDS_SHOWN = 8


def plan_table(recipe: Recipe, plan: Plan, width: int = MAX_WIDTH) -> list[str]:
    """Lines of a table of a plan's operators, cut to the width; fused operators share their workers."""
    units = {stage: unit for unit in plan.units for stage in unit.stages}
    rows = [["operator", "workers", "one worker", "workers per card", "rows/s each", "rows/s"]]
    if len(plan.waves) > 1:
        rows[0].insert(0, "wave")
    before: UnitPlan | None = None
    for step in recipe.steps:
        unit = units[step.name]
        again = unit is before
        before = unit
        mark = " *" if unit.name == plan.bottleneck else ""
        cells = [f"{step.op}{mark}"]
        if again:
            cells += ["same", "", "", "", ""]
        else:
            each = f"{unit.rate_text()}{RATE_SOURCE_MARKS.get(unit.rate_source, '')}"
            seats = plan.seats[step.name]
            cells += [
                str(unit.workers),
                unit.shape.describe(),
                _workers_per_card(seats),
                each,
                unit.throughput_text(),
            ]
        rows.append(([str(unit.wave + 1)] if len(plan.waves) > 1 else []) + cells)
    first = int(len(plan.waves) > 1)
    lines = fit_table(rows, width, left=len(rows[0]), cut=(first + 2, first))
    sources = {unit.rate_source for unit in plan.units}
    legend = [f"{mark} {source}" for source, mark in RATE_SOURCE_MARKS.items() if source in sources]
    limits = ["* limits the rate"] if plan.bottleneck is not None else []
    return [*lines, "; ".join([*limits, "same: the workers of the row above", *legend])]


def _workers_per_card(seats: tuple[Seat, ...]) -> str:
    """Workers on each card that has any: "5 + 5"."""
    counts = Counter((seat.node, card) for seat in seats for card in seat.gpus)
    if not counts:
        return "-"
    shown = [str(count) for _, count in sorted(counts.items())]
    return " + ".join(shown) if len(shown) <= MAX_CARDS_SHOWN else f"{min(counts.values())} to {max(counts.values())}"
