"""History of a run, read from its folder, also from damaged files."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dovetail as dt
from dovetail.errors import ConfigError
from dovetail.machine.processes import process_start_time
from dovetail.observe import history as history_module
from dovetail.observe.history import HistoryReader, RunHistory
from dovetail.observe.journal import read_lines_from
from dovetail.observe.run_status import run_status
from dovetail.observe.summary import steady_rate, summarize_run
from dovetail.observe.summary_text import summary_lines
from observe.made import Clock, recorded, recorder, run_at, unit, view

WALL = Clock().now


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("runs") / "20260101-000000-aaaa-video")


@pytest.fixture
def history(folder: Path) -> RunHistory:
    return RunHistory.load(folder)


def test_the_last_totals_are_those_of_the_last_view(history: RunHistory) -> None:
    last = run_at(110.0)
    for name in ("read", "total", "finished", "delivered", "failed", "bottleneck", "predicted", "replans", "state"):
        assert history.run[name] == getattr(last, name)
    for seen in last.units:
        assert history.units[seen.name]["taken_total"] == seen.taken_total
        assert history.units[seen.name]["busy_s_total"] == seen.busy_s_total
    assert history.seconds == 110.0


@given(st.lists(st.tuples(st.floats(0.01, 30), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30))
@settings(max_examples=30)
def test_whatever_was_seen_the_totals_read_back_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "r"
    totals = {"a": 0, "b": 0}
    written = recorder(path, lambda now: view(now, *(unit(name, taken_total=n) for name, n in totals.items())))
    now = 0.0
    for seconds, of_a, of_b in steps:
        now += seconds
        totals["a"] += of_a
        totals["b"] += of_b
        written.on_step(now, [], [])
    written.close(now)
    found = RunHistory.load(path)
    assert {name: seen["taken_total"] for name, seen in found.units.items()} == totals
    assert [point.t for point in found.series("a")] == sorted({tick.t for tick in found.ticks})[1:]
    for name, total in totals.items():
        times = [tick.t for tick in found.ticks]
        counted = sum(point.rate * (point.t - max(t for t in times if t < point.t)) for point in found.series(name))
        assert counted == pytest.approx(total - found.ticks[0].units[name]["taken_total"], abs=1e-3)


def test_series_are_differences_of_totals(history: RunHistory) -> None:
    points = history.series("a")
    assert [point.rate for point in points[:9]] == [0.0] * 9
    assert points[50].rate == pytest.approx(10.0)
    assert points[50].busy == pytest.approx(0.5)
    assert (points[50].ready, points[50].queued) == (2, 5)
    assert points[0].busy is None
    assert history.series("no such unit") == []


def test_the_bottleneck_over_time_is_in_shares_of_the_time(history: RunHistory) -> None:
    assert history.bottlenecks() == {"a": pytest.approx(101 / 110), "b": pytest.approx(9 / 110)}


def test_workers_have_their_beginning_and_their_end(history: RunHistory) -> None:
    first, lost, kept = (history.worker_lifetimes[number] for number in (1, 2, 3))
    assert (first.started, first.ready, first.ended, first.end, first.why) == (0, 10, 70, "stopped", "the end")
    assert (lost.node, lost.gpus, lost.ended, lost.end, lost.why) == ("node-1", (1,), 50, "lost", "node lost: power")
    assert (kept.unit, kept.ended, kept.end) == ("b", None, "")


def test_events_are_listed_in_order(history: RunHistory) -> None:
    assert [(it.t, it.text) for it in history.timeline] == [
        (0.0, "2 workers of a"),
        (50.0, "worker 2 of a on node-1 was lost: node lost: power"),
        (50.0, "node node-1 left: power"),
        (50.0, "node-1 is gone"),
    ]
    assert [it.text for it in history.notes("decision")] == ["2 workers of a"]
    assert len(history.failures()) == 1


def test_the_plan_is_read_when_it_is_asked_for(tmp_path: Path, history: RunHistory) -> None:
    assert history.plan() is None
    made = dt.plan(dt.Pipeline([dt.Stage("a", "m:f")]), "1x(4cpu, 8GB)")
    assert RunHistory.load(recorded(tmp_path / "r", plan=made.to_json())).plan() == made
    assert RunHistory.load(recorded(tmp_path / "s", plan="{torn")).plan() is None


# ---- what becomes of files


@given(share=st.floats(0, 1))
def test_a_log_cut_at_any_byte_keeps_everything_before(folder: Path, share: float) -> None:
    whole = (folder / "events.jsonl").read_bytes()
    cut = whole[: int(len(whole) * share)]
    path = folder.parent / "torn"
    path.mkdir(exist_ok=True)
    (path / "run.json").write_bytes((folder / "run.json").read_bytes())
    (path / "events.jsonl").write_bytes(cut)
    found = RunHistory.load(path)
    complete = [json.loads(line) for line in cut.split(b"\n")[:-1]]
    times = [line["t"] for line in complete if line["k"] == "run"]
    # a last line may be whole although its end of line is missing
    assert [tick.t for tick in found.ticks][: len(times)] == times
    assert len(found.ticks) <= len(times) + 1
    assert summary_lines(summarize_run(found, WALL))


def test_a_log_torn_in_its_last_lines_is_read_at_every_single_byte(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", until=12)
    whole = (path / "events.jsonl").read_bytes()
    for cut in range(len(whole) - 1500, len(whole) + 1):
        (path / "events.jsonl").write_bytes(whole[:cut])
        assert 11 <= len(RunHistory.load(path).ticks) <= 14


def test_garbage_unknown_kinds_and_missing_files_are_passed_over(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.mkdir()
    (path / "run.json").write_text('{"status": "finished", "progress": "none", "name": 7}')
    assert RunHistory.load(path).ticks == []
    assert summary_lines(summarize_run(RunHistory.load(path), WALL))
    strange = [
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"{}",
        b'{"t":"x","k":"run"}',
        b'{"t":1,"k":"from the future","x":[1]}',
        b'{"t":1,"k":"unit"}',
        b'{"t":1,"k":"unit","name":"a","taken_total":"many"}',
        b'{"t":1,"k":"worker","w":"one"}',
        b'{"t":1,"k":"worker","w":1}',
        b'{"t":1,"k":"workers","units":{"a":3,"b":{"start":"x","stop":2}}}',
        b'{"t":1,"k":"node"}',
        b'{"t":1,"k":"note"}',
        b'{"t":1,"k":"asked"}',
        b'{"t":1,"k":"run","use":{"CPUs":[1],"GPUs":["a","b"]},"total":"x"}',
        b'{"t":0.5,"k":"run"}',
    ]
    (path / "events.jsonl").write_bytes(b"\n".join(strange) + b"\n" + (folder / "events.jsonl").read_bytes())
    found = RunHistory.load(path)
    assert found.run["finished"] == 1000
    assert found.counts[("b", "stop")] == 2
    assert summary_lines(summarize_run(found, WALL))


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_no_bytes_at_all_make_a_reader_fail(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, events: bytes
) -> None:
    path = tmp_path_factory.mktemp("garbage")
    (path / "run.json").write_bytes(header)
    (path / "events.jsonl").write_bytes(events)
    with pytest.raises(ConfigError, match="DT302"):
        RunHistory.load(path)
    (path / "run.json").write_text('{"status": 1}')
    assert summarize_run(RunHistory.load(path)).status == "lost"


def test_the_older_file_is_read_before_the_younger(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "r"
    path.mkdir()
    (path / "run.json").write_bytes((folder / "run.json").read_bytes())
    (path / "events.1.jsonl").write_bytes(b"".join(lines[:200]))
    (path / "events.jsonl").write_bytes(b"".join(lines[200:]))
    assert len(RunHistory.load(path).ticks) == len(RunHistory.load(folder).ticks)


# ---- running, or lost


def beating(**changes: Any) -> dict[str, Any]:
    mine = {"pid": os.getpid(), "pid_started": process_start_time(os.getpid()), "host": socket.gethostname()}
    return {"status": "running", "heartbeat": 1000.0, **mine, **changes}


@pytest.mark.parametrize(
    ("changes", "wall", "status"),
    [
        ({}, 1009.0, "running"),
        ({}, 5000.0, "running"),
        ({"host": "elsewhere"}, 1009.0, "running"),
        ({"host": "elsewhere"}, 1011.0, "lost"),
        ({"pid": (1 << 31) - 1}, 1011.0, "lost"),
        ({"pid": -5}, 1011.0, "lost"),
        ({"pid": os.getppid(), "pid_started": 5.0}, 1011.0, "lost"),
        ({"pid": None}, 1011.0, "lost"),
        ({"heartbeat": None, "host": "elsewhere"}, 1000.0, "lost"),
        ({"status": "finished"}, 5000.0, "finished"),
        ({"status": "cancelled", "host": "elsewhere"}, 5000.0, "cancelled"),
        ({"status": "exploded"}, 1000.0, "lost"),
    ],
)
def test_a_run_without_heartbeat_is_lost_unless_its_process_is_alive(
    changes: dict[str, Any], wall: float, status: str
) -> None:
    assert run_status(beating(**changes), wall) == status


def test_the_parent_of_this_process_is_recognised_by_its_number_and_its_beginning() -> None:
    header = beating(pid=os.getppid(), pid_started=process_start_time(os.getppid()))
    assert run_status(header, 5000.0) == "running"


# ---- the summary


def test_the_summary_adds_up(history: RunHistory) -> None:
    summary = summarize_run(history, WALL)
    assert (summary.status, summary.finished, summary.delivered, summary.failed, summary.total) == (
        "finished",
        1000,
        999,
        1,
        1000,
    )
    assert summary.seconds == 110
    assert summary.mean_rate == pytest.approx(1000 / 110)
    assert summary.steady_rate == pytest.approx(10.0)
    assert (summary.predicted, summary.replans) == (12.5, 1)
    assert summary.setup_s == 20.0
    assert summary.worker_seconds == pytest.approx(3 * 110)
    assert summary.setup_share == pytest.approx(20 / 330)
    assert summary.use["CPUs"].peak == 3000
    assert summary.use["CPUs"].mean == pytest.approx(3000 * 100 / 110)
    a, b = summary.units
    assert (a.name, a.taken, a.started, a.most_workers) == ("a", 1000, 2, 2)
    assert a.rate == pytest.approx(10.0)
    assert a.busy == pytest.approx(100 / 201)
    assert b.busy == pytest.approx(50 / 110)
    assert json.loads(json.dumps(summary.to_dict()))["steady_rate"] == pytest.approx(10.0)


def test_all_figures_fit_one_screen(history: RunHistory) -> None:
    text = "\n".join(summary_lines(summarize_run(history, WALL)))
    for words in (
        "video: finished after 1 min 50 s\n",
        "1000 of 1000 items in, 999 out, 1 failed",
        "mean 9.09/s, steady 10/s",
        "bottleneck  a 92 % of the time, b 8 % of the time",
        "CPUs        2.73 (68 %) on average, 3 (75 %) at most, of 4",
        "memory      1GB (25 %) on average",
        "setup       20 s of worker time (6 %)",
        "errors/errors.jsonl",
        "dovetail status /",
    ):
        assert words in text
    assert all(len(line) <= 80 for line in text.split("folder  ")[0].splitlines())


def test_a_run_in_the_home_is_named_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))
    path = recorded(tmp_path / "runs" / "20260101-000000-aaaa-video")
    lines = summary_lines(summarize_run(RunHistory.load(path), WALL))
    assert "next        dovetail status 20260101-000000-aaaa-video | " in lines[-1]


def made_history(counts: list[float], taken: list[float] | None = None, **run: Any) -> RunHistory:
    from dovetail.observe.history import ViewRecord
    from dovetail.observe.run_folder import RunFolder

    ticks = [
        ViewRecord(float(t), {"finished": n, **run}, {"a": {"taken_total": (taken or counts)[t]}})
        for t, n in enumerate(counts)
    ]
    return RunHistory(RunFolder(Path("r")), {}, ticks)


def test_ramp_up_and_tail_are_no_part_of_the_steady_rate() -> None:
    counts = [*([0.0] * 50), *(10.0 * t for t in range(101)), *([1000.0] * 30)]
    assert steady_rate(made_history(counts)) == pytest.approx(10.0)


def test_with_few_epochs_the_steady_rate_is_that_of_the_units() -> None:
    taken = [0.0] * 20 + [5.0 * t for t in range(101)]
    assert steady_rate(made_history([0.0] * 120 + [500.0], taken)) == pytest.approx(5.0)


def test_a_run_in_waves_has_only_its_mean_rate() -> None:
    assert steady_rate(made_history([10.0 * t for t in range(101)], waves=2)) == pytest.approx(10.0)


def test_too_few_views_give_no_steady_rate() -> None:
    assert steady_rate(made_history([0.0, 1000.0])) is None
    assert steady_rate(made_history([])) is None
    assert steady_rate(made_history([0.0] * 10)) is None


def test_a_reader_parses_only_what_was_written_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds across rotations: it finds what a new reader finds, unless a file has rotated away."""
    parsed: list[int] = []
    real = read_lines_from

    def counted(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
        found = real(path, offset)
        parsed.append(len(found[0]))
        return found

    monkeypatch.setattr(history_module, "read_lines_from", counted)
    written = recorder(tmp_path / "r", lambda now: view(now, unit(taken_total=int(now))))
    written._journal.rotate_bytes = 20_000
    reader = HistoryReader(tmp_path / "r")
    found = reader.read()
    for second in range(100):
        written.on_step(float(second), [], [])
        written._journal.flush()
        assert reader.read() is found
        if written._journal.rotations < 2:
            again = RunHistory.load(tmp_path / "r")
            assert (found.ticks, found.units) == (again.ticks, again.units)
    assert written._journal.rotations >= 2
    assert [tick.t for tick in found.ticks] == [float(second) for second in range(100)]
    written._close_files()
    before = sum(parsed)
    reader.read()
    assert sum(parsed) == before
