"""Parser of recipe files: every problem at once, with line, column and fix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.recipes import is_recipe
from dovetail.recipes.file_keys import IGNORED_KEYS, RECIPE_FILE
from dovetail.recipes.recipe import Recipe
from recipes.recipe_aids import load, write, wrong

if TYPE_CHECKING:
    from pathlib import Path

ALL_WRONG = """\
dataset_pth: in.jsonl
np: many
mode: fast
process:
  - text_lenght_filter: {min_len: 5}
  - text_length_filter: {min_length: 5}
  - words_num_filter:
      min_num: ten
      memory: 1500
  - alphanumeric_filter: {min_ratio: 0.9, max_ratio: 0.1}
  - special_characters_filter:
    min_ratio: 0.1
  - character_repetition_filter: {rep_len: -3, num_proc: 0}
"""


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = wrong(tmp_path, ALL_WRONG)
    assert [(problem.place, problem.code) for problem in found] == [
        ("recipe.yaml:1:1", "DT011"),
        ("recipe.yaml:2:1", "DT013"),
        ("recipe.yaml:3:1", "DT013"),
        ("recipe.yaml:5:5", "DT410"),
        ("recipe.yaml:6:26", "DT411"),
        ("recipe.yaml:8:7", "DT412"),
        ("recipe.yaml:9:7", "DT412"),
        ("recipe.yaml:10:27", "DT412"),
        ("recipe.yaml:11:5", "DT013"),
        ("recipe.yaml:13:35", "DT412"),
        ("recipe.yaml:13:48", "DT412"),
    ]
    for word, problem in (("dataset_path", found[0]), ("text_length_filter", found[3]), ("min_len", found[4])):
        assert f"did you mean '{word}'?" in problem.message


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("project_name: x\n", "recipe.yaml:1:1", "process is missing"),
        ("process:\n", "recipe.yaml:1:1", "list of operators, not None"),
        ("process: []\n", "recipe.yaml:1:1", "list of operators, not []"),
        ("process: {text_length_filter: {}}\n", "recipe.yaml:1:1", "list of operators"),
        ("process: text_length_filter\n", "recipe.yaml:1:1", "list of operators"),
        ("process: [null]\n", "recipe.yaml:1:11", "process[0] is None"),
        ("process: [text_length_filter, 5]\n", "recipe.yaml:1:31", "process[1] is 5"),
        ("process: [[text_length_filter]]\n", "recipe.yaml:1:11", "process[0] is ['text_length_filter']"),
        ("process: [{}]\n", "recipe.yaml:1:11", "process[0] has 0 keys"),
        ("process: ['']\n", "recipe.yaml:1:11", "there is no operator ''"),
        ("process: [{text_length_filter: 50}]\n", "recipe.yaml:1:12", "should be a mapping, not 50"),
        ("process: [{text_length_filter: [50]}]\n", "recipe.yaml:1:12", "should be a mapping, not [50]"),
        ("- text_length_filter\n", "recipe.yaml:1:1", "should be a mapping"),
        ("just words\n", "recipe.yaml:1:1", "should be a mapping"),
        ("5\n", "recipe.yaml:1:1", "should be a mapping"),
    ],
)
def test_a_process_that_is_not_a_list_is_reported_with_its_place(
    tmp_path: Path, text: str, place: str, words: str
) -> None:
    (problem,) = wrong(tmp_path, text)
    assert problem.place == place
    assert words in problem.message


def test_parameters_without_indentation_are_reported(tmp_path: Path) -> None:
    (problem,) = wrong(tmp_path, "process:\n  - text_length_filter:\n    min_len: 5\n    max_len: 9\n")
    assert problem.message.startswith("process[0] has 3 keys")
    assert problem.fix_texts == (
        "indent the parameters below 'text_length_filter', or write '- ' before each operator",
    )


@pytest.mark.parametrize("entry", ["text_length_filter", "{text_length_filter: null}", "{text_length_filter: {}}"])
def test_an_operator_without_parameters_can_be_written_in_three_ways(tmp_path: Path, entry: str) -> None:
    (step,) = load(tmp_path, f"process: [{entry}]").steps
    assert (step.op, dict(step.parameters)) == ("text_length_filter", {})


def test_an_operator_may_occur_several_times(tmp_path: Path) -> None:
    recipe = load(tmp_path, "process: [text_length_filter, clean_links_mapper, text_length_filter]")
    assert [step.name for step in recipe.steps] == ["text_length_filter", "clean_links_mapper", "text_length_filter_2"]
    assert len(recipe.pipeline()) == 3


def test_stage_names_are_unique_for_any_operator_names(tmp_path: Path) -> None:
    (tmp_path / "names_taken.py").write_text(
        "def stats(row): return row\n"
        "def results(row): return row\n"
        "def document_deduplicator_hash(row): return row\n"
        "def text_length_filter_2(row): return row\n"
    )
    names = ["text_length_filter", "text_length_filter", "'names_taken:text_length_filter_2'", "'names_taken:stats'"]
    names += ["'names_taken:results'", "document_deduplicator", "'names_taken:document_deduplicator_hash'"]
    for listed in (names, names[::-1]):
        head = "export_path: out.jsonl\nexport_stats: true"
        recipe = load(tmp_path, f"{head}\nprocess: [{', '.join(listed)}]")
        stages = [stage.name for stage in recipe.pipeline()]
        assert len(set(stages)) == len(stages) == 10


# --- values


@pytest.mark.parametrize(
    ("entry", "key", "fix"),
    [
        ("text_length_filter: {min_len: '50'}", "min_len", "min_len: 50"),
        ("text_length_filter: {min_len: .nan}", "min_len", "min_len: 10"),
        ("text_length_filter: {min_len: 1.5}", "min_len", "min_len: 2"),
        ("text_length_filter: {min_len: true}", "min_len", "min_len: 10"),
        ("text_length_filter: {min_len: [50]}", "min_len", "min_len: 10"),
        ("text_length_filter: {min_len: null}", "min_len", "min_len: 10"),
        ("document_deduplicator: {lowercase: 'yes'}", "lowercase", "lowercase: true"),
        ("alphanumeric_filter: {min_ratio: .nan}", "min_ratio", "min_ratio: 0.25"),
        ("text_length_filter: {text_key: 5}", "text_key", "text_key: '5'"),
        ("clean_links_mapper: {repl: 5}", "repl", "repl: '5'"),
    ],
)
def test_a_value_of_the_wrong_type_is_reported_with_a_valid_one(tmp_path: Path, entry: str, key: str, fix: str) -> None:
    (problem,) = wrong(tmp_path, f"process:\n  - {entry}\n")
    assert problem.message.startswith(f"{entry.partition(':')[0]}: {key} is ")
    assert problem.fix_texts[0] == fix
    name = entry.partition(":")[0]
    load(tmp_path, f"process:\n  - {name}: {{{fix}}}\n")


def test_huge_values_are_kept_or_reported(tmp_path: Path) -> None:
    huge = "9" * 60
    for entry in (f"{{text_length_filter: {{max_len: {huge}}}}}", f"{{words_num_filter: {{min_num: {huge}}}}}"):
        try:
            load(tmp_path, f"process: [{entry}]").plan("1x(2cpu, 4GB)")
        except dt.ConfigError as error:
            assert error.problems[0].place  # noqa: PT017
    wrong(tmp_path, f"np: {huge}\nmax_errors: {huge}\nprocess: [{{text_length_filter: {{num_proc: {huge}}}}}]")
    wrong(tmp_path, f"process: [{{text_length_filter: {{batch_size: {huge}, num_cpus: 1e300, memory: {huge}}}}}]")
    wrong(tmp_path, f"process: [{{text_length_filter: {{rate: 1e300, retries: {huge}}}}}]")


def test_stage_settings_are_checked_and_reported_with_their_line(tmp_path: Path) -> None:
    text = "process:\n  - text_length_filter:\n      rate: fast\n      retries: -1\n      call_timeout: soon\n"
    text += "      env: 5\n      returns: -3\n      min_len: ten\n"
    found = wrong(tmp_path, text)
    assert [problem.place for problem in found] == [f"recipe.yaml:{line}:7" for line in range(3, 9)]
    assert found[0].message.startswith("text_length_filter: rate: 'fast' is not a number")
    assert found[0].fix_texts[0] == "rate: 1"
    assert "=" not in "".join(problem.message for problem in found)


@pytest.mark.parametrize("key", [key for key in RECIPE_FILE.names if key not in ("process", "defaults")])
def test_every_top_level_key_refuses_wrong_types_and_accepts_null(tmp_path: Path, key: str) -> None:
    (problem,) = wrong(tmp_path, f"{key}: {{no: such}}\nprocess: [text_length_filter]\n")
    assert problem.place == "recipe.yaml:1:1"
    assert problem.message.startswith(f"{key} should be ")
    assert load(tmp_path, f"{key}: null\nprocess: [text_length_filter]\n").plan("1x(2cpu, 4GB)").units


# --- files


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is empty"),
        (b"  \n\n# nothing\n", "is empty"),
        (b"process: [text_length_filter\n", "not valid YAML"),
        (b"process:\n\t- text_length_filter\n", "not valid YAML"),
        (b"process: [caf\xe9]\n", "is not UTF-8"),
        (b"\x00\x01\x02", "not valid YAML"),
        (b"process: [text_length_filter]\nprocess: []\n", "given twice"),
        (b"process: &all [*all]\n", "an alias contains itself"),
        (b"? [a, b]\n: 1\nprocess: [text_length_filter]\n", "a key must be a string"),
        (b"process: [!!python/object/apply:os.getcwd []]\n", "not plain data"),
        (b"a: 1\n---\nprocess: [text_length_filter]\n", "not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_with_its_place(tmp_path: Path, raw: bytes, words: str) -> None:
    found = wrong(tmp_path, raw)
    assert words in found[0].message
    assert found[0].place.startswith("recipe.yaml")


def test_a_missing_file_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path, "process: [text_length_filter]")
    with pytest.raises(dt.ConfigError, match=r"no such file \(did you mean 'recipe.yaml'\?\)"):
        Recipe.load(tmp_path / "recipes.yaml")
    with pytest.raises(dt.ConfigError, match="is a folder"):
        Recipe.load(tmp_path)


def test_json_recipes_are_accepted_and_errors_have_places(tmp_path: Path) -> None:
    data = {"process": [{"text_length_filter": {"min_len": 5}}]}
    recipe = Recipe.load(write(tmp_path, json.dumps(data), "recipe.json"))
    assert recipe.steps[0].parameters == {"min_len": 5}
    (problem,) = wrong(tmp_path, '{"process": [\n{"text_length_filter": {"min_len": NaN}}]}', name="recipe.json")
    assert problem.place == "recipe.json:2:25"


def test_keys_that_are_not_strings_are_reported_as_written(tmp_path: Path) -> None:
    text = "1: 2\ntrue: 3\nnull: 4\nprocess:\n  - {5: {}}\n  - text_length_filter: {6: 7}\n"
    found = wrong(tmp_path, text)
    assert [problem.place for problem in found] == [
        *("recipe.yaml:1:1", "recipe.yaml:2:1", "recipe.yaml:3:1", "recipe.yaml:5:6", "recipe.yaml:6:26")
    ]
    for problem, word in zip(found, ("'1'", "'true'", "'null'", "'5'", "'6'"), strict=True):
        assert word in problem.message


# --- pipelines and recipes


@pytest.mark.parametrize(
    ("key", "there"), [("source", "dataset_path"), ("sink", "export_path"), ("stages", "process"), ("name", "project")]
)
def test_a_key_of_pipelines_is_reported_with_the_one_of_recipes(tmp_path: Path, key: str, there: str) -> None:
    (problem,) = wrong(tmp_path, f"{key}: in.jsonl\nprocess: [text_length_filter]\n")
    assert "is a key of pipeline files" in problem.message
    assert there in problem.fix_texts[0]


def test_operator_keys_at_the_top_level_and_operators_beside_process_are_reported(tmp_path: Path) -> None:
    text = "num_proc: 4\ntext_length_filter: {min_len: 5}\nprocess: [words_num_filter]\n"
    first, second = wrong(tmp_path, text)
    assert "it belongs to an operator" in first.message
    assert "it belongs in 'process'" in second.message


def test_a_recipe_is_recognised_if_one_of_its_keys_is_misspelt() -> None:
    assert is_recipe({"proces": [], "dataset_path": "in.jsonl"})
    assert is_recipe({"process": []})
    assert not is_recipe({"stages": [], "process": []})
    assert not is_recipe({"stages": []})
    assert not is_recipe([])


# --- ignored keys


def test_ignored_keys_give_one_note(tmp_path: Path) -> None:
    text = "use_cache: true\ndebug: false\nprocess:\n"
    text += "  - text_length_filter: {turbo: true, ray_execution_mode: actor, min_closed_interval: true}\n"
    text += "  - words_num_filter: {turbo: true, index_key: null}\n"
    (note,) = load(tmp_path, text).notes
    assert note == (
        "ignored (no effect in Dovetail): debug, use_cache, turbo of text_length_filter, "
        "ray_execution_mode of text_length_filter, turbo of words_num_filter"
    )


def test_op_fusion_false_is_noted(tmp_path: Path) -> None:
    (note,) = load(tmp_path, "op_fusion: false\nprocess: [text_length_filter]").notes
    assert note.startswith("op_fusion: false has no effect")
    assert load(tmp_path, "op_fusion: true\nprocess: [text_length_filter]").notes == ()


def test_keys_with_effect_give_no_note(tmp_path: Path) -> None:
    assert load(tmp_path, "text_keys: content\nprocess: [{text_length_filter: {num_proc: 2, min_len: 3}}]").notes == ()


def test_every_ignored_key_accepts_any_value(tmp_path: Path) -> None:
    text = "".join(f"{key}: {{any: [1, x]}}\n" for key in sorted(IGNORED_KEYS))
    assert len(load(tmp_path, f"{text}process: [text_length_filter]").notes) == 1


# --- arbitrary files

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["2GB", "-1", "auto", "cuda", "cpu", "1500", "os:getcwd", "in.jsonl", "local", "*"]),
)
NAMES = st.sampled_from(
    [
        *("text_length_filter", "document_deduplicator", "image_maniqa_filter", "text_chunk_mapper", "random_selector"),
        *("words_num_filter", "key_value_grouper", "specified_field_filter", "os:getcwd", "no:where", "clean_ip_maper"),
    ]
)
PARAMETERS = st.sampled_from(
    [
        *("min_len", "max_len", "num_proc", "num_cpus", "num_gpus", "memory", "mem_required", "batch_size", "workers"),
        *("resources", "accelerator", "rate", "returns", "env", "runtime_env", "adapter", "text_key", "skip_op_error"),
        *(
            "max_len",
            "overlap_len",
            "split_pattern",
            "select_num",
            "select_ratio",
            "call_timeout",
            "retries",
            "field_key",
        ),
        *("gpus", "cpus", "gpu_memory", "labels", "min_num", "lowercase", "turbo", "target_value"),
    ]
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(PARAMETERS, st.text(max_size=5)), inner, max_size=3)
    ),
    max_leaves=6,
)
GIVEN = st.one_of(ANYTHING, st.dictionaries(st.one_of(PARAMETERS, st.text(max_size=5)), ANYTHING, max_size=4))
ENTRIES = st.one_of(ANYTHING, NAMES, st.dictionaries(st.one_of(NAMES, st.text(max_size=6)), GIVEN, max_size=2))
RECIPES = st.one_of(
    ANYTHING,
    st.fixed_dictionaries(
        {"process": st.one_of(ANYTHING, st.lists(ENTRIES, min_size=1, max_size=4))},
        optional={key: ANYTHING for key in RECIPE_FILE.names if key != "process"},
    ),
    st.fixed_dictionaries(
        {"process": st.lists(st.dictionaries(NAMES, GIVEN, min_size=1, max_size=1), min_size=1, max_size=3)}
    ),
)


@given(RECIPES)
def test_any_yaml_is_a_recipe_or_a_dovetail_error(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = write(tmp_path_factory.getbasetemp(), yaml.safe_dump(data, allow_unicode=True), "any.yaml")
    try:
        recipe = Recipe.load(path)
    except dt.DovetailError as error:
        assert all(problem.message and problem.place for problem in error.problems)  # noqa: PT017
        return
    assert recipe.steps
    assert all(
        (
            recipe.name,
            recipe.mode,
            recipe.engine,
            recipe.work_dir,
            recipe.compile_options(),
            str(recipe.source),
            str(recipe.sink),
        )
    )
    try:
        recipe.plan("2x(8cpu, 32GB, 2xgpu:20GB)")
    except dt.InfeasibleError as error:
        assert error.problems  # noqa: PT017


@given(st.binary(max_size=60))
def test_any_bytes_are_a_recipe_or_a_dovetail_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = write(tmp_path_factory.getbasetemp(), raw, "bytes.yaml")
    with pytest.raises(dt.ConfigError):
        Recipe.load(path)
