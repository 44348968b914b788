"""Usage report of a Ray cluster: which job holds which resources on which node, and which requests wait.

The command line prints it (`dovetail nodes`), and waiting runs use it to name the holders of what they need.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray import ray_private
from dovetail.engines.ray.discovery import (
    GROUP_NAME_PREFIX,
    HOLDING_STATES,
    OBJECT_STORE,
    add_resources,
    current_placement_groups,
    custom_resources,
    is_dovetail_group,
)
from dovetail.engines.ray.ray_import import import_ray
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from dovetail.engines.ray.discovery import DiscoveredCluster, NodeResources

TASKS_HOLDER = "tasks, or jobs that just ended,"
MAX_LINES = 20
"""Maximum number of printed lines of one kind; the JSON output has all."""
MIN_AMOUNT = 1e-4
"""Ray counts in 1/10000."""
BYTE_RESOURCES = ("memory", OBJECT_STORE)
FIRST_RESOURCES = ("CPU", "GPU")
ALIVE, WAITING_STATES = "ALIVE", ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")
PENDING_REASONS = {"NO_RESOURCES": "does not fit now", "INFEASIBLE": "fits on no node", "QUEUED": "not placed yet"}


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Used and total amounts of a node."""

    node: str
    used: dict[str, float]
    total: dict[str, float]
    is_usable: bool = True
    """Whether workers can run there; false for a head without CPUs."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of resources of a node: a placement group, an actor outside of groups, or tasks."""

    node: str
    who: str
    resources: dict[str, float]
    run: str = ""
    """Dovetail run that it belongs to; empty: another program."""
    job: str = ""
    """Command line of the driver."""
    gpus: tuple[str, ...] = ()
    """Ray's ids of the GPUs, where known."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request for resources that is not granted yet."""

    who: str
    resources: dict[str, float]
    count: int = 1
    why: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class ClusterUsage:
    """Usage of a Ray cluster at one moment."""

    nodes: tuple[NodeUsage, ...]
    holders: tuple[Holder, ...]
    waiting: tuple[PendingRequest, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "used": {use.node: {"used": use.used, "total": use.total} for use in self.nodes},
            "holders": [asdict(holder) for holder in self.holders],
            "pending": [asdict(demand) for demand in self.waiting],
        }

    def totals(self) -> tuple[dict[str, float], dict[str, float]]:
        """(used, total) of all usable nodes."""
        used: dict[str, float] = {}
        total: dict[str, float] = {}
        for use in filter(lambda use: use.is_usable, self.nodes):
            add_resources(used, use.used)
            add_resources(total, use.total)
        return used, total

    def others(self) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.holders if not holder.run)

    def lines(self) -> list[str]:
        """Text output: used of total, holders per node, pending requests."""
        used, total = self.totals()
        found = [
            "used:     "
            + ", ".join(_used_text(name, used.get(name, 0.0), have) for name, have in _sorted_resources(total))
        ]
        many = len(self.nodes) > 1
        busy = [use for use in self.nodes if many and any(amount >= MIN_AMOUNT for amount in use.used.values())]
        found += _truncate(
            [
                f"  {use.node}: "
                + ", ".join(_used_text(name, use.used[name], have) for name, have in _sorted_resources(use.total))
                for use in busy
            ]
        )
        found += ["holders:  " + ("" if self.holders else "none")]
        found += _truncate([f"  {line}" for line in self.holder_lines()])
        found += ["pending:  " + ("" if self.waiting else "none")]
        found += _truncate([f"  {_demand_text(demand)}" for demand in self.waiting])
        return [line.rstrip() for line in found]

    def holder_lines(self, only_others: bool = False) -> list[str]:
        """One line per holder: 'node-1: actor Trainer of job train.py holds 1 GPU (0)'."""
        return [_holder_text(holder) for holder in (self.others() if only_others else self.holders)]


def read_cluster_usage(seen: DiscoveredCluster) -> ClusterUsage:
    """Usage of the cluster that this process is attached to."""
    rows = [row for row in import_ray().nodes() if row["Alive"]]
    available = ray_private.available_resources_per_node() or {}
    names = {node: name for name, node in seen.ids.items()}
    names |= {row["NodeID"]: names.get(row["NodeID"], f"node-{row['NodeID'][:8]}") for row in rows}
    actors = list(_actors())
    left_out = {row["NodeID"] for row in rows}.difference(seen.ids.values())
    return build_usage(
        rows,
        available,
        current_placement_groups(),
        actors,
        _jobs(),
        ray_private.pending_requests() or [],
        names,
        left_out,
    )


