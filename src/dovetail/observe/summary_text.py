"""Text of a run summary: five lines that a run prints at its end, and all figures, which `dovetail status` shows."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dovetail.observe.run_folder import backfill_command, number_field, resume_instruction, run_reference, runs_folder
from dovetail.observe.run_status import run_status
from dovetail.observe.stage_counts import count_stages, merge_counts
from dovetail.observe.terminal import display_path, terminal_width
from dovetail.pipeline.units import short_unit_name
from dovetail.resources.sizes import format_size
from dovetail.streaming.view import rate_label, unit_word
from dovetail.text_format import (
    LABEL_WIDTH,
    Paint,
    cut_path,
    cut_text,
    fit_table,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_rate,
    html_table,
    plain,
    sparkline,
    wrap_labelled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.observe.history import RunHistory
    from dovetail.observe.summary import NodeSummary, RunSummary, UnitSummary

MAX_NODES_SHOWN, MAX_UNITS_PER_NODE = 16, 4
MAX_LIMITS_SHOWN = 2
REACHED_SHARE = 0.9
"""Share of the predicted rate from which on it counts as reached, however short the run."""
RATE_SOURCE_TEXTS = {"measured": "from earlier runs", "given": "from the given speeds"}
MIN_COMPARABLE_WORK_S = 20.0
"""A run with less work than this at full speed never reaches it."""
STATUS_STYLES: Final = {
    "running": "good",
    "finished": "good",
    "drained": "warning",
    "cancelled": "warning",
    "failed": "bad",
    "lost": "bad",
}
RESUMABLE_STATUS: Final = ("failed", "drained", "cancelled", "lost")


# --- five lines


@dataclass(frozen=True, slots=True)
class ShortSummary:
    """What a run prints at its end: what and how it ended, counts, rate, limit, next step. Empty texts are left out."""

    name: str
    status: str
    seconds: float
    counts: str
    clock: str = ""
    """Name of the clock of `seconds`, appended to them; empty: the wall clock."""
    outputs: tuple[str, ...] = ()
    """Where the results are, or what became of them."""
    rate: str = ""
    limit: str = ""
    next: str = ""

    def lines(self, paint: Paint = plain, width: int | None = None) -> list[str]:
        """At most five lines, which fit the width; a path is cut if there is no other way."""
        width = width or terminal_width()
        name = cut_text(self.name, width // 2)
        after = f" {_preposition(self.status)} {format_duration(self.seconds)}{self.clock}"
        room = width - len(f"{name}: {self.status}{after}, ")
        output = f", {_output_text(self.outputs, room)}" if self.outputs else ""
        status = paint(self.status, STATUS_STYLES.get(self.status, "strong"))
        labelled = {"rate": self.rate, "limit": self.limit, "next": self.next}
        return [
            f"{paint(name, 'strong')}: {status}{after}{output}",
            cut_text(f"  {self.counts}", width),
            *(_labelled_line(label, text, width, paint) for label, text in labelled.items() if text),
        ]


def _output_text(outputs: tuple[str, ...], room: int) -> str:
    """All paths if they fit, else their last parts."""
    text = ", ".join(outputs)
    if len(text) <= room or len(outputs) == 1:
        return cut_path(text, room)
    return cut_text(", ".join(path.rstrip("/").rpartition("/")[2] for path in outputs), room)


def _labelled_line(label: str, text: str, width: int, paint: Paint) -> str:
    """A command is never cut, so that it can be pasted."""
    shown = text if label == "next" else cut_text(text, width - LABEL_WIDTH)
    shown = paint(shown, "warning") if label == "limit" else shown
    return f"{paint(f'{label:{LABEL_WIDTH}}', 'dim')}{shown}"


def short_summary(summary: RunSummary, next_step: str = "") -> ShortSummary:
    """`next_step` replaces the command that is usual."""
    limits = limit_shares(summary)[:MAX_LIMITS_SHOWN]
    named = [f"{short_unit_name(name)} {format_percent(share)} of the time" for share, name in limits]
    outputs = tuple(map(display_path, summary.outputs))
    if summary.status != "finished":
        outputs = ("finished work is kept",) if outputs and summary.status in RESUMABLE_STATUS else ()
    return ShortSummary(
        name=summary.name or summary.id,
        status=summary.status,
        seconds=summary.seconds,
        clock=" of simulated time" if summary.virtual else "",
        counts=count_text(summary),
        outputs=outputs,
        rate=short_rate_text(summary) if summary.finished else "",
        limit=", ".join(named),
        next=next_step or next_command(summary),
    )


def short_rate_text(summary: RunSummary) -> str:
    """'176/s, 98 % of the 180/s predicted from earlier runs'; without a prediction if a speed was not known."""
    rate = format_rate(summary.reached).replace("/s", " rows/s" if summary.noun == "rows" else "/s")
    if not summary.expected or not summary.reached:
        return rate
    predicted = f"{format_rate(summary.expected)} predicted {prediction_source(summary)}"
    if is_comparable(summary):
        return f"{rate}, {format_percent(summary.reached / summary.expected)} of the {predicted}"
    return f"{rate}; {predicted}, too short to reach it"


def prediction_source(summary: RunSummary) -> str:
    return "by the plan" if summary.virtual else RATE_SOURCE_TEXTS[summary.planned_from]


def is_comparable(summary: RunSummary) -> bool:
    """Whether the run was long enough to reach the predicted rate, or has reached it."""
    one_wave = len({unit.wave for unit in summary.units}) < 2  # several have no steady rate, only that of all the time
    planned = summary.planned and not summary.virtual and summary.steady_rate and one_wave
    long_enough = summary.finished / summary.expected >= MIN_COMPARABLE_WORK_S
    return bool(planned or long_enough or summary.reached >= REACHED_SHARE * summary.expected)


def limit_shares(summary: RunSummary) -> list[tuple[float, str]]:
    """(Share of the time, what limited the run), largest first."""
    limits = [(unit.bottleneck, unit.name) for unit in summary.units] + [(summary.source_limited, "the source")]
    return sorted((limit for limit in limits if limit[0]), key=lambda limit: -limit[0])


def next_command(summary: RunSummary) -> str:
    """The most useful next step: resume, look at failed items, change a request, or look at the details."""
    run = run_reference(summary.folder)
    resume = resume_instruction(summary.folder) if summary.status in RESUMABLE_STATUS else ""
    if resume or summary.failed:
        return resume or f"dovetail errors {run}"
    return summary.advice[0] if summary.advice and summary.status == "finished" else f"dovetail status {run}"


def status_text(summary: RunSummary, paint: Paint = plain) -> str:
    """'finished after 3.2 s', 'running for 3.2 s'."""
    status = paint(summary.status, STATUS_STYLES.get(summary.status, "strong"))
    duration = f"{format_duration(summary.seconds)}{' of simulated time' if summary.virtual else ''}"
    return f"{status} {_preposition(summary.status)} {duration}"


def _preposition(status: str) -> str:
    return "for" if status == "running" else "after"


def header_text(header: Mapping[str, Any]) -> str:
    """Status and counts from run.json alone: 'failed after 3.2 s, 17 of 1000 items in, 0 out, 1 failed'."""
    status, found = run_status(header, time.time()), header.get("progress")
    done = found if isinstance(found, dict) else {}
    total = f" of {done['total']}" if isinstance(done.get("total"), int) else ""
    finished, delivered, failed = (int(number_field(done, name)) for name in ("finished", "delivered", "failed"))
    when = f"{_preposition(status)} {format_duration(number_field(done, 'seconds'))}"
    counts = f"{finished}{total} {done.get('noun') or 'items'} in, {delivered} out, {failed} failed"
    return f"{status} {when}, {counts}"


def unit_html(summary: RunSummary) -> str:
    """A table of the units for notebooks."""
    rows = [(unit.name, *(cell(unit) for cell in UNIT_COLUMNS.values())) for unit in summary.units]
    names = (unit_word(summary.noun), *(_column_name(name, summary) for name in UNIT_COLUMNS))
    return html_table(f"Run {summary.id}: {summary.outcome}", names, rows)


def count_text(summary: RunSummary) -> str:
    """'1000 of 1000 items in, 990 out, 10 failed'."""
    of_all = f" of {summary.total}" if summary.total is not None else ""
    dropped = f", {summary.dropped} dropped" if summary.dropped else ""
    return f"{summary.finished}{of_all} {summary.noun} in, {summary.delivered} out{dropped}, {summary.failed} failed"


# --- all figures


def summary_lines(summary: RunSummary) -> list[str]:
    """All figures, and the next commands."""
    return [*result_lines(summary), "", *next_step_lines(summary)]


def result_lines(summary: RunSummary, width: int | None = None, paint: Paint = plain) -> list[str]:
    """All figures without the next commands; `width`: default: that of the terminal."""
    width = width or terminal_width()
    labelled = [
        *stage_lines(summary),
        *rate_lines(summary),
        *resource_lines(summary),
        *setup_lines(summary),
        *advice_lines(summary),
        *output_lines(summary),
    ]
    return [
        *headline_lines(summary, paint),
        "",
        *unit_table_lines(summary, width),
        "",
        *(part for line in labelled for part in wrap_labelled(line, width)),
        *node_lines(summary, width),
    ]


def headline_lines(summary: RunSummary, paint: Paint = plain) -> list[str]:
    error = [f"  {paint(summary.error, 'bad')}"] if summary.error else []
    head = f"{paint(summary.name or summary.id, 'strong')}: {status_text(summary, paint)}"
    return [head, *error, f"  {count_text(summary)}"]


def unit_table_lines(summary: RunSummary, width: int | None = None) -> list[str]:
    """A table with a row per unit; columns in which no unit has a figure are omitted."""
    if not summary.units:
        return [f"no {unit_word(summary.noun)} has started"]
    columns = [(unit_word(summary.noun), *(short_unit_name(unit.name) for unit in summary.units))]
    columns += [(_column_name(name, summary), *map(cell, summary.units)) for name, cell in UNIT_COLUMNS.items()]
    shown = [column for column in columns if column[0] not in OPTIONAL_COLUMNS or set(column[1:]) - {"-"}]
    return fit_table(list(zip(*shown, strict=True)), width or terminal_width())


def _column_name(name: str, summary: RunSummary) -> str:
    return rate_label(summary.noun) if name == RATE else name


RATE: Final = "items/s"
UNIT_COLUMNS: Final[dict[str, Callable[[UnitSummary], str]]] = {
    "in": lambda unit: format_number(unit.taken),
    "out": lambda unit: format_number(unit.given),
    "failed": lambda unit: format_number(unit.failed),
    RATE: lambda unit: format_number(unit.rate),
    "busy": lambda unit: format_percent(unit.busy if unit.busy is None else min(1.0, unit.busy)),
    "workers": lambda unit: str(unit.most_workers),
    "lost": lambda unit: str(unit.lost or "-"),
    "CPUs": lambda unit: "-" if unit.cpus is None else format_number(round(unit.cpus, 2)),
    "memory": lambda unit: format_size(unit.peak_bytes) if unit.peak_bytes else "-",
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
        share = f", {format_percent(summary.reached / summary.expected)} of it reached" if summary.reached else ""
        if summary.reached and not is_comparable(summary):
            work = f"{summary.finished} items are {format_duration(summary.finished / summary.expected)} of work"
            share = f" (not reached: {work}, too short to reach it)"
        rate = f"{format_rate(summary.expected)} {prediction_source(summary)}"
        lines.append(f"predicted   {rate}{share}; {format_count(summary.replans, 'replan')}")
    limits = limit_shares(summary)
    if limits:
        shares = ", ".join(f"{short_unit_name(name)} {format_percent(share)} of the time" for share, name in limits[:4])
        lines.append(f"bottleneck  {shares}")
    return lines


def format_amount(name: str, value: float) -> str:
    """An amount of a resource, from its integer unit, as in scheduling.plan.Use."""
    if "memory" in name:
        return format_size(round(value))
    return format_number(value if name in ("NVDECs", "NVENCs") else value / 1000)


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


def output_lines(summary: RunSummary) -> list[str]:
    pending = "" if summary.status == "finished" else ": written when the run is complete; finished work is kept"
    return [f"output      {path}{pending}" for path in summary.outputs]


def operator_table_lines(history: RunHistory, width: int | None = None) -> list[str]:
    """A table of the operators of a recipe: rows in, out, dropped and failed, time per row and share of the time.
    Empty for any other run."""
    more = history.header.get("more")
    listed = more.get("operators") if isinstance(more, dict) else None
    counts = count_stages(history) if listed else {}
    groups = [one for one in listed or () if isinstance(one, list) and len(one) == 2]
    found = [merge_counts(str(name), counts, map(str, stages)) for name, stages in groups]
    operators = [one for one in found if one is not None]
    if not operators:
        return []
    total = sum(one.seconds for one in operators)
    rows: list[tuple[str, ...]] = [("operator", "rows in", "out", "dropped", "failed", "us per row", "share of time")]
    for one in operators:
        each = format_number(round(1e6 * one.seconds / one.items_in, 1)) if one.items_in else "-"
        share = format_percent(one.seconds / total) if total else "-"
        numbers = (one.items_in, one.items_out, one.dropped, one.failed)
        rows.append((one.name, *map(str, numbers), each, share))
    last = f"time in operators: {format_duration(total)}, all workers together"
    return [*fit_table(rows, width or terminal_width()), last]


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


def next_step_lines(summary: RunSummary) -> list[str]:
    """Path of the run folder, and the next commands."""
    kept = Path(summary.folder).parent == runs_folder()
    run = shlex.quote(summary.id if kept else summary.folder)
    lines = [f"folder      {summary.folder}"]
    if summary.failed and summary.column:
        lines.append(f"failed      {backfill_command('errors', {'table': summary.table, 'column': summary.column})}")
    elif summary.failed:
        lines.append(f"failed      {summary.folder}/errors/errors.jsonl")
    return [*lines, f"next        dovetail status {run} | dovetail trace {run} -o trace.json"]
