"""The command line: output and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

import dovetail
from command import run_command as run
from dovetail.cli import COMMANDS, command_line, with_color_first
from dovetail.cli.commands_page import commands_page

if TYPE_CHECKING:
    from collections.abc import Iterator

VIDEO = str(Path(__file__).parents[2] / "examples" / "video.yaml")
FRESH = """
import json, os, sys
import dovetail.cli

for words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        sys.argv = ["dovetail", *words]
        dovetail.cli.main()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"exit code {code}: {words[0]}", flush=True)
"""
"""Runs commands one after the other, each in a process that has imported nothing but the entry point."""
SPEC = "4x(32cpu, 128GB, 2xA100:40GB) + 16x(32cpu, 64GB){pool=cpu}"


def test_the_version_is_the_packages_version() -> None:
    assert run("--version").stdout.strip() == f"dovetail, version {dovetail.__version__}"


def test_this_machine_is_shown_without_any_argument() -> None:
    shown = run("cluster", "show")
    assert shown.returncode == 0
    assert "1 node" in shown.stdout
    assert "largest worker:" in shown.stdout


def test_a_described_cluster_is_drawn_with_alike_nodes_as_one_row() -> None:
    lines = run("cluster", "show", SPEC).stdout.splitlines()
    assert lines[0] == "20 nodes, 640 CPUs, 1.5TB memory, 8 GPUs"
    assert lines[1].strip() == "8 x A100 40GB, 5 NVDEC, 0 NVENC"
    rows = [line for line in lines if " x node-" in line]
    assert len(rows) == 2
    assert "[..........][..........]" in rows[0]
    assert "{pool=cpu}" in rows[1]
    assert "2 whole GPUs of 40GB, 32 CPUs, 128GB memory" in lines[-1]


def test_json_reads_back_to_the_same_cluster() -> None:
    data = json.loads(run("cluster", "show", SPEC, "--json").stdout)
    assert dovetail.Cluster.from_dict({"nodes": data["nodes"]}) == dovetail.Cluster.parse(SPEC)
    assert dovetail.Cluster.parse(data["spec"]) == dovetail.Cluster.parse(SPEC)
    assert data["totals"]["gpus"] == 8
    assert data["totals"]["nvdecs"] == 40
    assert data["largest"]["gpus"] == 2


def test_a_file_is_shown_like_its_spec(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes:\n  - {count: 2, cpus: 8, memory: 16GB, gpus: [1xL4]}\n")
    assert run("cluster", "show", str(file)).stdout == run("cluster", "show", "2x(8cpu, 16GB, 1xL4)").stdout


def test_workers_of_one_kind_are_counted_and_drawn() -> None:
    shown = run("cluster", "show", "1x(64cpu, 128GB, 2xgpu:20GB)", "--fit", "gpu_memory=8GB")
    assert shown.returncode == 0
    assert "4 workers fit" in shown.stdout
    assert "[aaaaaaaa..][aaaaaaaa..]" in shown.stdout


def test_what_does_not_fit_is_exit_code_3_with_reason_and_fix() -> None:
    shown = run("cluster", "show", "1x(32cpu, 2xgpu:20GB)", "--fit", "gpu_memory=25GB")
    assert shown.returncode == 3
    assert shown.stdout == ""
    assert "error[DT111]" in shown.stderr
    assert "20GB" in shown.stderr
    assert 'fix  gpu_memory="20GB"' in shown.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("cluster", "show", "2x(32gpu)"),
        ("cluster", "show", "no-such-file.yaml"),
        ("cluster", "show", "1x(4cpu)", "--fit", "cpu=1"),
        ("cluster", "show", "1x(4cpu)", "--fit", "cpus=-1, gpus=1.5"),
        ("cluster", "show", "1x(4cpu)", "--fit", "cpus"),
        ("cluster", "show", "1x(4cpu)", "--keep-back", "1.5"),
        ("cluster", "show", "1x(4cpu)", "--keep-back", "nan"),
        ("cluster", "show", "--no-such-option"),
        ("no-such-command",),
        ("completion", "tcsh"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_message_and_no_traceback(arguments: tuple[str, ...]) -> None:
    shown = run(*arguments)
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert shown.stderr.strip()
    assert "Traceback" not in shown.stderr


def test_every_mistake_in_a_request_is_reported_at_once() -> None:
    shown = run("cluster", "show", "1x(4cpu)", "--fit", "cpu=1, memory=4, gpu=2")
    assert shown.stderr.count("error[") == 2
    assert "did you mean 'cpus'?" in shown.stderr


def test_kept_back_cpus_are_not_given_out() -> None:
    shown = run("cluster", "show", "1x(10cpu)", "--keep-back", "0.2", "--fit", "cpus=1")
    assert "8 CPUs (2 more reserved)" in shown.stdout
    assert "8 workers fit" in shown.stdout


def test_a_reader_that_goes_away_causes_no_complaint() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dovetail", "cluster", "show", "300x(4cpu)", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert errors == b""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed_for_every_shell(shell: str) -> None:
    shown = run("completion", shell)
    assert shown.returncode == 0
    assert "_DOVETAIL_COMPLETE" in shown.stdout


def test_tab_completes_commands() -> None:
    shown = run(_DOVETAIL_COMPLETE="bash_complete", COMP_WORDS="dovetail clu", COMP_CWORD="1")
    assert shown.stdout.strip() == "plain,cluster"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("dovetail plan pipe", "file,pipe"),
        ("dovetail plan p.yaml --mode st", "plain,streaming"),
        ("dovetail plan p.yaml --engine ray:", "plain,ray:auto"),
        ("dovetail run p.yaml --run-dir ru", "dir,ru"),
    ],
)
def test_tab_completes_files_modes_and_engines(words: str, completed: str) -> None:
    at = str(len(words.split()) - 1)
    assert run(_DOVETAIL_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=at).stdout.strip() == completed


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("dovetail status l", ["last"]),
        ("dovetail status vi", ["video"]),
        ("dovetail rm 2026", ["20260102-000000-bbbb-video", "20260101-000000-aaaa-video"]),
        ("dovetail status aaaa", ["20260101-000000-aaaa-video"]),
        ("dovetail logs video --stage ca", ["caption"]),
        ("dovetail logs 20260101 ca", []),
        ("dovetail errors --stage e", ["embed"]),
        ("dovetail explain p.yaml de", ["decode"]),
        ("dovetail explain r.yaml te", ["text_length_filter"]),
        ("dovetail explain nothing.yaml de", []),
        ("dovetail ls --name v", ["video"]),
        ("dovetail ls --status fin", ["finished"]),
        ("dovetail ls --kind b", ["backfill"]),
        ("dovetail init b", ["backfill"]),
        ("dovetail profile show x", []),
    ],
)
def test_tab_completes_runs_stages_and_choices(tmp_path: Path, words: str, completed: list[str]) -> None:
    for number, name in enumerate(("20260101-000000-aaaa-video", "20260102-000000-bbbb-video")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        units = [{"stages": ["decode", "caption"]}, {"stages": ["embed"]}][: 2 * number]
        (folder / "plan.json").write_text(json.dumps({"units": units}))
    (tmp_path / "p.yaml").write_text("stages:\n  - {name: decode, run: 'm:decode'}\n  - {name: embed}\n")
    (tmp_path / "r.yaml").write_text("process:\n  - text_length_filter: {min_len: 1}\n  - fix_unicode_mapper\n")
    shown = run(
        cwd=tmp_path,
        DOVETAIL_HOME=str(tmp_path),
        _DOVETAIL_COMPLETE="bash_complete",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
    )
    assert [line.removeprefix("plain,") for line in shown.stdout.split()] == completed


@pytest.mark.parametrize(
    ("typed", "meant"), [(("rnu",), "run"), (("cluster", "shwo"), "show"), (("rum",), "run' or 'rm")]
)
def test_an_unknown_command_is_answered_with_the_nearest_one(typed: tuple[str, ...], meant: str) -> None:
    shown = run(*typed)
    assert shown.returncode == 2
    assert f"No such command {typed[-1]!r} (did you mean '{meant}'?)" in shown.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(("schema", "pipelne"), "pipeline"), (("init", "recipy"), "recipe"), (("completion", "bahs"), "bash")],
)
def test_a_misspelt_kind_is_answered_with_the_nearest_one(typed: tuple[str, ...], meant: str) -> None:
    shown = run(*typed)
    assert shown.returncode == 2
    assert f"(did you mean {meant!r}?)" in shown.stderr


def test_every_command_has_an_example_in_its_help() -> None:
    for command in ((), ("cluster", "show"), *((name,) for name in COMMANDS if name != "cluster")):
        assert "xample" in run(*command, "--help").stdout, command


def help_pages(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Path and help page, in a terminal of 80 columns, of a command and of those inside it."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from help_pages(inner, click.Context(inner, context, name, terminal_width=80))


def test_every_help_page_fits_80_columns() -> None:
    pages = dict(help_pages(command_line, click.Context(command_line, info_name="dovetail", terminal_width=80)))
    assert {"dovetail", "dovetail backfill run", "dovetail jobs submit"} <= set(pages)
    too_long = [f"{path}: {line}" for path, text in pages.items() for line in text.splitlines() if len(line) > 80]
    assert too_long == []
    cut = [f"{path}: {line}" for path, text in pages.items() for line in text.splitlines()[1:] if line.endswith("...")]
    assert cut == []


def test_every_command_that_reports_something_can_do_it_as_json() -> None:
    prints_files = {"completion", "demo", "report", "schema", "serve", "trace", "worker"}
    groups = {"actors", "backfill", "cluster", "export", "jobs", "profile", "recipe"}
    commands: list[tuple[str, ...]] = [(name,) for name in COMMANDS if name not in prints_files | groups]
    commands += [
        ("actors", "ls"),
        ("actors", "status"),
        ("cluster", "show"),
        ("export", "compose"),
        ("export", "kubernetes"),
        ("profile", "ls"),
        ("profile", "show"),
        ("profile", "forget"),
        ("recipe", "advise"),
        *(("jobs", name) for name in ("submit", "ls", "show", "cancel", "dead", "requeue", "purge", "stats", "watch")),
    ]
    without = [command for command in commands if "--json" not in run(*command, "--help").stdout]
    assert without == []


def test_the_page_of_commands_is_generated() -> None:
    page = Path(__file__).parents[2] / "docs" / "commands.md"
    assert page.read_text(encoding="utf-8") == commands_page(), (
        "python -m dovetail.cli.commands_page > docs/commands.md"
    )


def test_every_listed_command_loads_and_its_one_line_help_is_its_own() -> None:
    for name in COMMANDS:
        shown = run(name, "--help")
        assert shown.returncode == 0, name
        assert shown.stdout.startswith(f"Usage: dovetail {name}")


def test_every_command_imports_what_it_needs(tmp_path: Path) -> None:
    """Runs in a new process: in this one, another test may have imported a module."""
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "r.yaml").write_text("dataset_path: rows.jsonl\nprocess: [text_length_filter]\n")
    cluster = ["--cluster", "1x(32cpu, 128GB, 2xL40S:48GB)"]
    commands = {
        "simulate": [VIDEO, *cluster, "--limit", "20", "--record"],
        "replay": ["last"],
        "ls": [],
        "status": ["last"],
        "errors": ["last"],
        "logs": ["last"],
        "report": ["last", "-o", "-"],
        "trace": ["last", "-o", "-"],
        "plan": [VIDEO, *cluster],
        "profile": ["ls"],
        "explain": [VIDEO, *cluster],
        "actors": ["ls"],
        "cluster": ["show", SPEC],
        "run": ["r.yaml", *cluster, "--dry-run"],
        "recipe": ["advise", *cluster],
        "schema": ["recipe"],
        "export": ["kubernetes", "--app", "tasks", "--gpus", "1"],
        "init": ["recipe", "my-recipe"],
        "completion": ["bash"],
        "drain": ["nothing"],
        "rm": ["nothing"],
        "cancel": ["nothing"],
        "backfill": ["--help"],  # other tests run these three in processes
        "demo": ["--help"],
        "serve": ["--help"],
        "jobs": ["ls", "--queue-url", "sqlite:///none.db"],
        "worker": ["--queue", "sqlite:///none.db"],
    }
    assert sorted(commands) == sorted(COMMANDS)
    ran = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps([[name, *words] for name, words in commands.items()])],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"DOVETAIL_HOME": str(tmp_path / "home")},
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in ran.stderr
    ended = {name: int(code) for code, name in re.findall(r"^exit code (\d+): (\w+)$", ran.stdout, re.MULTILINE)}
    assert ended == {name: 2 if name in ("drain", "cancel", "rm", "jobs", "worker") else 0 for name in commands}, (
        ran.stderr
    )


@pytest.mark.parametrize(
    ("options", "variables", "coloured"),
    [
        ((), {}, False),
        (("--color", "always"), {"NO_COLOR": "1"}, True),
        ((), {"FORCE_COLOR": "1"}, True),
        (("--color", "never"), {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_is_chosen_for_the_whole_command_line(
    options: tuple[str, ...], variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"NO_COLOR": ""} | variables).items():
        monkeypatch.setenv(name, value)
    for arguments in ((*options, "cluster", "show", "4x("), ("cluster", "show", "4x(", *options)):
        found = run(*arguments)
        assert found.returncode == 2
        assert ("\x1b[31m\x1b[1merror[DT0" in found.stderr) is coloured
        assert ("\x1b" in found.stderr) is coloured


def test_color_is_an_option_of_all_commands() -> None:
    assert with_color_first(["status", "--color", "never", "x"]) == ["--color", "never", "status", "x"]
    assert with_color_first(["status", "--color=never", "--", "--color"]) == [
        "--color=never",
        "status",
        "--",
        "--color",
    ]
    assert run("status", "--color", "blue").stderr.count("Invalid value for '--color'") == 1
    assert run("status", "--color").returncode == 2