def _actors() -> Iterator[dict[str, Any]]:
    """Plain rows of the actors that run or wait."""
    for state in (ALIVE, *WAITING_STATES):
        for data in ray_private.actor_rows(state) or ():
            cards = [
                str(one.index)
                for mapping in data.resource_mapping
                if mapping.name == "GPU"
                for one in mapping.resource_ids
                if one.quantity
            ]
            yield {
                "class": data.class_name,
                "name": data.name,
                "node": (data.node_id or data.address.node_id).hex(),
                "job": data.job_id.hex(),
                "pid": data.pid,
                "state": state,
                "resources": dict(data.required_resources),
                "group": data.placement_group_id.hex(),
                "gpus": cards,
            }


def _jobs() -> dict[str, str]:
    """Job id -> command line and process id of its driver."""
    rows = ray_private.job_rows() or []
    return {row["JobID"]: f"{row['Entrypoint'] or 'a program'} (pid {row['DriverPid']})" for row in rows}


# --- pure


def build_usage(
    rows: Sequence[Mapping[str, Any]],
    available: NodeResources,
    groups: Sequence[Mapping[str, Any]],
    actors: Sequence[Mapping[str, Any]],
    jobs: Mapping[str, str],
    asked: Sequence[tuple[dict[str, float], int]],
    names: Mapping[str, str],
    left_out: Collection[str] = (),
) -> ClusterUsage:
    """Usage from Ray's rows; used amounts without a known holder are attributed to tasks."""
    uses = [replace(_node_usage(row, available, names), is_usable=row["NodeID"] not in left_out) for row in rows]
    nodes = sorted(uses, key=lambda use: use.node)
    holders = [*_merge_runs(_group_holders(groups, jobs, names)), *_actor_holders(actors, jobs, names)]
    rest = [_task_holder(use, holders) for use in nodes]
    order = sorted([*holders, *(holder for holder in rest if holder is not None)], key=lambda one: (one.node, one.who))
    return ClusterUsage(tuple(nodes), tuple(order), tuple(_pending_demands(groups, actors, jobs, asked)))


def _node_usage(row: Mapping[str, Any], available: NodeResources, names: Mapping[str, str]) -> NodeUsage:
    total = _shown_resources(row["Resources"])
    free = available.get(row["NodeID"], row["Resources"])
    used = {name: _rounded(max(0.0, have - free.get(name, 0.0))) for name, have in total.items()}
    return NodeUsage(names[row["NodeID"]], used, total)


def _shown_resources(resources: Mapping[str, float]) -> dict[str, float]:
    kept = {name: resources[name] for name in ("CPU", "GPU", "memory", OBJECT_STORE) if resources.get(name)}
    return kept | custom_resources(resources)


def _group_holders(
    groups: Sequence[Mapping[str, Any]], jobs: Mapping[str, str], names: Mapping[str, str]
) -> Iterator[Holder]:
    for group in groups:
        if group["state"] not in HOLDING_STATES:
            continue
        places: dict[str, dict[str, float]] = {}
        for number, node in group["bundles_to_node_id"].items():
            if node:
                add_resources(places.setdefault(node, {}), group["bundles"][number])
        for node, resources in places.items():
            name = group["name"]
            who = f"placement group {name or group['placement_group_id'][:8]}"
            yield Holder(names.get(node, node[:8]), who, resources, _run_name(name), _job_of(group, jobs))


def _merge_runs(holders: Iterable[Holder]) -> Iterator[Holder]:
    """Merge the groups that a run has on a node into one holder."""
    runs: dict[tuple[str, str], Holder] = {}
    for holder in holders:
        if not holder.run:
            yield holder
        elif (holder.node, holder.run) in runs:
            add_resources(runs[holder.node, holder.run].resources, holder.resources)
        else:
            who = f"placement groups {GROUP_NAME_PREFIX}{holder.run}"
            runs[holder.node, holder.run] = replace(holder, who=who, resources=dict(holder.resources))
    yield from runs.values()


def _run_name(name: str) -> str:
    """RUN for the group names 'dovetail:RUN' and 'dovetail:RUN:...'."""
    return name.removeprefix(GROUP_NAME_PREFIX).partition(":")[0] if is_dovetail_group(name) else ""


def _job_of(group: Mapping[str, Any], jobs: Mapping[str, str]) -> str:
    """The id of a placement group ends with the id of its job."""
    return jobs.get(str(group["placement_group_id"])[-8:], "")


def _actor_holders(
    actors: Sequence[Mapping[str, Any]], jobs: Mapping[str, str], names: Mapping[str, str]
) -> Iterator[Holder]:
    """Actors inside a group are left out: their group holds the resources."""
    for actor in actors:
        if actor["state"] == ALIVE and not actor["group"].strip("f") and any(actor["resources"].values()):
            who = f"actor {_actor_text(actor)}"
            node = names.get(actor["node"], actor["node"][:8])
            yield Holder(node, who, dict(actor["resources"]), "", jobs.get(actor["job"], ""), tuple(actor["gpus"]))


