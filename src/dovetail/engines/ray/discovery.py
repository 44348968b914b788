"""Discovery of a Ray cluster: nodes, GPUs, labels and custom resources, and how much other programs use.

`runtime` calls `discover` before planning, and `failure_detection.ClusterWatcher` while a run goes. Everything from
`parse_groups` on is pure.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray import ray_private
from dovetail.engines.ray.ray_import import import_ray, suppress_warnings
from dovetail.errors import ConfigError, EngineError, Problem
from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.cluster_spec import SpecError, check_custom_name, check_label
from dovetail.resources.free_resources import WHOLE_CARD_MILLI
from dovetail.resources.seat import CardShare, Seat
from dovetail.resources.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from dovetail.resources.seat import Seats

ACCELERATOR_PREFIX = "accelerator_type:"
ACCELERATOR_LABEL = "ray.io/accelerator-type"
GPU_MEMORY_LABEL = "dovetail.io/gpu-memory"
"""Memory of each GPU of the node (80GB), for models that exist with several sizes."""
UNKNOWN_MODEL = "gpu"
PROBE_TIMEOUT_S = 10.0
KV_NAMESPACE = b"dovetail"
CARDS_KEY_PREFIX = "cards:"
KV_TIMEOUT_S = 10.0
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

ProbedCards = list[dict[str, Any]]
"""GPUs that a task found on a node, as plain data."""

_PROBE_LOCK = Lock()
_FAILED_PROBES: dict[str, str] = {}
"""Ray's id of a node whose GPUs could not be probed -> a note; this process does not try again."""


def reported_cards(resources: Mapping[str, float], labels: Mapping[str, str]) -> tuple[Gpu, ...]:
    """GPUs from Ray's model name, with memory and codecs from the table of known models."""
    count = int(resources.get("GPU", 0))
    named = sorted(name.removeprefix(ACCELERATOR_PREFIX) for name in resources if name.startswith(ACCELERATOR_PREFIX))
    model = (named or [labels.get(ACCELERATOR_LABEL, "")])[0] or UNKNOWN_MODEL
    gpu = Gpu.of(model)
    gpu = replace(gpu, model=re.sub(r"[^\w.+-]+", "-", gpu.model).strip("-") or UNKNOWN_MODEL)
    with contextlib.suppress(KeyError, ConfigError):
        gpu = replace(gpu, memory_bytes=parse_size(labels[GPU_MEMORY_LABEL]))
    return (gpu,) * count


def are_cards_unknown(cards: tuple[Gpu, ...]) -> bool:
    return bool(cards) and (cards[0].model == UNKNOWN_MODEL or not cards[0].memory_bytes)


def merge_probed_cards(reported: tuple[Gpu, ...], probed: ProbedCards) -> tuple[Gpu, ...]:
    """The reported number of GPUs, with the properties that the probe found."""
    found = [Gpu(card["model"], card["memory_bytes"], card["nvdecs"], card["nvencs"]) for card in probed]
    return (*found[: len(reported)], *reported[len(found) :])


def probe_nodes(ids: Iterable[str]) -> tuple[dict[str, ProbedCards], list[str]]:
    """GPUs that a task finds on each node, cached in the cluster for other drivers; and notes about failures."""
    with _PROBE_LOCK:  # a second caller finds the result of the first
        wanted = list(ids)
        found = _probe_all([node for node in wanted if node not in _FAILED_PROBES])
    return found, [_FAILED_PROBES[node] for node in wanted if node in _FAILED_PROBES]


def _probe_all(wanted: list[str]) -> dict[str, ProbedCards]:
    found: dict[str, ProbedCards] = {}
    asked: dict[Any, str] = {}
    for node in wanted:
        known = _cached_cards(node)
        if known is not None:
            found[node] = known
        else:
            asked[_probe_task(node)] = node
    ray = import_ray()
    ready = ray.wait(list(asked), num_returns=len(asked), timeout=PROBE_TIMEOUT_S)[0] if asked else []
    for task in ready:
        try:
            found[asked[task]] = ray.get(task)
        except ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or [""])[-1][:120]
            _FAILED_PROBES[asked[task]] = (
                f"node {asked[task][:8]}: its GPUs could not be probed ({reason}); their memory is unknown"
            )
        else:
            _cache_cards(asked[task], found[asked[task]])
    for task in asked.keys() - set(ready):
        ray.cancel(task, force=True)
        _FAILED_PROBES[asked[task]] = (
            f"node {asked[task][:8]}: its GPUs could not be probed in {PROBE_TIMEOUT_S:g} s; their memory is unknown"
        )
    return found


