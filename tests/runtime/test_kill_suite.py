"""Random kills and stops of workers, fork servers, supervisors, guards, drivers, agents and nodes, during pipelines,
recipes and backfills on both engines: the output is exact, each run ends soon after the last event, nothing is left.

The seed is part of the id of a test; `-k` with it repeats a scenario.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from ray_aids import add_node, patiently, until_available_is
from runtime.aids import Script, child_pids, command_of, is_there, marked_pids
from runtime.kills import JOB, WRITE, expected, make_rows, rows_of, run_script
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray_aids import FakeCluster, FakeNode

pytestmark = pytest.mark.time_limit(600 if LONG else 150)

ROWS = 800
HOLD = 480
"""Rows from here on wait until all events of the scenario have happened."""
END_S = 30.0
"""A run ends within this time of the last event, on an idle machine."""
LABELS = {"fake": "d"}
"""Of the nodes of Ray that are used, and that may be killed."""
MAX_STOP_S = 8.0
"""A driver takes an agent that was silent for 5 s for lost."""

WORK = """
import os, subprocess, time
from pathlib import Path

HERE = Path(__file__).parent
programs = []

def record(number):
    \"\"\"Record a row, and wait for the test from a row on. Each worker starts a program in a session of its own.\"\"\"
    if not programs:
        programs.append(subprocess.Popen(["sleep", "3000"], start_new_session=True))
    while number >= HOLD and not (HERE / "go").exists():
        (HERE / "held").touch()
        time.sleep(0.005)
    time.sleep(0.002)
    fd = os.open(HERE / "calls.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\\n" % number)
    os.close(fd)

def keep(row):
    record(row["id"])
    return row
""".replace("HOLD", str(HOLD))
RECIPE_JOB = """
import os
import dovetail as dt

if __name__ == "__main__":
    where = {"engine": os.environ["ENGINE"]} if os.environ["ENGINE"] else {"cluster": "1x(2cpu, 8GB)"}
    dt.Recipe.load("recipe.yaml").run(progress=False, probe=False, **where)
"""
RECIPE = """
dataset_path: in.jsonl
export_path: out.jsonl
use_checkpoint: true
skip_op_error: false
np: 2
process:
  - 'kill_work:keep'
  - text_length_filter: {min_len: 10}
"""
BACKFILL_JOB = """
import json, os
import dovetail as dt
import kill_work

class Doubled:
    def __call__(self, id: int) -> int:
        kill_work.record(id)
        return 2 * id

if __name__ == "__main__":
    where = {"engine": os.environ["ENGINE"]} if os.environ["ENGINE"] else {"cluster": "1x(2cpu, 8GB)"}
    udf = dt.udf(Doubled, version="1", labels=json.loads(os.environ["LABELS"]))
    dt.table("table.lance").backfill("n", udf, commit_every="0.5s", progress=False, **where)
"""
CHECKS_MEMORY = """
    import gc
    gc.collect()
    folder = "/proc/self/fd/"
    links = [os.readlink(folder + fd) for fd in os.listdir(folder) if os.path.islink(folder + fd)]
    assert not any("memfd:" in link for link in links), links
