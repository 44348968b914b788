"""Parser of cluster specs such as '4x(32cpu, 128GB, 2xA100:40GB){pool=gpu}' and of cluster files.

nodes:
  - {count: 4, cpus: 32, memory: 128GB, gpus: ["2xA100:40GB"], labels: {pool: gpu}}
  - {name: login, cpus: 8, memory: 16GB, keep_back: 2, custom: {licence: 1}}
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.documents import Document, read_document, validate_document
from dovetail.errors import ClusterError, ConfigError, Problem
from dovetail.resources.sizes import SizeError, parse_milli, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NODES_LIMIT = 100_000
CARDS_LIMIT = 256
CPUS_LIMIT = 1_000_000
CODECS_LIMIT = 1_024
CUSTOM_LIMIT = 10**9

EXAMPLE = "4x(32cpu, 128GB, 2xA100:40GB) + 16x(32cpu, 64GB){pool=cpu}"


@dataclass(frozen=True, slots=True)
class CardSpec:
    """`count` cards as they were written; None: whatever this model has."""

    count: int
    model: str
    memory: str | None = None
    nvdecs: int | None = None
    nvencs: int | None = None


@dataclass(slots=True)
class NodeSpec:
    """`count` alike nodes as they were written."""

    count: int = 1
    name: str | None = None
    cpu_milli: int = 0
    kept_back_milli: int = 0
    memory_bytes: int = 0
    cards: list[CardSpec] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    custom: dict[str, int] = field(default_factory=dict)


class SpecError(ValueError):
    """What is wrong with one value, and what to write instead."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


_GROUP = re.compile(r"\s*(?:(?P<count>[0-9]+)\s*[x*]\s*)?\((?P<inside>[^()]*)\)\s*(?:\{(?P<labels>[^{}]*)\})?\s*")
_CPUS = re.compile(r"(?P<number>[-+.\w]*?)\s*cpus?", re.IGNORECASE)
_KEEP = re.compile(r"keep\s+(?P<number>[-+.\w]*?)\s*cpus?", re.IGNORECASE)
_CUSTOM = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)\s*=\s*(?P<number>.+)")
_CARDS = re.compile(r"(?:(?P<count>[-+]?[0-9]+)\s*[x*]\s*)?(?P<model>[A-Za-z][\w.+\- ]*)(?P<rest>(?:\s*:.*)?)")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_LABEL = re.compile(r"[^\s,={}()|+][^,={}()|+]*")


def parse_cluster_spec(spec: object) -> list[NodeSpec]:
    """Groups of alike nodes in a spec; every mistake is reported at once, with its column."""
    if not isinstance(spec, str) or not spec.strip():
        message = f"a cluster spec is a text such as '{EXAMPLE}', not {spec!r}"
        raise ClusterError(Problem("DT023", message, fixes=("'1x(4cpu, 16GB)'",)))
    groups: list[NodeSpec] = []
    problems: list[Problem] = []
    for text, column in _split(spec, "+"):
        match = _GROUP.fullmatch(text) or _GROUP.fullmatch(f"({text})")
        if match is None:
            message = f"{text.strip()!r} is not a group of nodes"
            problems.append(
                _with_column(Problem("DT023", message, fixes=(f"write it like '{EXAMPLE}'",)), spec, column)
            )
            continue
        group, found = _parse_group(match, column if _GROUP.fullmatch(text) else column - 1)
        groups.append(group)
        problems += [_with_column(problem, spec, at) for problem, at in found]
    if problems:
        raise ClusterError(problems)
    return groups


def parse_cpus(value: object, what: str = "cpus") -> int:
    return _amount(value, what, CPUS_LIMIT, f"{what}: 4")


