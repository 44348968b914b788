"""Groupers: the groups of Data-Juicer, in its order, in bounded memory."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.recipes.operators.key_value_grouper import KeyValueGrouper
from dovetail.recipes.operators.naive_grouper import NaiveGrouper
from recipes.golden_aids import cases, errors, rows

GROUPERS: dict[str, Any] = {"key_value_grouper": KeyValueGrouper, "naive_grouper": NaiveGrouper}


@pytest.mark.parametrize("case", cases(kind="grouper"), ids=lambda case: str(case["name"]))
def test_groups_are_those_of_data_juicer(case: dict[str, Any]) -> None:
    operator = pickle.loads(pickle.dumps(GROUPERS[case["op"]](**case["params"])))
    found = list(operator.process_rows(rows()))
    assert [row["id"] for row in found] == case["rows"]
    all_rows = rows()
    for row in found:
        assert sorted(row) == case["output_keys"]
        assert {field: [all_rows[number][field] for number in row["id"]] for field in row} == row


def test_every_grouper_with_golden_results_is_tested() -> None:
    assert {case["op"] for case in cases(kind="grouper")} == set(GROUPERS)


@pytest.mark.parametrize("error", errors(op="key_value_grouper"))
def test_a_missing_field_is_null_as_in_data_juicer(error: dict[str, Any]) -> None:
    assert error["exception"] is None
    operator = KeyValueGrouper(**error["params"])
    assert operator.columns() == ()
    assert [row["id"] for row in operator.process_rows(rows())] == [list(range(400))]


@pytest.mark.parametrize("operator", [KeyValueGrouper(), NaiveGrouper()], ids=["key_value", "naive"])
def test_an_empty_dataset_has_no_groups(operator: Any) -> None:
    assert list(operator.process_rows([])) == []


def test_missing_fields_of_a_group_are_none() -> None:
    found = list(NaiveGrouper().process_rows([{"a": 1}, {"b": "x"}, {"a": None, "b": [2]}]))
    assert found == [{"a": [1, None, None], "b": [None, "x", [2]]}]


def test_rows_are_grouped_by_text_by_default() -> None:
    operator = KeyValueGrouper(group_by_keys=[])
    operator.text_key = "content"
    texts = ["b", "a", "b", "\ud800", "\x00", "\ud800", "😀"]
    found = [row["content"] for row in operator.process_rows([{"content": text} for text in texts])]
    assert found == [["b", "b"], ["a"], ["\ud800", "\ud800"], ["\x00"], ["😀"]]


def test_values_are_equal_if_their_text_is_equal() -> None:
    values: list[Any] = [1, 1.0, "1", True, None, [1], 1, [1], {"x": 1}]
    found = [row["a"] for row in KeyValueGrouper(group_by_keys=["a"]).process_rows([{"a": value} for value in values])]
    assert found == [[1, 1], [1.0], ["1"], [True], [None], [[1], [1]], [{"x": 1}]]
    assert [type(group[0]) for group in found[:4]] == [int, float, str, bool]


def test_rows_are_grouped_by_several_fields_and_list_items() -> None:
    given_rows = [{"a": {"b": [1, 2]}, "c": n % 2} for n in range(4)] + [{"a": {"b": []}, "c": 0}, {"c": 0}]
    found = [row["c"] for row in KeyValueGrouper(group_by_keys=["a.b.1", "c"]).process_rows(given_rows)]
    assert found == [[0, 0], [1, 1], [0, 0]]


def test_values_of_two_fields_are_not_concatenated() -> None:
    given_rows = [{"a": "x', 'y", "b": "z"}, {"a": "x", "b": "y', 'z"}]
    assert len(list(KeyValueGrouper(group_by_keys=["a", "b"]).process_rows(given_rows))) == 2


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_groups_are_in_the_order_of_their_first_rows_and_no_row_is_lost(values: list[str]) -> None:
    given_rows = [{"text": value, "n": number} for number, value in enumerate(values)]
    found = list(KeyValueGrouper().process_rows(given_rows))
    assert [row["text"][0] for row in found] == list(dict.fromkeys(values))
    assert [row["n"] for row in found] == [[n for n, v in enumerate(values) if v == row["text"][0]] for row in found]


def test_a_group_is_returned_when_it_and_all_groups_before_it_are_complete() -> None:
    read: list[str] = []

    class Source:
        def __iter__(self) -> Any:
            read.clear()
            for text in "aabcbd":
                read.append(text)
                yield {"text": text}

    groups = KeyValueGrouper().groups(Source())
    seen = [("".join(row["text"] for row in group), "".join(read)) for group in groups]
    assert seen == [("aa", "aa"), ("bb", "aabcb"), ("c", "aabcb"), ("d", "aabcbd")]


@pytest.mark.parametrize("value", ["meta.lang", [1], {"a": 1}, 7])
def test_group_by_keys_must_be_a_list_of_names(value: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"group_by_keys must be a list of fields, such as [meta.lang], not {value!r}")
    ):
        KeyValueGrouper(group_by_keys=value)
