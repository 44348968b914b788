"""HTML report of any run in one file: headline, plan and rate, stage table, charts, verdicts, failed items.

Computed from the run folder only. Every text from the run is escaped; the page loads nothing and runs nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from dovetail.observe.charts import Band, Line, line_chart, stacked_area_chart
from dovetail.observe.cpu_attribution import unit_timeline
from dovetail.observe.failed_items import group_failures
from dovetail.observe.run_folder import number_field
from dovetail.observe.stage_usage import recorded_groups, stage_usages
from dovetail.observe.summary import summarize_run
from dovetail.observe.utilisation_verdicts import (
    RECIPE_SETTINGS,
    RequestedResources,
    SettingNames,
    Verdict,
    judge_stages,
    requested_resources,
    setting_names,
)
from dovetail.pipeline.units import short_unit_name
from dovetail.resources.sizes import format_size
from dovetail.text_format import (
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_rate,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.observe.history import RunHistory
    from dovetail.observe.stage_usage import StageGroup, StageUsage
    from dovetail.observe.summary import RunSummary, UnitSummary

MAX_FAILED_ITEMS = 50
MAX_ERROR_KINDS = 20
MAX_TEXT = 300
RATE_CHART_SHARE, RATE_CHART_HEADROOM = 0.95, 1.5
"""The rate chart shows up to 1.5 times the 95th percentile."""
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--page:#fff;--alt:#f6f8fa;--bar:#3867b5}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9da7b3;--line:#3d444d;--page:#0d1117;--alt:#161b22;
--bar:#6ea0f5}}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1280px;margin:2em auto;
padding:0 1em}
h1{font-size:1.5em;margin:0}h2{font-size:1.15em;margin:2em 0 .5em}p{margin:.4em 0}.soft{color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.2em .5em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;vertical-align:bottom;white-space:normal}tbody tr:nth-child(odd){background:var(--alt)}
.left{text-align:left}td.name{font-weight:600;overflow-wrap:anywhere}
.meter{display:inline-block;width:6em;height:.8em;border:1px solid var(--line);vertical-align:middle}
.meter i{display:block;height:100%;background:var(--bar)}
.key{display:inline-block;width:.9em;height:.9em;border:1px solid var(--soft);vertical-align:middle}
svg{width:100%;height:auto}svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .axis{stroke:var(--line)}svg .band{stroke:var(--page);stroke-width:.5}svg .line{fill:none;stroke-width:2}
svg .mark{font-weight:600;paint-order:stroke;stroke:var(--page);stroke-width:3px}dt{font-weight:600;margin-top:.6em}
dd{margin:0 0 0 1.2em}td.text{text-align:left;white-space:normal;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:.4em 2.5em}.facts div{min-width:8em}.facts b{display:block;font-size:1.25em}
"""


@dataclass(frozen=True, slots=True)
class _Words:
    """Words of the kind of run."""

    item: str
    stage: str
    settings: SettingNames

    @property
    def items(self) -> str:
        return f"{self.item}s"

    @property
    def stages(self) -> str:
        return f"{self.stage}s"


def html_report(history: RunHistory, groups: Sequence[StageGroup] | None = None) -> str:
    """The whole page. `groups` are the stages, or operators, to show; by default those that the run folder lists."""
    names = setting_names(history)
    words = _Words("row", "operator", names) if names is RECIPE_SETTINGS else _Words("item", "stage", names)
    summary = summarize_run(history)
    usages = stage_usages(history, recorded_groups(history) if groups is None else groups)
    requested = requested_resources(history)
    verdicts = judge_stages(history, summary, usages, requested, names)
    body = "\n".join(
        [
            *_headline(history, summary, words),
            *_plan_and_rate(history, summary, words),
            *_stage_table(summary, usages, verdicts, requested, words),
            *_changes(usages, verdicts),
            *_usage_charts(history, usages, words),
            *_failed_items(history, summary, words),
            *_glossary(words),
        ]
    )
    title = f"{summary.name or summary.id}: {summary.status}"
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    text = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
    return text.encode("utf-8", "backslashreplace").decode()


# --- headline, plan and rate