def check_count(value: object, what: str, limit: int, *, least: int = 0) -> int:
    """A whole number within its limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(
            f"{what} {_short_value(value)} is not a whole number", f"write a number from {least} to {limit}"
        )
    if not least <= value <= limit:
        raise SpecError(
            f"{what} {_short_value(value)} is not from {least} to {limit}", f"write a number from {least} to {limit}"
        )
    return value


def parse_memory(value: object, what: str = "memory") -> int:
    try:
        return parse_size(value)
    except SizeError as error:
        raise SpecError(f"{what} {error.reason}", f"write {' or '.join(map(repr, error.examples))}") from None


def parse_custom_amount(value: object, what: str) -> int:
    return _amount(value, what, CUSTOM_LIMIT, f"{what}: 1")


def parse_cards(text: str) -> CardSpec:
    """'2xA100:40GB:nvdec=5:nvenc=0'."""
    match = _CARDS.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"{text.strip()!r} is not a card", "write it like '2xA100:40GB', '1xL4' or '2xgpu:20GB'")
    if match["model"].strip().lower() in ("cpu", "cpus"):
        raise SpecError(f"{text.strip()!r} is not a card", "write CPUs like '32cpu', and cards like '2xA100:40GB'")
    count = check_count(_int_or_text(match["count"] or "1"), "the number of cards", CARDS_LIMIT, least=1)
    memory: str | None = None
    codecs: dict[str, int] = {}
    for part in match["rest"].split(":")[1:]:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.lower().removesuffix("s")
        if not equals:
            if memory is not None:
                raise SpecError(f"memory is given twice in {text.strip()!r}", "remove one of the two")
            parse_memory(part.strip(), f"memory of a {match['model'].strip()}")
            memory = part.strip()
        elif name in codecs:
            raise SpecError(f"{name} is given twice in {text.strip()!r}", "remove one of the two")
        elif name in ("nvdec", "nvenc"):
            codecs[name] = check_count(_int_or_text(value), name, CODECS_LIMIT)
        else:
            raise SpecError(f"{part.strip()!r} says nothing about a card", "write ':40GB', ':nvdec=5' or ':nvenc=0'")
    return CardSpec(count, match["model"].strip(), memory, codecs.get("nvdec"), codecs.get("nvenc"))


def check_group(group: NodeSpec, *, cpus: str, keep: str) -> None:
    """What only the whole entry shows; `cpus` and `keep` are how to write these where it was written."""
    if not group.cpu_milli:
        raise SpecError("a node has no CPUs", f"add '{cpus}'")
    if group.kept_back_milli >= group.cpu_milli:
        raise SpecError("a node keeps back all of its CPUs", f"keep back fewer, such as '{keep}'")


def check_custom_name(name: str) -> None:
    if name.lower().removesuffix("s") in ("cpu", "gpu", "memory", "gpu_memory", "nvdec", "nvenc"):
        raise SpecError(f"{name!r} is not a custom resource", "write CPUs, memory and cards like '32cpu, 64GB, 2xA100'")
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is not a name for a custom resource", "start with a letter; go on with letters, digits, _ . -"
        )


def check_label(name: str, value: str) -> None:
    """Only what a spec can say too, so that every cluster can be written as one line."""
    for text in (name, value):
        if not _LABEL.fullmatch(text) or text != text.strip():
            raise SpecError(
                f"label {name!r}: {value!r} is not a name and a value",
                "use no spaces around it and none of , = { } ( ) | +",
            )


def _int_or_text(text: str) -> object:
    """The number, or the text itself where it is none that makes sense."""
    return int(text) if re.fullmatch(r"[-+]?[0-9]{1,12}", text) else text


def _parse_group(match: re.Match[str], column: int) -> tuple[NodeSpec, list[tuple[Problem, int]]]:
    group = NodeSpec()
    found: list[tuple[Problem, int]] = []

    def attempt(at: int, text: str, read: object) -> None:
        assert callable(read)
        try:
            read(text)
        except SpecError as mistake:
            found.append((Problem("DT023", str(mistake), fixes=(mistake.fix,)), at))

    def count(text: str) -> None:
        group.count = check_count(_int_or_text(text), "the number of nodes", NODES_LIMIT, least=1)

    if match["count"] is not None:
        attempt(column + match.start("count"), match["count"], count)
    for text, offset in _split(match["inside"], ","):
        attempt(column + match.start("inside") + offset, text, lambda text: _parse_item(group, text))
    if match["labels"] is not None:
        for text, offset in _split(match["labels"], ","):
            attempt(column + match.start("labels") + offset, text, lambda text: _parse_label(group, text))
    if not found:
        attempt(column + match.start("inside"), "", lambda _text: check_group(group, cpus="4cpu", keep="keep 1cpu"))
    return group, found


def _parse_item(group: NodeSpec, text: str) -> None:
    text = text.strip()
    if not text:
        raise SpecError("there is nothing between two commas", "remove a comma, or write '4cpu, 16GB'")
    if match := _KEEP.fullmatch(text):
        if group.kept_back_milli:
            raise SpecError(f"CPUs to keep are given twice, the second time as {text!r}", "remove one of the two")
        group.kept_back_milli = parse_cpus(_number(match["number"], text), "CPUs kept back")
    elif match := _CPUS.fullmatch(text):
        if group.cpu_milli:
            raise SpecError(f"CPUs are given twice, the second time as {text!r}", "remove one of the two")
        group.cpu_milli = parse_cpus(_number(match["number"], text), "CPUs")
    elif (text[0].isdigit() and not re.match(r"\d+\s*[x*]", text)) or text[0] in "+-.":
        size = parse_memory(text)
        if group.memory_bytes:
            raise SpecError(f"memory is given twice, the second time as {text!r}", "remove one of the two")
        group.memory_bytes = size
    elif ":" not in text and (match := _CUSTOM.fullmatch(text)):
        _add_custom(group, match["name"], _number(match["number"], text))
    else:
        group.cards.append(parse_cards(text))


def _add_custom(group: NodeSpec, name: str, value: float) -> None:
    check_custom_name(name)
    if name in group.custom:
        raise SpecError(f"{name!r} is given twice", "remove one of the two")
    group.custom[name] = parse_custom_amount(value, name)


def _parse_label(group: NodeSpec, text: str) -> None:
    name, equals, value = (piece.strip() for piece in text.partition("="))
    if not name and not equals and not value:
        return
    check_label(name, value)
    if name in group.labels:
        raise SpecError(f"label {name!r} is given twice", "remove one of the two")
    group.labels[name] = value


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"{text.strip()!r} in {whole!r} is not a number", "write it like '32cpu'") from None


def _amount(value: object, what: str, limit: int, example: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{what} {value!r} is not a number", f"write it like '{example}'")
    if not math.isfinite(value) or value < 0 or value > limit:
        raise SpecError(f"{what} {value!r} is not from 0 to {limit}", f"write it like '{example}'")
    if 0 < value < 0.001:
        raise SpecError(f"{what} {value!r} is below the smallest amount, 0.001", f"write it like '{example}'")
    return parse_milli(value)


def _short_value(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, int) and abs(value) > 10**15 else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _split(text: str, separator: str) -> list[tuple[str, int]]:
    """Parts at the outermost level, each with where it starts."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if letter == separator and depth <= 0:
            parts.append((text[start:position], start))
            start = position + 1
    parts.append((text[start:], start))
    return parts


