"""Recorder: files of a run, their size limits, and errors of the disk."""

from __future__ import annotations

import json
import math
import pickle
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from dovetail.control.commands import Cancel, Command, Deliver, Note, Pull, RunBatches, StopWorker
from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    CancelRun,
    Drain,
    Event,
    InputEnded,
    ItemsArrived,
    LossCause,
    NodeJoined,
    PinWorkers,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.payload import Segment
from dovetail.errors import ConfigError
from dovetail.observe.failed_items import FailedItemLog, encode_item
from dovetail.observe.history import RunHistory
from dovetail.observe.journal import Journal, ViewInterval, json_line, read_json_lines
from dovetail.observe.run_folder import RunFolder
from dovetail.observe.run_header import RunDescription
from dovetail.resources.cluster import Node
from observe.made import Clock, failed_item, recorded, recorder, run_at, start, unit, view, worker
from waiting import LONG

CAP_BYTES = 20_000_000


def lines(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(path / "events.jsonl") if kind in (None, line["k"])]


def header(path: Path) -> dict[str, Any]:
    found = json.loads((path / "run.json").read_text())
    assert isinstance(found, dict)
    return found


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_a_run_leaves_its_header_plan_events_commits_and_errors(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", plan='{"version": 1}')
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert files == ["errors/errors.jsonl", "events.jsonl", "plan.json", "run.json"]
    assert (path / "plan.json").read_text() == '{"version": 1}'


def test_the_header_has_command_engine_and_outcome(tmp_path: Path) -> None:
    found = header(recorded(tmp_path / "r"))
    shown = {name: found[name] for name in ("version", "id", "name", "what", "engine", "cluster", "virtual", "status")}
    assert shown == {
        "version": 1,
        "id": "r",
        "name": "video",
        "what": "video.yaml",
        "engine": "local",
        "cluster": "1x(4cpu)",
        "virtual": False,
        "status": "finished",
    }
    assert found["started"] == found["ended"] == Clock().now
    assert {"dovetail", "python", "host", "pid", "pid_started", "heartbeat"} <= found.keys()
    assert found["progress"]["finished"] == 1000
    assert found["progress"]["seconds"] == 110


def test_every_line_has_a_version_a_time_and_a_kind(tmp_path: Path) -> None:
    for line in lines(recorded(tmp_path / "r")):
        assert line["v"] == 1
        assert isinstance(line["t"], float)
        assert line["k"] in ("run", "unit", "worker", "worker_use", "note", "node")


def test_one_line_per_stage_and_second_is_written_unless_nothing_changed(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r")
    assert [line["t"] for line in lines(path, "run")] == [*map(float, range(111)), 110.0]
    of_a = [line for line in lines(path, "unit") if line["name"] == "a"]
    assert [line["t"] for line in of_a] == [0.0, *map(float, range(10, 111)), 110.0]
    assert of_a[-1]["taken_total"] == 1000
    assert [line["t"] for line in lines(path, "worker_use") if line["worker"] == 1] == [10.0 * i for i in range(12)]


def test_notes_nodes_and_workers_are_written_with_their_reasons(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r")
    (decision, error) = lines(path, "note")
    assert (decision["what"], decision["text"], decision["data"]) == ("decision", "2 workers of a", {"unit": "a"})
    assert error["what"] == "error"
    assert [(line["node"], line["do"], line["why"]) for line in lines(path, "node")] == [("node-1", "left", "power")]
    done = [(line["t"], line["w"], line["unit"], line["do"]) for line in lines(path, "worker")]
    assert done == [
        *((0.0, number, name, "start") for number, name in ((1, "a"), (2, "a"), (3, "b"))),
        *((10.0, number, name, "ready") for number, name in ((1, "a"), (2, "a"), (3, "b"))),
        (50.0, 2, "a", "lost"),
        (60.0, 1, "a", "stop"),
        (70.0, 1, "a", "stopped"),
    ]
    assert lines(path, "worker")[6]["why"] == "node lost: power"


def test_what_was_asked_of_a_run_is_written(tmp_path: Path) -> None:
    written = recorder(tmp_path / "r")
    asked: list[Event] = [Drain("Ctrl-C"), CancelRun(), PinWorkers("a", 3), InputEnded(7), NodeJoined(Node("n", 1000))]
    written.on_step(0.0, asked, [])
    written.close(1.0)
    assert [line["do"] for line in lines(tmp_path / "r", "asked")] == ["drain", "cancel", "repin"]
    assert lines(tmp_path / "r", "input")[0]["items"] == 7
    assert lines(tmp_path / "r", "node")[0] == {"v": 1, "t": 0.0, "k": "node", "node": "n", "do": "joined"}


def test_a_failed_item_is_stored_with_its_error(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", item=lambda part: {"frame": part[1]})
    (line,) = read_json_lines(path / "errors" / "errors.jsonl")
    assert line == {
        "v": 1,
        "t": 60.0,
        "unit": "b",
        "stage": "b",
        "key": [0, 2],
        "error": "ValueError",
        "message": "no such frame: 3",
        "detail": "Traceback: line 1",
        "attempts": 3,
        "part": [7, 1, 2],
        "item": {"frame": 1},
    }


class Shy:
    def __repr__(self) -> str:
        raise ValueError("no")


def test_an_item_that_is_no_json_is_pickled_and_a_large_one_is_only_described() -> None:
    assert encode_item({"a": [1, None]}) == {"item": {"a": [1, None]}}
    packed = encode_item({"a": (1, 2), "b": b"\x00"})["item_pickle"]
    assert pickle.loads(b64decode(packed)) == {"a": (1, 2), "b": b"\x00"}
    assert encode_item(math.nan).keys() == {"item_pickle", "item_repr"}
    assert encode_item("x" * 100_000).keys() == {"item_lost", "item_repr"}
    shy = encode_item(Shy())
    assert isinstance(pickle.loads(b64decode(shy["item_pickle"])), Shy)
    assert shy["item_repr"] == "a Shy"


def test_an_item_that_cannot_be_had_does_not_lose_its_error(tmp_path: Path) -> None:
    def gone(part: object) -> object:
        raise KeyError("freed")

    path = recorded(tmp_path / "r", item=gone)
    (line,) = read_json_lines(path / "errors" / "errors.jsonl")
    assert line["item_lost"] == "KeyError: 'freed'"
    assert line["message"] == "no such frame: 3"


def test_errors_are_capped_and_what_was_left_out_is_counted(tmp_path: Path) -> None:
    kept = FailedItemLog(tmp_path / "errors" / "errors.jsonl", limit_bytes=10_000)
    for number in range(500):
        kept.write(0.0, [failed_item(number)])
    assert kept.path.stat().st_size < 11_000
    assert kept.written == len(read_json_lines(kept.path))
    assert kept.written + kept.left_out == 500


def test_the_heart_beats_at_most_every_two_seconds_of_the_wall(tmp_path: Path) -> None:
    wall = Clock(1000.0)
    written = recorder(tmp_path / "r", wall=wall)
    beats = []
    for step in range(100):
        wall.now = 1000.0 + step / 10
        written.on_step(float(step), [], [])
        beats.append(header(tmp_path / "r")["heartbeat"])
    assert sorted(set(beats)) == pytest.approx([1000.0, 1002.0, 1004.0, 1006.0, 1008.0])
    written.close(100.0)


def test_what_happened_can_be_read_a_second_later(tmp_path: Path) -> None:
    wall = Clock()
    written = recorder(tmp_path / "r", wall=wall)
    written.on_step(0.0, [], [Note("decision", "more of a")])
    assert lines(tmp_path / "r", "note") == []
    wall.now += 1.0
    written.on_step(1.0, [], [])
    assert len(lines(tmp_path / "r", "note")) == 1
    written.close(1.0)


def test_a_busy_run_reads_the_wall_clock_although_its_own_hardly_moves(tmp_path: Path) -> None:
    wall = Clock()
    written = recorder(tmp_path / "r", wall=wall)
    written.on_step(0.0, [], [Note("decision", "more of a")])
    wall.now += 5.0
    for step in range(300):
        written.on_step(step * 1e-6, [], [])
    assert len(lines(tmp_path / "r", "note")) == 1
    assert header(tmp_path / "r")["heartbeat"] == wall.now
    written.close(1.0)


def test_batches_leave_no_line_and_are_not_even_looked_at(tmp_path: Path) -> None:
    written = recorder(tmp_path / "r")
    segment = Segment(1, 8)
    events: list[Event] = [BatchesDone(1, 2, [segment], 0.1), BatchesReturned(1, 3), ItemsArrived(0, [segment])]
    commands: list[Command] = [RunBatches(4, 1, "a", [(segment, 0, 8)], 8, 8, 8), Cancel(3, 1), Pull(0, 8)]
    written.on_step(0.0, events, commands)
    before = len(lines(tmp_path / "r"))
    for _ in range(200):
        written.on_step(0.5, events, commands)
    written.close(0.5)
    kinds = {line["k"] for line in lines(tmp_path / "r")[before:]}
    assert kinds == {"run", "unit", "worker_use"}


def test_a_step_costs_next_to_nothing(tmp_path: Path) -> None:
    """Far above what is measured on a quiet machine (0.3 us), so that only a mistake fails it."""
    written = recorder(tmp_path / "r", about=RunDescription("x", virtual=True), wall=time.time)
    segment = Segment(1, 8)
    events: list[Event] = [BatchesDone(1, 2, [segment], 0.1)]
    commands: list[Command] = [RunBatches(4, 1, "a", [(segment, 0, 8)], 8, 8, 8)]
    best = math.inf
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(20_000):
            written.on_step(0.5, events, commands)
        best = min(best, (time.thread_time() - begin) / 20_000)
    written.close(1.0)
    assert best < 3e-6


def test_a_run_that_failed_or_stopped_has_that_status(tmp_path: Path) -> None:
    failed = recorder(tmp_path / "a", lambda now: view(now, state="failed", error="a: too many errors"))
    failed.close(1.0)
    assert (header(tmp_path / "a")["status"], header(tmp_path / "a")["error"]) == ("failed", "a: too many errors")
    midway = recorder(tmp_path / "b")
    midway.close(1.0)
    assert (header(tmp_path / "b")["status"], header(tmp_path / "b")["error"]) == ("failed", "it ended while running")
    stopped = recorder(tmp_path / "c")
    stopped.abort(1.0, "Ctrl-C twice", "cancelled")
    assert (header(tmp_path / "c")["status"], header(tmp_path / "c")["error"]) == ("cancelled", "Ctrl-C twice")


def test_a_full_disk_drops_the_recorder_with_its_files_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Clock()
    written = recorder(tmp_path / "r", wall=wall)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        written.on_step(0.0, [], [])
    assert written._journal._file.closed
    written.close(110.0)
    assert header(tmp_path / "r")["status"] == "finished"


def test_a_run_whose_controller_failed_is_recorded_as_failed_without_a_view(tmp_path: Path) -> None:
    def broken(now: float) -> Any:
        raise RuntimeError("no view")

    written = recorder(tmp_path / "r", broken)
    with pytest.raises(RuntimeError, match="no view"):
        written.abort(1.0, "the controller broke")
    written.close(2.0)
    unseen = recorder(tmp_path / "s", broken)
    with pytest.raises(RuntimeError, match="no view"):
        unseen.close(1.0)
    assert header(tmp_path / "s")["error"] == "RuntimeError: no view"
    assert (header(tmp_path / "r")["status"], header(tmp_path / "r")["error"]) == ("failed", "the controller broke")


def test_a_run_that_ends_before_its_first_step_took_no_time(tmp_path: Path) -> None:
    written = recorder(tmp_path / "r", lambda now: run_at(now - 5000.5))
    written.abort(5000.5, "it could not start")
    assert RunHistory.load(tmp_path / "r").seconds == 0


def test_lines_count_from_the_beginning_of_the_run_whatever_the_engines_clock_says(tmp_path: Path) -> None:
    written = recorder(tmp_path / "r", lambda now: run_at(now - 5000.5))
    written.on_step(5000.5, [], [Note("decision", "begin")])
    written.on_step(5060.5, [], [Deliver(0, 0, 0, 1, {}, failed_items=[failed_item()])])
    written.close(5110.5)
    assert lines(tmp_path / "r", "note")[0]["t"] == 0.0
    assert lines(tmp_path / "r", "run")[-1]["t"] == 110.0
    assert read_json_lines(tmp_path / "r" / "errors" / "errors.jsonl")[0]["t"] == 60.0
    assert header(tmp_path / "r")["progress"]["seconds"] == 110.0


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "events.jsonl").mkdir()
    with pytest.raises(ConfigError, match="DT303"):
        recorder(tmp_path / "r")


def test_a_resumed_run_continues_its_files_after_a_partial_line(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", until=20)
    with (path / "events.jsonl").open("ab") as file:
        file.write(b'{"v":1,"t":2')
    recorded(path, until=30)
    assert header(path)["resumed"] == [Clock().now]
    assert [line["t"] for line in lines(path, "run")] == sorted(line["t"] for line in lines(path, "run"))
    assert lines(path, "run")[-1]["t"] == header(path)["progress"]["seconds"] == 50.0
    assert b'{"v":1,"t":2\n{"v":1' in (path / "events.jsonl").read_bytes()


# ---- how it stays small


def test_thousands_of_workers_are_counted_and_only_some_have_lines(tmp_path: Path) -> None:
    many = 5000
    written = recorder(tmp_path / "r", workers=lambda: [worker(number) for number in range(many)])
    written.on_step(0.0, [], [start(number) for number in range(many)])
    written.on_step(10.0, [WorkerReady(number) for number in range(many)], [])
    written.on_step(20.0, [], [StopWorker(number) for number in range(many)])
    written.on_step(30.0, [WorkerStopped(number) for number in range(many)], [])
    written.close(40.0)
    own = [line for line in lines(tmp_path / "r", "worker") if line["do"] == "start"]
    counted = sum(line["units"]["a"].get("start", 0) for line in lines(tmp_path / "r", "workers"))
    assert 200 <= len(own) <= 400
    assert len(own) + counted == many
    assert len({line["worker"] for line in lines(tmp_path / "r", "worker_use")}) <= 200
    assert size_of(tmp_path / "r") < 1_000_000


def test_what_happens_too_often_is_counted_instead_of_written(tmp_path: Path) -> None:
    written = recorder(tmp_path / "r")
    for step in range(20_000):
        written.on_step(step / 1000, [], [Note("error", "x" * 200)])
    written.close(20.0)
    written_notes = len(lines(tmp_path / "r", "note"))
    assert written_notes + header(tmp_path / "r")["left_out"]["note"] == 20_000
    assert size_of(tmp_path / "r") < 500_000 + 50_000 * 21


@pytest.mark.parametrize("virtual", [True, False])
def test_a_huge_run_stays_under_the_cap(tmp_path: Path, virtual: bool) -> None:
    seen: dict[str, float] = {"t": 0.0}

    def many_units(now: float) -> Any:
        seen["t"] = now
        return view(now, *(unit(f"stage-{i}", taken_total=int(now), busy_s_total=now / 3) for i in range(20)))

    about = RunDescription("long", virtual=virtual)
    workers = [worker(i) for i in range(300)]
    written = recorder(tmp_path / "r", many_units, lambda: workers, about=about)
    now, step = 0.0, 0
    while now < (2e5 if LONG else 4.5e4):  # past the second rotation, the first that removes lines
        step += 1
        now += 10.0
        lost = WorkerLost(step, LossCause.EXIT, "code 1")
        written.on_step(now, [lost], [start(step), Note("decision", "again " * 20)] if step % 10 else [])
    written.close(now)
    assert size_of(tmp_path / "r") < CAP_BYTES
    assert lines(tmp_path / "r", "run")[-1]["t"] == now - 10.0


def test_a_stage_that_ended_long_ago_is_still_there_after_rotations(tmp_path: Path) -> None:
    written = recorder(tmp_path / "r", lambda now: view(now, unit("done", taken_total=7), unit(taken_total=int(now))))
    written._journal.rotate_bytes = 5000
    for second in range(100):
        written.on_step(float(second), [], [])
    written._close_files()
    assert written._journal.rotations > 3
    assert RunHistory.load(tmp_path / "r").units["done"]["taken_total"] == 7


def test_the_clock_of_a_resumed_run_begins_after_the_last_line_of_the_journal(tmp_path: Path) -> None:
    """The driver was killed after the journal was flushed and before the header was written again."""
    killed = recorder(tmp_path / "r", lambda now: view(now, unit(taken_total=1)))
    killed.on_step(100.0, [], [])
    killed.on_step(150.0, [], [])
    killed._close_files()
    resumed = recorder(tmp_path / "r", lambda now: view(now, unit(taken_total=7)))
    resumed.on_step(7.0, [], [])
    resumed.close(8.0)
    assert RunHistory.load(tmp_path / "r").units["a"]["taken_total"] == 7


def test_the_placement_of_a_live_worker_is_still_there_after_rotations(tmp_path: Path) -> None:
    written = recorder(tmp_path / "r", lambda now: view(now, unit(taken_total=int(now))))
    written._journal.rotate_bytes = 5000
    for number in (1, 2):
        written.on_step(float(number), [], [start(number)])
        written.on_step(number + 0.5, [WorkerReady(number, 0.5)], [])
    before = written.folder
    written._journal.flush()
    first_life = RunHistory.load(before.path).worker_lifetimes[1]
    written.on_step(5.0, [WorkerStopped(2)], [])
    for second in range(6, 100):
        written.on_step(float(second), [], [])
    written._close_files()
    assert written._journal.rotations > 3
    lives = RunHistory.load(tmp_path / "r").worker_lifetimes
    assert lives == {1: first_life}, "workers that ended rotate away"
    assert first_life.gpus
    assert first_life.ready == 0.5


def test_the_interval_doubles_with_what_was_written_and_a_large_view_waits_longer() -> None:
    pace = ViewInterval(level_bytes=1000)
    assert pace.next_due(0.5, 400) == 1.0
    assert pace.next_due(1.0, 700) == 2.0
    assert pace.interval_s == 2.0
    assert pace.next_due(5.0, 400) == 6.0
    assert ViewInterval().next_due(0.0, 250_000) == 10.0
    capped = ViewInterval(most_s=1.0, level_bytes=10)
    assert capped.next_due(0.0, 100) == 1.0


def test_a_full_file_becomes_the_older_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    journal = Journal(folder.events, folder.rotated_events, rotate_bytes=1000)
    for number in range(100):
        journal.write(float(number), "run", {"number": number})
    journal.close()
    numbers = [line["number"] for file in (folder.rotated_events, folder.events) for line in read_json_lines(file)]
    assert numbers == list(range(numbers[0], 100))
    assert len(numbers) > 20
    assert size_of(tmp_path) <= 2000


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"a": math.inf, "b": [math.nan]}, b'{"a":null,"b":[null]}\n'),
        ({"a": {(1, 2): 3}}, b'{"a":{"{}":[[{"()":[1,2]},3]]}}\n'),
        ({"a": Path("/x")}, b'{"a":"/x"}\n'),
        ({"a": "\ud800"}, b'{"a":"\\ud800"}\n'),
    ],
)
def test_whatever_a_note_holds_is_one_line_of_json(data: dict[str, Any], line: bytes) -> None:
    assert json_line(data) == line
