"""`dovetail ls`, `status` and `trace`."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import TYPE_CHECKING

import pytest

from command import run_command
from dovetail.control.commands import Note
from observe.made import recorded, recorder

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

IDS = ("20260101-000000-aaaa-video", "20260102-000000-bbbb-video")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two runs, one of them lost, and some garbage."""
    runs = tmp_path / "runs"
    recorded(runs / IDS[0])
    lost = recorder(runs / IDS[1])
    for second in range(30):
        lost.on_step(float(second), [], [])
    lost._close_files()
    header = runs / IDS[1] / "run.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"host": "elsewhere", "heartbeat": 5.0}))
    (runs / "garbage").mkdir()
    (runs / "garbage" / "run.json").write_text("{torn")
    (runs / "file").touch()
    return tmp_path


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, DOVETAIL_HOME=str(home))


def test_runs_are_listed_with_their_status_the_youngest_first(home: Path) -> None:
    shown = run_command("ls", DOVETAIL_HOME=str(home), COLUMNS="120")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["run", "name", "engine", "status", "age", "items", "items/s"]
    assert [line.split()[0] for line in lines[1:]] == ["garbage", IDS[1], IDS[0]]
    assert lines[2].split()[1:4] == ["video", "local", "lost"]
    assert lines[3].split()[1:4] == ["video", "local", "finished"]
    assert "1000" in lines[3]
    assert "9.09/s" in lines[3]
    assert shown.stderr == ""


def test_the_list_as_json_has_all_runs_unless_limited(home: Path) -> None:
    entries = json.loads(run(home, "ls", "--json").stdout)
    assert [(entry["id"], entry["status"]) for entry in entries] == [
        ("garbage", "lost"),
        (IDS[1], "lost"),
        (IDS[0], "finished"),
    ]
    assert entries[2]["items"] == 1000
    assert [entry["id"] for entry in json.loads(run(home, "ls", "--json", "--limit", "1").stdout)] == ["garbage"]


def test_a_short_list_reports_how_many_runs_are_not_shown(home: Path) -> None:
    shown = run(home, "ls", "--limit", "1")
    assert len(shown.stdout.splitlines()) == 2
    assert "2 older runs not shown" in shown.stderr


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--name", "video"), [IDS[1], IDS[0]]),
        (("--name", "*-AAAA-*"), [IDS[0]]),
        (("--status", "finished"), [IDS[0]]),
        (("--status", "lost", "--status", "finished"), ["garbage", IDS[1], IDS[0]]),
        (("--kind", "backfill"), [IDS[1]]),
        (("--kind", "pipeline", "--name", "video"), [IDS[0]]),
        (("--since", "1970-01-01"), [IDS[1], IDS[0]]),
        (("--since", "2999-01-01"), []),
        (("--since", "1h"), [IDS[1], IDS[0]]),
        (("--since", "1970-01-01", "--limit", "1"), [IDS[1]]),
    ],
)
def test_the_list_is_filtered(home: Path, options: tuple[str, ...], found: list[str]) -> None:
    header = home / "runs" / IDS[1] / "run.json"
    more = {"table": "clips.lance", "column": "length"}
    header.write_text(json.dumps(json.loads(header.read_text()) | {"more": more}))
    assert [entry["id"] for entry in json.loads(run(home, "ls", "--json", *options).stdout)] == found


def test_a_filtered_list_repeats_its_filters_where_it_offers_more(home: Path) -> None:
    shown = run(home, "ls", "--name", "video", "--status", "lost", "--status", "finished", "--limit", "1")
    assert "dovetail ls --name video --status lost --status finished --limit 2" in shown.stderr
    assert "no runs match in" in run(home, "ls", "--status", "running").stderr


@pytest.mark.parametrize("width", [120, 100, 80, 70, 60])
def test_the_list_fits_the_terminal_and_its_ids_are_found(home: Path, width: int) -> None:
    header = home / "runs" / IDS[0] / "run.json"
    about = json.loads(header.read_text()) | {"name": "a-name-that-is-long", "more": {"recipe_file": "r.yaml"}}
    header.write_text(json.dumps(about))
    shown = run_command("ls", DOVETAIL_HOME=str(home), COLUMNS=str(width))
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert ("engine" in lines[0]) == (width >= 100)
    assert run(home, "status", lines[-1].split()[0], "--json").returncode == 0


@pytest.mark.parametrize("where", [".", "no/such/folder", "runs/file"])
def test_without_runs_the_list_is_empty_and_names_the_folder(home: Path, where: str) -> None:
    empty = home / "empty" / where
    shown = run(empty, "ls")
    assert (shown.returncode, shown.stdout) == (0, "")
    assert f"no runs in {empty / 'runs'}" in shown.stderr
    assert run(empty, "ls", "--json").stdout == "[]\n"


@pytest.mark.parametrize("name", ["20260101", IDS[0], "folder"])
def test_a_run_is_shown_by_id_beginning_or_folder(home: Path, name: str) -> None:
    shown = run(home, "status", str(home / "runs" / IDS[0]) if name == "folder" else name)
    assert shown.returncode == 0
    for words in ("video: finished after 1 min 50 s", "1000 of 1000 items in", "steady 10/s", "2 workers of a"):
        assert words in shown.stdout
    assert "worker 2 of a on node-1 was lost: node lost: power" in shown.stdout
    assert f"dovetail trace {IDS[0]}" in shown.stderr
    assert "errors/errors.jsonl" in shown.stderr
    assert "folder" not in shown.stdout
    assert "\x1b" not in shown.stdout


