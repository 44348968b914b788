"""`dovetail jobs`: submit, ls, show, cancel, dead, requeue, purge, pause, stats, schedules, logs and watch."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from command import run_command
from dovetail.cli import jobs_logs, jobs_text
from dovetail.jobs.job import JobState, Outcome, Retries
from dovetail.jobs.payload_files import LocalFiles, log_name
from dovetail.jobs.store import (
    Claim,
    Completion,
    Exchange,
    QueueStats,
    Renewal,
    StoreUnavailableError,
    WorkerInfo,
)
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.resources.cluster import Cluster
from dovetail.resources.free_resources import NodeKind

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.store import ClaimedJob, Store

TASKS = """
import dovetail as dt

@dt.job(retries=1)
def train(rate=0.1, epochs=3, name=""):
    return rate

@dt.job(resources={"gpus": 1, "cpus": 4})
def infer(x):
    return x

def helper():
    pass
"""
NODE = Cluster.of("1x(4cpu, 8GB)")


class SharedStore(MemoryStore):
    """A store that commands of this process open by its URL, one after another."""

    def close(self) -> None:
        pass


class QueueFolder:
    """A folder with tasks.py, and a queue."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store = folder, store
        (folder / "tasks.py").write_text(TASKS)

    def run(self, *words: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        settings = {"DOVETAIL_QUEUE": "memory:", "COLUMNS": "160", "DOVETAIL_HOME": str(self.folder / "home")}
        return run_command("jobs", *words, cwd=self.folder, stdin=stdin, **settings | variables)

    def ok(self, *words: str, **more: str) -> str:
        done = self.run(*words, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stderr_of(self, *words: str) -> str:
        """Run a command that succeeds; returns its stderr."""
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def fails(self, *words: str, code: int = 2) -> str:
        done = self.run(*words)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def submit(self, *words: str) -> str:
        return self.ok("submit", *words).strip()

    def record(self, job_id: str) -> JobRecord:
        [found] = self.store.get([job_id])
        assert found is not None
        return found

    def claim(self, slots: int = 1) -> list[ClaimedJob]:
        free = NodeKind(NODE.nodes[0]).untouched()
        return list(self.store.exchange(Exchange("w-1", claim=Claim(slots, free))).claimed)

    def complete(self, claimed: ClaimedJob, outcome: Outcome, **more: Any) -> None:
        completion = Completion(claimed.spec.id, claimed.lease.token, outcome, **more)
        assert not self.store.exchange(Exchange("w-1", [completion])).refused

    def add_worker(self, **details: object) -> None:
        resources = NODE.to_dict()
        self.store.register_worker(WorkerInfo("w-1", slots=4, details={"resources": resources, **details}))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QueueFolder:
    store = SharedStore()
    for module in ("queue", "stores.store_url"):
        monkeypatch.setattr(f"dovetail.jobs.{module}.open_store", lambda _url: store)
    return QueueFolder(tmp_path, store)


# --- submit


def test_a_job_is_submitted_with_arguments_and_the_defaults_of_its_function(place: QueueFolder) -> None:
    job = place.record(place.submit("tasks:train", "rate=0.5", "name='7'", "epochs=2"))
    assert json.loads(job.spec.payload) == [[], {"rate": 0.5, "name": "7", "epochs": 2}]
    assert job.spec.retries == Retries(1, 1, 1, 1)
    assert place.record(place.submit("tasks:infer", "--args", "[[1, 2]]")).spec.payload == b"[[[1,2]],{}]"
    by_name = place.record(place.submit("tasks:train", "--args", '{"rate": 1, "epochs": 9}', "epochs=2"))
    assert json.loads(by_name.spec.payload)[1] == {"rate": 1, "epochs": 2}
    (place.folder / "call.json").write_text("[0.3, 4]")
    assert place.record(place.submit("tasks:train", "--args", "@call.json")).spec.payload == b"[[0.3,4],{}]"
    assert place.run("submit", "tasks:train", "--args", "-", stdin="[0.4]").returncode == 0


def test_options_of_a_job_are_options_of_the_command(place: QueueFolder) -> None:
    first = place.submit("tasks:train")
    words = ["--queue", "gpu", "--priority", "high", "--timeout", "90s", "--retries", "0", "--isolation", "process"]
    words += ["--key", "k", "--after", first[4:], "--delay", "1m", "--resources", "gpus=0.5, cpus=2"]
    spec = place.record(place.submit("tasks:train", *words, "--set", "if_dependency_fails=block")).spec
    assert (spec.queue, spec.priority, spec.timeout_ms, spec.isolation) == ("gpu", 10, 90_000, "process")
    assert (spec.key, spec.after, spec.delay_ms, spec.if_dependency_fails) == ("k", (first,), 60_000, "block")
    assert (spec.shape.gpu_milli, spec.shape.cpu_milli, spec.retries.error) == (500, 2000, 0)
    more = place.record(place.submit("tasks:train", "--priority", "-5", "--set", "retries.error=7")).spec
    assert (more.priority, more.retries.error) == (-5, 7)
    again = place.run("submit", "tasks:train", "--key", "k", "--json")
    assert json.loads(again.stdout) == {"id": place.store.id_of_key("k"), "created": False}


def test_a_schedule_is_submitted_listed_and_removed(place: QueueFolder) -> None:
    words = ("--cron", "0 3 * * *", "--timezone", "Europe/Berlin", "--key", "nightly")
    assert place.submit("tasks:train", "epochs=1", *words) == "nightly"
    assert "nightly   0 3 * * *  Europe/Berlin  tasks:train  default  in " in place.ok("schedules")
    [listed] = json.loads(place.ok("schedules", "--json"))
    assert (listed["schedule"], listed["timezone"]) == ("nightly", "Europe/Berlin")
    assert "did you mean 'nightly'?" in place.fails("schedules", "--remove", "nihgtly")
    assert "removed nightly" in place.stderr_of("schedules", "--remove", "nightly")
    assert place.stderr_of("schedules") == "no schedules\n"


def test_the_result_is_waited_for_and_an_error_is_exit_code_1(
    place: QueueFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[tuple[Outcome, dict[str, Any]]] = [
        (Outcome.SUCCEEDED, {"result": b"0.5", "encoding": "json"}),
        (Outcome.ERROR, {"final": True, "error": "ValueError: no"}),
    ]

    def wait_finished(ids: list[str], timeout_s: float) -> list[str]:
        del timeout_s
        [claimed] = place.claim()
        outcome, more = outcomes.pop(0)
        place.complete(claimed, outcome, **more)
        return ids

    monkeypatch.setattr(place.store, "wait_finished", wait_finished)
    assert place.ok("submit", "tasks:train", "--wait") == "0.5\n"
    failed = place.fails("submit", "tasks:train", "--wait", code=1)
    assert "error[DT613]" in failed
    assert "ValueError: no" in failed
    assert re.search(r"fix  dovetail jobs logs \w+\n  fix  dovetail jobs requeue \w+", failed)


def test_a_job_that_no_worker_serves_comes_with_the_command_that_starts_one(place: QueueFolder) -> None:
    notes = place.stderr_of("submit", "tasks:train", "--queue", "gpu")
    assert "note: start one: dovetail worker --app tasks --queues gpu\nnote: the queue is memory:\n" in notes
    error = place.fails("submit", "tasks:train", "--wait", "--wait-timeout", "0.01s", code=1)
    assert "note: start one: dovetail worker --app tasks\n" in error
    assert "fix  omit --wait-timeout" in error
    assert re.search(r"fix  dovetail jobs show \w+", error)
    place.add_worker()
    assert "start one" not in place.stderr_of("submit", "tasks:infer", "x=1")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("tasks:trian",), ("has no job function 'trian' (did you mean 'train'?)", "dovetail jobs submit tasks:train")),
        (("tasks:helper",), ("no job function 'helper'", "write @dt.job above def helper")),
        (("tsaks:train",), ("error[DT609]", "tsaks")),
        (("train",), ("'train' is not MODULE:FUNCTION",)),
        (("tasks:train", "rat=1"), ("error[DT604]", "fix  rate=1")),
        (("tasks:infer",), ("missing a required argument: 'x'", "fix  x=VALUE")),
        (
            ("tasks:infer", "bogus=1"),
            ("missing a required argument: 'x', and got an unexpected keyword argument 'bogus'", "fix  omit bogus"),
        ),
        (("tasks:train", "--resources", "cpus=2, gpus=x"), ('gpus="x"', "fix  --resources 'cpus=2, gpus=1'")),
        (("tasks:train", "rate"), ("'rate' is not KEY=VALUE", "fix  rate=VALUE")),
        (("tasks:train", "--args", "{"), ("--args is not JSON",)),
        (("tasks:train", "--args", "3"), ("--args is neither a list", "fix  --args '[3]'")),
        (("tasks:train", "--args", "@gone.json"), ("--args @gone.json: No such file",)),
        (("tasks:train", "--priority", "hihg", "--timeout", "soon"), ("--priority high", "--timeout 90s")),
        (("tasks:train", "--resources", "gpu=1"), ("unknown name 'gpu' (did you mean 'gpus'?)",)),
        (("tasks:train", "--resources", "gpus=-1"), ("gpus=-1, which is negative", "fix  --resources gpus=1")),
        (("tasks:train", "--cron", "0 25 * * *"), ("error[DT610]", "--cron")),
        (("tasks:train", "--after", "none"), ("there is no job 'none'",)),
        (("tasks:train", "--queue", "redis://x"), ("fix  --queue-url redis://x",)),
        (("tasks:train", "--set", "retries"), ("is not path=value",)),
    ],
)
def test_a_wrong_submission_is_refused_with_the_fix(
    place: QueueFolder, words: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    error = place.fails("submit", *words)
    assert [text for text in texts if text not in error] == [], error
    assert place.store.stats() == []


def test_a_module_that_only_workers_have_is_submitted_by_name(place: QueueFolder) -> None:
    job = place.submit("elsewhere.tasks:train", "rate=1", "--no-import")
    assert place.record(job).spec.function == "elsewhere.tasks:train"


# --- ls and show


def test_jobs_are_listed_with_what_is_worth_knowing(place: QueueFolder) -> None:
    place.add_worker()
    running = place.submit("tasks:train", "--priority", "high")
    [claimed] = place.claim()
    place.store.exchange(Exchange("w-1", renewals=[Renewal(running, claimed.lease.token, 0.4, "epoch 2")]))
    waiting = place.submit("tasks:train", "--after", running)
    later = place.submit("tasks:train", "--delay", "1h", "--queue", "other")
    lines = place.ok("ls").splitlines()
    assert lines[0].split() == ["job", "function", "queue", "state", "time"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert list(rows) == [later, waiting, running]
    assert "40 %, epoch 2" in rows[running]
    assert f"waits for {running}" in rows[waiting]
    assert "in 1 h 00 min" in rows[later]
    assert [job["id"] for job in json.loads(place.ok("ls", "--json", "--state", "leased"))] == [running]
    assert json.loads(place.ok("ls", "--json", "--queue", "none")) == []
    narrow = place.ok("ls", COLUMNS="60").splitlines()
    assert max(map(len, narrow)) <= 60


def test_lists_have_pages(place: QueueFolder) -> None:
    ids = [place.submit("tasks:train") for _ in range(5)]
    done = place.run("ls", "--limit", "2", "--state", "ready")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ids[:-3:-1]
    assert f"dovetail jobs ls --state ready --before {ids[3]}" in done.stderr
    rest = place.ok("ls", "--before", ids[3]).splitlines()[1:]
    assert [line.split()[0] for line in rest] == ids[2::-1]
    assert len(json.loads(place.ok("ls", "--json"))) == 5


def test_a_job_that_no_worker_can_run_is_marked_with_needs_and_what_workers_have(place: QueueFolder) -> None:
    place.add_worker()
    submitted = place.run("submit", "tasks:infer", "x=1")
    assert "note: no worker can run this: it needs 1 GPU, 4 CPUs" in submitted.stderr
    job = submitted.stdout.strip()
    assert place.submit("tasks:train")
    listed = place.run("ls")
    assert listed.stdout.count("[1] no worker can run this") == 1
    assert "[1] no worker can run this: it needs 1 GPU, 4 CPUs: w-1 has" in listed.stderr
    assert "no worker can run this: it needs 1 GPU, 4 CPUs" in place.ok("show", job)
    assert "it needs 1 GPU" in json.loads(place.ok("show", job, "--json"))["problem"]


def test_one_job_is_shown_with_arguments_attempts_and_traceback(place: QueueFolder) -> None:
    job = place.submit("tasks:train", "rate=0.5", "--key", "my-key")
    [claimed] = place.claim()
    place.complete(
        claimed,
        Outcome.ERROR,
        error="ValueError: no data",
        traceback="Traceback ...\nValueError: no data\n",
        final=True,
    )
    for word in (job, job[5:13], "my-key", "last"):
        assert f"job {job}" in place.ok("show", word)
    shown = place.run("show", job)
    assert "tasks:train(rate=0.5)" in shown.stdout
    assert "state      failed, 0." in shown.stdout
    assert "Traceback ...\nValueError: no data" in shown.stdout
    assert f"dovetail jobs requeue {job}" in shown.stderr
    data = json.loads(place.ok("show", job, "--json"))
    assert data["arguments"] == {"args": [], "kwargs": {"rate": 0.5}}
    assert data["attempts"][0]["error"] == "ValueError: no data"
    done = place.submit("tasks:train")
    place.complete(place.claim()[0], Outcome.SUCCEEDED, result=b'{"loss": 1}', encoding="json")
    assert 'result     {"loss": 1}' in place.ok("show", done)


def test_pickled_arguments_are_never_opened(place: QueueFolder) -> None:
    from dataclasses import replace

    job = place.record(place.submit("tasks:train"))
    bomb = b"cos\nsystem\n(S'touch opened'\ntR."
    place.store.submit([replace(job.spec, id="zzz", payload=bomb, encoding="pickle")])
    assert "tasks:train(<pickle, 31B>)" in place.ok("show", "zzz")
    assert json.loads(place.ok("show", "zzz", "--json"))["arguments"] == "<pickle, 31B>"
    assert not (place.folder / "opened").exists()


def test_a_gang_is_shown_with_the_workers_of_its_ranks(place: QueueFolder) -> None:
    free = NodeKind(NODE.nodes[0]).untouched()
    for worker in ("w-1", "w-2"):
        place.store.register_worker(WorkerInfo(worker, slots=4, details={"resources": NODE.to_dict()}))
        place.store.exchange(Exchange(worker, claim=Claim(4, free)))
    job = place.submit(
        "tasks:train", "--ranks", "3", "--resources", "cpus=2", "--preemptible", "--preemption-grace", "2m"
    )
    spec = place.record(job).spec
    assert (spec.shape.ranks, spec.preemptible, spec.preemption_grace_ms) == (3, True, 120_000)
    assert "needs      3 ranks of (2 CPUs)" in place.ok("show", job)
    place.store.exchange(Exchange("w-1", claim=Claim(4, free, address="10.0.0.1:4000")))
    shown = place.ok("show", job)
    assert "queue      default, preemptible" in shown
    assert "ranks      0 to 1 on w-1, 2 on w-2, rank 0 listens at 10.0.0.1:4000" in shown
    data = json.loads(place.ok("show", job, "--json"))
    assert (data["ranks"], data["rank_workers"]) == (3, ["w-1", "w-1", "w-2"])


def test_a_gang_that_no_workers_can_hold_is_marked(place: QueueFolder) -> None:
    place.add_worker()
    message = place.stderr_of("submit", "tasks:train", "--ranks", "3", "--resources", "cpus=2")
    assert "no worker can run this: it needs 3 ranks of (2 CPUs)" in message
    assert "w-1 has (4cpu, 8GB): 2 of 3 ranks fit" in message
    assert "it has 5 ranks, and the workers of its queue have 4 slots" in place.stderr_of(
        "submit", "tasks:train", "--ranks", "5"
    )
    assert place.stderr_of("submit", "tasks:train", "--ranks", "4") == ""


def test_a_part_of_an_id_must_be_unique(place: QueueFolder) -> None:
    ids = sorted([place.submit("tasks:train"), place.submit("tasks:train")])
    common = ids[0][-7:]
    error = place.fails("show", common)
    assert f"{common!r} is a part of several ids" in error
    error = place.fails("cancel", "nothing", common)
    assert error.count("error[DT644]") == 2


# --- cancel, requeue, dead, purge


def test_jobs_are_cancelled_by_id_and_by_selection(place: QueueFolder) -> None:
    running, *waiting = [place.submit("tasks:train") for _ in range(3)]
    place.claim()
    other = place.submit("tasks:train", "--queue", "other")
    assert "is being stopped by its worker" in place.stderr_of("cancel", running)
    assert "stdin is not a terminal" in place.fails("cancel", "--queue", "default")
    changed = json.loads(place.ok("cancel", "--queue", "default", "--state", "ready", "--yes", "--json"))
    assert {job["id"]: job["state"] for job in changed} == dict.fromkeys(waiting, "cancelled")
    assert place.record(other).state is JobState.READY
    assert "was not cancelled: it is cancelled" not in place.stderr_of("cancel", waiting[0])
    assert "cannot be combined" in place.fails("cancel", other, "--queue", "other")
    assert "no jobs were selected" in place.fails("cancel")
    assert "no jobs match" in place.stderr_of("cancel", "--queue", "none", "--yes")


def test_dead_letters_are_listed_requeued_and_purged_only_by_name(place: QueueFolder) -> None:
    job = place.submit("tasks:train")
    for _ in range(2):
        place.complete(place.claim()[0], Outcome.ERROR, error="ValueError: no data")
    dead = place.run("dead")
    assert f"{job}  tasks:train  ValueError: no data" in dead.stdout
    assert len([line for line in dead.stdout.splitlines() if " error " in line]) == 2
    assert "run them again: dovetail jobs requeue --queue default --state dead --yes" in place.stderr_of(
        "dead", "--queue", "default"
    )
    assert place.stderr_of("dead", "--function", "tasks:infer") == "no dead letters\n"
    assert place.stderr_of("purge", "--all", "--yes") == "removed 0 jobs, 0B\n"
    assert f"{job} requeued" in place.stderr_of("requeue", "--queue", "default", "--yes")
    assert "was not requeued: it is ready" in place.stderr_of("requeue", job)
    for _ in range(2):
        place.complete(place.claim()[0], Outcome.ERROR, error="ValueError: no data")
    assert "removed 1 job" in place.stderr_of("purge", "--state", "dead", "--yes")
    assert place.stderr_of("dead") == "no dead letters\n"


def test_finished_jobs_are_purged_by_age_and_size(place: QueueFolder) -> None:
    for _ in range(3):
        place.submit("tasks:train")
    for claimed in place.claim(2):
        place.complete(claimed, Outcome.SUCCEEDED, result=b"1" * 1000, encoding="json")
    assert place.stderr_of("purge", "--older-than", "1h") == "removed 0 jobs, 0B\n"
    assert json.loads(place.ok("purge", "--keep", "1500B", "--yes", "--json"))["jobs"] == 1
    assert "no option selects the jobs to remove" in place.fails("purge")
    assert "stdin is not a terminal" in place.fails("purge", "--all")
    assert "--keep" in place.fails("purge", "--keep", "much", "--yes")
    assert "removed 1 job" in place.stderr_of("purge", "--all", "--yes")
    assert len(json.loads(place.ok("ls", "--json"))) == 1, "jobs that wait stay"


# --- queues


def test_queues_are_paused_and_resumed(place: QueueFolder) -> None:
    place.submit("tasks:train", "--queue", "gpu")
    assert place.stderr_of("pause", "gpu") == "gpu is paused\n"
    assert "did you mean 'gpu'?" in place.stderr_of("pause", "gup")
    assert [line.endswith("paused") for line in place.ok("stats").splitlines()[1:]] == [True, True]
    assert place.stderr_of("resume", "gpu", "gup").startswith("gpu is not paused\n")


def test_a_ready_job_shows_why_it_waits(place: QueueFolder) -> None:
    place.add_worker()
    place.submit("tasks:train", "--resources", "cpus=1")
    place.stderr_of("pause", "default")
    assert "paused: queue default" in place.ok("ls")
    assert "paused: queue default" in place.ok("show", "last")
    assert json.loads(place.ok("show", "last", "--json"))["waiting"] == "paused: queue default"
    assert json.loads(place.ok("ls", "--json"))[0]["waiting"] == "paused: queue default"


def test_queues_have_limits(place: QueueFolder) -> None:
    assert place.ok("limit", "gpu") == "gpu: no limits\n"
    assert place.ok("limit", "gpu", "--max-running", "4") == "gpu: at most 4 running\n"
    assert place.ok("limit", "gpu", "--weight", "2") == "gpu: weight 2, at most 4 running\n"
    assert place.ok("stats").splitlines()[1].endswith("weight 2, at most 4 running")
    assert json.loads(place.ok("stats", "--json"))["queues"][0]["max_running"] == 4
    assert place.ok("limit", "gpu", "--clear", "--weight", "3") == "gpu: weight 3\n"
    assert place.ok("limit", "gpu", "--clear") == "gpu: no limits\n"
    assert "--weight" in place.fails("limit", "gpu", "--weight", "0")


def test_statistics_show_queues_and_workers(place: QueueFolder) -> None:
    assert place.stderr_of("stats") == "no jobs; no workers\n"
    place.add_worker()
    place.submit("tasks:train")
    place.submit("tasks:train")
    place.claim()
    shown = place.ok("stats").splitlines()
    assert shown[0].split() == ["queue", "ready", "leased", "oldest"]
    assert shown[1].split()[:3] == ["default", "1", "1"]
    assert shown[4].split()[:4] == ["w-1", "default", "1", "4"]
    data = json.loads(place.ok("stats", "--json"))
    assert data["queues"][0]["ready"] == 1
    assert data["workers"][0]["available_slots"] == 3


def test_watch_prints_lines_until_the_queue_is_idle(place: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.cli.jobs_watch.INTERVAL_S", 0.0)
    monkeypatch.setattr("dovetail.cli.jobs_watch.LINE_INTERVAL_S", 0.0)
    place.submit("tasks:train")
    stats, claimed = place.store.stats, place.claim()

    def then_complete() -> Any:
        found = stats()
        if claimed:
            place.complete(claimed.pop(), Outcome.SUCCEEDED)
        return found

    monkeypatch.setattr(place.store, "stats", then_complete)
    assert place.ok("watch", "--until-idle").splitlines() == ["1 leased; no workers", "1 succeeded; no workers"]
    [line] = place.ok("watch", "--until-idle", "--json").splitlines()
    assert json.loads(line)["queues"][0]["succeeded"] == 1


def test_watch_continues_when_the_store_was_away(place: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.cli.jobs_watch.INTERVAL_S", 0.0)
    place.submit("tasks:train")
    stats, claimed, away = place.store.stats, place.claim(), [1, 2, 3]

    def with_a_gap() -> Any:
        if not claimed and away:
            away.pop()
            raise StoreUnavailableError(dt.Problem("DT660", "the server at redis://h cannot be reached"))
        found = stats()
        if claimed:
            place.complete(claimed.pop(), Outcome.SUCCEEDED)
        return found

    monkeypatch.setattr(place.store, "stats", with_a_gap)
    done = place.run("watch", "--until-idle")
    assert (done.returncode, done.stdout) == (0, "1 leased; no workers\n1 succeeded; no workers\n")
    assert done.stderr == "note: the store does not answer: the server at redis://h cannot be reached\n"


# --- output of jobs


def test_the_output_of_a_job_is_printed_by_attempt(place: QueueFolder) -> None:
    job = place.submit("tasks:train")
    assert "has not begun: it is ready" in place.stderr_of("logs", job)
    [claimed] = place.claim()
    files = LocalFiles(place.folder / "logs")
    assert f"no output of attempt 1 of job {job}" in place.stderr_of("logs", job, "--log-dir", "logs")
    files.put(log_name(job, 1), b"first\n")
    place.complete(claimed, Outcome.LOST)
    place.complete(place.claim()[0], Outcome.SUCCEEDED)
    files.put(log_name(job, 2), b"2026-01-02T03:04:05.678Z second\nlast line")
    shown = place.ok("logs", job, "--log-dir", "logs")
    assert re.fullmatch(r"2026-01-0[123] \d\d:\d\d:05\.678 second\nlast line\n", shown)
    assert place.ok("logs", "last", "--log-dir", "logs", "--attempt", "1") == "first\n"
    assert place.ok("logs", job, "--log-dir", "logs", "-f", "--no-timestamps") == "second\nlast line\n"
    assert "has had 2 attempts, not 3" in place.fails("logs", job, "--attempt", "3")
    assert "has no ranks, not 1" in place.fails("logs", job, "--rank", "1")


def test_the_output_of_each_rank_of_a_gang_is_printed(place: QueueFolder) -> None:
    job = place.submit("tasks:train", "--ranks", "2", "--resources", "cpus=1")
    free = NodeKind(NODE.nodes[0]).untouched()
    place.store.exchange(Exchange("w-1", claim=Claim(4, free, address="h:1")))
    for rank in range(2):
        LocalFiles(place.folder / "logs").put(log_name(job, 1, rank), f"rank {rank}\n".encode())
    assert place.ok("logs", job, "--log-dir", "logs") == "rank 0\n"
    assert place.ok("logs", job, "--log-dir", "logs", "--rank", "1") == "rank 1\n"
    assert "has ranks 0 to 1, not 2" in place.fails("logs", job, "--rank", "2")


def test_a_reader_of_the_output_that_stops_is_not_a_missing_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalFiles(tmp_path).put(log_name("j1", 1), b"first\nsecond\n")
    output = jobs_logs.Output(None, str(tmp_path), times=False)

    def echo(text: str) -> None:
        raise BrokenPipeError(text)

    monkeypatch.setattr("click.echo", echo)
    with pytest.raises(BrokenPipeError, match="first"):
        output.copy("j1", 1)


def test_a_list_is_cut_to_a_terminal_and_not_where_there_is_none(place: QueueFolder) -> None:
    job = place.submit("tasks:train")
    text = "no data for " + "x" * 200
    place.complete(place.claim()[0], Outcome.ERROR, final=True, error=text)
    assert text in place.ok("ls", COLUMNS="")
    assert text not in place.ok("ls", COLUMNS="100")
    assert job in place.ok("ls", COLUMNS="100")


def test_control_characters_in_a_reference_are_shown_as_escapes() -> None:
    assert jobs_text.function_name("tasks:f\x1b[2J") == "tasks:f\\x1b[2J"


# --- the queue


def test_the_queue_comes_from_the_option_the_environment_or_the_project_file(place: QueueFolder) -> None:
    error = place.run("ls", DOVETAIL_QUEUE="").stderr
    assert "fix  export DOVETAIL_QUEUE=sqlite:///jobs.db" in error
    assert "fix  --queue-url sqlite:///jobs.db" in error
    assert place.run("ls", "--queue-url", "memory:", DOVETAIL_QUEUE="").returncode == 0
    (place.folder / "dovetail.toml").write_text('queue = "memory:"\n')
    assert place.run("ls", DOVETAIL_QUEUE="").returncode == 0


def test_an_sqlite_file_that_does_not_exist_is_not_created_by_reading(place: QueueFolder) -> None:
    (place.folder / "jobs.db").touch()
    error = place.fails("ls", "--queue-url", "sqlite:///job.db")
    assert "there is no queue at sqlite:///job.db" in error
    assert "fix  --queue-url sqlite:///jobs.db" in error
    assert not (place.folder / "job.db").exists()


def test_an_unreachable_store_is_exit_code_5(place: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreUnavailableError(dt.Problem("DT660", "no connection", fixes=("start it",)))

    monkeypatch.setattr(place.store, "find", away)
    monkeypatch.setattr(place.store, "submit", away)
    for words in (("ls",), ("show", "last"), ("submit", "tasks:train")):
        assert "error[DT660]" in place.fails(*words, code=5)


def test_unknown_commands_have_a_suggestion(place: QueueFolder) -> None:
    assert "'requeue'?)" in place.fails("reqeue")


def test_tables_fit_a_narrow_terminal() -> None:
    now_ms = 10_000_000
    stats = [QueueStats("a-queue-with-a-long-name", dict.fromkeys(JobState, 12_345), True, 0, {})]
    workers = [WorkerInfo("worker-" + "x" * 60, ("a-queue-with-a-long-name", "other"), 4)]
    for width in (60, 80, 120):
        queues = jobs_text.queue_table(stats, now_ms, width)
        assert max(map(len, queues)) <= width
        assert "ready" in queues[0]
        assert queues[1].endswith("  paused")
        shown = jobs_text.worker_table(workers, now_ms, width)
        assert max(map(len, shown)) <= width
        assert shown[1].endswith("  gone")
