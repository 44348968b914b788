"""YAML spelling of values and fixes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.errors import Expression, ObjectSource, Surface, short_repr

if TYPE_CHECKING:
    from dovetail.errors import Call, Given

_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_NUMBER_WITH_UNIT = re.compile(r"[0-9]+(\.[0-9]+)?[A-Za-z]{1,3}")
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


class YamlSurface(Surface):
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


YAML = YamlSurface()
