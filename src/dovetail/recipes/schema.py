"""JSON Schema (draft 2020-12) of recipe files, for editors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.documents.fields import NULL, Schema
from dovetail.pipeline.stage_fields import STAGE
from dovetail.recipes.catalogue import BASE_PARAMETERS, FILTER_PARAMETERS, REQUIRED, known_operators
from dovetail.recipes.file_keys import DOVETAIL_KEYS, IGNORED_KEYS, OPERATOR, RECIPE_FILE, STAGE_FIELDS
from dovetail.recipes.parameter_types import ParameterType, parse_types
from dovetail.resources.resources import RESOURCES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.recipes.catalogue import OperatorSpec, Parameter

CUSTOM_NAME_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""A function or class of the user: package.module:name."""
_TYPES: dict[str, Schema] = {
    "flag": {"type": "boolean"},
    "text": {"type": "string"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "mapping": {"type": "object"},
    "list": {"type": "array"},
    "any": {},
}


def schema() -> Schema:
    """The JSON Schema of a recipe."""
    idle = {key: {"description": "Key of Data-Juicer without effect in Dovetail."} for key in sorted(IGNORED_KEYS)}
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
        **RECIPE_FILE.schema(),
        "properties": {**RECIPE_FILE.properties(), **idle},
        **either,
        "$defs": {
            "resources": RESOURCES.schema(),
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
        if key not in OPERATOR.by_name:
            found[key] = replace(STAGE.by_name[STAGE_FIELDS.get(key, key)], default=None, nullable=True).schema()
    return found | OPERATOR.properties()


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


def _nullable(parts: list[Schema]) -> Schema:
    return {"anyOf": [*parts, NULL]} if NULL not in parts and {} not in parts else {"anyOf": parts}
