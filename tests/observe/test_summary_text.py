"""Summary of a run: five lines at its end, predictions only from known speeds, rates of constant and resumed runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.observe.history import RunHistory, ViewRecord
from dovetail.observe.run_folder import RunFolder
from dovetail.observe.summary import summarize_run
from dovetail.observe.summary_text import result_lines, short_summary
from dovetail.text_format import sparkline
from observe.made import recorded

if TYPE_CHECKING:
    from dovetail.observe.summary import RunSummary

WALL = 1_800_000_000.0
RUN_ID = "20260101-000000-aaaa-video"


def plan_file(*sources: str, rate: float = 12.5) -> str:
    return json.dumps({"rate": rate, "units": [{"rate_source": source} for source in sources]})


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "runs" / RUN_ID


def summary_of(path: Path, *sources: str) -> RunSummary:
    return summarize_run(RunHistory.load(recorded(path, plan=plan_file(*sources))), WALL)


# --- five lines


def test_a_run_ends_with_five_lines_what_counts_rate_limit_and_next_step(path: Path) -> None:
    lines = short_summary(summary_of(path, "measured", "given")).lines()
    assert lines == [
        "video: finished after 1 min 50 s",
        "  1000 of 1000 items in, 999 out, 1 failed",
        "rate        10/s, 80 % of the 12.5/s predicted from earlier runs",
        "limit       a 92 % of the time, b 8 % of the time",
        f"next        dovetail errors {RUN_ID}",
    ]


def test_the_string_of_a_summary_is_the_five_lines_and_its_repr_is_one(path: Path) -> None:
    summary = summary_of(path, "given")
    assert str(summary) == "\n".join(short_summary(summary).lines())
    outcome = "finished after 1 min 50 s, 1000 of 1000 items in, 999 out, 1 failed"
    assert repr(summary) == f"<RunSummary {RUN_ID}: {outcome}>"
    assert summary.details() == "\n".join(result_lines(summary))


def test_the_text_of_a_summary_has_no_control_characters_of_data(path: Path) -> None:
    summary = replace(summary_of(path, "given"), status="failed", error="ValueError: \x1b[2J")
    assert "ValueError: \\x1b[2J" in summary.details()
    assert "\x1b" not in f"{summary}{summary.details()}"


def test_a_finished_run_without_failures_offers_its_details(path: Path) -> None:
    summary = replace(summary_of(path, "given"), failed=0)
    assert short_summary(summary).next == f"dovetail status {RUN_ID}"
    advice = ("stage a uses 3.1 CPUs per worker and requests 1: Resources(cpus=3)", "another change")
    assert short_summary(replace(summary, advice=advice)).next == advice[0]
    assert short_summary(replace(summary, advice=advice, failed=1)).next == f"dovetail errors {RUN_ID}"


@pytest.mark.parametrize("status", ["failed", "drained", "cancelled", "lost"])
def test_a_run_that_can_be_resumed_offers_the_command(status: str, path: Path) -> None:
    summary = replace(summary_of(path), status=status, outputs=("/data/out.jsonl",))
    (path / "commit.log").write_text('{"begin": 1}\n')
    header = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(header | {"more": {"asked": {}}}))
    lines = short_summary(summary).lines()
    assert lines[0] == f"video: {status} after 1 min 50 s, finished work is kept"
    assert lines[-1] == f"next        dovetail run --resume {RUN_ID}"
    (path / "run.json").write_text(json.dumps(header))
    assert short_summary(summary).next == f'dt.run(..., resume="{RUN_ID}") with the same arguments'


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_five_lines_fit_the_width_and_only_the_command_is_never_cut(width: int, path: Path) -> None:
    found = summary_of(path, "measured")
    units = tuple(replace(unit, name="a_rather_long_name_of_a_stage" * 2) for unit in found.units)
    summary = replace(found, units=units, outputs=("/a/long/path/to/a/folder/of/results/that/is/long/out.jsonl",))
    lines = short_summary(summary).lines(width=width)
    assert len(lines) == 5
    assert max(len(line) for line in lines[:-1]) <= width
    assert lines[0].endswith("/long/out.jsonl")
    assert lines[-1].endswith(RUN_ID)


def test_styles_do_not_change_the_text(path: Path) -> None:
    summary = summary_of(path, "measured")
    painted = short_summary(summary).lines(lambda text, style: f"<{style}>{text}</{style}>")
    assert "<strong>video</strong>: <good>finished</good> after" in painted[0]
    assert "<warning>a 92 % of the time, b 8 % of the time</warning>" in painted[3]


def test_results_that_were_written_are_named_relative_to_the_current_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = summary_of(path)
    monkeypatch.chdir(path)
    outputs = (f"{path}/a.jsonl", "s3://bucket/b.jsonl")
    short = short_summary(replace(summary, outputs=outputs))
    assert short.lines()[0] == "video: finished after 1 min 50 s, a.jsonl, s3://bucket/b.jsonl"
    assert short.lines(width=52)[0] == "video: finished after 1 min 50 s, a.jsonl, b.jsonl"


# --- predictions


@pytest.mark.parametrize("sources", [("assumed",), ("measured", "assumed"), ("given", "unknown"), ()])
def test_nothing_is_predicted_from_speeds_that_were_not_measured_or_given(sources: tuple[str, ...], path: Path) -> None:
    summary = summary_of(path, *sources)
    assert (summary.planned, summary.expected) == (0.0, 0.0)
    text = "\n".join([*short_summary(summary).lines(), *result_lines(summary)])
    assert "predicted" not in text
    assert "reached" not in text
    assert "rate        10/s\n" in text


def test_all_figures_have_the_prediction_and_its_origin(path: Path) -> None:
    line = "predicted   12.5/s from the given speeds, 80 % of it reached; 1 replan"
    assert line in result_lines(summary_of(path, "given"))


def test_a_short_run_is_not_compared_with_a_rate_that_it_could_not_reach(path: Path) -> None:
    summary = replace(summary_of(path, "measured"), planned=500.0, steady_rate=None, mean_rate=5.0)
    rate = short_summary(summary).rate
    assert rate == "5/s; 500/s predicted from earlier runs, too short to reach it"


def test_a_short_run_in_waves_is_not_compared_with_its_prediction(path: Path) -> None:
    """Its rate is that of all the time, which is mostly the starts of workers."""
    summary = replace(summary_of(path, "measured"), planned=500.0, steady_rate=100.0, mean_rate=100.0)
    assert short_summary(summary).rate == "100/s, 20 % of the 500/s predicted from earlier runs"
    waves = tuple(replace(unit, wave=number) for number, unit in enumerate(summary.units))
    assert len(waves) == 2
    rate = short_summary(replace(summary, units=waves)).rate
    assert rate == "100/s; 500/s predicted from earlier runs, too short to reach it"


# --- rates


def made_history(*sessions: list[tuple[float, float, float, float]]) -> RunHistory:
    """Views of (second, items of the fast unit, items of the slow unit, finished items)."""
    ticks = [
        ViewRecord(t, {"finished": finished}, {"fast": unit_line(fast), "slow": unit_line(slow)})
        for session in sessions
        for t, fast, slow, finished in session
    ]
    return RunHistory(RunFolder(Path("r")), {}, ticks)


def unit_line(taken: float) -> dict[str, Any]:
    return {"taken_total": taken, "ready": 1, "busy_s_total": taken / 20, "started_total": 1}


def test_a_constant_run_is_shown_as_constant_if_its_first_stage_runs_ahead() -> None:
    history = made_history([(float(t), min(1000.0, 900.0 * t), 10.0 * t, 10.0 * (t // 5 * 5)) for t in range(101)])
    summary = summarize_run(history, WALL)
    assert summary.steady_rate == pytest.approx(10.0)
    assert summary.rates == pytest.approx([10.0] * 100)
    assert len(set(sparkline(summary.rates))) == 1


def test_a_resumed_run_has_the_rates_since_the_resume() -> None:
    first = [(float(t), 10.0 * t, 10.0 * t, 10.0 * t) for t in range(51)]
    second = [(50.0 + t, 5.0 * t, 5.0 * t, 400.0 + 5.0 * t) for t in range(51)]
    summary = summarize_run(made_history(first, second), WALL)
    assert summary.steady_rate == pytest.approx(5.0)
    assert [unit.rate for unit in summary.units] == pytest.approx([5.0, 5.0])
    assert [unit.busy for unit in summary.units] == pytest.approx([0.25, 0.25])
    assert summary.rates == pytest.approx([5.0] * 50)
