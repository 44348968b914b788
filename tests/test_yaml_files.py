"""YAML files as Dovetail writes them: what was written is what a parser reads."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from dovetail.documents.yaml_writer import Commented, yaml_document, yaml_documents

TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp", "Cn"]), max_size=12) | st.sampled_from(
    ["yes", "null", "1", "1e3", "0x1", "1:30", "- a", "# no", "a: b", "*", "~", "2020-01-01", "a\nb\n", "0.0.0.0", ""]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=20
)


def commented(value: Any) -> Any:
    """The value with comments everywhere."""
    if isinstance(value, dict):
        return {key: Commented(commented(part), f"about {len(key)}\n\ntwo: lines") for key, part in value.items()}
    return [Commented(commented(part), "- item") for part in value] if isinstance(value, list) else value


@given(st.dictionaries(TEXTS, VALUES, max_size=5))
def test_a_document_is_read_as_it_was_written(data: dict[str, Any]) -> None:
    assert (yaml.safe_load(yaml_document(data, "A file.\n\n--- # x")) or {}) == data
    assert (yaml.safe_load(yaml_document(commented(data))) or {}) == data


def test_several_documents_are_separated() -> None:
    text = yaml_documents([{"a": 1}, {"b": [{"c": [], "d": {}}, [1, [2, {"e": 3}]]]}], "Two.")
    assert list(yaml.safe_load_all(text)) == [{"a": 1}, {"b": [{"c": [], "d": {}}, [1, [2, {"e": 3}]]]}]
    assert text.startswith("# Two.\na: 1\n---\nb:\n")


def test_comments_stand_above_what_they_are_about() -> None:
    data = {"a": Commented({"b": 1}, "outer"), "c": [Commented("x", "item")]}
    assert yaml_document(data) == "# outer\na:\n  b: 1\nc:\n  # item\n  - x\n"
