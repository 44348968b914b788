"""JSON Schema (draft 2020-12) of recipe files, for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.pipeline.schema import NULL, SIZE, STAGE_KEYS
from dovetail.pipeline.schema import schema as pipeline_schema
from dovetail.recipes.catalogue import BASE_PARAMETERS, FILTER_PARAMETERS, REQUIRED, known_operators
from dovetail.recipes.file_keys import ADAPTERS, DOVETAIL_KEYS, IGNORED_KEYS, STAGE_FIELDS, TOP_LEVEL_KEYS
from dovetail.recipes.parameter_types import ParameterType, parse_types

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.recipes.catalogue import OperatorSpec, Parameter

Schema = dict[str, Any]

CUSTOM_NAME_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""A function or class of the user: package.module:name."""
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_PAIR: Schema = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}
_WORKERS: Schema = {"anyOf": [{"enum": ["auto", -1]}, _COUNT, _PAIR, NULL]}
_TYPES: dict[str, Schema] = {
    "flag": {"type": "boolean"},
    "text": {"type": "string"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "mapping": {"type": "object"},
    "list": {"type": "array"},
    "any": {},
}
_WORKER_KEYS: dict[str, tuple[Schema, str]] = {
    "num_proc": (_WORKERS, "Number of workers: -1 or auto, n, or [minimum, maximum]."),
    "num_cpus": (_AMOUNT, "CPUs of one worker."),
    "num_gpus": (_AMOUNT, "GPUs of one worker: a share of one (0.25), or several (2)."),
    "memory": (SIZE, "Memory of one worker, such as 1500MB: GPU memory if it runs on a GPU, else host memory."),
    "cpu_required": (_AMOUNT, "Deprecated name of num_cpus."),
    "gpu_required": (_AMOUNT, "Deprecated name of num_gpus."),
    "mem_required": (SIZE, "Deprecated name of memory."),
    "batch_size": (_COUNT, "Rows per call."),
    "accelerator": ({"enum": ["cpu", "cuda"]}, "Whether it runs on a GPU."),
    "workers": (_WORKERS, "Number of workers, as in a pipeline file."),
    "resources": ({"$ref": "#/$defs/resources"}, "Resources of one worker, as in a pipeline file."),
    "adapter": ({"enum": list(ADAPTERS)}, "Library that runs the operator instead of Dovetail."),
}
"""Keys of workers; the other DOVETAIL_KEYS are as in a pipeline file."""


def schema() -> Schema:
    """The JSON Schema of a recipe."""
    keys = {
        key: _described(form.schema, words, nullable=nullable)
        for key, (form, nullable, words) in TOP_LEVEL_KEYS.items()
    }
    idle = {key: {"description": "Key of Data-Juicer without effect in Dovetail."} for key in sorted(IGNORED_KEYS)}
    keys["process"] = {**keys["process"], "minItems": 1}
    operators = {name: {"$ref": f"#/$defs/{name}"} for name in known_operators()}
    own: Schema = {"type": ["object", "null"]}
    # with custom_operator_paths, any name may be an operator
    either = {
        "if": {"required": ["custom_operator_paths"]},
        "then": _process_schema({"type": "string"}, operators, own),
        "else": _process_schema(
            {"anyOf": [{"enum": list(known_operators())}, {"pattern": CUSTOM_NAME_PATTERN}], "type": "string"},
            operators,
            False,
        ),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Dovetail recipe",
        "description": "A list of operators over a dataset, in Data-Juicer's format.",
        "type": "object",
        "properties": {**keys, **idle},
        "required": ["process"],
        "additionalProperties": False,
        **either,
        "$defs": {
            "resources": pipeline_schema()["$defs"]["resources"],
            "every_operator": {"properties": _common_properties()},
            "every_filter": {"$ref": "#/$defs/every_operator", "properties": _properties(FILTER_PARAMETERS.values())},
            **{name: _operator_schema(entry) for name, entry in known_operators().items()},
        },
    }


def _process_schema(name: Schema, operators: Schema, other: Schema | bool) -> Schema:
    one: Schema = {"type": "object", "minProperties": 1, "maxProperties": 1, "properties": operators}
    one |= {"patternProperties": {CUSTOM_NAME_PATTERN: {"type": ["object", "null"]}}, "additionalProperties": other}
    return {"properties": {"process": {"items": {"anyOf": [name, one]}}}}


def _common_properties() -> Schema:
    """Parameters of every operator."""
    found = {**_properties(BASE_PARAMETERS.values())}
    for key in DOVETAIL_KEYS:
        found[key] = _described(*(_WORKER_KEYS.get(key) or STAGE_KEYS[STAGE_FIELDS.get(key, key)]), nullable=True)
    for key in BASE_PARAMETERS.keys() & _WORKER_KEYS.keys():
        found[key] = _described(*_WORKER_KEYS[key], nullable=True)
    return found


def _operator_schema(entry: OperatorSpec) -> Schema:
    """The parameters of an operator; null is valid if none is required."""
    own = _properties(entry.parameters.values())
    every = "every_filter" if entry.kind == "filter" else "every_operator"
    shared = {**_common_properties(), **(_properties(FILTER_PARAMETERS.values()) if entry.kind == "filter" else {})}
    if any(_without_annotations(own[key]) != _without_annotations(shared[key]) for key in own.keys() & shared.keys()):
        # its own parameter differs from the common one, so that the common schema cannot be referenced
        found: Schema = {"properties": {**shared, **own}, "additionalProperties": False}
    else:
        found = {"$ref": f"#/$defs/{every}", "properties": own, "unevaluatedProperties": False}
    needed = [name for name, parameter in entry.parameters.items() if parameter.default is REQUIRED]
    if entry.note:
        found["description"] = f"{entry.name}: {entry.note}."
    if needed:
        return {"type": "object", "required": needed, **found}
    return {"type": ["object", "null"], **found}


def _without_annotations(part: Schema) -> Schema:
    return {key: value for key, value in part.items() if key not in ("default", "description")}


def _properties(parameters: Iterable[Parameter]) -> Schema:
    found = {}
    for parameter in parameters:
        kinds = [_type_schema(kind) for kind in parse_types(parameter.kind)]
        if all("const" in kind for kind in kinds):
            kinds = [{"enum": [kind["const"] for kind in kinds]}]
        part = _nullable(kinds) if parameter.nullable else kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        if parameter.default is not REQUIRED and parameter.default is not None:
            part = {**part, "default": parameter.default}
        found[parameter.name] = part
    return found


def _type_schema(kind: ParameterType) -> Schema:
    if not kind.name:
        return {"const": kind.constant}
    if kind.name in _TYPES:
        return _TYPES[kind.name]
    part: Schema = {"type": "number" if kind.name == "float" else "integer"}
    if kind.low is not None:
        part["exclusiveMinimum" if kind.exclusive else "minimum"] = kind.low
    if kind.high is not None:
        part["maximum"] = kind.high
    return {"type": "array", "items": part} if kind.name == "ints" else part


def _described(part: Schema, description: str, *, nullable: bool) -> Schema:
    alike = part.get("anyOf", [part])
    return {**(_nullable(alike) if nullable else part), "description": description}


def _nullable(parts: list[Schema]) -> Schema:
    return {"anyOf": [*parts, NULL]} if NULL not in parts and {} not in parts else {"anyOf": parts}
