"""The plan of an actor system: how many instances of each role, on which nodes, and what is left. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.actors.placement import BundlePlacer, bundle_amounts, bundle_shapes, pool_quota
from dovetail.errors import InfeasibleError, Problem, Subject
from dovetail.resources.sizes import format_milli, format_size
from dovetail.scheduling.diagnose.feasibility import WorkerRequest, find_fit_problems
from dovetail.scheduling.packing import placement_difficulty
from dovetail.text_format import align_table, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.actors.colocation import Bundle, ProcessTemplate
    from dovetail.actors.placement import PlacedBundle
    from dovetail.actors.role import Pool, Role
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.ledger import Ledger
    from dovetail.resources.seat import Seats

DOES_NOT_FIT = "DT505"
MAX_NODES_SHOWN = 4


@dataclass(frozen=True)
class PlannedProcess:
    """One process or gang of the system: its seats and the instances that it hosts."""

    template: ProcessTemplate
    seats: Seats
    instances: tuple[tuple[str, int], ...]
    """(role, index of the instance)."""


@dataclass(frozen=True)
class ActorPlan:
    """Placement of every instance of an actor system, computed before anything starts."""

    name: str
    cluster: Cluster
    roles: tuple[Role, ...]
    processes: tuple[PlannedProcess, ...]
    room: Mapping[str, int]
    """Role -> instances that fit in addition, up to its maximum; only roles that may grow."""
    free_cpu_milli: int
    free_memory_bytes: int
    idle_gpus: int
    gpus: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Notes on what colocation costs and saves."""

    @property
    def workers(self) -> dict[str, int]:
        """Role -> number of instances."""
        counts = Counter(role for process in self.processes for role, _ in process.instances)
        return {role.name: counts[role.name] for role in self.roles}

    def nodes_of(self, role: str) -> dict[str, int]:
        """Node -> instances of the role that have at least one rank there, in the order of the cluster."""
        found: Counter[str] = Counter()
        for process in self.processes:
            count = sum(name == role for name, _ in process.instances)
            if count:
                found.update(dict.fromkeys(dict.fromkeys(seat.node for seat in process.seats), count))
        return {node.name: found[node.name] for node in self.cluster.nodes if node.name in found}

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "workers": self.workers,
            "processes": [
                {
                    "name": process.template.name,
                    "instances": [list(instance) for instance in process.instances],
                    "seats": [seat.to_dict() for seat in process.seats],
                }
                for process in self.processes
            ],
            "room": dict(self.room),
            "free": {"cpu_milli": self.free_cpu_milli, "memory_bytes": self.free_memory_bytes},
            "idle_gpus": self.idle_gpus,
            "gpus": self.gpus,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "cluster": self.cluster.to_dict(),
        }

    def __str__(self) -> str:
        return "\n".join(_plan_lines(self))


def plan_bundles(
    name: str,
    roles: Sequence[Role],
    bundles: Sequence[Bundle],
    pools: Mapping[str, Pool],
    ledger: Ledger,
    notes: Sequence[str] = (),
) -> ActorPlan:
    """Place the minimum of every bundle, then as many as fit beyond it.

    Raises InfeasibleError with the roles that do not fit. The ledger contains the seats of the plan afterwards.
    """
    before = ledger.copy()
    placer = BundlePlacer(ledger, bundles, pools)
    placed = _place_minimum(placer, bundles, before, pools)
    _place_more(placer, bundles, placed)
    room = _find_room(placer, bundles, placed)
    in_order = [one for bundle in bundles for one in placed[bundle.name]]
    free = ledger.free
    cards = [card for state in free for card in range(len(state.cards.free))]
    idle = sum(state.cards.is_whole(card) for state in free for card in range(len(state.cards.free)))
    return ActorPlan(
        name=name,
        cluster=ledger.cluster,
        roles=tuple(roles),
        processes=tuple(_number_instances(in_order)),
        room=room,
        free_cpu_milli=sum(state.cpu_milli for state in free),
        free_memory_bytes=sum(state.memory_bytes for state in free),
        idle_gpus=idle,
        gpus=len(cards),
        warnings=tuple(_warnings(in_order, ledger, idle, len(cards))),
        notes=tuple(notes),
    )


def _place_minimum(
    placer: BundlePlacer, bundles: Sequence[Bundle], before: Ledger, pools: Mapping[str, Pool]
) -> dict[str, list[PlacedBundle]]:
    placed: dict[str, list[PlacedBundle]] = {bundle.name: [] for bundle in bundles}
    missing: dict[str, int] = {}
    for bundle in _in_placement_order(bundles):
        for number in range(bundle.low):
            found = placer.place(bundle)
            if found is None:
                missing[bundle.name] = bundle.low - number
                break
            placed[bundle.name].append(found)
    if missing:
        raise InfeasibleError(list(_misfit_problems(bundles, missing, before, pools, placer)))
    return placed


