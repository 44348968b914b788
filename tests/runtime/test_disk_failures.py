"""Failures of disks, folders, permissions and source files: a clear error, no partial output, and a working resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.streaming.settings import StreamOptions
from runtime.aids import Script, no_worker_is_left, numbers_in, rows_in, run_of
from stage_functions import same
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
pytestmark = pytest.mark.time_limit(1200 if LONG else 200)


ROWS = 3000
PAD = 2000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system of that size; asked again, it is made larger."""
    folder = tmp_path / "disk"

    def sized(size: str) -> Path:
        again = ["-o", f"remount,size={size}", str(folder)]
        first = ["-t", "tmpfs", "-o", f"size={size}", "dovetail-test", str(folder)]
        made = folder.exists()
        folder.mkdir(exist_ok=True)
        mounted = subprocess.run(["mount", *(again if made else first)], capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
        return folder

    yield sized
    if folder.exists():
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def fill(path: Path) -> None:
    """All the room there is."""
    with path.open("wb", buffering=0) as file:
        while file.write(b"x" * 512):
            pass


class Gated:
    """A stage that works up to a row, and then waits until the gate exists."""

    def __init__(self, gate: Path, free: int = ROWS // 2) -> None:
        self.gate = gate
        self.free = free

    def __call__(self, rows: list[Any]) -> list[Any]:
        if any(row["i"] >= self.free for row in rows):
            until(self.gate.exists, "the gate is open")
        return rows


OFTEN = StreamOptions(target_epoch_s=0.001, target_epoch_batches=4, hop_s=0.0002)
"""Small epochs."""
SAME = dt.Stage("same", same, batch_size=4)


def commits(run: dt.Run) -> int:
    return (run.folder / "commit.log").read_bytes().count(b'"wave"')


def fails(run: dt.Run, code: str, *words: str) -> str:
    """The run fails with this code and a fix, and no worker is left."""
    with pytest.raises(dt.RunError) as caught:
        run.wait()
    (problem,) = caught.value.problems
    text = str(caught.value)
    assert problem.code == code, text
    assert problem.fix_texts, text
    assert all(word in text for word in words), text
    assert (run.status, run.files) == ("failed", [])
    header = json.loads((run.folder / "run.json").read_text())
    assert header["status"] == "failed", header
    no_worker_is_left(run)
    return text


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def left_in(folder: Path) -> list[str]:
    """Files that are visible to others."""
    return [name for name in names_in(folder) if not name.startswith(".")]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("jsonl", marks=pytest.mark.processes),
        "parquet",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("csv", "lance")),
    ],
)
def test_no_room_for_parts(kind: str, tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    def pad(rows: list[Any]) -> list[Any]:
        return [{"i": row["i"], "pad": os.urandom(1000).hex()} for row in rows]

    source, disk = rows_in(tmp_path / "in.jsonl", pad=1), small_disk("2m")
    stage = dt.Stage("pad", pad)
    run = run_of(stage, source=source, sink=disk / f"out.{kind}")
    message = fails(run, "DT353", "no space for the results", "df -h")
    assert f'resume="{run.folder.name}"' in message
    assert left_in(disk) == []
    small_disk("100m")
    run_of(stage, source=source, sink=disk / f"out.{kind}", resume=run.folder.name).wait()
    if kind in ("jsonl", "parquet"):
        assert sorted(numbers_in(disk / f"out.{kind}")) == list(range(ROWS))
    assert names_in(disk) == [f"out.{kind}"]


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_no_room_for_the_end(kind: str, tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    """The parts find room, and the file made of them does not."""
    source = tmp_path / "in.jsonl"
    dice = Random(0)
    source.write_text(
        "".join(json.dumps({"i": number, "pad": dice.randbytes(1000).hex()}) + "\n" for number in range(ROWS))
    )
    disk = small_disk("8m")
    run = run_of(SAME, source=source, sink=disk / f"out.{kind}")
    fails(run, "DT353", "no space for the results", str(disk / f"out.{kind}"))
    assert left_in(disk) == []
    done = commits(run)
    small_disk("100m")
    again = run_of(SAME, source=source, sink=disk / f"out.{kind}", resume=run.folder.name)
    again.wait()
    assert sorted(numbers_in(disk / f"out.{kind}")) == list(range(ROWS))
    assert names_in(disk) == [f"out.{kind}"]
    assert commits(again) == done, "nothing was to be computed again"


@pytest.mark.filterwarnings("ignore:Recorder failed")
def test_no_room_in_the_run_folder(tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    rows = 20 * ROWS  # what is left to tell has no room in the rest of the log's last page
    source, out, gate = rows_in(tmp_path / "in.jsonl", rows, 10), tmp_path / "out.jsonl", tmp_path / "gate"
    stage = dt.Stage("gated", Gated(gate), batch_size=4)
    disk = small_disk("2m")
    run = run_of(stage, source=source, sink=out, run_dir=disk / "my run", options=OFTEN)
    until(lambda: commits(run) > 1, "something is committed")
    with pytest.raises(OSError, match="No space left"):
        fill(disk / "junk")
    gate.touch()
    message = fails(run, "DT380", "the commit log cannot be written")
    assert str(disk / "my run") in message.split("fix")[-1], "it is on another file system than the others"
    assert not out.exists()
    (disk / "junk").unlink()
    run_of(stage, source=source, sink=out, resume=disk / "my run").wait()
    assert sorted(numbers_in(out)) == list(range(rows))


@pytest.mark.filterwarnings("ignore:Recorder failed")
@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.processes
def test_no_room_in_the_spool(on_error: Any, tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    """No item is to blame for that, and none fails."""
    source, out, disk = rows_in(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", small_disk("3m")
    stages = [dt.Stage("a", same, fuse=False, on_error=on_error), dt.Stage("b", same, fuse=False, on_error=on_error)]
    run = run_of(*stages, source=source, sink=out, mode="sequential", run_dir=disk / "run")
    with pytest.raises(dt.RunError) as caught:
        run.wait()
    assert caught.value.problems[0].code in ("DT380", "DT381"), str(caught.value)
    assert run.errors == []
    assert (run.status, out.exists()) == ("failed", False)
    no_worker_is_left(run)
    small_disk("100m")
    run_of(*stages, source=source, sink=out, mode="sequential", resume=disk / "run").wait()
    assert sorted(numbers_in(out)) == list(range(ROWS))


@pytest.mark.processes
def test_a_sink_folder_that_vanishes(tmp_path: Path) -> None:
    source, gate, folder = rows_in(tmp_path / "in.jsonl"), tmp_path / "gate", tmp_path / "out folder"
    stage = dt.Stage("gated", Gated(gate), batch_size=4)
    run = run_of(stage, source=source, sink=folder / "out.jsonl", options=OFTEN)
    until(lambda: commits(run) > 1, "something is committed")
    folder.rename(tmp_path / "gone")  # in one step: a worker may be writing into it
    gate.touch()
    fails(run, "DT354", "are missing")
    assert not folder.exists()
    run_of(stage, source=source, sink=folder / "out.jsonl", resume=run.folder.name).wait()
    assert sorted(numbers_in(folder / "out.jsonl")) == list(range(ROWS))
    assert names_in(folder) == ["out.jsonl"]


def test_a_sink_folder_that_vanishes_before_a_worker_begins(tmp_path: Path) -> None:
    """Its first worker gets the same error as one that has written already."""
    gate, folder = tmp_path / "gate", tmp_path / "out"

    class Late:
        def setup(self, _worker: Any) -> None:
            until(gate.exists, "the gate is open")

        def __call__(self, rows: list[Any]) -> list[Any]:
            return rows

    source, stage = rows_in(tmp_path / "in.jsonl", 100), dt.Stage("late", Late)
    run = run_of(stage, source=source, sink=folder / "out.jsonl")
    folder.rename(tmp_path / "gone")  # in one step: a worker may be writing into it
    gate.touch()
    fails(run, "DT354", "are missing")
    run_of(stage, source=source, sink=folder / "out.jsonl", resume=run.folder.name).wait()
    assert sorted(numbers_in(folder / "out.jsonl")) == list(range(100))


def test_a_disk_that_becomes_read_only(tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    """Also for root: what may not be written."""
    source, gate, disk = rows_in(tmp_path / "in.jsonl", 200), tmp_path / "gate", small_disk("50m")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(dt.ConfigError, match="Read-only file system") as caught:
        run_of(SAME, source=source, sink=disk / "out.jsonl")
    assert caught.value.problems[0].code == "DT351"
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)

    class Late:
        def setup(self, _worker: Any) -> None:
            until(gate.exists, "the gate is open")

        def __call__(self, rows: list[Any]) -> list[Any]:
            return rows

    run = run_of(dt.Stage("late", Late), source=source, sink=disk / "out.jsonl")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    gate.touch()
    fails(run, "DT355", "Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    run_of(dt.Stage("late", Late), source=source, sink=disk / "out.jsonl", resume=run.folder.name).wait()
    assert sorted(numbers_in(disk / "out.jsonl")) == list(range(200))


POWERLESS = """
import ctypes, os, sys
if not sys.argv[1:]:  # root may not do everything any more: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH are dropped
    dropped = [ctypes.CDLL(None).prctl(24, power, 0, 0, 0) for power in (1, 2)]
    os.execv(sys.executable, [sys.executable, __file__, "now"])
import dovetail as dt
for source, sink in (("secret.jsonl", "free/out.jsonl"), ("in.jsonl", "closed/out.jsonl")):
    try:
        dt.run(dt.Pipeline([dt.Stage("same", lambda rows: rows)]), source, sink=sink, cluster="1x(2cpu, 8GB)").wait()
        print("no error")
    except dt.DovetailError as error:
        print([problem.code for problem in error.problems], error)
"""


def test_what_may_not_be_read_or_written(tmp_path: Path) -> None:
    rows_in(tmp_path / "in.jsonl", 5)
    rows_in(tmp_path / "secret.jsonl", 5).chmod(0o000)
    (tmp_path / "free").mkdir()
    (tmp_path / "closed").mkdir(mode=0o555)
    with Script(tmp_path, POWERLESS) as script:
        output = script.finish()
    assert "secret.jsonl  permission denied" in output, output
    assert "['DT351']" in output, output
    assert "Permission denied" in output, output
    assert names_in(tmp_path / "closed") == names_in(tmp_path / "free") == []


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"x", b"y"))


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"i": -1}\n')


def _replace(path: Path) -> None:
    fresh = path.with_name("fresh")
    fresh.write_bytes(path.read_bytes().replace(b"x", b"y"))
    fresh.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "rewritten": _rewrite,
    "appended to": _append,
    "replaced": _replace,
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("how", [pytest.param("truncated", marks=pytest.mark.processes), *list(CHANGES)[1:]])
def test_a_source_that_changes_while_it_is_read(how: str, tmp_path: Path) -> None:
    source, gate, out = rows_in(tmp_path / "in.jsonl"), tmp_path / "gate", tmp_path / "out.jsonl"
    kept = tmp_path / "backup"
    shutil.copy2(source, kept)
    stage = dt.Stage("gated", Gated(gate), batch_size=4)
    run = run_of(stage, source=source, sink=out, options=OFTEN)
    until(lambda: commits(run) > 0, "something is committed")
    CHANGES[how](source)
    gate.touch()
    fails(run, "DT344", str(source), "changed while it was read")
    assert not out.exists()
    with pytest.raises(dt.ConfigError) as caught:
        run_of(stage, source=source, sink=out, resume=run.folder.name)
    assert caught.value.problems[0].code in ("DT386", "DT341"), str(caught.value)
    source.unlink(missing_ok=True)
    (tmp_path / "in the way").touch()  # takes its inode, if that is given again
    shutil.copy2(kept, source)
    run_of(stage, source=source, sink=out, resume=run.folder.name).wait()
    assert sorted(numbers_in(out)) == list(range(ROWS))
