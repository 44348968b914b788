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
from dovetail.control.commands import RunBatches
from dovetail.control.events import BatchesDone, BatchesReturned, LossCause, WorkerLost
from dovetail.errors import Change
from dovetail.observe.profile_store import ProfileKey, StageMeasurement, profiles_folder
from dovetail.pipeline.units import rate_of_unit
from dovetail.runtime import run_spec as jobs
from dovetail.runtime.inputs import open_input
from dovetail.runtime.outputs import parse_sinks
from dovetail.runtime.stage_profiles import ProfileObserver, load_profiles, source_sink_kinds, storage_keys
from dovetail.streaming.settings import unit_specs
from observe.made import unit, view
from runtime.aids import CLUSTER
from waiting import time_limit, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


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


class Messages:
    """An observer that is given messages as a run would give them."""

    def __init__(
        self,
        pipeline: dt.Pipeline,
        cluster: str = "1x(8cpu)",
        reads: str = "",
        writes: str = "",
        end_probe: Callable[[], None] | None = None,
    ) -> None:
        self.kept: dict[ProfileKey, StageMeasurement] = {}
        plan = dt.plan(pipeline, cluster)
        self.keys = storage_keys(pipeline, plan, reads, writes)
        self.units = [
            unit(spec.name, started_total=2, setup_s_total=3.0, stages=((spec.name, 1, 1, 1.0),))
            for spec in unit_specs(pipeline, plan)
        ]
        self.observer = ProfileObserver(
            lambda now: view(now, *self.units),
            unit_specs(pipeline, plan),
            self.keys,
            end_probe=end_probe,
            keep=self._keep,
        )
        self._count = 0

    def _keep(self, measured: Mapping[ProfileKey, StageMeasurement]) -> str:
        assert not self.kept
        self.kept.update(measured)
        return ""

    def send(self, now: float, worker: int, name: str = "b", items: int = 8, batch_size: int = 8) -> int:
        self._count += 1
        self.observer.on_step(now, [], [RunBatches(self._count, worker, name, [], items, batch_size, 1)])
        return self._count

    def end(self, now: float, worker: int, message: int, *stages: tuple[int, int, float]) -> None:
        self.observer.on_step(now, [BatchesDone(worker, message, [], 1.0, stages=list(stages))], [])

    def run(self, sent: float, ended: float, worker: int = 1, items: int = 8, name: str = "b") -> None:
        self.end(ended, worker, self.send(sent, worker, name, items), (items, items, 0.5 * (ended - sent)))

    def measured(self) -> dict[str, StageMeasurement]:
        self.observer.close(100.0)
        self.observer.close(100.0)
        return {name: self.kept[keys[0]] for name, keys in self.keys.items() if keys[0] in self.kept}


ONE_SLOT = dt.Pipeline([dt.Stage("b", double, batch_size=8)])


def test_a_worker_is_as_fast_as_its_messages_with_everything_around_its_code() -> None:
    messages = Messages(ONE_SLOT)
    for number in range(20):
        messages.run(0.2 * number, 0.2 * number + 0.16)
    found = messages.measured()["b"]
    assert 1 / found.seconds_per_item == pytest.approx(8 / 0.16)
    assert (found.items, found.setup_s) == (19 * 8, 1.5)
    assert found.seconds == pytest.approx(19 * 0.16)


def test_waiting_for_input_or_for_space_after_it_does_not_make_a_stage_slow() -> None:
    messages = Messages(ONE_SLOT)
    for number in range(20):
        messages.run(1.0 * number, 1.0 * number + 0.16)
    assert 1 / messages.measured()["b"].seconds_per_item == pytest.approx(8 / 0.16)


def test_the_first_message_of_a_worker_does_not_count() -> None:
    messages = Messages(ONE_SLOT)
    for worker in (1, 2):
        messages.run(0.0, 1.0, worker)
        messages.run(1.0, 1.1, worker)
    assert 1 / messages.measured()["b"].seconds_per_item == pytest.approx(8 / 0.1)


def test_batches_that_are_not_full_do_not_count() -> None:
    messages = Messages(ONE_SLOT)
    for number in range(3):
        messages.run(0.1 * number, 0.1 * number + 0.1)
    messages.run(1.0, 1.1, items=1)
    assert 1 / messages.measured()["b"].seconds_per_item == pytest.approx(8 / 0.1)


