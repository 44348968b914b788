"""Parser of cluster specs such as '4x(32cpu, 128GB, 2xA100:40GB){pool=gpu}' and of cluster files.

nodes:
  - {count: 4, cpus: 32, memory: 128GB, gpus: ["2xA100:40GB"], labels: {pool: gpu}}
  - {name: login, cpus: 8, memory: 16GB, keep_back: 2, custom: {licence: 1}}
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import Document, KeyPath
from dovetail.documents.fields import (
    NUMBER,
    STRING,
    WHOLE_NUMBER,
    Field,
    Mistake,
    ParserProblem,
    Record,
    Schema,
    Type,
    file_problem,
    list_of,
    mapping_of,
    record_type,
)
from dovetail.documents.parser import read_document
from dovetail.errors import ClusterError, Problem, short_repr
from dovetail.resources.sizes import SizeError, parse_milli, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NODES_LIMIT = 100_000
CARDS_LIMIT = 256
CPUS_LIMIT = 1_000_000
CODECS_LIMIT = 1_024
CUSTOM_LIMIT = 10**9

EXAMPLE = "4x(32cpu, 128GB, 2xA100:40GB) + 16x(32cpu, 64GB){pool=cpu}"


@dataclass(frozen=True, slots=True)
class CardSpec:
    """`count` cards as written; None: the values of the model."""

    count: int
    model: str
    memory: str | None = None
    nvdecs: int | None = None
    nvencs: int | None = None


@dataclass(slots=True)
class NodeSpec:
    """`count` equal nodes as written."""

    count: int = 1
    name: str | None = None
    cpu_milli: int = 0
    kept_back_milli: int = 0
    memory_bytes: int = 0
    cards: list[CardSpec] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    custom: dict[str, int] = field(default_factory=dict)


class SpecError(ValueError):
    """A value is invalid: the reason, and a fix."""

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
    """Groups of equal nodes in a spec; all mistakes are reported at once, with their columns."""
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
        raise SpecError(
            f"{what} {short_repr(error.value)} {error.reason}", f"write {' or '.join(map(repr, error.examples))}"
        ) from None


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
            raise SpecError(f"{part.strip()!r} is not a property of a card", "write ':40GB', ':nvdec=5' or ':nvenc=0'")
    return CardSpec(count, match["model"].strip(), memory, codecs.get("nvdec"), codecs.get("nvenc"))


def check_group(group: NodeSpec, *, cpus: str, keep: str) -> None:
    """Check values of an entry together; `cpus` and `keep` are their spellings in a spec or file, for fixes."""
    if not group.cpu_milli:
        raise SpecError("a node has no CPUs", f"add '{cpus}'")
    if group.kept_back_milli >= group.cpu_milli:
        raise SpecError("a node keeps back all of its CPUs", f"keep back fewer, such as '{keep}'")


def check_custom_name(name: str) -> None:
    if name.lower().removesuffix("s") in ("cpu", "gpu", "memory", "gpu_memory", "nvdec", "nvenc"):
        raise SpecError(f"{name!r} is not a custom resource", "write CPUs, memory and cards like '32cpu, 64GB, 2xA100'")
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is not a name for a custom resource", "use a letter first, then letters, digits, _ . -"
        )


def check_label(name: str, value: str) -> None:
    """Check a label; only labels that a spec can express are valid, so that every cluster has a spec."""
    for text in (name, value):
        if not _LABEL.fullmatch(text) or text != text.strip():
            raise SpecError(
                f"label {name!r}: {value!r} is not a name and a value",
                "use no spaces around it and none of , = { } ( ) | +",
            )


def _int_or_text(text: str) -> object:
    """The number, or the string itself if it is not a number of a sensible size."""
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
    """Parts at the outermost level, each with its start."""
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


# --- cluster files


def _parsed(base: Type, parse: Callable[[Any], object], schema: Schema | None = None) -> Type:
    """A type with the check of a parser as well."""

    def check(value: object) -> Iterator[Mistake]:
        wrong = [*base.check(value)]
        yield from wrong or _spec_problems((), partial(parse, value))

    return replace(base, check=check, schema=schema or base.schema)


def _parsed_entries(base: Type, parse: Callable[[str, Any], object]) -> Type:
    """A mapping whose keys and values are checked by a parser as well."""

    def check(value: object) -> Iterator[Mistake]:
        wrong = [*base.check(value)]
        yield from wrong
        if not wrong and isinstance(value, Mapping):
            for name, one in value.items():
                yield from _spec_problems((name,), partial(parse, name, one))

    return replace(base, check=check)


def _spec_problems(path: KeyPath, parse: Callable[[], object]) -> Iterator[Mistake]:
    try:
        parse()
    except SpecError as error:
        yield ParserProblem(path, Problem("DT023", str(error), fixes=(error.fix,)))


def _is_any_text(_name: str) -> bool:
    return True  # the parser of an entry checks its name


def _parse_custom(name: str, amount: float) -> int:
    check_custom_name(name)
    return parse_custom_amount(amount, name)


def _parse_keep_back(value: object) -> int:
    return parse_cpus(value, "keep_back")


def _parse_count(value: object) -> int:
    return check_count(value, "count", NODES_LIMIT, least=1)


_CPUS_SCHEMA: Schema = {"type": "number", "minimum": 0, "maximum": CPUS_LIMIT}
_LABELS = mapping_of(STRING, "a mapping of names to strings", {"pool": "gpu"}, key=_is_any_text)
_CUSTOM_AMOUNTS = mapping_of(NUMBER, "a mapping of names to amounts", {"licence": 1}, key=_is_any_text)
NODE_ENTRY = Record(
    "Nodes of a cluster file",
    "One group of equal nodes.",
    (
        Field("cpus", _parsed(replace(NUMBER, example=4), parse_cpus, _CPUS_SCHEMA), "CPUs of a node.", required=True),
        Field(
            "memory",
            _parsed(replace(STRING, text="a size", example="16GB"), parse_memory),
            "Host memory of a node.",
            nullable=True,
        ),
        Field(
            "gpus",
            list_of(_parsed(replace(STRING, example="2xA100:40GB"), parse_cards), "a list of cards"),
            "Cards of a node: `2xA100:40GB`, `L4`, `1xA100:nvdec=5:nvenc=0`.",
            [],
        ),
        Field(
            "labels",
            _parsed_entries(
                _LABELS,
                check_label,
            ),
            "Labels of a node.",
            {},
        ),
        Field(
            "custom",
            _parsed_entries(_CUSTOM_AMOUNTS, _parse_custom),
            "Amounts of custom resources of a node.",
            {},
        ),
        Field("keep_back", _parsed(NUMBER, _parse_keep_back, _CPUS_SCHEMA), "CPUs that no worker gets.", 0),
        Field(
            "name", replace(STRING, text="a name", example="login"), "Name of the node, if there is one.", nullable=True
        ),
        Field(
            "count",
            _parsed(WHOLE_NUMBER, _parse_count, {"type": "integer", "minimum": 1, "maximum": NODES_LIMIT}),
            "Number of nodes.",
            1,
        ),
    ),
)
CLUSTER_FILE = Record(
    "Cluster file",
    "The nodes of a cluster.",
    (Field("nodes", list_of(record_type(NODE_ENTRY, {"cpus": 4})), "Groups of nodes.", required=True),),
)


def schema() -> Schema:
    """The JSON Schema of a cluster file."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Dovetail cluster"}
    return {**head, **CLUSTER_FILE.schema()}


