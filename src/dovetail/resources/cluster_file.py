"""What does a cluster file say?

nodes:
  - {count: 4, cpus: 32, memory: 128GB, gpus: ["2xA100:40GB"], labels: {pool: gpu}}
  - {name: login, cpus: 8, memory: 16GB, keep_back: 2, custom: {licence: 1}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.documents import Document, read_document, validated
from dovetail.errors import ClusterError, ConfigError, Problem
from dovetail.resources.parse import (
    NODES_LIMIT,
    Mistake,
    NodeSpec,
    check_custom_name,
    check_group,
    check_label,
    count_of,
    cpus_milli,
    custom_milli,
    memory_bytes,
    parse_cards,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


def groups_in(path: str | Path) -> list[NodeSpec]:
    return _groups(read_document(path))


def groups_of(data: object) -> list[NodeSpec]:
    return _groups(Document("cluster", data))


def _groups(document: Document) -> list[NodeSpec]:
    try:
        entries = validated(document, ClusterFile).nodes
    except ConfigError as error:
        raise ClusterError(error.problems) from None
    reader = _Reader(document)
    groups = [reader.node(number, entry) for number, entry in enumerate(entries)]
    if reader.problems:
        raise ClusterError(reader.problems)
    return groups


class _Reader:
    """Turns entries into groups and collects what is wrong with their values."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []

    def node(self, number: int, entry: NodeEntry) -> NodeSpec:
        path = ("nodes", number)
        before = len(self.problems)
        group = NodeSpec(name=entry.name, labels=dict(entry.labels))
        group.count = self._try(path, "count", lambda: count_of(entry.count, "count", NODES_LIMIT, least=1)) or 1
        group.cpu_milli = self._try(path, "cpus", lambda: cpus_milli(entry.cpus)) or 0
        group.kept_back_milli = self._try(path, "keep_back", lambda: cpus_milli(entry.keep_back, "keep_back")) or 0
        if entry.memory is not None:
            group.memory_bytes = self._try(path, "memory", lambda: memory_bytes(entry.memory)) or 0
        cards = [self._try((*path, "gpus"), index, partial(parse_cards, card)) for index, card in enumerate(entry.gpus)]
        group.cards = [card for card in cards if card is not None]
        for name, amount in entry.custom.items():
            group.custom[name] = self._try((*path, "custom"), name, partial(_custom, name, amount)) or 0
        for name, value in entry.labels.items():
            self._try((*path, "labels"), name, partial(check_label, name, value))
        self._try(path, "name", lambda: _check_name(entry))
        if len(self.problems) == before:
            self._try(path, "cpus", lambda: check_group(group, cpus="cpus: 4", keep="keep_back: 1"))
        return group

    def _try(self, path: tuple[str | int, ...], key: str | int, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Mistake as mistake:
            place = self.document.place((*path, key))
            self.problems.append(Problem("DT023", str(mistake), fixes=(mistake.fix,), place=place))
            return None


def _custom(name: str, amount: float) -> int:
    check_custom_name(name)
    return custom_milli(amount, name)


def _check_name(entry: NodeEntry) -> None:
    if entry.name is None:
        return
    if not entry.name.strip():
        raise Mistake("a node's name is empty", "write a name, or leave 'name' out")
    if entry.count != 1:
        raise Mistake(f"{entry.count} nodes cannot all be called {entry.name!r}", "remove 'name', or write 'count: 1'")
