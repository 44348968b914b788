"""JSON Schema of recipes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from dovetail.recipes.catalogue import REQUIRED, known_operators
from dovetail.recipes.schema import schema
from recipes.golden_aids import cases


@cache
def validator() -> Any:
    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema(), allow_nan=False)))


def test_the_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


FULL_RECIPE: dict[str, Any] = {
    "project_name": "full",
    "dataset_path": "data.jsonl",
    "export_path": "out/clean.jsonl",
    "executor_type": "ray",
    "ray_address": "auto",
    "auto_op_parallelism": True,
    "open_monitor": True,
    "open_tracer": True,
    "text_keys": "text",
    "mode": "sequential",
    "max_errors": 10,
    "ordered": True,
    "process": [
        {
            "image_text_similarity_filter": {
                "hf_clip": "openai/clip-vit-base-patch32",
                "min_score": 0.18,
                "memory": "1500MB",
                "num_gpus": 0.25,
                "num_proc": 8,
                "num_cpus": 2,
            }
        },
        {"image_maniqa_filter": {"memory": "2GB", "num_gpus": 1}},
    ],
}
RIGHT: list[dict[str, Any]] = [
    FULL_RECIPE,
    {"process": ["whitespace_normalization_mapper"]},
    {"process": [{"clean_links_mapper": None}, {"clean_links_mapper": {}}]},
    {"process": [{"text_length_filter": {"min_len": 50, "max_len": 5000, "reversed_range": True}}]},
    {"process": [{"text_length_filter": {"min_len": 1e3, "num_proc": [2, 8], "batch_size": 100}}]},
    {"process": [{"text_length_filter": {"num_proc": -1, "accelerator": "cpu", "text_key": "body"}}]},
    {"process": [{"text_length_filter": {"workers": "auto", "resources": {"cpus": 0.5, "memory": "1GB"}}}]},
    {"process": [{"audio_size_filter": {"adapter": "data_juicer", "call_timeout": "5m", "retries": 2}}]},
    {"process": [{"replace_content_mapper": {"pattern": ["a", "b"], "repl": "x"}}]},
    {"process": [{"llm_extract_mapper": {"input_keys": ["text"], "output_schema": {"a": "b"}}}]},
    {"process": ["my_package.module:Clean", {"my_package.module:clean": {"anything": 1}}]},
    {"process": ["my_filter", {"my_filter": {"anything": 1}}], "custom_operator_paths": ["operators.py"]},
    {"process": ["clean_ip_mapper"], "op_fusion": False, "use_cache": True, "np": 4, "trace_num": None},
]
WRONG: list[dict[str, Any]] = [
    {},
    {"process": []},
    {"process": None},
    {"process": {"clean_links_mapper": None}},
    {"process": ["clean_link_mapper"]},
    {"process": [{"clean_link_mapper": None}]},
    {"process": [5]},
    {"process": [{}]},
    {"process": [{"clean_links_mapper": None, "clean_ip_mapper": None}]},
    {"process": [{"clean_links_mapper": "x"}]},
    {"process": [{"text_length_filter": {"min_length": 5}}]},
    {"process": [{"text_length_filter": {"min_len": "5"}}]},
    {"process": [{"text_length_filter": {"min_len": 5.5}}]},
    {"process": [{"text_length_filter": {"min_len": True}}]},
    {"process": [{"text_length_filter": {"reversed_range": "yes"}}]},
    {"process": [{"clean_ip_mapper": {"reversed_range": True}}]},
    {"process": [{"document_minhash_deduplicator": {"jaccard_threshold": 1.5}}]},
    {"process": [{"document_minhash_deduplicator": {"window_size": 0}}]},
    {"process": [{"remove_table_text_mapper": {"min_col": 1}}]},
    {"process": [{"image_shape_filter": {"any_or_all": "some"}}]},
    {"process": [{"clean_ip_mapper": {"num_proc": 0}}]},
    {"process": [{"clean_ip_mapper": {"num_proc": [1, 2, 3]}}]},
    {"process": [{"clean_ip_mapper": {"memory": 1500}}]},
    {"process": [{"clean_ip_mapper": {"memory": "-2GB"}}]},
    {"process": [{"clean_ip_mapper": {"memory": "1500"}}]},
    {"process": [{"clean_ip_mapper": {"num_gpus": -1}}]},
    {"process": [{"clean_ip_mapper": {"accelerator": "tpu"}}]},
    {"process": [{"clean_ip_mapper": {"resources": {"cpu": 1}}}]},
    {"process": [{"clean_ip_mapper": {"adapter": "spark"}}]},
    {"process": [{"llm_extract_mapper": None}]},
    {"process": [{"llm_extract_mapper": {"input_keys": ["text"]}}]},
    {"process": ["clean_ip_mapper"], "proces": []},
    {"process": ["clean_ip_mapper"], "mode": "parallel"},
    {"process": ["clean_ip_mapper"], "np": 0},
    {"process": ["clean_ip_mapper"], "open_tracer": "yes"},
    {"process": [{"clean_ip_mapper": {"nonsense": 1}}], "custom_operator_paths": ["operators.py"]},
]


@pytest.mark.parametrize("recipe", RIGHT, ids=lambda recipe: json.dumps(recipe)[:60])
def test_a_valid_recipe_matches_the_schema(recipe: dict[str, Any]) -> None:
    validator().validate(recipe)


@pytest.mark.parametrize("recipe", WRONG, ids=lambda recipe: json.dumps(recipe)[:60])
def test_an_invalid_recipe_does_not_match_the_schema(recipe: dict[str, Any]) -> None:
    assert not validator().is_valid(recipe)


def test_every_operator_matches_the_schema_with_and_without_its_defaults() -> None:
    process: list[Any] = []
    for name, entry in known_operators().items():
        defaults = {key: parameter.default for key, parameter in entry.parameters.items()}
        needed = {key: ["x"] if "keys" in key else {} for key, default in defaults.items() if default is REQUIRED}
        process += [{name: {**defaults, **needed}}, {name: needed or None}]
    validator().validate({"process": process})


def test_every_configuration_of_the_golden_results_matches_the_schema() -> None:
    validator().validate({"process": [{case["op"]: case["params"]} for case in cases()]})


def test_the_schema_is_small_and_a_copy() -> None:
    assert len(json.dumps(schema())) < 300_000
    assert schema() == schema()
