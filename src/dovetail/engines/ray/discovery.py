"""What is there on a Ray cluster, and what of it do others than Dovetail use? From Ray's own tables, in some ms."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.cards import ACCELERATOR, MEMORY_LABEL, cards_looked, cards_said, is_unknown, look_on
from dovetail.engines.ray.library import import_ray, module
from dovetail.errors import EngineError, Problem
from dovetail.resources.cluster import Cluster, Node
from dovetail.resources.free import WHOLE_CARD_MILLI
from dovetail.resources.parse import Mistake, check_custom_name, check_label
from dovetail.resources.seat import CardShare, Seat

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from dovetail.engines.ray.cards import Looked
    from dovetail.resources.cluster import Gpu
    from dovetail.resources.seat import Seats

OURS = "dovetail:"
"""What the names of our placement groups begin with; the run's id follows."""
STORE = "object_store_memory"
RAYS_OWN = ("CPU", "GPU", "memory", STORE)
NODE_ID = "ray.io/node-id"
SHORT = 8
YOUNG_MS = 1000
BUNDLE = "bundle_group_"
HOLDING = ("CREATED", "RESCHEDULING")
"""States of placement groups whose placed bundles hold something."""

Held = dict[str, dict[str, float]]
"""Ray node id -> resource -> how much."""


class NoNodes(EngineError):
    """There is a Ray, and nothing that could run something; who has a run on it must know that from other trouble."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A Ray cluster at one moment. Names are those of `cluster`."""

    cluster: Cluster
    ids: dict[str, str]
    """Name -> Ray's node id."""
    addresses: dict[str, str]
    object_store_bytes: dict[str, int]
    foreign: Seats = ()
    """What others than Dovetail hold, a seat per node. Which cards those are Ray does not say: the last ones."""
    notes: tuple[str, ...] = ()
    left_out: frozenset[str] = field(default=frozenset())
    """Ray's ids of nodes that can run nothing."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What is different between two looks."""

    joined: tuple[Node, ...]
    left: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.joined or self.left)


def discover(*, known: Mapping[str, str] | None = None, ours: Held | None = None) -> Seen:
    """The cluster that this process is attached to. `known`: name -> node id of all that was seen before, gone or not,
    so that names stay and are never given twice. `ours`: what Dovetail's placement groups hold; asked, if not given."""
    rows = [row for row in import_ray().nodes() if row["Alive"]]
    state = module("ray._private.state")
    totals: Held = state.total_resources_per_node() if ours is None else {}  # first: see `held_by_groups`
    available: Held = state.available_resources_per_node()
    held = _held(totals) if ours is None else ours
    unknown = [row["NodeID"] for row in rows if is_unknown(cards_said(row["Resources"], row.get("Labels") or {}))]
    looked, notes = look_on(unknown) if unknown else ({}, [])
    return seen_of(rows, available, held, looked, known or {}, notes)


def groups_now() -> list[dict[str, Any]]:
    """Ray's placement groups, without those that are gone."""
    return groups_of(_group_rows(), {})


def _held(totals: Held) -> Held:
    rows, now_ms = _group_rows(), time.time() * 1000
    young = frozenset(row.placement_group_id.hex() for row in rows if _is_young(row, now_ms))
    return held_by_groups(groups_of(rows, totals, young), totals, young)


def _group_rows() -> list[Any]:
    """Ray keeps a row of every group that ever was; its public call makes dicts of all, and leaves the times out."""
    parse = module("ray.core.generated.gcs_pb2").PlacementGroupTableData.FromString
    accessor = module("ray._private.state").state._connect_and_get_accessor()  # noqa: SLF001 - see above
    return [parse(row) for row in accessor.get_placement_group_table()]


