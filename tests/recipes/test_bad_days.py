"""Failures of recipes: rows that fail late, damaged files, resumed runs."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.errors import ConfigError
from dovetail.recipes.runner import find_unfinished_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.observe.summary import RunSummary

QUIET: dict[str, Any] = {"progress": False, "probe": False}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))


def put(folder: Path, rows: list[Any], process: str, more: str = "", name: str = "recipe.yaml") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / name
    path.write_text(f"dataset_path: rows.jsonl\nexport_path: out.jsonl\n{more}\nprocess:\n{process}")
    return path


def results(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def errors(folder: str) -> list[Any]:
    from pathlib import Path

    return [json.loads(line) for line in Path(folder, "errors", "errors.jsonl").read_text().splitlines()]


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "text": f"row {number}", "score": number} for number in range(count)]


def test_rows_that_are_tried_again_are_added_to_the_results_and_need_no_input(tmp_path: Path) -> None:
    rows = rows_of(40)
    rows[7]["text"] = 7
    recipe = dt.Recipe.load(put(tmp_path, rows, "  - text_length_filter: {min_len: 1}\n"))
    told = recipe.run(**QUIET)
    assert (told.delivered, told.aside, len(results(tmp_path))) == (39, 1, 39)
    (tmp_path / "rows.jsonl").unlink()
    recipe.run(retry_errors=told.id, **QUIET)
    assert len(results(tmp_path)) == 39, "it fails again, and nothing that was written is lost"


@pytest.mark.parametrize(
    ("op", "spoiled"),
    [
        ("topk_specified_field_selector: {field_key: score, topk: 5}", {"id": 3, "text": "without a score"}),
        ("range_specified_field_selector: {field_key: score, lower_rank: 1, upper_rank: 9}", {"id": 3, "text": "none"}),
        ("frequency_specified_field_selector: {field_key: score, topk: 3}", {"id": 3, "text": "x", "score": [1]}),
        ("key_value_grouper: {group_by_keys: [score]}", ["no", "mapping"]),
        ("document_deduplicator:", {"id": 3, "text": 5}),
    ],
)
def test_one_bad_row_costs_one_row_also_where_all_rows_are_needed(tmp_path: Path, op: str, spoiled: Any) -> None:
    rows: list[Any] = rows_of(30)
    rows[3] = spoiled
    told = dt.Recipe.load(put(tmp_path, rows, f"  - {op}\n")).run(**QUIET)
    assert (told.status, told.aside) == ("finished", 1)
    (error,) = errors(told.folder)
    assert error["key"] == [3]
    assert results(tmp_path)


def test_filters_behind_a_grouper_begin_with_stats_of_their_own(tmp_path: Path) -> None:
    process = "  - text_length_filter: {min_len: 1}\n  - key_value_grouper: {group_by_keys: [kind]}\n"
    process += "  - specified_field_filter: {field_key: kind, target_value: [[a, a], [b, b]]}\n"
    rows = [{"text": "x", "kind": kind} for kind in "aabb"]
    told = dt.Recipe.load(put(tmp_path, rows, process)).run(**QUIET)
    assert told.aside == 0


def test_rows_from_stdin_are_not_lost_to_a_probe(tmp_path: Path) -> None:
    path = put(
        tmp_path,
        [],
        "  - text_length_filter: {min_len: 1}\n  - document_deduplicator:\n  - words_num_filter: {min_num: 1}\n",
    )
    given = "".join(json.dumps(row) + "\n" for row in rows_of(500))
    command = [sys.executable, "-m", "dovetail", "run", str(path), "--source", "-"]
    ran = subprocess.run(command, input=given, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [row["id"] for row in results(tmp_path)] == list(range(500))


def test_modules_of_the_same_name_beside_two_recipes_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for name in "ab":
        paths.append(put(tmp_path / name, rows_of(2), "  - own_operators_of_a_test:mark:\n"))
        code = f"def mark(row):\n    return {{**row, 'by': '{name}'}}\n"
        (tmp_path / name / "own_operators_of_a_test.py").write_text(code)
    dt.Recipe.load(paths[0])
    with pytest.raises(dt.DovetailError, match="another module of that name is loaded") as raised:
        dt.Recipe.load(paths[1])
    assert raised.value.problems[0].code == "DT417"


def test_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    path = put(tmp_path, rows_of(3), "  - text_length_filter:\n", name="recipe.yaml")
    data = gzip.compress(b'{"text": "a"}\n' * 1000)
    (tmp_path / "rows.jsonl.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError):
        dt.Recipe.load(path, source=str(tmp_path / "rows.jsonl.gz")).run(**QUIET)


def test_images_may_come_as_bytes_alone(tmp_path: Path) -> None:
    from dovetail.recipes.column_check import missing_columns

    recipe = dt.Recipe.load(put(tmp_path, [], "  - image_shape_filter: {min_width: 1}\n"))
    assert list(missing_columns(recipe, [{"image_bytes": [b"..."]}])) == []
    assert [problem.code for problem in missing_columns(recipe, [{"text": "no image"}])] == ["DT416"]


def test_a_word_list_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    path = put(tmp_path, rows_of(3), f"  - stopwords_filter: {{stopwords_dir: {tmp_path}/none}}\n")
    recipe = dt.Recipe.load(path)
    assert recipe.plan("1x(2cpu, 8GB)").units
    with pytest.raises(ConfigError, match="no list of stopwords") as raised:
        recipe.run(**QUIET)
    assert raised.value.problems[0].place.endswith("recipe.yaml:5:5")


def test_a_folder_for_traces_that_cannot_be_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    more = f"work_dir: {tmp_path}/file/below\nopen_tracer: true"
    with pytest.raises(ConfigError, match="cannot be written") as raised:
        dt.Recipe.load(put(tmp_path, rows_of(3), "  - text_length_filter:\n", more)).run(**QUIET)
    assert raised.value.problems[0].code == "DT025"


def test_stats_beside_the_results_need_no_cpus_of_their_own(tmp_path: Path) -> None:
    process = "  - text_length_filter: {num_proc: 2, min_len: 1}\n"
    recipe = dt.Recipe.load(put(tmp_path, rows_of(30), process, "export_stats: true\nmode: streaming"))
    assert recipe.plan("1x(2cpu, 8GB)").workers["text_length_filter"] == 2
    recipe.run(cluster="1x(2cpu, 8GB)", **QUIET)
    assert len(results(tmp_path)) == 30
    stats = [json.loads(line) for line in (tmp_path / "out_stats.jsonl").read_text().splitlines()]
    assert stats[0] == {"__dj__stats__": {"text_len": 5}}
    assert len(stats) == 30


def test_use_checkpoint_begins_anew_when_the_recipe_was_changed(tmp_path: Path) -> None:
    path = put(tmp_path, rows_of(3), "  - text_length_filter: {min_len: 1}\n", "use_checkpoint: true")
    folder = tmp_path / "home" / "runs" / "20260101-000000-abcde-x"
    folder.mkdir(parents=True)
    recipe = dt.Recipe.load(path)
    more = {"recipe": recipe.digest(), "recipe_file": str(path), "recipe_resumable": True}
    (folder / "run.json").write_text(json.dumps({"v": 1, "status": "failed", "more": more}))
    assert find_unfinished_run(recipe) == (folder.name, "")
    path.write_text(path.read_text().replace("min_len: 1", "min_len: 9"))
    assert find_unfinished_run(dt.Recipe.load(path)) == (None, f"the recipe has changed since run {folder.name}")


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
def test_use_checkpoint_resumes_an_unfinished_run_also_from_python(
    tmp_path: Path, module: str, start: Callable[..., RunSummary]
) -> None:
    (tmp_path / f"{module}.py").write_text(BREAKS_UNTIL_REPAIRED)
    rows = [{"text": "some words", "n": n} for n in range(200)]
    recipe = dt.Recipe.load(
        put(tmp_path, rows, f"  - {module}:strict:\n", "use_checkpoint: true\nskip_op_error: false")
    )
    how = {"cluster": "1x(1cpu, 4GB)", "progress": False}
    with pytest.raises(dt.RunError, match="not yet"):
        start(recipe, **how)
    (tmp_path / "repaired").touch()
    first = start(recipe, **how)
    assert [row["n"] for row in results(tmp_path)] == list(range(200))
    assert first.status == "finished"
    runs = sorted((tmp_path / "home" / "runs").iterdir())
    assert len(runs) == 1, "the second start resumed the first run"
    start(recipe, **how)
    assert len(list((tmp_path / "home" / "runs").iterdir())) == 2, "a finished run is not resumed"
