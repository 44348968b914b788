"""`dovetail run`: files, results, messages and exit codes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from cli.jobs import CLUSTER, CommandFolder
from command import run_command
from dovetail.cli.engine_option import TargetCluster
from dovetail.cli.saved_arguments import RunArguments, arguments_for_header, merge_saved_arguments
from dovetail.observe.run_folder import create_run
from dovetail.streaming import health

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

pytestmark = pytest.mark.time_limit

WANTED = [{"n": n, "twice": 2 * n} for n in range(20)]


@pytest.fixture
def place(tmp_path: Path) -> CommandFolder:
    return CommandFolder(tmp_path / "my jöbs")


def by_n(rows: Iterable[dict[str, int]]) -> list[dict[str, int]]:
    return sorted(rows, key=lambda row: row["n"])


# --- from files to files


def test_a_file_is_run_from_its_source_to_its_sink(place: CommandFolder) -> None:
    done = place.run_process("run", "p.yaml", *CLUSTER)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert by_n(place.result()) == WANTED
    for words in ("p on 1x(2cpu, 4GB)", "20 of 20 items in, 20 out", ", out.jsonl\n"):
        assert words in done.stderr
    assert "dovetail status" in done.stderr
    (run,) = place.runs()
    assert not (run / "control.sock").exists()
    assert {path.name for path in place.folder.iterdir()} == {"home", "in.jsonl", "out.jsonl", "p.yaml", "steps.py"} | {
        path.name for path in place.folder.glob("__pycache__")
    }


def test_paths_in_a_file_start_at_its_folder_and_typed_ones_here(place: CommandFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "three.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    file = str(place.folder / "p.yaml")
    assert place.run("run", file, *CLUSTER, cwd=elsewhere).returncode == 0
    assert len(place.result()) == 20
    done = place.run("run", file, *CLUSTER, "--source", "three.jsonl", "--sink", "out.jsonl", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert len((elsewhere / "out.jsonl").read_text().splitlines()) == 3
    done = place.run("run", file, *CLUSTER, "--set", "source.path=t*.jsonl", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert len(place.result()) == 3


def test_without_a_sink_results_go_to_stdout_and_the_talk_to_stderr(place: CommandFolder) -> None:
    place.file("source: in.jsonl", "double")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert by_n(map(json.loads, done.stdout.splitlines())) == WANTED
    assert "20 of 20 items in" in done.stderr
    assert place.run("run", "p.yaml", *CLUSTER, "--ordered").stdout == "".join(f"{json.dumps(row)}\n" for row in WANTED)


def test_a_closed_pipe_ends_the_run_quietly(place: CommandFolder) -> None:
    place.rows("in.jsonl", 20_000)
    place.file("source: in.jsonl", "double")
    command = f"{sys.executable} -m dovetail run p.yaml --cluster '1x(2cpu, 4GB)' | head -3; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=place.folder, env=place.environment(), check=False
    )
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 3), done.stderr
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr.lower()


def test_stdin_is_a_source_too(place: CommandFolder) -> None:
    given = '{"n": 1}\n\n{"n": 2}\n'
    done = place.run("run", "p.yaml", *CLUSTER, "--source", "-", "--sink", "-", "--ordered", stdin=given)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["twice"] for line in done.stdout.splitlines()] == [2, 4]
    bad = place.run("run", "p.yaml", *CLUSTER, "--source", "-", "--sink", "-", stdin='{"n": 1}\n{torn\n')
    assert bad.returncode == 2, bad.stderr
    assert "stdin:2" in bad.stderr


def test_functions_can_be_source_and_sink(place: CommandFolder) -> None:
    place.file("source: {run: 'steps:numbers', args: {count: 5, first: 3}}\nsink: {run: 'steps:keep'}", "double")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert sorted((place.folder / "kept.txt").read_text().split()) == ["3", "4", "5", "6", "7"]


def test_each_end_of_a_pipeline_has_its_sink(place: CommandFolder) -> None:
    head = "source: in.jsonl\nsink: {stages: {even: even.jsonl, odd: {path: odd.jsonl, ordered: true}}}"
    place.file(head, "double", "even")
    with (place.folder / "p.yaml").open("a") as file:
        file.write("  - {name: odd, run: 'steps:odd', after: [double]}\n")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert by_n(place.result("even.jsonl")) == WANTED[::2]
    assert place.result("odd.jsonl") == WANTED[1::2]


def test_a_run_offers_changes_that_would_make_it_faster_and_they_work_when_pasted(
    place: CommandFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.cli.run_report.MIN_IMPROVABLE_S", 0.0)
    (place.folder / "steps.py").write_text(
        "import time\ndef wait(rows):\n    time.sleep(0.02 * len(rows))\n    return rows\n"
    )
    (place.folder / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(60)))
    place.file("source: in.jsonl\nsink: out.jsonl", "wait")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    reason, change = next(pairwise(done.stderr[done.stderr.index("faster") :].splitlines()))
    assert reason.startswith("faster      a worker of wait requests 1 CPU and uses 0.")
    option, text = shlex.split(change, comments=True)
    assert (option, text.partition("=")[0]) == ("--set", "stages.wait.resources.cpus")
    plan = json.loads(place.run("plan", "p.yaml", *CLUSTER, "--json").stdout)
    faster = json.loads(place.run("plan", "p.yaml", *CLUSTER, option, text, "--json").stdout)
    assert faster["workers"]["wait"] > plan["workers"]["wait"] == 2


def test_the_summary_as_json(place: CommandFolder) -> None:
    done = place.run("run", "p.yaml", *CLUSTER, "--json")
    data = json.loads(done.stdout)
    assert (data["status"], data["finished"], data["delivered"]) == ("finished", 20, 20)


@pytest.mark.parametrize(("closed", "code"), [("<&- >&- 2>&-", 0), (">&- --sink -", 2), ("2>&-", 0)])
def test_closed_descriptors_do_no_harm(place: CommandFolder, closed: str, code: int) -> None:
    command = f"exec {sys.executable} -m dovetail run p.yaml --cluster '1x(2cpu, 4GB)' {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=place.folder, env=place.environment(), check=False)
    assert done.returncode == code
    assert (place.folder / "out.jsonl").exists() is (code == 0)


def test_a_full_disk_behind_stdout_is_an_error(place: CommandFolder) -> None:
    command = f"exec {sys.executable} -m dovetail run p.yaml --cluster '1x(2cpu, 4GB)' --sink - > /dev/full"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place.folder,
        env=place.environment(),
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    assert "results cannot be written to stdout: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


# --- options


def test_set_changes_values_of_the_file(place: CommandFolder) -> None:
    options = ("--set", "stages.double.workers=1", "--set", "sink.ordered=true", "--set", "name=renamed")
    done = place.run("run", "p.yaml", *CLUSTER, *options)
    assert done.returncode == 0, done.stderr
    assert place.result() == WANTED
    assert "renamed" in place.runs()[0].name
    plan = json.loads((place.runs()[0] / "plan.json").read_text())
    assert plan["workers"] == {"double": 1}


def test_limit_takes_the_first_rows(place: CommandFolder) -> None:
    done = place.run("run", "p.yaml", *CLUSTER, "--limit", "7", "--ordered")
    assert done.returncode == 0, done.stderr
    assert place.result() == WANTED[:7]


def test_a_run_dir_and_a_record_are_kept(place: CommandFolder) -> None:
    done = place.run("run", "p.yaml", *CLUSTER, "--run-dir", "here", "--record")
    assert done.returncode == 0, done.stderr
    assert (place.folder / "here" / "replay.log").stat().st_size > 0
    assert place.run("replay", "here").returncode == 0


@pytest.mark.processes
def test_what_workers_print_is_shown_with_verbose(place: CommandFolder) -> None:
    place.file("source: in.jsonl\nsink: out.jsonl", "Talker")
    done = place.run("run", "p.yaml", *CLUSTER, "--limit", "3", "-v")
    assert done.returncode == 0, done.stderr
    assert "saw 2" in done.stderr


def test_the_simulated_engine_needs_neither_code_nor_data(place: CommandFolder) -> None:
    place.file("source: nowhere.jsonl", "nothing")
    done = place.run("run", "p.yaml", "--engine", "sim", "--cluster", "2x(8cpu, 16GB)", "--limit", "100")
    assert done.returncode == 0, done.stderr
    assert "finished after" in done.stdout
    assert "of simulated time" in done.stdout


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--engine", "cloud"], "DT331"),
        (["--engine", "ray:head"], "DT390"),
        (["--engine", "ray://head:10001"], "DT390"),
        (["--engine", "ray:auto", "--cluster", "1x(2cpu)"], "DT367"),
        (["--engine", "sim", "--share", "0.5"], "DT367"),
        (["--share", "1.5"], "DT338"),
        (["--share", "0.5"], "DT338"),  # of this machine
        (["--share", "1.5", "--engine", "ray", "--dry-run"], "DT338"),
        (["--env-from", "A B"], "DT338"),
    ],
)
def test_an_engine_and_what_goes_with_it_are_checked_before_anything_starts(
    place: CommandFolder, options: list[str], code: str
) -> None:
    done = place.run("run", "p.yaml", *options)
    assert done.returncode == 2
    assert f"error[{code}]" in done.stderr
    assert not place.runs()


def test_a_ray_that_does_not_answer_is_an_unreachable_engine(place: CommandFolder) -> None:
    done = place.run("run", "p.yaml", "--engine", "ray:127.0.0.1:1")
    assert done.returncode == 5
    assert "error[DT393] cannot reach Ray at 127.0.0.1:1" in done.stderr


def test_no_ray_is_started_for_what_cannot_run(
    place: CommandFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rays = tmp_path / "rays"
    rays.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(rays))
    for options in (["--source", "nothing.jsonl"], ["--resume", "nobody"], ["--env-from", "NOT_SET_ANYWHERE"]):
        done = place.run("run", "p.yaml", "--engine", "ray", *options)
        assert done.returncode == 2, done.stderr
        assert not list(rays.iterdir())


def test_a_dry_run_plans_for_the_share() -> None:
    pipeline = dt.Pipeline([dt.Stage("x", len)])
    cluster = dt.Cluster.parse("2x(4cpu, 8GB)")
    first, second = (node.name for node in cluster.nodes)

    def cpus(foreign: tuple[dt.Seat, ...], share: float | None) -> dict[str, int]:
        plan = TargetCluster(cluster, True, foreign).plan(partial(dt.plan, pipeline), share)
        counted = Counter(seat.node for seat in plan.seats["x"])
        return {node: counted[node] for node in (first, second)}

    assert cpus((), None) == cpus((), 1.0) == {first: 4, second: 4}
    assert cpus((), 0.5) == {first: 2, second: 2}
    assert cpus((dt.Seat(first, 3000),), 0.5) == {first: 1, second: 2}
    with pytest.raises(dt.InfeasibleError) as caught:
        cpus((), 0.1)
    assert caught.value.codes == ("DT396",)


def test_a_run_resumes_where_it_stopped(place: CommandFolder) -> None:
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens")
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 1
    header = place.runs()[0] / "run.json"
    header_data = json.loads(header.read_text())
    asked = header_data["more"]["asked"]
    assert (asked["engine"], asked["share"], asked["env_from"]) == ("local", None, None)
    asked |= {"engine": "ray:127.0.0.1:1", "share": 0.5, "env_from": ["HOME"], "cluster": None}
    header.write_text(json.dumps(header_data))
    for options in (["--resume", "last"], ["p.yaml", "--resume", "last"], ["--retry-errors", "last"]):
        done = place.run("run", *options)
        assert done.returncode == 5, done.stderr
        assert "cannot reach Ray at 127.0.0.1:1" in done.stderr
    steps = place.folder / "steps.py"
    steps.write_text(steps.read_text().replace("% 10 == 7", "% 10 == 11"))
    done = place.run("run", "--resume", "last", "--engine", "local", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert sorted(row["n"] for row in place.result()) == list(range(20))


def test_where_a_run_was_is_remembered_and_what_is_typed_wins(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.touch()
    began = RunArguments(str(file), engine="ray:head:1", share=0.5, env_from=("A", "B"))
    folder = create_run("x", tmp_path / "run")
    folder.header.write_text(json.dumps({"more": arguments_for_header(began, has_sink=True)}))

    def again(now: RunArguments | None = None, **typed: object) -> tuple[object, ...]:
        nothing = {"engine": None, "share": None, "env_from": None}
        found = merge_saved_arguments(str(folder.path), now, (), nothing | typed)
        return found.engine, found.share, found.env_from

    assert again() == again(RunArguments(str(file))) == ("ray:head:1", 0.5, ("A", "B"))
    assert again(engine="ray", env_from=("C",)) == ("ray", 0.5, ("C",))
    assert again(engine="local") == ("local", None, ("A", "B"))  # of which there is no share
    assert again(engine="local", share=0.2) == ("local", 0.2, ("A", "B"))  # and an option is reported
    folder.header.write_text(json.dumps({"engine": "ray:auto"}))  # a program's
    assert again(RunArguments(str(file))) == ("ray:auto", None, None)


# --- plans


def test_a_plan_that_was_kept_is_run(place: CommandFolder) -> None:
    assert place.run("plan", "p.yaml", *CLUSTER, "--out", "plan.json").returncode == 0
    done = place.run("run", "p.yaml", *CLUSTER, "--plan", "plan.json")
    assert done.returncode == 0, done.stderr
    assert by_n(place.result()) == WANTED


def test_a_plan_for_another_cluster_or_other_stages_is_refused(place: CommandFolder) -> None:
    assert place.run("plan", "p.yaml", "--cluster", "1x(4cpu, 8GB)", "--out", "plan.json").returncode == 0
    done = place.run("run", "p.yaml", *CLUSTER, "--plan", "plan.json")
    assert done.returncode == 2
    assert "error[DT037] plan.json" in done.stderr
    assert "changed: node-0 (4cpu, 8GB) -> (2cpu, 4GB)" in done.stderr
    assert "dovetail plan p.yaml --cluster '1x(2cpu, 4GB)' --out plan.json" in done.stderr
    assert place.run("plan", "p.yaml", *CLUSTER, "--out", "plan.json").returncode == 0
    changed = place.run("run", "p.yaml", *CLUSTER, "--plan", "plan.json", "--set", "stages.double.resources.cpus=2")
    assert changed.returncode == 2
    assert "stage 'double': a worker needs" in changed.stderr
    place.file("source: in.jsonl\nsink: out.jsonl", "odd")
    other = place.run("run", "p.yaml", *CLUSTER, "--plan", "plan.json")
    assert other.returncode == 2
    assert "stage 'odd' is in the file but not in the plan" in other.stderr
    assert "stage 'double' is in the plan but not in the file" in other.stderr
    assert place.runs() == []


# --- the dry run


def test_a_dry_run_checks_everything_and_writes_nothing(place: CommandFolder) -> None:
    before = {path: path.stat().st_mtime_ns for path in place.folder.rglob("*")}
    done = place.run("run", "p.yaml", *CLUSTER, "--dry-run")
    assert done.returncode == 0, done.stderr
    for words in ("p on 1x(2cpu, 4GB)", "in.jsonl", "first row   {'n': 0}", "sink        ", "out.jsonl"):
        assert words in done.stdout
    after = {path: path.stat().st_mtime_ns for path in place.folder.rglob("*") if "__pycache__" not in str(path)}
    assert {path: at for path, at in after.items() if path != place.folder} == {
        path: at for path, at in before.items() if path != place.folder
    }


def test_a_dry_run_as_json_has_plan_source_and_sinks(place: CommandFolder) -> None:
    data = json.loads(place.run("run", "p.yaml", *CLUSTER, "--dry-run", "--json").stdout)
    assert [unit["stages"] for unit in data["plan"]["units"]] == [["double"]]
    assert (data["rows"], data["first_row"]) == (None, "{'n': 0}")
    assert data["sinks"] == [str(place.folder / "out.jsonl")]
    place.file("source: in.jsonl", "double")  # without a sink, results would go to stdout
    assert json.loads(place.run("run", "p.yaml", *CLUSTER, "--dry-run", "--json").stdout)["sinks"]
    assert not place.runs()


@pytest.mark.parametrize(
    ("head", "stage", "words"),
    [
        ("source: in.jsonl\nsink: out.jsonl", "duoble", "did you mean 'double'?"),
        ("source: in.jsonl\nsink: out.jsonl", "NOT_A_FUNCTION", "is of type int, not a function or class"),
        ("source: gone.jsonl", "double", "gone.jsonl"),
        ("source: {run: 'steps:broken'}", "double", "no data today"),
        ("source: {run: 'steps:nubmers'}", "double", "did you mean 'numbers'?"),
        ("source: in.jsonl\nsink: steps.py/out.jsonl", "double", "is not a folder"),
    ],
)
def test_a_dry_run_reports_problems(place: CommandFolder, head: str, stage: str, words: str) -> None:
    place.file(head, stage)
    done = place.run("run", "p.yaml", *CLUSTER, "--dry-run")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.split("error[")[0]
    assert place.runs() == []


# --- what fails


@pytest.mark.parametrize("name", ["breaks_later", "broken"])
def test_a_source_that_raises_is_reported_with_its_own_frames_only(place: CommandFolder, name: str) -> None:
    code = "def breaks_later():\n    yield {'n': 1}\n    raise ValueError('no data today')\n"
    (place.folder / "mine.py").write_text(f"{code}\ndef broken():\n    raise ValueError('no data today')\n")
    place.file(f"source: {{run: 'mine:{name}'}}\nsink: out.jsonl", "double")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == (1 if name == "breaks_later" else 2)
    assert f"in {name}\n" in done.stderr
    assert "ValueError: no data today" in done.stderr
    assert "src/dovetail" not in done.stderr


def test_a_failed_run_prints_the_reason_and_how_to_resume(place: CommandFolder) -> None:
    place.rows("in.jsonl", 10)  # with one seven: the order of two is not defined
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 1, done.stderr
    assert "a seven: 7" in done.stderr
    assert "fix  --set stages.no_sevens.on_error=skip  # record failing items and continue" in done.stderr
    assert f"dovetail run --resume {place.runs()[0].name}" in done.stderr
    assert not (place.folder / "out.jsonl").exists()
    result = place.run("status", "last")
    assert "failed after" in result.stdout
    assert f"dovetail run --resume {place.runs()[0].name}" in result.stderr


def test_a_run_whose_workers_all_break_prints_the_reason_and_how_to_keep_them(
    place: CommandFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MAX_BROKEN_IN_A_ROW", 1)
    code = "def no_gpu(rows):\n    raise RuntimeError('CUDA error: device lost')\n"
    (place.folder / "mine.py").write_text(code)
    place.rows("in.jsonl", 10)
    stage = "{name: no_gpu, run: 'mine:no_gpu', on_error: skip, workers: 1}"
    (place.folder / "p.yaml").write_text(f"source: in.jsonl\nsink: out.jsonl\nstages:\n  - {stage}\n")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 1, done.stderr
    assert "no_gpu: 4 workers in succession were broken, and no call passed; the last: RuntimeError" in done.stderr
    fix = "--set stages.no_gpu.on_failure=retry"
    assert f"fix  {fix}  # if the exception leaves its process intact" in done.stderr
    done = place.run("run", "p.yaml", *CLUSTER, *fix.split())
    assert done.returncode == 0, done.stderr
    assert "10 failed" in done.stderr


def test_failed_items_are_reported_and_can_be_retried(place: CommandFolder) -> None:
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens", more=", on_error: skip")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert "2 failed" in done.stderr
    assert sorted(row["n"] for row in place.result()) == [n for n in range(20) if n % 10 != 7]
    run = place.runs()[0].name
    assert f"next        dovetail errors {run}" in done.stderr
    assert f"dovetail run --retry-errors {run}" in place.run("errors").stderr
    status = place.run("status", "last").stdout
    assert "2 failed" in status
    assert "a seven: 7" in status
    steps = place.folder / "steps.py"
    steps.write_text(steps.read_text().replace("% 10 == 7", "% 10 == 11"))
    (place.folder / "in.jsonl").unlink()
    again = place.run("run", "--retry-errors", run)
    assert again.returncode == 0, again.stderr
    assert sorted(row["n"] for row in place.result()) == list(range(20))


def test_more_errors_than_allowed_fail_it(place: CommandFolder) -> None:
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens", more=", on_error: skip")
    failed = place.run("run", "p.yaml", *CLUSTER, "--max-errors", "1")
    assert failed.returncode == 1
    assert "fix  --max-errors 100%  # " in failed.stderr
    assert place.run("run", "p.yaml", *CLUSTER, "--set", "max_errors=2").returncode == 0


def test_a_failed_run_resumes_after_the_cause_is_fixed(place: CommandFolder) -> None:
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens")
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 1
    steps = place.folder / "steps.py"
    steps.write_text(steps.read_text().replace("% 10 == 7", "% 10 == 11"))
    done = place.run("run", "--resume", "last")
    assert done.returncode == 0, done.stderr
    assert sorted(row["n"] for row in place.result()) == list(range(20))
    assert len(place.runs()) == 1


def test_what_cannot_be_printed_is_a_clear_error(place: CommandFolder) -> None:
    place.file("source: in.jsonl", "objects")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 1
    assert "DT369" in done.stderr


def test_what_does_not_fit_is_exit_code_3_with_the_line(place: CommandFolder) -> None:
    done = place.run("run", "p.yaml", *CLUSTER, "--set", "stages.double.resources.cpus=64")
    assert done.returncode == 3
    assert "p.yaml:4" in done.stderr
    assert place.runs() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "FILE"),
        (("gone.yaml",), "DT010"),
        (("p.ymal",), "did you mean 'p.yaml'?"),
        (("p.yaml", "--set", "stages.duoble.workers=4"), "did you mean 'double'?"),
        (("p.yaml", "--set", "stages.double.wrokers=4"), "error[DT011] --set stages.double.wrokers=4  unknown key"),
        (("p.yaml", "--set", "source.format=xml"), "--set source.format=xml"),
        (("p.yaml", "--set", "nonsense"), "DT360"),
        (("p.yaml", "--sink", ""), "--sink is empty"),
        (("p.yaml", "--sink", "x.docx"), "--sink x.docx"),
        (("p.yaml", "--plan", "gone.json"), "gone.json"),
        (("p.yaml", "--plan", "p.yaml"), "DT038"),
        (("p.yaml", "--sink", "-", "--json"), "both be written to stdout"),
        (("p.yaml", "--resume", "x"), "there is no run 'x'"),
        (("p.yaml", "--resume", "x", "--retry-errors", "y"), "cannot be combined"),
        (("p.yaml", "--force-resume"), "--force-resume requires --resume"),
        (("--resume", "nothing"), "there is no run 'nothing'"),
        (("p.yaml", "--limit", "-1"), "--limit"),
        (("p.yaml", "--mode", "fast"), "fast"),
        (("p.yaml", "--cluster", "2 nodes"), "DT023"),
        (("p.yaml", "--engine", "loacl"), "loacl"),
        (("no_source.yaml",), "DT364"),
        (("no_module.yaml",), "no module named 'nowhere'"),
        (("twice.yaml",), "DT011"),
        (("empty.yaml",), "is empty"),
        (("latin.yaml",), "is not UTF-8"),
    ],
)
def test_invalid_input_is_reported_before_anything_starts(
    place: CommandFolder, arguments: tuple[str, ...], words: str
) -> None:
    place.file("sink: out.jsonl", "double", name="no_source.yaml")
    (place.folder / "no_module.yaml").write_text("source: in.jsonl\nstages: [{name: a, run: 'nowhere:f'}]\n")
    (place.folder / "twice.yaml").write_text("sorce: in.jsonl\nsnik: 5\nstages: [{name: a, run: 'steps:double'}]\n")
    (place.folder / "empty.yaml").write_text("")
    (place.folder / "latin.yaml").write_bytes("source: in.jsonl # für\n".encode("latin-1"))
    done = place.run("run", *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert place.runs() == []


def test_a_run_of_a_program_cannot_be_resumed_without_its_file(place: CommandFolder) -> None:
    folder = place.home / "runs" / "20260101-000000-aaaa-mine"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "failed", "what": "dt.run"}))
    done = place.run("run", "--resume", "last")
    assert done.returncode == 2
    assert "DT365" in done.stderr


def test_runs_are_completed_by_the_shell(place: CommandFolder) -> None:
    folder = place.home / "runs" / "20260101-000000-aaaa-mine"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    shown = place.run(_DOVETAIL_COMPLETE="bash_complete", COMP_WORDS="dovetail logs 2026", COMP_CWORD="2")
    assert shown.stdout.strip().endswith(folder.name), shown


def test_the_help_has_examples() -> None:
    for command in ("run", "logs", "drain", "cancel"):
        assert f"  dovetail {command} " in run_command(command, "--help").stdout
