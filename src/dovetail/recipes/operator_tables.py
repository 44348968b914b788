"""Tables for the terminal, one line per operator: the plan, and the row counts of a finished run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.observe.text_format import align_table, format_duration, format_number, format_percent
from dovetail.recipes.compiler import HASH_STAGE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.observe.summary import RunSummary
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.seat import Seat
    from dovetail.scheduling.plan import Plan, UnitPlan

RATE_SOURCE_MARKS = {"assumed": "?", "measured": "^"}
MAX_CARDS_SHOWN = 8


def plan_table(recipe: Recipe, plan: Plan) -> list[str]:
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
            each = f"{unit.rate:.4g}{RATE_SOURCE_MARKS.get(unit.rate_source, '')}"
            seats = plan.seats[step.name]
            cells += [
                str(unit.workers),
                unit.shape.describe(),
                _workers_per_card(seats),
                each,
                f"{unit.throughput:.4g}",
            ]
        rows.append(([str(unit.wave + 1)] if len(plan.waves) > 1 else []) + cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    sources = {unit.rate_source for unit in plan.units}
    legend = [f"{mark} {source}" for source, mark in RATE_SOURCE_MARKS.items() if source in sources]
    return [*lines, "; ".join(["* limits the rate", "same: the workers of the line above", *legend])]


def _workers_per_card(seats: tuple[Seat, ...]) -> str:
    """How many workers sit on each card that has any: "5 + 5"."""
    counts = Counter((seat.node, card) for seat in seats for card in seat.gpus)
    if not counts:
        return "-"
    shown = [str(count) for _, count in sorted(counts.items())]
    return " + ".join(shown) if len(shown) <= MAX_CARDS_SHOWN else f"{min(counts.values())} to {max(counts.values())}"


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """One operator of a run that is over, or that goes on."""

    op: str
    taken: int
    given: int
    aside: int
    seconds: float
    """In its code, of all workers."""

    @property
    def dropped(self) -> int:
        return max(0, self.taken - self.aside - self.given)


def operator_summaries(recipe: Recipe, summary: RunSummary) -> list[OperatorSummary]:
    """In the order of the recipe."""
    stages = {stage.name: stage for unit in summary.units for stage in unit.stages}
    units = {unit.name: unit for unit in summary.units}
    aside = _failed_rows_by_stage(Path(summary.folder))
    found = []
    for step in recipe.steps:
        parts: list[Any] = [
            stages.get(name) or units.get(name) for name in (f"{step.name}{HASH_STAGE_SUFFIX}", step.name)
        ]
        parts = [part for part in parts if part is not None]
        if not parts:
            continue
        seconds = sum(getattr(part, "seconds", 0.0) for part in parts)
        lost = sum(aside[name] for name in (step.name, f"{step.name}{HASH_STAGE_SUFFIX}"))
        found.append(OperatorSummary(step.op, parts[0].taken + lost, parts[-1].given, lost, seconds))
    return found


def _failed_rows_by_stage(folder: Path) -> Counter[str]:
    """Stage -> rows that were set aside there."""
    counts: Counter[str] = Counter()
    try:
        lines = (folder / "errors" / "errors.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return counts
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # its last line may be torn
            continue
        counts[str(entry.get("stage") or entry.get("unit"))] += 1
    return counts


def summary_table(told: Sequence[OperatorSummary]) -> list[str]:
    """A table; what took how long is told as a share of the time in all operators' code."""
    if not told:
        return []
    total = sum(one.seconds for one in told)
    rows = [("operator", "rows in", "out", "dropped", "set aside", "us per row", "of the time")]
    for one in told:
        each = format_number(round(1e6 * one.seconds / one.taken, 1)) if one.taken else "-"
        share = format_percent(one.seconds / total) if total else "-"
        rows.append((one.op, str(one.taken), str(one.given), str(one.dropped), str(one.aside), each, share))
    return [*align_table(rows), f"in operators: {format_duration(total)} of all workers together"]