def _in_placement_order(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Bundles in the order of placement: the most difficult ones first, bundles with `near` after the roles that they
    name."""

    def difficulty(bundle: Bundle) -> tuple[object, ...]:
        hardest = max(placement_difficulty(shape) for shape in bundle_shapes(bundle))
        return (bool(bundle.near), tuple(-part for part in hardest), -len(bundle_shapes(bundle)))

    return sorted(bundles, key=difficulty)


def _place_more(placer: BundlePlacer, bundles: Sequence[Bundle], placed: dict[str, list[PlacedBundle]]) -> None:
    """Add one of each bundle that may grow, in turn, until nothing fits."""
    growing = [bundle for bundle in bundles if bundle.grows_by_plan]
    while growing:
        growing = [bundle for bundle in growing if len(placed[bundle.name]) < bundle.high]
        more = {bundle.name: placer.place(bundle) for bundle in growing}
        for name, one in more.items():
            if one is not None:
                placed[name].append(one)
        growing = [bundle for bundle in growing if more[bundle.name] is not None]


def _find_room(
    placer: BundlePlacer, bundles: Sequence[Bundle], placed: Mapping[str, list[PlacedBundle]]
) -> dict[str, int]:
    """Instances that could be added to each scaled role alone."""
    room: dict[str, int] = {}
    for bundle in bundles:
        if bundle.grows_by_plan or bundle.high == bundle.low:
            continue
        trial = placer.copy()
        count = 0
        while len(placed[bundle.name]) + count < bundle.high and trial.place(bundle) is not None:
            count += 1
        for template, processes in bundle.processes:
            for role, instances in template.instances:
                room[role] = count * processes * instances
    return room


def _number_instances(placed: Sequence[PlacedBundle]) -> Iterator[PlannedProcess]:
    """The processes in order, with the index of each instance in its role."""
    next_index: Counter[str] = Counter()
    for one in placed:
        templates = [template for template, count in one.bundle.processes for _ in range(count)]
        for template, seats in zip(templates, one.seats, strict=True):
            instances = []
            for role, count in template.instances:
                instances += [(role, next_index[role] + number) for number in range(count)]
                next_index[role] += count
            yield PlannedProcess(template, seats, tuple(instances))


# --- problems and warnings


def _misfit_problems(
    bundles: Sequence[Bundle],
    missing: Mapping[str, int],
    before: Ledger,
    pools: Mapping[str, Pool],
    placer: BundlePlacer,
) -> Iterator[Problem]:
    requests = [
        WorkerRequest(_label(template), template.shape, bundle.low * count, Subject("role", template.name))
        for bundle in bundles
        for template, count in bundle.processes
    ]
    found = find_fit_problems(requests, before)
    yield from found
    if found:
        return
    for bundle in bundles:
        if bundle.name not in missing:
            continue
        quota = pool_quota(pool) if (pool := pools.get(bundle.pool or "")) is not None else None
        needs = ", ".join(shape.describe() for shape in dict.fromkeys(bundle_shapes(bundle)))
        evidence = [f"each needs {needs}", f"free: {_free_text(before)}"]
        reason = _placement_rule(bundle)
        if quota is not None and any(limit is not None for limit in quota):
            used = _amount_text(placer.used[bundle.pool or ""])
            evidence.append(f"pool {bundle.pool!r} allows {_quota_text(quota)}; {used} is taken")
            reason = reason or "the quota of its pool"
        count = f"{missing[bundle.name]} of {bundle.low}"
        message = f"{bundle.name!r}: {count} do not fit because of {reason or 'the other roles'}"
        yield Problem(
            DOES_NOT_FIT,
            message,
            tuple(evidence),
            ("request fewer workers, or relax this rule",),
            "",
            Subject("role", bundle.name),
        )


def _label(template: ProcessTemplate) -> str:
    return f"{'role' if len(template.instances) == 1 else 'group'} {template.name!r}"


def _placement_rule(bundle: Bundle) -> str:
    rules = []
    if bundle.spread == "strict":
        rules.append('spread="strict"')
    if bundle.pack == "strict":
        rules.append('pack="strict"')
    rules += [f"near={name}" for name in bundle.near] + [f"apart={name}" for name in bundle.apart]
    if len(bundle_shapes(bundle)) > 1 and not rules:
        rules.append("together on one node")
    return ", ".join(rules)


def _free_text(ledger: Ledger) -> str:
    cards = sum(state.cards.is_whole(card) for state in ledger.free for card in range(len(state.cards.free)))
    cpus = format_milli(sum(state.cpu_milli for state in ledger.free))
    largest = max(ledger.free, key=lambda state: state.cpu_milli)
    return (
        f"{cpus} CPUs, {format_count(cards, 'whole GPU')}; at most {format_milli(largest.cpu_milli)} CPUs on one node"
    )


def _quota_text(quota: Sequence[int | None]) -> str:
    cpus, gpus, memory = quota
    parts = [] if cpus is None else [f"{format_milli(cpus)} CPUs"]
    parts += [] if gpus is None else [f"{format_milli(gpus)} GPUs"]
    parts += [] if memory is None else [f"{format_size(memory)} memory"]
    return ", ".join(parts)


def _amount_text(used: Sequence[int]) -> str:
    return _quota_text([amount or None for amount in used]) or "nothing"


def _warnings(placed: Sequence[PlacedBundle], ledger: Ledger, idle: int, cards: int) -> Iterator[str]:
    uses_gpus = any(bundle_amounts(one.bundle)[1] for one in placed)
    if idle and uses_gpus:
        yield f"{idle} of {format_count(cards, 'GPU')} stay idle"
    elif idle:
        yield f"no role requests a GPU: {idle} of {format_count(cards, 'GPU')} stay idle"
    yield from _gpu_node_warnings(placed, ledger)


def _gpu_node_warnings(placed: Sequence[PlacedBundle], ledger: Ledger) -> Iterator[str]:
    """Warnings about roles without GPUs that take CPUs of GPU nodes, in a cluster that has other nodes."""
    nodes = ledger.cluster.nodes
    with_gpus = {node.name for node in nodes if node.gpus}
    if len(with_gpus) == len(nodes):
        return
    bundles = {one.bundle.name: one.bundle for one in placed}
    on_gpu_nodes = Counter(
        one.bundle.name for one in placed if not bundle_amounts(one.bundle)[1] and with_gpus.intersection(one.nodes)
    )
    for name, count in on_gpu_nodes.items():
        bundle = bundles[name]
        total = sum(one.bundle.name == name for one in placed)
        reason = f" (pool {bundle.pool!r})" if bundle.pool is not None else ""
        cpus = format_milli(bundle_amounts(bundle)[0] * count)
        yield f"{count} of {total} {name!r} run on GPU nodes without a GPU and take {cpus} CPUs there{reason}"


# --- text


def nodes_text(plan: ActorPlan, role: str) -> str:
    """Nodes of a role and the instances on each; neighbours with the same number in one entry: node-0 to node-7 x4."""
    position = {node.name: number for number, node in enumerate(plan.cluster.nodes)}
    runs: list[tuple[list[str], int]] = []
    for name, count in plan.nodes_of(role).items():
        follows = bool(runs) and runs[-1][1] == count and position[runs[-1][0][-1]] + 1 == position[name]
        if follows:
            runs[-1][0].append(name)
        else:
            runs.append(([name], count))
    shown = [_run_text(names, count) for names, count in runs[:MAX_NODES_SHOWN]]
    more = sum(len(names) for names, _ in runs[MAX_NODES_SHOWN:])
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


def _run_text(names: Sequence[str], count: int) -> str:
    nodes = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return nodes if count == 1 else f"{nodes} x{count}"


def _plan_lines(plan: ActorPlan) -> Iterator[str]:
    total = sum(plan.workers.values())
    processes = len(plan.processes)
    yield f"{plan.name} on {plan.cluster.spec(exact=False)}"
    yield f"  {format_count(total, 'instance')} in {format_count(processes, 'process', 'processes')}"
    yield ""
    rows = [["role", "one instance", "nodes", "workers", "slots"]]
    for role in plan.roles:
        together = role.colocation
        where = f" in {together.group}" if together is not None else ""
        nodes = nodes_text(plan, role.name)
        rows.append(
            [role.name, f"{role.shape.describe()}{where}", nodes, str(plan.workers[role.name]), str(role.slots)]
        )
    yield from (f"  {line}" for line in align_table(rows, left=3))
    yield ""
    gpus = f", {plan.idle_gpus} of {format_count(plan.gpus, 'GPU')}" if plan.gpus else ""
    memory = f", {format_size(plan.free_memory_bytes)} memory" if plan.free_memory_bytes else ""
    yield f"left: {format_milli(plan.free_cpu_milli)} CPUs{memory}{gpus}"
    for name, count in plan.room.items():
        yield f"  {name} can grow by {count}"
    yield from (f"note: {line}" for line in plan.notes)
    yield from (f"warning: {line}" for line in plan.warnings)
