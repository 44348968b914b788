"""Tables for the terminal, one line per operator: the plan, and the row counts of a finished run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dovetail.observe.stage_counts import count_stages, merge_counts
from dovetail.observe.text_format import align_table, format_duration, format_number, format_percent

if TYPE_CHECKING:
    from dovetail.observe.history import RunHistory
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.seat import Seat
    from dovetail.scheduling.plan import Plan, UnitPlan

RATE_SOURCE_MARKS = {"measured": "^"}
MAX_CARDS_SHOWN = 8


def plan_table(recipe: Recipe, plan: Plan) -> list[str]:
    """Lines of a table of a plan's operators; fused operators share their workers."""
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
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
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


def run_table(recipe: Recipe, history: RunHistory) -> list[str]:
    """Lines of a table of a run's operators: rows in, out, dropped and failed, time per row and share of the time."""
    counts = count_stages(history)
    found = [merge_counts(name, counts, stages) for name, stages in recipe.operator_stages()]
    operators = [one for one in found if one is not None]
    if not operators:
        return []
    total = sum(one.seconds for one in operators)
    rows: list[tuple[str, ...]] = [("operator", "rows in", "out", "dropped", "failed", "us per row", "share of time")]
    for one in operators:
        each = format_number(round(1e6 * one.seconds / one.items_in, 1)) if one.items_in else "-"
        share = format_percent(one.seconds / total) if total else "-"
        numbers = (one.items_in, one.items_out, one.dropped, one.failed)
        rows.append((one.name, *map(str, numbers), each, share))
    return [*align_table(rows), f"time in operators: {format_duration(total)}, all workers together"]
