"""Items in, out and failed per stage of a run. The only place where they are counted.

A unit of fused stages counts per stage only items that did not fail later in the same unit. Failed items are therefore
added to every stage that they passed, by the stage that errors.jsonl names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.observe.run_folder import number_field

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dovetail.observe.history import RunHistory


@dataclass(frozen=True, slots=True)
class StageCounts:
    """One stage, or several consecutive stages taken together, over the whole run."""

    name: str
    items_in: int = 0
    items_out: int = 0
    failed: int = 0
    seconds: float = 0.0
    """In the stage's own code, all workers together."""

    @property
    def dropped(self) -> int:
        """Items without a result. Not visible where other items have several results."""
        return max(0, self.items_in - self.failed - self.items_out)


def count_stages(history: RunHistory) -> dict[str, StageCounts]:
    """Counts by stage, in the order of the units."""
    failed_at = _failed_items(history)
    found: dict[str, StageCounts] = {}
    for unit, view in history.units.items():
        stages = unit_stages(history, unit)
        failed = {stage: failed_at[unit, stage] for stage in stages}
        # an item that was lost with its worker has no stage: it counts at the first
        failed[stages[0]] += max(0, int(number_field(view, "failed_total")) - sum(failed.values()))
        lines = {str(line[0]): line for line in view.get("stages") or () if isinstance(line, list) and len(line) == 4}
        for place, stage in enumerate(stages):
            _, items_in, items_out, seconds = lines.get(stage, (stage, 0, 0, 0.0))
            later = sum(failed[other] for other in stages[place + 1 :])
            found[stage] = StageCounts(
                stage, int(items_in) + failed[stage] + later, int(items_out) + later, failed[stage], float(seconds)
            )
    return found


def merge_counts(name: str, counts: Mapping[str, StageCounts], stages: Iterable[str]) -> StageCounts | None:
    """Consecutive stages as one; None: none of them was seen."""
    seen = [counts[stage] for stage in stages if stage in counts]
    if not seen:
        return None
    return StageCounts(
        name,
        seen[0].items_in,
        seen[-1].items_out,
        sum(one.failed for one in seen),
        sum(one.seconds for one in seen),
    )


def unit_stages(history: RunHistory, unit: str) -> tuple[str, ...]:
    """The names of a unit's stages, in order."""
    listed = history.units[unit].get("stages")
    named = [str(line[0]) for line in listed if isinstance(line, list) and line] if isinstance(listed, list) else []
    return tuple(dict.fromkeys([*named, *unit.split("+")]))


def _failed_items(history: RunHistory) -> Counter[tuple[str, str]]:
    """(unit, stage) -> items that failed there. errors.jsonl is read only if there are any."""
    found: Counter[tuple[str, str]] = Counter()
    if any(number_field(unit, "failed_total") for unit in history.units.values()):
        for failure in history.failures():
            if not failure.ended_run:
                found[failure.unit, failure.stage] += 1
    return found
