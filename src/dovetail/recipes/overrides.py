"""`--set` overrides of a recipe: operators by index, by name, or `*` for all.

--set mode=sequential   --set process.3.num_proc=4   --set process.clean_links_mapper.num_proc=-1
--set 'process.*.num_gpus=0.25'                       for every operator that sets num_gpus
--set 'process.*.num_proc=null'                       null removes the value
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, Problem, did_you_mean
from dovetail.pipeline.overrides import Override, apply_overrides, parse_override
from dovetail.runtime.run_spec import absolute_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dovetail.documents.document import Document

EXAMPLE_OVERRIDE = "--set process.0.num_proc=4"
ALL_OPERATORS = "*"
PATH_KEYS = ("dataset_path", "export_path", "work_dir")


def apply_recipe_overrides(
    document: Document, sets: Sequence[str], ends: Sequence[Override], typed_in: Path | None = None
) -> Document:
    """The document with the changes of the command line. Relative paths start at `typed_in`, the folder where it was
    typed. Raises ConfigError with every problem."""
    plain = replace(document, data=_expand_shorthand(document.data))
    found: list[Override] = []
    problems: list[Problem] = []
    for text in sets:
        try:
            found += _expand_override(_resolve_typed_paths(parse_override(text, None), typed_in), plain.data)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return apply_overrides(plain, [*ends, *found])


def _expand_shorthand(data: Any) -> Any:
    """Replace `- name` by `- name: null`, which is equivalent."""
    entries = data.get("process") if isinstance(data, Mapping) else None
    if not isinstance(entries, list):
        return data
    return {**data, "process": [{entry: None} if isinstance(entry, str) else entry for entry in entries]}


def _resolve_typed_paths(change: Override, folder: Path | None) -> Override:
    """Paths on the command line are relative to the folder where it was typed."""
    if folder is None or len(change.path) != 1 or change.path[0] not in PATH_KEYS:
        return change
    pattern = change.path[0] == "dataset_path"
    value = change.value
    if isinstance(value, list):
        return replace(change, value=[_resolve_path(one, folder, pattern=pattern) for one in value])
    return replace(change, value=_resolve_path(value, folder, pattern=pattern))


def _resolve_path(value: Any, folder: Path, *, pattern: bool) -> Any:
    return absolute_path(value, folder, pattern=pattern) if isinstance(value, str) else value


def _expand_override(change: Override, data: Any) -> list[Override]:
    if change.path[0] != "process" or len(change.path) == 1:
        return [change]
    entries = data.get("process") if isinstance(data, Mapping) else None
    entries = entries if isinstance(entries, list) else []
    names = [_operator_name(entry) for entry in entries]
    words = [str(word) for word in change.path[1:]]
    # "package.module:name" has dots in it
    length = next((length for length in range(len(words), 0, -1) if ".".join(words[:length]) in names), 1)
    word, rest = ".".join(words[:length]), words[length:]
    if word == ALL_OPERATORS:
        if not rest:
            raise _override_error(change, "names no parameter", "--set 'process.*.num_proc=4'")
        numbers = [number for number, name in enumerate(names) if _has_key(entries[number], name, rest[0])]
        if not numbers:
            raise _override_error(change, f"no operator sets {rest[0]}", EXAMPLE_OVERRIDE)
    else:
        numbers = [_operator_index(word, names, change)]
    return [replace(change, path=("process", number, names[number], *rest)) for number in numbers]


def _operator_index(word: str, names: list[str], change: Override) -> int:
    if word.isascii() and word.isdigit():
        if int(word) >= len(names):
            raise _override_error(
                change, f"there is no operator {word}: the first is 0, the last {len(names) - 1}", EXAMPLE_OVERRIDE
            )
        return int(word)
    places = [number for number, name in enumerate(names) if name == word]
    if len(places) == 1:
        return places[0]
    if places:
        listed = ", ".join(map(str, places))
        raise _override_error(
            change, f"{word} occurs {len(places)} times in the recipe: {listed}", f"--set process.{places[0]}."
        )
    raise _override_error(
        change, f"there is no operator {word!r} in the recipe{did_you_mean(word, names)}", EXAMPLE_OVERRIDE
    )


def _operator_name(entry: Any) -> str:
    return str(next(iter(entry))) if isinstance(entry, Mapping) and entry else ""


def _has_key(entry: Any, name: str, key: str) -> bool:
    given = entry.get(name) if isinstance(entry, Mapping) else None
    return isinstance(given, Mapping) and given.get(key) is not None


def _override_error(change: Override, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem("DT360", message, fixes=(fix,), place=change.option))