def _cached_cards(node: str) -> ProbedCards | None:
    """Cards that another driver of this cluster has probed; None: none yet, or unknown."""
    client = ray_private.kv_client()
    text = None if client is None else client.internal_kv_get(_cards_key(node), KV_NAMESPACE, KV_TIMEOUT_S)
    return None if text is None else json.loads(text)


def _cache_cards(node: str, cards: ProbedCards) -> None:
    client = ray_private.kv_client()
    if client is not None:
        client.internal_kv_put(_cards_key(node), json.dumps(cards).encode(), True, KV_NAMESPACE, KV_TIMEOUT_S)


def _cards_key(node: str) -> bytes:
    return f"{CARDS_KEY_PREFIX}{node}".encode()


def _probe_task(node: str) -> Any:
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # after `import_ray`

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    with suppress_warnings():
        return ray.remote(probe_this_node).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()


def probe_this_node() -> ProbedCards:
    """All GPUs of this machine; Ray hides them from a task that requests none."""
    hidden = os.environ.pop(CUDA_VISIBLE_DEVICES, None)
    try:
        gpus = Cluster.local().nodes[0].gpus
    finally:
        if hidden is not None:
            os.environ[CUDA_VISIBLE_DEVICES] = hidden
    return [
        {"model": gpu.model, "memory_bytes": gpu.memory_bytes, "nvdecs": gpu.nvdecs, "nvencs": gpu.nvencs}
        for gpu in gpus
    ]


GROUP_NAME_PREFIX = "dovetail:"
"""Prefix of the names of Dovetail's placement groups. The run id, a colon and a number follow: names are unique in
Ray."""
OBJECT_STORE = "object_store_memory"
BUILTIN_RESOURCES = ("CPU", "GPU", "memory", OBJECT_STORE)
NODE_ID_LABEL = "ray.io/node-id"
SHORT_ID_LENGTH = 8
NEW_GROUP_MS = 1000
BUNDLE_PREFIX = "bundle_group_"
HOLDING_STATES = ("CREATED", "RESCHEDULING")
"""States of placement groups whose placed bundles hold resources."""

NodeResources = dict[str, dict[str, float]]
"""Ray node id -> resource -> amount."""


class NoNodesError(EngineError):
    """The Ray cluster has no usable node. A type of its own, because a run that is going may wait for new nodes."""


@dataclass(frozen=True, slots=True)
class DiscoveredCluster:
    """A Ray cluster at one moment. Node names are those of `cluster`."""

    cluster: Cluster
    ids: dict[str, str]
    """Name -> Ray's node id."""
    object_store_bytes: dict[str, int]
    foreign: Seats = ()
    """Usage by other programs, one seat per node. Ray does not report which GPUs: the last ones are assumed."""
    notes: tuple[str, ...] = ()
    left_out: frozenset[str] = field(default=frozenset())
    """Ray's ids of nodes without CPUs and GPUs."""


def discover(*, known: Mapping[str, str] | None = None, ours: NodeResources | None = None) -> DiscoveredCluster:
    """The cluster that this process is attached to. `known`: name -> node id of all nodes discovered before, so that
    names stay and are never reused. `ours`: what Dovetail's placement groups hold; read from Ray if not given."""
    rows = [row for row in import_ray().nodes() if row["Alive"]]
    totals = (ray_private.total_resources_per_node() or {}) if ours is None else {}  # first: see `held_by_groups`
    available = ray_private.available_resources_per_node()
    held = _held_by_dovetail(totals) if ours is None else ours
    unknown = [
        row["NodeID"] for row in rows if are_cards_unknown(reported_cards(row["Resources"], row.get("Labels") or {}))
    ]
    probed, notes = probe_nodes(unknown) if unknown else ({}, [])
    if available is None:
        notes = [*notes, "this version of Ray does not report usage per node: the whole cluster is assumed to be free"]
    return build_cluster(rows, available or {}, held, probed, known or {}, notes)


def current_placement_groups() -> list[dict[str, Any]]:
    """Ray's placement groups without the removed ones."""
    rows = ray_private.placement_group_rows()
    return _public_groups() if rows is None else parse_groups(rows, {})


