"""How do workers live: set up, overdue, crashing, recycled, drained and taken back?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.control.commands import RunBatches, StartWorker, StopWorker
from dovetail.control.events import LossCause, WorkerLost, WorkerReady, WorkerStopped
from dovetail.control.lifecycle import RunState, WorkerState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, Hangs, Kills, OutOfMemory, Slow
from dovetail.streaming.settings import StreamOptions
from streaming.rigs import Hand, go, numbers, of_kind, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import ItemOutcome, Key
    from dovetail.streaming.controller import StreamController

STEADY = StreamOptions(replan=False, follow_plan=True)


def hangs(key: Key, _attempt: int) -> ItemOutcome:
    return Hangs() if key == (5,) else Gives()


@pytest.mark.parametrize("breadcrumb_share", [1.0, 0.0])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_hung_batch_is_stopped_and_charged(breadcrumb_share: float, slots: int) -> None:
    rig = go(
        [stage("a", timeout="10s", workers=2, slots=slots, batch_size=2, on_error="skip")],
        {"a": Behaviour(0.5, item=hangs)},
        60,
        options=STEADY,
        world={"breadcrumb_share": breadcrumb_share},
        limit_s=500,
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.aside() == Counter([(5,)])
    assert rig.out("a") == numbers(60) - rig.aside()
    assert "timeout of 10 s" in rig.data.aside[0].error
    tries = [message for message in rig.messages("a") if (5,) in part_keys(message.parts)]
    assert len(tries) >= 3


def test_a_batch_that_is_only_slow_is_left_alone() -> None:
    slow = Behaviour(0.5, item=lambda key, _: Slow(15.0) if key == (5,) else Gives())
    rig = go([stage("a", timeout="10s", workers=2)], {"a": slow}, 60, options=STEADY)
    assert rig.out("a") == numbers(60)
    assert len(rig.starts("a")) == 2


def test_short_batches_that_share_a_message_do_not_share_a_timeout() -> None:
    """0.1 s each and a timeout of 0.15 s: twenty of them in a message are not overdue."""
    rig = go(
        [stage("a", timeout="0.15s", workers=1)],
        {"a": Behaviour(0.1)},
        100,
        options=StreamOptions(replan=False, follow_plan=True, target_message_s=2.0),
    )
    assert max(message.items for message in rig.messages("a")) > 5
    assert len(rig.starts("a")) == 1


def test_a_draining_worker_that_hangs_is_not_replaced() -> None:
    hand = Hand.of([stage("a", timeout="10s", workers=2)])
    hand.begin()
    sent = of_kind(hand.items(4), RunBatches)
    worker = hand.stream.state.workers[sent[0].worker]
    hand.stream.fleet.drain(worker, "not needed")
    assert of_kind(hand.step(after=16.0), StopWorker)
    commands = hand.step(WorkerLost(worker.id, LossCause.STOPPED))
    assert worker.id not in {s.worker for s in of_kind(commands, StartWorker)}
    started = [start for start in of_kind(commands, StartWorker) if start.seats == worker.seats]
    assert len(hand.stream.state.workers) - len(started) <= 1
    assert not started


def test_a_setup_past_its_timeout_is_stopped_and_tried_again() -> None:
    hand = Hand.of([stage("a", setup_timeout="30s", workers=1)])
    (start,) = of_kind(hand.step(), StartWorker)
    assert not of_kind(hand.step(after=29.0), StopWorker)
    (stop,) = of_kind(hand.step(after=1.0), StopWorker)
    assert not stop.drain
    assert "setup took longer than its timeout of 30 s" in stop.reason
    hand.step(WorkerLost(start.worker, LossCause.STOPPED))
    assert hand.stream.wake_at() == pytest.approx(30.5)
    assert len(of_kind(hand.step(after=0.5), StartWorker)) == 1


def test_setups_that_never_end_fail_the_run() -> None:
    rig = go([stage("a", setup_timeout="30s", workers=2)], {"a": Behaviour(1, setup_s=100.0)}, 50)
    assert rig.run_state is RunState.FAILED
    assert "failed in setup" in rig.error
    assert "longer than its timeout" in rig.error


def test_setups_that_mostly_fail_fail_the_run_with_the_exception() -> None:
    rig = go(
        [stage("a")],
        {"a": Behaviour(1, setup_failures=1.0, setup_error="ImportError: no module named torch")},
        50,
    )
    assert rig.run_state is RunState.FAILED
    assert rig.error == "a: 3 of 3 workers failed in setup; the last: ImportError: no module named torch"


def test_few_failed_setups_are_tolerated() -> None:
    rig = go([stage("a", recycle=3)], {"a": Behaviour(1, setup_failures=0.1)}, 300, world={"seed": 4})
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.stream.state.units[0].setups_failed >= 3
    assert rig.out("a") == numbers(300)


def test_a_worker_whose_setup_failed_is_replaced_later_and_later() -> None:
    hand = Hand.of([stage("a", workers=1)], options=StreamOptions(replan=False, max_setup_failure_share=1.0))
    (start,) = of_kind(hand.step(), StartWorker)
    waits = []
    for _ in range(9):
        hand.step(WorkerLost(start.worker, LossCause.SETUP_FAILED, "no"), after=1.0)
        wake = hand.stream.wake_at()
        assert wake is not None
        waits.append(wake - hand.now)
        (start,) = of_kind(hand.step(after=waits[-1]), StartWorker)
    assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 64, 128])
    hand.step(WorkerReady(start.worker, 1.0))
    hand.step(WorkerLost(start.worker, LossCause.SIGNAL))
    assert hand.stream.state.units[0].setup_failures_in_a_row == 0


def test_a_late_replacement_does_not_come_beside_the_one_a_replan_started() -> None:
    hand = Hand.of([stage("a", workers=2)], options=StreamOptions(replan_every_s=1.0, max_setup_failure_share=1.0))
    first, second = of_kind(hand.step(), StartWorker)
    hand.step(WorkerReady(first.worker, 1.0))
    for _ in range(4):
        hand.step(WorkerLost(second.worker, LossCause.SETUP_FAILED, "no"), after=0.1)
        second = next((s for _ in range(40) for s in of_kind(hand.step(after=0.25), StartWorker)), second)
    most = 0
    for _ in range(100):
        hand.step(after=0.25)
        most = max(most, len(hand.stream.state.units[0].workers))
    assert most == 2


def test_workers_that_die_at_once_without_having_worked_fail_the_run() -> None:
    hand = Hand.of([stage("a", workers=1)])
    (start,) = of_kind(hand.step(), StartWorker)
    deaths = 0
    while not hand.stream.state.error and deaths < 100:
        hand.step(WorkerReady(start.worker, 1.0), after=0.1)
        deaths += 1
        commands = hand.step(WorkerLost(start.worker, LossCause.SIGNAL, "signal 11"), after=0.1)
        start = next(iter(of_kind(commands, StartWorker)), start)
    assert 10 <= deaths <= 13
    assert "died without having worked: signal 11" in hand.stream.state.error


def test_deaths_with_a_suspect_do_not_count_as_crashes() -> None:
    bad = Behaviour(0.2, item=lambda key, _: Kills() if key[0] < 40 else Gives())
    rig = go([stage("a", workers=1, on_error="skip")], {"a": bad}, 60, options=STEADY)
    assert rig.run_state is RunState.FINISHED, rig.error
    assert len(rig.aside()) == 40


class Counts:
    """The most and the fewest workers after the first were all there."""

    def __init__(self, full: int) -> None:
        self.full, self.most, self.reached = full, 0, False

    def __call__(self, stream: StreamController) -> None:
        count = len(stream.state.units[0].workers)
        self.most = max(self.most, count)
        self.reached = self.reached or count == self.full


@pytest.mark.parametrize("recycle", [5, "20s"])
@pytest.mark.parametrize("every", [0.7, 5.0])
def test_recycling_keeps_the_count_and_loses_nothing(recycle: int | str, every: float) -> None:
    counts = Counts(3)
    rig = go(
        [stage("a", workers=3, recycle=recycle, slots=2)],
        {"a": Behaviour(1.0, setup_s=3.0)},
        300,
        after_step=counts,
        options=StreamOptions(replan_every_s=every),
    )
    assert rig.out("a") == numbers(300)
    assert counts.most == 3
    assert counts.reached
    assert len(rig.starts("a")) > 6
    assert all(stop.drain for _, stop in rig.stops("a"))


def test_a_recycled_worker_is_old_enough_and_not_much_older() -> None:
    rig = go([stage("a", workers=2, recycle=5)], {"a": Behaviour(1.0)}, 100, options=STEADY)
    done = Counter(message.worker for message in rig.messages("a"))
    last = {start.worker for _, start in rig.starts("a")[-2:]}
    counts = {count for worker, count in done.items() if worker not in last}
    assert min(counts) == 5
    assert max(counts) <= 7, "one after the other, and then at once"


def test_short_batches_do_not_let_a_worker_grow_much_older() -> None:
    """They share messages, but not so many that its age means nothing."""
    rig = go([stage("a", workers=1, recycle=5)], {"a": Behaviour(0.00001)}, 500, world={"tracked": False})
    ages: Counter[int] = Counter()
    for message in rig.messages("a"):
        ages[message.worker] += message.items
    assert max(ages.values()) < 2 * 5
    assert rig.data.delivered["a"] == 500


def test_a_recycled_worker_that_is_too_small_by_now_is_not_replaced_by_one_as_small() -> None:
    def too_large(key: Key, attempt: int) -> ItemOutcome:
        return OutOfMemory() if key == (5,) and attempt < 3 else Gives()

    rig = go(
        [stage("a", resources=dt.Resources(cpus=1, memory="1GB"), recycle=3, workers=3)],
        {"a": Behaviour(0.5, peak_bytes=2 << 30, item=too_large)},
        300,
    )
    assert rig.out("a") == numbers(300)
    sizes = [start.seats[0].memory_bytes for _, start in rig.starts("a")]
    grown = sizes.index(max(sizes))
    assert set(sizes[grown:]) == {max(sizes)}


def test_a_worker_that_was_recycled_makes_room_for_its_successor_only() -> None:
    """While it drains, a replan neither counts it as missing nor gives its seat away."""
    hand = Hand.of([stage("a", workers=2, recycle=1), stage("b")], cluster="1x(4cpu, 16GB)", options=StreamOptions())
    hand.begin()
    sent = [m for m in of_kind(hand.items(8), RunBatches) if m.hosted == "a"]
    worker = hand.stream.state.workers[sent[0].worker]
    hand.stream.fleet.recycle(worker)
    assert worker.state is WorkerState.DRAINING
    for _ in range(4):
        hand.step(after=5.0)
        assert len(hand.stream.state.units_by_name["a"].workers) == 2
    stop = of_kind(hand.done(sent[0]), StopWorker)
    assert [s.worker for s in stop if s.worker == worker.id] == [worker.id]
    started = of_kind(hand.step(WorkerStopped(worker.id)), StartWorker)
    assert [start.hosted[0].name for start in started if start.seats == worker.seats][:1] == ["a"]


def test_a_worker_that_was_told_to_stop_while_it_starts_stops() -> None:
    hand = Hand.of([stage("a", workers=1)])
    (start,) = of_kind(hand.step(), StartWorker)
    hand.stream.fleet.drain(hand.stream.state.workers[start.worker], "no")
    assert of_kind(hand.step(), StopWorker)
    assert not of_kind(hand.step(WorkerReady(start.worker, 1.0)), RunBatches)
    assert start.worker in hand.stream.state.workers
    hand.step(WorkerStopped(start.worker))
    assert start.worker not in hand.stream.state.workers


def test_a_drain_can_be_taken_back_and_the_worker_works_again() -> None:
    hand = Hand.of([stage("a", workers=1)])
    hand.begin()
    (sent,) = of_kind(hand.items(4), RunBatches)
    worker = hand.stream.state.workers[sent.worker]
    hand.stream.fleet.drain(worker, "not needed")
    hand.stream.fleet.cancel_drain(worker)
    again = of_kind(hand.done(sent), RunBatches)
    assert [message.worker for message in again] == [worker.id]
    assert not of_kind(hand.said, StopWorker)


def test_finished_stages_give_everything_back_before_the_end() -> None:
    rig = go([stage("a"), stage("b")], {"a": Behaviour(0.1), "b": Behaviour(2.0)}, 100)
    assert max(now for now, _ in rig.stops("a")) < rig.seconds - 3
    assert all(stop.reason == "finished" for _, stop in rig.stops("a")[-1:])
