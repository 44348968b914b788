"""Simulated queues of jobs: properties over random scenarios, figures that can be computed by hand, and the command."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from command import run_command
from dovetail.jobs.job import JobRecord, JobState, Outcome
from dovetail.jobs.simulated.simulation import START_MS, Simulation
from dovetail.jobs.simulated.simulation_fields import SCENARIO, schema
from dovetail.jobs.simulated.simulation_file import parse_scenario
from dovetail.jobs.store import JobFilter
from dovetail.resources.cluster import Cluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "jobs.yaml"
ONE_CPU = {"cpus": 1}


# --- properties


MACHINES = ("2cpu, 4GB", "4cpu, 16GB, licence=2", "8cpu, 32GB, 1xL4", "8cpu, 32GB, 2xA100:40GB")
RESOURCES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"cpus": 1},
    {"cpus": 2, "memory": "3GB"},
    {"gpus": 0.5},
    {"gpus": 1, "cpus": 3},
    {"gpus": 2},
    {"gpu_memory": "9GB"},
    {"cpus": 0.5, "custom": {"licence": 1}},
)
ARRIVALS: tuple[dict[str, Any], ...] = (
    {"rate": "10/m"},
    {"rate": 0.05},
    {"every": "20s"},
    {"count": 15},
    {"arrivals": [0, 5, 5, "1m", "90s"], "start": 10},
)
KINDS = st.builds(
    lambda count, machine, queues, slots: {"count": count, "resources": machine, "queues": queues, "slots": slots},
    st.integers(1, 3),
    st.sampled_from(MACHINES),
    st.sampled_from((["default"], ["other", "default"])),
    st.sampled_from(("auto", 1, 2, 5)),
)
CLASSES = st.builds(
    lambda arrivals, resources, more: {**arrivals, "resources": resources, **more},
    st.sampled_from(ARRIVALS),
    st.sampled_from(RESOURCES),
    st.fixed_dictionaries(
        {"time": st.sampled_from(("1s", "20s", "2m")), "priority": st.sampled_from(("high", "normal", -3))},
        optional={
            "variation": st.sampled_from((0.0, 1.0)),
            "timeout": st.just("30s"),
            "failures": st.sampled_from((0.1, 1.0)),
            "retries": st.sampled_from((0, 1, {"error": 2, "backoff": "10s"})),
        },
    ),
)
WITH_CALLS = st.builds(
    lambda one, calls: {**one, "batch": calls},
    CLASSES,
    st.fixed_dictionaries(
        {"size": st.sampled_from((1, 3, 100)), "wait": st.sampled_from((0, "1s", "1m"))},
        optional={"time_per_job": st.just("2s")},
    ),
)


def scenarios(deaths: bool) -> st.SearchStrategy[dict[str, Any]]:
    dying = st.lists(
        st.fixed_dictionaries(
            {"worker": st.just("a-1"), "at": st.sampled_from((0, "61s", "3m"))},
            optional={"back": st.sampled_from(("1s", "1m"))},
        ),
        max_size=2,
    )
    return st.builds(
        lambda a, b, jobs, lost: {
            "duration": "5m",
            "workers": {"a": a, "b": b},
            "jobs": {f"j{number}": one for number, one in enumerate(jobs)},
            "deaths": lost,
        },
        KINDS,
        KINDS,
        st.lists(st.one_of(CLASSES, WITH_CALLS) if deaths else CLASSES, min_size=1, max_size=4),
        dying if deaths else st.just([]),
    )


def simulate(data: dict[str, Any], seed: int = 0) -> tuple[Simulation, dt.JobSimulation]:
    simulation = Simulation(parse_scenario(data), seed)
    return simulation, simulation.run()


def records(simulation: Simulation) -> list[JobRecord]:
    page = simulation.store.find(JobFilter(), limit=1_000_000)
    found = simulation.store.get([one.id for one in page.jobs])
    return [one for one in found if one is not None]


def attempts(simulation: Simulation) -> list[tuple[JobRecord, str, int, int]]:
    """(job, worker, start, end) of all attempts, also of those that run at the end."""
    found = []
    for record in records(simulation):
        found += [(record, one.worker, one.started_ms, one.ended_ms) for one in record.attempts]
        if record.state is JobState.LEASED and record.worker is not None and record.started_ms is not None:
            found.append((record, record.worker, record.started_ms, simulation.now_ms))
    return found


@given(scenarios(deaths=True), st.integers(0, 3))
def test_every_job_that_arrives_is_finished_or_not_and_time_moves_forward(data: dict[str, Any], seed: int) -> None:
    simulation, result = simulate(data, seed)
    states = Counter(record.state.is_finished for record in records(simulation))
    total = result.all_jobs
    assert (total.jobs, total.unfinished) == (sum(states.values()), states[False])
    for one in (total, *result.classes.values()):
        assert one.jobs == one.succeeded + one.failed + one.unfinished
        assert one.unfinished >= one.unstarted
    assert sum(one.jobs for one in result.classes.values()) == total.jobs
    assert sum(one.jobs for one in result.priorities.values()) == total.jobs
    succeeded = [record for record in records(simulation) if record.state is JobState.SUCCEEDED]
    assert len(succeeded) == total.succeeded
    for record in records(simulation):
        ends = [(one.started_ms, one.ended_ms) for one in record.attempts]
        times = [START_MS, record.submitted_ms, *(time for pair in ends for time in pair), simulation.now_ms]
        assert all(before <= after for before, after in pairwise(times)), record
    assert simulation.now_ms <= simulation.end_ms


@given(scenarios(deaths=True), st.integers(0, 3))
def test_equal_seeds_give_equal_decisions(data: dict[str, Any], seed: int) -> None:
    (first, result), (again, same) = simulate(data, seed), simulate(data, seed)
    assert result.to_dict() == same.to_dict()
    assert records(first) == records(again)


@given(scenarios(deaths=False), st.integers(0, 3))
def test_no_worker_is_over_committed_and_utilisation_is_the_work_done(data: dict[str, Any], seed: int) -> None:
    simulation, result = simulate(data, seed)
    ran = attempts(simulation)
    passed_ms = simulation.now_ms - START_MS
    for figures in result.kinds:
        written = data["workers"][figures.kind]
        node = Cluster.parse(written["resources"]).nodes[0]
        cpu = gpu = 0
        for number in range(1, written["count"] + 1):
            mine = [one for one in ran if one[1] == f"{figures.kind}-{number}"]
            assert_never_over_committed(mine, node, written["slots"])
            cpu += sum((end - start) * record.shape.cpu_milli for record, _, start, end in mine)
            gpu += sum((end - start) * gpu_milli(record, node) for record, _, start, end in mine)
        alive_ms = passed_ms * written["count"]
        assert figures.attempts == sum(1 for one in ran if one[1].startswith(f"{figures.kind}-"))
        if alive_ms:
            assert figures.cpus == pytest.approx(cpu / (node.cpu_milli * alive_ms))
            assert (figures.gpus or 0.0) == pytest.approx(gpu / (1000 * max(1, len(node.gpus)) * alive_ms))


def gpu_milli(record: JobRecord, node: dt.Node) -> int:
    shape = record.shape
    if shape.gpu_memory_bytes and not shape.gpu_milli:
        return 1000 * shape.gpu_memory_bytes // node.gpus[0].memory_bytes
    return shape.cards * shape.gpu_milli


def assert_never_over_committed(ran: list[tuple[JobRecord, str, int, int]], node: dt.Node, slots: str | int) -> None:
    changes: list[tuple[int, int, tuple[int, ...]]] = []
    for record, _, start, end in ran:
        shape = record.shape
        licences = dict(shape.custom).get("licence", 0)
        taken: tuple[int, ...] = (1, shape.cpu_milli, shape.memory_bytes, gpu_milli(record, node), licences)
        changes += [(start, 1, taken), (end, 0, tuple(-amount for amount in taken))]
    held = [0] * 5
    licences = dict(node.custom).get("licence", 0)
    limits = (
        slots if isinstance(slots, int) else len(ran),
        node.cpu_milli,
        node.memory_bytes,
        1000 * len(node.gpus),
        licences,
    )
    for _, _, taken in sorted(changes):
        held = [have + amount for have, amount in zip(held, taken, strict=True)]
        assert all(have <= limit for have, limit in zip(held, limits, strict=True)), (held, limits)


# --- figures that can be computed by hand


def one_kind(jobs: dict[str, Any], resources: str = "1cpu, 4GB", count: int = 1, **more: Any) -> dict[str, Any]:
    return {"workers": {"cpu": {"resources": resources, "count": count}}, "jobs": jobs, **more}


def test_jobs_that_arrive_at_once_wait_for_each_other() -> None:
    result = dt.simulate_jobs(
        one_kind({"work": {"count": 5, "time": "10s", "variation": 0, "resources": ONE_CPU}}), one_more=False
    )
    work = result.classes["work"]
    assert result.duration_s == 50
    assert (work.succeeded, work.p50_s, work.max_s, work.mean_s) == (5, 20, 40, 20)
    assert result.kinds[0].cpus == 1.0
    assert (result.queues[0].maximum, result.queues[0].mean, result.queues[0].at_end) == (4, 2, 0)


def test_random_arrivals_wait_as_long_as_in_queueing_theory() -> None:
    """M/D/1 with a load of one half: half a service time."""
    jobs = {"work": {"rate": 0.05, "time": "10s", "variation": 0, "resources": ONE_CPU}}
    result = dt.simulate_jobs(one_kind(jobs, duration="25h"), seed=3, one_more=False)
    assert result.classes["work"].mean_s == pytest.approx(5, rel=0.12)
    assert result.kinds[0].cpus == pytest.approx(0.5, rel=0.05)


def test_a_step_of_priority_is_worth_a_minute_of_waiting() -> None:
    same = {"time": "100s", "variation": 0, "resources": ONE_CPU}
    jobs = {
        "first": {"count": 1, **same},
        "old": {"arrivals": [1], **same},
        "urgent": {"arrivals": [60], "priority": 1, **same},
        "late": {"arrivals": [62], "priority": 1, **same},
    }
    result = dt.simulate_jobs(one_kind(jobs), one_more=False)
    assert [one.max_s for one in result.classes.values()] == [0, 199, 40, 238]
    assert {priority: one.max_s for priority, one in result.priorities.items()} == {1: 238, 0: 199}


def test_the_jobs_of_a_worker_that_dies_run_again_within_a_lease() -> None:
    jobs = {"work": {"count": 1, "time": "1m", "variation": 0, "resources": ONE_CPU}}
    data = one_kind(jobs, count=2, deaths=[{"worker": "cpu-1", "at": 30}])
    lost_on = set()
    for seed in range(8):
        simulation, result = simulate(data, seed)
        [record] = records(simulation)
        first, last = record.attempts[0], record.attempts[-1]
        assert result.all_jobs.succeeded == 1
        assert (last.worker, last.outcome) == ("cpu-2", Outcome.SUCCEEDED)
        if len(record.attempts) == 2:
            lost_on.add((first.worker, first.outcome))
            assert START_MS + 40_000 <= first.ended_ms <= START_MS + 45_000
            assert last.started_ms == first.ended_ms
            assert result.kinds[0].attempts == 2
    assert lost_on == {("cpu-1", Outcome.LOST)}


def test_a_worker_that_is_back_takes_jobs_again() -> None:
    jobs = {"work": {"every": "10s", "time": "5s", "variation": 0, "resources": ONE_CPU}}
    deaths = [{"worker": "cpu-1", "at": "1m", "back": "3m"}]
    result = dt.simulate_jobs(one_kind(jobs, duration="20m", deaths=deaths), one_more=False)
    work = result.classes["work"]
    assert work.jobs == 120
    assert 170 <= work.max_s <= 180
    assert work.unfinished <= 1
    assert result.kinds[0].cpus == pytest.approx(work.jobs * 5 / (20 * 60 - 180), rel=0.02)


def test_attempts_that_fail_or_take_too_long_are_retried_by_the_rules_of_the_queue() -> None:
    common = {"count": 10, "time": "20s", "variation": 0, "resources": ONE_CPU, "retries": {"error": 2, "backoff": 1}}
    jobs = {"broken": {**common, "failures": 1.0}, "slow": {**common, "timeout": "5s"}, "good": common}
    simulation, result = simulate(one_kind(jobs, count=4, resources="8cpu"))
    assert [(one.succeeded, one.failed) for one in result.classes.values()] == [(0, 10), (0, 10), (10, 0)]
    outcomes = Counter(one.outcome for record in records(simulation) for one in record.attempts)
    assert outcomes == {Outcome.ERROR: 30, Outcome.TIMEOUT: 20, Outcome.SUCCEEDED: 10}


def test_half_of_the_attempts_fail_with_a_probability_of_one_half() -> None:
    jobs = {"flaky": {"count": 1000, "time": "1s", "failures": 0.5, "retries": 0}}
    result = dt.simulate_jobs(one_kind(jobs, resources="8cpu"), one_more=False)
    assert 440 <= result.classes["flaky"].failed <= 560


def test_jobs_that_arrive_at_once_share_calls_of_the_given_size() -> None:
    """32 jobs in 41 s, 32 in 41 s, and 6 that wait for others for 2 s and take 15 s."""
    calls = {"size": 32, "wait": "2s", "time_per_job": "1s"}
    jobs = {"infer": {"count": 70, "time": "10s", "variation": 0, "resources": ONE_CPU, "batch": calls}}
    result = dt.simulate_jobs(one_kind(jobs), one_more=False)
    infer = result.classes["infer"]
    assert result.duration_s == 41 + 41 + 2 + 15
    assert (infer.succeeded, infer.p50_s, infer.max_s) == (70, 41, 84)
    assert (result.calls["infer"].calls, result.calls["infer"].jobs) == (3, 70)
    assert result.to_dict()["calls"] == {"infer": {"calls": 3, "jobs": 70}}
    assert (result.kinds[0].cpus, result.kinds[0].attempts) == (1.0, 70)
    assert "infer: 3 calls for 70 jobs, 23.3 each" in str(result)


def test_a_call_waits_for_jobs_at_most_for_the_wait_and_half_of_the_timeout() -> None:
    jobs = {
        "patient": {"arrivals": [0, 3, 9, 20], "time": "1s", "variation": 0, "batch": {"wait": "10s"}},
        "hurried": {"arrivals": [0, 3, 9, 20], "time": "1s", "variation": 0, "batch": {"wait": "10s"}, "timeout": "8s"},
    }
    result = dt.simulate_jobs(one_kind(jobs, resources="8cpu"), one_more=False)
    assert {name: (one.calls, one.jobs) for name, one in result.calls.items()} == {"patient": (2, 4), "hurried": (3, 4)}
    assert [one.max_s for one in result.classes.values()] == [10, 4]


def test_jobs_of_a_call_fail_alone_and_are_retried_alone() -> None:
    common = {"count": 4, "time": "1s", "batch": {"size": 4}, "retries": {"error": 1, "timeout": 1, "backoff": 1}}
    jobs = {"broken": {**common, "failures": 1.0}, "slow": {**common, "timeout": "500ms", "variation": 0}}
    simulation, result = simulate(one_kind(jobs, resources="8cpu"))
    assert [one.failed for one in result.classes.values()] == [4, 4]
    assert [(one.calls, one.jobs) for one in result.calls.values()] == [(5, 8), (5, 8)]
    outcomes = Counter(one.outcome for record in records(simulation) for one in record.attempts)
    assert outcomes == {Outcome.ERROR: 8, Outcome.TIMEOUT: 8}


def test_one_more_worker_is_simulated_for_each_kind() -> None:
    data: dict[str, Any] = {
        "duration": "2h",
        "workers": {
            "cpu": {"resources": "2cpu"},
            "gpu": {"resources": "2cpu, 1xL4", "queues": ["gpu"]},
        },
        "jobs": {
            "short": {"rate": "2/m", "time": "40s", "resources": ONE_CPU},
            "train": {"rate": "12/h", "time": "6m", "resources": {"gpus": 1}, "queue": "gpu"},
        },
    }
    result = dt.simulate_jobs(data)
    more_cpu, more_gpu = result.one_more["cpu"], result.one_more["gpu"]
    assert more_cpu.classes["train"] == more_gpu.classes["train"] or more_gpu.classes["train"].p95_s > 0
    assert more_cpu.classes["train"] == result.classes["train"]
    assert more_gpu.classes["short"] == result.classes["short"]
    assert more_gpu.classes["train"].p95_s < result.classes["train"].p95_s / 2
    assert more_cpu.classes["short"].p95_s < result.classes["short"].p95_s
    assert [one.workers for one in more_gpu.kinds] == [1, 2]


def test_arrivals_and_times_can_be_files(tmp_path: Path) -> None:
    (tmp_path / "arrivals.csv").write_text("at,time\n0,10\n\n5,20\n5.5,1\n")
    (tmp_path / "times.txt").write_text("3\n4\n")
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "workers: {cpu: {resources: 1cpu, count: 2}}\n"
        "jobs:\n"
        "  replayed: {arrivals: arrivals.csv, resources: {cpus: 1}}\n"
        "  measured: {arrivals: [100], times: times.txt, resources: {cpus: 1}}\n"
    )
    result = dt.simulate_jobs(path)
    assert result.classes["replayed"].succeeded == 3
    assert result.classes["replayed"].max_s == 4.5  # the third one waits for the first
    assert result.duration_s in (103, 104)
    (tmp_path / "arrivals.csv").write_text("0\n5,-1\n7\n")
    (tmp_path / "times.txt").write_text("\n")
    with pytest.raises(dt.ConfigError) as caught:
        dt.simulate_jobs(path)
    assert [str(problem.message) for problem in caught.value.problems] == [
        "arrivals.csv has 1 lines that are not numbers of seconds",
        "times.txt has no numbers",
    ]


def test_a_job_that_fits_on_no_worker_is_named() -> None:
    jobs = {"big": {"count": 1, "time": "1s", "resources": {"gpus": 3}}, "small": {"count": 1, "time": "1s"}}
    result = dt.simulate_jobs(one_kind(jobs, duration="1m"), one_more=False)
    assert result.misfits == ("big: no worker can run this: it needs 3 GPUs, 1 CPU",)
    assert (result.classes["big"].unstarted, result.classes["big"].max_s) == (1, 60)
    assert "warning: big: no worker can run this" in str(result)


# --- the file and the command


FILE = """\
workers:
  cpu: {count: 3, resources: "8cpu"}
  gpu: {resources: "8cpu, 1xL4", queues: []}
