"""Planner: from a pipeline and a cluster to a plan with mode, worker counts, seats and predicted rate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, PipelineError, Problem, did_you_mean
from dovetail.pipeline.source_sink import MODES
from dovetail.pipeline.units import fuse_stages, multiplicity, rate_of_unit
from dovetail.resources.amounts import total_free
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.scheduling.fragmentation import Fragmentation, Workload
from dovetail.scheduling.modes import ModeChoice, choose_mode, size_same_waves
from dovetail.scheduling.packing import NodeFiller, group_nodes, seats_by_unit
from dovetail.scheduling.plan import Plan, PlannedUse, UnitPlan
from dovetail.scheduling.predicted_rate import predict_rate
from dovetail.scheduling.sizing import Sizing, add_headroom, resource_limits
from dovetail.scheduling.stage_rates import ASSUMED, GIVEN, MEASURED, StageRates, stage_rates
from dovetail.text_format import format_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.seat import Seat
    from dovetail.scheduling.packing import NodeGroups
    from dovetail.scheduling.stage_rates import Profile

DEFAULT_HEADROOM = 1.5
IDLE_GPU_WARNING_SHARE = 0.5
MAX_ITEMS_PER_SOURCE_ITEM = 1e15


def plan(
    pipeline: Pipeline,
    cluster: Cluster | str = "auto",
    mode: str = "auto",
    *,
    headroom: float = DEFAULT_HEADROOM,
    profiles: Mapping[str, Profile] | None = None,
) -> Plan:
    """Plan a pipeline without starting anything. Raises InfeasibleError, with tried fixes, if it does not fit."""
    problems = _argument_problems(mode, headroom)
    if problems:
        raise ConfigError(problems)
    described = Cluster.of(cluster)
    rates = stage_rates(pipeline, profiles)
    units = _unit_plans(pipeline, rates)
    chosen = choose_mode(units, Ledger(described), mode)
    made = _assemble_plan(pipeline.name, described, rates, chosen, mode, headroom)
    return replace(made, warnings=(*made.warnings, *_ignored_count_warnings(pipeline)))


def plan_on_cluster(before: Plan, cluster: Cluster) -> Plan:
    """Plan the same units in the same waves on another cluster. Raises InfeasibleError if they do not fit."""
    chosen = size_same_waves(before.units, Ledger(cluster), before.mode, before.reason)
    rates = StageRates({}, {}, {}, source_rate=before.source_rate)
    found = _assemble_plan(before.name, cluster, rates, chosen, before.requested, before.headroom)
    return replace(found, assumptions=before.assumptions)


def _argument_problems(mode: str, headroom: float) -> list[Problem]:
    problems = []
    if mode not in MODES:
        hint = did_you_mean(str(mode), MODES)
        problems.append(Problem("DT036", f"unknown mode {mode!r}{hint}", fixes=(f"one of: {', '.join(MODES)}",)))
    number: object = headroom
    if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number <= 100:
        message = f"headroom={headroom!r} is not a number from 1 to 100"
        problems.append(Problem("DT036", message, fixes=("headroom=1.5",)))
    return problems


def _unit_plans(pipeline: Pipeline, rates: StageRates) -> list[UnitPlan]:
    per_source = multiplicity(pipeline, rates.returns)
    absurd = [name for name, items in per_source.items() if not items <= MAX_ITEMS_PER_SOURCE_ITEM]
    if absurd:
        message = f"stage {absurd[0]!r}: {per_source[absurd[0]]:g} items would reach it per source item"
        raise PipelineError(Problem("DT034", message, fixes=("returns=1 for stages before it, or what is true",)))
    units = []
    for unit in fuse_stages(pipeline):
        sources = {rates.source[name] for name in unit.stages}
        low, high = 1, None
        if isinstance(unit.workers, tuple):
            low, high = unit.workers
        elif isinstance(unit.workers, int):
            low = high = unit.workers
        if unit.barrier:
            low = high = 1  # it is called once, with its whole input
        units.append(
            UnitPlan(
                name=unit.name,
                stages=unit.stages,
                shape=unit.shape,
                workers=0,
                rate=rate_of_unit(unit.stages, rates.rate, rates.returns),
                rate_source=ASSUMED if ASSUMED in sources else MEASURED if MEASURED in sources else GIVEN,
                per_source=per_source[unit.stages[0]],
                low=low,
                high=high,
                per_node=None if unit.barrier else unit.workers_per_node,
                barrier=unit.barrier,
                cpu_s=rates.unit_cpu_s(unit.stages),
            )
        )
    return units


def _ignored_count_warnings(pipeline: Pipeline) -> list[str]:
    return [
        f"stage {stage.name!r} has one worker because it is a barrier: its worker count is ignored"
        for stage in pipeline.order
        if stage.barrier and (stage.workers not in ("auto", 1) or stage.workers_per_node is not None)
    ]


def _assemble_plan(
    name: str, cluster: Cluster, rates: StageRates, chosen: ModeChoice, requested: str, headroom: float
) -> Plan:
    ledger = Ledger(cluster)
    units: list[UnitPlan] = []
    seats: dict[str, tuple[Seat, ...]] = {}
    phases: list[str] = []
    finals: list[Sizing] = []
    for wave, (members, sizing) in enumerate(chosen.waves):
        fillers = [NodeFiller(unit.shape) for unit in members]
        final = add_headroom(members, fillers, sizing, headroom)
        finals.append(final)
        prefix = f"wave {wave + 1}: " if len(chosen.waves) > 1 else ""
        phases += [prefix + line for line in _phase_lines(members, sizing, final, headroom)]
        for unit, count, workers in zip(
            members, final.counts, seats_by_unit(final.packing, ledger, fillers), strict=True
        ):
            units.append(replace(unit, workers=count, wave=wave))
            for stage in unit.stages:
                seats[stage] = tuple(seat for worker in workers for seat in worker)
    start = group_nodes(ledger)
    limits = [resource_limits(members, start)[0] for members, _ in chosen.waves]
    slowest = min(range(len(limits)), key=lambda wave: limits[wave].rate)
    bound = limits[0].rate if len(limits) == 1 else 1 / sum(1 / limit.rate for limit in limits)
    is_known = all(unit.has_known_rate for unit in units)
    waves = [[unit for unit in units if unit.wave == wave] for wave in range(len(chosen.waves))]
    predicted = predict_rate(waves, sum(node.cpu_milli for node in cluster.nodes), rates.source_rate)
    workload = Workload((unit.shape, unit.workers) for unit in units)
    use, idle, fragmentation = _planned_use(start, [final.packing.groups for final in finals], workload)
    return Plan(
        name=name,
        mode=chosen.mode,
        requested=requested,
        reason=chosen.reason,
        cluster=cluster,
        units=tuple(units),
        seats={stage: seats[stage] for unit in units for stage in unit.stages},
        rate=predicted.rate if is_known else None,
        bound=bound if is_known else None,
        bottleneck=predicted.bottleneck if is_known else None,
        binding=limits[slowest].resource if is_known else None,
        use=use,
        fragmentation=fragmentation,
        idle_gpus=idle,
        headroom=headroom,
        assumptions=tuple(rates.assumptions()),
        warnings=(*chosen.warnings, *_warnings(use, idle, cluster, units)),
        phases=(*phases, *_measured_limits(waves, cluster, rates)),
        source_rate=rates.source_rate,
    )


def _measured_limits(waves: Sequence[Sequence[UnitPlan]], cluster: Cluster, rates: StageRates) -> list[str]:
    """Limits of the rate that do not follow from worker counts."""
    lines = []
    cpu_s = max(sum(unit.cpu_s_per_source_item for unit in wave) for wave in waves)
    if cpu_s:
        cpus = sum(node.cpu_milli for node in cluster.nodes) / 1000
        lines.append(
            f"CPU time: at most {format_number(cpus / cpu_s)} items/s, {1000 * cpu_s:.3g} ms per item were measured"
        )
    if rates.source_rate is not None:
        lines.append(f"source: at most {format_number(rates.source_rate)} items/s were measured")
    return lines


def _phase_lines(units: Sequence[UnitPlan], sizing: Sizing, final: Sizing, headroom: float) -> list[str]:
    manual = [
        f"{unit.name} {count}"
        for unit, count in zip(units, sizing.counts, strict=True)
        if unit.has_set_counts and (unit.per_node is not None or unit.low == unit.high)
    ]
    ranged = [
        f"{unit.name} {unit.low}..{unit.high}" for unit in units if unit.high is not None and unit.low != unit.high
    ]
    added = [
        f"{unit.name} +{after - before}"
        for unit, before, after in zip(units, sizing.counts, final.counts, strict=True)
        if after > before
    ]
    counts = ", ".join(f"{unit.name} {count}" for unit, count in zip(units, sizing.counts, strict=True))
    return [
        f"manual: {', '.join([*manual, *ranged]) or 'no counts are given'}",
        "minimum: every unit has at least one worker",
        f"throughput: {counts} for {format_number(sizing.rate)} items/s"
        if all(unit.has_known_rate for unit in units)
        else f"throughput: {counts} with assumed speeds",
        f"headroom up to {headroom:g} x the slowest: "
        f"{', '.join(added) or _no_headroom_reason(units, sizing, headroom)}",
    ]


def _no_headroom_reason(units: Sequence[UnitPlan], sizing: Sizing, headroom: float) -> str:
    """Why no worker was added: none is needed, none is allowed, or no capacity is left."""
    target = sizing.rate * headroom * (1 - 1e-9)
    slow = [unit for unit, count in zip(units, sizing.counts, strict=True) if count * unit.speed < target]
    if not slow:
        return "none, all are that fast"
    if all(unit.barrier for unit in slow):
        return "none, a barrier has one worker"
    free = [unit for unit in slow if unit.per_node is None and (unit.high is None or unit.high > unit.low)]
    return "off, nothing is left for it" if free else "none, the counts of the slower ones are given"


def _planned_use(
    start: NodeGroups, after: list[NodeGroups], workload: Workload
) -> tuple[dict[str, PlannedUse], int, float]:
    """Peak use of each resource over all waves; for the wave that uses the most GPU, the whole idle cards and the
    fragmented share of all GPUs."""
    total = _group_totals(start)
    lefts = [_group_totals(groups) for groups in after]
    use = {
        name: PlannedUse(amount - min(left[name] for left in lefts), amount) for name, amount in total.items() if amount
    }
    busiest = after[min(range(len(after)), key=lambda wave: lefts[wave]["GPUs"])]
    idle = sum(
        len(nodes) * sum(free.cards.is_whole(index) for index in range(len(free.cards.free)))
        for free, nodes in busiest.items()
    )
    measure = Fragmentation(workload)
    fragments = sum(len(nodes) * measure.of_free(free) for free, nodes in busiest.items())
    gpus = total["GPUs"]
    return use, idle, fragments / (workload.weight * gpus) if gpus and workload.weight else 0.0


def _group_totals(groups: NodeGroups) -> dict[str, int]:
    return total_free({free: len(nodes) for free, nodes in groups.items()})


def _warnings(use: Mapping[str, PlannedUse], idle: int, cluster: Cluster, units: Sequence[UnitPlan]) -> list[str]:
    gpus = sum(len(node.gpus) for node in cluster.nodes)
    found = []
    if gpus and idle >= max(1, IDLE_GPU_WARNING_SHARE * gpus):
        why = "no stage requests one" if not any(unit.shape.computes_on_gpu for unit in units) else "see what limits it"
        found.append(f"{idle} of {gpus} GPUs stay idle: {why}")
    codecs = [name for name in ("NVDECs", "NVENCs") if name in use and use[name].used == use[name].total]
    found += [f"every one of the {use[name].total} {name} is in use" for name in codecs]
    return found
