"""`dovetail demo`: a real run, its files, and the next commands."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from command import run_command, run_process
from dovetail.cli import demo_steps
from dovetail.cli.demo import generate_documents

pytestmark = pytest.mark.time_limit

SRC = Path(__file__).parents[2] / "src"


def demo(home: Path, *arguments: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    return run_command("demo", *arguments, cwd=cwd, DOVETAIL_HOME=str(home), **more)


def next_commands(shown: subprocess.CompletedProcess[str]) -> list[list[str]]:
    lines = shown.stderr[shown.stderr.index("Next:") + len("Next:") :].splitlines()
    return [shlex.split(line, comments=True) for line in lines]


@dataclass(frozen=True)
class Shown:
    home: Path
    folder: Path
    ran: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """One demo, looked at by several tests."""
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("somewhere") / "my dêmo"
    ran = run_process("demo", "--folder", str(folder), "--documents", "300", DOVETAIL_HOME=str(home))
    return Shown(home, folder, ran)


def test_the_demo_runs_documents_here_plans_a_cluster_and_explains_a_misfit(shown: Shown) -> None:
    assert shown.ran.returncode == 0, shown.ran.stderr
    for words in ("300 of 300 items in", "predicted", "before  {", "after   {"):
        assert words in shown.ran.stdout
    for words in ("14 items/s", "bottleneck: caption", "2000 of 2000 items in", "error[DT112]"):
        assert words in shown.ran.stdout
    assert "\x1b" not in shown.ran.stdout + shown.ran.stderr
    wide = [line for line in shown.ran.stdout.splitlines() if len(line) > 80 and str(shown.folder) not in line]
    assert wide == []
    assert "\r" not in shown.ran.stdout + shown.ran.stderr


def test_what_comes_out_is_what_the_functions_make_of_the_documents(shown: Shown) -> None:
    describe = demo_steps.Describe()
    describe.setup(None)
    rows = [json.loads(line) for line in (shown.folder / "documents.jsonl").read_text("utf-8").splitlines()]
    judged = [demo_steps.judge.fn(demo_steps.clean.fn(row)) for row in rows]
    kept = describe([row for row in judged if row is not None])
    assert 0 < len(kept) < len(rows) == 300
    assert [json.loads(line) for line in (shown.folder / "clean.jsonl").read_text("utf-8").splitlines()] == kept
    assert {path.name for path in shown.folder.iterdir()} - {"__pycache__"} == {
        "documents.jsonl",
        "pipeline.yaml",
        "steps.py",
        "clean.jsonl",
    }


def test_every_command_that_it_names_works(shown: Shown, tmp_path: Path) -> None:
    named = next_commands(shown.ran)
    assert [words[1] for words in named if words[0] == "dovetail"] == [
        "run",
        "status",
        "logs",
        "trace",
        "explain",
        "init",
    ]
    before = (shown.folder / "clean.jsonl").read_bytes()
    for words in named:
        assert words[0] == "dovetail" or Path(words[-1]).is_file()
        if words[0] == "dovetail":
            ran = run_command(*words[1:], cwd=tmp_path, DOVETAIL_HOME=str(shown.home))
            assert ran.returncode == 0, (words, ran.stderr)
    assert (shown.folder / "clean.jsonl").read_bytes() == before


def test_it_runs_twice_in_a_row_and_where_nothing_may_be_written(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    spare = tmp_path / "spare"
    spare.mkdir()
    for _ in range(2):
        shown = demo(tmp_path / "home", "--documents", "100", cwd=closed, TMPDIR=str(spare), NO_COLOR="1")
        assert shown.returncode == 0, shown.stderr
    assert len(list(spare.glob("dovetail-demo-*"))) == 2
    assert list(closed.iterdir()) == []


def test_documents_are_the_same_every_time() -> None:
    assert list(generate_documents(50)) == list(generate_documents(50))
    assert list(generate_documents(60))[:50] == list(generate_documents(50))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--folder", "there"), "file exists"),
        (("--folder", "a-file"), "cannot be created"),
        (("--documents", "0"), "--documents"),
        (("--documents", "many"), "--documents"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "pipeline.yaml").write_text("name: mine\n")
    (tmp_path / "a-file").touch()
    shown = demo(tmp_path / "home", *arguments, cwd=tmp_path)
    assert shown.returncode == 2
    assert says in shown.stderr
    assert "Traceback" not in shown.stderr
    assert (tmp_path / "there" / "pipeline.yaml").read_text() == "name: mine\n"


@pytest.mark.long
def test_it_works_from_a_wheel(tmp_path: Path) -> None:
    """Installed beside nothing but what the wheel asks for, which is taken from this environment."""
    root = SRC.parent
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(root)]
    subprocess.run(build, check=True, capture_output=True)
    venv.create(tmp_path / "venv", system_site_packages=False, with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    wheel = next(tmp_path.glob("*.whl"))
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    subprocess.run(install, check=True, capture_output=True, env=environment)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(packages) + "\n")
    environment |= {"DOVETAIL_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    shown = subprocess.run(
        [str(python), "-m", "dovetail", "demo", "--documents", "200"],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert shown.returncode == 0, shown.stderr
    assert "200 of 200 items in" in shown.stdout