def held_by_groups(groups: Iterable[Mapping[str, Any]], totals: Held, young: Container[str] = ()) -> Held:
    """What our groups hold, node by node. Nodes report ten times a second: until then what a removed group had is not
    free, and must not be taken for somebody else's. The node's totals still list it, unless it was so young that they
    never did."""
    found: Held = {}
    for group in groups:
        if is_ours(group["name"]):
            held = group["state"] in HOLDING or group["placement_group_id"] in young
            mark = f"{BUNDLE}{group['placement_group_id']}"
            for number, node in group["bundles_to_node_id"].items():
                if node and (held or mark in totals.get(node, {})):
                    add(found.setdefault(node, {}), group["bundles"][number])
    return found


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0.0) + amount


# --- pure


def groups_of(rows: Iterable[Any], totals: Held, young: Container[str] = ()) -> list[dict[str, Any]]:
    """Plain rows of the placement groups that may hold something: of those that are gone the young ones, and those that
    the totals of a node still list."""
    listed = {name.rpartition("_")[2] for total in totals.values() for name in total if name.startswith(BUNDLE)}
    found = []
    for row in rows:
        number = row.placement_group_id.hex()
        gone = row.PlacementGroupState.Name(row.state) == "REMOVED"
        if not gone or number in young or number in listed:
            found.append(_group(row, number))
    return found


def _group(row: Any, number: str) -> dict[str, Any]:
    """As `ray.util.placement_group_table` has it, as far as somebody here asks."""
    return {
        "placement_group_id": number,
        "name": row.name,
        "state": row.PlacementGroupState.Name(row.state),
        "bundles": {bundle.bundle_id.bundle_index: dict(bundle.unit_resources) for bundle in row.bundles},
        "bundles_to_node_id": {bundle.bundle_id.bundle_index: bundle.node_id.hex() for bundle in row.bundles},
        "stats": {"scheduling_state": row.stats.SchedulingState.Name(row.stats.scheduling_state)},
    }


def _is_young(row: Any, now_ms: float) -> bool:
    """Whether it was placed a moment ago."""
    return bool(abs(now_ms - row.placement_group_final_bundle_placement_timestamp_ms) < YOUNG_MS)