def _headline(history: RunHistory, summary: RunSummary, words: _Words) -> Iterator[str]:
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(number_field(history.header, "started")))
    clock = " of simulated time" if summary.virtual else ""
    dropped = f", {summary.dropped:,} dropped" if summary.dropped else ""
    yield f"<h1>{escape(summary.name or summary.id)}</h1>"
    yield (
        f"<p>{escape(summary.status)} after {format_duration(summary.seconds)}{clock} · started {started} · "
        f"{summary.read:,} {words.items} in, {summary.delivered:,} out{dropped}, {summary.failed:,} failed</p>"
    )
    command = str(history.header.get("what") or "")
    facts = [command, f"{summary.engine} on {summary.cluster}", f"run {summary.id}"]
    yield f'<p class="soft">{" · ".join(escape(fact) for fact in facts if fact)}</p>'
    if summary.error:
        yield f"<p><strong>{escape(summary.error[:500])}</strong></p>"


def _plan_and_rate(history: RunHistory, summary: RunSummary, words: _Words) -> Iterator[str]:
    yield '<h2>Plan and rate</h2>\n<div class="facts">'
    facts = [("planned", _planned_text(summary)), ("reached", format_rate(summary.reached or None))]
    if summary.expected and summary.reached:
        facts.append(("reached of planned", format_percent(summary.reached / summary.expected)))
    facts.append(("mean over the whole run", format_rate(summary.mean_rate or None)))
    limits = [(unit.bottleneck, unit.name) for unit in summary.units] + [(summary.source_limited, "the source")]
    share, name = max(limits)
    if share:
        facts.append(("bottleneck", f"{short_unit_name(name)}, {format_percent(share)} of the time"))
    facts.append(("replans", str(summary.replans)))
    for label, value in facts:
        yield f'<div><span class="soft">{escape(label)}</span><b>{escape(value)}</b></div>'
    yield "</div>"
    ends = [after.t for before, after in zip(history.ticks, history.ticks[1:], strict=False) if after.t > before.t]
    points = list(zip(ends, summary.rates, strict=False))
    if not points:
        return
    lines = [Line("rate", f"{words.items} per second", _colour(0, 2), points)]
    if summary.expected:
        last = points[-1][0]
        title = f"planned: {format_rate(summary.expected)}"
        lines.append(Line("planned", title, _colour(1, 2), [(0.0, summary.expected), (last, summary.expected)]))
    peak = max(rate for _, rate in points)
    # one short interval, such as the end of a wave, must not flatten the rest
    usual = sorted(rate for _, rate in points)[int(RATE_CHART_SHARE * (len(points) - 1))]
    top = min(peak, max(RATE_CHART_HEADROOM * usual, summary.expected)) or peak
    yield line_chart(f"{words.items} per second over time", lines, top, lambda rate: format_number(float(rate)))
    if top < peak:
        yield f'<p class="soft">The chart ends at {format_rate(top)}; the peak is {format_rate(peak)}.</p>'


def _planned_text(summary: RunSummary) -> str:
    if not summary.expected:
        return "unknown: no rate was given or measured before the run"
    source = {"measured": " (measured in earlier runs)", "given": " (rates as given)"}.get(summary.planned_from, "")
    return format_rate(summary.expected) + (source if summary.planned and not summary.virtual else " (by replans)")


# --- stages


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    style: str = ""


COLUMNS = (
    _Column("", "left"), _Column("{stage}", "left name"), _Column("{items} in"), _Column("out"), _Column("dropped"),
    _Column("failed"), _Column("{items}/s"), _Column("busy"), _Column("workers: most / planned"),
    _Column("CPUs per worker: used / requested"), _Column("memory per worker: peak / requested"), _Column("CPU time"),
    _Column("share of time"), _Column("verdict", "left"),
)  # fmt: skip


