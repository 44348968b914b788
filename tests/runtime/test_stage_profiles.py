"""Plans from measurements of earlier runs, and how well they predict."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.observe.profiles import ProfileKey, StageMeasurement, profiles_folder
from dovetail.pipeline.units import rate_of_unit
from dovetail.runtime import run_spec as jobs
from dovetail.runtime.inputs import open_input
from dovetail.runtime.outputs import parse_sinks
from dovetail.runtime.stage_profiles import ProfileObserver, load_profiles, source_sink_kinds, storage_keys
from dovetail.streaming.settings import unit_specs
from observe.made import unit, view
from runtime.aids import CLUSTER
from waiting import time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dovetail.streaming.view import StreamView, UnitView

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pipelines"
NAMES = ("clean", "chunks", "heavy", "fetch", "branches")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def twice(items: list[int]) -> list[int]:
    return [item for item in items for _ in range(2)]


PIPE = dt.Pipeline([dt.Stage("a", twice), dt.Stage("b", double, workers=2, slots=4, batch_size=8)])


class Looks:
    """Views as a run would give them, one per look."""

    def __init__(self, pipeline: dt.Pipeline, cluster: str = "1x(8cpu)", reads: str = "", writes: str = "") -> None:
        self.kept: dict[ProfileKey, StageMeasurement] = {}
        plan = dt.plan(pipeline, cluster)
        self.keys = storage_keys(pipeline, plan, reads, writes)
        self.now: StreamView = view(0.0)
        self.watch = ProfileObserver(
            self._view, unit_specs(pipeline, plan), self.keys, keep=self._keep, peaks=lambda: {"a": 7}
        )

    def _view(self, _now: float) -> StreamView:
        return self.now

    def _keep(self, measured: Mapping[ProfileKey, StageMeasurement]) -> str:
        assert not self.kept
        self.kept.update(measured)
        return ""

    def sample(self, now: float, *units: UnitView) -> None:
        self.now = view(now, *units)
        self.watch.on_step(now, [], [])

    def end(self) -> dict[str, StageMeasurement]:
        self.watch.close(self.now.now)
        self.watch.close(self.now.now)
        return {name: self.kept[keys[0]] for name, keys in self.keys.items() if keys[0] in self.kept}


def saturated(now: float, per_s: float, busy: float, **changes: Any) -> UnitView:
    """Two workers that take so much each, and are in the user's code for this share of the time."""
    taken = round(2 * now * per_s)
    stages = (("b", taken, taken, 2 * now * busy),)
    same = {"ready": 2, "started_total": 2, "backlogged": True, "batches_total": taken, "setup_s_total": 3.0}
    return unit("b", taken_total=taken, busy_s_total=2 * now * busy, stages=stages, **(same | changes))


def test_a_saturated_unit_is_as_fast_as_it_was_with_everything_around_its_code() -> None:
    looks = Looks(PIPE)
    for tenth in range(30):
        looks.sample(tenth / 10, saturated(tenth / 10, per_s=50, busy=3.0))
    found = looks.end()
    assert 1 / found["b"].seconds_per_item == pytest.approx(50, rel=0.05)
    assert found["b"].setup_s == 1.5
    assert "a" not in found


def test_a_starved_unit_is_as_fast_as_its_code_and_its_slots() -> None:
    looks = Looks(PIPE)
    for tenth in range(30):
        looks.sample(tenth / 10, saturated(tenth / 10, per_s=5, busy=0.2, backlogged=False))
    # 25 items per second in code, and four calls at once, less what messages cost
    assert 1 / looks.end()["b"].seconds_per_item == pytest.approx(100, rel=0.05)


def test_a_unit_that_waits_for_those_after_it_is_not_taken_for_slow() -> None:
    looks = Looks(PIPE)
    for tenth in range(30):
        looks.sample(tenth / 10, saturated(tenth / 10, per_s=5, busy=0.2))
    assert 1 / looks.end()["b"].seconds_per_item == pytest.approx(100, rel=0.05)


def test_looks_between_which_workers_came_or_went_do_not_count() -> None:
    looks = Looks(PIPE)
    for tenth in range(30):
        looks.sample(tenth / 10, saturated(tenth / 10, per_s=50, busy=3.0, started_total=tenth, starting=1))
    # twelve parts of a worker's second in four slots would be 50; no worker was steady, so its code and slots count
    assert 1 / looks.end()["b"].seconds_per_item == pytest.approx(4 * 50 / 3, rel=0.05)


