"""Durable runs: commit log, appending runs, failed items, forked children."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.data.commit_log import CommitLog, read_commit_log
from dovetail.runtime.failed_item_retry import FailedItemRetry
from dovetail.runtime.run_spec import absolute_path
from runtime.aids import CLUSTER

if TYPE_CHECKING:
    from collections.abc import Callable


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(count)))
    return path


def one_stage(run: Callable[..., Any], **settings: Any) -> dt.Pipeline:
    return dt.Pipeline([dt.Stage("only", dt.each(run), **settings)])


def same(row: Any) -> Any:
    return row


def test_a_line_of_the_log_that_only_lacks_its_end_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "commit.log"
    log = CommitLog(path)
    entry = {
        "wave": 0,
        "epoch": 1,
        "first": 0,
        "last": 5,
        "out": {},
        "items": 5,
        "spool": {},
        "aside": [],
        "mark": None,
    }
    log.begin({"run": "x"})
    log.write(entry)
    log.write(entry | {"first": 5, "last": 9})
    log.close()
    whole = path.read_bytes()
    begins = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(begins, len(whole)):
        path.write_bytes(whole[:cut])
        contents = read_commit_log(path)
        CommitLog(path).close()
        assert [one.last for one in contents.entries.values()] == [5]
        assert [one.last for one in read_commit_log(path).entries.values()] == [5], "read and opened are of one mind"


class DiesOnce:
    def __init__(self) -> None:
        self.marker = Path(os.environ["DIES_ONCE"])

    def __call__(self, rows: list[Any]) -> list[Any]:
        if any(row["id"] == 40 for row in rows) and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"id": row["id"]} for row in rows]


@pytest.mark.processes
def test_odd_rows_stay_odd_when_their_split_comes_back_in_two_parts(tmp_path: Path) -> None:
    lines = [f'{{"id": {number}}}' for number in range(400)]
    for at in (5, 60, 120, 200, 300):
        lines[at] = "" if at % 2 else "{bad"
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines) + "\n")
    stage = dt.Stage("only", DiesOnce, batch_size=8, workers=1, env={"DIES_ONCE": str(tmp_path / "marker")})
    sink = tmp_path / "out.jsonl"
    run = dt.run(dt.Pipeline([stage]), str(source), sink=str(sink), ordered=True, cluster=CLUSTER, profiles=False)
    run.wait()
    assert (tmp_path / "marker").exists()
    good = [number for number, line in enumerate(lines) if line and line != "{bad"]
    assert [row["id"] for row in rows_of(sink)] == good
    assert len(run.errors) == sum(line == "{bad" for line in lines)


def test_two_runs_that_append_to_one_file_lose_no_rows(tmp_path: Path) -> None:
    source, sink = write_rows(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    write_rows(sink, 1)
    gate = tmp_path / "gate"

    def slowly(row: Any) -> Any:
        import time
        from pathlib import Path

        while not Path(gate).exists():
            time.sleep(0.01)
        return row

    spec = dt.sink(str(sink), exists="append")
    first = dt.run(one_stage(slowly), str(source), sink=spec, cluster="1x(1cpu, 1GB)", profiles=False)
    second = dt.run(one_stage(same), str(source), sink=spec, cluster="1x(2cpu, 1GB)", profiles=False)
    second.wait()
    assert len(rows_of(sink)) == 6
    gate.touch()
    with pytest.raises(dt.RunError, match="changed by another process"):
        first.wait()
    assert len(rows_of(sink)) == 6, "the other one's rows are still there"


def test_one_file_spelled_in_two_ways_is_one_file(tmp_path: Path) -> None:
    pipeline = dt.Pipeline(
        [
            dt.Stage("read", dt.each(same)),
            dt.Stage("a", dt.each(same), after=["read"]),
            dt.Stage("b", dt.each(same), after=["read"]),
        ]
    )
    other = f"{tmp_path}/sub/../out.jsonl"
    with pytest.raises(dt.ConfigError, match="same sink"):
        dt.run(pipeline, [1], sink={"a": f"{tmp_path}/out.jsonl", "b": other}, cluster=CLUSTER)


def test_the_folder_of_a_sink_is_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "br[x]"
    assert absolute_path("out[1].jsonl", folder, pattern=False) == str(folder / "out[1].jsonl")
    assert absolute_path("in*.jsonl", folder, pattern=True) == f"{tmp_path}/br[[]x]/in*.jsonl"


def test_a_failed_item_that_cannot_be_unpickled_is_reported_and_the_others_are_shown(tmp_path: Path) -> None:
    def fails(item: Any) -> Any:
        raise ValueError("no")

    items: list[Any] = [1, {2}, 3]
    run = dt.run(one_stage(fails, on_error="skip", retries=0), items, cluster=CLUSTER, run_dir=tmp_path / "run")
    assert list(run) == []
    errors = tmp_path / "run" / "errors" / "errors.jsonl"
    text = errors.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    broken = next(line for line in lines if "item_pickle" in line)
    broken["item_pickle"] = "gASVAAAA"  # torn, as good as gone
    errors.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = FailedItemRetry(tmp_path / "run", None)
    assert sorted(item for _, _, item in again.items) == [1, 3]
    assert any("unpickled" in note for note in again.notes)


def test_a_call_that_is_tried_again_keeps_its_place(tmp_path: Path) -> None:
    """The run is ordered, and a later stage puts the items before and after it into other batches."""
    source, sink = write_rows(tmp_path / "in.jsonl", 3000), tmp_path / "out.jsonl"
    marks = tmp_path / "marks"
    marks.mkdir()

    def sometimes(rows: list[Any]) -> list[Any]:
        from pathlib import Path

        for row in rows:
            mark = Path(marks) / str(row["id"])
            if row["id"] % 97 == 5 and not mark.exists():
                mark.touch()
                raise ValueError("not the first time")
        return rows

    def twice(rows: list[Any]) -> list[Any]:
        return [{"id": row["id"], "copy": copy} for row in rows for copy in range(2)]

    pipeline = dt.Pipeline(
        [dt.Stage("sometimes", sometimes, batch_size=4), dt.Stage("twice", twice, batch_size=24, workers=2)]
    )
    dt.run(pipeline, str(source), sink=dt.sink(str(sink), ordered=True), cluster=CLUSTER, profiles=False).wait()
    assert len(list(marks.iterdir())) == len([number for number in range(3000) if number % 97 == 5])
    found = [(row["id"], row["copy"]) for row in rows_of(sink)]
    assert found == [(number, copy) for number in range(3000) for copy in range(2)]


@pytest.mark.processes
def test_a_child_that_user_code_forks_writes_nothing(tmp_path: Path) -> None:
    source, sink = write_rows(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"

    def forks(row: Any) -> Any:
        import os
        import warnings

        if row["id"] % 50 == 7:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                os.fork()  # and both come back
        return row

    pipeline = dt.Pipeline([dt.Stage("forks", dt.each(forks), workers=1)])
    dt.run(pipeline, str(source), sink=dt.sink(str(sink), ordered=True), cluster=CLUSTER, profiles=False).wait()
    assert [row["id"] for row in rows_of(sink)] == list(range(400))


@pytest.mark.parametrize("alike", [True, False])
def test_what_failed_by_two_ways_is_run_again_twice(tmp_path: Path, alike: bool) -> None:
    source, sink = write_rows(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    fixed = tmp_path / "fixed"

    def way(name: str) -> Callable[[Any], Any]:
        return lambda row: {**row, "way": "x" if alike else name}

    def joins(row: Any) -> Any:
        from pathlib import Path

        if row["id"] == 5 and not Path(fixed).exists():
            raise ValueError("not yet")
        return row

    pipeline = dt.Pipeline(
        [
            dt.Stage("a", dt.each(way("a")), after=[]),
            dt.Stage("b", dt.each(way("b")), after=[]),
            dt.Stage("c", dt.each(joins), after=["a", "b"], on_error="skip", retries=0),
        ]
    )
    cluster = "1x(4cpu, 4GB)"
    folder = tmp_path / "run"
    run = dt.run(pipeline, str(source), sink=str(sink), cluster=cluster, profiles=False, run_dir=folder)
    run.wait()
    assert len(rows_of(sink)) == 38
    assert len(run.errors) == 2
    fixed.touch()
    dt.run(pipeline, retry_errors=folder, cluster=cluster, profiles=False).wait()
    assert len(rows_of(sink)) == 40
    assert sorted(row["way"] for row in rows_of(sink) if row["id"] == 5) == (["x", "x"] if alike else ["a", "b"])