def _stage_table(
    summary: RunSummary,
    usages: Sequence[StageUsage],
    verdicts: Sequence[Verdict],
    requested: Mapping[str, RequestedResources],
    words: _Words,
) -> Iterator[str]:
    titles = [column.title.format(stage=words.stage, items=words.items) for column in COLUMNS]
    yield f"<h2>{escape(words.stages.capitalize())}</h2>"
    if not usages:
        yield "<p>No stage was recorded.</p>"
        return
    yield f'<div class="wide"><table>\n<thead><tr>{_row("th", titles)}</tr></thead>\n<tbody>'
    units = {unit.name: unit for unit in summary.units}
    total = sum(usage.counts.seconds for usage in usages)
    for place, (usage, verdict) in enumerate(zip(usages, verdicts, strict=True)):
        unit = units.get(usage.units[-1]) if usage.units else None
        request = requested.get(usage.units[-1]) if usage.units else None
        share = usage.counts.seconds / total if total else 0.0
        cells = [
            f'<span class="key" style="background:{_colour(place, len(usages))}"></span> {place + 1}',
            escape(usage.name),
            *_count_cells(usage),
            *_worker_cells(usage, unit, request),
            format_duration(usage.cpu_s) + ("" if usage.measured else " *"),
            f'<span class="meter" aria-hidden="true"><i style="width:{100 * share:.1f}%"></i></span> '
            f"{format_percent(share)}",
            f'<span title="{escape(verdict.why)}">{escape(verdict.kind)}</span>',
        ]
        yield f"<tr>{_row('td', cells)}</tr>"
    yield "</tbody></table></div>"
    shared = f" {words.stages.capitalize()} in the same workers share busy, workers, CPUs and memory."
    yield (
        f'<p class="soft">{words.items.capitalize()} per second from the first to the last; share of the time that all '
        f"{words.stages} spent in their code.{shared if any(usage.shared_with for usage in usages) else ''}</p>"
    )
    if not all(usage.measured for usage in usages):
        yield '<p class="soft">* The run was too short to measure processes: time in its code instead.</p>'


def _row(tag: str, cells: Sequence[str]) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    found = []
    for column, cell in zip(COLUMNS, cells, strict=True):
        style = f' class="{column.style}"' if column.style else ""
        found.append(f"<{tag}{scope}{style}>{cell if tag == 'td' else escape(cell)}</{tag}>")
    return "".join(found)


def _count_cells(usage: StageUsage) -> list[str]:
    counts = usage.counts
    numbers = (counts.items_in, counts.items_out, counts.dropped, counts.failed)
    return [*(f"{number:,}" for number in numbers), format_number(float(usage.rate))]


def _worker_cells(usage: StageUsage, unit: UnitSummary | None, request: RequestedResources | None) -> list[str]:
    busy = None if unit is None or unit.busy is None else min(1.0, unit.busy)
    used = None if unit is None else unit.cpus
    planned, cpus, memory = (
        (0, "-", 0) if request is None else (request.workers, f"{request.cpus:g}", request.memory_bytes)
    )
    return [
        format_percent(busy),
        f"{usage.workers} / {planned or '-'}",
        f"{'-' if used is None else f'{used:.2f}'} / {cpus}",
        f"{_size_text(usage.peak_bytes)} / {_size_text(memory)}",
    ]


def _size_text(size: int | None) -> str:
    return format_size(size) if size else "-"


def _colour(place: int, count: int) -> str:
    """Hues far apart for neighbours; lightness alternates, so that they differ in grey as well."""
    return f"hsl({place * 137 % 360},55%,{(42, 62, 52)[place % 3 if count > 1 else 0]}%)"


