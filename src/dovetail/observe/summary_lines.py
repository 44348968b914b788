"""A summary in words: what every run prints at its end, and `dovetail status` at any time."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.observe.folder import runs_folder
from dovetail.observe.words import amount, counted, duration, number, percent, rate, sparkline, table
from dovetail.pipeline.units import shown_as
from dovetail.resources.sizes import about_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.observe.nodes import NodeSummary
    from dovetail.observe.summary import Summary, UnitSummary

NODES_SHOWN, UNITS_SHOWN = 16, 4
REACHED = 0.9
"""Of what was predicted: from this share on it counts as reached, however short the run."""
SPEEDS_FROM = {"measured": "from earlier runs", "given": "speeds as given"}
COMPARABLE_S = 20.0
"""A run with less work than this at full speed never gets there."""


def summary_lines(told: Summary) -> list[str]:
    """What every run prints at its end."""
    return [*result_lines(told), "", *next_lines(told)]


def result_lines(told: Summary) -> list[str]:
    """The same without where to look further."""
    return [
        *headline(told),
        "",
        *unit_table(told),
        "",
        *stage_lines(told),
        *rate_lines(told),
        *resource_lines(told),
        *setup_lines(told),
        *advice_lines(told),
        *node_lines(told),
    ]


def headline(told: Summary) -> list[str]:
    clock = " of simulated time" if told.virtual else ""
    of_all = f" of {told.total}" if told.total is not None else ""
    head = f"{told.name or told.id}: {told.status} after {duration(told.seconds)}{clock}"
    dropped = f", {told.dropped} dropped" if told.dropped else ""
    items = f"  {told.finished}{of_all} items in, {told.delivered} out{dropped}, {told.aside} set aside"
    return [head, *([f"  {told.error}"] if told.error else []), items]


def unit_table(told: Summary) -> list[str]:
    if not told.units:
        return ["no stage was seen yet"]
    of_items, of_workers = ("items in", "out", "aside", "items/s", "busy"), ("workers", "started", "stopped", "lost")
    rows = [("stage", *of_items, *of_workers, "bottleneck")]
    for unit in told.units:
        counts = (str(unit.most_workers), str(unit.started), str(unit.stopped), str(unit.lost))
        busy = percent(unit.busy if unit.busy is None else min(1.0, unit.busy))
        items = (str(unit.taken), str(unit.given), str(unit.aside), number(unit.rate), busy)
        rows.append((shown_as(unit.name), *items, *counts, percent(unit.bottleneck or None)))
    return table([(*row, *more) for row, more in zip(rows, _measured_cells(told.units), strict=True)])


def _measured_cells(units: Sequence[UnitSummary]) -> list[tuple[str, ...]]:
    """More cells for the header and every row; none, if nobody measured."""
    cpus = ["-" if unit.cpus is None else number(round(unit.cpus, 2)) for unit in units]
    peaks = ["-" if unit.peak_bytes is None else about_size(unit.peak_bytes) for unit in units]
    columns = [column for column in (["CPUs each", *cpus], ["peak memory", *peaks]) if set(column[1:]) != {"-"}]
    return list(zip(*columns, strict=True)) or [()] * (len(units) + 1)


def stage_lines(told: Summary) -> list[str]:
    """Of fused stages, which share their workers: whose code took how long."""
    lines = []
    for unit in told.units:
        seconds = sum(stage.seconds for stage in unit.stages)
        if len(unit.stages) > 1 and seconds:
            shares = (f"{stage.name} {percent(stage.seconds / seconds)} ({stage.taken} in)" for stage in unit.stages)
            lines.append(f"inside      {shown_as(unit.name)}: {', '.join(shares)} of {duration(seconds)}")
    return lines


def rate_lines(told: Summary) -> list[str]:
    lines = [f"rate        {sparkline(told.rates)}  mean {rate(told.mean_rate)}, steady {rate(told.steady_rate)}"]
    if told.expected:
        reached = told.reached
        work_s = told.finished / told.expected
        share = f", {percent(reached / told.expected)} of it reached" if reached else ""
        by = f" by the plan ({SPEEDS_FROM[told.planned_from]})" if told.planned and not told.virtual else ""
        comparable = work_s >= COMPARABLE_S or (by and told.steady_rate)
        if reached and not comparable and reached < REACHED * told.expected:
            share = f" (not reached: {told.finished} items are {duration(work_s)} of work, too little to get going)"
        lines.append(f"predicted   {rate(told.expected)}{by}{share}; {counted(told.replans, 'replan')}")
    limits = [(unit.bottleneck, unit.name) for unit in told.units] + [(told.source_limited, "the source")]
    limits = sorted((limit for limit in limits if limit[0]), key=lambda limit: -limit[0])
    if limits:
        shares = ", ".join(f"{shown_as(name)} {percent(share)} of the time" for share, name in limits[:4])
        lines.append(f"bottleneck  {shares}")
    return lines


def resource_lines(told: Summary) -> list[str]:
    lines = []
    for name, use in told.use.items():
        if use.peak and use.total:
            mean, peak = (f"{amount(name, it)} ({percent(it / use.total)})" for it in (use.mean, use.peak))
            lines.append(f"{name:11} {mean} on average, {peak} at most, of {amount(name, use.total)}")
    return lines


def setup_lines(told: Summary) -> list[str]:
    if not told.setup_s:
        return []
    return [f"setup       {duration(told.setup_s)} of workers' time, {percent(told.setup_share)} of all of it"]


def advice_lines(told: Summary) -> list[str]:
    return [f"{'' if place else 'to change':11} {text}" for place, text in enumerate(told.advice)]


def node_lines(told: Summary) -> list[str]:
    """What was where, of a run on several nodes: who is gone comes first."""
    if told.virtual or len(told.nodes) < 2:
        return []
    nodes = sorted(told.nodes, key=lambda node: (node.left is None, node.name))
    rows = [
        ("node", "workers at most", "CPUs busy", "memory at most", "GPUs busy"),
        *map(_node_row, nodes[:NODES_SHOWN]),
    ]
    silent = [place for place in range(2, 5) if all(row[place] == "-" for row in rows[1:])]
    shown = [tuple(cell for place, cell in enumerate(row) if place not in silent) for row in rows]
    more = [f"and {counted(len(nodes) - NODES_SHOWN, 'more node')}"] if len(nodes) > NODES_SHOWN else []
    gone = [f"{node.name} left the cluster: {node.left}" for node in nodes if node.left][:NODES_SHOWN]
    return ["", *table(shown, left=2), *more, *gone]


def _node_row(node: NodeSummary) -> tuple[str, ...]:
    workers = ", ".join(f"{unit} {count}" for unit, count in list(node.workers.items())[:UNITS_SHOWN])
    workers += f" and {len(node.workers) - UNITS_SHOWN} more" if len(node.workers) > UNITS_SHOWN else ""
    cpus = "-" if node.cpus is None else f"{number(round(node.cpus, 1))} of {node.cpu_count}"
    memory = "-" if node.peak_bytes is None else about_size(node.peak_bytes)
    memory += "" if node.memory_bytes is None else f" of {about_size(node.memory_bytes)}"
    cards = "-" if node.gpu_share is None else percent(node.gpu_share)
    return node.name + ("" if node.left is None else " (left)"), workers or "-", cpus, memory, cards


def next_lines(told: Summary) -> list[str]:
    """Where the run's files are, and what to type next."""
    kept = Path(told.folder).parent == runs_folder()
    run = shlex.quote(told.id if kept else told.folder)
    lines = [f"folder      {told.folder}"]
    if told.aside:
        lines.append(f"set aside   {told.folder}/errors/errors.jsonl")
    return [*lines, f"next        dovetail status {run} | dovetail trace {run} -o trace.json"]
