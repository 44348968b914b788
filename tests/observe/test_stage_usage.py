"""Resource use and counts of each stage or operator of a run."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.observe.cpu_attribution import spaced_ticks, unit_timeline
from dovetail.observe.history import RunHistory
from dovetail.observe.stage_usage import MB, recorded_groups, stage_usages
from dovetail.observe.summary import summarize_run
from dovetail.observe.utilisation_verdicts import PIPELINE_SETTINGS, RECIPE_SETTINGS, judge_stages, requested_resources
from dovetail.recipes.operators.base import Row, TextMapper
from dovetail.recipes.runner import write_monitor
from dovetail.recipes.stage_wrappers import BarrierStage
from observe.made_runs import GB, STARTED, RecordedRun, long_run, shape
from recipes.traced_operators import Deadly, Fussy, Long, Lower, Same, rows, run, stage

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 2000
"""Enough rows that what the quickest operator takes for them is not rounded to nothing."""
OF_DATA_JUICER = {"time", "resource", "resource_analysis", "sampling interval"}


class Spins(TextMapper):
    """Uses a CPU for some milliseconds per row."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, row: Row) -> Row:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return row


def groups(*stages: str) -> list[tuple[str, tuple[str, ...]]]:
    """Each stage by itself; `a_hash+a` is one operator `a` with two stages."""
    return [(stage.split("+")[-1], tuple(stage.split("+"))) for stage in stages]


def monitor(run_folder: Path, *stages: str, into: Path | None = None) -> list[dict[str, Any]]:
    into = into or run_folder.parent / "monitor"
    write_monitor(run_folder, groups(*stages), into)
    assert sorted(path.name for path in into.iterdir()) == ["monitor.html", "monitor.json"]
    found: list[dict[str, Any]] = json.loads((into / "monitor.json").read_text())
    return found


# --- real runs


@pytest.mark.parametrize("fuse", [True, False])
def test_even_a_run_of_a_moment_has_a_sample_and_all_rows_of_every_operator(tmp_path: Path, fuse: bool) -> None:
    source = rows(COUNT)
    short = sum(len(row["text"]) < 6 for row in source)
    run(
        stage("lower", Lower(), fuse=fuse),
        stage("long", Long(), fuse=fuse),
        stage("same_hash", Same(), fuse=fuse),
        stage("same", BarrierStage(Same()), barrier=True),
        source=source,
        folder=tmp_path / "run",
    )
    lower, long, same = monitor(tmp_path / "run", "lower", "long", "same_hash+same")
    for one in (lower, long, same):
        assert one.keys() >= OF_DATA_JUICER
        assert len(one["resource"]) >= 1
        assert one["resource_analysis"]["CPU util."]["max"] > 0
        assert one["time"] > 0
        assert one["rows_per_second"] > 0
        assert one["workers"] >= 1
    assert (lower["rows_in"], lower["rows_out"], lower["dropped"]) == (COUNT, COUNT, 0)
    assert (long["rows_in"], long["rows_out"], long["dropped"]) == (COUNT, COUNT - short, short)
    assert same["rows_in"] == COUNT - short
    different = len({row["text"].lower() for row in source if len(row["text"]) >= 6})
    assert same["rows_out"] == different
    assert same["dropped"] == COUNT - short - different
    assert ("long" in lower["shared_with"]) is fuse


def test_rows_that_an_operator_could_not_do_are_counted_where_they_failed(tmp_path: Path) -> None:
    run(
        stage("lower", Lower(), on_error="skip", retries=0),
        stage("fussy", Fussy(), on_error="skip", retries=0),
        stage("long", Long(), on_error="skip", retries=0),
        source=rows(100),
        folder=tmp_path / "run",
    )
    lower, fussy, long = monitor(tmp_path / "run", "lower", "fussy", "long")
    assert lower["shared_with"] == ["fussy", "long"]
    assert [one["failed"] for one in (lower, fussy, long)] == [0, 10, 0]
    assert [one["rows_in"] for one in (lower, fussy, long)] == [100, 100, 90]
    assert [one["rows_out"] for one in (lower, fussy)] == [100, 90]
    assert [one["dropped"] for one in (lower, fussy)] == [0, 0]


