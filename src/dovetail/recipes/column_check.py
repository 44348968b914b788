"""Check of the first input rows for the fields that the operators need."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import BLANK_ROW, BadRow
from dovetail.data.readers import json_array
from dovetail.errors import Problem, did_you_mean
from dovetail.recipes.operators.base import STATS_FIELD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.recipes.recipe import Recipe
    from dovetail.recipes.recipe_file import RecipeStep

SAMPLE_ROWS = 100
MAX_COLUMNS_SHOWN = 20


def sample_rows(source: Any, rows: int = SAMPLE_ROWS) -> list[Any]:
    """The first rows of files and tables, without those that cannot be parsed. Other sources: an empty list."""
    from dovetail.data.sources import open_source

    if isinstance(source, Mapping) and "run" in source:
        return (
            list(islice(json_array.read_rows(**source["args"]), rows))
            if source["run"] == json_array.READ_ROWS_TARGET
            else []
        )
    cursor = open_source(source, rows)
    if cursor is None:
        return []
    found: list[Any] = []
    try:
        while len(found) < rows:
            split = cursor.take(rows - len(found))
            if split is None:
                break
            found += [row for row in split.read() if row is not BLANK_ROW and type(row) is not BadRow]
    finally:
        cursor.close()
    return found


def missing_columns(recipe: Recipe, rows: Sequence[Any]) -> Iterator[Problem]:
    """Fields that an operator needs and that none of the rows has. The check ends at the first operator that may add
    fields: a custom operator, an aggregator or grouper, or one of the adapter."""
    rows = [row for row in rows if isinstance(row, dict)]
    if not rows:
        return
    needing: dict[str, list[RecipeStep]] = {}
    for step in recipe.steps:
        if step.operator is None or step.kind in ("custom", "aggregator", "grouper") or "adapter" in step.parameters:
            break
        for field in step.operator.columns():
            if (
                field
                and not field.startswith(STATS_FIELD)
                and not any(_has_field(row, one) for row in rows for one in _alternative_fields(step, field))
            ):
                needing.setdefault(field, []).append(step)
    for field, steps in needing.items():
        place = recipe.document.place(("process", steps[0].number, steps[0].op))
        yield _missing_field_problem(steps, field, rows).at(place)


def _alternative_fields(step: RecipeStep, field: str) -> tuple[str, ...]:
    """Images are given as paths or as bytes."""
    operator = step.operator
    return (field, operator.image_bytes_key) if operator is not None and field == operator.image_key else (field,)


def _has_field(row: Any, field: str) -> bool:
    if isinstance(row, Mapping) and field in row:
        return True
    for part in field.split("."):
        if not isinstance(row, Mapping) or part not in row:
            return False
        row = row[part]
    return True


def _missing_field_problem(steps: Sequence[RecipeStep], field: str, rows: Sequence[dict[str, Any]]) -> Problem:
    """One problem for all operators that need the field: they have one cause and one fix."""
    there = list(dict.fromkeys(str(name) for row in rows for name in row))
    names = list(dict.fromkeys(step.op for step in steps))
    who = f"{names[0]} needs" if len(names) == 1 else f"{len(names)} operators need"
    count = "the first row does not have" if len(rows) == 1 else f"none of the first {len(rows)} rows has"
    message = f"{who} the field {field!r}, which {count}"
    evidence = (
        *([f"operators: {', '.join(names)}"] if len(names) > 1 else []),
        f"fields of these rows: {', '.join(there[:MAX_COLUMNS_SHOWN])}"
        + (", ..." if len(there) > MAX_COLUMNS_SHOWN else ""),
    )
    hint = did_you_mean(field, there)
    is_text = all(step.operator and field == step.operator.text_key for step in steps)
    text = next((name for name in there if any(isinstance(row.get(name), str) for row in rows)), None)
    fixes = (f"text_keys: {text or there[0]}",) if is_text and there else ("correct the name of the field",)
    return Problem("DT416", message + hint, evidence, fixes)
