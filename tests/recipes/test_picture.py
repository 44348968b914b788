"""Is the picture of a run one small file that needs nothing, runs nothing, and can be read without colours?"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from dovetail.observe.charts import Band, downsample, line_chart, stacked_area_chart
from dovetail.observe.charts import Line as Drawn
from dovetail.observe.history import RunHistory
from dovetail.observe.html_report import html_report
from dovetail.observe.monitor import operator_usages, write_monitor
from recipes.made_runs import Made, long_run
from recipes.watched import Long, Lower, rows, run, stage

if TYPE_CHECKING:
    from pathlib import Path

NASTY = "<script>alert('\"1\"')</script>&amp;"
WITHOUT_END = {"meta", "br"}


class Page(HTMLParser):
    """Which tags there are, with what; complains about those that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in WITHOUT_END:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def drawn(folder: Path, stages: list[tuple[str, str]]) -> str:
    history = RunHistory.load(folder)
    return html_report(history, operator_usages(history, stages))


def nothing_from_elsewhere(page: Page, text: str) -> None:
    assert {"script", "link", "iframe", "img", "object", "embed", "base"}.isdisjoint(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "xlink:href") or name.startswith("on")]
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_a_real_run_becomes_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    out = run(stage("lower", Lower()), stage("long", Long()), source=rows(300), folder=tmp_path / "run")
    write_monitor(str(tmp_path / "run"), [("lower", "lower"), ("long", "long")], str(tmp_path / "monitor"))
    text = (tmp_path / "monitor" / "monitor.html").read_text()
    page = Page(text)
    nothing_from_elsewhere(page, text)
    assert f"300 rows in, {len(out)} out" in page.text
    assert page.text.count("long") >= 2
    assert f"{300 - len(out)}" in page.text
    assert "prefers-color-scheme:dark" in text


def test_ten_minutes_of_twenty_operators_stay_small_and_whole(tmp_path: Path) -> None:
    stages = long_run(tmp_path / "run")
    text = drawn(tmp_path / "run", stages)
    assert len(text.encode()) < 300_000
    page = Page(text)
    nothing_from_elsewhere(page, text)
    assert page.tags.count("svg") == 3 + 2  # CPUs, memory, GPUs, and the legend of two cards
    assert text.count('class="band"') == 20 + 5
    assert "10 min 00 s" in page.text


@pytest.mark.parametrize("name", [NASTY, "a" * 300, "\ud800", "\u05d0\u05d1 \U0001f600", "-->", "]]>"])
def test_whatever_users_call_things_is_shown_and_never_run(tmp_path: Path, name: str) -> None:
    made = Made(tmp_path / "run", ["a"], name=name)
    for t in range(10):
        made.view(float(t), rows=t)
        if t % 5 == 0:
            made.uses(float(t))
        made.end()
    made.write(error=name, cluster=name, engine=name)
    history = RunHistory.load(tmp_path / "run")
    text = html_report(history, operator_usages(history, [(name, "a")]))
    page = Page(text)
    nothing_from_elsewhere(page, text)
    assert name.encode("utf-8", "backslashreplace").decode() in page.text
    assert text.encode()


def test_every_chart_and_every_band_has_a_title_and_a_number(tmp_path: Path) -> None:
    stages = long_run(tmp_path / "run", operators=4)
    text = drawn(tmp_path / "run", stages)
    charts = re.findall(r'<svg [^>]*role="img".*?</svg>', text, re.DOTALL)
    assert len(charts) == 3
    for chart in charts:
        tree = ET.fromstring(chart)
        assert tree.get("aria-label")
        assert (tree.findtext("title") or "").strip()
        for shape in [*tree.iter("polygon"), *tree.iter("polyline")]:
            assert (shape.findtext("title") or "").strip()
    marks = re.findall(r'<text class="mark"[^>]*>([^<]*)</text>', charts[0])
    assert marks == ["1", "2", "3", "4"]
    assert '<text class="mark"' in charts[1]
    assert ">1-4</text>" in charts[1]


def test_a_run_that_failed_before_it_began_can_still_be_looked_at(tmp_path: Path) -> None:
    Made(tmp_path / "run", []).write(status="failed", error="no node has a GPU")
    page = Page(drawn(tmp_path / "run", [("a", "a")]))
    assert "no node has a GPU" in page.text
    assert "did not run" in page.text


def test_thinning_keeps_the_end_and_the_mean() -> None:
    values = [(float(t), float(t % 7)) for t in range(1000)]
    thin = downsample(values, 100)
    assert len(thin) == 100
    assert thin[-1][0] == 999.0
    assert sum(value for _, value in thin) / 100 == pytest.approx(sum(value for _, value in values) / 1000)
    assert downsample(values[:5]) == values[:5]


@pytest.mark.parametrize("values", [[], [(0.0, 0.0)], [(0.0, 1e-12)], [(1e6, 1e15)], [(0.0, 1.0), (0.0, 2.0)]])
def test_odd_figures_are_drawn_without_complaint(values: list[tuple[float, float]]) -> None:
    text = stacked_area_chart("odd", [Band("1", "a", "red", values)], str) + line_chart(
        "odd", [Drawn("a", "a", "red", values)], 1, str
    )
    assert "nan" not in text.lower()
    assert "inf" not in text.lower()
    Page(text)
