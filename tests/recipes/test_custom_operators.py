"""Custom operators, and errors in them before a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.recipes.recipe_file import operator_kind
from recipes.recipe_aids import errors, load, own_operator, read_rows, run, some_rows, wrong

if TYPE_CHECKING:
    from pathlib import Path

MODULE = '''
from collections import OrderedDict

from dovetail.recipes.operators.base import Filter, Mapper, Selector


def shout(row, mark="!"):
    row["text"] = row["text"].upper() + mark
    return row

def is_even(row):
    return row["n"] % 2 == 0

def or_none(row):
    return row if row["n"] % 3 else None

def fan(row, times=2):
    for copy in range(times):
        yield {**row, "copy": copy}

def as_list(row):
    return [row, dict(row)]

def ordered(row):
    return OrderedDict(row)

async def later(row):
    return row

class Counts:
    """Set up once per worker."""
    def __init__(self, by=1):
        self.by = by
    def setup(self):
        self.ready = True
    def __call__(self, row):
        row["n"] += self.by if self.ready else 0
        return row

class NoCall:
    pass

class Tag(Mapper):
    def __init__(self, tag):
        if not tag:
            raise ValueError("the tag is empty")
        self.tag = tag
    def __call__(self, row):
        row["tag"] = f"{self.tag} {row[self.text_key][:3]}"
        return row

class ShortFilter(Filter):
    def __init__(self, most=40):
        self.most = most
    def measure(self, row, stats):
        stats["short"] = len(self.text_of(row))
    def keeps(self, row, stats):
        return stats["short"] <= self.most

class LastSelector(Selector):
    def select_rows(self, rows):
        return [sum(1 for _ in rows) - 1]

NOTHING = "not a function"
'''


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with a module beside the recipe; its name is unique, because a process imports a name once."""
    (tmp_path / f"{module(request)}.py").write_text(MODULE)
    return tmp_path


def module(request: pytest.FixtureRequest) -> str:
    return "own_" + "".join(letter if letter.isalnum() else "_" for letter in request.node.name)


@pytest.fixture
def own(request: pytest.FixtureRequest) -> str:
    return module(request)


# --- beside the recipe


@pytest.mark.processes
def test_functions_classes_and_operators_beside_the_recipe_are_run(folder: Path, own: str) -> None:
    rows = some_rows(60)
    process = f"""
  - {own}:is_even
  - {own}:shout: {{mark: '?', num_proc: 1, memory: 100MB}}
  - {own}:or_none
  - {own}:Counts: {{by: 1000}}
  - {own}:Tag: {{tag: x}}
  - {own}:fan: {{times: 3}}
  - {own}:as_list
  - {own}:ShortFilter: {{most: 30}}
"""
    summary = run(folder, process, rows=rows)
    wanted = []
    for row in rows:
        if row["n"] % 2 or not row["n"] % 3:
            continue
        text = row["text"].upper() + "?"
        if len(text) > 30:
            continue
        one = {"text": text, "n": row["n"] + 1000, "tag": f"x {text[:3]}"}
        wanted += [one | {"copy": copy} for copy in range(3) for _ in range(2)]
    assert read_rows(folder / "out.jsonl") == wanted
    assert summary.delivered == len(wanted)
    assert errors(folder) == []


def test_stats_are_removed_from_subclasses_of_dict(folder: Path, own: str) -> None:
    run(folder, f"[text_length_filter, '{own}:ordered']", rows=some_rows(20))
    assert read_rows(folder / "out.jsonl") == [row for row in some_rows(20) if len(row["text"]) >= 10]


def test_a_custom_selector_is_a_barrier(folder: Path, own: str) -> None:
    recipe = load(folder, f"process: ['{own}:LastSelector']")
    assert recipe.pipeline().stages[-1].barrier
    run(folder, f"[text_length_filter, '{own}:LastSelector', clean_links_mapper]", rows=some_rows(20))
    assert [row["n"] for row in read_rows(folder / "out.jsonl")] == [19]


def test_worker_settings_are_not_passed_to_a_custom_operator(folder: Path, own: str) -> None:
    parameters = "mark: '.', num_proc: [1, 2], num_cpus: 0.5, mem_required: 1GB, batch_size: 4, turbo: true, rate: 10"
    recipe = load(folder, f"process: [{{'{own}:shout': {{{parameters}}}}}]")
    (step,) = recipe.steps
    assert step.operator is not None
    assert dict(step.operator.recipe_parameters) == {"mark": "."}
    (stage,) = recipe.pipeline()
    assert (stage.workers, stage.resources.cpus, stage.rate) == ((1, 2), 0.5, 10)
    assert recipe.notes == (f"ignored (no effect in Dovetail): turbo of {own}:shout",)


def test_different_functions_have_different_profiles(folder: Path, own: str) -> None:
    steps = load(folder, f"process: ['{own}:shout', '{own}:or_none', {{'{own}:shout': {{mark: x}}}}]").steps
    keys = [step.operator.code_key() for step in steps if step.operator is not None]
    assert len(set(keys)) == 3


