"""What does `--set stages.caption.workers=4` change in a pipeline file? A copy of its data, checked like the file."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from dovetail.documents.document import Document, Steps, dotted
from dovetail.documents.read import parse_document
from dovetail.errors import ConfigError, Problem, did_you_mean, shown
from dovetail.pipeline.ends import ENDS

EXAMPLE = "--set stages.caption.workers=4"
NO_YAML = tuple("*&!#%@`|>")
"""A value that begins with one of these is a text such as *.jsonl, whatever YAML makes of it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One value that the command line puts in the place of the file's."""

    path: Steps
    value: Any
    said: str
    """As it was typed, for messages: '--set mode=waves'."""


@dataclass(frozen=True, slots=True)
class ChangedDocument(Document):
    """A document in which some parts were not written by the file."""

    said: Mapping[Steps, str] = field(default_factory=dict)

    def place(self, path: Steps = ()) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self.said:
                return self.said[path[:length]]
        return Document.place(self, path)


def parse_change(text: str, data: object) -> Change:
    """`path=value`, where a stage is named or numbered, and the value is read as YAML."""
    said = f"--set {text}"
    where, equals, value = text.partition("=")
    if not equals or not where.strip():
        raise _wrong(said, f"{text!r} is not path=value", EXAMPLE)
    if not value.strip():
        raise _wrong(said, "there is no value behind the =", f"--set {where}=null")
    return Change(_steps(where.strip(), data, said), _value(value.strip(), said), said)


def changed(document: Document, changes: list[Change]) -> ChangedDocument:
    """The document with all of them, the last one last; what has no place for one is a ConfigError."""
    data = deepcopy(document.data)
    problems: list[Problem] = []
    for change in changes:
        try:
            data = _put(data, change, 0)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    said = {change.path: change.said for change in changes}
    return ChangedDocument(document.name, data, document.root, said)


def _value(text: str, said: str) -> Any:
    if text.startswith(NO_YAML):
        return text
    try:
        return parse_document(text, "value").data
    except ConfigError as error:
        raise _wrong(said, error.problems[0].message, "put the value in quotes") from None


def _steps(where: str, data: object, said: str) -> Steps:
    words = where.split(".")
    if not all(words):
        raise _wrong(said, f"{where!r} has an empty part", EXAMPLE)
    if words[0] == "sink" and words[1:2] == ["stages"]:
        return ("sink", "stages", *_named(words[2:], _names(data)))
    if words[0] != "stages" or len(words) == 1:
        return tuple(words)
    names = _names(data)
    if words[1].isascii() and words[1].isdigit():
        number, rest = int(words[1]), words[2:]
    else:
        name, *rest = _named(words[1:], names)
        if name not in names:
            fixes = tuple(f"--set stages.{name}.{'.'.join(rest) or 'workers'}=..." for name in names[:1])
            raise _wrong(said, f"there is no stage {name!r}{did_you_mean(name, names)}", *fixes, listed=names)
        number = names.index(name)
    if number >= len(names):
        raise _wrong(said, f"there is no stage {number}: the first is 0, the last {len(names) - 1}", EXAMPLE)
    return ("stages", number, *rest)


def _named(words: list[str], names: list[str]) -> list[str]:
    """A stage's name may have dots in it: the longest that is one counts."""
    for length in range(len(words), 0, -1):
        if ".".join(words[:length]) in names:
            return [".".join(words[:length]), *words[length:]]
    return words


def _names(data: object) -> list[str]:
    stages = data.get("stages") if isinstance(data, Mapping) else None
    entries = stages if isinstance(stages, list) else []
    return [str(entry.get("name", "")) if isinstance(entry, Mapping) else "" for entry in entries]


def _put(data: Any, change: Change, depth: int) -> Any:
    """The data with the value in its place; what lies on the way there is made."""
    if depth == len(change.path):
        return change.value
    step = change.path[depth]
    if isinstance(step, int):
        data[step] = _put(data[step], change, depth + 1)
        return data
    if data is None:
        data = {}
    if depth == 1 and change.path[0] in ENDS and isinstance(data, str | list):
        data = {"path": data}  # the short form of the same
    if depth == 3 and change.path[:2] == ("sink", "stages") and isinstance(data, str):
        data = {"path": data}
    if not isinstance(data, dict):
        message = f"{dotted('', change.path[:depth])} is {shown(data)}, which has no {step!r}"
        raise _wrong(change.said, message, f"--set {dotted('', change.path[:depth])}=...")
    data[step] = _put(data.get(step), change, depth + 1)
    return data


def _wrong(said: str, message: str, *fixes: str, listed: list[str] | None = None) -> ConfigError:
    evidence = (f"stages: {', '.join(listed)}",) if listed else ()
    return ConfigError(Problem("DT360", message, evidence, fixes, place=said))
