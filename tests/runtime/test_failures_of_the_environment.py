"""What if the world breaks while files become files? A clear error, nothing half done, and resumable afterwards."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.streaming.settings import StreamOptions
from runtime.aids import CLUSTER, Script, descriptors, kill_one, losses, no_worker_is_left, said_when_waiting
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
        told = subprocess.run(["mount", *(again if made else first)], capture_output=True, text=True, check=False)
        if told.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {told.stderr.strip()}")
        return folder

    yield sized
    if folder.exists():
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def rows_in(path: Path, count: int = ROWS, pad: int = PAD) -> Path:
    path.write_text("".join(json.dumps({"i": number, "pad": "x" * pad}) + "\n" for number in range(count)))
    return path


def numbers_in(path: Path) -> list[int]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return [row["i"] for row in pq.read_table(path).to_pylist()]
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line)["i"] for line in data.splitlines()]


def fill(path: Path) -> None:
    """All the room there is."""
    with path.open("wb", buffering=0) as file:
        while file.write(b"x" * 512):
            pass


class Gated:
    """A stage that works until somebody shuts the gate, and then waits until it is opened: a run in its midst."""

    def __init__(self, gate: Path, free: int = ROWS // 2) -> None:
        self.gate = gate
        self.free = free

    def __call__(self, rows: list[Any]) -> list[Any]:
        if any(row["i"] >= self.free for row in rows):
            until(self.gate.exists, "the gate is open")
        return rows


def run_of(*stages: dt.Stage, source: Any, **settings: Any) -> dt.Run:
    return dt.run(dt.Pipeline(list(stages)), source, **({"cluster": CLUSTER} | settings))


OFTEN = StreamOptions(target_epoch_s=0.001, target_epoch_batches=4, hop_s=0.0002)
"""Small epochs."""
SAME = dt.Stage("same", same, batch_size=4)


def commits(run: dt.Run) -> int:
    return (run.folder / "commit.log").read_bytes().count(b'"wave"')


def fails(run: dt.Run, code: str, *words: str) -> str:
    """With that code, a fix, and that status; and nobody is left."""
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
    """What others see."""
    return [name for name in names_in(folder) if not name.startswith(".")]


# A disk that is full


@pytest.mark.parametrize("kind", ["jsonl", "parquet"] if not LONG else ["jsonl", "csv", "parquet", "lance"])
def test_no_room_for_parts(kind: str, tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    def pad(rows: list[Any]) -> list[Any]:
        return [{"i": row["i"], "pad": os.urandom(1000).hex()} for row in rows]

    source, disk = rows_in(tmp_path / "in.jsonl", pad=1), small_disk("2m")
    stage = dt.Stage("pad", pad)
    run = run_of(stage, source=source, sink=disk / f"out.{kind}")
    said = fails(run, "DT353", "no space for the results", "df -h")
    assert f'resume="{run.folder.name}"' in said
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
    said = fails(run, "DT380", "the commit log cannot be written")
    assert str(disk / "my run") in said.split("fix")[-1], "it does not lie where the others do"
    assert not out.exists()
    (disk / "junk").unlink()
    run_of(stage, source=source, sink=out, resume=disk / "my run").wait()
    assert sorted(numbers_in(out)) == list(range(rows))


@pytest.mark.filterwarnings("ignore:Recorder failed")
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_no_room_in_the_spool(on_error: Any, tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    """No item is to blame for that, and none is set aside."""
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


# A sink that goes away


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
    """Its first worker is told the same as one that had written already."""
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
        said = script.finish()
    assert "secret.jsonl  permission denied" in said, said
    assert "['DT351']" in said, said
    assert "Permission denied" in said, said
    assert names_in(tmp_path / "closed") == names_in(tmp_path / "free") == []


# A source that is not what it was


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


@pytest.mark.parametrize("how", CHANGES)
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


# Workers that die


@pytest.mark.parametrize(("kind", "ordered"), [("jsonl", True), ("jsonl", False), ("parquet", True)])
def test_killed_workers_write_nothing_twice(kind: str, ordered: bool, tmp_path: Path) -> None:
    count, kills = (20_000, 20) if LONG else (1500, 4)
    source, out = rows_in(tmp_path / "in.jsonl", count, 10), tmp_path / f"out.{kind}"
    allowed, calls = tmp_path / "allowed", tmp_path / "calls"
    allowed.touch()
    calls.touch()

    class Paced:
        """Not more calls than are allowed, so that there is something to kill."""

        def __call__(self, rows: list[Any]) -> list[Any]:
            with calls.open("ab") as file:
                file.write(b".")
                number = file.tell()
            until(lambda: number <= allowed.stat().st_size, "it may go on")
            return [row for row in rows for _ in range(row["i"] % 3)]

    stages = [dt.Stage("same", same, fuse=False), dt.Stage("paced", Paced, workers=2, fuse=False)]
    run = run_of(*stages, source=source, sink=out, ordered=ordered, cluster="1x(4cpu, 8GB)")
    dice = Random(7)
    for turn in range(kills):
        os.truncate(allowed, count * turn // kills)
        # so far that nobody is killed thrice for one item
        until(lambda: calls.stat().st_size > allowed.stat().st_size, "it is as far as it may")
        kill_one(run, dice=dice)
    os.truncate(allowed, 1000 * count)
    run.wait()
    assert losses(run) > 0
    found = numbers_in(out)
    assert run.errors == []
    expected = [number for number in range(count) for _ in range(number % 3)]
    assert (found if ordered else sorted(found)) == expected


# What a run leaves behind


def test_many_runs_in_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    source = rows_in(tmp_path / "in.jsonl", 50, 10)
    out = tmp_path / "out" / "x.jsonl"

    def once() -> None:
        run_of(SAME, source=source, sink=out, progress=False).wait()

    others = set(threading.enumerate())
    once()
    once()
    until(lambda: not _ours(others), f"threads are gone: {_ours(others)}")
    before = sorted(descriptors())
    for _ in range(50 if LONG else 8):
        once()
    until(lambda: not _ours(others), f"threads are gone: {_ours(others)}")
    until(lambda: len(descriptors()) <= len(before), f"descriptors are closed: {before} {descriptors()}")
    assert names_in(out.parent) == ["x.jsonl"]
    assert len(numbers_in(out)) == 50


def _ours(others: set[threading.Thread]) -> list[str]:
    """Threads of runs, except for those that are not of these runs."""
    return [one.name for one in threading.enumerate() if one not in others and one.name.startswith("dovetail")]


def test_the_folder_of_a_run_holds_what_is_documented(tmp_path: Path) -> None:
    source = rows_in(tmp_path / "in.jsonl", 50, 10)
    run = run_of(SAME, source=source, sink=tmp_path / "out.jsonl", run_dir=tmp_path / "run")
    run.wait()
    documented = {"run.json", "plan.json", "events.jsonl", "errors", "logs", "commit.log", "control.sock", "spool"}
    assert {path.name for path in run.folder.iterdir()} <= documented | {"lock"}
    assert not any((run.folder / "spool").glob("*"))


def test_memory_of_the_driver_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    rows = 300_000 if LONG else 60_000
    source, out = rows_in(tmp_path / "in.jsonl", rows, 10), tmp_path / "out.jsonl"
    small = rows_in(tmp_path / "small.jsonl", 100, 10)
    stage = dt.Stage("same", same, batch_size=50)
    run_of(stage, source=small, sink=out).wait()
    before = _rss()
    run = run_of(stage, source=source, sink=out)
    most = before

    def over() -> bool:
        nonlocal most
        most = max(most, _rss())
        return run.done

    until(over, "the run is over")
    run.wait()
    assert len(numbers_in(out)) == rows
    assert most - before < 40 << 20, f"{(most - before) >> 20} MB more"


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_runs_at_the_same_time_into_different_sinks(tmp_path: Path) -> None:
    source = rows_in(tmp_path / "in.jsonl", 400, 10)
    stage = dt.Stage("same", same, workers=1)
    runs = [run_of(stage, source=source, sink=tmp_path / f"{name}.jsonl", cluster="1x(2cpu, 8GB)") for name in "ab"]
    for run in runs:
        run.wait()
    for name in "ab":
        assert sorted(numbers_in(tmp_path / f"{name}.jsonl")) == list(range(400))


# Ctrl-C


INTERRUPTED = """
import json, os, sys, time
import dovetail as dt
def slow(rows):
    while rows[-1]["i"] >= 2000 and not os.path.exists("go"):
        time.sleep(0.002)
    time.sleep(0.002)
    return rows
