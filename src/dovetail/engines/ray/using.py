"""Who sits where on a Ray cluster, Dovetail's or not, and who waits? Read without Ray's dashboard."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.discovery import HOLDING, OURS, STORE, add, custom_of, groups_now, is_ours
from dovetail.engines.ray.library import import_ray, module
from dovetail.resources.sizes import about_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from dovetail.engines.ray.discovery import Held, Seen

TASKS = "tasks, or what has ended just now,"
SHOWN = 20
"""Lines of one kind that are printed; all are in the data."""
LEAST = 1e-4
"""Ray counts in ten-thousandths."""
BYTES = ("memory", STORE)
FIRST = ("CPU", "GPU")
ALIVE, WAITING = "ALIVE", ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")
NOW = {"NO_RESOURCES": "does not fit now", "INFEASIBLE": "fits on no node", "QUEUED": "not placed yet"}


@dataclass(frozen=True, slots=True)
class NodeUse:
    """How much of a node is used, by whomever."""

    node: str
    used: dict[str, float]
    total: dict[str, float]
    counts: bool = True
    """Whether workers may be there; a head without CPUs is left out."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who holds something of a node: a placement group, an actor outside of groups, or tasks."""

    node: str
    who: str
    resources: dict[str, float]
    run: str = ""
    """The run of Dovetail that it belongs to; empty: not Dovetail's."""
    job: str = ""
    """What the driver was started with."""
    gpus: tuple[str, ...] = ()
    """Ray's numbers of the cards, where they are known."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Something that was asked for, and is not there yet."""

    who: str
    resources: dict[str, float]
    count: int = 1
    why: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class Using:
    """A Ray cluster's users at one moment."""

    nodes: tuple[NodeUse, ...]
    holders: tuple[Holder, ...]
    waiting: tuple[Demand, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "used": {use.node: {"used": use.used, "total": use.total} for use in self.nodes},
            "holders": [asdict(holder) for holder in self.holders],
            "pending": [asdict(demand) for demand in self.waiting],
        }

    def totals(self) -> tuple[dict[str, float], dict[str, float]]:
        """(used, total) of all nodes that count."""
        used: dict[str, float] = {}
        total: dict[str, float] = {}
        for use in filter(lambda use: use.counts, self.nodes):
            add(used, use.used)
            add(total, use.total)
        return used, total

    def others(self) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.holders if not holder.run)

    def lines(self) -> list[str]:
        """For people: used of total, who sits where, who waits."""
        used, total = self.totals()
        found = ["used:     " + ", ".join(_of(name, used.get(name, 0.0), have) for name, have in _in_order(total))]
        many = len(self.nodes) > 1
        busy = [use for use in self.nodes if many and any(amount >= LEAST for amount in use.used.values())]
        found += _first(
            [
                f"  {use.node}: " + ", ".join(_of(name, use.used[name], have) for name, have in _in_order(use.total))
                for use in busy
            ]
        )
        found += ["sits:     " + ("" if self.holders else "nobody")]
        found += _first([f"  {line}" for line in self.holder_lines()])
        found += ["pending:  " + ("" if self.waiting else "nothing")]
        found += _first([f"  {_demand(demand)}" for demand in self.waiting])
        return [line.rstrip() for line in found]

    def holder_lines(self, only_others: bool = False) -> list[str]:
        """'node-1: actor Trainer of job train.py holds 1 GPU (0)', one each."""
        return [_holds(holder) for holder in (self.others() if only_others else self.holders)]


def look(seen: Seen) -> Using:
    """Now, of the cluster that this process is attached to."""
    state = module("ray._private.state")
    rows = [row for row in import_ray().nodes() if row["Alive"]]
    available: Held = state.available_resources_per_node()
    names = {node: name for name, node in seen.ids.items()}
    names |= {row["NodeID"]: names.get(row["NodeID"], f"node-{row['NodeID'][:8]}") for row in rows}
    actors = list(_actors(state))
    left_out = {row["NodeID"] for row in rows}.difference(seen.ids.values())
    return using_of(rows, available, groups_now(), actors, _jobs(state), _asked(), names, left_out)


def _actors(state: Any) -> Iterator[dict[str, Any]]:
    """Plain rows of the actors that are there or wanted."""
    parse = module("ray.core.generated.gcs_pb2").ActorTableData.FromString
    accessor = state.state._connect_and_get_accessor()  # noqa: SLF001 - the public calls leave the resources out
    for number in (ALIVE, *WAITING):
        for data in map(parse, accessor.get_actor_table(None, number)):
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
                "state": number,
                "resources": dict(data.required_resources),
                "group": data.placement_group_id.hex(),
                "gpus": cards,
            }


