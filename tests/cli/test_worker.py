"""`dovetail worker`: options, status, drain, stop, and jobs in real processes."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from command import run_command
from dovetail.cli.signals import WorkerSignals
from dovetail.cli.worker import StatusLine, status_text
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from redis_aids import RedisProcess

TASKS = """
import time
from pathlib import Path
import dovetail as dt

@dt.job(isolation="thread")
def add(a, b):
    return a + b

@dt.job(isolation="thread")
def echo(message):
    return message

@dt.job
def hold(name):
    print("holding", name, flush=True)
    Path(name).touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return name
"""
SMALL = ("--resources", "2cpu, 2GB", "--slots", "2", "--port", "0")


class WorkerFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tasks.py").write_text(TASKS)
        self.variables = {
            "DOVETAIL_QUEUE": "sqlite:///jobs.db",
            "DOVETAIL_HOME": str(folder / "home"),
            "PYTHONPATH": ":".join(path for path in sys.path if path),
        }

    def jobs(self, *words: str) -> str:
        done = run_command("jobs", *words, cwd=self.folder, **self.variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fails(self, *words: str, code: int = 2, **variables: str) -> str:
        done = run_command("worker", *words, cwd=self.folder, **self.variables | variables)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def state(self, job: str) -> str:
        return str(json.loads(self.jobs("show", job, "--json"))["state"])

    @contextmanager
    def worker(self, *words: str) -> Iterator[Running]:
        """A worker in a process of its own."""
        import os

        log = self.folder / "worker.log"
        command = [sys.executable, "-m", "dovetail", "worker", "--app", "tasks", *SMALL, *words]
        with log.open("w") as err:
            process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | self.variables, stdout=subprocess.DEVNULL, stderr=err
            )
        try:
            running = Running(process, log)
            until(lambda: "workers/status" in running.log or process.poll() is not None, "it has started")
            yield running
        finally:
            process.kill()
            process.wait()


class Running:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> tuple[int, Any]:
        port = int(self.log.partition("http://127.0.0.1:")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def ended(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def place(tmp_path: Path) -> WorkerFolder:
    return WorkerFolder(tmp_path)


@pytest.mark.processes
@pytest.mark.time_limit
def test_jobs_are_run_shown_and_drained(place: WorkerFolder) -> None:
    first = place.jobs("submit", "tasks:hold", "name=first").strip()
    with place.worker() as worker:
        assert json.loads(place.jobs("submit", "tasks:add", "a=1", "b=2", "--wait")) == 3
        until((place.folder / "first").exists, "the job runs")
        until(lambda: place.jobs("logs", first, "--no-timestamps") == "holding first\n", "its output is shown")
        status, found = worker.get("/workers/status")
        assert (status, found["active_jobs"], found["available_slots"]) == (200, 1, 1)
        assert worker.get(f"/jobs/{first}")[1]["state"] == "leased"
        assert worker.get("/readyz")[0] == 200
        worker.process.send_signal(signal.SIGTERM)
        until(lambda: "SIGTERM: taking no more jobs; 1 running job may finish within 30 s" in worker.log, "it drains")
        assert worker.get("/readyz")[0] == 503
        waiting = place.jobs("submit", "tasks:add", "a=1", "b=1").strip()
        (place.folder / "go").touch()
        assert worker.ended() == 0, worker.log
        assert worker.log.endswith("stopped\n")
        assert "Traceback" not in worker.log
        assert f"jobs: {place.folder / 'jobs.db'}\nfunctions: tasks:add, tasks:" in worker.log
    assert place.state(first) == "succeeded"
    assert place.state(waiting) == "ready"


@pytest.mark.processes
@pytest.mark.time_limit
def test_a_second_signal_stops_at_once_and_charges_no_attempt(place: WorkerFolder) -> None:
    job = place.jobs("submit", "tasks:hold", "name=first").strip()
    with place.worker() as worker:
        until((place.folder / "first").exists, "the job runs")
        worker.process.send_signal(signal.SIGINT)
        until(lambda: "Ctrl-C: taking no more jobs" in worker.log, "it drains")
        worker.process.send_signal(signal.SIGINT)
        assert worker.ended() == 130, worker.log
        assert "stopping now" in worker.log
        assert "Traceback" not in worker.log
    shown = json.loads(place.jobs("show", job, "--json"))
    assert (shown["state"], [one["outcome"] for one in shown["attempts"]]) == ("ready", ["preempted"])


@pytest.mark.processes
@pytest.mark.time_limit
def test_messages_of_a_redis_list_are_run_from_a_queue_in_sqlite(
    place: WorkerFolder, redis_server: RedisProcess
) -> None:
    name = f"list-of-{place.folder}"
    with place.worker("--ingest", f"{name}=tasks:echo", "--ingest-url", redis_server.url) as worker:
        with redis_server.client() as client:
            client.lpush(name, '{"n": 1, "priority": "high"}', "junk")
        until(lambda: worker.get("/workers/status")[1]["totals"].get("succeeded") == 1, "the job has run")
        until(lambda: worker.get("/workers/status")[1]["ingest"][0]["rejected"] == 1, "the other one is rejected")
        with redis_server.client() as client:
            assert [json.loads(entry)["message"] for entry in client.lrange(f"{name}:rejected", 0, -1)] == ["junk"]
            client.delete(f"{name}:rejected")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.ended() == 0, worker.log
        assert "message rejected: not JSON" in worker.log
    [job] = json.loads(place.jobs("ls", "--json"))
    assert (job["state"], job["priority"], job["function"]) == ("succeeded", 10, "tasks:echo")


def test_all_mistakes_are_one_error(place: WorkerFolder) -> None:
    error = place.fails("--app", "tsaks", "--host", "0.0.0.0", "--ingest", "list=tasks:add")
    for text in ("no module named 'tsaks'", "fix  export DOVETAIL_TOKEN=", "fix  --ingest-url redis://"):
        assert text in error
    error = place.fails("--app", "tasks", "--slots", "0", "--lease", "soon", "--queues", ",", "--recycle-bytes", "many")
    for text in ("--slots", "--lease", "--queues", "--recycle-bytes"):
        assert text in error


@pytest.mark.parametrize(
    ("words", "variables", "code", "texts"),
    [
        ((), {}, 2, ("this worker could run nothing", "fix  --app pkg.module")),
        (("--app", "tasks"), {"DOVETAIL_QUEUE": ""}, 2, ("no queue: ", "--queue-url sqlite:///jobs.db")),
        (("--app", "tasks", "--queue", "jobs.db"), {}, 2, ("error[DT601]", "--queue-url sqlite:///jobs.db")),
        (("--app", "tasks", "--queue", "redis://127.0.0.1:1/0"), {}, 5, ("error[DT660]",)),
        (("--app", "tasks"), {"MAX_CONCURRENT_JOBS": "many"}, 2, ("MAX_CONCURRENT_JOBS=many", "export MAX_")),
        (("--app", "tasks"), {"USE_GPU": "perhaps"}, 2, ("USE_GPU=perhaps",)),
        (("--app", "tasks", "--isolation", "proces"), {}, 2, ("process",)),
        (("tasks",), {}, 2, ("unexpected extra argument (tasks). Name modules by --app MODULE.",)),
        (("--app", "tasks", "--lease", "0"), {}, 2, ("--lease 0 is not above 0", "fix  --lease 15s")),
        (("--app", "tasks", "--queues", ","), {}, 2, ("--queues", "fix  --queues default\n")),
        (("--app", "tasks", "--queue", "memory:"), {}, 2, ("ends with its program", "fix  --queue-url sqlite:")),
        (("--app", "tasks", "--use-gpu"), {"CUDA_VISIBLE_DEVICES": ""}, 2, ("error[DT622]", "fix  --no-gpu")),
        (
            ("--app", "tasks", "--queue", "redis://127.0.0.1:1/0", "--ingest", "l=tasks:ad"),
            {},
            2,
            ("did you mean 'add'?",),
        ),
    ],
)
def test_what_is_wrong_is_one_clear_error(
    place: WorkerFolder, words: tuple[str, ...], variables: dict[str, str], code: int, texts: tuple[str, ...]
) -> None:
    error = place.fails(*words, code=code, **variables)
    assert [text for text in texts if text not in error] == [], error


STATUS = {"state": "running", "active_jobs": 3, "available_slots": 1, "totals": {"succeeded": 120, "out_of_memory": 1}}


def test_the_status_is_one_line() -> None:
    text = status_text({**STATUS, "store_available": True})
    assert text == "running: 3 jobs, 1 free slot, 120 succeeded, 1 out of memory"
    assert status_text({**STATUS, "store_available": False}).endswith("; the store cannot be reached")


def test_the_status_is_printed_every_ten_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("dovetail.cli.worker.time.monotonic", lambda: now[0])
    line = StatusLine()
    for _ in range(250):
        now[0] += 0.1
        line({**STATUS, "store_available": True})
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_exit_code_says_how_it_was_stopped() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with WorkerSignals() as signals:
        assert signals.exit_code == 0
        signal.raise_signal(signal.SIGTERM)
        assert (signals.exit_code, signals.count) == (0, 1)
        signal.raise_signal(signal.SIGINT)
        assert signals.exit_code == 143
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
