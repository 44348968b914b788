"""Selectors: the rows of Data-Juicer, in its order, in bounded memory."""

from __future__ import annotations

import heapq
import importlib
import json
import pickle
import re
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.recipes.operators.base import BadField
from dovetail.recipes.operators.frequency_specified_field_selector import FrequencySpecifiedFieldSelector
from dovetail.recipes.operators.random_selector import RandomSelector
from dovetail.recipes.operators.range_specified_field_selector import RangeSpecifiedFieldSelector
from dovetail.recipes.operators.support.fields import sort_number
from dovetail.recipes.operators.topk_specified_field_selector import TopkSpecifiedFieldSelector
from recipes.golden_aids import cases, errors, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

BY_FIELD = (FrequencySpecifiedFieldSelector, RangeSpecifiedFieldSelector, TopkSpecifiedFieldSelector)
ENOUGH: dict[type[Any], dict[str, Any]] = {
    FrequencySpecifiedFieldSelector: {"topk": 2},
    RangeSpecifiedFieldSelector: {"lower_rank": 1, "upper_rank": 2},
    TopkSpecifiedFieldSelector: {"topk": 2},
}
"""Parameters with which each selector reads its field."""
VALUES = st.lists(st.integers(-3, 3), max_size=30)


def selector_named(name: str, **parameters: Any) -> Any:
    module = importlib.import_module(f"dovetail.recipes.operators.{name}")
    return getattr(module, "".join(part.capitalize() for part in name.split("_")))(**parameters)


def with_values(values: list[Any]) -> list[dict[str, Any]]:
    return [{"a": value, "in": {"a": value}} for value in values]


