"""Measurement of a job function at several numbers of slots, and the choice among them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from command import run_command
from dovetail.cli.jobs_tune import report
from dovetail.errors import InfeasibleError, RunError
from dovetail.jobs.job import Attempt, JobRecord, JobSpec, JobState, Outcome
from dovetail.jobs.workers.tuning import (
    ArgumentSample,
    SlotMeasurement,
    TunedFunction,
    default_jobs,
    figures,
    max_concurrency,
    measure,
    recommend,
)
from jobs.worker_aids import application
from jobs.worker_app import APP

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.jobs.workers.tuning import SlotRecommendation

BASE = SlotMeasurement(1, 32, 0, 10.0, 3.2, 0.4, 0.3, 100_000_000, 1)


def measured(*rates: float, **changes: Any) -> list[SlotMeasurement]:
    """Settings of 1, 2, 4, ... slots with these rates."""
    return [replace(BASE, slots=2**at, concurrency=2**at, rate=rate, **changes) for at, rate in enumerate(rates)]


def record(start_ms: int, end_ms: int, outcome: Outcome = Outcome.SUCCEEDED, cpu_ms: int | None = 10) -> JobRecord:
    state = JobState.SUCCEEDED if outcome is Outcome.SUCCEEDED else JobState.FAILED
    attempt = Attempt(1, 1, "w", start_ms, end_ms, outcome, cpu_ms=cpu_ms)
    spec = JobSpec(f"{start_ms}", "m:f")
    return JobRecord(spec, state, spec.shape, 0, 0, attempts=(attempt,), error="ValueError: no\nmore")


def test_the_figures_of_a_setting_are_those_of_its_attempts() -> None:
    found = figures([record(1000 + 100 * at, 1300 + 100 * at) for at in range(20)], 4, 5_000)
    assert (found.jobs, found.failed, found.seconds, found.peak_bytes) == (20, 0, 2.2, 5_000)
    assert (found.rate, found.p95_s, found.cpu_s, found.concurrency) == (20 / 2.2, 0.3, 0.01, 3)


def test_what_an_isolation_does_not_measure_is_not_guessed() -> None:
    assert figures([record(0, 10), record(0, 10, cpu_ms=None)], 2, 0).cpu_s is None


def test_failed_jobs_are_counted_apart() -> None:
    found = figures([record(0, 10), record(0, 10, Outcome.ERROR)], 2, 0)
    assert (found.jobs, found.failed, found.error) == (1, 1, "ValueError: no")
    with pytest.raises(RunError, match="all 1 job failed with 2 slots"):
        figures([record(0, 10, Outcome.ERROR)], 2, 0)


def test_attempts_that_follow_each_other_do_not_overlap() -> None:
    assert max_concurrency([record(0, 10).attempts[0], record(10, 20).attempts[0]]) == 1
    assert max_concurrency([record(0, 11).attempts[0], record(10, 20).attempts[0]]) == 2


def chosen(*rates: float) -> SlotRecommendation:
    return recommend(measured(*rates))


def test_the_smallest_setting_within_5_percent_of_the_best_is_chosen() -> None:
    assert chosen(3.0, 6.0, 9.6, 10.0).slots == 4
    assert "at most 5 % below the best (10 jobs/s with 8)" in chosen(3.0, 6.0, 9.6, 10.0).reason
    assert chosen(3.0, 6.0, 9.4, 10.0).slots == 8
    assert "more may be faster" in chosen(3.0, 6.0, 9.4, 10.0).reason
    assert chosen(3.0, 6.0, 4.0).slots == 2
    assert "more slots are not faster" in chosen(3.0, 6.0, 4.0).reason
    assert chosen(3.0).slots == 1


def test_settings_with_failures_are_chosen_only_if_all_have_some() -> None:
    one, two = measured(3.0, 6.0)
    found = recommend([one, replace(two, failed=2, error="OutOfMemory")])
    assert found.slots == 1
    assert found.notes[0] == "2 slots: 2 jobs failed: OutOfMemory"
    assert recommend([replace(one, failed=1), replace(two, failed=2)]).slots == 2


def test_doubts_about_the_figures_are_noted() -> None:
    [note] = recommend(measured(3.0, 6.0, seconds=0.5)).notes
    assert "more --jobs" in note
    one, two = measured(3.0, 3.0)
    [note] = recommend([one, replace(two, concurrency=1)]).notes
    assert "2 slots: only 1 ran at the same time" in note


def test_the_report_has_80_columns() -> None:
    large = replace(BASE, slots=10_000, jobs=100_000, failed=9_999, rate=123_456.7, p95_s=12_345.6, error="x" * 100)
    lines = report([large, BASE], recommend([large, BASE]))
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["slots", "jobs", "failed", "took", "rate", "p95", "CPU/job", "memory"]


def test_every_sample_runs_and_every_slot_is_used_several_times() -> None:
    assert default_jobs(2, 100) == 100
    assert default_jobs(8, 1) == 32


# --- with real workers


def tuned(name: str, *samples: ArgumentSample, **options: Any) -> TunedFunction:
    app = application()
    return TunedFunction(app.functions[f"{APP}:{name}"], app, samples, options)


def test_a_worker_with_more_slots_runs_more_jobs_at_once(tmp_path: Path) -> None:
    sleeping = tuned("sleep", ArgumentSample(kwargs={"began": str(tmp_path / "began"), "seconds": 0.05}))
    one, four = (measure(sleeping, slots, 8, {"resources": "4cpu, 4GB", "isolation": "thread"}) for slots in (1, 4))
    assert (one.concurrency, one.jobs, four.jobs, four.failed) == (1, 8, 8, 0)
    assert 1 < four.concurrency <= 4
    assert four.rate > one.rate
    assert one.p95_s >= 0.05
    assert one.peak_bytes > 10_000_000


def test_processes_have_their_cpu_time() -> None:
    found = measure(tuned("burn_cpu", ArgumentSample((0.05,))), 2, 2, {"resources": "2cpu, 2GB"})
    assert found.cpu_s is not None
    assert found.cpu_s >= 0.05


def test_a_job_that_fits_on_no_worker_is_an_error() -> None:
    with pytest.raises(InfeasibleError):
        measure(tuned("noop", ArgumentSample(), resources={"cpus": 64}), 1, 1, {"resources": "2cpu, 2GB"})


def test_the_command_measures_and_chooses(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import time\nimport dovetail as dt\n\n@dt.job(isolation='thread')\ndef wait(s):\n    time.sleep(s)\n"
    )
    (tmp_path / "tune.yaml").write_text("function: work:wait\nsamples: [{s: 0.02}, [0.03]]\n")
    words = ("jobs", "tune", "tune.yaml", "--slots", "4,1", "--jobs", "8", "--resources", "4cpu, 4GB")
    done = run_command(*words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [one["slots"] for one in data["settings"]] == [1, 4]
    assert data["use"] == 4
    assert "more may be faster" in data["reason"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("tune.yaml", "--slots", "0,x"), "--slots '0,x'"),
        (("tune.yaml", "--args-file", "lines.jsonl"), "--args-file is for MODULE:FUNCTION"),
        (("wrong.yaml",), "unknown key 'sample' (did you mean 'samples'?)"),
        (("wrong.yaml",), "function is not the name"),
        (("work:wait", "--args-file", "lines.jsonl"), "lines.jsonl:2"),
        (("work:wait", "--args-file", "missing"), "No such file"),
        (("work:nothing",), "no job function 'nothing'"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(tmp_path: Path, words: tuple[str, ...], part: str) -> None:
    (tmp_path / "work.py").write_text("import dovetail as dt\n\n@dt.job\ndef wait(s):\n    raise AssertionError\n")
    (tmp_path / "tune.yaml").write_text("function: work:wait\n")
    (tmp_path / "wrong.yaml").write_text("sample: [1]\n")
    (tmp_path / "lines.jsonl").write_text('{"s": 1}\n7\n')
    done = run_command("jobs", "tune", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert part in done.stderr
