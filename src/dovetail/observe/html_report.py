"""HTML report of a run in one file: operator table, charts, and what to change."""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING

from dovetail.observe.charts import Band, Line, line_chart, stacked_area_chart
from dovetail.observe.cpu_attribution import unit_timeline
from dovetail.observe.run_folder import number_field
from dovetail.observe.text_format import format_duration, format_number, format_percent
from dovetail.observe.utilisation import Verdict, operator_verdicts
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.observe.history import RunHistory
    from dovetail.observe.monitor import OperatorUsage

COLUMNS = (
    "", "operator", "rows in", "rows out", "dropped", "set aside", "rows/s", "workers", "CPU time", "CPUs",
    "peak memory", "share of the time", "how it did",
)  # fmt: skip
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--page:#fff;--alt:#f6f8fa;--bar:#3867b5}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9da7b3;--line:#3d444d;--page:#0d1117;--alt:#161b22;
--bar:#6ea0f5}}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1280px;margin:2em auto;
padding:0 1em}
h1{font-size:1.5em;margin:0}h2{font-size:1.15em;margin:2em 0 .5em}p{margin:.4em 0}.soft{color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.2em .5em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;vertical-align:bottom}tbody tr:nth-child(odd){background:var(--alt)}
.left{text-align:left}td.name{font-weight:600;overflow-wrap:anywhere}
.meter{display:inline-block;width:6em;height:.8em;border:1px solid var(--line);vertical-align:middle}
.meter i{display:block;height:100%;background:var(--bar)}
.key{display:inline-block;width:.9em;height:.9em;border:1px solid var(--soft);vertical-align:middle}
svg{width:100%;height:auto}svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .axis{stroke:var(--line)}svg .band{stroke:var(--page);stroke-width:.5}svg .line{fill:none;stroke-width:2}
svg .mark{font-weight:600;paint-order:stroke;stroke:var(--page);stroke-width:3px}dt{font-weight:600;margin-top:.6em}
dd{margin:0 0 0 1.2em}
"""
VERDICT_HELP = (
    ("under-utilised", "below 50 % of a card's time, or of its workers' time: more workers (num_proc), a larger "
     "batch_size, fewer num_cpus; without a card, fewer workers would do as well."),
    ("over-utilised", "workers ran out of memory, or are about to: fewer workers (num_proc), a larger share of a card "
     "each (num_gpus), or a larger memory."),
    ("CPU-bottlenecked", "a card waits while its workers' CPUs are busy, or everything waits for this operator: more "
     "num_cpus per worker of it, more workers of it, fewer of other CPU operators."),
    ("short of CPUs", "its workers are in its code, and do not get the CPUs: it waits for disks or the network, or "
     "other processes take them."),
)  # fmt: skip


def html_report(history: RunHistory, operators: Sequence[OperatorUsage]) -> str:
    """The whole page. Names come from users and are escaped; nothing is loaded from anywhere, and nothing runs."""
    judged = operator_verdicts(history, operators)
    title = f"{history.name or 'recipe'}: {history.status()}"
    body = "\n".join(
        [
            *_page_header(history),
            *_table(operators, judged),
            *_charts(history, operators),
            *_advice(operators, judged),
        ]
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    text = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
    return text.encode("utf-8", "backslashreplace").decode()


def _page_header(history: RunHistory) -> Iterator[str]:
    run, header = history.run, history.header
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(number_field(header, "started")))
    yield f"<h1>{escape(history.name or 'recipe')}</h1>"
    yield (
        f"<p>{escape(history.status())} after {format_duration(history.seconds)} · began {started} · "
        f"{_count_text(run.get('read'))} rows in, {_count_text(run.get('delivered'))} out, "
        f"{_count_text(run.get('aside'))} set aside</p>"
    )
    yield (
        f'<p class="soft">{escape(str(header.get("engine", "")))} on {escape(str(header.get("cluster", "")))} · '
        f"run {escape(history.id)}</p>"
    )
    if header.get("error"):
        yield f"<p><strong>{escape(str(header['error'])[:500])}</strong></p>"


def _count_text(count: object) -> str:
    return f"{count:,}" if isinstance(count, int) else "0"


def _table(operators: Sequence[OperatorUsage], judged: Sequence[Verdict]) -> Iterator[str]:
    heads = "".join(
        f'<th scope="col"{_cell_class(place)}>{escape(column)}</th>' for place, column in enumerate(COLUMNS)
    )
    yield f'<h2>Operators</h2>\n<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>'
    total = sum(operator.seconds for operator in operators)
    for place, (operator, verdict) in enumerate(zip(operators, judged, strict=True)):
        share = operator.seconds / total if total else 0.0
        length = sum(length_s for _, length_s, _, _ in operator.times)
        cells = [
            f'<span class="key" style="background:{_colour(place, len(operators))}"></span> {place + 1}',
            escape(operator.name),
            *(_count_text(count) for count in (operator.rows_in, operator.rows_out, operator.dropped, operator.aside)),
            format_number(float(operator.rate)),
            str(operator.workers),
            format_duration(operator.cpu_s) + ("" if operator.measured else " *"),
            f"{operator.cpu_s / length:.2f}" if length else "-",
            "-" if operator.peak_bytes is None else format_size(operator.peak_bytes),
            f'<span class="meter" aria-hidden="true"><i style="width:{100 * share:.1f}%"></i></span> '
            f"{format_percent(share)}",
            f'<span title="{escape(verdict.why)}">{escape(verdict.kind)}</span>',
        ]
        yield "<tr>" + "".join(f"<td{_cell_class(column)}>{cell}</td>" for column, cell in enumerate(cells)) + "</tr>"
    yield "</tbody></table></div>"
    inside = ", with the other operators in it" if any(operator.shared_with for operator in operators) else ""
    yield (
        f'<p class="soft">Rows per second from the first row to the last; peak memory of one worker{inside}; share of '
        "the time that all operators together spent in their code.</p>"
    )
    if not all(operator.measured for operator in operators):
        yield '<p class="soft">* The run was too short to measure processes: seconds in its code instead.</p>'


def _cell_class(column: int) -> str:
    return {0: ' class="left"', 1: ' class="left name"', 12: ' class="left"'}.get(column, "")


def _colour(place: int, count: int) -> str:
    """Far from its neighbours; light and dark in turns, so that they differ in grey as well."""
    return f"hsl({place * 137 % 360},55%,{(42, 62, 52)[place % 3 if count > 1 else 0]}%)"


def _charts(history: RunHistory, operators: Sequence[OperatorUsage]) -> Iterator[str]:
    bands = [
        Band(str(place + 1), operator.name, _colour(place, len(operators)),
             [(t, cpu_s / length_s) for t, length_s, cpu_s, _ in operator.times])
        for place, operator in enumerate(operators)
    ]  # fmt: skip
    yield "<h2>CPUs over time</h2>"
    yield stacked_area_chart(
        "CPUs that the workers of each operator used, one above the other", bands, lambda cpus: f"{cpus:g}"
    )
    memory, unit = _memory_bands(history, operators)
    if memory:
        yield "<h2>Memory over time</h2>"
        yield stacked_area_chart("memory of workers, one above the other", memory, lambda size: f"{size:g} {unit}")
        if any(operator.shared_with for operator in operators):
            yield '<p class="soft">Operators that share workers share their memory: they are one band.</p>'
    cards = list(_card_lines(history))
    if cards:
        yield "<h2>GPUs over time</h2>"
        yield line_chart(
            "share of the time in which something ran on each card", cards, 100.0, lambda use: f"{use:.0f} %"
        )


def _memory_bands(history: RunHistory, operators: Sequence[OperatorUsage]) -> tuple[list[Band], str]:
    """One band per unit, and what they are measured in."""
    found = []
    most = max((one[3] or 0 for operator in operators for one in operator.times), default=0)
    unit, size = ("GB", 1 << 30) if most >= 1 << 30 else ("MB", 1 << 20)
    for name in dict.fromkeys(unit for operator in operators for unit in operator.units):
        inside = [(place, one) for place, one in enumerate(operators) if name in one.units]
        slices = unit_timeline(history, name).slices
        values = [(one.t, (one.memory_bytes or 0) / size * bool(one.workers)) for one in slices]
        if any(value for _, value in values):
            label = _band_label([place + 1 for place, _ in inside])
            names = ", ".join(operator.name for _, operator in inside)
            found.append(Band(label, names, _colour(inside[0][0], len(operators)), values))
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


def _advice(operators: Sequence[OperatorUsage], judged: Sequence[Verdict]) -> Iterator[str]:
    """Operators that share workers, and so what is to be changed, are told together."""
    changes: dict[tuple[tuple[str, ...], Verdict], list[str]] = {}
    for operator, verdict in zip(operators, judged, strict=True):
        changes.setdefault((operator.units, verdict), []).append(operator.name)
    yield "<h2>What to change</h2>\n<ul>"
    for (_, verdict), names in changes.items():
        what = verdict.change or "nothing"
        told = f"{verdict.kind}, {verdict.why}. To change: {what}."
        yield f"<li><strong>{escape(', '.join(names))}</strong>: {escape(told)}</li>"
    yield "</ul>\n<h2>How to read it</h2>\n<dl>"
    for name, text in VERDICT_HELP:
        yield f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
    yield "</dl>"
