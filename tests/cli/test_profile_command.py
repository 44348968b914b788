"""`dovetail profile`: list, show and forget measured speeds."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from cli.jobs import CLUSTER, CommandFolder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.time_limit


@pytest.fixture
def place(tmp_path: Path) -> CommandFolder:
    """A place where `double` and `odd` were measured; they share workers."""
    made = CommandFolder(tmp_path / "job")
    made.rows("in.jsonl", 500)
    made.file("source: in.jsonl\nsink: out.jsonl", "double", "odd")
    assert made.run("run", "p.yaml", *CLUSTER).returncode == 0
    return made


def stages(place: CommandFolder) -> list[str]:
    return sorted(json.loads(line)["stage"] for line in place.run("profile", "ls", "--json").stdout.splitlines())


def test_measured_stages_are_listed_once(place: CommandFolder) -> None:
    shown = place.run("profile", "ls")
    lines = shown.stdout.splitlines()
    assert lines[0].split()[:2] == ["stage", "items/s"]
    assert sorted(line.split()[0] for line in lines[1:]) == ["double", "odd"]
    assert all(re.fullmatch(r"[\d.]+[kMG]?", line.split()[1]) for line in lines[1:]), "the header has the unit"
    assert stages(place) == ["double", "odd"]
    entries = {
        entry["stage"]: entry for entry in map(json.loads, place.run("profile", "ls", "--json").stdout.splitlines())
    }
    assert entries["odd"]["returns"] == pytest.approx(0.5, abs=0.1)
    assert entries["double"]["key"]["reads"] == "jsonl"
    assert entries["odd"]["key"]["writes"] == "jsonl"


def test_a_stage_is_shown_with_its_evidence(place: CommandFolder) -> None:
    text = place.run("profile", "show", "odd").stdout
    assert re.search(r"^speed +[\d.]+[kMG]? items/s of one worker$", text, re.MULTILINE), text
    assert re.search(r"^worker +1 CPU, batches of 1, 1 slot$", text, re.MULTILINE), text
    assert "in 1 run, the last" in text
    assert "to jsonl" in text
    (entry,) = map(json.loads, place.run("profile", "show", "odd", "--json").stdout.splitlines())
    assert entry["items_per_s"] == pytest.approx(1 / entry["seconds_per_item"])


def test_a_forgotten_stage_is_unknown_to_the_next_plan(place: CommandFolder) -> None:
    def notes() -> str:
        return place.run("plan", "p.yaml", *CLUSTER).stdout

    assert "the speed of double, odd was measured in 1 run" in notes()
    done = place.run("profile", "forget", "odd")
    assert (done.returncode, done.stderr) == (0, "forgot 1 profile\n")
    assert stages(place) == ["double"]
    assert "the speed of odd is unknown" in notes()
    data = json.loads(place.run("profile", "forget", "--all", "--json").stdout)
    assert data == {"profiles": 1, "stages": ["double"]}
    assert stages(place) == []
    empty = place.run("profile", "ls")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "no profiles in" in empty.stderr


@pytest.mark.parametrize("words", [("show", "doubel"), ("forget", "doubel"), ("forget",), ("forget", "odd", "--all")])
def test_bad_input_is_one_clear_error_and_forgets_nothing(place: CommandFolder, words: tuple[str, ...]) -> None:
    shown = place.run("profile", *words)
    assert shown.returncode == 2
    assert "error[DT306]" in shown.stderr
    assert ("did you mean 'double'?" in shown.stderr) == ("doubel" in words)
    assert stages(place) == ["double", "odd"]


def test_files_that_are_no_profiles_are_ignored_and_stay(place: CommandFolder) -> None:
    other = place.home / "profiles" / "notes.json"
    other.write_text("[]")
    assert stages(place) == ["double", "odd"]
    assert place.run("profile", "forget", "--all").returncode == 0
    assert other.read_text() == "[]"
