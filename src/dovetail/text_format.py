"""Numbers, durations, rates and tables as people read them; for sizes in bytes see `resources/sizes.py`."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Paint = Callable[[str, str], str]
"""Colours a text; the second argument is good, bad, warning, strong or dim."""

BARS = "▁▂▃▄▅▆▇█"
DEFAULT_WIDTH = 80
LABEL_WIDTH = 12
MIN_CUT_CHARS = 8
"""A column that is cut keeps at least this many characters."""


def printable(text: str) -> str:
    """The text on one line, with characters that a terminal would obey written as escapes."""
    return escape_controls(" ".join(text.split()))


def escape_controls(line: str) -> str:
    """A line with characters that a terminal would obey written as escapes; spaces stay."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tabs and newlines, and those that change the direction of text."""


def terminal_text(text: str) -> str:
    """Text for a terminal: characters that it would obey are written as escapes. Lines and tabs stay, and a carriage
    return, with which progress bars go back to the start of a line, begins a new line."""
    if not _CONTROLS.search(text):
        return text
    return _CONTROLS.sub(_escaped, text.replace("\r\n", "\n").replace("\r", "\n"))


def _escaped(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1] if not found[0].isprintable() else f"\\u{ord(found[0]):04x}"


def format_duration(seconds: float) -> str:
    """'0.8 s', '42 s', '3 min 20 s', '5 h 03 min', '2 d 4 h'."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_number(value: float) -> str:
    """Three digits with a suffix: '7', '12.3', '45.6k', '1.2M'."""
    if not math.isfinite(value):
        return "-"
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{_three_digits(value / unit)}{letter}"
    return f"{value:.0f}" if abs(value) >= 1000 or isinstance(value, int) else _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


def format_rate(value: float | None) -> str:
    return "-" if value is None else f"{format_number(float(value))}/s"


def format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def format_count(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def plain(text: str, style: str) -> str:  # noqa: ARG001 - the signature of a `Paint`
    """A `Paint` without colours."""
    return text


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """One bar per value, scaled to the maximum; more values than the width are averaged."""
    if not values:
        return ""
    count = min(width, len(values))
    cut = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in cut]
    top = max(means)
    if not math.isfinite(top) or top <= 0:
        return BARS[0] * count
    return "".join(BARS[min(len(BARS) - 1, max(0, math.ceil(mean / top * len(BARS)) - 1))] for mean in means)


def cut_text(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def cut_path(path: str, width: int) -> str:
    """A path that is cut at its start, so that the name of the file stays."""
    return path if len(path) <= width else f"…{path[len(path) - max(1, width - 1) :]}"


def wrap_labelled(line: str, width: int, label_width: int = LABEL_WIDTH) -> list[str]:
    """A line that begins with a label of `label_width` characters, wrapped between words and indented below it."""
    return textwrap.wrap(
        line, width, subsequent_indent=" " * label_width, break_long_words=False, break_on_hyphens=False
    )


def fit_table(rows: Sequence[Sequence[str]], width: int, *, left: int = 1, cut: int | Sequence[int] = 0) -> list[str]:
    """Aligned columns that fit the width: cells of the columns `cut` are shortened, of the first one first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    for column in [cut] if isinstance(cut, int) else cut:
        least = max(min(MIN_CUT_CHARS, widths[column]), len(rows[0][column]))
        saved = min(max(0, excess), max(0, widths[column] - least))
        widths[column] -= saved
        excess -= saved
    return align_table([tuple(map(cut_text, row, widths)) for row in rows], left)


def align_table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Aligned columns; the first `left` left-aligned, the others, which are numbers, right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A small table for notebooks: a title in bold and rows of cells. All texts are escaped."""
    import html  # only notebooks need it

    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div><b>{html.escape(title)}</b><table><tr>{head}</tr>{body}</table></div>"
