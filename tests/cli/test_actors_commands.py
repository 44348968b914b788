"""`dovetail actors`: up, ls, status, scale, logs and down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from command import run_command, run_process
from runtime.aids import is_there
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

ACTORS = """\
name: rl
roles:
  - {name: trainer, cls: "roles:Speaker", resources: {cpus: 0.1}, together: train}
  - {name: pool, cls: "roles:Speaker", resources: {cpus: 0.1}, together: train}
  - {name: rollout, cls: "roles:Speaker", resources: {cpus: 0.1}, workers: [1, 3], scale: {target: 1000}}
"""
ROLES = """\
class Speaker:
    def setup(self, worker):
        print("hello from", worker.stage, worker.index, flush=True)
"""
CLUSTER = "1x(2cpu, 2GB)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "actors.yaml").write_text(ACTORS)
    (tmp_path / "roles.py").write_text(ROLES)
    return tmp_path


def actors(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_command("actors", *words, cwd=folder, DOVETAIL_HOME=str(folder / "home"), COLUMNS="200")


@pytest.mark.time_limit
def test_a_system_in_the_background_is_listed_shown_scaled_and_stopped(folder: Path) -> None:
    home = str(folder / "home")
    words = ("--cluster", CLUSTER, "--set", "roles.rollout.workers=[1, 2]", "--detach")
    up = run_process("actors", "up", "actors.yaml", *words, cwd=folder, DOVETAIL_HOME=home)
    assert up.returncode == 0, up.stderr
    run = up.stdout.strip()
    assert "dovetail actors down" in up.stderr
    pid = json.loads((folder / run / "run.json").read_text())["pid"]
    try:
        assert [row["name"] for row in json.loads(actors(folder, "ls", "--json").stdout)] == ["rl"]
        assert "running" in actors(folder, "ls").stdout
        shown = actors(folder, "status", "rl").stdout
        assert "rl (" in shown
        assert [line.split()[:2] for line in shown.splitlines()[2:]] == [
            ["trainer[0]", "ready"],
            ["pool[0]", "ready"],
            ["rollout[0]", "ready"],
        ]
        assert actors(folder, "scale", "rollout=2").returncode == 0
        rows = json.loads(actors(folder, "status", "--json").stdout)["instances"]
        assert [row["index"] for row in rows if row["role"] == "rollout"] == [0, 1]
        refused = actors(folder, "scale", "rl", "rolout=2", "rollout=9")
        assert refused.returncode == 2
        assert "error[DT524]" in refused.stderr
        assert (
            "there is no role 'rolout' (did you mean 'rollout'?); roles: trainer, pool, rollout; "
            "rollout=9: role 'rollout' has 1 to 2" in refused.stderr
        )
        _check_that_another_system_waits(folder)
        until(lambda: "hello from rollout 1" in actors(folder, "logs", "rl", "rollout").stdout, "it has printed")
        assert "hello from trainer 0" in actors(folder, "logs", "rl", "pool").stdout, "they share a process"
        assert "hello from rollout" not in actors(folder, "logs", "rl", "pool").stdout
        listed = run_command("ls", "--kind", "actors", cwd=folder, DOVETAIL_HOME=home)
        assert "rl" in listed.stdout
    finally:
        down = actors(folder, "down")
    assert down.returncode == 0, down.stderr
    until(lambda: not is_there(pid), "the driver has ended")
    assert "is finished" in actors(folder, "status").stdout
    assert "no actor systems are running" in actors(folder, "ls").stderr
    assert "finished" in actors(folder, "ls", "--all").stdout


def _check_that_another_system_waits(folder: Path) -> None:
    larger = ("actors.yaml", "--cluster", CLUSTER, "--set", "roles.rollout.resources.cpus=1.8")
    late = actors(folder, "up", *larger, "--deadline", "200ms")
    assert late.returncode == 3
    assert "error[DT120]" in late.stderr
    assert "fix  --deadline 60s  # waits longer\n" in late.stderr
    assert "wait: true" not in late.stderr
    assert "fix  omit --no-wait" in actors(folder, "up", *larger, "--no-wait").stderr
    command = [sys.executable, "-m", "dovetail", "actors", "up", *larger, "--detach"]
    env = os.environ | {"DOVETAIL_HOME": str(folder / "home")}
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        assert up.stderr.readline().startswith("waiting for 2 CPUs: run ")
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=PATIENCE_S)
    assert up.returncode != 0


@pytest.mark.time_limit
def test_ctrl_c_stops_a_system_in_the_foreground(folder: Path) -> None:
    command = [sys.executable, "-m", "dovetail", "actors", "up", "actors.yaml", "--cluster", CLUSTER]
    env = os.environ | {"DOVETAIL_HOME": str(folder / "home")}
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        assert up.stderr is not None
        assert "rl is running" in up.stderr.readline()
        up.send_signal(signal.SIGINT)
        out, err = up.communicate(timeout=PATIENCE_S)
    assert up.returncode == 0, err
    assert "rollout[0]" in out
    assert err.splitlines()[-1] == "stopped"


def test_a_system_that_does_not_fit_is_refused_with_the_line_of_the_file(folder: Path) -> None:
    (folder / "actors.yaml").write_text(ACTORS + '  - {name: large, cls: "roles:Speaker", resources: {cpus: 64}}\n')
    refused = actors(folder, "up", "actors.yaml", "--cluster", CLUSTER)
    assert refused.returncode == 3
    assert "actors.yaml:6" in refused.stderr
    assert "role 'large'" in refused.stderr


def test_classes_that_do_not_exist_are_reported_at_once_with_their_lines(folder: Path) -> None:
    more = '  - {name: one, cls: "roles:Speeker"}\n  - {name: two, cls: "rolls:Speaker"}\n'
    (folder / "actors.yaml").write_text(ACTORS + more)
    refused = actors(folder, "up", "actors.yaml", "--cluster", CLUSTER)
    assert refused.returncode == 2
    for text in ("actors.yaml:6:17", "fix  cls: roles:Speaker", "actors.yaml:7:17", "no module named 'rolls'"):
        assert text in refused.stderr
    wrong = '  - {name: three, cls: "roles:Speaker", args: [1]}\n'
    (folder / "actors.yaml").write_text(ACTORS + wrong)
    refused = actors(folder, "up", "actors.yaml", "--cluster", CLUSTER)
    assert refused.returncode == 2
    assert "actors.yaml:6:5  role 'three': Speaker() cannot be called" in refused.stderr


def test_a_detached_system_that_does_not_start_reports_its_error(folder: Path) -> None:
    (folder / "roles.py").write_text("class Speaker:\n    def setup(self):\n        raise OSError('no model here')\n")
    home = str(folder / "home")
    up = run_process("actors", "up", "actors.yaml", "--cluster", CLUSTER, "-d", cwd=folder, DOVETAIL_HOME=home)
    assert up.returncode == 1
    assert "no model here" in up.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("status",), "no actor system was started yet"),
        (("down", "rl"), "there is no run 'rl'"),
        (("scale", "rl"), "no role and number"),
        (("scale", "rollout=many", "pool=2"), "not ROLE=N: 'rollout=many'"),
        (("up", "gone.yaml"), "gone.yaml"),
        (("up", "actors.yaml", "--deadline", "-1"), "'-1' is not a time such as"),
        (("up", "actors.yaml", "--detach", "--deadline", "0s"), "'0s' is not above 0"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, words: tuple[str, ...], text: str) -> None:
    refused = actors(folder, *words)
    assert refused.returncode == 2
    assert text in refused.stderr


def test_a_run_of_another_kind_is_no_actor_system(folder: Path) -> None:
    run = folder / "home" / "runs" / "20261116-030533-9f3a-video"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"name": "video", "status": "finished"}))
    refused = actors(folder, "down", "video")
    assert refused.returncode == 2
    assert "is a pipeline, not an actor system" in refused.stderr
