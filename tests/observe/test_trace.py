"""Trace in the format of Perfetto."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import RunFolder
from dovetail.observe.trace import make_trace, trace_json
from observe.made import recorded

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    history = RunHistory.load(recorded(tmp_path_factory.mktemp("runs") / "r"))
    events = json.loads(trace_json(history))["traceEvents"]
    assert isinstance(events, list)
    return events


def test_every_event_has_the_fields_of_its_phase(made: list[dict[str, Any]]) -> None:
    needed = {"M": {"args"}, "C": {"args"}, "X": {"dur", "args"}, "i": {"s"}}
    for event in made:
        assert {"ph", "name", "pid", "tid", "ts"} | needed[event["ph"]] <= event.keys()
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert isinstance(event.get("dur", 0), int)
        assert event.get("dur", 0) >= 0
    assert Counter(event["ph"] for event in made).keys() == needed.keys()


def test_times_only_grow(made: list[dict[str, Any]]) -> None:
    times = [event["ts"] for event in made]
    assert times == sorted(times)
    assert times[-1] == 110_000_000


def test_counters_hold_numbers_per_stage(made: list[dict[str, Any]]) -> None:
    names = {event["name"] for event in made if event["ph"] == "C"}
    assert names == {"items/s", *(f"{name} {what}" for name in "ab" for what in ("queue", "items/s", "workers"))}
    for event in made:
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())


def test_workers_are_slices_on_their_node(made: list[dict[str, Any]]) -> None:
    nodes = {event["pid"]: event["args"]["name"] for event in made if event["name"] == "process_name"}
    slices = {
        (nodes[event["pid"]], event["args"]["worker"], event["name"]): (event["ts"], event["dur"])
        for event in made
        if event["ph"] == "X"
    }
    assert slices == {
        ("node node-0", 1, "setup"): (0, 10_000_000),
        ("node node-0", 1, "a"): (10_000_000, 60_000_000),
        ("node node-1", 2, "setup"): (0, 10_000_000),
        ("node node-1", 2, "a"): (10_000_000, 40_000_000),
        ("node node-0", 3, "setup"): (0, 10_000_000),
        ("node node-0", 3, "b"): (10_000_000, 100_000_000),
    }


def test_decisions_losses_and_errors_are_marks(made: list[dict[str, Any]]) -> None:
    marks = [(event["cat"], event["ts"]) for event in made if event["ph"] == "i"]
    late = 50_000_000
    assert marks == [("decision", 0), ("lost", late), ("node", late), ("error", late)]


def test_an_empty_run_is_a_valid_trace(tmp_path: Path) -> None:
    events = make_trace(RunHistory(RunFolder(tmp_path), {}))["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}
