"""What became of the rows, operator by operator? Counted by the run itself, whoever shared a worker with whom."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.observe.words import duration, number, percent, table
from dovetail.recipes.compiling import HASHED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.observe.summary import Summary
    from dovetail.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Told:
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


def operators(recipe: Recipe, summary: Summary) -> list[Told]:
    """In the order of the recipe."""
    stages = {stage.name: stage for unit in summary.units for stage in unit.stages}
    units = {unit.name: unit for unit in summary.units}
    aside = _aside(Path(summary.folder))
    found = []
    for step in recipe.steps:
        parts: list[Any] = [stages.get(name) or units.get(name) for name in (f"{step.name}{HASHED}", step.name)]
        parts = [part for part in parts if part is not None]
        if not parts:
            continue
        seconds = sum(getattr(part, "seconds", 0.0) for part in parts)
        lost = sum(aside[name] for name in (step.name, f"{step.name}{HASHED}"))
        found.append(Told(step.op, parts[0].taken + lost, parts[-1].given, lost, seconds))
    return found


def _aside(folder: Path) -> Counter[str]:
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


def operator_lines(told: Sequence[Told]) -> list[str]:
    """A table; what took how long is told as a share of the time in all operators' code."""
    if not told:
        return []
    total = sum(one.seconds for one in told)
    rows = [("operator", "rows in", "out", "dropped", "set aside", "us per row", "of the time")]
    for one in told:
        each = number(round(1e6 * one.seconds / one.taken, 1)) if one.taken else "-"
        share = percent(one.seconds / total) if total else "-"
        rows.append((one.op, str(one.taken), str(one.given), str(one.dropped), str(one.aside), each, share))
    return [*table(rows), f"in operators: {duration(total)} of all workers together"]