def _jobs(state: Any) -> dict[str, str]:
    """Job id -> what its driver was started with, and its process."""
    return {row["JobID"]: f"{row['Entrypoint'] or 'a program'} (pid {row['DriverPid']})" for row in state.jobs()}


def _asked() -> list[tuple[dict[str, float], int]]:
    """What tasks and actors ask for and nobody has, from the table that Ray keeps for its autoscaler."""
    client = module("ray._private.worker").global_worker.gcs_client
    reply = module("ray.core.generated.autoscaler_pb2").GetClusterResourceStateReply
    state = reply.FromString(client.get_cluster_resource_state()).cluster_resource_state
    return [(dict(one.request.resources_bundle), one.count) for one in state.pending_resource_requests]


# --- pure


def using_of(
    rows: Sequence[Mapping[str, Any]],
    available: Held,
    groups: Sequence[Mapping[str, Any]],
    actors: Sequence[Mapping[str, Any]],
    jobs: Mapping[str, str],
    asked: Sequence[tuple[dict[str, float], int]],
    names: Mapping[str, str],
    left_out: Collection[str] = (),
) -> Using:
    """From Ray's rows; what nobody is known to hold is held by tasks."""
    uses = [replace(_use(row, available, names), counts=row["NodeID"] not in left_out) for row in rows]
    nodes = sorted(uses, key=lambda use: use.node)
    holders = [*_together(_groups(groups, jobs, names)), *_sitting(actors, jobs, names)]
    rest = [_rest(use, holders) for use in nodes]
    order = sorted([*holders, *(holder for holder in rest if holder is not None)], key=lambda one: (one.node, one.who))
    return Using(tuple(nodes), tuple(order), tuple(_waiting(groups, actors, jobs, asked)))


def _use(row: Mapping[str, Any], available: Held, names: Mapping[str, str]) -> NodeUse:
    total = _shown(row["Resources"])
    free = available.get(row["NodeID"], row["Resources"])
    used = {name: _plain(max(0.0, have - free.get(name, 0.0))) for name, have in total.items()}
    return NodeUse(names[row["NodeID"]], used, total)


def _shown(resources: Mapping[str, float]) -> dict[str, float]:
    kept = {name: resources[name] for name in ("CPU", "GPU", "memory", STORE) if resources.get(name)}
    return kept | custom_of(resources)


def _groups(groups: Sequence[Mapping[str, Any]], jobs: Mapping[str, str], names: Mapping[str, str]) -> Iterator[Holder]:
    for group in groups:
        if group["state"] not in HOLDING:
            continue
        places: dict[str, dict[str, float]] = {}
        for number, node in group["bundles_to_node_id"].items():
            if node:
                add(places.setdefault(node, {}), group["bundles"][number])
        for node, resources in places.items():
            name = group["name"]
            who = f"placement group {name or group['placement_group_id'][:8]}"
            yield Holder(names.get(node, node[:8]), who, resources, _run(name), _job_of(group, jobs))


def _together(holders: Iterable[Holder]) -> Iterator[Holder]:
    """A run has several groups on a node; who looks wants to know what it holds there."""
    runs: dict[tuple[str, str], Holder] = {}
    for holder in holders:
        if not holder.run:
            yield holder
        elif (holder.node, holder.run) in runs:
            add(runs[holder.node, holder.run].resources, holder.resources)
        else:
            who = f"placement groups {OURS}{holder.run}"
            runs[holder.node, holder.run] = replace(holder, who=who, resources=dict(holder.resources))
    yield from runs.values()


def _run(name: str) -> str:
    """'dovetail:RUN' and 'dovetail:RUN:more' are RUN's."""
    return name.removeprefix(OURS).partition(":")[0] if is_ours(name) else ""


def _job_of(group: Mapping[str, Any], jobs: Mapping[str, str]) -> str:
    """The id of a placement group ends with that of its job."""
    return jobs.get(str(group["placement_group_id"])[-8:], "")


def _sitting(
    actors: Sequence[Mapping[str, Any]], jobs: Mapping[str, str], names: Mapping[str, str]
) -> Iterator[Holder]:
    """Actors of a group sit on what their group holds."""
    for actor in actors:
        if actor["state"] == ALIVE and not actor["group"].strip("f") and any(actor["resources"].values()):
            who = f"actor {_called(actor)}"
            node = names.get(actor["node"], actor["node"][:8])
            yield Holder(node, who, dict(actor["resources"]), "", jobs.get(actor["job"], ""), tuple(actor["gpus"]))


