"""`dovetail simulate` and `dovetail replay`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command import run_command

VIDEO = str(Path(__file__).parents[2] / "examples" / "video.yaml")
SPEC = "1x(32cpu, 128GB, 2xL40S:48GB)"


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, DOVETAIL_HOME=str(home))


def test_a_simulation_prints_its_summary_and_where_to_look_next(tmp_path: Path) -> None:
    shown = run(tmp_path, "simulate", VIDEO, "--cluster", SPEC, "--limit", "800")
    assert shown.returncode == 0, shown.stderr
    assert "800 of 800 items" in shown.stdout
    assert "caption" in shown.stdout
    assert "dovetail status" in shown.stderr
    listed = run(tmp_path, "ls")
    assert "video" in listed.stdout
    assert "finished" in listed.stdout
    assert run(tmp_path, "status", "last").returncode == 0


def test_json_is_the_summary_and_nothing_else(tmp_path: Path) -> None:
    shown = run(tmp_path, "simulate", VIDEO, "--cluster", SPEC, "--limit", "300", "--json")
    data = json.loads(shown.stdout)
    assert (data["status"], data["delivered"]) == ("finished", 300)
    assert {unit["name"] for unit in data["units"]} >= {"download", "caption", "write"}


PIPELINE = """
name: lengths
source: rows.jsonl
sink: out.jsonl
stages:
  - {name: measure, run: "steps:measure"}
"""
STEPS = "def measure(rows):\n    return [{**row, 'n': len(row['text'])} for row in rows]\n"


def test_speeds_of_earlier_runs_are_used_unless_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(PIPELINE)
    Path("steps.py").write_text(STEPS)
    Path("rows.jsonl").write_text('{"text": "word"}\n' * 5000)
    simulated = ("simulate", "p.yaml", "--cluster", "1x(2cpu, 4GB)", "--limit", "1000")
    before = run(tmp_path, *simulated)
    assert "note: no speed is known" in before.stderr
    assert run(tmp_path, "run", "p.yaml").returncode == 0
    after = run(tmp_path, *simulated)
    assert "note: the speed of measure was measured in 1 run" in after.stderr, after.stderr
    assert "note: no speed is known" in run(tmp_path, *simulated, "--no-profiles").stderr


def test_a_recorded_simulation_replays_the_same(tmp_path: Path) -> None:
    assert run(tmp_path, "simulate", VIDEO, "--cluster", SPEC, "--limit", "300", "--record").returncode == 0
    shown = run(tmp_path, "replay", "last")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("same: ")
    data = json.loads(run(tmp_path, "replay", "--json").stdout)
    assert data["same"] is True
    assert data["steps"] > 0
    assert data["difference"] == []


def test_a_run_without_a_recording_cannot_be_replayed_and_the_error_has_a_fix(tmp_path: Path) -> None:
    assert run(tmp_path, "simulate", VIDEO, "--cluster", SPEC, "--limit", "50").returncode == 0
    shown = run(tmp_path, "replay", "last")
    assert shown.returncode == 2
    assert "--record" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["no-such.yaml"], 2, "no-such.yaml"),
        ([VIDEO, "--limit", "-5"], 2, "--limit -5"),
        ([VIDEO, "--limit", "many"], 2, "many"),
        ([VIDEO, "--cluster", "1x(2cpu, 8GB)"], 3, "DT11"),
        ([VIDEO, "--cluster", SPEC, "--spread", "nan"], 2, "spread"),
    ],
)
def test_bad_input_is_one_clear_error_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    spec = [] if "--cluster" in arguments else ["--cluster", SPEC]
    shown = run(tmp_path, "simulate", *arguments, *spec)
    assert shown.returncode == code, shown.stderr
    assert says in shown.stderr
    assert shown.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_a_reader_that_leaves_early_does_not_make_a_good_run_fail(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dovetail", "simulate", VIDEO, "--cluster", SPEC, "--limit", "50"]
    environment = {**os.environ, "DOVETAIL_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        talk = process.stderr.read()
        assert process.wait() == 0, talk
    assert b"Traceback" not in talk