def probed(message_s: Callable[[int], float]) -> tuple[int, float]:
    """Messages and time after which a probe ends whose messages take this long."""
    ended: list[bool] = []
    messages = Messages(ONE_SLOT, end_probe=lambda: ended.append(True))
    now, number = 0.0, 0
    while not ended:
        messages.run(now, now + message_s(number))
        now, number = now + message_s(number), number + 1
    return number, now


def test_a_probe_ends_when_its_measurements_are_precise_enough() -> None:
    assert probed(lambda _: 0.16)[0] == 9, "the first message does not count"
    varying, _ = probed(lambda number: 0.04 if number % 2 else 0.12)
    assert 25 <= varying <= 30, "a standard deviation of half the mean needs 25 messages"
    assert probed(lambda number: 1.0 if number % 50 == 49 else 0.01)[1] == pytest.approx(30, abs=1), "at the latest"


def test_first_messages_are_a_small_sample() -> None:
    messages = Messages(ONE_SLOT)
    messages.run(0.0, 2.0)
    found = messages.measured()["b"]
    assert found.is_small_sample
    assert 1 / found.seconds_per_item == pytest.approx(4)


def test_a_message_sent_in_advance_begins_when_the_one_before_it_ends() -> None:
    messages = Messages(ONE_SLOT)
    waiting = messages.send(0.0, 1)
    for number in range(1, 10):
        following = messages.send(0.1 * number - 0.05, 1)
        messages.end(0.1 * number, 1, waiting, (8, 8, 0.05))
        waiting = following
    assert 1 / messages.measured()["b"].seconds_per_item == pytest.approx(8 / 0.1)


def test_small_messages_at_the_beginning_do_not_make_a_fast_stage_slow() -> None:
    """Each message costs 1 ms; later messages contain 4 ms of work."""
    messages = Messages(dt.Pipeline([dt.Stage("b", double)]))
    for number in range(100):
        sent = messages.send(0.01 * number, 1, items=1, batch_size=1)
        messages.end(0.01 * number + 0.0015, 1, sent, (1, 1, 0.0005))
    assert messages.measured()["b"].seconds_per_item == pytest.approx(0.0005 + 0.001 / 8)


def test_slots_of_a_worker_work_at_the_same_time() -> None:
    messages = Messages(PIPE)
    for start in range(3):
        for number in [messages.send(1.0 * start, 1) for _ in range(4)]:
            messages.end(start + 0.5, 1, number, (8, 8, 0.1))
    assert 1 / messages.measured()["b"].seconds_per_item == pytest.approx(4 * 8 / 0.5)


def test_stages_that_share_workers_make_up_the_rate_of_their_unit() -> None:
    messages = Messages(dt.Pipeline([dt.Stage("a", twice), dt.Stage("b", double)]))
    for number in range(10):
        messages.end(0.1 * number + 0.1, 1, messages.send(0.1 * number, 1, "a+b"), (10, 20, 0.03), (20, 20, 0.05))
    found = messages.measured()
    rates = {name: 1 / measured.seconds_per_item for name, measured in found.items()}
    returns = {name: measured.returns for name, measured in found.items()}
    assert returns == {"a": 2, "b": 1}
    assert rate_of_unit(("a", "b"), rates, returns) == pytest.approx(10 / 0.1)


def test_messages_that_were_lost_returned_or_failed_do_not_count() -> None:
    messages = Messages(ONE_SLOT)
    messages.run(0.0, 0.1)
    lost, returned = messages.send(0.1, 1), messages.send(0.1, 2)
    messages.observer.on_step(5.0, [WorkerLost(1, LossCause.EXIT), BatchesReturned(2, returned)], [])
    messages.end(9.0, 1, lost, (8, 8, 4.0))
    messages.end(9.0, 2, returned, (8, 8, 4.0))
    messages.run(9.0, 9.1, worker=3)
    messages.run(9.1, 9.2, worker=3)
    found = messages.measured()["b"]
    assert found.items == 8
    assert found.seconds_per_item == pytest.approx(0.1 / 8)


def test_nothing_is_kept_of_a_run_in_which_nothing_happened(home: Path) -> None:
    messages = Messages(PIPE)
    assert messages.measured() == {}
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


