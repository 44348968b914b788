"""The search for fixes of a recipe that does not fit ends in time."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.recipes import recipe_plan
from dovetail.recipes.recipe_plan import MAX_FIX_SEARCH_S, explain_infeasible
from dovetail.scheduling import sizing
from dovetail.scheduling.planner import plan

if TYPE_CHECKING:
    from pathlib import Path

OPERATORS = 58
CLUSTER = "16x(8cpu, 32GB, 4xgpu:20GB)"


def recipe_of_many(tmp_path: Path) -> dt.Recipe:
    """Operators that request three times the CPUs and GPUs of the cluster."""
    steps = "  - text_length_filter:\n      num_proc: 3\n      gpu_required: 1\n      cpu_required: 2\n" * OPERATORS
    file = tmp_path / "recipe.yaml"
    file.write_text(f"dataset_path: in.jsonl\nexport_path: out.jsonl\nmode: streaming\nprocess:\n{steps}")
    return dt.Recipe.load(file)


def test_what_exceeds_the_totals_is_refused_without_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(*_: object) -> None:
        raise AssertionError("packed, although the totals are exceeded")

    cluster = dt.Cluster.of(CLUSTER)
    pipeline = recipe_of_many(tmp_path).pipeline(cluster)
    monkeypatch.setattr("dovetail.scheduling.diagnose.feasibility._find_unit_fixes", lambda *_: ())
    monkeypatch.setattr(sizing, "pack", pack)
    with pytest.raises(dt.InfeasibleError):
        plan(pipeline, cluster, mode="streaming")


def test_fixes_are_tried_until_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, cluster = recipe_of_many(tmp_path), dt.Cluster.of(CLUSTER)
    tried: list[object] = []

    def fits(*given: object) -> bool:
        tried.append(given)
        return False

    monkeypatch.setattr(recipe_plan, "_fits", fits)
    error = dt.InfeasibleError(dt.Problem("DT101", "too much"))
    seconds = count(0.0, MAX_FIX_SEARCH_S / 3)
    (problem,) = explain_infeasible(recipe, cluster, "streaming", error, lambda: next(seconds)).problems
    assert (problem.code, problem.fix_texts) == ("DT101", ())
    assert len(tried) == 2
    tried.clear()
    explain_infeasible(recipe, cluster, "streaming", error, lambda: 0.0)
    assert len(tried) > 10
