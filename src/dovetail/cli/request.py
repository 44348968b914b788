"""What does a request on the command line, such as 'cpus=2, gpus=0.5, gpu_memory=4GB', ask for?"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from typing import Any

import dovetail as dt
from dovetail.errors import did_you_mean

EXAMPLE = "cpus=2, gpus=0.25, gpu_memory=4GB"


def parse_request(text: str) -> dt.Shape:
    """A shape from comma-separated name=value pairs; names are those of dt.Resources, and `ranks`."""
    known = [item.name for item in fields(dt.Resources)]
    known = [name for name in known if name not in ("labels", "custom")] + ["ranks", "labels.NAME", "custom.NAME"]
    given: dict[str, Any] = {"labels": {}, "custom": {}}
    problems = []
    parts = [part.strip() for part in re.split(r",(?![^{]*})", text) if part.strip()]
    if not parts:
        problems.append(dt.Problem("DT024", "the request is empty", fixes=(f"write '{EXAMPLE}'",)))
    for part in parts:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        value = value.strip("'\"") if not value.startswith("{") else value
        group, dot, item = name.partition(".")
        if not equals or not value:
            problems.append(dt.Problem("DT024", f"{part!r} is not name=value", fixes=(f"write '{EXAMPLE}'",)))
        elif dot and group in ("labels", "custom") and item:
            given[group][item] = _value(value) if group == "custom" else value
        elif name in ("labels", "custom") and value.startswith("{"):
            problems += _add_mapping(given[name], part, value)
        elif name not in known:
            message = f"unknown name {name!r}{did_you_mean(name, known)}"
            problems.append(dt.Problem("DT024", message, (f"names: {', '.join(known)}",), (f"write '{EXAMPLE}'",)))
        elif name in given:
            problems.append(dt.Problem("DT024", f"{name!r} is given twice", fixes=("remove one of the two",)))
        else:
            given[name] = value if name in ("memory", "gpu_memory", "accelerator") else _value(value)
    if problems:
        raise dt.ConfigError(problems)
    ranks = given.pop("ranks", 1)
    return dt.Resources(**given).shape(ranks)


def _add_mapping(given: dict[str, Any], part: str, value: str) -> list[dt.Problem]:
    """'{"pool": "gpu"}', as it is written in Python and in fixes."""
    try:
        given.update(ast.literal_eval(value))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return [dt.Problem("DT024", f"{part!r} is not a mapping", fixes=("write 'labels.pool=gpu, custom.licence=1'",))]
    return []


def _value(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