def _with_column(problem: Problem, spec: str, column: int) -> Problem:
    shown = spec if len(spec) <= 60 else f"{spec[:57]}..."
    skipped = len(spec[column:]) - len(spec[column:].lstrip())
    return problem.at(f"cluster {shown!r}:{column + skipped + 1}")


_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class NodeEntry:
    """One entry of `nodes:`."""

    __pydantic_config__ = _STRICT

    cpus: float
    memory: str | None = None
    gpus: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    custom: dict[str, float] = field(default_factory=dict)
    keep_back: float = 0
    name: str | None = None
    count: int = 1


@dataclass(frozen=True)
class ClusterFile:
    """The whole file."""

    __pydantic_config__ = _STRICT

    nodes: list[NodeEntry]


def read_cluster_file(path: str | Path) -> list[NodeSpec]:
    return _document_groups(read_document(path))


def parse_cluster_data(data: object) -> list[NodeSpec]:
    return _document_groups(Document("cluster", data))


def _document_groups(document: Document) -> list[NodeSpec]:
    try:
        entries = validate_document(document, ClusterFile).nodes
    except ConfigError as error:
        raise ClusterError(error.problems) from None
    reader = _ClusterFileReader(document)
    groups = [reader.node(number, entry) for number, entry in enumerate(entries)]
    if reader.problems:
        raise ClusterError(reader.problems)
    return groups


class _ClusterFileReader:
    """Turns entries into groups and collects what is wrong with their values."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []

    def node(self, number: int, entry: NodeEntry) -> NodeSpec:
        path = ("nodes", number)
        before = len(self.problems)
        group = NodeSpec(name=entry.name, labels=dict(entry.labels))
        group.count = self._try(path, "count", lambda: check_count(entry.count, "count", NODES_LIMIT, least=1)) or 1
        group.cpu_milli = self._try(path, "cpus", lambda: parse_cpus(entry.cpus)) or 0
        group.kept_back_milli = self._try(path, "keep_back", lambda: parse_cpus(entry.keep_back, "keep_back")) or 0
        if entry.memory is not None:
            group.memory_bytes = self._try(path, "memory", lambda: parse_memory(entry.memory)) or 0
        cards = [self._try((*path, "gpus"), index, partial(parse_cards, card)) for index, card in enumerate(entry.gpus)]
        group.cards = [card for card in cards if card is not None]
        for name, amount in entry.custom.items():
            group.custom[name] = self._try((*path, "custom"), name, partial(_checked_custom, name, amount)) or 0
        for name, value in entry.labels.items():
            self._try((*path, "labels"), name, partial(check_label, name, value))
        self._try(path, "name", lambda: _check_name(entry))
        if len(self.problems) == before:
            self._try(path, "cpus", lambda: check_group(group, cpus="cpus: 4", keep="keep_back: 1"))
        return group

    def _try(self, path: tuple[str | int, ...], key: str | int, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except SpecError as mistake:
            place = self.document.place((*path, key))
            self.problems.append(Problem("DT023", str(mistake), fixes=(mistake.fix,), place=place))
            return None


def _checked_custom(name: str, amount: float) -> int:
    check_custom_name(name)
    return parse_custom_amount(amount, name)


def _check_name(entry: NodeEntry) -> None:
    if entry.name is None:
        return
    if not entry.name.strip():
        raise SpecError("a node's name is empty", "write a name, or omit 'name'")
    if entry.count != 1:
        raise SpecError(
            f"{entry.count} nodes cannot all be called {entry.name!r}", "remove 'name', or write 'count: 1'"
        )
