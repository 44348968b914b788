"""Text report of a plan, with the rates that one more node, GPU or CPU and the other modes would give."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, InfeasibleError, Problem, did_you_mean
from dovetail.pipeline.units import short_unit_name
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.sizes import format_milli, format_size
from dovetail.scheduling.modes import choose_mode
from dovetail.scheduling.predicted_rate import predict_rate
from dovetail.text_format import fit_table, format_count, format_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.resources.cluster import Node
    from dovetail.resources.seat import Seat
    from dovetail.scheduling.plan import Plan, UnitPlan

MAX_NODES_SHOWN = 4
MAX_UNITS_SHOWN = 4
MAX_WIDTH = 1000
"""Width of a table that need not fit a terminal."""
RATE_SOURCE_MARKS = {"measured": ("^", "measured")}


def plan_text(plan: Plan, width: int | None = None) -> str:
    """Full text of a plan. `width`: columns that the table has to fit."""
    lines = [
        *headline_lines(plan),
        "",
        *unit_table(plan, width),
        "",
        "in use" if len(plan.waves) == 1 else "in use, at most",
    ]
    lines += [f"  {line}" for line in use_lines(plan)]
    lines += ["", "how it was sized"]
    lines += [f"  {line}" for line in plan.phases]
    more = list(rates_with_one_more(plan))
    if more:
        lines += ["", "what one more would bring"]
        width = max(len(what) for what, _ in more)
        lines += [f"  {what:{width}}  {format_number(rate)} items/s ({_gain_text(plan, rate)})" for what, rate in more]
    others = list(rates_in_other_modes(plan))
    if others and len(plan.units) > 1:
        lines += ["", "the other modes; between waves, items wait on disk"]
        lines += [f"  {mode:10}  {format_number(rate)} items/s ({_gain_text(plan, rate)})" for mode, rate in others]
    lines += ["", "notes", *(f"  {note}" for note in plan.notes)]
    return "\n".join(lines)


def headline_lines(plan: Plan) -> list[str]:
    title = f"{plan.name} on {plan.cluster.spec(exact=False)}"
    if plan.rate is None or plan.bound is None or plan.bottleneck is None:
        return [title, f"  rate unknown: {_unmeasured_text(plan)}", f"  {plan.reason}"]
    bound = f"{100 * plan.rate / plan.bound:.1f} % of the bound {format_number(plan.bound)} set by {plan.binding}"
    return [
        title,
        f"  {format_number(plan.rate)} items/s, {bound}",
        f"  bottleneck: {short_unit_name(plan.bottleneck)}; {plan.reason}",
    ]


def _unmeasured_text(plan: Plan) -> str:
    unknown = [short_unit_name(unit.name) for unit in plan.units if not unit.has_known_rate]
    if len(unknown) == len(plan.units):
        return "no stage has been measured"
    more = f" and {len(unknown) - MAX_UNITS_SHOWN} more" if len(unknown) > MAX_UNITS_SHOWN else ""
    return f"no measurement of {', '.join(unknown[:MAX_UNITS_SHOWN])}{more}"


def unit_table(plan: Plan, width: int | None = None) -> list[str]:
    """A row per unit. `width`: columns to fit; nodes, resources and names are cut, in this order."""
    waves = len(plan.waves) > 1
    header = ["wave"] * waves + ["stage", "workers", "items/s each", "items/s", "one worker", "nodes"]
    rows = [header]
    for unit in plan.units:
        mark = " *" if unit.name == plan.bottleneck else ""
        mark_of_source = RATE_SOURCE_MARKS.get(unit.rate_source, ("", ""))[0]
        cells = [
            f"{short_unit_name(unit.name)}{mark}",
            str(unit.workers),
            f"{unit.rate_text()}{mark_of_source}",
            unit.throughput_text(),
        ]
        rows.append(
            [str(unit.wave + 1)] * waves + [*cells, unit.shape.describe(), _nodes_text(plan.seats[unit.stages[0]])]
        )
    last = len(header) - 1
    lines = fit_table(rows, width or MAX_WIDTH, left=len(header), cut=(last, last - 1, int(waves)))
    sources = {unit.rate_source for unit in plan.units}
    legend = [f"{sign} {words}" for source, (sign, words) in RATE_SOURCE_MARKS.items() if source in sources]
    limits = ["* limits the rate"] if plan.bottleneck is not None else []
    return [*lines, "; ".join([*limits, *legend])] if limits or legend else lines


def use_lines(plan: Plan) -> list[str]:
    lines = []
    for name, use in plan.use.items():
        text = format_size if "memory" in name else str if name in ("NVDECs", "NVENCs") else format_milli
        lines.append(f"{text(use.used)} of {text(use.total)} {name} ({100 * use.used / use.total:.0f} %)")
    if "GPUs" in plan.use:
        lines.append(
            f"{plan.idle_gpus} whole GPUs idle, {100 * plan.fragmentation:.1f} % of all GPUs not usable for this work"
        )
    return lines


def stage_text(plan: Plan, stage: str) -> str:
    """Reasons for the number of workers of a stage, and their nodes."""
    unit = next((unit for unit in plan.units if stage in unit.stages), None)
    if unit is None:
        known = [name for unit in plan.units for name in unit.stages]
        message = f"there is no stage {stage!r}{did_you_mean(stage, known)}"
        raise ConfigError(Problem("DT032", message, fixes=(f"one of: {', '.join(known)}",)))
    return "\n".join([*_worker_count_lines(plan, unit), *_node_lines(plan, unit)])


def _worker_count_lines(plan: Plan, unit: UnitPlan) -> list[str]:
    lines = [f"{unit.name}: {format_count(unit.workers, 'worker')}, each {unit.shape.describe()}"]
    if unit.has_known_rate:
        one = f"{format_number(unit.rate)} items/s in ({unit.rate_source})"
        total = "" if plan.rate is None else f"; the plan runs at {format_number(plan.rate)}"
        items = f"{format_number(unit.per_source)} {'item' if unit.per_source == 1 else 'items'}"
        lines += [
            f"  one worker takes {one}; it gets {items} per source item",
            f"  together they sustain {format_number(unit.throughput)} source items/s{total}",
        ]
    else:
        lines.append("  the speed of one worker is unknown")
    if unit.barrier:
        lines.append("  a barrier has one worker, which gets all items in one call")
    elif unit.per_node is not None:
        lines.append(f"  the count was given: workers_per_node={unit.per_node}")
    elif unit.low == unit.high:
        lines.append(f"  the count was given: workers={unit.low}")
    elif unit.workers == unit.high:
        lines.append(f"  it has the maximum that is set: workers=({unit.low}, {unit.high})")
    elif plan.rate is None or plan.binding is None:
        lines.append("  the count is a first guess: the first replan of a run adjusts it to measured speeds")
    elif unit.throughput <= plan.rate * (1 + 1e-9) and plan.binding.startswith("the "):
        lines.append(f"  it is as fast as {plan.binding} allow")
    elif unit.throughput <= plan.rate * (1 + 1e-9):
        lines.append(f"  it limits the rate: with more of it the others would not fit; {plan.binding} are the scarcest")
    else:
        lines.append(f"  it needs {unit.workers} to keep up, with headroom up to {plan.headroom:g} x the slowest")
    if len(unit.stages) > 1:
        lines.append(f"  {', '.join(unit.stages)} run in the same workers: equal needs, one after the other")
    return lines


def _node_lines(plan: Plan, unit: UnitPlan) -> list[str]:
    by_node: dict[str, list[Seat]] = {}
    for seat in plan.seats[unit.stages[0]]:
        by_node.setdefault(seat.node, []).append(seat)
    lines = []
    for node, seats in list(by_node.items())[:20]:
        cards = sorted({card for seat in seats for card in seat.gpus})
        on = f" on card{'s' if len(cards) > 1 else ''} {', '.join(map(str, cards))}" if cards else ""
        lines.append(f"  {node}: {len(seats)}{on}")
    return [*lines, f"  ... and {len(by_node) - 20} more nodes"] if len(by_node) > 20 else lines


def rates_with_one_more(plan: Plan) -> Iterator[tuple[str, float]]:
    """(Addition, rate) for one more node, GPU and CPU of every kind of node; none if a speed is unknown."""
    if plan.rate is None:
        return
    for what, nodes in _clusters_with_one_more(plan):
        rate = rate_in_mode(plan, plan.requested, Cluster(nodes))
        if rate is not None:
            yield what, rate


def _clusters_with_one_more(plan: Plan) -> Iterator[tuple[str, tuple[Node, ...]]]:
    kinds: dict[str, Node] = {}
    for node in plan.cluster.nodes:
        kinds.setdefault(node.rounded().spec(), node)
    for spec, node in list(kinds.items())[:MAX_NODES_SHOWN]:
        yield f"node {spec}", (*plan.cluster.nodes, replace(node, name=" one more"))
        if node.gpus:
            bigger = replace(node, gpus=(*node.gpus, node.gpus[-1]))
            yield f"GPU {node.gpus[-1].model} on {node.name}", _with_node_replaced(plan, node, bigger)
        bigger = replace(node, cpu_milli=node.cpu_milli + 1000)
        yield f"CPU on {node.name}", _with_node_replaced(plan, node, bigger)


def _with_node_replaced(plan: Plan, node: Node, by: Node) -> tuple[Node, ...]:
    return tuple(by if other.name == node.name else other for other in plan.cluster.nodes)


def rates_in_other_modes(plan: Plan) -> Iterator[tuple[str, float]]:
    """(Mode, rate) for the modes that this plan does not use; none if a speed is unknown."""
    if plan.rate is None:
        return
    for mode in ("streaming", "waves", "sequential"):
        if mode != plan.mode:
            rate = rate_in_mode(plan, mode, plan.cluster)
            if rate is not None:
                yield mode, rate


def rate_in_mode(plan: Plan, mode: str, cluster: Cluster) -> float | None:
    """Rate of the same units in a mode on a cluster; None if they do not fit."""
    try:
        chosen = choose_mode([replace(unit, workers=0, wave=0) for unit in plan.units], Ledger(cluster), mode)
    except InfeasibleError:
        return None
    waves = [
        [replace(unit, workers=count) for unit, count in zip(units, sizing.counts, strict=True)]
        for units, sizing in chosen.waves
    ]
    return predict_rate(waves, sum(node.cpu_milli for node in cluster.nodes), plan.source_rate).rate


def _gain_text(plan: Plan, rate: float) -> str:
    gain = 100 * (rate / plan.rate - 1) if plan.rate else 0.0
    return "no gain" if abs(gain) < 0.05 else f"{gain:+.1f} %"


def _nodes_text(seats: tuple[Seat, ...]) -> str:
    counts: dict[str, int] = {}
    for seat in seats:
        counts[seat.node] = counts.get(seat.node, 0) + 1
    shown = [f"{node} x{count}" for node, count in list(counts.items())[:MAX_NODES_SHOWN]]
    return ", ".join(shown) + (f", ... ({len(counts)} nodes)" if len(counts) > MAX_NODES_SHOWN else "")