def seen_of(
    rows: Sequence[Mapping[str, Any]],
    available: Held,
    ours: Held,
    looked: Mapping[str, Looked] | None = None,
    known: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Seen:
    """From rows of `ray.nodes()`, all alive; in the order of their names, the same on every look."""
    useful = [row for row in rows if row["Resources"].get("CPU", 0) or row["Resources"].get("GPU", 0)]
    idle = [row for row in rows if row not in useful]
    names = names_of(useful, known or {})
    told = list(notes)
    told += [f"node {row['NodeManagerHostname']} ({row['NodeID'][:SHORT]}) has no CPU: left out" for row in idle]
    if not useful:
        fixes = ("ray start --address=HOST:PORT on a machine with CPUs", "or give the head some: --num-cpus=4")
        raise NoNodes(Problem("DT393", "the Ray cluster has no node with CPUs or GPUs", tuple(told), fixes))
    order = sorted(useful, key=lambda row: names[row["NodeID"]])
    nodes = [_node(row, names[row["NodeID"]], (looked or {}).get(row["NodeID"], []), told) for row in order]
    foreign = [
        seat
        for row, node in zip(order, nodes, strict=True)
        if (seat := taken_on(node, _used(row, available, ours))) is not None
    ]
    return Seen(
        Cluster(tuple(nodes), tuple(told)),
        {node.name: row["NodeID"] for row, node in zip(order, nodes, strict=True)},
        {node.name: row["NodeManagerAddress"] for row, node in zip(order, nodes, strict=True)},
        {node.name: int(row["Resources"].get(STORE, 0)) for row, node in zip(order, nodes, strict=True)},
        tuple(foreign),
        tuple(told),
        frozenset(row["NodeID"] for row in idle),
    )


def names_of(rows: Sequence[Mapping[str, Any]], known: Mapping[str, str]) -> dict[str, str]:
    """Ray node id -> name: what it was called before, its hostname if no other has that, else by its id."""
    before = {node: name for name, node in known.items()}
    hosts = Counter(row["NodeManagerHostname"] for row in rows)
    found: dict[str, str] = {}
    taken = set(known)
    for row in sorted(rows, key=lambda row: str(row["NodeID"])):
        node, name = row["NodeID"], row["NodeManagerHostname"]
        if hosts[name] > 1 or name in taken or not name:
            length = SHORT
            while (name := f"node-{node[:length]}") in taken and length < len(node):
                length += SHORT
        found[node] = before.get(node, name)
        taken.add(found[node])
    return found


def _node(row: Mapping[str, Any], name: str, looked: Looked, notes: list[str]) -> Node:
    resources, labels = row["Resources"], row.get("Labels") or {}
    cards = cards_said(resources, labels)
    return Node(
        name,
        _milli(resources.get("CPU", 0)),
        int(resources.get("memory", 0)),
        cards_looked(cards, looked) if is_unknown(cards) else cards,
        _labels(labels),
        _custom(resources, name, notes),
    )


def _labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those that a stage can ask for; a node's id would make alike nodes unlike."""
    found = []
    for name, value in sorted(labels.items()):
        try:
            check_label(name, value)
        except Mistake:
            continue
        if name not in (NODE_ID, MEMORY_LABEL):
            found.append((name, value))
    return tuple(found)


def custom_of(resources: Mapping[str, float]) -> dict[str, float]:
    """Without what Ray has put there itself, for nodes, cards and placement groups."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if name not in RAYS_OWN and not name.startswith(("node:", ACCELERATOR)) and "_group_" not in name and amount
    }


def _custom(resources: Mapping[str, float], node: str, notes: list[str]) -> tuple[tuple[str, int], ...]:
    found = []
    for name, amount in custom_of(resources).items():
        try:
            check_custom_name(name)
        except Mistake:
            notes.append(f"node {node}: the resource {name!r} cannot be asked for by a stage: left out")
        else:
            found.append((name, _milli(amount)))
    return tuple(found)


def _used(row: Mapping[str, Any], available: Held, ours: Held) -> dict[str, float]:
    """By others: all but what is free and what is ours."""
    node, total = row["NodeID"], row["Resources"]
    free, mine = available.get(node, total), ours.get(node, {})
    return {name: max(0.0, have - free.get(name, 0.0) - mine.get(name, 0.0)) for name, have in total.items()}


def taken_on(node: Node, used: Mapping[str, float]) -> Seat | None:
    """What is used, as a seat; None, if that is nothing."""
    custom = tuple((name, amount) for name, _ in node.custom if (amount := _milli(used.get(name, 0))))
    cpu_milli, memory_bytes = _milli(used.get("CPU", 0)), int(used.get("memory", 0))
    cards = _cards_taken(node.gpus, _milli(used.get("GPU", 0)))
    if not (cpu_milli or memory_bytes or cards or custom):
        return None
    return Seat(node.name, cpu_milli, memory_bytes, cards, custom)


def _cards_taken(gpus: tuple[Gpu, ...], milli: int) -> tuple[CardShare, ...]:
    """The last ones: positions are ours to give, and whoever came first plans from the first."""
    found: list[CardShare] = []
    for card in reversed(range(len(gpus))):
        part = min(milli, WHOLE_CARD_MILLI)
        if part <= 0:
            break
        gpu, whole = gpus[card], part == WHOLE_CARD_MILLI
        codecs = (gpu.nvdecs, gpu.nvencs) if whole else (0, 0)
        found.append(CardShare(card, part, gpu.memory_bytes * part // WHOLE_CARD_MILLI, *codecs))
        milli -= part
    return tuple(reversed(found))


def _milli(amount: float) -> int:
    return round(amount * 1000)


def changes(before: Seen, now: Seen) -> Changes:
    """By Ray's ids: a machine that came back is another node, with another name."""
    old, new = set(before.ids.values()), set(now.ids.values())
    joined = tuple(node for node in now.cluster.nodes if now.ids[node.name] not in old)
    return Changes(joined, tuple(name for name, node in before.ids.items() if node not in new))


def same_nodes(before: Seen, rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether `ray.nodes()` has just the nodes that were seen: most looks need no more than this."""
    return {row["NodeID"] for row in rows if row["Alive"]} == set(before.ids.values()) | before.left_out
