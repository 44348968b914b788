"""Cluster files: declaration of their fields, and parser with the place of every mistake.

nodes:
  - {count: 4, cpus: 32, memory: 128GB, gpus: ["2xA100:40GB"], labels: {pool: gpu}}
  - {count: 2, instance: p5.48xlarge}
  - {name: login, cpus: 8, memory: 16GB, keep_back: 2, custom: {licence: 1}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import Document, KeyPath
from dovetail.documents.fields import (
    NUMBER,
    STRING,
    WHOLE_NUMBER,
    Field,
    MissingKey,
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
from dovetail.errors import ClusterError, Problem
from dovetail.resources.cluster_spec import (
    CPUS_LIMIT,
    NODES_LIMIT,
    NodeSpec,
    SpecError,
    check_count,
    check_custom_name,
    check_group,
    check_label,
    parse_cards,
    parse_cpus,
    parse_custom_amount,
    parse_instance,
    parse_memory,
    set_instance,
    short_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


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
        fixes = (error.fix,) if error.fix else ()
        yield ParserProblem(path, Problem("DT023", str(error), fixes=fixes), error.instead)


def _is_any_text(_name: str) -> bool:
    return True  # the parser of an entry checks its name


def _parse_custom(name: str, amount: float) -> int:
    check_custom_name(name)
    return parse_custom_amount(amount, name)


def _parse_keep_back(value: object) -> int:
    return parse_cpus(value, "keep_back")


def _check_node_count(value: object) -> int:
    return check_count(value, "count", NODES_LIMIT, least=1)


_CPUS_SCHEMA: Schema = {"type": "number", "minimum": 0, "maximum": CPUS_LIMIT}
_LABELS = mapping_of(STRING, "a mapping of names to strings", {"pool": "gpu"}, key=_is_any_text)
_CUSTOM_AMOUNTS = mapping_of(NUMBER, "a mapping of names to amounts", {"licence": 1}, key=_is_any_text)
NODE_ENTRY = Record(
    "Nodes of a cluster file",
    "One group of equal nodes.",
    (
        Field(
            "cpus",
            _parsed(replace(NUMBER, example=4), parse_cpus, _CPUS_SCHEMA),
            "CPUs of a node; required without `instance`.",
        ),
        Field(
            "instance",
            _parsed(
                replace(STRING, text="an [instance type](clusters.md#instance-types)", example="g5.xlarge"),
                parse_instance,
            ),
            "Instance type of a cloud, instead of `cpus`, `memory` and `gpus`.",
        ),
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
            _parsed(WHOLE_NUMBER, _check_node_count, {"type": "integer", "minimum": 1, "maximum": NODES_LIMIT}),
            "Number of nodes.",
            1,
        ),
    ),
)
_NODE_SCHEMA: Schema = {
    **NODE_ENTRY.schema(),
    "oneOf": [
        {"required": ["cpus"]},
        {"required": ["instance"], "not": {"anyOf": [{"required": ["memory"]}, {"required": ["gpus"]}]}},
    ],
}
_NODES = list_of(replace(record_type(NODE_ENTRY, {"cpus": 4}), schema=_NODE_SCHEMA))
CLUSTER_FILE = Record(
    "Cluster file", "The nodes of a cluster.", (Field("nodes", _NODES, "Groups of nodes.", required=True),)
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
    entries = document.data.get("nodes") if isinstance(document.data, Mapping) else None
    groups: list[NodeSpec] = []
    for number, entry in enumerate(entries if isinstance(entries, list | tuple) else ()):
        path: KeyPath = ("nodes", number)
        if isinstance(entry, Mapping):
            mistakes += _spec_problems((*path, "name"), partial(_check_name, entry.get("name"), entry.get("count", 1)))
            mistakes += _entry_mistakes(path, entry)
        if path not in {mistake.path[:2] for mistake in mistakes}:
            groups.append(_node_spec(entry))
            check = partial(check_group, groups[-1], cpus="cpus: 4", keep="keep_back: 1")
            mistakes += _spec_problems((*path, "cpus"), check)
    if mistakes:
        problems = [replace(file_problem(mistake), place=document.place(mistake.path)) for mistake in mistakes]
        raise ClusterError(problems)
    return groups


def _entry_mistakes(path: KeyPath, entry: Mapping[Any, Any]) -> Iterator[Mistake]:
    """Mistakes in the keys of an entry together."""
    if "instance" not in entry:
        if "cpus" not in entry:
            yield MissingKey((*path, "cpus"), 4)
        return
    for key in ("cpus", "memory", "gpus"):
        if key in entry:
            message = f"{key} together with instance: CPUs, memory and cards are those of the instance type"
            yield ParserProblem((*path, key), Problem("DT023", message, fixes=(f"remove {key!r}", "remove 'instance'")))


def _node_spec(entry: Mapping[str, Any]) -> NodeSpec:
    memory = entry.get("memory")
    group = NodeSpec(
        count=entry.get("count", 1),
        name=entry.get("name"),
        kept_back_milli=_parse_keep_back(entry.get("keep_back", 0)),
        labels=dict(entry.get("labels", {})),
        custom={name: _parse_custom(name, amount) for name, amount in entry.get("custom", {}).items()},
    )
    if "instance" in entry:
        set_instance(group, parse_instance(entry["instance"]))
        return group
    group.cpu_milli = parse_cpus(entry["cpus"])
    group.memory_bytes = 0 if memory is None else parse_memory(memory)
    group.cards = [parse_cards(card) for card in entry.get("gpus", ())]
    return group


def _check_name(name: object, count: object) -> None:
    """Check the name of an entry together with its count."""
    if not isinstance(name, str):
        return
    if not name.strip():
        raise SpecError("a node's name is empty", "write a name, or omit 'name'")
    if count != 1:
        raise SpecError(
            f"{short_value(count)} nodes cannot all be called {name!r}", "remove 'name', or write 'count: 1'"
        )
