"""`use_checkpoint`: an unfinished run of the same recipe is resumed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.recipes.runner import find_unfinished_run
from recipes.recipe_aids import load, own_operator, read_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.observe.summary import RunSummary


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))


def load_with_checkpoint(folder: Path, process: str) -> dt.Recipe:
    write_rows(folder / "in.jsonl", [{"text": "some words", "n": n} for n in range(200)])
    head = "dataset_path: in.jsonl\nexport_path: out.jsonl\nuse_checkpoint: true\nskip_op_error: false\n"
    return load(folder, f"{head}process: [{process}]\n")


def test_use_checkpoint_starts_a_new_run_if_the_recipe_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "runs" / "20260101-000000-abcde-x"
    folder.mkdir(parents=True)
    recipe = load_with_checkpoint(tmp_path, "text_length_filter: {min_len: 1}")
    more = {"recipe": recipe.digest(), "recipe_file": str(recipe.file), "recipe_resumable": True}
    (folder / "run.json").write_text(json.dumps({"v": 1, "status": "failed", "more": more}))
    assert find_unfinished_run(recipe) == (folder.name, "")
    changed = load_with_checkpoint(tmp_path, "text_length_filter: {min_len: 9}")
    assert find_unfinished_run(changed) == (None, f"the recipe has changed since run {folder.name}")


BREAKS_UNTIL_REPAIRED = """
from pathlib import Path
def strict(row):
    if row["n"] == 150 and not Path(__file__).with_name("repaired").exists():
        raise ValueError("not yet")
    return row
"""


@pytest.mark.parametrize(
    ("module", "start"),
    [
        ("breaks_in_method", dt.Recipe.run),
        ("breaks_in_function", lambda recipe, **how: dt.run(recipe, **how).wait()),
    ],
)
def test_use_checkpoint_resumes_an_unfinished_run_from_python(
    tmp_path: Path, module: str, start: Callable[..., RunSummary]
) -> None:
    own_operator(tmp_path, module, BREAKS_UNTIL_REPAIRED)
    recipe = load_with_checkpoint(tmp_path, f"'{module}:strict'")
    how = {"cluster": "1x(1cpu, 4GB)", "progress": False}
    with pytest.raises(dt.RunError, match="not yet"):
        start(recipe, **how)
    (tmp_path / "repaired").touch()
    resumed = start(recipe, **how)
    assert [row["n"] for row in read_rows(tmp_path / "out.jsonl")] == list(range(200))
    assert resumed.status == "finished"
    runs = tmp_path / "home" / "runs"
    assert len(list(runs.iterdir())) == 1, "the second start resumed the first run"
    start(recipe, **how)
    assert len(list(runs.iterdir())) == 2, "a finished run is not resumed"