def test_a_run_with_a_killed_worker_counts_every_row_once(tmp_path: Path) -> None:
    deadly = Deadly(tmp_path / "dead", at=41)
    run(stage("deadly", deadly, workers=1), source=rows(60), folder=tmp_path / "run")
    (one,) = monitor(tmp_path / "run", "deadly")
    assert (tmp_path / "dead").exists()
    assert (one["rows_in"], one["rows_out"], one["failed"]) == (60, 60, 0)


def test_what_fused_operators_used_is_shared_by_the_time_that_each_took(tmp_path: Path) -> None:
    run(stage("heavy", Spins(0.004)), stage("light", Spins(0.0005)), source=rows(100), folder=tmp_path / "run")
    history = RunHistory.load(tmp_path / "run")
    assert list(history.units) == ["heavy+light"]
    heavy, light = stage_usages(history, groups("heavy", "light"))
    share = heavy.counts.seconds / (heavy.counts.seconds + light.counts.seconds)
    assert heavy.cpu_s / (heavy.cpu_s + light.cpu_s) == pytest.approx(share, abs=0.02)
    # a hundred rows, of some milliseconds each, and more by the clock of a busy machine
    assert heavy.counts.seconds >= 0.4
    assert light.counts.seconds >= 0.05
    assert heavy.counts.seconds + light.counts.seconds == pytest.approx(
        history.units["heavy+light"]["busy_s_total"], rel=0.01
    )


# --- made runs


def test_what_was_measured_is_shared_out_without_anything_lost(tmp_path: Path) -> None:
    stages = long_run(tmp_path / "run", operators=8, seconds=60)
    history = RunHistory.load(tmp_path / "run")
    operators = stage_usages(history, stages)
    for unit, uses in history.unit_uses.items():
        inside = [operator for operator in operators if operator.units == (unit,)]
        assert len(inside) == 4
        assert all(operator.measured for operator in inside)
        assert sum(operator.cpu_s for operator in inside) == pytest.approx(uses[-1]["cpu_s_total"])


def test_samples_are_in_the_units_of_data_juicer(tmp_path: Path) -> None:
    stages = long_run(tmp_path / "run", operators=4, seconds=20)
    write_monitor(tmp_path / "run", stages, tmp_path / "monitor")
    one = json.loads((tmp_path / "monitor" / "monitor.json").read_text())[0]
    assert one["sampling interval"] == 1.0
    assert len(one["resource"]) == 20
    assert [round(sample["timestamp"] - STARTED) for sample in one["resource"][:3]] == [1, 2, 3]
    sample = one["resource"][7]
    assert sample["CPU count"] == 8
    # half a CPU of eight, of which each of four operators has a quarter
    assert sample["CPU util."] == pytest.approx(0.5 / 8 / 4, abs=1e-4)
    assert sample["Total mem."] == 16 * 1024
    assert sample["Used mem."] == pytest.approx(1024, abs=20)
    assert sample["Mem. util."] == pytest.approx(1 / 16, abs=0.01)
    assert sample["Available mem."] == 12 * 1024
    assert sample["GPU util."][0] == pytest.approx(0.35, abs=0.2)
    assert (sample["GPU used mem."], sample["GPU free mem."]) == ([8 * 1024.0], [12 * 1024.0])
    assert (sample["GPU total mem."], sample["GPU power"]) == ([20 * 1024.0], [150.0])
    assert {"CPU count", "timestamp", "GPU total mem."}.isdisjoint(one["resource_analysis"])
    for figures in one["resource_analysis"].values():
        assert figures["min"] <= figures["avg"] <= figures["max"]
    assert one["gpus"] == ["0"]


def test_figures_that_were_not_measured_are_omitted(tmp_path: Path) -> None:
    made = RecordedRun(tmp_path / "run", ["a"])
    for t in range(3):
        made.view(float(t), rows=t)
        made.end()
    made.write()
    (one,) = monitor(tmp_path / "run", "a")
    assert all(sample.keys() == {"timestamp", "CPU count", "CPU util.", "CPUs"} for sample in one["resource"])
    assert one["CPU from"] == "seconds in code"
    assert one["resource_analysis"]["CPUs"]["avg"] == pytest.approx(1.0)