@pytest.mark.parametrize("width", [60, 80])
def test_decisions_and_errors_fit_the_terminal(home: Path, width: int) -> None:
    words = f"a limits the pipeline: {', '.join(f'{layout} layouts were compared' for layout in range(8))}"
    events = recorder(home / "runs" / "long")
    events.on_step(0.0, [], [Note("decision", words), Note("error", words)])
    events.close(1.0)
    lines = run_command("status", "long", DOVETAIL_HOME=str(home), COLUMNS=str(width)).stdout.splitlines()
    for title in ("decisions", "errors"):
        first = lines.index(title) + 1
        wrapped = [lines[first], *takewhile(lambda line: line.startswith(16 * " "), lines[first + 1 :])]
        assert len(wrapped) > 1
        assert max(map(len, wrapped)) <= width
        assert " ".join(line.strip() for line in wrapped) == f"0.0 s  {words}"


def test_the_status_as_json_is_the_summary(home: Path) -> None:
    data = json.loads(run(home, "status", IDS[0], "--json").stdout)
    assert data["status"] == "finished"
    assert [unit["name"] for unit in data["units"]] == ["a", "b"]
    assert data["decisions"] == [[0.0, "2 workers of a"]]


def test_a_run_without_a_heartbeat_is_lost(home: Path) -> None:
    shown = run(home, "status", IDS[1])
    assert shown.returncode == 0
    assert "video: lost after" in shown.stdout


def test_the_last_run_is_the_youngest(home: Path) -> None:
    (home / "runs" / "garbage" / "run.json").unlink()
    assert IDS[1] in run(home, "status", "last").stderr


def test_a_trace_is_written_or_printed(home: Path) -> None:
    file = home / "t.json"
    written = run(home, "trace", IDS[0], "-o", str(file))
    assert (written.returncode, written.stdout) == (0, "")
    assert "wrote " in written.stderr
    printed = run(home, "trace", IDS[0], "-o", "-")
    assert json.loads(file.read_text()) == json.loads(printed.stdout)
    assert {event["ph"] for event in json.loads(printed.stdout)["traceEvents"]} == {"M", "C", "X", "i"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("status", "nothing"), "DT301"),
        (("status", ""), "DT301"),
        (("status", "2026"), "DT304"),
        (("status", "."), "DT302"),
        (("status", "garbage"), "DT302"),
        (("status", "~nobody-of-this-name"), "DT301"),
        (("trace", "nothing", "-o", "-"), "DT301"),
        (("trace", IDS[0], "-o", "/no/such/folder/t.json"), "DT025"),
        (("trace", IDS[0]), "--out"),
        (("drain",), "is not running: it is lost"),
        (("cancel", "video"), "is not running: it is lost"),
        (("ls", "--limit", "0"), "--limit"),
        (("ls", "--since", "yesterday"), "--since"),
        (("ls", "--status", "fnished"), "did you mean 'finished'?"),
        (("rm",), "DT307"),
        (("rm", "video", "--keep", "1"), "DT307"),
        (("rm", "nothing"), "DT301"),
        (("rm", "--older-than", "7 days"), "--older-than"),
        (("rm", "--keep", "1"), "--yes to remove them"),
    ],
)
def test_bad_input_is_one_clear_error_and_exit_code_2(home: Path, arguments: tuple[str, ...], code: str) -> None:
    shown = run(home, *arguments)
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert code in shown.stderr
    assert shown.stderr.count("error[") <= 1
    assert "Traceback" not in shown.stderr


def test_an_unknown_id_is_an_error_that_lists_the_runs(home: Path) -> None:
    shown = run(home, "status", "20260101-000000-aaab-video")
    assert f"did you mean '{IDS[0]}'?" in shown.stderr
    assert "fix  " in shown.stderr
    assert "did you mean 'last'?" in run(home, "status", "lsat").stderr


@pytest.mark.parametrize("command", ["ls", "status", "trace", "rm"])
def test_the_help_has_an_example(home: Path, command: str) -> None:
    assert f"  dovetail {command}" in run(home, command, "--help").stdout


def test_a_report_of_any_run_is_one_html_file(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    written = run(home, "report", IDS[0], "-o", str(out))
    assert (written.returncode, written.stdout, written.stderr) == (0, "", f"wrote {out}\n")
    assert "<h1>video</h1>" in out.read_text()
    assert run(home, "report", IDS[0], "-o", "-").stdout == out.read_text()
    lost = run(home, "report", IDS[1], "-o", "-")
    assert "lost after 29 s" in lost.stdout
    refused = run(home, "report", IDS[0], "-o", str(tmp_path / "no" / "folder.html"))
    assert refused.returncode == 2
    assert "DT025" in refused.stderr


def test_the_status_is_coloured_on_request(home: Path) -> None:
    painted = run(home, "--color", "always", "status", IDS[0]).stdout
    assert painted.startswith("\x1b[1mvideo\x1b[0m: \x1b[32mfinished\x1b[0m after 1 min 50 s")