def _changes(usages: Sequence[StageUsage], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Stages that share workers, and so their settings, share an entry."""
    groups: dict[tuple[tuple[str, ...], Verdict], list[str]] = {}
    for usage, verdict in zip(usages, verdicts, strict=True):
        groups.setdefault((usage.units, verdict), []).append(usage.name)
    if not groups:
        return
    yield "<h2>What to change</h2>\n<ul>"
    for (_, verdict), names in groups.items():
        text = f"{verdict.kind} ({verdict.why}). Change: {verdict.change or 'none'}."
        yield f"<li><strong>{escape(', '.join(names))}</strong>: {escape(text)}</li>"
    yield "</ul>"


# --- charts


def _usage_charts(history: RunHistory, usages: Sequence[StageUsage], words: _Words) -> Iterator[str]:
    if not any(usage.times for usage in usages):
        return
    bands = [
        Band(str(place + 1), usage.name, _colour(place, len(usages)),
             [(t, cpu_s / length_s) for t, length_s, cpu_s, _ in usage.times])
        for place, usage in enumerate(usages)
    ]  # fmt: skip
    yield "<h2>CPUs over time</h2>"
    yield stacked_area_chart(f"CPUs used by the workers of each {words.stage}", bands, lambda cpus: f"{cpus:g}")
    memory, unit = _memory_bands(history, usages)
    if memory:
        yield "<h2>Memory over time</h2>"
        yield stacked_area_chart("memory of workers", memory, lambda size: f"{size:g} {unit}")
        if any(usage.shared_with for usage in usages):
            yield f'<p class="soft">{words.stages.capitalize()} that share workers are one band.</p>'
    cards = list(_card_lines(history))
    if cards:
        yield "<h2>GPUs over time</h2>"
        yield line_chart("utilisation of each GPU", cards, 100.0, lambda use: f"{use:.0f} %")


def _memory_bands(history: RunHistory, usages: Sequence[StageUsage]) -> tuple[list[Band], str]:
    """One band per unit, and the unit of measurement."""
    found = []
    most = max((one[3] or 0 for usage in usages for one in usage.times), default=0)
    unit, size = ("GB", 1 << 30) if most >= 1 << 30 else ("MB", 1 << 20)
    for name in dict.fromkeys(unit for usage in usages for unit in usage.units):
        members = [(place, one) for place, one in enumerate(usages) if name in one.units]
        slices = unit_timeline(history, name).slices
        values = [(one.t, (one.memory_bytes or 0) / size * bool(one.workers)) for one in slices]
        if any(value for _, value in values):
            label = _band_label([place + 1 for place, _ in members])
            names = ", ".join(usage.name for _, usage in members)
            found.append(Band(label, names, _colour(members[0][0], len(usages)), values))
    return found, unit


def _band_label(numbers: Sequence[int]) -> str:
    """1-4 for neighbours, else the first and how many more."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    return f"{first}-{last}" if last - first == len(numbers) - 1 else f"{first} and {len(numbers) - 1} more"


def _card_lines(history: RunHistory) -> Iterator[Line]:
    for place, ((node, card), uses) in enumerate(sorted(history.gpu_uses.items())):
        values = [(number_field(use, "t"), number_field(use, "use_percent")) for use in uses if "use_percent" in use]
        if values:
            name = f"{node} GPU {card}" if node else f"GPU {card}"
            power = [number_field(use, "power_w") for use in uses if "power_w" in use]
            memory = [number_field(use, "memory_used_bytes") for use in uses if "memory_used_bytes" in use]
            more = f", up to {format_size(round(max(memory)))}" if memory else ""
            more += f", {sum(power) / len(power):.0f} W on average" if power else ""
            mean = sum(value for _, value in values) / len(values)
            yield Line(name, f"{name}: {mean:.0f} % on average{more}", _colour(place, 2), values)


# --- failed items


def _failed_items(history: RunHistory, summary: RunSummary, words: _Words) -> Iterator[str]:
    failures = history.failures()
    if not failures:
        return
    yield f"<h2>Failed {words.items}</h2>"
    yield "<ul>"
    for group in group_failures(failures)[:MAX_ERROR_KINDS]:
        yield f"<li>{len(group):,} x <strong>{escape(group[0].text)}</strong> in {escape(group[0].stage)}</li>"
    yield "</ul>"
    shown = failures[:MAX_FAILED_ITEMS]
    if len(failures) < summary.failed or len(shown) < len(failures):
        total = max(summary.failed, len(failures))
        yield f'<p class="soft">The first {len(shown)} of {format_count(total, words.item)}.</p>'
    titles = (words.item, words.stage, "error", "attempts")
    heads = "".join(f'<th scope="col" class="left">{escape(title)}</th>' for title in titles)
    yield f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>'
    for failure in shown:
        cells = (failure.place, failure.stage, failure.text, failure.attempts)
        yield "<tr>" + "".join(f'<td class="text">{escape(str(cell))}</td>' for cell in cells) + "</tr>"
    yield "</tbody></table></div>"


# --- glossary


def _glossary(words: _Words) -> Iterator[str]:
    names = words.settings
    entries = (
        ("busy", "share of the workers' time that was spent in the code."),
        ("under-utilised", f"GPUs, or workers, busy less than 50 % of the time. With GPUs: a larger {names.workers} or "
         f"{names.batch_size}, or a smaller {names.cpus}. Without: a smaller {names.workers} reaches the same rate."),
        ("over-utilised", f"workers ran out of memory, or nearly: a smaller {names.workers}, or a larger {names.gpus} "
         f"or {names.memory}."),
        ("CPU-bottlenecked", f"GPUs wait for the CPUs of their workers, or the run waits for this {words.stage}: a "
         f"larger {names.cpus} or {names.workers}, or a smaller {names.workers} for other {words.stages}."),
        ("short of CPUs", "workers are busy but use little CPU: they wait for disks or the network, or other programs "
         "use the CPUs."),
    )  # fmt: skip
    yield "<h2>Terms</h2>\n<dl>"
    for name, text in entries:
        yield f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
    yield "</dl>"