def test_a_call_that_takes_long_was_busy_before_it_was_counted(tmp_path: Path) -> None:
    """A barrier tells of its seconds when it is done."""
    made = RecordedRun(tmp_path / "run", ["a"])
    for t in range(11):
        made.view(float(t), rows=0, a={"stages": [["a", 9, 9, 8.0]] if t == 10 else []})
        if t % 5 == 0:
            made.uses(float(t))
        made.end()
    made.write()
    slices = unit_timeline(RunHistory.load(tmp_path / "run"), "a").slices
    assert [round(one.spent_s, 3) for one in slices] == [0.0, 0.0, *[1.0] * 8]
    assert sum(one.cpu_s for one in slices) == pytest.approx(10.0)
    assert max(one.cpu_s for one in slices) < 2


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    made = RecordedRun(tmp_path / "run", ["a"])
    for t in range(21):
        seconds = t % 10 + 0.0
        made.view(float(t), rows=t, a={"stages": [["a", t, t, seconds]]})
        if t % 5 == 4:
            made.uses(seconds)
        made.end()
    made.write()
    (operator,) = stage_usages(RunHistory.load(tmp_path / "run"), groups("a"))
    assert operator.cpu_s == pytest.approx(18.0, abs=1.5)
    assert all(cpu_s >= 0 for _, _, cpu_s, _ in operator.times)


def test_views_that_come_fast_are_taken_together(tmp_path: Path) -> None:
    made = RecordedRun(tmp_path / "run", ["a"])
    for number in range(41):
        made.view(number / 10, rows=number)
        made.end()
    made.write()
    seen = [tick.t for tick in spaced_ticks(RunHistory.load(tmp_path / "run"))]
    assert (seen[0], seen[-1]) == (0.0, 4.0)
    assert len(seen) == 9


def test_an_operator_that_never_ran_has_no_samples_and_no_figures(tmp_path: Path) -> None:
    made = RecordedRun(tmp_path / "run", ["a"])
    made.view(0.0, rows=0)
    made.end()
    made.write(status="failed", error="it could not start")
    one, other = monitor(tmp_path / "run", "a", "b")
    assert other["resource"] == []
    assert other["resource_analysis"] == {}
    assert (one["rows_in"], other["rows_in"]) == (0, 0)


def test_a_run_folder_without_views_is_reported_as_empty(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "run", []).write()
    (one,) = monitor(tmp_path / "run", "a")
    assert one["resource"] == []


def test_operators_are_those_of_the_recipe_and_stages_those_of_any_other_run(tmp_path: Path) -> None:
    for name, more in (
        ("recipe", {"operators": [["clean", ["clean"]], ["dedup", ["dedup_hash", "dedup"]]]}),
        ("run", {}),
    ):
        made = RecordedRun(tmp_path / name, ["clean+dedup_hash", "dedup", "stats"])
        made.view(1.0, rows=9)
        made.end()
        made.write(more=more)
    listed = recorded_groups(RunHistory.load(tmp_path / "recipe"))
    assert listed == [("clean", ("clean",)), ("dedup", ("dedup_hash", "dedup")), ("stats", ("stats",))]
    assert recorded_groups(RunHistory.load(tmp_path / "run")) == groups("clean", "dedup_hash", "dedup", "stats")


def test_an_operator_that_occurs_twice_is_named_by_its_stage(tmp_path: Path) -> None:
    made = RecordedRun(tmp_path / "run", ["clean", "clean_2"])
    made.view(1.0, rows=9)
    made.end()
    history = RunHistory.load(made.write())
    found = stage_usages(history, [("clean", ("clean",)), ("clean", ("clean_2",))])
    assert [usage.name for usage in found] == ["clean", "clean_2"]


# --- how it did