def read_cluster_file(path: str | Path) -> list[NodeSpec]:
    return _document_groups(read_document(path))


def parse_cluster_data(data: object) -> list[NodeSpec]:
    return _document_groups(Document("cluster", data))


def _document_groups(document: Document) -> list[NodeSpec]:
    """The groups of nodes in a document; ClusterError with every problem."""
    mistakes = [*record_type(CLUSTER_FILE, {"nodes": [{"cpus": 4}]}).check(document.data)]
    invalid_entries = {mistake.path[:2] for mistake in mistakes}
    entries = document.data.get("nodes") if isinstance(document.data, Mapping) else None
    groups: list[NodeSpec] = []
    for number, entry in enumerate(entries if isinstance(entries, list | tuple) else ()):
        path: KeyPath = ("nodes", number)
        if isinstance(entry, Mapping):
            mistakes += _spec_problems((*path, "name"), partial(_check_name, entry.get("name"), entry.get("count", 1)))
        if path not in invalid_entries:
            groups.append(_node_spec(entry))
            check = partial(check_group, groups[-1], cpus="cpus: 4", keep="keep_back: 1")
            mistakes += _spec_problems((*path, "cpus"), check)
    if mistakes:
        problems = [replace(file_problem(mistake), place=document.place(mistake.path)) for mistake in mistakes]
        raise ClusterError(problems)
    return groups


def _node_spec(entry: Mapping[str, Any]) -> NodeSpec:
    memory = entry.get("memory")
    return NodeSpec(
        count=entry.get("count", 1),
        name=entry.get("name"),
        cpu_milli=parse_cpus(entry["cpus"]),
        kept_back_milli=_parse_keep_back(entry.get("keep_back", 0)),
        memory_bytes=0 if memory is None else parse_memory(memory),
        cards=[parse_cards(card) for card in entry.get("gpus", ())],
        labels=dict(entry.get("labels", {})),
        custom={name: _parse_custom(name, amount) for name, amount in entry.get("custom", {}).items()},
    )


def _check_name(name: object, count: object) -> None:
    """Check the name of an entry together with its count."""
    if not isinstance(name, str):
        return
    if not name.strip():
        raise SpecError("a node's name is empty", "write a name, or omit 'name'")
    if count != 1:
        raise SpecError(
            f"{_short_value(count)} nodes cannot all be called {name!r}", "remove 'name', or write 'count: 1'"
        )
