from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail import errors
from dovetail.errors import (
    ClusterError,
    ConfigError,
    DovetailError,
    InfeasibleError,
    LedgerError,
    Problem,
    ResourceError,
    did_you_mean,
)

TOO_MANY_GPUS = Problem(
    code="DT101",
    message="7 operators need 14 GPUs at once; the cluster has 2",
    evidence=("7 x num_proc 2 x num_gpus 1 = 14.0 GPUs, and 92.0 CPUs of 32.0",),
    fixes=(
        "drop num_proc and num_gpus from these operators: auto runs all 7 in 1.75 GPUs",
        "mode: sequential, one operator at a time, all 2 GPUs each",
    ),
    place="recipe.yaml:12",
)

ALL: list[Any] = [
    found
    for _name, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, BaseException) and found.__module__ == errors.__name__
]


def test_a_problem_is_rendered_as_the_design_shows_it() -> None:
    assert TOO_MANY_GPUS.render() == (
        "error[DT101] recipe.yaml:12  7 operators need 14 GPUs at once; the cluster has 2\n"
        "  7 x num_proc 2 x num_gpus 1 = 14.0 GPUs, and 92.0 CPUs of 32.0\n"
        "  fix  drop num_proc and num_gpus from these operators: auto runs all 7 in 1.75 GPUs\n"
        "  fix  mode: sequential, one operator at a time, all 2 GPUs each"
    )


def test_a_problem_without_a_place_is_rendered_as_the_style_shows_it() -> None:
    problem = Problem(
        "DT110",
        "stage 'caption' (2 GPUs, 1 CPU) fits on 0 of 4 nodes",
        ("2 of 4 nodes: 1 whole GPU free, 2 needed", "1 of 4 nodes: no GPU", "1 of 4 nodes: 0.5 CPUs free, 1 needed"),
        ("ask for less per worker, stop other workers, or add a bigger node",),
    )
    assert problem.render() == (
        "error[DT110] stage 'caption' (2 GPUs, 1 CPU) fits on 0 of 4 nodes\n"
        "  2 of 4 nodes: 1 whole GPU free, 2 needed\n"
        "  1 of 4 nodes: no GPU\n"
        "  1 of 4 nodes: 0.5 CPUs free, 1 needed\n"
        "  fix  ask for less per worker, stop other workers, or add a bigger node"
    )


def test_a_problem_with_nothing_but_a_message_is_one_line() -> None:
    assert Problem("DT001", "no").render() == "error[DT001] no"


def test_a_problem_can_get_a_place() -> None:
    problem = Problem("DT001", "no", ("because",), ("yes",))
    placed = problem.at("f.yaml:1:2")
    assert placed.render().startswith("error[DT001] f.yaml:1:2  no\n")
    assert (problem.place, placed.at("")) == ("", problem)


def test_a_problem_is_plain_data_too() -> None:
    assert TOO_MANY_GPUS.to_dict() == {
        "code": "DT101",
        "place": "recipe.yaml:12",
        "message": TOO_MANY_GPUS.message,
        "evidence": list(TOO_MANY_GPUS.evidence),
        "fixes": list(TOO_MANY_GPUS.fix_texts),
    }


def test_the_text_of_an_error_has_all_problems() -> None:
    other = Problem("DT102", "and another")
    error = InfeasibleError([TOO_MANY_GPUS, other])
    assert str(error) == f"{TOO_MANY_GPUS.render()}\n{other.render()}"
    assert error.codes == ("DT101", "DT102")
    assert error.problems == (TOO_MANY_GPUS, other)


def test_the_text_of_an_error_has_no_control_characters_of_data() -> None:
    """Python prints errors in terminals."""
    problem = Problem("DT330", "a: item failed: \x1b]0;owned\x07", ("\x1b[2J", "two\nlines"), place="a\u202eb.jsonl:1")
    error = DovetailError(problem)
    assert re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", str(error)) == []
    assert "a: item failed: \\x1b]0;owned\\x07\n" in str(error)
    assert error.problems == (problem,)


def test_one_problem_or_several_make_an_error() -> None:
    one = ConfigError(TOO_MANY_GPUS)
    assert one.problems == (TOO_MANY_GPUS,)
    assert ConfigError(problem for problem in [TOO_MANY_GPUS]).problems == one.problems


def test_an_error_without_a_problem_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        ConfigError([])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("again", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy])
def test_a_pickled_error_keeps_its_kind_and_its_problems(kind: type[DovetailError], again: object) -> None:
    assert callable(again)
    error = kind([TOO_MANY_GPUS, Problem("DT102", "and another")])
    back = again(error)
    assert type(back) is kind
    assert back.problems == error.problems
    assert str(back) == str(error)
    assert back.exit_code == kind.exit_code


@given(st.lists(st.builds(Problem, *[st.text()] * 2, *[st.lists(st.text()).map(tuple)] * 2, st.text()), min_size=1))
def test_an_error_with_any_text_survives_pickling(problems: list[Problem]) -> None:
    back = pickle.loads(pickle.dumps(DovetailError(problems)))
    assert back.problems == tuple(problems)
    assert str(back) == str(DovetailError(problems))