def _held_by_dovetail(totals: NodeResources) -> NodeResources:
    rows, now_ms = ray_private.placement_group_rows(), time.time() * 1000
    if rows is None:
        return held_by_groups(_public_groups(), totals)
    young = frozenset(row.placement_group_id.hex() for row in rows if _is_new_group(row, now_ms))
    return held_by_groups(parse_groups(rows, totals, young), totals, young)


def _public_groups() -> list[dict[str, Any]]:
    """The same rows by Ray's public call, which knows neither the time of placement nor removed groups that still hold
    resources."""
    import_ray()
    from ray.util.placement_group import placement_group_table  # after `import_ray`

    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def held_by_groups(
    groups: Iterable[Mapping[str, Any]], totals: NodeResources, young: Container[str] = ()
) -> NodeResources:
    """Amounts per node that Dovetail's groups hold. Nodes report ten times per second: until then the resources of a
    removed group are not free, and must not count as usage by other programs. The node's totals still list the group,
    unless it was too new (`young`) to be listed."""
    found: NodeResources = {}
    for group in groups:
        if is_dovetail_group(group["name"]):
            held = group["state"] in HOLDING_STATES or group["placement_group_id"] in young
            mark = f"{BUNDLE_PREFIX}{group['placement_group_id']}"
            for number, node in group["bundles_to_node_id"].items():
                if node and (held or mark in totals.get(node, {})):
                    add_resources(found.setdefault(node, {}), group["bundles"][number])
    return found


def is_dovetail_group(name: str) -> bool:
    return name.startswith(GROUP_NAME_PREFIX)


def add_resources(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0.0) + amount


# --- pure


def parse_groups(rows: Iterable[Any], totals: NodeResources, young: Container[str] = ()) -> list[dict[str, Any]]:
    """Plain rows of the placement groups that may hold resources: of the removed ones, the young ones and those that
    the totals of a node still list."""
    listed = {name.rpartition("_")[2] for total in totals.values() for name in total if name.startswith(BUNDLE_PREFIX)}
    found = []
    for row in rows:
        number = row.placement_group_id.hex()
        gone = row.PlacementGroupState.Name(row.state) == "REMOVED"
        if not gone or number in young or number in listed:
            found.append(_parse_group(row, number))
    return found


def _parse_group(row: Any, number: str) -> dict[str, Any]:
    """The used fields of a row, as `ray.util.placement_group_table` returns them."""
    return {
        "placement_group_id": number,
        "name": row.name,
        "state": row.PlacementGroupState.Name(row.state),
        "bundles": {bundle.bundle_id.bundle_index: dict(bundle.unit_resources) for bundle in row.bundles},
        "bundles_to_node_id": {bundle.bundle_id.bundle_index: bundle.node_id.hex() for bundle in row.bundles},
        "stats": {"scheduling_state": row.stats.SchedulingState.Name(row.stats.scheduling_state)},
    }


def _is_new_group(row: Any, now_ms: float) -> bool:
    """Whether it was placed less than a second ago."""
    return bool(abs(now_ms - row.placement_group_final_bundle_placement_timestamp_ms) < NEW_GROUP_MS)