def judge(made: RecordedRun, seconds: int = 20, uses: dict[str, Any] | None = None, **view: Any) -> Any:
    for t in range(seconds + 1):
        made.view(float(t), rows=100 * t, a={"busy_s_total": view.get("busy", 1.0) * t})
        if t % 5 == 0:
            made.uses(view.get("cpus", 0.5) * t, cpus=view.get("cpus", 0.5), **uses or {})
            if "gpu" in view:
                made.line("gpu_use", index=0, memory_bytes=20 * GB, **view["gpu"])
        made.end(bottleneck=view.get("bottleneck", ""))
    history = RunHistory.load(made.write())
    usages = stage_usages(history, groups("a"))
    names = view.get("names", RECIPE_SETTINGS)
    return judge_stages(history, summarize_run(history), usages, requested_resources(history), names)[0]


def on_card(tmp_path: Path) -> RecordedRun:
    made = RecordedRun(tmp_path / "run", ["a"])
    made.line("worker", 0.0, do="start", w=1, unit="a", node="node-0", gpus=[0])
    return made


def test_a_card_that_waits_is_under_utilised(tmp_path: Path) -> None:
    verdict = judge(on_card(tmp_path), gpu={"use_percent": 20, "memory_used_bytes": GB}, cpus=0.3)
    assert verdict.kind == "under-utilised"
    assert "20 %" in verdict.why
    assert "num_proc: 2" in verdict.change


def test_changes_use_the_names_of_the_file_that_was_run(tmp_path: Path) -> None:
    verdict = judge(on_card(tmp_path), gpu={"use_percent": 20}, cpus=0.3, names=PIPELINE_SETTINGS)
    assert verdict.change == "workers: 2, a larger batch_size, or a smaller cpus"


def test_a_card_that_waits_for_busy_cpus_is_cpu_bottlenecked(tmp_path: Path) -> None:
    verdict = judge(on_card(tmp_path), gpu={"use_percent": 20, "memory_used_bytes": GB}, cpus=0.95)
    assert verdict.kind == "CPU-bottlenecked"
    assert "num_cpus: 2" in verdict.change


def test_a_full_card_is_over_utilised(tmp_path: Path) -> None:
    verdict = judge(on_card(tmp_path), gpu={"use_percent": 90, "memory_used_bytes": 20 * GB - MB})
    assert verdict.kind == "over-utilised"
    assert "num_gpus" in verdict.change


def test_a_worker_that_ran_out_of_memory_is_over_utilised(tmp_path: Path) -> None:
    made = on_card(tmp_path)
    made.line("worker", 3.0, do="lost", w=1, unit="a", node="node-0", why="out of memory: 9 GB of 8 GB")
    verdict = judge(made)
    assert (verdict.kind, verdict.why) == ("over-utilised", "1 worker ran out of memory")


def test_a_worker_with_more_memory_than_it_asked_for_is_over_utilised(tmp_path: Path) -> None:
    made = RecordedRun(tmp_path / "run", ["a"])
    made.plan = [{"name": "a", "shape": shape(memory_bytes=GB)}]
    verdict = judge(made, uses={"peak_bytes": 2 * GB})
    assert verdict.kind == "over-utilised"
    assert verdict.change == "memory: '2.375GB'"


def test_the_operator_that_all_wait_for_is_cpu_bottlenecked(tmp_path: Path) -> None:
    verdict = judge(RecordedRun(tmp_path / "run", ["a"]), bottleneck="a", cpus=0.9)
    assert verdict.kind == "CPU-bottlenecked"
    assert "num_proc: 2" in verdict.change


def test_workers_short_of_cpus_are_distinguished_from_busy_workers(tmp_path: Path) -> None:
    verdict = judge(RecordedRun(tmp_path / "run", ["a"]), cpus=0.2)
    assert verdict.kind == "short of CPUs"
    assert "num_proc: 2" in verdict.change


def test_workers_that_wait_are_under_utilised_and_busy_ones_are_not(tmp_path: Path) -> None:
    assert judge(RecordedRun(tmp_path / "run", ["a"]), busy=0.2, cpus=0.2).kind == "under-utilised"
    assert judge(RecordedRun(tmp_path / "run2", ["a"]), cpus=0.9).kind == "well used"
