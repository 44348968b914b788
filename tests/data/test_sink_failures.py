"""Sinks after a kill, a full disk or a removed folder: no partial file under the final name."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import random
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from data.sink_aids import as_csv, opened, rows_of, through_log, writers, written
from dovetail.control.payload import SourceSinkError
from dovetail.data.sinks import open_sink, sink
from runtime.aids import Script

if TYPE_CHECKING:
    from collections.abc import Iterator

CHILD = Path(__file__).with_name("sink_child.py")
OLD = [{"id": -1, "text": "old"}]
ROWS = [{"id": at, "text": f"row {at} " * 20} for at in range(300)]


# --- killed in the midst of the end


def child(folder: Path, kind: str, point: int) -> tuple[int, str]:
    """Exit code and output of a process that finishes the sink."""
    text = CHILD.read_text()
    with Script(
        folder.parent, text, warm=True, SINK_FOLDER=str(folder), SINK_KIND=kind, SINK_POINT=str(point)
    ) as script:
        return script.ended(), script.output


def killed_at_any_moment(kind: str, settings: dict[str, Any], folder: Path, times: int) -> None:
    path = folder / f"x.{kind}"
    before = opened(path, "r0")
    before.finish(written(before, [0], OLD))
    before.discard()
    target = opened(path, "r1", ordered=True, **settings)
    pieces = written(target, list(range(len(ROWS))), ROWS)
    task = {"settings": {"ordered": True, **settings}, "run": "r1", "base": target.base(), "pieces": pieces}
    (folder / "task.json").write_text(json.dumps(task))
    complete = OLD + ROWS if settings.get("exists") == "append" else ROWS
    shutil.copytree(folder, folder.with_name("counted"))
    code, printed = child(folder.with_name("counted"), kind, 0)
    assert code == 0, printed
    total = int(printed)
    chance = random.Random(5)
    seen = set()
    # most of the calls come before the renaming: half of the kills are among the last ones
    points = [chance.randrange(1, total) for _ in range(times // 2)]
    points += [chance.randrange(total - 60, total) for _ in range(times - times // 2)]
    for point in points:
        code, printed = child(folder, kind, point)
        # once a version of a dataset is there, there is less to do than was counted
        assert code == 9 or (kind == "lance" and code == 0), printed
        found = rows_of(path)
        assert found in (OLD, complete)
        seen.add(len(found))
        assert target.which_exist(pieces) == [True] * len(pieces)
    assert child(folder, kind, 0)[0] == 0
    assert rows_of(path) == complete
    assert len(complete) in seen or times < 5
    target.discard()
    assert {path.name for path in folder.iterdir()} == {f"x.{kind}", "task.json"}


APPEND = {"exists": "append"}
CASES = [("jsonl", {}), ("jsonl", APPEND), ("parquet", APPEND), ("lance", {}), ("lance", APPEND)]


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_killed_in_the_midst_of_the_end(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    killed_at_any_moment(kind, settings, tmp_path / "here", 6 if kind == "jsonl" else 2)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_killed_in_the_midst_of_the_end_often(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    killed_at_any_moment(kind, settings, tmp_path / "here", 40 if kind == "jsonl" else 12)


# --- a full disk


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size, or none if we may not mount one."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()):
        pytest.skip("no permission to mount a small disk")
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)


@pytest.mark.parametrize("kind", ["jsonl", "csv.gz", "parquet", "lance"])
def test_a_disk_that_is_full_at_the_end(kind: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    rows = [{"id": at, "text": chance.randbytes(2000).hex()} for at in range(300)]
    with small_disk(tmp_path / "disk", "4m") as disk:
        path = disk / f"x.{kind}"
        before = opened(path, "r0")
        before.finish(written(before, [0], OLD))
        before.discard()
        target = opened(path, "r1", ordered=True)
        pieces = written(target, list(range(300)), rows)
        ballast = disk / "ballast"
        stat = os.statvfs(disk)
        ballast.write_bytes(bytes(stat.f_bavail * stat.f_frsize - 60_000))
        with pytest.raises(SourceSinkError) as caught:
            target.finish(pieces)
        assert caught.value.code == "DT353"
        assert "df -h" in caught.value.fix
        assert rows_of(path) == (as_csv(OLD) if kind == "csv.gz" else OLD)
        assert not (target.parts / ".out").exists()
        ballast.unlink()
        target.finish(pieces)
        assert rows_of(path) == (as_csv(rows) if kind == "csv.gz" else rows)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_disk_that_is_full_while_workers_write(kind: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    with small_disk(tmp_path / "disk", "1m") as disk:
        target = opened(disk / f"x.{kind}", "r1", ordered=True)
        (writer,) = writers(target, 1)
        pieces: list[Any] = []

        def fill() -> None:
            for at in range(100):
                pieces.append(writer.write([at, at + 1000], [{"t": chance.randbytes(10_000).hex()} for _ in range(2)]))

        with pytest.raises(SourceSinkError) as caught:
            fill()
        assert caught.value.code == "DT353"
        assert pickle.loads(pickle.dumps(caught.value)).fix == caught.value.fix
        assert 10 < len(pieces) < 50
        target.sync(["w0"])
        last = pieces[-1]
        assert (target.parts / "w0").stat().st_size == last.offset + last.length + (last.keys or [0, 0])[1]
        pieces.append(writer.write([5000], [{"t": "small"}]))  # what is left of the disk can still be used
        assert target.which_exist(through_log(pieces)) == [True] * len(pieces)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """A limit on the size of files replaces a full disk where the test may not mount one."""
    target = opened(tmp_path / "x.jsonl", "r1")
    code = (
        "import os, pickle, resource\n"
        "writer = pickle.loads(bytes.fromhex(os.environ['WRITER']))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "writer.begin('w0')\n"
        "try:\n"
        "    for at in range(100): writer.write([at], [{'t': 'x' * 1989}])\n"
        "except Exception as error: print(type(error).__name__, error.code, at)\n"
    )
    with Script(tmp_path, code, warm=True, WRITER=pickle.dumps(target.writer()).hex()) as script:
        assert script.finish() == "SourceSinkError DT353 25\n"
    assert (target.parts / "w0").stat().st_size == 25 * 1999


# --- what vanishes


def test_a_folder_that_vanishes_while_workers_write(tmp_path: Path) -> None:
    target = opened(tmp_path / "out" / "x.jsonl", "r1")
    (writer,) = writers(target, 1)
    pieces = [writer.write([0], [{"a": 1}])]
    target.sync(["w0"])
    shutil.rmtree(tmp_path / "out")
    pieces.append(writer.write([1], [{"a": 2}]))  # a file without a name takes it
    with pytest.raises(SourceSinkError) as caught:
        target.sync(["w0"])
    assert caught.value.code == "DT354"
    with pytest.raises(SourceSinkError, match="are missing"):
        target.finish(pieces)
    with pytest.raises(SourceSinkError, match="are missing"):
        writers(target, 1, "late")
    target.close()
    again = open_sink(sink(tmp_path / "out" / "x.jsonl"), "r1", tmp_path)
    again.prepare(resumed=True)
    assert again.which_exist(pieces) == [False, False]
    (writer,) = writers(again, 1, "again")
    again.finish([writer.write([0, 1], [{"a": 1}, {"a": 2}])])
    assert rows_of(tmp_path / "out" / "x.jsonl") == [{"a": 1}, {"a": 2}]


def test_a_part_that_was_replaced_or_cut_is_noticed(tmp_path: Path) -> None:
    target = opened(tmp_path / "x.jsonl", "r1", ordered=True)
    one, other = writers(target, 2)
    pieces = [one.write([0, 9], [{"a": 1}, {"a": 2}]), other.write([5, 7], [{"a": 3}, {"a": 4}])]
    target.sync(["w0", "w1"])
    os.truncate(target.parts / "w1", pieces[1].offset + pieces[1].length)  # the rows are there, their keys are not
    assert target.which_exist(pieces) == [True, False]
    with pytest.raises(SourceSinkError, match="are missing"):
        target.finish(pieces)
    assert not (tmp_path / "x.jsonl").exists()
    (target.parts / "w0").unlink()
    (target.parts / "w0").touch()
    with pytest.raises(SourceSinkError) as caught:
        target.sync(["w0"])
    assert caught.value.code == "DT354"


def test_a_folder_in_place_of_the_final_file_is_an_error(tmp_path: Path) -> None:
    target = opened(tmp_path / "x.jsonl", "r1")
    pieces = written(target, [0], [{"a": 1}])
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(SourceSinkError) as caught:
        target.finish(pieces)
    assert caught.value.code == "DT355"
    (tmp_path / "x.jsonl").rmdir()
    target.finish(pieces)
    assert rows_of(tmp_path / "x.jsonl") == [{"a": 1}]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_parts_need_few_descriptors(tmp_path: Path) -> None:
    target = opened(tmp_path / "x.jsonl", "r1", ordered=True)
    pieces = []
    for at in range(250):
        (writer,) = writers(target, 1, f"p{at}-")
        pieces.append(writer.write([at, at + 250], [{"a": at}, {"a": at + 250}]))
        writer.end()
    before = open_files()
    target.sync([piece.part for piece in pieces])
    assert open_files() <= before + 100
    target.finish(pieces)
    assert [row["a"] for row in rows_of(tmp_path / "x.jsonl")] == list(range(500))
    target.close()
    assert open_files() <= before