class Computes:
    """Uses 5 ms of CPU time per item; writes a file when its worker is ready."""

    def __init__(self, ready: str) -> None:
        self.ready = ready

    def setup(self) -> None:
        Path(self.ready).touch()

    def __call__(self, items: list[int]) -> list[int]:
        end = time.thread_time() + 0.005 * len(items)
        while time.thread_time() < end:
            pass
        return items


@pytest.mark.processes
def test_cpu_time_and_the_speed_of_the_source_are_measured(tmp_path: Path) -> None:
    def slowly() -> Iterator[int]:
        until(ready.exists)  # the time in which workers start is no time of the source
        for number in range(30):
            time.sleep(0.05)
            yield number

    ready = tmp_path / "ready"
    pipe = dt.Pipeline([dt.Stage("work", Computes(str(ready))), dt.Stage("idle", twice, fuse=False)])
    run_to_end(pipe, slowly())
    found = load_profiles(pipe, dt.Cluster.of(CLUSTER), "iterable")
    assert found["work"].cpu_s is not None
    assert found["work"].cpu_s >= 0.005
    assert found["idle"].cpu_s is None or found["idle"].cpu_s < found["work"].cpu_s
    assert found["work"].source_rate is not None
    assert 0 < found["work"].source_rate <= 20
    assert found["idle"].source_rate is None, "it reads no source"
    assert load_profiles(pipe, dt.Cluster.of(CLUSTER), "jsonl")["work"].source_rate is None, "that is another source"


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
    run_stats = second.stats
    assert run_stats.planned == second.plan.rate
    assert run_stats.planned_from == "measured"
    assert run_stats.to_dict()["expected"] == second.plan.rate
    assert "predicted from earlier runs" in str(run_stats)
    third = run_to_end(pipe, range(400))
    assert any("was measured in 2 runs, the last" in note for note in third.plan.notes)
    assert {unit.rate_source for unit in run_to_end(pipe, range(10), profiles=False).plan.units} == {"assumed"}


def test_a_program_plans_simulates_and_improves_from_measurements() -> None:
    pipe = dt.Pipeline([dt.Stage("s", dt.each(slow))])
    assert dt.load_profiles(pipe, CLUSTER) == {}
    run_to_end(pipe, range(400))
    profiles = dt.load_profiles(pipe, CLUSTER)
    plan = dt.plan(pipe, CLUSTER, profiles=profiles)
    assert plan.rate is not None
    simulated = dt.simulate(pipe, CLUSTER, 2000, profiles=profiles)
    assert simulated.rate == pytest.approx(plan.rate, rel=0.2)
    changes = [one.change for one in dt.find_improvements(pipe, plan, profiles)]
    assert any(isinstance(one, Change) and "cpus" in one.values for one in changes), "it sleeps on a CPU of its own"


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
    assert 0 < found["s"].items <= 100


def test_a_home_full_of_nonsense_is_as_good_as_an_empty_one() -> None:
    pipe = dt.Pipeline([dt.Stage("s", dt.each(slow))])
    run_to_end(pipe, range(100))
    files = list(profiles_folder().iterdir())
    assert files
    for file in files:
        file.write_text("nonsense")
    assert {unit.rate_source for unit in run_to_end(pipe, range(100)).plan.units} == {"assumed"}
    assert 0 < load_profiles(pipe, dt.Cluster.of(CLUSTER), "iterable")["s"].items <= 100


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
    """Smallest share of a CPU among one busy process per CPU."""
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
    ratios, quiet = {}, [share_of_a_cpu()]
    for name in NAMES:
        pipeline, source = example(name)
        run_to_end(pipeline, source(), cluster="auto")
        second = run_to_end(pipeline, source(), cluster="auto")
        quiet.append(share_of_a_cpu())
        assert {unit.rate_source for unit in second.plan.units} == {"measured"}
        assert second.plan.rate is not None
        ratios[name] = round(second.plan.rate / second.stats.reached, 3)
    good = sum(abs(share - 1) <= 0.15 for share in ratios.values()) >= 4
    if not good and min(quiet) < QUIET:
        pytest.skip(f"not a quiet machine, only {min(quiet):.0%} of a CPU each; predicted / reached: {ratios}")
    assert good, ratios