where = {"resume": "run"} if "again" in os.environ else {"run_dir": "run"}
pipeline = dt.Pipeline([dt.Stage("slow", slow)])
run = dt.run(pipeline, "in.jsonl", sink="out/out.jsonl", cluster="1x(2cpu, 8GB)", **where)
SAYS
print("status", run.wait().status)
""".replace("SAYS", said_when_waiting("it waits"))


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_script_that_writes_a_file(times: int, tmp_path: Path) -> None:
    count = 4000
    rows_in(tmp_path / "in.jsonl", count, 10)
    log, go = tmp_path / "run" / "commit.log", tmp_path / "go"
    with Script(tmp_path, INTERRUPTED) as script:
        until(lambda: log.exists() and log.read_bytes().count(b'"wave"') > 1, "something is committed")
        script.says("it waits")
        script.kill(signal.SIGINT)
        script.says("draining")
        if times == 2:
            script.kill(signal.SIGINT)
        else:
            go.touch()
        code = script.ended()
        script.all_gone()
        said = script.output
    if times == 1:
        assert (code, "status drained" in said) == (0, True), said
    assert not (tmp_path / "out" / "out.jsonl").exists()
    go.touch()
    with Script(tmp_path, INTERRUPTED, again="yes") as script:
        assert "status finished" in script.finish()
    assert sorted(numbers_in(tmp_path / "out" / "out.jsonl")) == list(range(count))
    assert names_in(tmp_path / "out") == ["out.jsonl"]
