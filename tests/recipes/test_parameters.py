"""Validation of operator parameters."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dovetail.recipes.catalogue import BASE_PARAMETERS, REQUIRED, Parameter, known_operators, native_class
from dovetail.recipes.operators.base import Mapper
from dovetail.recipes.parameter_types import parse_number, parse_types, to_yaml, type_text
from dovetail.recipes.parameters import (
    WORKER_PARAMETERS,
    coerce_parameters,
    constructor_problem,
    example_value,
    is_valid,
    parameter_problems,
)
from recipes.golden_aids import cases

if TYPE_CHECKING:
    from dovetail.errors import Problem

PARAMETERS = [
    pytest.param(entry.name, parameter, id=f"{entry.name}-{parameter.name}")
    for entry in known_operators().values()
    for parameter in entry.parameters.values()
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["1e3", ".inf"]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=5,
)


def problems_of(name: str, **given: Any) -> list[tuple[str, Problem]]:
    return list(parameter_problems(known_operators()[name], given))


def single_problem(name: str, **given: Any) -> Problem:
    """The one problem there is; its first fix, put in, leaves none."""
    ((key, problem),) = problems_of(name, **given)
    assert key in given
    assert problem.code == "DT412"
    assert problems_of(name, **{**given, **yaml.safe_load(problem.fix_texts[0])}) == []
    return problem


def test_the_default_of_every_parameter_of_every_operator_passes_its_own_check() -> None:
    for entry in known_operators().values():
        needed = {"input_keys": ["text"], "output_schema": {"a": "b"}} if entry.name == "llm_extract_mapper" else {}
        defaults = {key: parameter.default for key, parameter in entry.parameters.items()}
        assert list(parameter_problems(entry, {**defaults, **needed})) == []
        assert list(parameter_problems(entry, needed)) == []


def test_every_parameter_has_a_valid_example_that_yaml_can_hold() -> None:
    for entry in known_operators().values():
        for parameter in entry.parameters.values():
            example = example_value(parameter)
            assert is_valid(parameter, example), (entry.name, parameter)
            assert yaml.safe_load(f"key: {to_yaml(example)}") == {"key": example}


def test_the_configurations_of_the_golden_results_are_valid() -> None:
    for case in cases():
        assert list(parameter_problems(known_operators()[case["op"]], case["params"])) == []


def test_every_type_word_refuses_something() -> None:
    for entry in known_operators().values():
        for parameter in entry.parameters.values():
            values: list[object] = [5.5, "abc", {}, [{}], True]
            assert parameter.kind == "any" or not all(is_valid(parameter, value) for value in values), parameter


def test_an_unknown_parameter_is_reported_with_a_suggestion() -> None:
    ((key, problem),) = problems_of("text_length_filter", maxlen=5)
    assert (key, problem.code) == ("maxlen", "DT411")
    assert problem.message == "text_length_filter: there is no parameter 'maxlen' (did you mean 'max_len'?)"
    assert problem.evidence == ("its own: min_len, max_len",)
    assert problem.fix_texts == ("write max_len instead of maxlen",)


def test_common_parameters_are_suggested() -> None:
    ((_, problem),) = problems_of("text_length_filter", num_procs=5)
    assert "did you mean 'num_proc'?" in problem.message
    ((_, problem),) = problems_of("whitespace_normalization_mapper", qqqqq=5)
    assert problem.evidence == ("whitespace_normalization_mapper has no parameters of its own",)
    assert problem.fix_texts == ("remove qqqqq",)


def test_parameters_of_filters_are_unknown_to_other_operators() -> None:
    assert problems_of("text_length_filter", reversed_range=True) == []
    assert [problem.code for _, problem in problems_of("clean_ip_mapper", reversed_range=True)] == ["DT411"]


def test_a_quoted_number_is_reported_as_a_string() -> None:
    problem = single_problem("text_length_filter", min_len="5")
    assert problem.message == (
        "text_length_filter: min_len is '5' (a string, because it is quoted), but must be a whole number"
    )
    assert problem.fix_texts == ("min_len: 5",)
    assert single_problem("special_characters_filter", max_ratio="0.2").fix_texts == ("max_ratio: 0.2",)
    assert single_problem("text_length_filter", min_len="five").fix_texts == ("min_len: 10",)


def test_true_is_not_a_number_and_1_is_not_a_flag() -> None:
    assert "is true, but must be a whole number" in single_problem("text_length_filter", min_len=True).message
    assert single_problem("document_deduplicator", lowercase=1).fix_texts == ("lowercase: true",)
    assert single_problem("document_deduplicator", lowercase="no").fix_texts == ("lowercase: false",)
    assert single_problem("document_deduplicator", lowercase=7).fix_texts == ("lowercase: false",)


def test_a_bare_no_for_a_string_is_reported_as_the_boolean_that_yaml_reads() -> None:
    problem = single_problem("word_repetition_filter", lang=False)  # lang: no, for Norwegian
    assert "YAML reads a bare yes, no, on and off as true and false" in problem.message
    assert problem.fix_texts == ("lang: 'no'",)


def test_a_number_for_a_string_is_fixed_by_quotes() -> None:
    assert single_problem("clean_ip_mapper", repl=5).fix_texts == ("repl: '5'",)


def test_a_string_for_a_list_is_fixed_by_brackets() -> None:
    assert single_problem("extract_entity_relation_mapper", entity_types="person").fix_texts == (
        "entity_types: ['person']",
    )


def test_whole_numbers_may_be_written_as_floats_but_must_be_whole() -> None:
    assert problems_of("text_length_filter", min_len=1e3) == []
    assert problems_of("text_length_filter", min_len=-0.0) == []
    assert single_problem("text_length_filter", min_len=5.5).fix_texts == ("min_len: 6",)


def test_a_converted_value_has_the_required_type() -> None:
    found = coerce_parameters(
        known_operators()["text_length_filter"], {"min_len": 1e3, "max_len": math.inf, "num_proc": 2.0}
    )
    assert found == {"min_len": 1000, "max_len": sys.maxsize, "num_proc": 2.0}
    assert type(found["min_len"]) is type(found["max_len"]) is int
    assert type(found["num_proc"]) is float
    assert coerce_parameters(known_operators()["stopwords_filter"], {"words_aug_group_sizes": [2.0]}) == {
        "words_aug_group_sizes": [2]
    }
    assert (
        repr(coerce_parameters(known_operators()["special_characters_filter"], {"max_ratio": 1.0}))
        == "{'max_ratio': 1.0}"
    )


def test_nan_is_never_valid_and_infinity_only_for_bounds() -> None:
    for name, key in (("text_length_filter", "max_len"), ("special_characters_filter", "max_ratio")):
        assert problems_of(name, **{key: math.inf}) == []
        single_problem(name, **{key: math.nan})
    assert problems_of("specified_numeric_field_filter", field_key="a", min_value=-math.inf, max_value=math.inf) == []
    for name, key in (
        ("text_chunk_mapper", "max_len"),
        ("document_minhash_deduplicator", "num_permutations"),
        ("document_minhash_deduplicator", "jaccard_threshold"),
        ("image_face_blur_mapper", "radius"),
    ):
        assert "is .inf, but must be" in single_problem(name, **{key: math.inf}).message


@pytest.mark.parametrize(
    ("name", "key", "value", "wanted", "fix"),
    [
        ("document_minhash_deduplicator", "jaccard_threshold", 1.5, "a number from 0 to 1", 1),
        ("document_minhash_deduplicator", "jaccard_threshold", -0.1, "a number from 0 to 1", 0),
        ("document_minhash_deduplicator", "window_size", 0, "a whole number above 0", 1),
        ("text_chunk_mapper", "overlap_len", -1, "a whole number of 0 or more", 0),
        ("remove_table_text_mapper", "max_col", 21, "a whole number from 2 to 20", 20),
        ("video_motion_score_filter", "sampling_fps", 0, "a number above 0", 1),
        ("stopwords_filter", "words_aug_group_sizes", [0], "a list of whole numbers above 0", [2]),
        ("stopwords_filter", "words_aug_group_sizes", 3, "a list of whole numbers above 0", [3]),
        ("image_shape_filter", "any_or_all", "some", "'any' or 'all'", "any"),
        ("image_nsfw_filter", "any_or_all", "al", "'any' or 'all'", "any"),
        ("replace_content_mapper", "pattern", ["a", 5], "a string, a list of strings or null", "abc"),
        ("llm_quality_score_filter", "model_params", [], "a mapping", {}),
        ("specified_field_filter", "target_value", "web", "a list", ["web"]),
    ],
)
def test_a_value_out_of_range_is_reported_with_the_range_and_a_valid_value(
    name: str, key: str, value: object, wanted: str, fix: object
) -> None:
    problem = single_problem(name, **{key: value})
    assert problem.message.endswith(f"but must be {wanted}")
    assert yaml.safe_load(problem.fix_texts[0]) == {key: fix}


def test_a_misspelt_choice_is_reported_with_a_suggestion() -> None:
    assert "(did you mean 'max'?)" in single_problem("image_text_similarity_filter", reduce_mode="maxx").message


def test_null_is_valid_only_for_nullable_parameters() -> None:
    assert problems_of("clean_ip_mapper", pattern=None) == []
    assert single_problem("clean_ip_mapper", repl=None).message == "clean_ip_mapper: repl is null, but must be a string"


def test_a_missing_required_parameter_is_reported() -> None:
    found = dict(problems_of("llm_extract_mapper"))
    assert found.keys() == {"input_keys", "output_schema"}
    assert found["input_keys"].message == "llm_extract_mapper: input_keys is missing; it must be a list of strings"
    given = {key: value for problem in found.values() for key, value in yaml.safe_load(problem.fix_texts[0]).items()}
    assert problems_of("llm_extract_mapper", **given) == []


def test_all_problems_are_reported_at_once() -> None:
    found = problems_of("special_characters_filter", min_ratio="a", max_ratio=math.nan, nonsense=1, text_key=5)
    assert [(key, problem.code) for key, problem in found] == [
        ("min_ratio", "DT412"),
        ("max_ratio", "DT412"),
        ("nonsense", "DT411"),
        ("text_key", "DT412"),
    ]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("text_length_filter", {"min_len": 100, "max_len": 50}),
        ("special_characters_filter", {"min_ratio": 0.5, "max_ratio": 0.1}),
        ("image_text_similarity_filter", {"min_score": 0.9, "max_score": 0.2}),
        ("image_shape_filter", {"min_width": 64, "max_width": 32}),
        ("remove_long_words_mapper", {"min_len": 9, "max_len": 3}),
        ("image_size_filter", {"min_size": "2GB", "max_size": "10MB"}),
        ("video_aspect_ratio_filter", {"min_ratio": "21/9", "max_ratio": "9:21"}),
    ],
)
def test_a_minimum_above_the_maximum_is_an_error(name: str, given: dict[str, Any]) -> None:
    problem = single_problem(name, **given)
    assert "is greater than max_" in problem.message
    assert len(problem.fix_texts) == 2
    for fix in problem.fix_texts:
        assert problems_of(name, **{**given, **yaml.safe_load(fix)}) == []


def test_a_minimum_above_the_default_maximum_is_an_error_and_vice_versa() -> None:
    problem = single_problem("special_characters_filter", min_ratio=0.5)
    assert problem.message == (
        "special_characters_filter: min_ratio (0.5) is greater than max_ratio (0.25, its default)"
    )
    ((key, problem),) = problems_of("text_length_filter", max_len=5)
    assert key == "max_len"
    assert "min_len (10, its default) is greater than max_len (5)" in problem.message


def test_equal_or_incomparable_bounds_are_accepted() -> None:
    assert problems_of("text_length_filter", min_len=50, max_len=50) == []
    assert problems_of("image_size_filter", min_size="0", max_size="1TB") == []
    assert problems_of("image_size_filter", min_size="what?", max_size="1TB") == []
    assert problems_of("video_aspect_ratio_filter", min_ratio="1/0", max_ratio="1e999999999") == []
    assert [key for key, _ in problems_of("text_length_filter", min_len="100", max_len=50)] == ["min_len"]


def test_worker_settings_are_not_checked_as_parameters() -> None:
    assert problems_of("text_length_filter", num_proc="x", memory=-1, batch_size=None, workers={}, adapter=5) == []
    assert WORKER_PARAMETERS & BASE_PARAMETERS.keys()
    assert [key for key, _ in problems_of("general_fused_op", batch_size="x")] == ["batch_size"]  # its own parameter


@pytest.mark.parametrize(
    ("key", "value"), [("text_key", 5), ("image_key", None), ("turbo", "yes"), ("skip_op_error", 1), ("work_dir", [])]
)
def test_common_parameters_of_every_operator_are_checked(key: str, value: object) -> None:
    single_problem("clean_ip_mapper", **{key: value})


@settings(max_examples=200, deadline=None)
@given(value=VALUES, number=st.integers(0, len(PARAMETERS) - 1))
def test_the_first_fix_is_valid_for_any_value(value: Any, number: int) -> None:
    name, parameter = PARAMETERS[number].values
    assert isinstance(name, str)
    assert isinstance(parameter, Parameter)
    for key, problem in parameter_problems(known_operators()[name], {parameter.name: value}):
        if key == parameter.name and "is above" not in problem.message:
            (fixed,) = yaml.safe_load(problem.fix_texts[0]).values()
            assert is_valid(parameter, fixed)
            assert len(problem.message) < 300


@settings(max_examples=200, deadline=None)
@given(VALUES.filter(lambda value: "nan" not in repr(value)))
@example({"Null": None, "yes": 1, "OFF": 2, "True": 3})
def test_suggested_values_are_read_back_from_yaml(value: Any) -> None:
    assert yaml.safe_load(f"key: {to_yaml(value)}")["key"] == value


def test_type_words_are_rendered_in_english() -> None:
    assert type_text("'avg'|'max'|'min'") == "'avg', 'max' or 'min'"
    assert type_text("int>0|ints>0", nullable=True) == "a whole number above 0, a list of whole numbers above 0 or null"
    with pytest.raises(AssertionError, match="not a type word"):
        parse_types("int<5")


def test_only_quoted_numbers_are_suggested_as_numbers() -> None:
    found = [parse_number(text) for text in ("5", " 5.5 ", "-1e3", "1e400", "5a", "", "nan", "inf", "1_000", "٣")]
    assert found == [5, 5.5, -1000, None, None, None, None, None, None, None]


class _Picky(Mapper):
    def __init__(self, pattern: str = "a", repl: str = "", limit: int = 5) -> None:
        if len(pattern) != len(repl) + 1:
            raise ValueError(f"pattern has {len(pattern)} characters, and repl {len(repl)}")
        if limit > 5:
            raise TypeError("limit is too much")


def test_errors_of_the_operator_itself_are_reported_with_a_valid_value() -> None:
    assert constructor_problem(_Picky, {"pattern": "ab", "repl": "x"}) is None
    problem = constructor_problem(_Picky, {"pattern": "abc", "limit": 5})
    assert problem is not None
    assert problem.code == "DT415"
    assert problem.message == "does not accept these parameters: pattern has 3 characters, and repl 0"
    assert problem.evidence == ("given: {pattern: 'abc', limit: 5}",)
    assert problem.fix_texts == ("remove pattern (default: 'a')",)
    problem = constructor_problem(_Picky, {"limit": 6})
    assert problem is not None
    assert problem.fix_texts == ("remove limit (default: 5)",)


def test_an_operator_with_the_adapter_keeps_it_in_the_fix() -> None:
    made = native_class("alphanumeric_filter")
    assert made is not None
    problem = constructor_problem(made, {"tokenization": True})
    assert problem is not None
    assert problem.code == "DT415"
    assert problem.fix_texts == ("adapter: data_juicer",)


def test_native_operators_accept_their_defaults() -> None:
    for name, entry in known_operators().items():
        made = native_class(name)
        needs_a_field = name.startswith("specified_") or "_field_" in name
        if made is not None and not needs_a_field:
            defaults = {key: parameter.default for key, parameter in entry.parameters.items()}
            assert REQUIRED not in defaults.values()
            assert constructor_problem(made, defaults) is None, name
