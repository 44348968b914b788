"""YAML text of values, fixes and whole files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.errors import Expression, ObjectSource, Renderer, short_repr

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dovetail.errors import Call, Given

_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_NUMBER_WITH_UNIT = re.compile(r"[0-9]+(\.[0-9]+)?[A-Za-z]{1,3}")
LIST_WIDTH = 100
"""Longest list on one line, in characters."""
_RESERVED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def yaml_literal(value: object) -> str:
    """A value as YAML on one line; a string has quotes only where YAML needs them."""
    match value:
        case ObjectSource():
            return yaml_literal(value.data)
        case Expression():
            return str(value)
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case float() if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        case float() if "." not in repr(value):
            return repr(value).replace("e", ".0e")  # 1e-05 is a string in YAML 1.1
        case str():
            plain = _PLAIN_WORD.fullmatch(value) or _NUMBER_WITH_UNIT.fullmatch(value)
            return value if plain and value.casefold() not in _RESERVED else json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(map(yaml_literal, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{yaml_literal(key)}: {yaml_literal(part)}' for key, part in value.items())}}}"
        case _:
            return str(value)


@dataclass(frozen=True, slots=True)
class Commented:
    """A value with a comment in the lines above it, for `yaml_document`."""

    value: object
    comment: str


def yaml_document(data: Mapping[str, object], comment: str = "") -> str:
    """A mapping as a YAML document in block style, in the order of its keys."""
    return "".join(f"{line}\n" for line in (*_comment_lines(comment), *_mapping_lines(data)))


def yaml_documents(documents: Iterable[Mapping[str, object]], comment: str = "") -> str:
    """Several documents as one file."""
    parts = [yaml_document(data) for data in documents]
    return "".join(f"{line}\n" for line in _comment_lines(comment)) + "---\n".join(parts)


def _mapping_lines(data: Mapping[Any, object]) -> Iterator[str]:
    for key, value in data.items():
        plain, comment = _without_comment(value)
        yield from _comment_lines(comment)
        if _is_short(plain):
            yield f"{yaml_literal(key)}: {yaml_literal(plain)}"
        else:
            yield f"{yaml_literal(key)}:"
            yield from (f"  {line}" for line in _lines(plain))


def _list_lines(items: Iterable[object]) -> Iterator[str]:
    for item in items:
        plain, comment = _without_comment(item)
        yield from _comment_lines(comment)
        first, *others = [yaml_literal(plain)] if _is_short(plain) else _lines(plain)
        yield f"- {first}"
        yield from (f"  {line}" for line in others)


def _lines(value: object) -> Iterator[str]:
    return _mapping_lines(value) if isinstance(value, Mapping) else _list_lines(value)  # type: ignore[arg-type]


def _is_short(value: object) -> bool:
    """Whether a value is written on one line: a scalar, an empty collection, or a short list of scalars."""
    if isinstance(value, Mapping):
        return not value
    if isinstance(value, list | tuple):
        has_scalars = not any(isinstance(item, Mapping | list | tuple | Commented) for item in value)
        return has_scalars and len(yaml_literal(value)) <= LIST_WIDTH
    return True


def _without_comment(value: object) -> tuple[object, str]:
    return (value.value, value.comment) if isinstance(value, Commented) else (value, "")


def _comment_lines(comment: str) -> list[str]:
    return [f"# {line}".rstrip() for line in comment.splitlines()]


class YamlRenderer(Renderer):
    """Fixes as lines of a YAML file: `gpus: 1`; `names` are the keys of settings that have another name there."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.names = names or {}

    def name(self, setting: str) -> str:
        return self.names.get(setting, setting)

    def given(self, given: Given) -> str:
        return f"{self.name(given.name)}: {short_repr(given.value)}"

    def assignment(self, name: str, value: object) -> str:
        return f"{self.name(name)}: {self.literal(value)}"

    def literal(self, value: object) -> str:
        return yaml_literal(value)

    def call(self, fix: Call) -> str:  # noqa: ARG002
        return ""  # a file cannot call a function


YAML = YamlRenderer()