class CountedPasses:
    """Rows that are created on every pass, and the number of passes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pass_count = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.pass_count += 1
        return ({"a": number * 7919 % self.number, "text": "a" * 1000} for number in range(self.number))


@pytest.mark.parametrize("case", cases(kind="selector"), ids=lambda case: str(case["name"]))
def test_rows_and_order_are_those_of_data_juicer(case: dict[str, Any]) -> None:
    operator = selector_named(case["op"], **case["params"])
    assert list(operator.select_rows(rows())) == case["rows"]
    assert [row["id"] for row in operator.process_rows(rows())] == case["rows"]


def test_every_selector_with_golden_results_is_tested() -> None:
    assert {case["op"] for case in cases(kind="selector")} == {
        "frequency_specified_field_selector",
        "range_specified_field_selector",
        "topk_specified_field_selector",
    }


@pytest.mark.parametrize(
    "error", [e for e in errors() if e["op"].endswith("_selector")], ids=lambda e: e["op"] + json.dumps(e["params"])
)
def test_configurations_that_data_juicer_refuses_are_refused(error: dict[str, Any]) -> None:
    operator = selector_named(error["op"], **error["params"])
    assert operator.columns() == (error["params"]["field_key"],)
    with pytest.raises(BadField, match=re.escape(repr(error["params"]["field_key"]))):
        operator.select_rows(rows())


@pytest.mark.parametrize("kind", BY_FIELD)
@pytest.mark.parametrize("row", [{}, {"a": None}, {"a": 7}, {"a": {"c": 1}}])
def test_a_missing_field_is_reported(kind: Any, row: dict[str, Any]) -> None:
    with pytest.raises(BadField, match=r"no field 'a\.b'"):
        kind(field_key="a.b", **ENOUGH[kind]).select_rows([{"a": {"b": 1}}, row])


@pytest.mark.parametrize("kind", BY_FIELD)
def test_without_a_field_or_a_limit_all_rows_are_kept_unchanged(kind: Any) -> None:
    for operator in (kind(), kind(field_key="a"), kind(**ENOUGH[kind])):
        assert operator.columns() == ()
        assert list(operator.process_rows([{"b": 2}, {"b": 1}, {}])) == [{"b": 2}, {"b": 1}, {}]
        assert list(operator.process_rows([])) == []


@pytest.mark.parametrize("kind", BY_FIELD)
def test_no_row_and_a_single_row_are_kept(kind: Any) -> None:
    operator = kind(field_key="a", **ENOUGH[kind])
    assert list(operator.process_rows([])) == []
    assert list(operator.process_rows([{"a": 1}])) == [{"a": 1}]


def test_a_single_row_is_kept_for_any_ratio() -> None:
    for operator in (
        TopkSpecifiedFieldSelector(field_key="a", top_ratio=0.1),
        FrequencySpecifiedFieldSelector(field_key="a", top_ratio=0.1),
        RandomSelector(select_ratio=0.1),
    ):
        assert list(operator.process_rows([{"a": 1}])) == [{"a": 1}]


# top


@given(VALUES, st.integers(1, 8), st.booleans(), st.sampled_from([None, 0.0, 0.3, 1.0]), st.sampled_from(["a", "in.a"]))
def test_the_highest_or_lowest_come_first_and_ties_keep_their_order(
    values: list[int], topk: int, reverse: bool, share: float | None, field: str
) -> None:
    operator = TopkSpecifiedFieldSelector(field_key=field, topk=topk, top_ratio=share, reverse=reverse)
    wanted = min(topk, int(share * len(values))) if share else topk
    expected = sorted(range(len(values)), key=values.__getitem__, reverse=reverse)
    numbers = list(operator.select_rows(with_values(values)))
    assert numbers == (expected[:wanted] if len(values) > 1 else list(range(len(values))))


def test_a_ratio_without_a_number_is_a_share_of_all_rows() -> None:
    operator = TopkSpecifiedFieldSelector(field_key="a", top_ratio=0.5)
    assert list(operator.select_rows(with_values([3, 1, 4, 1, 5]))) == [4, 2]


def test_top_level_values_are_compared_as_they_are_and_nested_ones_as_numbers() -> None:
    values = ["10", "9", "x", "8"]
    assert TopkSpecifiedFieldSelector(field_key="a", topk=4).select_rows(with_values(values)) == [2, 1, 3, 0]
    assert TopkSpecifiedFieldSelector(field_key="in.a", topk=4).select_rows(with_values(values)) == [0, 1, 3, 2]
    lowest = TopkSpecifiedFieldSelector(field_key="in.a", topk=4, reverse=False)
    assert lowest.select_rows(with_values(values)) == [3, 1, 0, 2]


def test_values_that_cannot_be_compared_are_reported() -> None:
    for operator in (
        TopkSpecifiedFieldSelector(field_key="a", topk=2),
        TopkSpecifiedFieldSelector(field_key="a", top_ratio=0.9),
    ):
        with pytest.raises(BadField, match=r"the values of field 'a' cannot be compared: .*'NoneType'"):
            operator.select_rows(with_values([1, None, 2]))


def test_topk_holds_only_topk_values() -> None:
    source = CountedPasses(20_000)
    operator = TopkSpecifiedFieldSelector(field_key="a", topk=5)
    tracemalloc.start()
    numbers = operator.select_rows(source)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [number * 7919 % 20_000 for number in numbers] == [19_999, 19_998, 19_997, 19_996, 19_995]
    assert source.pass_count == 1
    assert most < 200_000


@pytest.mark.parametrize(
    "operator",
    [
        FrequencySpecifiedFieldSelector(field_key="a", topk=3),
        RangeSpecifiedFieldSelector(field_key="a", lower_rank=3, upper_percentile=0.5),
        TopkSpecifiedFieldSelector(field_key="a", top_ratio=0.1),
        RandomSelector(select_ratio=0.1),
    ],
    ids=lambda operator: type(operator).__name__,
)
def test_rows_are_read_once_and_pickling_changes_nothing(operator: Any) -> None:
    source = CountedPasses(1000)
    numbers = list(operator.select_rows(source))
    assert source.pass_count == 1
    assert list(pickle.loads(pickle.dumps(operator)).select_rows(source)) == numbers


# range


@given(VALUES, st.integers(1, 30), st.integers(1, 30))
def test_a_range_has_the_rows_of_data_juicer(values: list[int], low: int, high: int) -> None:
    operator = RangeSpecifiedFieldSelector(field_key="a", lower_rank=low, upper_rank=high)
    upper = max(low, min(high, len(values)))
    lowest = heapq.nsmallest(upper, range(len(values)), values.__getitem__)
    expected = heapq.nlargest(upper - low, lowest, values.__getitem__)
    assert list(operator.select_rows(with_values(values))) == (
        expected if len(values) > 1 else list(range(len(values)))
    )


def test_a_range_needs_both_bounds() -> None:
    assert RangeSpecifiedFieldSelector(field_key="a", lower_rank=2).columns() == ()
    assert list(RangeSpecifiedFieldSelector(field_key="a", upper_percentile=0.1).select_rows(with_values([1, 2]))) == [
        0,
        1,
    ]


# frequency


@given(VALUES, st.integers(1, 5), st.booleans())
def test_all_rows_with_a_frequent_value_are_kept_value_by_value(values: list[int], topk: int, reverse: bool) -> None:
    operator = FrequencySpecifiedFieldSelector(field_key="in.a", topk=topk, reverse=reverse)
    kept = [values[number] for number in operator.select_rows(with_values(values))]
    if len(values) > 1:
        chosen = list(dict.fromkeys(kept))
        assert len(chosen) == min(topk, len(set(values)))
        assert kept == [value for value in chosen for _ in range(values.count(value))]
        assert [values.count(v) for v in chosen] == sorted(map(values.count, set(values)), reverse=reverse)[:topk]


def test_strings_numbers_and_null_are_counted_and_equal_numbers_are_one_value() -> None:
    operator = FrequencySpecifiedFieldSelector(field_key="a", topk=1)
    assert operator.select_rows(with_values(["1", 1, 1.0, True, None, "", None])) == [1, 2, 3]
    with pytest.raises(BadField, match="field 'a' is dict, neither a string nor a number"):
        operator.select_rows(with_values([1, {}]))


# lots


def test_a_seed_determines_the_selected_rows() -> None:
    drawn = {
        seed: [row["id"] for row in RandomSelector(select_num=40, seed=seed).process_rows(rows())] for seed in range(5)
    }
    assert all(len(set(numbers)) == 40 and numbers == sorted(numbers) for numbers in drawn.values())
    assert len(set(map(tuple, drawn.values()))) == 5
    assert [row["id"] for row in RandomSelector(select_num=40, seed=3).process_rows(rows())] == drawn[3]
    # the same in every process and Python version: a resumed run must select the same rows
    assert list(RandomSelector(select_num=4).select_rows(rows())) == [12, 57, 327, 379]


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({}, 400),
        ({"select_ratio": 0.1}, 40),
        ({"select_ratio": 0.1, "select_num": 30}, 30),
        ({"select_ratio": 0.1, "select_num": 50}, 40),
        ({"select_num": 500}, 400),
        ({"select_ratio": 1.0}, 400),
        ({"select_ratio": 0.0}, 0),
        ({"select_ratio": 0.001}, 0),
    ],
)
def test_the_smaller_limit_applies_and_no_row_is_selected_twice(parameters: dict[str, Any], kept: int) -> None:
    assert len({row["id"] for row in RandomSelector(**parameters).process_rows(rows())}) == kept
    assert len(list(RandomSelector(**parameters).process_rows(rows()))) == kept


@given(st.integers(2, 200), st.integers(0, 10**9))
def test_every_row_can_be_selected(total: int, seed: int) -> None:
    numbers = RandomSelector(select_num=1, seed=seed).select_rows(with_values([0] * total))
    assert len(numbers) == 1
    assert 0 <= numbers[0] < total


# parameters and values


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        (TopkSpecifiedFieldSelector, {"topk": 0}, "topk must be a whole number of at least 1, not 0"),
        (TopkSpecifiedFieldSelector, {"top_ratio": 1.5}, "top_ratio must be a number from 0 to 1, not 1.5"),
        (TopkSpecifiedFieldSelector, {"field_key": None}, "field_key must be the name of a field, not None"),
        (FrequencySpecifiedFieldSelector, {"topk": True}, "topk must be a whole number of at least 1, not True"),
        (
            FrequencySpecifiedFieldSelector,
            {"top_ratio": "0.1"},
            "top_ratio must be a number from 0 to 1, not '0.1'",
        ),
        (RangeSpecifiedFieldSelector, {"lower_rank": -1}, "lower_rank must be a whole number of at least 1, not -1"),
        (RangeSpecifiedFieldSelector, {"upper_rank": 1.0}, "upper_rank must be a whole number of at least 1, not 1.0"),
        (
            RangeSpecifiedFieldSelector,
            {"lower_percentile": -0.1},
            "lower_percentile must be a number from 0 to 1, not -0.1",
        ),
        (
            RangeSpecifiedFieldSelector,
            {"upper_percentile": float("nan")},
            "upper_percentile must be a number from 0 to 1, not nan",
        ),
        (RandomSelector, {"select_num": 0}, "select_num must be a whole number of at least 1, not 0"),
        (RandomSelector, {"select_ratio": 2}, "select_ratio must be a number from 0 to 1, not 2"),
        (RandomSelector, {"seed": "x"}, "seed must be a whole number, not 'x'"),
    ],
)
def test_invalid_values_are_reported_when_an_operator_is_created(
    kind: Any, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**parameters)


@pytest.mark.parametrize(
    ("value", "number"),
    [(7, 7.0), ("7.5", 7.5), (" 7 ", 7.0), (True, 1.0), ([1, 2], 1.5), ((1, 2), 1.5), ([[1, 2], [3, 6]], 3.0)],
)
def test_values_are_sorted_as_numbers(value: object, number: float) -> None:
    assert sort_number(value) == sort_number(value, lowest=False) == number


@pytest.mark.parametrize(
    "value", [None, "x", "", [], {}, ["1"], [None], [[1], [2, 3]], [1, [2]], pytest.param(10**400, id="huge")]
)
def test_values_that_are_not_numbers_come_last_in_both_orders(value: object) -> None:
    assert (sort_number(value), sort_number(value, lowest=False)) == (-sys.maxsize - 1, sys.maxsize + 1)