def test_the_kinds_of_custom_operators_are_recognised(folder: Path, own: str) -> None:
    names = ["shout", "Counts", "ShortFilter", "LastSelector", "{tag: x}"]
    entries = [f"'{own}:{name}'" for name in names[:4]] + [f"{{'{own}:Tag': {names[4]}}}"]
    steps = load(folder, f"process: [{', '.join(entries)}]").steps
    assert [step.kind for step in steps] == ["custom", "custom", "filter", "selector", "mapper"]
    assert [operator_kind(step.operator) for step in steps if step.operator is not None] == [
        step.kind for step in steps
    ]


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("shout", "{times: 3}", "got an unexpected keyword argument 'times'"),
        ("shout", "{row: 3}", "multiple values for argument 'row'"),
        ("Counts", "{bye: 3}", "got an unexpected keyword argument 'bye'"),
        ("Tag", "{}", "missing 1 required positional argument: 'tag'"),
        ("Tag", "{tag: ''}", "the tag is empty"),
        ("NoCall", "{}", "the class has no __call__ method"),
        ("later", "{}", "async functions are not supported"),
        ("NOTHING", "{}", "not a function or class"),
        ("shuot", "{}", "did you mean 'shout'?"),
        ("shout", "{text_key: 5}", "text_key is 5"),
        ("shout", "{skip_op_error: 'no'}", "skip_op_error is 'no'"),
        ("shout", "{num_proc: 0}", "num_proc should be"),
        ("shout", "[1]", "should be a mapping"),
    ],
)
def test_an_invalid_custom_operator_is_reported_with_its_line(
    folder: Path, own: str, name: str, parameters: str, words: str
) -> None:
    (problem,) = wrong(folder, f"process:\n  - clean_links_mapper\n  - {own}:{name}: {parameters}\n")
    assert words in problem.message
    assert problem.place.startswith("recipe.yaml:3:")


@pytest.mark.parametrize(
    "name", ["no_such_module_anywhere:f", "json.no_such:f", ":f", "json:", "json:loads:x", "a b:c"]
)
def test_a_name_that_does_not_resolve_is_reported(tmp_path: Path, name: str) -> None:
    (problem,) = wrong(tmp_path, f"process:\n  - '{name}'\n")
    assert problem.code == "DT417"
    assert problem.place == "recipe.yaml:2:5"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("def f(row:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_with_its_line(
    tmp_path: Path, own: str, code: str, words: str
) -> None:
    (tmp_path / f"{own}.py").write_text(f"{code}\n")
    for text, line in (
        (f"process:\n  - {own}:f\n", 2),
        (f"custom_operator_paths: {own}.py\nprocess: [clean_links_mapper]\n", 1),
    ):
        (problem,) = wrong(tmp_path, text)
        assert words in problem.message
        assert problem.evidence
        assert problem.place.startswith(f"recipe.yaml:{line}:")


# --- custom_operator_paths


def test_operators_of_custom_operator_paths_are_used_by_name(folder: Path, own: str) -> None:
    rows = some_rows(20)
    more = folder / "more"
    more.mkdir()
    (more / f"{own}_more.py").write_text("def tail(row, by=1):\n    row['n'] = -row['n'] * by\n    return row\n")
    (more / "_private.py").write_text("1 / 0\n")
    head = f"custom_operator_paths: [{own}.py, more]"
    run(folder, "[{short_filter: {most: 30}}, shout, {tail: {by: 2, num_proc: 1}}]", head, rows)
    wanted = [{"text": row["text"].upper() + "!", "n": -2 * row["n"]} for row in rows if len(row["text"]) <= 30]
    assert read_rows(folder / "out.jsonl") == wanted


def test_a_custom_operator_takes_precedence_over_a_built_in_one(tmp_path: Path, own: str) -> None:
    (tmp_path / f"{own}.py").write_text("def text_length_filter(row):\n    return row['n'] == 3\n")
    run(tmp_path, "[text_length_filter]", f"custom_operator_paths: {own}.py", some_rows(10))
    assert [row["n"] for row in read_rows(tmp_path / "out.jsonl")] == [3]


@pytest.mark.parametrize(("path", "words"), [("nowhere.py", "no such file or folder"), ("empty", "no Python file")])
def test_a_path_without_operators_is_reported(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    found = wrong(tmp_path, f"custom_operator_paths:\n  - {path}\nprocess: [clean_linkz_mapper]\n")
    assert words in found[0].message
    assert found[0].place == "recipe.yaml:2:5"
    assert "did you mean 'clean_links_mapper'?" in found[1].message


def test_a_misspelt_custom_operator_is_suggested(folder: Path, own: str) -> None:
    (problem,) = wrong(folder, f"custom_operator_paths: {own}.py\nprocess: [shuot]\n")
    assert "did you mean 'shout'?" in problem.message


def test_two_files_of_one_name_are_reported(tmp_path: Path, own: str) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{own}.py").write_text(f"def {name}(row): return row\n")
    (problem,) = wrong(tmp_path, "custom_operator_paths: [one, two]\nprocess: [one]\n")
    assert "another module is called" in problem.message


def test_modules_of_the_same_name_beside_two_recipes_are_distinguished(tmp_path: Path, own: str) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        own_operator(tmp_path / name, own, f"def mark(row):\n    return {{**row, 'by': '{name}'}}\n")
    load(tmp_path / "one", f"process: ['{own}:mark']")
    with pytest.raises(dt.DovetailError, match="another module of that name is loaded") as raised:
        load(tmp_path / "two", f"process: ['{own}:mark']")
    assert raised.value.problems[0].code == "DT417"
