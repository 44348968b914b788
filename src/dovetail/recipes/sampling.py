"""Do the rows have what the operators need? The first of them are looked at before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from dovetail.control.splits import BLANK, BadRow
from dovetail.errors import Problem, did_you_mean
from dovetail.recipes import arrays
from dovetail.recipes.operators.base import STATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.recipes.reading import Step
    from dovetail.recipes.recipe import Recipe

ROWS = 100
SHOWN = 20


def sample(source: Any, rows: int = ROWS) -> list[Any]:
    """The first rows; what cannot be parsed, and what is no row, is left out. Nothing, if it is not files or tables."""
    from dovetail.data.sources import open_source

    if isinstance(source, Mapping) and "run" in source:
        return list(islice(arrays.rows(**source["args"]), rows)) if source["run"] == arrays.RUN else []
    cursor = open_source(source, rows)
    if cursor is None:
        return []
    found: list[Any] = []
    try:
        while len(found) < rows:
            split = cursor.take(rows - len(found))
            if split is None:
                break
            found += [row for row in split.read() if row is not BLANK and type(row) is not BadRow]
    finally:
        cursor.close()
    return found


def missing_columns(recipe: Recipe, rows: Sequence[Any]) -> Iterator[Problem]:
    """Fields that an operator needs and that not one of these rows has. Behind an operator that is not ours nobody
    knows: it may have made them."""
    rows = [row for row in rows if isinstance(row, dict)]
    if not rows:
        return
    for step in recipe.steps:
        if step.operator is None or step.kind in ("custom", "aggregator", "grouper") or "adapter" in step.given:
            return
        for field in step.operator.columns():
            if (
                field
                and not field.startswith(STATS)
                and not any(_has(row, one) for row in rows for one in _any_of(step, field))
            ):
                path = ("process", step.number, step.op)
                yield replace(_missing(step, field, rows), place=recipe.document.place(path))


def _any_of(step: Step, field: str) -> tuple[str, ...]:
    """Images come by their paths or as bytes."""
    operator = step.operator
    return (field, operator.image_bytes_key) if operator is not None and field == operator.image_key else (field,)


def _has(row: Any, field: str) -> bool:
    if isinstance(row, Mapping) and field in row:
        return True
    for part in field.split("."):
        if not isinstance(row, Mapping) or part not in row:
            return False
        row = row[part]
    return True


def _missing(step: Step, field: str, rows: Sequence[dict[str, Any]]) -> Problem:
    there = list(dict.fromkeys(str(name) for row in rows for name in row))
    message = f"{step.op} needs the field {field!r}, and none of the first {len(rows)} rows has it"
    evidence = (f"they have: {', '.join(there[:SHOWN])}" + (", ..." if len(there) > SHOWN else ""),)
    hint = did_you_mean(field, there)
    fixes = tuple(f"text_keys: {name}" for name in there[:1] if step.operator and field == step.operator.text_key)
    text = next((name for name in there if any(isinstance(row.get(name), str) for row in rows)), None)
    if fixes and text is not None:
        fixes = (f"text_keys: {text}",)
    return Problem("DT416", message + hint, evidence, fixes or ("correct the name of the field",))
