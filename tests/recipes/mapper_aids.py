"""Text mappers by name, and their results."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recipes.golden_aids import cases

if TYPE_CHECKING:
    from dovetail.recipes.operators.base import Mapper

MAPPERS = sorted({case["op"] for case in cases(kind="mapper")})
OTHER_CASES = [case for case in cases(kind="mapper") if case["params"]]


def create_mapper(name: str, **params: Any) -> Mapper:
    module = import_module(f"dovetail.recipes.operators.{name}")
    mapper: Mapper = getattr(module, "".join(part.capitalize() for part in name.split("_")))(**params)
    return mapper


def texts_of(mapper: Mapper, text: str, **fields: Any) -> list[str]:
    """Texts of the rows that a mapper returns: one for most mappers."""
    given = mapper({mapper.text_key: text, **fields})
    return [row[mapper.text_key] for row in ([given] if isinstance(given, dict) else given)]


def changed(name: str, text: str, **params: Any) -> str:
    [only] = texts_of(create_mapper(name, **params), text)
    return only
