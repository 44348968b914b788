"""`dovetail plan --probe`, and plans from measurements of earlier runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from command import run_command

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.time_limit

STEPS = """
import time
from pathlib import Path

def numbers(count=1000):
    yield from range(count)

def nap(items):
    began = time.perf_counter()
    time.sleep(0.003 * len(items))
    with Path(__file__).with_name("napped.txt").open("a") as file:
        print(time.perf_counter() - began, file=file)
    return items

def twice(items):
    return [item for item in items for _ in range(2)]
"""
PIPELINE = """
name: naps
source: {run: "probed_steps:numbers"}
stages:
  - {name: nap, run: "probed_steps:nap"}
  - {name: twice, run: "probed_steps:twice", fuse: false}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "probed_steps.py").write_text(STEPS)
    (tmp_path / "a folder" / "naps.yaml").write_text(PIPELINE)
    return tmp_path


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("plan", *arguments, cwd=folder, DOVETAIL_HOME=str(folder / "home"))


def sources(shown: subprocess.CompletedProcess[str]) -> list[str]:
    assert shown.returncode == 0, shown.stderr
    return [unit["rate_source"] for unit in json.loads(shown.stdout)["units"]]


def test_a_probe_measures_and_the_next_plan_knows(folder: Path) -> None:
    file = "a folder/naps.yaml"
    assert sources(plan(folder, file, "--json")) == ["assumed", "assumed"]
    shown = plan(folder, file, "--probe", "50")
    assert shown.returncode == 0, shown.stderr
    assert "probed with 50 items" in shown.stderr
    assert "^ measured" in shown.stdout
    assert "note: the speed of nap, twice was measured in 1 run" in shown.stdout
    again = plan(folder, file, "--json")
    assert sources(again) == ["measured", "measured"]
    nap, twice = json.loads(again.stdout)["units"]
    napped = (folder / "a folder" / "napped.txt").read_text().split()
    really = 50 / sum(map(float, napped))  # on a busy machine a nap takes longer
    assert really / 3 < nap["rate"] < 334
    assert nap["per_source"] == twice["per_source"] == 1
    assert sources(plan(folder, file, "--no-profiles", "--json")) == ["assumed", "assumed"]
    assert not (folder / "home" / "runs").exists() or not list((folder / "home" / "runs").iterdir())


def test_code_that_changed_is_not_known(folder: Path) -> None:
    file, steps = "a folder/naps.yaml", folder / "a folder" / "probed_steps.py"
    probed = plan(folder, file, "--probe", "4")
    assert probed.returncode == 0
    assert "probed with 4 items" in probed.stderr
    assert "standard error unknown: few batches; a larger N measures better" in probed.stderr
    steps.write_text(STEPS.replace("import time", "import time  # changed"))
    assert sources(plan(folder, file, "--json")) == ["measured", "measured"]
    steps.write_text(STEPS.replace("0.003", "0.03"))
    assert sources(plan(folder, file, "--json")) == ["assumed", "measured"]


def test_a_probe_reads_the_given_source(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(30)))
    shown = plan(folder, "a folder/naps.yaml", "--probe", "100", "--source", "rows.jsonl")
    assert shown.returncode == 0, shown.stderr
    assert "probed with 30 items" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (["--probe", "0"], "", 2),
        (["--probe", "many"], "", 2),
        (["--source", "rows.jsonl"], "DT371", 2),
        (["--probe", "5", "--no-profiles"], "DT371", 2),
    ],
)
def test_invalid_options_of_a_probe_are_reported(folder: Path, arguments: list[str], code: str, exit_code: int) -> None:
    shown = plan(folder, "a folder/naps.yaml", *arguments)
    assert shown.returncode == exit_code
    assert code in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_file_without_a_source_and_a_stage_that_fits_only_on_logical_gpus(folder: Path) -> None:
    file = folder / "a folder" / "naps.yaml"
    file.write_text(PIPELINE.replace('source: {run: "probed_steps:numbers"}\n', ""))
    shown = plan(folder, str(file), "--probe", "5")
    assert shown.returncode == 2
    assert "DT371" in shown.stderr
    file.write_text(PIPELINE.replace('twice", fuse: false}', 'twice", resources: {gpus: 64}}'))
    shown = plan(folder, str(file), "--probe", "5")
    assert shown.returncode == 3
    assert "DT370" in shown.stderr
    assert "remove --probe" in shown.stderr
    shown = plan(folder, str(file), "--probe", "5", "--cluster", "1x(8cpu, 64xL40S:48GB)")
    assert shown.returncode == 0, shown.stderr
    assert "probed with 5 items" in shown.stderr


def test_a_probe_wins_over_earlier_runs_with_a_sink(folder: Path) -> None:
    """The probe has no sink, so it is stored beside what the run has measured."""
    file, home = folder / "a folder" / "naps.yaml", str(folder / "home")
    file.write_text(PIPELINE.replace("stages:", "sink: out.jsonl\nstages:"))
    ran = run_command("run", str(file), "--cluster", "1x(4cpu, 8GB)", "--limit", "50", DOVETAIL_HOME=home)
    assert ran.returncode == 0, ran.stderr
    probed = plan(folder, str(file), "--probe", "30", "--json")
    assert probed.returncode == 0, probed.stderr
    lines = run_command("profile", "ls", "--json", DOVETAIL_HOME=home).stdout.splitlines()
    by_probe = {entry["stage"]: entry["items_per_s"] for entry in map(json.loads, lines) if entry["probed"]}
    rates = {unit["name"]: unit["rate"] for unit in json.loads(probed.stdout)["units"]}
    assert rates == pytest.approx(by_probe)