jobs:
  both: {rate: 4/m, every: 3s, time: 30s, times: [1]}
  none: {resources: {cpus: 1}}
  lost: {count: 1, time: 1s, queue: defualt}
  late: {rate: 1, time: 1s, start: 2h}
  many: {rate: 5000, time: 1s}
deaths: [{worker: cpu-9, at: 0}]
"""


def test_keys_that_do_not_fit_together_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(FILE)
    with pytest.raises(dt.ConfigError) as caught:
        dt.simulate_jobs(path)
    found = [(int(problem.place.split(":")[-2]), str(problem.message)) for problem in caught.value.problems]
    assert found == [
        (1, "about 18M jobs would arrive; a simulation has at most 500,000"),
        (3, "workers gpu serve no queue"),
        (5, "jobs both have rate and every: set one of them"),
        (5, "jobs both have time and times: set one of them"),
        (6, "jobs none have no arrivals"),
        (6, "jobs none have no time"),
        (7, "jobs lost wait in the queue 'defualt', which no worker serves (did you mean 'default'?)"),
        (8, "jobs late: the arrivals begin at 7200 s, and end at 3600 s"),
        (10, "there is no worker 'cpu-9' (did you mean 'cpu-3'?)"),
    ]
    assert all(problem.fixes for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"workers": {"cpu": {"resources": "2x(4cpu)"}}},
            "workers.cpu.resources should be the resources of one machine",
        ),
        ({"workers": {"cpu": {"resources": "4cpus, x"}}}, "'x'"),
        ({"workers": {"cpu": {"resources": "4cpu", "slots": 0}}}, "slots should be auto, or a whole number"),
        ({"workers": {}}, "workers should be [workers](#workers) by name"),
        ({"jobs": {"a b": {"count": 1, "time": 1}}}, "jobs should be"),
        ({"jobs": {"a": {"rate": "40/x", "time": 1}}}, "jobs.a.rate should be jobs per second"),
        ({"jobs": {"a": {"rate": 0, "time": 1}}}, "jobs.a.rate should be"),
        ({"jobs": {"a": {"count": 1, "time": 1, "resources": {"cpu": 1}}}}, "unknown key 'cpu'"),
        ({"jobs": {"a": {"count": 1, "time": 1, "resources": {"gpus": 1.5}}}}, "jobs a: gpus"),
        ({"jobs": {"a": {"count": 1, "times": []}}}, "jobs.a.times should be"),
        ({"jobs": {"a": {"count": 1, "time": 1, "failures": 2}}}, "jobs.a.failures should be a number from 0 to 1"),
        ({"deaths": [{"worker": "cpu-1"}]}, "deaths[0].at is missing"),
        ({"jbos": {}}, "unknown key 'jbos'"),
    ],
)
def test_invalid_values_are_refused_by_the_reader_and_the_schema(change: dict[str, Any], text: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    good = one_kind({"a": {"count": 1, "time": 1}})
    validator = jsonschema.Draft202012Validator(schema())
    assert validator.is_valid(good)
    with pytest.raises(dt.ConfigError) as caught:
        dt.simulate_jobs({**good, **change})
    assert text in str(caught.value)
    if "resources" not in str(change.get("workers")) or "slots" in str(change):
        assert validator.is_valid({**good, **change}) == ("1.5" in str(change) or "a b" in str(change))


def test_the_example_is_simulated_on_the_command_line() -> None:
    shown = run_command("simulate", str(EXAMPLE), "--set", "duration=30m", "--set", "deaths=[]")
    lines = shown.stdout.splitlines()
    assert lines[0] == f"{EXAMPLE}, simulated for 30 min 00 s" or len(lines[0]) == 80
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith(("prepare", "+1", "10"))] == [
        "prepare",
        "10",
        "+1",
        "+1",
    ]
    data = json.loads(run_command("simulate", str(EXAMPLE), "--set", "duration=30m", "--seed", "5", "--json").stdout)
    assert set(data) == {
        "name",
        "duration_s",
        "all_jobs",
        "classes",
        "priorities",
        "workers",
        "queues",
        "misfits",
        "one_more",
    }
    assert set(data["one_more"]) == {"cpu", "gpu"}


def test_options_of_pipelines_and_commands_for_pipelines_refuse_a_jobs_file() -> None:
    refused = run_command("simulate", str(EXAMPLE), "--limit", "5", "--cluster", "1x(4cpu)")
    assert refused.returncode == 2
    assert "--cluster and --limit cannot be used with a jobs file" in refused.stderr
    for command in ("plan", "run", "explain"):
        refused = run_command(command, str(EXAMPLE))
        assert refused.returncode == 2
        assert f"fix  dovetail simulate {EXAMPLE}" in refused.stderr


def test_every_key_of_a_class_and_of_workers_is_in_the_schema() -> None:
    found = schema()["properties"]
    assert set(found) == set(SCENARIO.names)
    assert "rate" in found["jobs"]["additionalProperties"]["properties"]