"""
"""At the end of a driver that was not killed: it holds no shared memory any more."""


@dataclass
class Job:
    """A kind of work in a folder, started as a driver in its own process as often as it is killed."""

    folder: Path
    engine: str
    labels: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        (self.folder / "tmp").mkdir()
        (self.folder / "kill_work.py").write_text(WORK)

    def start(self) -> Script:
        with suppress(FileNotFoundError):
            (self.folder / "held").unlink()
        environment: dict[str, Any] = {"ENGINE": self.engine, "LABELS": json.dumps(self.labels), **self.variables()}
        environment |= {"TMPDIR": str(self.folder / "tmp"), "DOVETAIL_HOME": str(self.folder / "home")}
        text = self.text() + CHECKS_MEMORY
        return Script(self.folder, text, warm=not self.engine, **environment)

    def text(self) -> str:
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        return {}

    def check_output(self) -> None:
        raise NotImplementedError

    def calls(self) -> int:
        path = self.folder / "calls.log"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def is_held(self) -> bool:
        return (self.folder / "held").exists()

    def release(self) -> None:
        (self.folder / "go").touch()

    def leftovers(self) -> list[str]:
        """Temporary files, part files and folders."""
        names = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*")]
        signs = (".tmp", ".parts", "/parts/", "/spool/")
        return [name for name in names if name.startswith("tmp/") or any(sign in name for sign in signs)]


class PipelineJob(Job):
    def prepare(self) -> None:
        super().prepare()
        make_rows(self.folder / "in.jsonl", ROWS)

    def text(self) -> str:
        return JOB

    def variables(self) -> dict[str, str]:
        run_dir = self.folder / "run"
        begun = (run_dir / "commit.log").exists()
        settings: dict[str, Any] = {"resume" if begun else "run_dir": str(run_dir), "engine": self.engine}
        settings |= {
            "source": str(self.folder / "in.jsonl"),
            "sink": str(self.folder / "out.jsonl"),
            "labels": self.labels,
        }
        return {"OPTIONS": json.dumps({**settings, "hold": HOLD, "sleep": 0.002, "retries": 50})}

    def check_output(self) -> None:
        assert [json.loads(line) for line in rows_of(self.folder / "out.jsonl")] == expected(ROWS)


class RecipeJob(Job):
    def prepare(self) -> None:
        super().prepare()
        make_rows(self.folder / "in.jsonl", ROWS)
        (self.folder / "recipe.yaml").write_text(RECIPE)

    def text(self) -> str:
        return RECIPE_JOB

    def check_output(self) -> None:
        rows = [json.loads(line) for line in rows_of(self.folder / "out.jsonl")]
        wanted = [number for number in range(ROWS) if number % 50 >= 10]
        assert [(row["id"], len(row["text"])) for row in rows] == [(number, number % 50) for number in wanted]


class BackfillJob(Job):
    def prepare(self) -> None:
        super().prepare()
        run_script(WRITE, self.folder / "table.lance", ROWS)

    def text(self) -> str:
        return BACKFILL_JOB

    def check_output(self) -> None:
        rows = rows_of(self.folder / "table.lance")
        assert sorted((row["id"], row["n"]) for row in rows) == [(number, 2 * number) for number in range(ROWS)]


JOBS = {"pipeline": PipelineJob, "recipe": RecipeJob, "backfill": BackfillJob}


@dataclass(frozen=True)
class LocalServer:
    """The processes of one local engine."""

    parent: int
    """The driver, or an agent of Ray."""
    guard: int
    supervisor: int
    forkserver: int
    workers: list[int]


def local_servers(script: Script) -> list[LocalServer]:
    """Local servers on this machine, of a driver or of its agents."""
    pids = [pid for pid in marked_pids(script.mark) if "dovetail.engines.local.supervisor" in command_of(pid)]
    found = []
    for guard in pids:
        parent = parent_of(guard)
        if parent != script.process.pid and "ray::" not in command_of(parent):
            continue  # a process below a guard, perhaps one that has just lost its parent
        for supervisor in child_pids(guard):
            for forkserver in child_pids(supervisor):
                workers = [pid for pid in child_pids(forkserver) if pid in pids]
                found.append(LocalServer(parent, guard, supervisor, forkserver, workers))
    return found


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


TARGETS: dict[str, Callable[[LocalServer], list[int]]] = {
    "worker": lambda server: server.workers,
    "fork server": lambda server: [server.forkserver],
    "supervisor": lambda server: [server.supervisor],
    "guard": lambda server: [server.guard],
    "agent": lambda server: [server.parent],
}


class Scenario:
    """A job that is disturbed at random moments of its progress."""

    def __init__(self, job: Job, dice: Random, events: int, node: FakeNode | None = None) -> None:
        self._job, self._dice, self._events, self._node = job, dice, events, node
        self._script = job.start()
        self.log: list[str] = []

    def play(self) -> None:
        try:
            for _ in range(self._events):
                self._wait_for_progress()
                self._disturb()
            self._job.release()
            began = time.monotonic()
            self._script.finish()
            took = time.monotonic() - began
            self.log.append(f"ended {took:.1f} s later")
            assert took < patiently(END_S), "the run did not end soon after the last event"
            self._script.all_gone(patiently(END_S))
        finally:
            print("events:", self.log)  # noqa: T201 - shown if the test fails, or with -rP
            self._script.__exit__()

    def _wait_for_progress(self) -> None:
        """A random number of rows; none every fifth time, so that runs are also disturbed while they start."""
        if self._dice.random() < 0.2:
            time.sleep(self._dice.random())
            return
        goal = self._job.calls() + self._dice.randrange(1, HOLD // self._events)

        def reached() -> bool:
            code = self._script.process.poll()
            assert code is None, f"the driver ended with exit code {code}:\n{self._script.output}"
            return self._job.calls() >= goal or self._job.is_held()

        until(reached, "there is progress")

    def _disturb(self) -> None:
        who = (
            self._dice.choice(["driver", *TARGETS])
            if self._job.engine
            else self._dice.choice(["driver", "worker", "fork server", "supervisor", "guard"])
        )
        if self._node is not None and not any("node" in line for line in self.log):
            who = "node"
        stopped = self._dice.random() < 0.3
        if who == "driver" and not stopped:
            self._kill_driver()
        elif who == "driver":
            self._stop(self._script.process.pid, who)
        elif who == "node":
            assert self._node is not None
            self._signal(self._node.raylet_pid, who, stopped)
        else:
            self._signal(self._choose(who), who, stopped)

    def _choose(self, who: str) -> int:
        found: list[int] = []

        def look() -> bool:
            code = self._script.process.poll()
            assert code is None, f"the driver ended with exit code {code}:\n{self._script.output}"
            found[:] = [pid for server in local_servers(self._script) for pid in TARGETS[who](server)]
            return any(map(is_there, found))

        until(look, f"there is a process: {who}")
        return self._dice.choice(found)

    def _signal(self, pid: int, who: str, stopped: bool) -> None:
        if stopped:
            self._stop(pid, who)
            return
        self.log.append(f"kill {who} {pid}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _stop(self, pid: int, who: str) -> None:
        seconds = self._dice.random() * (MAX_STOP_S if LONG else 1.0)
        self.log.append(f"stop {who} {pid} for {seconds:.1f} s")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    def _kill_driver(self) -> None:
        how = self._dice.choice([signal.SIGKILL, signal.SIGTERM])
        self.log.append(f"{how.name} to the driver")
        with self._script as killed:
            killed.kill(how)
            killed.process.wait(patiently(END_S))
            killed.all_gone(patiently(END_S))
        self._script = self._job.start()


def make_job(kind: str, folder: Path, cluster: FakeCluster | None) -> Job:
    job = JOBS[kind](folder, f"ray:{cluster.address}" if cluster is not None else "", LABELS if cluster else {})
    job.prepare()
    return job


def check(job: Job) -> None:
    job.check_output()
    assert job.leftovers() == []


LOCAL = {"pipeline": 8, "recipe": 6, "backfill": 6} if LONG else {"pipeline": 1, "recipe": 1, "backfill": 1}
"""Kind -> number of scenarios."""
LOCAL_EVENTS = 5 if LONG else 2


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, count in LOCAL.items() for seed in range(count)])
def test_random_kills_and_stops_leave_exact_output_and_nothing_else(tmp_path: Path, kind: str, seed: int) -> None:
    job = make_job(kind, tmp_path, None)
    Scenario(job, Random(f"local {kind} {seed}"), LOCAL_EVENTS).play()
    check(job)


ON_RAY = {"pipeline": 10, "recipe": 8, "backfill": 7} if LONG else {"pipeline": 1}
RAY_EVENTS = 4 if LONG else 2


@pytest.mark.ray
@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, count in ON_RAY.items() for seed in range(count)])
def test_random_kills_and_stops_on_ray_leave_exact_output_and_nothing_else(
    ray_cluster: FakeCluster, tmp_path: Path, kind: str, seed: int
) -> None:
    """Every third scenario of `make test-long` kills or stops a node."""
    job = make_job(kind, tmp_path, ray_cluster)
    before = ray_cluster.available()
    with ExitStack() as stack:
        node = None
        if LONG and seed % 3 == 2:
            node = stack.enter_context(add_node(ray_cluster, num_cpus=2, labels=LABELS))
        Scenario(job, Random(f"ray {kind} {seed}"), RAY_EVENTS, node).play()
        until(lambda: not ray_cluster.groups(), "all placement groups are removed")
        until_available_is(ray_cluster, before, patiently(END_S))
    check(job)
