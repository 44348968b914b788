"""HTML report: one small file that loads and runs nothing and is readable without colours."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.observe.charts import Band, downsample, line_chart, stacked_area_chart
from dovetail.observe.charts import Line as Drawn
from dovetail.observe.history import RunHistory
from dovetail.observe.html_report import html_report
from observe.made_runs import GB, RecordedRun, long_run, shape
from recipes.traced_operators import Long, Lower, rows, run, stage

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


def drawn(folder: Path) -> str:
    return html_report(RunHistory.load(folder))


def nothing_from_elsewhere(page: Page, text: str) -> None:
    assert {"script", "link", "iframe", "img", "object", "embed", "base"}.isdisjoint(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "xlink:href") or name.startswith("on")]
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_a_real_run_becomes_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    out = run(stage("lower", Lower()), stage("long", Long()), source=rows(300), folder=tmp_path / "run")
    text = drawn(tmp_path / "run")
    page = Page(text)
    nothing_from_elsewhere(page, text)
    assert f"300 items in, {len(out)} out" in page.text
    assert page.text.count("long") >= 2
    assert f"{300 - len(out)}" in page.text
    assert "prefers-color-scheme:dark" in text


def test_ten_minutes_of_twenty_operators_stay_small_and_whole(tmp_path: Path) -> None:
    long_run(tmp_path / "run")
    text = drawn(tmp_path / "run")
    assert len(text.encode()) < 300_000
    page = Page(text)
    nothing_from_elsewhere(page, text)
    assert page.tags.count("svg") == 4 + 1 + 2  # rate, CPUs, memory, GPUs; the legend of one rate and of two cards
    assert text.count('class="band"') == 20 + 5
    assert "10 min 00 s" in page.text


@pytest.mark.parametrize("name", [NASTY, "a" * 300, "\ud800", "\u05d0\u05d1 \U0001f600", "-->", "]]>"])
def test_whatever_users_call_things_is_shown_and_never_run(tmp_path: Path, name: str) -> None:
    made = RecordedRun(tmp_path / "run", ["a"], name=name)
    for t in range(10):
        made.view(float(t), rows=t)
        if t % 5 == 0:
            made.uses(float(t))
        made.end()
    made.write(error=name, cluster=name, engine=name)
    text = html_report(RunHistory.load(tmp_path / "run"), [(name, ("a",))])
    page = Page(text)
    nothing_from_elsewhere(page, text)
    assert name.encode("utf-8", "backslashreplace").decode() in page.text
    assert text.encode()


def test_every_chart_and_every_band_has_a_title_and_a_number(tmp_path: Path) -> None:
    long_run(tmp_path / "run", operators=4)
    text = drawn(tmp_path / "run")
    charts = re.findall(r'<svg [^>]*role="img".*?</svg>', text, re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        tree = ET.fromstring(chart)
        assert tree.get("aria-label")
        assert (tree.findtext("title") or "").strip()
        for drawing in [*tree.iter("polygon"), *tree.iter("polyline")]:
            assert (drawing.findtext("title") or "").strip()
    marks = re.findall(r'<text class="mark"[^>]*>([^<]*)</text>', charts[1])
    assert marks == ["1", "2", "3", "4"]
    assert '<text class="mark"' in charts[2]
    assert ">1-4</text>" in charts[2]


def test_a_run_that_failed_before_it_began_can_still_be_looked_at(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "run", []).write(status="failed", error="no node has a GPU")
    page = Page(html_report(RunHistory.load(tmp_path / "run"), [("a", ("a",))]))
    assert "no node has a GPU" in page.text
    assert "did not run" in page.text


def test_failed_items_are_counted_by_error_and_listed(tmp_path: Path) -> None:
    made = RecordedRun(tmp_path / "run", ["a+b"])
    failed: Any = {"a+b": {"failed_total": 6}}
    made.view(1.0, rows=94, **failed)
    made.end(failed=6)
    made.write()
    entry = {"unit": "a+b", "stage": "b", "error": "ValueError", "message": f"{NASTY} in row", "attempts": 1}
    lines = [json.dumps(entry | {"key": [number]}) for number in range(6)]
    (tmp_path / "run" / "errors").mkdir()
    (tmp_path / "run" / "errors" / "errors.jsonl").write_text("\n".join(lines) + "\n")
    text = drawn(tmp_path / "run")
    page = Page(text)
    nothing_from_elsewhere(page, text)
    assert f"6 x ValueError: {NASTY} in row in b" in page.text
    assert page.text.count(f"ValueError: {NASTY} in row") == 7


def test_plan_and_reached_rate_are_compared(tmp_path: Path) -> None:
    made = RecordedRun(tmp_path / "run", ["a"])
    unit = {"name": "a", "shape": shape(cpus=2, memory_bytes=GB), "workers": 3, "rate_source": "measured"}
    made.plan = [unit]
    for t in range(21):
        made.view(float(t), rows=50 * t)
        made.end(finished=50 * t)
    folder = made.write()
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text()) | {"rate": 100.0}
    (folder / "plan.json").write_text(json.dumps(plan))
    page = Page(drawn(folder))
    assert "100/s (measured in earlier runs)" in page.text
    assert "reached of planned50 %" in page.text
    assert "planned: 100/s" in page.text


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
