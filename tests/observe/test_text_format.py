"""Text of tables and lines: alignment, and lines that fit the width of the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.observe.history import RunHistory
from dovetail.observe.summary import summarize_run
from dovetail.observe.summary_text import result_lines
from dovetail.observe.terminal import terminal_width
from dovetail.text_format import (
    MIN_CUT_CHARS,
    cut_text,
    fit_table,
    format_count,
    format_number,
    format_rate,
    terminal_text,
    wrap_labelled,
)
from observe.made import recorded

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.observe.summary import RunSummary


def test_the_cut_column_of_a_table_is_shortened_until_the_table_fits() -> None:
    rows = [("stage", "workers", "in"), ("a_long_name", "12", "1000")]
    assert fit_table(rows, 80) == ["stage        workers    in", "a_long_name       12  1000"]
    assert fit_table(rows, 24) == ["stage      workers    in", "a_long_n…       12  1000"]
    assert fit_table(rows, 5)[1].startswith("a_long_…")


@given(st.lists(st.text("abc", max_size=30), min_size=1, max_size=4), st.integers(MIN_CUT_CHARS + 12, 60))
def test_a_table_never_exceeds_its_width(names: list[str], width: int) -> None:
    lines = fit_table([("stage", "in", "out"), *((name, "1", "2") for name in names)], width)
    assert max(map(len, lines)) <= width


def test_labelled_lines_are_wrapped_below_their_label() -> None:
    line = "bottleneck  a 60 % of the time, b 30 % of the time"
    assert wrap_labelled(line, 40) == ["bottleneck  a 60 % of the time, b 30 %", "            of the time"]
    assert cut_text("abcdef", 4) == "abc…"


@pytest.fixture
def summary(tmp_path: Path) -> RunSummary:
    found = summarize_run(RunHistory.load(recorded(tmp_path / "r")))
    first = replace(found.units[0], name="a_rather_long_name_of_a_stage", lost=3, cpus=3.14, peak_bytes=123 << 20)
    advice = ("stage a uses 3.1 CPUs per worker and requests 1: Resources(cpus=3)", "word " * 40)
    return replace(found, units=(first, *found.units[1:]), advice=advice)


@pytest.mark.parametrize("width", [80, 100])
def test_a_summary_fits_the_terminal(width: int, summary: RunSummary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert terminal_width() == width
    lines = result_lines(summary)
    assert max(map(len, lines)) <= width
    assert any(line.startswith("a_rather") for line in lines)


def test_text_for_a_terminal_keeps_lines_and_escapes_what_it_would_obey() -> None:
    plain = "a\tb\nü 日本 ✓\n"
    assert terminal_text(plain) is plain
    assert terminal_text("\x1b[2J\x07\x9b\x7f\x00") == "\\x1b[2J\\x07\\x9b\\x7f\\x00"
    assert terminal_text("10 %\r20 %\r\nend") == "10 %\n20 %\nend"
    assert terminal_text("a\u202eb\u2028") == "a\\u202eb\\u2028"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (7, "7"),
        (0.3333, "0.333"),
        (12.34, "12.3"),
        (1554.4, "1554"),
        (95_670.0, "95.7k"),
        (834_000, "834k"),
        (1_234_567, "1.23M"),
        (24_684_100_000, "24.7G"),
        (float("nan"), "-"),
    ],
)
def test_numbers_have_three_digits_and_a_suffix(value: float, shown: str) -> None:
    assert format_number(value) == shown
    assert format_rate(value) == f"{shown}/s"


def test_counts_agree_with_their_nouns() -> None:
    assert [format_count(count, "error") for count in (0, 1, 2)] == ["0 errors", "1 error", "2 errors"]
    assert format_count(2, "child", "children") == "2 children"
