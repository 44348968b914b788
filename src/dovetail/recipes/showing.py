"""How is the plan of a recipe shown? A line per operator: workers, what each needs, and how they share the cards."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.seat import Seat
    from dovetail.scheduling.plan import Plan, UnitPlan

MARKS = {"assumed": "?", "measured": "^"}
CARDS_SHOWN = 8


def operator_table(recipe: Recipe, plan: Plan) -> list[str]:
    """Lines; fused operators share their workers."""
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
            each = f"{unit.rate:.4g}{MARKS.get(unit.rate_source, '')}"
            seats = plan.seats[step.name]
            cells += [str(unit.workers), unit.shape.describe(), _cards(seats), each, f"{unit.throughput:.4g}"]
        rows.append(([str(unit.wave + 1)] if len(plan.waves) > 1 else []) + cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    sources = {unit.rate_source for unit in plan.units}
    legend = [f"{mark} {source}" for source, mark in MARKS.items() if source in sources]
    return [*lines, "; ".join(["* limits the rate", "same: the workers of the line above", *legend])]


def _cards(seats: tuple[Seat, ...]) -> str:
    """How many workers sit on each card that has any: "5 + 5"."""
    counts = Counter((seat.node, card) for seat in seats for card in seat.gpus)
    if not counts:
        return "-"
    shown = [str(count) for _, count in sorted(counts.items())]
    return " + ".join(shown) if len(shown) <= CARDS_SHOWN else f"{min(counts.values())} to {max(counts.values())}"