def test_stages_that_share_workers_make_up_the_rate_of_their_unit() -> None:
    pipe = dt.Pipeline([dt.Stage("a", twice), dt.Stage("b", double)])
    looks = Looks(pipe)
    for tenth in range(30):
        now = tenth / 10
        taken = round(100 * now)
        stages = (("a", taken, 2 * taken, 0.3 * now), ("b", 2 * taken, 2 * taken, 0.5 * now))
        looks.sample(
            now,
            unit("a+b", taken_total=taken, busy_s_total=0.8 * now, batches_total=taken, stages=stages)
            if not tenth
            else unit(
                "a+b", taken_total=taken, busy_s_total=0.8 * now, batches_total=taken, stages=stages, ready=1,
                started_total=1, backlogged=True,
            ),
        )  # fmt: skip
    found = looks.end()
    rates = {name: 1 / measured.seconds_per_item for name, measured in found.items()}
    returns = {name: measured.returns for name, measured in found.items()}
    assert returns == {"a": 2, "b": 1}
    assert rate_of_unit(("a", "b"), rates, returns) == pytest.approx(100, rel=0.05)


def test_nothing_is_kept_of_a_run_in_which_nothing_happened(home: Path) -> None:
    looks = Looks(PIPE)
    looks.sample(0.0, unit("a"), unit("b"))
    assert looks.end() == {}
    assert load_profiles(PIPE, dt.Cluster.of("1x(8cpu)")) == {}
    assert not home.exists()


# --- real runs


def slow(item: int) -> int:
    time.sleep(0.002)
    return item


def other(item: int) -> int:
    time.sleep(0.004)
    return item


def run_to_end(pipeline: dt.Pipeline, source: Any, **settings: Any) -> dt.Run:
    with time_limit():
        run = dt.run(pipeline, source, **({"cluster": CLUSTER} | settings))
        for _ in run:
            pass
    return run


def test_a_second_run_plans_from_measurements_of_the_first_and_reports_it() -> None:
    pipe = dt.Pipeline([dt.Stage("slow", dt.each(slow)), dt.Stage("double", twice, fuse=False)])
    first = run_to_end(pipe, range(400))
    assert {unit.rate_source for unit in first.plan.units} == {"assumed"}
    assert first.stats.planned == 0
    second = run_to_end(pipe, range(400))
    assert {unit.rate_source for unit in second.plan.units} == {"measured"}
    assert [unit.per_source for unit in second.plan.units] == [1, 1]
    assert 20 < second.plan.units[0].rate < 500  # it sleeps for 2 ms
    assert any("was measured in 1 run" in note for note in second.plan.notes)
    told = second.stats
    assert told.planned == second.plan.rate
    assert told.planned_from == "measured"
    assert told.to_dict()["expected"] == second.plan.rate
    assert "by the plan (from earlier runs)" in str(told)
    third = run_to_end(pipe, range(400))
    assert any("was measured in 2 runs, the last" in note for note in third.plan.notes)
    assert {unit.rate_source for unit in run_to_end(pipe, range(10), profiles=False).plan.units} == {"assumed"}


def test_measurements_of_one_function_are_not_used_for_another() -> None:
    run_to_end(dt.Pipeline([dt.Stage("s", dt.each(slow))]), range(100))
    changed = dt.Pipeline([dt.Stage("s", dt.each(other))])
    assert load_profiles(changed, dt.Cluster.of(CLUSTER), "iterable") == {}
    renamed = dt.Pipeline([dt.Stage("renamed", dt.each(slow))])
    assert list(load_profiles(renamed, dt.Cluster.of(CLUSTER), "iterable")) == ["renamed"]
    larger = dt.Pipeline([dt.Stage("s", dt.each(slow), batch_size=8)])
    assert load_profiles(larger, dt.Cluster.of(CLUSTER), "iterable") == {}


def test_another_kind_of_input_is_better_than_nothing() -> None:
    pipe = dt.Pipeline([dt.Stage("s", dt.each(slow))])
    run_to_end(pipe, range(100))
    found = load_profiles(pipe, dt.Cluster.of(CLUSTER), "parquet", {"s": "jsonl"})
    assert found["s"].rate == load_profiles(pipe, dt.Cluster.of(CLUSTER), "iterable")["s"].rate
    assert found["s"].items == 100