def _actor_text(actor: Mapping[str, Any]) -> str:
    return f"{actor['class']} {actor['name']!r}" if actor["name"] else f"{actor['class']} (pid {actor['pid']})"


def _task_holder(use: NodeUsage, holders: Sequence[Holder]) -> Holder | None:
    left = {name: amount for name, amount in use.used.items() if name != OBJECT_STORE}
    for holder in holders:
        if holder.node == use.node:
            for name, amount in holder.resources.items():
                left[name] = left.get(name, 0.0) - amount
    left = {name: _rounded(amount) for name, amount in left.items() if amount >= MIN_AMOUNT}
    return Holder(use.node, TASKS_HOLDER, left) if left else None


def _pending_demands(
    groups: Sequence[Mapping[str, Any]],
    actors: Sequence[Mapping[str, Any]],
    jobs: Mapping[str, str],
    asked: Sequence[tuple[dict[str, float], int]],
) -> Iterator[PendingRequest]:
    """Pending placement groups and actors; the rest of Ray's list of requests are tasks."""
    for group in groups:
        if group["state"] == "PENDING":
            total: dict[str, float] = {}
            for bundle in group["bundles"].values():
                add_resources(total, bundle)
            why = PENDING_REASONS.get(group.get("stats", {}).get("scheduling_state", ""), "")
            who = f"placement group {group['name'] or group['placement_group_id'][:8]}"
            yield PendingRequest(
                _with_job(who, _job_of(group, jobs)), total, len(group["bundles"]), why, _run_name(group["name"])
            )
    waiting = [actor for actor in actors if actor["state"] in WAITING_STATES and any(actor["resources"].values())]
    counted: Counter[tuple[tuple[str, float], ...]] = Counter()
    for actor in waiting:
        counted[tuple(sorted(actor["resources"].items()))] += 1
        called = f"actor {actor['class']}" + (f" {actor['name']!r}" if actor["name"] else "")
        yield PendingRequest(_with_job(called, jobs.get(actor["job"], "")), dict(actor["resources"]))
    for resources, count in asked:
        tasks = count - counted[tuple(sorted(resources.items()))]
        if tasks > 0:
            yield PendingRequest("a task" if tasks == 1 else f"{tasks} tasks", resources, tasks)


def _with_job(who: str, job: str) -> str:
    return f"{who} of {job}" if job else who


# --- text


def _used_text(name: str, used: float, total: float) -> str:
    """'3 of 8 CPUs', '2GB of 16GB memory'."""
    if name in BYTE_RESOURCES:
        what = "memory" if name == "memory" else "object store"
        return f"{format_size(int(used)) if used else '0'} of {format_size(int(total))} {what}"
    return f"{used:g} of {total:g} {_plural(name)}"


def _sorted_resources(resources: Mapping[str, float]) -> list[tuple[str, float]]:
    """CPUs and GPUs first."""
    return sorted(resources.items(), key=lambda pair: (pair[0] not in FIRST_RESOURCES, pair[0]))


def _plural(name: str) -> str:
    return f"{name}s" if name in ("CPU", "GPU") else name


def resources_text(resources: Mapping[str, float]) -> str:
    """'2 CPUs, 1 GPU, 4GB memory'."""
    parts = []
    for name, amount in _sorted_resources(resources):
        if name in BYTE_RESOURCES:
            parts.append(f"{format_size(int(amount))} {'memory' if name == 'memory' else 'object store'}")
        elif not name.startswith("bundle_group"):
            parts.append(f"{amount:g} {name if amount == 1 else _plural(name)}")
    return ", ".join(parts) or "nothing"


def _holder_text(holder: Holder) -> str:
    who = f"Dovetail run {holder.run}" if holder.run else _with_job(holder.who, holder.job)
    cards = f" (GPU {', '.join(holder.gpus)})" if holder.gpus else ""
    holds = "hold" if holder.who == TASKS_HOLDER else "holds"
    return f"{holder.node}: {who} {holds} {resources_text(holder.resources)}{cards}"


def _demand_text(demand: PendingRequest) -> str:
    who = f"Dovetail run {demand.run}" if demand.run else demand.who
    many = who.endswith(" tasks")
    wants = f"want {resources_text(demand.resources)} each" if many else f"wants {resources_text(demand.resources)}"
    return f"{who} {wants}" + (f": {demand.why}" if demand.why else "")


def _truncate(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], *([f"  ... and {more} more"] if more > 0 else [])]


def _rounded(amount: float) -> float:
    return round(amount, 4)