def build_cluster(
    rows: Sequence[Mapping[str, Any]],
    available: NodeResources,
    ours: NodeResources,
    probed: Mapping[str, ProbedCards] | None = None,
    known: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> DiscoveredCluster:
    """Cluster from rows of `ray.nodes()` that are alive; nodes in the order of their names."""
    useful = [row for row in rows if row["Resources"].get("CPU", 0) or row["Resources"].get("GPU", 0)]
    idle = [row for row in rows if row not in useful]
    names = node_names(useful, known or {})
    all_notes = list(notes)
    all_notes += [
        f"node {row['NodeManagerHostname']} ({row['NodeID'][:SHORT_ID_LENGTH]}) has no CPU and is not used"
        for row in idle
    ]
    if not useful:
        fixes = ("ray start --address=HOST:PORT on a machine with CPUs", "give the head some: --num-cpus=4")
        raise NoNodesError(Problem("DT393", "the Ray cluster has no node with CPUs or GPUs", tuple(all_notes), fixes))
    order = sorted(useful, key=lambda row: names[row["NodeID"]])
    nodes = [_node(row, names[row["NodeID"]], (probed or {}).get(row["NodeID"], []), all_notes) for row in order]
    foreign = [
        seat
        for row, node in zip(order, nodes, strict=True)
        if (seat := used_seat(node, _used_by_others(row, available, ours))) is not None
    ]
    return DiscoveredCluster(
        Cluster(tuple(nodes), tuple(all_notes)),
        {node.name: row["NodeID"] for row, node in zip(order, nodes, strict=True)},
        {node.name: int(row["Resources"].get(OBJECT_STORE, 0)) for row, node in zip(order, nodes, strict=True)},
        tuple(foreign),
        tuple(all_notes),
        frozenset(row["NodeID"] for row in idle),
    )


def node_names(rows: Sequence[Mapping[str, Any]], known: Mapping[str, str]) -> dict[str, str]:
    """Ray node id -> name: its previous name, else its hostname if that is unique, else a name from its id."""
    before = {node: name for name, node in known.items()}
    hosts = Counter(row["NodeManagerHostname"] for row in rows)
    found: dict[str, str] = {}
    taken = set(known)
    for row in sorted(rows, key=lambda row: str(row["NodeID"])):
        node, name = row["NodeID"], row["NodeManagerHostname"]
        if hosts[name] > 1 or name in taken or not name:
            length = SHORT_ID_LENGTH
            while (name := f"node-{node[:length]}") in taken and length < len(node):
                length += SHORT_ID_LENGTH
        found[node] = before.get(node, name)
        taken.add(found[node])
    return found


def _node(row: Mapping[str, Any], name: str, probed: ProbedCards, notes: list[str]) -> Node:
    resources, labels = row["Resources"], row.get("Labels") or {}
    cards = reported_cards(resources, labels)
    return Node(
        name,
        _to_milli(resources.get("CPU", 0)),
        int(resources.get("memory", 0)),
        merge_probed_cards(cards, probed) if are_cards_unknown(cards) else cards,
        _labels(labels),
        _node_custom(resources, name, notes),
    )


def _labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Labels that a stage can require. The node id is left out: it would make equal nodes different."""
    found = []
    for name, value in sorted(labels.items()):
        try:
            check_label(name, value)
        except SpecError:
            continue
        if name not in (NODE_ID_LABEL, GPU_MEMORY_LABEL):
            found.append((name, value))
    return tuple(found)


def custom_resources(resources: Mapping[str, float]) -> dict[str, float]:
    """Resources without those that Ray adds for nodes, GPUs and placement groups."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if name not in BUILTIN_RESOURCES
        and not name.startswith(("node:", ACCELERATOR_PREFIX))
        and "_group_" not in name
        and amount
    }


def _node_custom(resources: Mapping[str, float], node: str, notes: list[str]) -> tuple[tuple[str, int], ...]:
    found = []
    for name, amount in custom_resources(resources).items():
        try:
            check_custom_name(name)
        except SpecError:
            notes.append(f"node {node}: the resource {name!r} cannot be requested by a stage and is not used")
        else:
            found.append((name, _to_milli(amount)))
    return tuple(found)


def _used_by_others(row: Mapping[str, Any], available: NodeResources, ours: NodeResources) -> dict[str, float]:
    """Usage by other programs: total minus free minus Dovetail's own."""
    node, total = row["NodeID"], row["Resources"]
    free, mine = available.get(node, total), ours.get(node, {})
    return {name: max(0.0, have - free.get(name, 0.0) - mine.get(name, 0.0)) for name, have in total.items()}


def used_seat(node: Node, used: Mapping[str, float]) -> Seat | None:
    """Used amounts as a seat; None if there are none."""
    custom = tuple((name, amount) for name, _ in node.custom if (amount := _to_milli(used.get(name, 0))))
    cpu_milli, memory_bytes = _to_milli(used.get("CPU", 0)), int(used.get("memory", 0))
    cards = _used_cards(node.gpus, _to_milli(used.get("GPU", 0)))
    if not (cpu_milli or memory_bytes or cards or custom):
        return None
    return Seat(node.name, cpu_milli, memory_bytes, cards, custom)


def _used_cards(gpus: tuple[Gpu, ...], milli: int) -> tuple[CardShare, ...]:
    """Assume the last GPUs: Dovetail assigns positions from the first on."""
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


def _to_milli(amount: float) -> int:
    return round(amount * 1000)


def has_same_nodes(before: DiscoveredCluster, rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether `ray.nodes()` has exactly the known nodes, so that no discovery is needed."""
    return {row["NodeID"] for row in rows if row["Alive"]} == set(before.ids.values()) | before.left_out
