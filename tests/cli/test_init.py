"""`dovetail init`: each project runs as its README says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from command import like_a_process, run_command, text_of
from dovetail.cli.project_templates import PROJECT_KINDS, project_files
from dovetail.pipeline.pipeline import Pipeline


def init(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("init", *arguments, cwd=folder)


def commands_of(readme: str) -> list[list[str]]:
    (block,) = re.findall(r"^```\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def run_in(folder: Path, words: list[str]) -> str:
    """Runs a command of a README, which succeeds; returns its output."""
    if words[0] == "python":
        with like_a_process(folder) as (out, _):
            exec(compile((folder / words[1]).read_text(), words[1], "exec"), {"__name__": "__main__"})
            return text_of(out)
    assert words[0] == "dovetail"
    done = run_command(*words[1:], cwd=folder, DOVETAIL_HOME=str(folder / "home"))
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def test_the_pipeline_project_runs(tmp_path: Path) -> None:
    shown = init(tmp_path, "pipeline")
    folder = tmp_path / "pipeline"
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == [str(Path("pipeline") / name) for name in project_files("pipeline")]
    assert shown.stderr.splitlines()[-1] == "Next:  cd pipeline && dovetail run pipeline.yaml"
    done = {words[1]: run_in(folder, words) for words in commands_of((folder / "README.md").read_text())}
    rows = [json.loads(line) for line in (folder / "scored.jsonl").read_text().splitlines()]
    assert rows[:2] == [
        {"id": 0, "text": "a good book", "score": 1},
        {"id": 1, "text": "great value, good paper", "score": 3},
    ]
    assert len(rows) == 166  # one row fails, and those without text are dropped
    assert "data/reviews.jsonl:8" in done["errors"]
    assert [stage.name for stage in Pipeline.load(folder / "pipeline.yaml")] == ["clean", "score"]


def test_the_recipe_project_runs(tmp_path: Path) -> None:
    assert init(tmp_path, "recipe", "my recipe").stderr.splitlines()[-1].startswith("Next:  cd 'my recipe' && ")
    folder = tmp_path / "my recipe"
    for words in commands_of((folder / "README.md").read_text()):
        run_in(folder, words)
    rows = [json.loads(line) for line in (folder / "out" / "clean.jsonl").read_text().splitlines()]
    assert len(rows) == 48
    assert all(row["words"] == len(row["text"].split()) for row in rows)
    assert len((folder / "out" / "longer.jsonl").read_text().splitlines()) == 48


def test_the_backfill_project_runs(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance")
    init(tmp_path, "backfill", ".")
    for words in commands_of((tmp_path / "README.md").read_text()):
        run_in(tmp_path, words)
    table = lance.dataset(str(tmp_path / "clips.lance")).to_table().to_pylist()
    assert [row["words"] for row in table[:8]] == [0, 1, 2, 3, 4, 5, 6, 0]
    assert [row["seconds_per_word"] for row in table[:3]] == [None, 0.5, 0.5]


def test_the_actors_project_runs(tmp_path: Path) -> None:
    assert init(tmp_path, "actors").stderr.splitlines()[-1] == "Next:  cd actors && python main.py"
    folder = tmp_path / "actors"
    shown = [run_in(folder, words) for words in commands_of((folder / "README.md").read_text())]
    assert "the best guess is 7\n" in shown[1]
    assert shown[3].startswith("rollout: ")
    assert "calls of clients answered" in shown[4]
    assert "rollout[0]  ready" in shown[6]


@pytest.mark.processes
@pytest.mark.time_limit
def test_the_jobs_project_runs(tmp_path: Path) -> None:
    assert init(tmp_path, "jobs").stderr.splitlines()[-1] == "Next:  cd jobs && dovetail worker --app tasks"
    folder = tmp_path / "jobs"
    first, *commands, last = commands_of((folder / "README.md").read_text())
    assert (first[-1], last[0]) == ("&", "curl")
    program = [sys.executable, "-m", *first[:-1], "--port", "0", "--resources", "2cpu, 2GB"]
    env = os.environ | {"DOVETAIL_HOME": str(folder / "home")}
    with subprocess.Popen(program, cwd=folder, env=env, stderr=subprocess.DEVNULL) as worker:
        try:
            shown = [run_in(folder, words) for words in commands]
        finally:
            worker.kill()
    assert "the best: {'rate': 0.5" in shown[0]
    assert shown[1].count("succeeded") == 4
    assert "tasks:best(" in shown[2]
    assert json.loads(shown[3])["rate"] == 0.2
    assert "epoch 20: loss" in shown[4]
    assert shown[5].splitlines()[1].split()[:4] == ["default", "0", "0", "5"]


@pytest.mark.parametrize("kind", PROJECT_KINDS)
def test_existing_files_are_never_overwritten(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    first, second, *_ = project_files(kind)
    for name in (first, second):
        (folder / name).write_text("mine")
    refused = init(tmp_path, kind, "mine")
    assert refused.returncode == 2
    assert refused.stderr.count("file exists") == 2
    assert sorted(path.name for path in folder.iterdir()) == sorted((first, second))
    assert (folder / first).read_text() == "mine"


def test_the_project_as_json(tmp_path: Path) -> None:
    data = json.loads(init(tmp_path, "recipe", ".", "--json").stdout)
    assert data == {"folder": ".", "files": list(project_files("recipe")), "next": "dovetail run recipe.yaml"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("recipie",), "did you mean 'recipe'?"),
        (("pipeline", "p.yaml"), "fix  dovetail init pipeline p\n"),
        (("pipeline", "file"), "cannot be written"),
        (("pipeline", "x" * 300), "cannot be written"),
        (("pipeline", "a\0b"), "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "file").touch()
    refused = init(tmp_path, *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert words in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
