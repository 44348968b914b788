"""Text of a run summary: what a run prints at its end and `dovetail status` shows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dovetail.observe.run_folder import runs_folder
from dovetail.observe.text_format import (
    fit_table,
    format_amount,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_rate,
    sparkline,
    terminal_width,
    wrap_labelled,
)
from dovetail.pipeline.units import short_unit_name
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

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


def result_lines(summary: RunSummary, width: int | None = None) -> list[str]:
    """The summary without the next commands; `width`: default: that of the terminal."""
    width = width or terminal_width()
    labelled = [
        *stage_lines(summary),
        *rate_lines(summary),
        *resource_lines(summary),
        *setup_lines(summary),
        *advice_lines(summary),
    ]
    return [
        *headline_lines(summary),
        "",
        *unit_table_lines(summary, width),
        "",
        *(part for line in labelled for part in wrap_labelled(line, width)),
        *node_lines(summary, width),
    ]


def headline_lines(summary: RunSummary) -> list[str]:
    clock = " of simulated time" if summary.virtual else ""
    of_all = f" of {summary.total}" if summary.total is not None else ""
    head = f"{summary.name or summary.id}: {summary.status} after {format_duration(summary.seconds)}{clock}"
    dropped = f", {summary.dropped} dropped" if summary.dropped else ""
    items = f"  {summary.finished}{of_all} {summary.noun} in, {summary.delivered} out{dropped}, {summary.failed} failed"
    return [head, *([f"  {summary.error}"] if summary.error else []), items]


def unit_table_lines(summary: RunSummary, width: int | None = None) -> list[str]:
    """A table with a row per unit; columns in which no unit has a figure are omitted."""
    if not summary.units:
        return ["no stage has started"]
    columns = [("stage", *(short_unit_name(unit.name) for unit in summary.units))]
    columns += [(name, *map(cell, summary.units)) for name, cell in UNIT_COLUMNS.items()]
    shown = [column for column in columns if column[0] not in OPTIONAL_COLUMNS or set(column[1:]) - {"-"}]
    return fit_table(list(zip(*shown, strict=True)), width or terminal_width())


UNIT_COLUMNS: Final[dict[str, Callable[[UnitSummary], str]]] = {
    "in": lambda unit: format_number(unit.taken),
    "out": lambda unit: format_number(unit.given),
    "failed": lambda unit: format_number(unit.failed),
    "items/s": lambda unit: format_number(unit.rate),
    "busy": lambda unit: format_percent(unit.busy if unit.busy is None else min(1.0, unit.busy)),
    "workers": lambda unit: str(unit.most_workers),
    "lost": lambda unit: str(unit.lost or "-"),
    "CPUs": lambda unit: "-" if unit.cpus is None else format_number(round(unit.cpus, 2)),
    "memory": lambda unit: "-" if unit.peak_bytes is None else format_size(unit.peak_bytes),
}
"""Workers: the maximum at once; lost: workers that died; CPUs and memory: of one worker, the mean and the peak."""
OPTIONAL_COLUMNS: Final = frozenset({"lost", "CPUs", "memory"})


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


def node_lines(summary: RunSummary, width: int | None = None) -> list[str]:
    """Nodes of a run on several nodes; lost nodes first."""
    if summary.virtual or len(summary.nodes) < 2:
        return []
    nodes = sorted(summary.nodes, key=lambda node: (node.left is None, node.name))
    rows = [
        ("node", "workers", "CPUs busy", "memory", "GPUs busy"),
        *map(_node_row, nodes[:MAX_NODES_SHOWN]),
    ]
    silent = [place for place in range(2, 5) if all(row[place] == "-" for row in rows[1:])]
    shown = [tuple(cell for place, cell in enumerate(row) if place not in silent) for row in rows]
    more = [f"and {format_count(len(nodes) - MAX_NODES_SHOWN, 'more node')}"] if len(nodes) > MAX_NODES_SHOWN else []
    gone = [f"{node.name} left the cluster: {node.left}" for node in nodes if node.left][:MAX_NODES_SHOWN]
    return ["", *fit_table(shown, width or terminal_width(), left=2, cut=1), *more, *gone]


def _node_row(node: NodeSummary) -> tuple[str, ...]:
    workers = ", ".join(f"{unit} {count}" for unit, count in list(node.workers.items())[:MAX_UNITS_PER_NODE])
    workers += f" and {len(node.workers) - MAX_UNITS_PER_NODE} more" if len(node.workers) > MAX_UNITS_PER_NODE else ""
    cpus = "-" if node.cpus is None else f"{format_number(round(node.cpus, 1))} of {node.cpu_count}"
    memory = "-" if node.peak_bytes is None else format_size(node.peak_bytes)
    memory += "" if node.memory_bytes is None else f" of {format_size(node.memory_bytes)}"
    cards = "-" if node.gpu_share is None else format_percent(node.gpu_share)
    return node.name + ("" if node.left is None else " (left)"), workers or "-", cpus, memory, cards


def backfill_command(action: str, table: str, column: str) -> str:
    """The command for a column of a table: dovetail backfill errors clips.lance length."""
    return shlex.join(["dovetail", "backfill", action, table, column])


def next_step_lines(summary: RunSummary) -> list[str]:
    """Path of the run folder, and the next commands."""
    kept = Path(summary.folder).parent == runs_folder()
    run = shlex.quote(summary.id if kept else summary.folder)
    lines = [f"folder      {summary.folder}"]
    if summary.failed and summary.column:
        lines.append(f"failed      {backfill_command('errors', summary.table, summary.column)}")
    elif summary.failed:
        lines.append(f"failed      {summary.folder}/errors/errors.jsonl")
    return [*lines, f"next        dovetail status {run} | dovetail trace {run} -o trace.json"]
