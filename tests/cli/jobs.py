"""Helpers for tests of `dovetail run`: a folder with a pipeline file, a module, data, and the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from command import run_command, run_process
from runtime.aids import MARK
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = """
import time
from pathlib import Path
import dovetail as dt

FAST = Path(__file__).with_name("fast")
HELD = Path(__file__).with_name("held")

def double(rows):
    return [row | {"twice": 2 * row["n"]} for row in rows]

def slowly(rows):
    if not FAST.exists():
        time.sleep(0.02 * len(rows))
    return rows

def held(rows):
    time.sleep(0.02 * len(rows))
    if rows[-1]["n"] >= 50:
        HELD.touch()
        while not FAST.exists():
            time.sleep(0.02)
    return rows

def no_sevens(rows):
    for row in rows:
        if row["n"] % 10 == 7:
            raise ValueError(f"a seven: {row['n']}")
    return rows

@dt.each
def even(row):
    return row if row["n"] % 2 == 0 else None

def odd(rows):
    return [row for row in rows if row["n"] % 2]

class Talker:
    def setup(self, worker):
        print("set up", flush=True)
    def __call__(self, rows):
        for row in rows:
            print("saw", row["n"], flush=True)
        return rows

def numbers(count=10, first=0):
    for n in range(first, first + count):
        yield {"n": n}

def broken():
    raise RuntimeError("no data today")

def keep(rows):
    with open("kept.txt", "a") as file:
        file.writelines(f"{row['n']}\\n" for row in rows)

def objects(rows):
    return [object() for _ in rows]

NOT_A_FUNCTION = 5
"""
CLUSTER = ("--cluster", "1x(2cpu, 4GB)")


class CommandFolder:
    """A folder to run in, with a home of its own."""

    def __init__(self, folder: Path, *, processes: bool = False) -> None:
        """`processes`: commands run in processes of their own."""
        self.folder = folder
        self._run = run_process if processes else run_command
        self.home = folder / "home"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "steps.py").write_text(STEPS)
        self.rows("in.jsonl", 20)
        self.file("source: in.jsonl\nsink: out.jsonl", "double")

    def rows(self, name: str, count: int) -> None:
        (self.folder / name).write_text("".join(f'{{"n": {n}}}\n' for n in range(count)))

    def file(self, head: str, *stages: str, name: str = "p.yaml", more: str = "") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = "".join(f"  - {{name: {stage}, run: 'steps:{stage}'{more}}}\n" for stage in stages)
        path.write_text(f"{head}\nstages:\n{entries}")
        return path

    def hurry(self) -> None:
        """Let `slowly` return without waiting, and `held` continue."""
        (self.folder / "fast").touch()

    def result(self, name: str = "out.jsonl") -> list[Any]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "DOVETAIL_HOME": str(self.home), **more}

    def run(
        self, *arguments: str, stdin: str = "", cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        home = {"DOVETAIL_HOME": str(self.home)}
        return self._run(*arguments, cwd=cwd or self.folder, stdin=stdin, **home | variables)

    def run_process(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a process of its own."""
        return run_process(*arguments, cwd=self.folder, DOVETAIL_HOME=str(self.home))

    @contextmanager
    def started(self, *arguments: str) -> Iterator[Started]:
        """Start a command in a process of its own, which is killed at the end."""
        with Started(self, arguments) as found:
            yield found

    def runs(self) -> list[Path]:
        return sorted((self.home / "runs").iterdir()) if (self.home / "runs").is_dir() else []

    def status(self) -> str:
        found = json.loads(self.run("status", "last", "--json").stdout)
        return str(found["status"])


class Started:
    def __init__(self, place: CommandFolder, arguments: tuple[str, ...]) -> None:
        self.place = place
        self._out = (place.folder / "stdout.txt").open("w+b")
        self._err = (place.folder / "stderr.txt").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dovetail", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env=place.environment(**{MARK: str(place.folder)}),
            cwd=place.folder,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._out.close()
        self._err.close()

    @property
    def out(self) -> str:
        return Path(self._out.name).read_text()

    @property
    def err(self) -> str:
        return Path(self._err.name).read_text()

    def goes(self) -> Path:
        """Waits until something is done; its folder."""

        def going() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.err}"
            return any((run / "control.sock").exists() and _finished(run) for run in self.place.runs())

        until(going, "the run has finished some items")
        return next(run for run in self.place.runs() if (run / "control.sock").exists())

    def ended(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it is still running:\n{self.err}") from None


def _finished(run: Path) -> bool:
    """Whether its log reports finished items."""
    try:
        lines = (run / "events.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("k") == "unit" and entry.get("taken_total"):
            return True
    return False