def _called(actor: Mapping[str, Any]) -> str:
    return f"{actor['class']} {actor['name']!r}" if actor["name"] else f"{actor['class']} (pid {actor['pid']})"


def _rest(use: NodeUse, holders: Sequence[Holder]) -> Holder | None:
    left = {name: amount for name, amount in use.used.items() if name != STORE}
    for holder in holders:
        if holder.node == use.node:
            for name, amount in holder.resources.items():
                left[name] = left.get(name, 0.0) - amount
    left = {name: _plain(amount) for name, amount in left.items() if amount >= LEAST}
    return Holder(use.node, TASKS, left) if left else None


def _waiting(
    groups: Sequence[Mapping[str, Any]],
    actors: Sequence[Mapping[str, Any]],
    jobs: Mapping[str, str],
    asked: Sequence[tuple[dict[str, float], int]],
) -> Iterator[Demand]:
    """Placement groups, actors, and what is left of Ray's list without those: tasks."""
    for group in groups:
        if group["state"] == "PENDING":
            total: dict[str, float] = {}
            for bundle in group["bundles"].values():
                add(total, bundle)
            why = NOW.get(group.get("stats", {}).get("scheduling_state", ""), "")
            who = f"placement group {group['name'] or group['placement_group_id'][:8]}"
            yield Demand(_with_job(who, _job_of(group, jobs)), total, len(group["bundles"]), why, _run(group["name"]))
    waiting = [actor for actor in actors if actor["state"] in WAITING and any(actor["resources"].values())]
    counted: Counter[tuple[tuple[str, float], ...]] = Counter()
    for actor in waiting:
        counted[tuple(sorted(actor["resources"].items()))] += 1
        called = f"actor {actor['class']}" + (f" {actor['name']!r}" if actor["name"] else "")
        yield Demand(_with_job(called, jobs.get(actor["job"], "")), dict(actor["resources"]))
    for resources, count in asked:
        tasks = count - counted[tuple(sorted(resources.items()))]
        if tasks > 0:
            yield Demand("a task" if tasks == 1 else f"{tasks} tasks", resources, tasks)


def _with_job(who: str, job: str) -> str:
    return f"{who} of {job}" if job else who


# --- words


def _of(name: str, used: float, total: float) -> str:
    """'3 of 8 CPUs', '2GB of 16GB memory'."""
    if name in BYTES:
        what = "memory" if name == "memory" else "object store"
        return f"{about_size(int(used)) if used else '0'} of {about_size(int(total))} {what}"
    return f"{used:g} of {total:g} {_plural(name)}"


def _in_order(resources: Mapping[str, float]) -> list[tuple[str, float]]:
    """CPUs and GPUs first, whatever the first node has."""
    return sorted(resources.items(), key=lambda pair: (pair[0] not in FIRST, pair[0]))


def _plural(name: str) -> str:
    return f"{name}s" if name in ("CPU", "GPU") else name


def amounts_in_words(resources: Mapping[str, float]) -> str:
    """'2 CPUs, 1 GPU, 4GB memory'."""
    parts = []
    for name, amount in _in_order(resources):
        if name in BYTES:
            parts.append(f"{about_size(int(amount))} {'memory' if name == 'memory' else 'object store'}")
        elif not name.startswith("bundle_group"):
            parts.append(f"{amount:g} {name if amount == 1 else _plural(name)}")
    return ", ".join(parts) or "nothing"


def _holds(holder: Holder) -> str:
    who = f"Dovetail run {holder.run}" if holder.run else _with_job(holder.who, holder.job)
    cards = f" (GPU {', '.join(holder.gpus)})" if holder.gpus else ""
    holds = "hold" if holder.who == TASKS else "holds"
    return f"{holder.node}: {who} {holds} {amounts_in_words(holder.resources)}{cards}"


def _demand(demand: Demand) -> str:
    who = f"Dovetail run {demand.run}" if demand.run else demand.who
    many = who.endswith(" tasks")
    wants = f"want {amounts_in_words(demand.resources)} each" if many else f"wants {amounts_in_words(demand.resources)}"
    return f"{who} {wants}" + (f": {demand.why}" if demand.why else "")


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"  ... and {more} more"] if more > 0 else [])]


def _plain(amount: float) -> float:
    return round(amount, 4)