def drawn_tree() -> dict[str, tuple[str | None, int | None]]:
    """Name -> (the name above it, exit code), as the docstring draws it."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str | None, int | None]] = {}
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        match = re.fullmatch(r"(?P<branch>[ │├└─]*)(?P<name>[A-Z]\w+Error)(?:\s+(?P<code>\d+)\s+\S.*)?", line)
        if match is None:
            continue
        depth = len(match["branch"])
        above = [(d, name) for d, name in above if d < depth]
        found[match["name"]] = (above[-1][1] if above else None, int(match["code"]) if match["code"] else None)
        above.append((depth, match["name"]))
    return found


def test_the_tree_in_the_docstring_is_the_tree_of_classes_with_their_exit_codes() -> None:
    real = {
        kind.__name__: (None, None) if kind is DovetailError else (kind.__bases__[0].__name__, kind.exit_code)
        for kind in ALL
    }
    assert drawn_tree() == real


def test_the_exit_codes_are_those_of_the_command_line() -> None:
    codes = {kind: kind.exit_code for kind in (ConfigError, ResourceError, ClusterError, InfeasibleError, LedgerError)}
    assert codes == {ConfigError: 2, ResourceError: 2, ClusterError: 2, InfeasibleError: 3, LedgerError: 1}
    assert all(issubclass(kind, DovetailError) for kind in ALL)


def test_everything_in_the_module_is_exported() -> None:
    assert {kind.__name__ for kind in ALL} <= set(errors.__all__)
    assert all(hasattr(errors, name) for name in errors.__all__)


@pytest.mark.parametrize(
    ("word", "known", "suggestion"),
    [
        ("cpu", ["cpus", "gpus"], " (did you mean 'cpus'?)"),
        ("memroy", ["memory", "gpu_memory"], " (did you mean 'memory'?)"),
        ("CPUS", ["cpus"], " (did you mean 'cpus'?)"),
        ("a100", ["A100", "H100"], " (did you mean 'A100'?)"),
        ("Cluster.YAML", ["cluster.yaml", "other.yaml"], " (did you mean 'cluster.yaml'?)"),
        ("zzz", ["cpus", "memory"], ""),
        ("", ["cpus"], ""),
        ("cpus", [], ""),
    ],
)
def test_the_nearest_known_word_is_suggested_whatever_its_case(word: str, known: list[str], suggestion: str) -> None:
    assert did_you_mean(word, known) == suggestion


@given(st.text(max_size=8), st.lists(st.text(max_size=8), max_size=5))
def test_only_a_known_word_is_ever_suggested(word: str, known: list[str]) -> None:
    suggestion = did_you_mean(word, known)
    assert suggestion == "" or suggestion in {f" (did you mean {name!r}?)" for name in known}
    if word and word.casefold() in {name.casefold() for name in known}:
        assert suggestion


# ---- no code reads a sentence

SENTENCE_METHODS = {
    *("replace", "partition", "rpartition", "split", "rsplit", "startswith", "endswith"),
    *("removeprefix", "removesuffix", "find", "index", "count"),
}
TEXT_ATTRIBUTES = {"message", "fixes", "fix_texts", "evidence"}
FOREIGN_MESSAGES = {
    "backfill.lance_client.error_text": "Lance",
    "data.readers.file_discovery.file_system": "fsspec",
    "documents.configuration._parse": "tomllib",
    "engines.ray.message_handlers._on_agent_died": "Ray",
    "engines.ray.message_handlers.is_node_error": "Ray",
    "engines.ray.message_handlers.is_runtime_env_error": "Ray",
    "jobs.stores.redis_connection.has_words": "Redis",
}
"""Functions that read messages of other libraries, which have no fields for what is needed -> the library."""


class SentenceReaders(ast.NodeVisitor):
    """Functions that search or rewrite the text of an error."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.found: set[str] = set()
        self.function: list[str] = []
        self.texts: list[set[str]] = [set()]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.function.append(node.name)
        self.texts.append(set())
        self.generic_visit(node)
        self.texts.pop()
        self.function.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for target in node.targets:
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            for name, value in zip(targets, values, strict=False):
                if isinstance(name, ast.Name) and self.is_text(value):
                    self.texts[-1].add(name.id)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(value=ast.Name(id="re")) if any(map(self.is_text, node.args)):
                self.report()
            case ast.Attribute(value=value, attr=method) if method in SENTENCE_METHODS and self.is_text(value):
                self.report()
            case ast.Attribute(attr="fullmatch" | "match" | "search" | "sub") if any(map(self.is_text, node.args)):
                self.report()
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        searched = [
            right for op, right in zip(node.ops, node.comparators, strict=True) if isinstance(op, ast.In | ast.NotIn)
        ]
        if any(map(self.is_text, searched)):
            self.report()
        self.generic_visit(node)

    def is_text(self, node: ast.AST) -> bool:
        """Whether an expression is the text of an error, or a part of it."""
        match node:
            case ast.Attribute(attr=attribute):
                return attribute in TEXT_ATTRIBUTES
            case ast.Name(id=name):
                return name in self.texts[-1]
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
                return name in {"error", "problem", "fix", "exception"}
            case ast.Subscript(value=value):
                return self.is_text(value)
            case ast.Call(func=ast.Attribute(value=value)) | ast.BoolOp(values=[value, *_]):
                return self.is_text(value)
        return False

    def report(self) -> None:
        self.found.add(f"{self.module}.{'.'.join(self.function)}")


def test_no_code_reads_the_text_of_an_error() -> None:
    """The subject of a problem is data: `Problem.subject`, `Change`, `Call`, `Text`."""
    source = Path(errors.__file__).parent
    found: set[str] = set()
    for file in source.rglob("*.py"):
        readers = SentenceReaders(".".join(file.relative_to(source).with_suffix("").parts))
        readers.visit(ast.parse(file.read_text(encoding="utf-8")))
        found |= readers.found
    assert sorted(found) == sorted(FOREIGN_MESSAGES)
