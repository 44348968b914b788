"""Overrides of values in a pipeline file or an actors file.

--set stages.caption.workers=4     --set stages.0.batch_size=8
--set 'stages.*.on_error=skip'     every stage; a pattern such as 'stages.clean_*' selects some of them
--set roles.rollout.workers=4      the same for the roles of an actors file
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import Document, KeyPath, dotted_path
from dovetail.documents.parser import parse_document
from dovetail.errors import ConfigError, Problem, did_you_mean, nearest_word, short_repr
from dovetail.pipeline.secret_settings import mask_override
from dovetail.pipeline.source_sink import SOURCE_AND_SINK

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLE = "--set stages.caption.workers=4"
PLAIN_TEXT_PREFIXES = tuple("*&!#%@`|>")
"""A value that begins with one of these is a string such as *.jsonl, although YAML reads it differently."""
PATTERN_CHARACTERS = "*?["
"""Characters that no name has and that make it a pattern."""
NAMED_LISTS = {"stages": "stage", "roles": "role"}
"""Lists whose entries have names, and what an entry is called."""
EXAMPLES = {"stages": "--set 'stages.*.on_error=skip'", "roles": "--set 'roles.*.slots=4'"}


@dataclass(frozen=True, slots=True)
class Override:
    """A value of the command line that replaces one of the file."""

    path: KeyPath
    value: Any
    option: str
    """As it was typed, for messages: '--set mode=waves'."""


@dataclass(frozen=True, slots=True)
class OverriddenDocument(Document):
    """A document with values of the command line."""

    option: Mapping[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath = ()) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self.option:
                return self.option[path[:length]]
        return Document.place(self, path)


def parse_override(text: str, data: object) -> Override:
    """`path=value`, where a stage or role is named or numbered, and the value is read as YAML."""
    option = f"--set {mask_override(text)}"
    where, equals, value = text.partition("=")
    if not equals or not where.strip():
        raise _override_error(option, f"{text!r} is not path=value", EXAMPLE)
    if not value.strip():
        raise _override_error(option, "there is no value after the =", f"--set {where}=null")
    return Override(_parse_path(where.strip(), data, text), _parse_value(value.strip(), option), option)


def parse_overrides(text: str, data: object) -> list[Override]:
    """`path=value`, where a stage or role is named, numbered, or a pattern that matches several:
    'stages.*.on_error=skip'."""
    change = parse_override(text, data)
    match change.path:
        case ("stages" | "roles" as key, str(pattern), *rest):
            names = _names_in(data, key)
            if not rest:
                raise _override_error(change.option, f"names no setting of the {key}", EXAMPLES[key])
            numbers = [number for number, name in enumerate(names) if fnmatchcase(name, pattern)]
            if not numbers:
                fixes = (set_option(f"{key}.*.{'.'.join(map(str, rest))}", _value_text(text)),)
                message = f"no {NAMED_LISTS[key]} matches {pattern!r}"
                raise _override_error(change.option, message, *fixes, listed={key: names})
            return [replace(change, path=(key, number, *rest)) for number in numbers]
    return [change]


def set_option(path: str, value: str) -> str:
    """`--set path=value`, quoted for a shell."""
    return f"--set {shlex.quote(f'{path}={value}')}"


def _value_text(text: str) -> str:
    """The value as it may be shown."""
    return mask_override(text).partition("=")[2].strip()


def apply_overrides(document: Document, changes: list[Override]) -> OverriddenDocument:
    """The document with all overrides, applied in order; ConfigError if one does not apply."""
    data = deepcopy(document.data)
    problems: list[Problem] = []
    for change in changes:
        try:
            data = _set_value(data, change, 0)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    option = {change.path: change.option for change in changes}
    return OverriddenDocument(document.name, data, document.root, option)


def override_values(document: Document, sets: Sequence[str]) -> OverriddenDocument:
    """The document with the values of `--set`; a ConfigError names every one that does not apply."""
    changes: list[Override] = []
    problems: list[Problem] = []
    for text in sets:
        try:
            changes += parse_overrides(text, document.data)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return apply_overrides(document, changes)


def _parse_value(text: str, option: str) -> Any:
    if text.startswith(PLAIN_TEXT_PREFIXES):
        return text
    try:
        return parse_document(text, "value").data
    except ConfigError as error:
        raise _override_error(option, error.problems[0].message, "put the value in quotes") from None


def _parse_path(where: str, data: object, text: str) -> KeyPath:
    option = f"--set {mask_override(text)}"
    words = where.split(".")
    if not all(words):
        raise _override_error(option, f"{where!r} has an empty part", EXAMPLE)
    if words[0] == "sink" and words[1:2] == ["stages"]:
        return ("sink", "stages", *_split_name(words[2:], _names_in(data, "stages")))
    key = words[0]
    if key not in NAMED_LISTS or len(words) == 1:
        return tuple(words)
    names, entry = _names_in(data, key), NAMED_LISTS[key]
    if words[1].isascii() and words[1].isdigit():
        number, rest = int(words[1]), words[2:]
    elif any(letter in words[1] for letter in PATTERN_CHARACTERS):
        return tuple(words)
    else:
        name, *rest = _split_name(words[1:], names)
        if name not in names:
            raise _override_error(
                option,
                f"there is no {entry} {name!r}{did_you_mean(name, names)}",
                *_name_fixes(key, name, names, rest, text),
                listed={key: names},
            )
        number = names.index(name)
    if number >= len(names):
        message = f"there is no {entry} {number}: the first is 0, the last {len(names) - 1}"
        raise _override_error(option, message, *_name_fixes(key, "", names[-1:], rest, text))
    return (key, number, *rest)


def _name_fixes(key: str, name: str, names: list[str], rest: list[str], text: str) -> list[str]:
    """The same option for the stage or role that was probably meant, or for one that exists."""
    near = nearest_word(name, names) or next(iter(names), None)
    if near is None:
        return [EXAMPLE]
    return [set_option(".".join([key, near, *rest]), _value_text(text))]


def _split_name(words: list[str], names: list[str]) -> list[str]:
    """Split a name from the words; a name may contain dots, so the longest match counts."""
    for length in range(len(words), 0, -1):
        if ".".join(words[:length]) in names:
            return [".".join(words[:length]), *words[length:]]
    return words


def _names_in(data: object, key: str) -> list[str]:
    """Names of the entries of a list of the file."""
    found = data.get(key) if isinstance(data, Mapping) else None
    entries = found if isinstance(found, list) else []
    return [str(entry.get("name", "")) if isinstance(entry, Mapping) else "" for entry in entries]


def _set_value(data: Any, change: Override, depth: int) -> Any:
    """The data with the value in its place; missing mappings are created."""
    if depth == len(change.path):
        return change.value
    step = change.path[depth]
    if isinstance(step, int):
        data[step] = _set_value(data[step], change, depth + 1)
        return data
    if data is None:
        data = {}
    if depth == 1 and change.path[0] in SOURCE_AND_SINK and isinstance(data, str | list):
        data = {"path": data}  # expand the short form
    if depth == 3 and change.path[:2] == ("sink", "stages") and isinstance(data, str):
        data = {"path": data}
    if not isinstance(data, dict):
        message = f"{dotted_path('', change.path[:depth])} is {short_repr(data)}, which has no {step!r}"
        raise _override_error(change.option, message, f"--set {dotted_path('', change.path[:depth])}=...")
    data[step] = _set_value(data.get(step), change, depth + 1)
    return data


def _override_error(
    option: str, message: str, *fixes: str, listed: Mapping[str, Sequence[str]] | None = None
) -> ConfigError:
    evidence = tuple(f"{key}: {', '.join(names)}" for key, names in (listed or {}).items() if names)
    return ConfigError(Problem("DT360", message, evidence, fixes, place=option))
