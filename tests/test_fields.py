"""Declarations of fields: mistakes, problems, JSON Schema and table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dovetail.documents.fields import (
    FLAG,
    NULL,
    PATHS,
    STRING,
    TEXT,
    Field,
    MissingKey,
    Record,
    UnknownKey,
    WrongValue,
    choice,
    file_problem,
    list_of,
    mapping_of,
    number,
    record_of,
    record_type,
    setting_problem,
    whole,
)
from dovetail.documents.yaml_writer import YAML
from dovetail.errors import UNSET

COUNT = whole(1, 10)
LEAF = Record("Leaf", "One leaf.", (Field("size", COUNT, "Size of the leaf.", required=True),))
TREE = Record(
    "Tree",
    "One tree.",
    (
        Field("name", TEXT, "Name of the tree.", required=True),
        Field("height", number(0, 100, note="it is measured"), "Height in metres.", 1, nullable=True),
        Field("leaves", list_of(record_type(LEAF, {"size": 1})), "The leaves."),
        Field("kind", choice(("oak", "elm")), "Kind of tree: oak|elm.", "oak"),
        Field("tags", mapping_of(STRING, "a mapping of names to strings", {"park": "north"}), "Labels.", {}),
        Field("evergreen", FLAG, "", False),
    ),
)


def test_a_valid_mapping_has_no_mistakes() -> None:
    data = {"name": "a", "height": None, "leaves": [{"size": 2}], "kind": "elm", "tags": {"a": ""}, "evergreen": True}
    assert list(TREE.mistakes(data)) == []


def test_all_mistakes_of_a_mapping_are_found_with_their_paths() -> None:
    data: dict[Any, Any] = {
        "height": "x",
        "leaves": [{"size": 0, "colour": 1}, 5],
        "kind": "fir",
        "tags": {"a": 1},
        7: 1,
    }
    found = [(type(mistake), mistake.path) for mistake in TREE.mistakes(data)]
    assert found == [
        (UnknownKey, ("7",)),
        (MissingKey, ("name",)),
        (WrongValue, ("height",)),
        (UnknownKey, ("leaves", 0, "colour")),
        (WrongValue, ("leaves", 0, "size")),
        (WrongValue, ("leaves", 1)),
        (WrongValue, ("kind",)),
        (WrongValue, ("tags", "a")),
    ]


@pytest.mark.parametrize(
    ("name", "value", "python", "yaml", "fixes"),
    [
        ("height", 200, "height=200 is not a number from 0 to 100", "height: 200", ("height=100",)),
        ("height", "x", "height='x' is not a number from 0 to 100", "height: 'x'", ("height=1",)),
        ("kind", "fir", "kind='fir' is not one of oak, elm", "kind: 'fir'", ('kind="oak"',)),
        ("evergreen", 1, "evergreen=1 is not True or False", "evergreen: 1", ("evergreen=True",)),
        ("tags", {"a": 1}, "tags['a']=1 is not a string", "tags['a']: 1", ('tags={"a": "x"}',)),
    ],
)
def test_a_mistake_in_an_argument_is_spelled_as_python_or_yaml(
    name: str, value: Any, python: str, yaml: str, fixes: tuple[str, ...]
) -> None:
    ((field, mistake),) = TREE.value_mistakes({name: value})
    problem = setting_problem(field, mistake, "DT034", "tree 'a'")
    assert (problem.code, problem.message) == ("DT034", f"tree 'a': {python}")
    assert problem.fix_texts[: len(fixes)] == fixes
    assert YAML.problem(problem).message.startswith(f"tree 'a': {yaml} is not")


def test_a_number_that_is_measured_can_be_left_out() -> None:
    ((_, mistake),) = TREE.value_mistakes({"height": -1})
    assert setting_problem("height", mistake, "DT034").fix_texts == ("height=1", "omit height  # it is measured")


def test_a_mistake_in_a_file_has_the_path_and_a_line_to_write() -> None:
    problems = [file_problem(mistake) for mistake in TREE.mistakes({"leaves": [{"size": 0}], "evergreen": 1})]
    assert [(problem.code, problem.message, problem.fix_texts) for problem in problems] == [
        ("DT012", "name is missing", ("name: utf-8",)),
        ("DT013", "leaves[0].size should be a whole number from 1 to 10, not 0", ("size: 1",)),
        ("DT013", "evergreen should be true or false, not 1", ("evergreen: true",)),
    ]


@pytest.mark.parametrize(
    ("value", "near"), [(0, 1), (11, 10), ("7", 7), ("x", 1), (True, 1), (None, 1), (2.5, 2), (10**400, 10)]
)
def test_the_fix_of_a_whole_number_is_the_nearest_valid_one(value: Any, near: int) -> None:
    (mistake,) = COUNT.check(value)
    assert isinstance(mistake, WrongValue)
    assert mistake.instead == (near,)


def test_an_invalid_mapping_is_corrected_as_a_whole_unless_a_fix_cannot_repeat_it() -> None:
    tags = TREE.by_name["tags"].type
    corrected = [mistake.corrected for mistake in tags.check({"a": 1, "b": "c"}) if isinstance(mistake, WrongValue)]
    assert corrected == [{"a": "x", "b": "c"}]
    corrected = [mistake.corrected for mistake in tags.check({"a": 1, "b": "\0"}) if isinstance(mistake, WrongValue)]
    assert corrected == [{"park": "north"}]


def test_the_schema_comes_from_the_declaration() -> None:
    schema = TREE.schema()
    assert (schema["required"], schema["additionalProperties"]) == (["name"], False)
    assert schema["properties"]["height"] == {
        "anyOf": [{"type": "number", "minimum": 0, "maximum": 100}, NULL],
        "default": 1,
        "description": "Height in metres.",
    }
    assert schema["properties"]["leaves"]["items"]["required"] == ["size"]
    assert "description" not in schema["properties"]["evergreen"]
    assert Field("path", PATHS, "", nullable=True).schema()["anyOf"][-1] == NULL


def test_the_table_comes_from_the_declaration() -> None:
    lines = TREE.table().splitlines()
    assert len(lines) == 2 + len(TREE.fields)
    assert lines[2] == "| `name` | a string | required | Name of the tree. |"
    assert lines[5] == r"| `kind` | one of oak, elm | `oak` | Kind of tree: oak\|elm. |"


@dataclass
class Bush:
    name: str
    height: float | None = None
    kind: str = "oak"


def test_the_record_of_a_dataclass_has_its_defaults() -> None:
    declared = (Field("kind", TEXT, ""), Field("name", TEXT, ""), Field("height", number(0, 9), ""))
    record = record_of(Bush, "Bush", "", declared)
    assert [(one.name, one.default, one.required, one.nullable) for one in record.fields] == [
        ("name", UNSET, True, False),
        ("height", None, False, True),
        ("kind", "oak", False, False),
    ]
    with pytest.raises(AssertionError, match="Bush"):
        record_of(Bush, "Bush", "", declared[:2])
