"""Does the streaming controller drive real processes as it drives simulated ones?"""

from __future__ import annotations

import ctypes
import faulthandler
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dovetail as dt
from dovetail.control.commands import Hosted
from dovetail.control.events import Drain
from dovetail.control.lifecycle import RunState
from dovetail.control.loop import drive
from dovetail.observe.replay import ReplayRecorder, replay
from dovetail.streaming.controller import Stream
from dovetail.streaming.remake import header_of, stream_of
from dovetail.streaming.work import works_of
from engines.subprocess_engine import ListData, SubprocessEngine
from engines.test_subprocess import DiesOnceAt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.streaming.options import Options
    from dovetail.streaming.work import Work

Functions = dict[str, Any]
CLUSTER = "2x(2cpu, 8GB)"


class Run:
    """A pipeline whose stages are real functions in real processes."""

    def __init__(self, stages: list[dt.Stage], items: Sequence[Any], options: Options | None = None) -> None:
        pipeline = dt.Pipeline(stages)
        self.plan = dt.plan(pipeline, CLUSTER)
        self.works: list[Work] = []
        for work in works_of(pipeline, self.plan):
            (name,) = (stage.name for stage in stages if stage.name == work.name)
            function = pipeline.stage(name).run
            self.works.append(replace(work, hosted=Hosted(name, function, work.slots)))
        self.engine = SubprocessEngine()
        self.data = ListData(self.engine, items, segment_items=16)
        self.stream = Stream(self.works, self.plan, options)

    def finish(self, *observers: Any) -> Run:
        try:
            assert drive(self.stream, self.engine, self.data, observers) == []
        finally:
            self.engine.close()
        return self

    @property
    def state(self) -> RunState:
        return self.stream.board.state


def stage(name: str, function: Callable[..., Any], **settings: Any) -> dt.Stage:
    return dt.Stage(name, function, fuse=False, **settings)


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def twice(items: list[int]) -> list[int]:
    return [item for item in items for _ in range(2)]


def test_items_go_through_two_stages_of_real_processes() -> None:
    run = Run([stage("double", double, batch_size=4), stage("twice", twice, batch_size=3)], range(500)).finish()
    assert run.state is RunState.FINISHED
    assert sorted(run.data.outputs["twice"]) == sorted(2 * number for number in range(500) for _ in range(2))


def test_kill_9_in_the_middle_of_batches_loses_and_doubles_nothing(tmp_path: Path) -> None:
    deadly = DiesOnceAt({0, 33, 150, 299}, tmp_path)
    run = Run([stage("double", double), stage("deadly", deadly, batch_size=8)], range(300)).finish()
    assert run.state is RunState.FINISHED
    assert sorted(run.data.outputs["deadly"]) == [4 * number for number in range(300)]
    assert run.stream.board.lane_of["deadly"].lost == 4 - len([n for n in (33, 299) if n % 2])


class SegfaultsOn:
    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, items: list[int]) -> list[int]:
        if self._number in items:
            faulthandler.disable()  # pytest's, which tells of every crash
            ctypes.string_at(0)
        return items


def test_an_item_that_always_kills_its_worker_is_set_aside_after_three_deaths() -> None:
    run = Run([stage("bad", SegfaultsOn(57), batch_size=16, on_error="skip")], range(100)).finish()
    assert run.state is RunState.FINISHED
    assert sorted(run.data.outputs["bad"]) == [number for number in range(100) if number != 57]
    assert [record.attempts for record in run.data.aside] == [3]
    assert "signal" in run.data.aside[0].error + run.data.aside[0].detail
    assert run.stream.board.lane_of["bad"].lost == 3


def fails_on_seven(items: list[int]) -> list[int]:
    if 7 in items:
        raise ValueError("seven")
    return items


def test_an_exception_fails_the_run_with_the_stage_and_the_error_and_leaves_no_process() -> None:
    run = Run([stage("picky", fails_on_seven, batch_size=5)], range(40)).finish()
    assert run.state is RunState.FAILED
    assert "picky" in run.stream.board.error
    assert "ValueError: seven" in run.stream.board.error
    for pid in run.engine.pids:
        assert not _alive(pid)


def test_a_drain_that_is_posted_finishes_what_is_in_hand() -> None:
    run = Run([stage("double", double)], range(10**6))

    class Drains:
        sent = False

        def saw(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
            if run.stream.board.delivered > 100 and not self.sent:
                self.sent = True
                run.engine.post(Drain())

        def close(self, now: float) -> None:
            pass

    run.finish(Drains())
    assert run.state is RunState.DRAINED
    count = len(run.data.outputs["double"])
    assert 100 < count < 10**6
    covered = sorted((deliver.first, deliver.last) for deliver in run.data.log)
    numbers = [number for first, last in covered for number in range(first, last)]
    assert sorted(run.data.outputs["double"]) == [2 * number for number in numbers]


def test_what_real_processes_did_is_decided_the_same_when_it_is_replayed(tmp_path: Path) -> None:
    deadly = DiesOnceAt({3, 50}, tmp_path)
    run = Run([stage("deadly", deadly, batch_size=4), stage("twice", twice)], range(200))
    log = tmp_path / "replay.log"
    run.finish(ReplayRecorder(log, header_of(run.works, run.plan, run.stream.board.options)))
    compared = replay(log, stream_of)
    assert compared.same, compared.difference
    assert compared.commands > 20


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