def test_a_home_full_of_nonsense_is_as_good_as_an_empty_one() -> None:
    pipe = dt.Pipeline([dt.Stage("s", dt.each(slow))])
    run_to_end(pipe, range(100))
    files = list(profiles_folder().iterdir())
    assert files
    for file in files:
        file.write_text("nonsense")
    assert {unit.rate_source for unit in run_to_end(pipe, range(100)).plan.units} == {"assumed"}
    assert load_profiles(pipe, dt.Cluster.of(CLUSTER), "iterable")["s"].items == 100


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "*.jsonl"])
def test_a_plan_calls_source_and_sink_what_a_run_calls_them(name: str, tmp_path: Path) -> None:
    for form, text in (("jsonl", '{"a": 1}\n'), ("csv", "a\n1\n"), ("txt", "x\n")):
        (tmp_path / f"rows.{form}").write_text(text)
    stages = "stages: [{name: s, run: 'm:f'}]\n"
    (tmp_path / "p.yaml").write_text(f"source: '{name}'\nsink: out.parquet\n{stages}")
    job = jobs.load_pipeline_spec(tmp_path / "p.yaml")
    opened = open_input(job.source, None)
    opened.close()
    assert opened.kind != ""
    assert source_sink_kinds(job) == (
        opened.kind,
        parse_sinks(job.sink, job.pipeline, ordered=False).kinds(job.pipeline),
    )
    assert source_sink_kinds(job)[1] == {"s": "parquet"}
    (tmp_path / "p.yaml").write_text(f"source: {{run: 'm:rows'}}\nsink: {{run: 'm:keep'}}\n{stages}")
    assert source_sink_kinds(jobs.load_pipeline_spec(tmp_path / "p.yaml")) == ("iterable", {"s": ""})
    (tmp_path / "p.yaml").write_text(stages)
    assert source_sink_kinds(jobs.load_pipeline_spec(tmp_path / "p.yaml")) == ("", {"s": ""})


# --- the examples


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[dt.Pipeline, Callable[[], Any]]]]:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> tuple[dt.Pipeline, Callable[[], Any]]:
        found = jobs.load_pipeline_spec(EXAMPLES / f"{name}.yaml")
        return found.pipeline, lambda: jobs.open_source_and_sink(found)[0]

    yield load
    sys.modules.pop("steps", None)
    importlib.invalidate_caches()


@pytest.mark.parametrize("name", [pytest.param(NAMES[0], marks=pytest.mark.processes), *NAMES[1:]])
def test_an_example_runs_and_is_measured(
    name: str, example: Callable[[str], tuple[dt.Pipeline, Callable[[], Any]]]
) -> None:
    pipeline, source = example(name)
    run = run_to_end(pipeline, source(), limit=300, cluster="auto")
    assert run.stats.finished == 300
    found = load_profiles(pipeline, dt.Cluster.of("auto"), "iterable")
    assert sorted(found) == sorted(stage.name for stage in pipeline)
    assert all(profile.rate > 0 for profile in found.values())


SPIN = "import time; a = time.perf_counter(); b = time.process_time()\nwhile time.perf_counter() < a + 0.5: pass\n"
QUIET = 0.93
"""The share of a CPU that one process per CPU gets on an idle machine."""


def share_of_a_cpu() -> float:
    """What the worst off of one busy process per CPU gets."""
    code = f"{SPIN}print((time.process_time() - b) / (time.perf_counter() - a))"
    spinning = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in os.sched_getaffinity(0)
    ]
    return min(float(one.communicate()[0]) for one in spinning)


@pytest.mark.long
@pytest.mark.processes
def test_what_is_predicted_from_profiles_is_reached(
    example: Callable[[str], tuple[dt.Pipeline, Callable[[], Any]]],
) -> None:
    """Within 15 % in four of the five. The use of the machine by others cannot be predicted."""
    told, quiet = {}, [share_of_a_cpu()]
    for name in NAMES:
        pipeline, source = example(name)
        run_to_end(pipeline, source(), cluster="auto")
        second = run_to_end(pipeline, source(), cluster="auto")
        quiet.append(share_of_a_cpu())
        assert {unit.rate_source for unit in second.plan.units} == {"measured"}
        told[name] = round(second.plan.rate / second.stats.reached, 3)
    good = sum(abs(share - 1) <= 0.15 for share in told.values()) >= 4
    if not good and min(quiet) < QUIET:
        pytest.skip(f"not a quiet machine, only {min(quiet):.0%} of a CPU each; predicted / reached: {told}")
    assert good, told
