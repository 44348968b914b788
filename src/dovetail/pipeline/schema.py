"""JSON Schema of pipeline files."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from dovetail.pipeline.durations import DURATION_LIMIT_S, DURATION_PATTERN
from dovetail.pipeline.error_policy import FINAL_ACTIONS, MAX_RETRIES
from dovetail.pipeline.source_sink import SIZE_PATTERN, source_sink_schemas
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_validation import (
    COUNTS,
    NAME_LIMIT,
    NAME_PATTERN,
    NUMBERS,
    ON_ERROR,
    RECYCLE_LIMIT,
    RUN_PATTERN,
    WORKERS_LIMIT,
)
from dovetail.resources.resources import CODECS_LIMIT, CPUS_LIMIT, CUSTOM_LIMIT, GPUS_LIMIT, Resources

Schema = dict[str, Any]

NAME: Schema = {"type": "string", "minLength": 1, "maxLength": NAME_LIMIT, "pattern": NAME_PATTERN}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
SIZE: Schema = {"type": "string", "pattern": SIZE_PATTERN}
SECONDS: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": DURATION_LIMIT_S}
AGE: Schema = {"type": "string", "pattern": DURATION_PATTERN}
NULL: Schema = {"type": "null"}


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _list(items: Schema, **settings: object) -> Schema:
    return {"type": "array", "items": items, **settings}


RETRY_SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "retry": {
            "anyOf": [TEXT, _list({"type": "string", "minLength": 1})],
            "description": "Exception types that are retried; none: all.",
        },
        "times": {**_whole(1, MAX_RETRIES), "description": "Retries after the first attempt."},
        "backoff": {
            "anyOf": [_number(0, DURATION_LIMIT_S), AGE],
            "description": "Wait before the first retry; it doubles with every further retry.",
        },
        "then": {
            "enum": list(FINAL_ACTIONS),
            "description": "When retries are used up: fail the run or skip the items.",
        },
    },
    "additionalProperties": False,
}
WORKERS = _whole(1, WORKERS_LIMIT)
STAGE_KEYS: dict[str, tuple[Schema, str]] = {
    "name": (NAME, "What the stage is called; unique in the pipeline."),
    "run": ({"type": "string", "pattern": RUN_PATTERN}, "The function or class, as 'package.module:name'."),
    "resources": ({"$ref": "#/$defs/resources"}, "What one worker needs."),
    "batch_size": (_whole(*COUNTS["batch_size"]), "Items per call."),
    "workers": (
        {"anyOf": [{"const": "auto"}, WORKERS, _list(WORKERS, minItems=2, maxItems=2)]},
        "How many workers: auto, n, or [least, most].",
    ),
    "workers_per_node": (_whole(*COUNTS["workers_per_node"]), "So many workers on every node; instead of workers."),
    "slots": (_whole(*COUNTS["slots"]), "Batches in flight per worker."),
    "rate": (_number(*NUMBERS["rate"]), "Items per second that one worker takes in; measured if left out."),
    "returns": (_number(*NUMBERS["returns"]), "Items out per item in; measured if left out."),
    "ranks": (_whole(*COUNTS["ranks"]), "Processes per worker, each with these resources."),
    "retries": (_whole(*COUNTS["retries"]), "How often a batch that failed is tried again."),
    "on_error": (
        {"anyOf": [{"enum": list(ON_ERROR)}, RETRY_SCHEMA]},
        "When a call fails: fail the run, skip its items, or retry it with backoff.",
    ),
    "timeout": ({"anyOf": [SECONDS, AGE]}, "For one call: seconds, or 90s, 5m, 1h."),
    "setup_timeout": ({"anyOf": [SECONDS, AGE]}, "For a worker to be ready: seconds, or 90s, 5m, 1h."),
    "env": (_mapping(TEXT), "Environment variables of its workers."),
    "runtime_env": ({"type": "object"}, "Ray's runtime environment of its workers."),
    "after": (
        _list(NAME, uniqueItems=True),
        "Stages it gets items from; the one before it if left out, [] for a source.",
    ),
    "fuse": (FLAG, "Whether it may share workers with a neighbour."),
    "barrier": (FLAG, "Whether it needs all of its input before it gives anything."),
    "recycle": (
        {"anyOf": [_whole(1, RECYCLE_LIMIT), AGE]},
        "A worker is replaced after so many batches, or at an age such as 1h.",
    ),
}
RESOURCE_KEYS: dict[str, tuple[Schema, str]] = {
    "cpus": (_number(0, CPUS_LIMIT), "CPUs; fractions are shares of one."),
    "gpus": (_number(0, GPUS_LIMIT), "A share of one card (0.25), or whole cards (2)."),
    "gpu_memory": (SIZE, "GPU memory such as 4GB; alone it sizes the worker's share of any card."),
    "memory": (SIZE, "Host memory such as 8GB."),
    "nvdecs": (_whole(0, CODECS_LIMIT), "Hardware video decoders, of its own cards or of one card."),
    "nvencs": (_whole(0, CODECS_LIMIT), "Hardware video encoders, of its own cards or of one card."),
    "entire_gpu": (FLAG, "Whether it takes whole cards with their codecs."),
    "accelerator": (TEXT, "Models of card that will do: A100|H100."),
    "labels": (_mapping(TEXT), "Labels that its node must have."),
    "custom": (_mapping(_number(0, CUSTOM_LIMIT)), "Custom resources, such as licences."),
}


def schema() -> Schema:
    """The JSON Schema of a pipeline file."""
    stage = _object("One step of the pipeline.", _described(STAGE_KEYS, Stage), ["name", "run"])
    both = {"workers": {"not": {"const": "auto"}}, "workers_per_node": {"not": NULL}}
    stage["not"] = {"properties": both, "required": list(both)}
    resources = _object("What one worker needs.", _described(RESOURCE_KEYS, Resources), [])
    keys = {
        "name": {**NAME, "default": "pipeline", "description": "What the pipeline is called."},
        "stages": {
            **_list({"$ref": "#/$defs/stage"}, minItems=1),
            "description": "The steps, each after the one before it unless it says otherwise.",
        },
        **source_sink_schemas(),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Dovetail pipeline",
        **_object(
            "Stages, what one worker of each needs, which comes after which, and where items come from and go.",
            keys,
            ["stages"],
        ),
        "$defs": {"stage": stage, "resources": resources},
    }


def _object(description: str, keys: Schema, needed: list[str]) -> Schema:
    found: Schema = {"description": description, "type": "object", "properties": keys, "additionalProperties": False}
    return {**found, "required": needed} if needed else found


def _described(keys: dict[str, tuple[Schema, str]], kind: type[Stage | Resources]) -> Schema:
    """With the defaults that the class has; what is None by default may also be written as null."""
    described = {}
    for item in fields(kind):
        part, description = keys[item.name]
        if item.default is None:
            part = {"anyOf": [*part.get("anyOf", [part]), NULL]}
        elif item.default is not MISSING and isinstance(item.default, str | int | float):
            part = {**part, "default": item.default}
        described[item.name] = {**part, "description": description}
    return described
