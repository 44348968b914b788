"""The control loop: routing of commands, waiting, and observers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dovetail.control.commands import Command, Deliver, Note, Pull, StopWorker
from dovetail.control.events import Drain, InputEnded
from dovetail.control.loop import run_loop

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from dovetail.control.commands import DataCommand, EngineCommand
    from dovetail.control.events import Event


class Scripted:
    """A controller with a scripted answer to each step."""

    def __init__(self, *steps: list[Command], wake: float | None = None) -> None:
        self.steps = list(steps)
        self.received: list[tuple[float, list[Event]]] = []
        self.wake = wake

    @property
    def done(self) -> bool:
        return not self.steps

    def step(self, now: float, events: Sequence[Event]) -> list[Command]:
        self.received.append((now, list(events)))
        return self.steps.pop(0)

    def wake_at(self) -> float | None:
        return self.wake


class Clockwork:
    """An engine whose time moves when it is polled."""

    def __init__(self, *events: list[Event]) -> None:
        self.time = 10.0
        self.events = list(events)
        self.asked: list[EngineCommand] = []
        self.waited: list[float | None] = []

    def submit(self, commands: Sequence[EngineCommand]) -> None:
        self.asked += commands

    def poll(self, timeout_s: float | None) -> list[Event]:
        self.waited.append(timeout_s)
        self.time += 1.0
        return self.events.pop(0) if self.events else []

    def post(self, event: Event) -> None:
        self.events.append([event])

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        raise NotImplementedError

    def call_with(self, *args: Any, **named: Any) -> Future[Any]:
        raise NotImplementedError

    def now(self) -> float:
        return self.time

    def close(self) -> None:
        pass


class Sink:
    def __init__(self) -> None:
        self.asked: list[DataCommand] = []

    def submit(self, commands: Sequence[DataCommand]) -> None:
        self.asked += commands


class Watching:
    def __init__(self, fails_at: int | None = None, fails_to_close: bool = False) -> None:
        self.saws: list[tuple[float, list[Event], list[Command]]] = []
        self.closed: list[float] = []
        self.fails_at, self.fails_to_close = fails_at, fails_to_close

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        if len(self.saws) == self.fails_at:
            raise OSError("disk full")
        self.saws.append((now, list(events), list(commands)))

    def close(self, now: float) -> None:
        self.closed.append(now)
        if self.fails_to_close:
            raise OSError("disk full")


def test_commands_go_to_the_engine_or_the_data_and_notes_to_neither() -> None:
    stop, pull, deliver = StopWorker(1), Pull(0, 5), Deliver(0, 1, 0, 5, {})
    engine, data = Clockwork(), Sink()
    assert run_loop(Scripted([Note("run", "hello"), stop, pull], [deliver]), engine, data) == []
    assert engine.asked == [stop]
    assert data.asked == [pull, deliver]


def test_events_of_the_engine_are_the_input_of_the_next_step() -> None:
    controller = Scripted([], [], [])
    run_loop(controller, Clockwork([InputEnded(3)], [Drain()]))
    assert controller.received == [(10.0, []), (11.0, [InputEnded(3)]), (12.0, [Drain()])]


def test_the_loop_waits_until_the_controller_asks_to_be_woken() -> None:
    engine = Clockwork()
    run_loop(Scripted([], [], wake=13.5), engine)
    assert engine.waited == [3.5]
    engine = Clockwork()
    run_loop(Scripted([], []), engine)
    assert engine.waited == [None]


def test_a_wake_time_in_the_past_does_not_wait() -> None:
    engine = Clockwork()
    run_loop(Scripted([], [], wake=2.0), engine)
    assert engine.waited == [0.0]


@pytest.mark.parametrize(("wake", "waited"), [(None, 2.0), (10.5, 0.5), (100.0, 2.0)])
def test_the_heartbeat_limits_every_wait(wake: float | None, waited: float) -> None:
    engine = Clockwork()
    run_loop(Scripted([], [], wake=wake), engine, beat_s=2.0)
    assert engine.waited == [waited]


def test_an_observer_that_fails_is_dropped_and_the_run_continues() -> None:
    bad, good = Watching(fails_at=1), Watching()
    controller = Scripted([], [], [])
    dropped = run_loop(controller, Clockwork(), observers=[bad, good])
    assert [observer for observer, _ in dropped] == [bad]
    assert isinstance(dropped[0][1], OSError)
    assert (len(bad.saws), bad.closed) == (1, [])
    assert (len(good.saws), len(good.closed)) == (3, 1)


def test_an_observer_that_fails_to_close_is_reported() -> None:
    bad, good = Watching(fails_to_close=True), Watching()
    dropped = run_loop(Scripted([]), Clockwork(), observers=[bad, good])
    assert [observer for observer, _ in dropped] == [bad]
    assert good.closed == [10.0]


def test_observers_see_the_last_step() -> None:
    watching = Watching()
    last = Note("run", "finished")
    run_loop(Scripted([], [last]), Clockwork([Drain()]), observers=[watching])
    assert watching.saws[-1] == (11.0, [Drain()], [last])


def test_a_command_for_missing_data_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="the run has no data port"):
        run_loop(Scripted([Pull(0, 1)], []), Clockwork())
