"""Text of a run summary: what a run prints at its end and `dovetail status` shows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.observe.run_folder import runs_folder
from dovetail.observe.text_format import (
    align_table,
    format_amount,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_rate,
    sparkline,
)
from dovetail.pipeline.units import short_unit_name
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.observe.summary import NodeSummary, RunSummary, UnitSummary

MAX_NODES_SHOWN, MAX_UNITS_PER_NODE = 16, 4
REACHED_SHARE = 0.9
"""Share of the predicted rate from which on it counts as reached, however short the run."""
RATE_SOURCE_TEXTS = {"measured": "from earlier runs", "given": "speeds as given"}
MIN_COMPARABLE_WORK_S = 20.0
"""A run with less work than this at full speed never reaches it."""


def summary_lines(summary: RunSummary) -> list[str]:
    """The text that every run prints at its end."""
    return [*result_lines(summary), "", *next_step_lines(summary)]


def result_lines(summary: RunSummary) -> list[str]:
    """The summary without the next commands."""
    return [
        *headline_lines(summary),
        "",
        *unit_table_lines(summary),
        "",
        *stage_lines(summary),
        *rate_lines(summary),
        *resource_lines(summary),
        *setup_lines(summary),
        *advice_lines(summary),
        *node_lines(summary),
    ]


def headline_lines(summary: RunSummary) -> list[str]:
    clock = " of simulated time" if summary.virtual else ""
    of_all = f" of {summary.total}" if summary.total is not None else ""
    head = f"{summary.name or summary.id}: {summary.status} after {format_duration(summary.seconds)}{clock}"
    dropped = f", {summary.dropped} dropped" if summary.dropped else ""
    items = (
        f"  {summary.finished}{of_all} {summary.noun} in, {summary.delivered} out{dropped}, {summary.aside} set aside"
    )
    return [head, *([f"  {summary.error}"] if summary.error else []), items]


def unit_table_lines(summary: RunSummary) -> list[str]:
    if not summary.units:
        return ["no stage has started"]
    of_items, of_workers = ("items in", "out", "aside", "items/s", "busy"), ("workers", "started", "stopped", "lost")
    rows = [("stage", *of_items, *of_workers, "bottleneck")]
    for unit in summary.units:
        counts = (str(unit.most_workers), str(unit.started), str(unit.stopped), str(unit.lost))
        busy = format_percent(unit.busy if unit.busy is None else min(1.0, unit.busy))
        items = (str(unit.taken), str(unit.given), str(unit.aside), format_number(unit.rate), busy)
        rows.append((short_unit_name(unit.name), *items, *counts, format_percent(unit.bottleneck or None)))
    return align_table([(*row, *more) for row, more in zip(rows, _measured_cells(summary.units), strict=True)])


def _measured_cells(units: Sequence[UnitSummary]) -> list[tuple[str, ...]]:
    """Additional cells for the header and every row; empty if not measured."""
    cpus = ["-" if unit.cpus is None else format_number(round(unit.cpus, 2)) for unit in units]
    peaks = ["-" if unit.peak_bytes is None else format_size(unit.peak_bytes) for unit in units]
    columns = [column for column in (["CPUs each", *cpus], ["peak memory", *peaks]) if set(column[1:]) != {"-"}]
    return list(zip(*columns, strict=True)) or [()] * (len(units) + 1)


def stage_lines(summary: RunSummary) -> list[str]:
    """Seconds per stage of fused stages, which share their workers."""
    lines = []
    for unit in summary.units:
        seconds = sum(stage.seconds for stage in unit.stages)
        if len(unit.stages) > 1 and seconds:
            shares = (
                f"{stage.name} {format_percent(stage.seconds / seconds)} ({stage.taken} in)" for stage in unit.stages
            )
            lines.append(f"inside      {short_unit_name(unit.name)}: {', '.join(shares)} of {format_duration(seconds)}")
    return lines


def rate_lines(summary: RunSummary) -> list[str]:
    lines = [
        f"rate        {sparkline(summary.rates)}  mean {format_rate(summary.mean_rate)}, steady "
        f"{format_rate(summary.steady_rate)}"
    ]
    if summary.expected:
        reached = summary.reached
        work_s = summary.finished / summary.expected
        share = f", {format_percent(reached / summary.expected)} of it reached" if reached else ""
        by = (
            f" by the plan ({RATE_SOURCE_TEXTS[summary.planned_from]})"
            if summary.planned and not summary.virtual
            else ""
        )
        comparable = work_s >= MIN_COMPARABLE_WORK_S or (by and summary.steady_rate)
        if reached and not comparable and reached < REACHED_SHARE * summary.expected:
            work = f"{summary.finished} items are {format_duration(work_s)} of work"
            share = f" (not reached: {work}, too short to reach it)"
        lines.append(
            f"predicted   {format_rate(summary.expected)}{by}{share}; {format_count(summary.replans, 'replan')}"
        )
    limits = [(unit.bottleneck, unit.name) for unit in summary.units] + [(summary.source_limited, "the source")]
    limits = sorted((limit for limit in limits if limit[0]), key=lambda limit: -limit[0])
    if limits:
        shares = ", ".join(f"{short_unit_name(name)} {format_percent(share)} of the time" for share, name in limits[:4])
        lines.append(f"bottleneck  {shares}")
    return lines


def resource_lines(summary: RunSummary) -> list[str]:
    lines = []
    for name, use in summary.use.items():
        if use.peak and use.total:
            mean, peak = (
                f"{format_amount(name, it)} ({format_percent(it / use.total)})" for it in (use.mean, use.peak)
            )
            lines.append(f"{name:11} {mean} on average, {peak} at most, of {format_amount(name, use.total)}")
    return lines


def setup_lines(summary: RunSummary) -> list[str]:
    if not summary.setup_s:
        return []
    return [f"setup       {format_duration(summary.setup_s)} of worker time ({format_percent(summary.setup_share)})"]


def advice_lines(summary: RunSummary) -> list[str]:
    return [f"{'' if place else 'to change':11} {text}" for place, text in enumerate(summary.advice)]


def node_lines(summary: RunSummary) -> list[str]:
    """Nodes of a run on several nodes; lost nodes first."""
    if summary.virtual or len(summary.nodes) < 2:
        return []
    nodes = sorted(summary.nodes, key=lambda node: (node.left is None, node.name))
    rows = [
        ("node", "workers at most", "CPUs busy", "memory at most", "GPUs busy"),
        *map(_node_row, nodes[:MAX_NODES_SHOWN]),
    ]
    silent = [place for place in range(2, 5) if all(row[place] == "-" for row in rows[1:])]
    shown = [tuple(cell for place, cell in enumerate(row) if place not in silent) for row in rows]
    more = [f"and {format_count(len(nodes) - MAX_NODES_SHOWN, 'more node')}"] if len(nodes) > MAX_NODES_SHOWN else []
    gone = [f"{node.name} left the cluster: {node.left}" for node in nodes if node.left][:MAX_NODES_SHOWN]
    return ["", *align_table(shown, left=2), *more, *gone]


def _node_row(node: NodeSummary) -> tuple[str, ...]:
    workers = ", ".join(f"{unit} {count}" for unit, count in list(node.workers.items())[:MAX_UNITS_PER_NODE])
    workers += f" and {len(node.workers) - MAX_UNITS_PER_NODE} more" if len(node.workers) > MAX_UNITS_PER_NODE else ""
    cpus = "-" if node.cpus is None else f"{format_number(round(node.cpus, 1))} of {node.cpu_count}"
    memory = "-" if node.peak_bytes is None else format_size(node.peak_bytes)
    memory += "" if node.memory_bytes is None else f" of {format_size(node.memory_bytes)}"
    cards = "-" if node.gpu_share is None else format_percent(node.gpu_share)
    return node.name + ("" if node.left is None else " (left)"), workers or "-", cpus, memory, cards


def next_step_lines(summary: RunSummary) -> list[str]:
    """Path of the run folder, and the next commands."""
    kept = Path(summary.folder).parent == runs_folder()
    run = shlex.quote(summary.id if kept else summary.folder)
    lines = [f"folder      {summary.folder}"]
    if summary.aside and summary.column:
        lines.append(f"set aside   {shlex.join(['dovetail', 'backfill', summary.table, summary.column])} --errors")
    elif summary.aside:
        lines.append(f"set aside   {summary.folder}/errors/errors.jsonl")
    return [*lines, f"next        dovetail status {run} | dovetail trace {run} -o trace.json"]
