"""`--set` changes of recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.recipes.recipe import Recipe
from recipes.recipe_aids import load, write, wrong

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """\
dataset_path: in.jsonl
process:
  - text_length_filter: {min_len: 5, num_proc: 2}
  - clean_links_mapper
  - text_length_filter:
  - words_num_filter: {num_proc: 3}
"""


def given(folder: Path, *sets: str) -> list[dict[str, Any]]:
    return [dict(step.parameters) for step in load(folder, TEXT, sets).steps]


@pytest.mark.parametrize(
    ("sets", "number", "parameters"),
    [
        (["process.0.num_proc=4"], 0, {"min_len": 5, "num_proc": 4}),
        (["process.1.num_proc=4"], 1, {"num_proc": 4}),
        (["process.2.min_len=7"], 2, {"min_len": 7}),
        (["process.3.num_proc=[1, 4]"], 3, {"num_proc": [1, 4]}),
        (["process.clean_links_mapper.num_proc=-1"], 1, {"num_proc": -1}),
        (["process.words_num_filter.memory=2GB"], 3, {"num_proc": 3, "memory": "2GB"}),
        (["process.1.resources.cpus=2"], 1, {"resources": {"cpus": 2}}),
        (["process.1={num_proc: 2}"], 1, {"num_proc": 2}),
        (["process.0.num_proc=4", "process.0.num_proc=6"], 0, {"min_len": 5, "num_proc": 6}),
        (["process.0.num_proc=null"], 0, {"min_len": 5, "num_proc": None}),
    ],
)
def test_a_change_applies_to_one_operator_by_name_or_number(
    tmp_path: Path, sets: list[str], number: int, parameters: dict[str, Any]
) -> None:
    before, after = given(tmp_path), given(tmp_path, *sets)
    assert after[number] == parameters
    assert before[:number] + before[number + 1 :] == after[:number] + after[number + 1 :]


def test_a_star_changes_all_operators_that_set_the_key(tmp_path: Path) -> None:
    assert given(tmp_path, "process.*.num_proc=9") == [{"min_len": 5, "num_proc": 9}, {}, {}, {"num_proc": 9}]
    steps = load(tmp_path, TEXT, ["process.*.num_proc=null"]).steps
    assert [step.requirements.workers for step in steps] == [None, None, None, None]


def test_a_custom_operator_is_named_with_its_dots(tmp_path: Path) -> None:
    (tmp_path / "changes_ops.py").write_text("class Inner:\n    @staticmethod\n    def same(row, a=1): return row\n")
    text = "process: ['changes_ops:Inner.same']"
    (step,) = load(tmp_path, text, ["process.changes_ops:Inner.same.a=5"]).steps
    assert step.parameters == {"a": 5}


def test_top_level_keys_can_be_changed(tmp_path: Path) -> None:
    recipe = load(tmp_path, TEXT, ["mode=sequential", "max_errors=5", "open_tracer=true", "trace_num=3"])
    assert (recipe.mode, recipe.max_errors, recipe.traced_stages[1]) == ("sequential", 5, 3)
    assert [step.op for step in load(tmp_path, TEXT, ["process=[words_num_filter]"]).steps] == ["words_num_filter"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("process.9.num_proc=4", "there is no operator 9: the first is 0, the last 3"),
        ("process.clean_link_mapper.num_proc=4", "did you mean 'clean_links_mapper'?"),
        ("process.text_length_filter.min_len=4", "occurs 2 times in the recipe: 0, 2"),
        ("process.*.num_gpus=4", "no operator sets num_gpus"),
        ("process.*=4", "names no parameter"),
        ("process.0.num_proc", "is not path=value"),
        ("process.0.num_proc=", "no value after the ="),
        ("=4", "is not path=value"),
        ("process..num_proc=4", "has an empty part"),
        ("process.0.min_len.x=4", "has no 'x'"),
        ("process.0.num_proc=[1", "not valid YAML"),
        ("process.0.num_proc=0", "num_proc should be"),
        ("process.0.min_lem=4", "there is no parameter 'min_lem'"),
        ("proces=4", "unknown key 'proces'"),
        ("mode=fast", "mode should be one of"),
        ("process=5", "list of operators, not 5"),
        ("process.-1.num_proc=4", "there is no operator '-1'"),
    ],
)
def test_an_invalid_change_is_reported_as_it_was_typed(tmp_path: Path, change: str, words: str) -> None:
    (problem,) = wrong(tmp_path, TEXT, [change])
    assert words in problem.message
    assert problem.place == f"--set {change}"


def test_all_invalid_changes_are_reported_at_once(tmp_path: Path) -> None:
    assert len(wrong(tmp_path, TEXT, ["process.9.x=1", "process.nobody.x=1", "mode"])) == 3


def test_changes_do_not_modify_the_file(tmp_path: Path) -> None:
    load(tmp_path, TEXT, ["process.0.num_proc=4", "process.*.num_proc=5"])
    assert (tmp_path / "recipe.yaml").read_text() == TEXT


# --- paths


def test_paths_on_the_command_line_start_at_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "here.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.chdir(there)
    file = write(tmp_path, TEXT + "export_path: out.jsonl\n")
    by_set = Recipe.load(file, ["dataset_path=here.jsonl", "export_path=typed.jsonl", "work_dir=work"])
    assert (by_set.source, by_set.sink["path"]) == (str(there / "here.jsonl"), str(there / "typed.jsonl"))
    assert by_set.work_dir == there / "work"
    by_option = Recipe.load(file, source="here.jsonl", sink="typed.jsonl")
    assert (by_option.source, by_option.sink) == (by_set.source, by_set.sink)
    listed = Recipe.load(file, ["dataset_path=[here.jsonl, more*.jsonl]"])
    assert listed.source == {"path": [str(there / "here.jsonl"), str(there / "more*.jsonl")]}
    assert Recipe.load(file).source == str(tmp_path / "in.jsonl")


def test_source_on_the_command_line_takes_precedence_over_both_keys(tmp_path: Path) -> None:
    text = "dataset: {configs: [{type: local, path: a.jsonl}]}\nprocess: [text_length_filter]\n"
    assert load(tmp_path, text).source == str(tmp_path / "a.jsonl")
    assert load(tmp_path, text, source=str(tmp_path / "b.jsonl")).source == str(tmp_path / "b.jsonl")
    both = "dataset: {configs: [{type: local, path: a.jsonl}]}\ndataset_path: b.jsonl\nprocess: [text_length_filter]\n"
    (problem,) = wrong(tmp_path, both)
    assert "both name the input" in problem.message


def test_stdin_and_stdout_are_a_source_and_a_sink(tmp_path: Path) -> None:
    recipe = load(tmp_path, TEXT + "export_path: out.jsonl\n", source="-", sink="-")
    assert recipe.source == {"run": "dovetail.runtime.run_spec:stdin_rows"}
    assert recipe.sink is None
    for ends in ({"source": ""}, {"sink": ""}):
        with pytest.raises(dt.ConfigError, match="is empty"):
            load(tmp_path, TEXT, **ends)
