"""Validate a document against a schema class and report every mismatch at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.documents.document import Document, KeyPath, dotted_path
from dovetail.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")


def validate_document(document: Document, schema: type[T]) -> T:
    """The document as `schema` (a frozen dataclass), or every mismatch at once with its place."""
    from pydantic import ValidationError

    try:
        # as JSON, because only there does pydantic's strict mode take mappings for dataclasses
        text = json.dumps(document.data, default=str)
        value: T = _adapter(schema).validate_json(text, strict=True)
    except (TypeError, ValueError, RecursionError) as error:
        if not isinstance(error, ValidationError):
            raise ConfigError(
                Problem(
                    "DT013",
                    f"is not plain data: {error}",
                    fixes=("use texts, numbers, lists and mappings",),
                    place=document.place(),
                )
            ) from None
        found = [_mismatch(detail, document, schema) for detail in error.errors(include_url=False)]
        raise ConfigError(found) from None
    return value


def _adapter(schema: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def _mismatch(detail: ErrorDetails, document: Document, schema: type[Any]) -> Problem:
    path: KeyPath = detail["loc"]
    where = document.place(path)
    shown = dotted_path("", path) or "the file"
    match detail["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return unknown_key_problem(str(path[-1]), _known_keys_at(path, schema), where)
        case "missing" | "missing_argument":
            return missing_key_problem(shown, str(path[-1]), where)
        case _:
            message = detail["msg"].replace("Input should be", "should be").replace("Input must be", "must be")
            got = _shortened(detail["input"])
            return Problem("DT013", f"{shown} {message}, not {got}", fixes=(f"correct {shown}",), place=where)


def unknown_key_problem(word: str, known: Iterable[str], place: str) -> Problem:
    keys = sorted(known)
    return Problem(
        "DT011",
        f"unknown key {word!r}{did_you_mean(word, keys)}",
        evidence=(f"keys here: {', '.join(keys)}",) if keys else (),
        fixes=(f"remove {word!r}, or correct its spelling",),
        place=place,
    )


def missing_key_problem(shown: str, key: str, place: str) -> Problem:
    return Problem("DT012", f"{shown} is missing", fixes=(f"add '{key}:'",), place=place)


def _known_keys_at(path: KeyPath, schema: type[Any]) -> list[str]:
    """The keys that the schema knows where `path` points, found by walking its JSON schema."""
    whole = _adapter(schema).json_schema()
    here: dict[str, Any] = whole
    for step in path[:-1]:
        here = _resolve_ref(here, whole)
        here = here.get("items", {}) if isinstance(step, int) else here.get("properties", {}).get(step, {})
    return list(_resolve_ref(here, whole).get("properties", {}))


def _resolve_ref(part: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Follows $ref and the first object among alternatives."""
    for choice in part.get("anyOf", ()):
        if "$ref" in choice or "properties" in choice or "items" in choice:
            part = choice
            break
    if "$ref" in part:
        found: dict[str, Any] = whole["$defs"][part["$ref"].rsplit("/", 1)[-1]]
        return found
    return part


def _shortened(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
