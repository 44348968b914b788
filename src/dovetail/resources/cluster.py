"""Cluster, Node and Gpu: built from this machine, a spec, a file or plain data."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dovetail.errors import ClusterError, Problem
from dovetail.resources import cluster_spec
from dovetail.resources.gpu_models import card_model, model_key
from dovetail.resources.sizes import format_exact_size, format_milli, format_size, format_size_below, parse_size
from dovetail.text_format import html_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from dovetail.machine import CardFacts, GpuReader


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card, or one MIG instance of a card. `uuid` is its name in CUDA_VISIBLE_DEVICES, if known."""

    model: str = "gpu"
    memory_bytes: int = 0
    """0: unknown; workers cannot request a part of it."""
    nvdecs: int = 0
    nvencs: int = 0
    uuid: str = field(default="", compare=False)

    @classmethod
    def of(
        cls,
        model: str,
        memory: str | None = None,
        nvdecs: int | None = None,
        nvencs: int | None = None,
        uuid: str = "",
    ) -> Gpu:
        """A card by the name of its model; memory and codecs of a known model can be overridden."""
        known = card_model(model)
        if memory is None and known:
            memory = f"{known.memory_gb}GB"
        return cls(
            model=known.name if known else model,
            memory_bytes=parse_size(memory) if memory is not None else 0,
            nvdecs=nvdecs if nvdecs is not None else known.nvdecs if known else 0,
            nvencs=nvencs if nvencs is not None else known.nvencs if known else 0,
            uuid=uuid,
        )

    @property
    def key(self) -> str:
        """The normalised model name, which accelerator requests are compared with."""
        return model_key(self.model)

    def spec(self) -> str:
        """The shortest text that `Gpu.of` and the spec parser read back to this card."""
        plain = Gpu.of(self.model)
        is_known = card_model(self.model) is not None or self.model.lower() == cluster_spec.GENERIC_CARD
        text = self.model
        if self.memory_bytes != plain.memory_bytes or not is_known:
            text += f":{format_exact_size(self.memory_bytes)}"
        if self.nvdecs != plain.nvdecs:
            text += f":nvdec={self.nvdecs}"
        if self.nvencs != plain.nvencs:
            text += f":nvenc={self.nvencs}"
        return text


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. `kept_back_milli` of its CPUs are reserved for the system and are not given to workers."""

    name: str
    cpu_milli: int
    memory_bytes: int = 0
    """0: unknown; workers cannot request a part of it."""
    gpus: tuple[Gpu, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    custom: tuple[tuple[str, int], ...] = ()
    """Custom resources in thousandths."""
    kept_back_milli: int = 0

    @property
    def usable_cpu_milli(self) -> int:
        return self.cpu_milli - self.kept_back_milli

    def spec(self, *, exact: bool = True) -> str:
        """The node without its name, as `Cluster.parse` reads it. Not exact: sizes with three digits, for display."""
        parts = [f"{format_milli(self.cpu_milli)}cpu"]
        if self.kept_back_milli:
            parts.append(f"keep {format_milli(self.kept_back_milli)}cpu")
        if self.memory_bytes:
            parts.append(format_exact_size(self.memory_bytes) if exact else format_size(self.memory_bytes))
        parts += [f"{count}x{text}" for count, text in _runs(gpu.spec() for gpu in self.gpus)]
        parts += [f"{name}={format_milli(amount)}" for name, amount in self.custom]
        labels = ", ".join(f"{name}={value}" for name, value in self.labels)
        return f"({', '.join(parts)})" + (f"{{{labels}}}" if labels else "")

    def rounded(self) -> Node:
        """The node with its memory rounded down to a short size such as 23.5GB, for specs that people copy."""
        return replace(self, memory_bytes=parse_size(format_size_below(self.memory_bytes)))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes in a fixed order: of two nodes that are equally good, placement takes the first."""

    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Notes of the discovery: limits that apply, cards that are lost."""

    def __post_init__(self) -> None:
        given: object = self.nodes
        if isinstance(given, str):
            fixes = (f"dt.Cluster.of({given!r})",)
            raise ClusterError(Problem("DT023", f"nodes={given!r} is a text, not nodes", fixes=fixes))
        if not self.nodes:
            raise ClusterError(Problem("DT020", "a cluster needs at least one node", fixes=("write '1x(4cpu, 16GB)'",)))
        twice = sorted(name for name, count in Counter(node.name for node in self.nodes).items() if count > 1)
        if twice:
            message = f"two nodes have the same name: {', '.join(repr(name) for name in twice)}"
            raise ClusterError(Problem("DT021", message, fixes=("give every node a name of its own, or none",)))

    @classmethod
    def of(cls, what: object) -> Cluster:
        """'auto' is this machine; a string that ends in .yaml, .yml or .json is a file; any other string is a spec."""
        if isinstance(what, Cluster):
            return what
        if not isinstance(what, str):
            return cls.parse(what)
        if what == "auto":
            return cls.local()
        return cls.load(what) if what.endswith((".yaml", ".yml", ".json")) else cls.parse(what)

    @classmethod
    def parse(cls, spec: object) -> Cluster:
        """'4x(32cpu, 128GB, 2xA100:40GB) + 2xp5.48xlarge{pool=big}'; every mistake is reported at once."""
        return _from_groups(cluster_spec.parse_cluster_spec(spec))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The inverse of `to_dict`; also accepts the data of a cluster file."""
        from dovetail.resources.cluster_file import (
            parse_cluster_data,  # late: most clusters are not described by a file
        )

        return _from_groups(parse_cluster_data(data))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """A YAML or JSON file; mistakes are reported with line and column."""
        try:
            from dovetail.resources.cluster_file import read_cluster_file

            return _from_groups(read_cluster_file(path))
        except ClusterError as error:
            raise ClusterError(
                problem if problem.place else problem.at(str(path)) for problem in error.problems
            ) from None

    @classmethod
    def local(cls, *, gpus: GpuReader | None = None) -> Cluster:
        """This machine, within the limits of its cgroup, CPU affinity and CUDA_VISIBLE_DEVICES; in the process of a
        job, the part that the job has."""
        from dovetail import machine  # late: only this reads the machine, and it imports psutil

        facts = machine.read_machine(gpus=gpus)
        cards = tuple(_local_cluster(card) for card in facts.cards)
        node = Node(facts.hostname, facts.cpu_milli, facts.memory_bytes, cards, custom=facts.custom)
        return cls((node,), facts.notes)

    def keeping_back(self, share: float) -> Cluster:
        """The same cluster with this share of the CPUs of every node reserved for the system."""
        if not 0 <= share < 1:
            message = f"a share of the CPUs to keep back is at least 0 and below 1, not {share!r}"
            raise ClusterError(Problem("DT022", message, fixes=("0.05 keeps back one CPU in twenty",)))
        kept = (replace(node, kept_back_milli=int(node.cpu_milli * share)) for node in self.nodes)
        return replace(self, nodes=tuple(kept))

    def without(self, names: Iterable[str]) -> Cluster:
        """The same cluster after the loss of some nodes."""
        gone = set(names)
        return replace(self, nodes=tuple(node for node in self.nodes if node.name not in gone))

    def spec(self, *, exact: bool = True) -> str:
        """A spec of one line that `parse` reads back; names that `parse` did not create are lost. Not exact: with
        rounded memory, for display."""
        return " + ".join(f"{count}x{text}" for count, text in _runs(node.spec(exact=exact) for node in self.nodes))

    def _repr_html_(self) -> str:
        groups = [(len(nodes), nodes[0]) for nodes in (list(alike) for _, alike in groupby(self.nodes, Node.spec))]
        rows = [
            (
                count,
                node.name if count == 1 else f"{node.name}, ...",
                format_milli(node.usable_cpu_milli),
                format_size(node.memory_bytes) if node.memory_bytes else "",
                ", ".join(f"{number}x{text}" for number, text in _runs(gpu.spec() for gpu in node.gpus)),
                ", ".join(f"{name}={value}" for name, value in node.labels),
            )
            for count, node in groups
        ]
        return html_table("Cluster", ("nodes", "name", "CPUs", "memory", "GPUs", "labels"), rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and YAML, names included; equal neighbours with generated names are one entry."""
        keyed = (
            (_entry(node) | ({} if node.name == _generated_name(i) else {"name": node.name}))
            for i, node in enumerate(self.nodes)
        )
        entries: list[dict[str, Any]] = []
        for entry, alike in groupby(keyed):
            count = len(list(alike))
            entries.append(entry if count == 1 else {"count": count, **entry})
        return {"nodes": entries}


def _local_cluster(card: CardFacts) -> Gpu:
    """A card as the driver describes it, completed from the table of models. A MIG instance is a model of its own, so
    that a worker that requests an A100 does not get a seventh of one."""
    gpu = Gpu.of(card.model, nvdecs=card.nvdecs, nvencs=card.nvencs, uuid=card.uuid)
    model = re.sub(r"[^\w.+-]+", "-", f"{gpu.model}-{card.mig}" if card.mig else gpu.model).strip("-")
    return replace(gpu, model=model, memory_bytes=card.memory_bytes)


def _generated_name(position: int) -> str:
    return f"node-{position}"


def _entry(node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {"cpus": _plain(node.cpu_milli)}
    if node.kept_back_milli:
        entry["keep_back"] = _plain(node.kept_back_milli)
    if node.memory_bytes:
        entry["memory"] = format_exact_size(node.memory_bytes)
    if node.gpus:
        entry["gpus"] = [f"{count}x{text}" for count, text in _runs(gpu.spec() for gpu in node.gpus)]
    if node.labels:
        entry["labels"] = dict(node.labels)
    if node.custom:
        entry["custom"] = {name: _plain(amount) for name, amount in node.custom}
    return entry


def _plain(amount_milli: int) -> int | float:
    return amount_milli // 1000 if amount_milli % 1000 == 0 else amount_milli / 1000


def _runs(texts: Iterable[str]) -> list[tuple[int, str]]:
    """Equal neighbours counted: [a, a, b] -> [(2, a), (1, b)]."""
    return [(len(list(alike)), text) for text, alike in groupby(texts)]


def _from_groups(groups: Iterable[cluster_spec.NodeSpec]) -> Cluster:
    nodes: list[Node] = []
    for group in groups:
        cards = tuple(
            gpu
            for card in group.cards
            for gpu in [Gpu.of(card.model, card.memory, card.nvdecs, card.nvencs)] * card.count
        )
        node = Node(
            name="",
            cpu_milli=group.cpu_milli,
            memory_bytes=group.memory_bytes,
            gpus=cards,
            labels=tuple(sorted(group.labels.items())),
            custom=tuple(sorted((name, amount) for name, amount in group.custom.items() if amount)),
            kept_back_milli=group.kept_back_milli,
        )
        nodes += [replace(node, name=group.name or _generated_name(len(nodes) + i)) for i in range(group.count)]
    return Cluster(tuple(nodes))
