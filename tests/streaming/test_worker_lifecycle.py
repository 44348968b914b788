"""Lifecycle of workers: setup, timeouts, crashes, recycling, drain and teardown."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.control.commands import Note, RunBatches, StartWorker, StopWorker
from dovetail.control.events import CancelRun, InputEnded, LossCause, WorkerLost, WorkerReady, WorkerStopped
from dovetail.control.lifecycle import RunState, WorkerState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, Hangs, Kills, OutOfMemory, Slow
from dovetail.streaming.settings import StreamOptions
from streaming.harness import UNTRACKED, ManualStream, numbers, of_kind, simulate_stages, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import ItemOutcome, Key
    from dovetail.streaming.controller import StreamController

STEADY = StreamOptions(replan=False, follow_plan=True)


def hangs(key: Key, _attempt: int) -> ItemOutcome:
    return Hangs() if key == (5,) else Gives()


@pytest.mark.parametrize("breadcrumb_share", [1.0, 0.0])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_hanging_batch_is_stopped_and_counts_as_an_attempt(breadcrumb_share: float, slots: int) -> None:
    rig = simulate_stages(
        [stage("a", timeout="10s", workers=2, slots=slots, batch_size=2, on_error="skip")],
        {"a": Behaviour(0.5, item=hangs)},
        60,
        options=STEADY,
        world={"breadcrumb_share": breadcrumb_share},
        limit_s=500,
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.failed() == Counter([(5,)])
    assert rig.out("a") == numbers(60) - rig.failed()
    assert "timeout of 10 s" in rig.data.failed_items[0].error
    tries = [message for message in rig.messages("a") if (5,) in part_keys(message.parts)]
    assert len(tries) >= 3


def test_a_slow_batch_within_its_timeout_is_not_stopped() -> None:
    slow = Behaviour(0.5, item=lambda key, _: Slow(15.0) if key == (5,) else Gives())
    rig = simulate_stages([stage("a", timeout="10s", workers=2)], {"a": slow}, 60, options=STEADY)
    assert rig.out("a") == numbers(60)
    assert len(rig.starts("a")) == 2


def test_short_batches_that_share_a_message_do_not_share_a_timeout() -> None:
    """Batches of 0.1 s with a timeout of 0.15 s: twenty of them in a message do not time out."""
    rig = simulate_stages(
        [stage("a", timeout="0.15s", workers=1)],
        {"a": Behaviour(0.1)},
        100,
        options=StreamOptions(replan=False, follow_plan=True, target_message_s=2.0),
    )
    assert max(message.items for message in rig.messages("a")) > 5
    assert len(rig.starts("a")) == 1


def test_a_draining_worker_that_hangs_is_not_replaced() -> None:
    manual = ManualStream.of([stage("a", timeout="10s", workers=2)])
    manual.begin()
    sent = of_kind(manual.items(4), RunBatches)
    worker = manual.stream.state.workers[sent[0].worker]
    manual.stream.fleet.drain(worker, "not needed")
    assert of_kind(manual.step(after=16.0), StopWorker)
    commands = manual.step(WorkerLost(worker.id, LossCause.STOPPED))
    assert worker.id not in {s.worker for s in of_kind(commands, StartWorker)}
    started = [start for start in of_kind(commands, StartWorker) if start.seats == worker.seats]
    assert len(manual.stream.state.workers) - len(started) <= 1
    assert not started


def test_a_setup_past_its_timeout_is_stopped_and_retried() -> None:
    manual = ManualStream.of([stage("a", setup_timeout="30s", workers=1)])
    (start,) = of_kind(manual.step(), StartWorker)
    assert not of_kind(manual.step(after=29.0), StopWorker)
    (stop,) = of_kind(manual.step(after=1.0), StopWorker)
    assert not stop.drain
    assert "setup took longer than its timeout of 30 s" in stop.reason
    manual.step(WorkerLost(start.worker, LossCause.STOPPED))
    assert manual.stream.wake_at() == pytest.approx(30.5)
    assert len(of_kind(manual.step(after=0.5), StartWorker)) == 1


def test_setups_that_never_end_fail_the_run() -> None:
    rig = simulate_stages([stage("a", setup_timeout="30s", workers=2)], {"a": Behaviour(1, setup_s=100.0)}, 50)
    assert rig.run_state is RunState.FAILED
    assert "failed in setup" in rig.error
    assert "longer than its timeout" in rig.error


def test_too_many_failed_setups_fail_the_run_with_the_exception() -> None:
    rig = simulate_stages(
        [stage("a")],
        {"a": Behaviour(1, setup_failures=1.0, setup_error="ImportError: no module named torch")},
        50,
    )
    assert rig.run_state is RunState.FAILED
    assert rig.error == "a: 3 of 3 workers failed in setup; the last: ImportError: no module named torch"


def test_a_few_failed_setups_are_tolerated() -> None:
    rig = simulate_stages([stage("a", recycle=3)], {"a": Behaviour(1, setup_failures=0.1)}, 300, world={"seed": 4})
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.stream.state.units[0].setups_failed >= 3
    assert rig.out("a") == numbers(300)


def test_replacements_after_failed_setups_back_off() -> None:
    manual = ManualStream.of([stage("a", workers=1)], options=StreamOptions(replan=False, max_setup_failure_share=1.0))
    (start,) = of_kind(manual.step(), StartWorker)
    waits = []
    for _ in range(9):
        manual.step(WorkerLost(start.worker, LossCause.SETUP_FAILED, "no"), after=1.0)
        wake = manual.stream.wake_at()
        assert wake is not None
        waits.append(wake - manual.now)
        (start,) = of_kind(manual.step(after=waits[-1]), StartWorker)
    assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 64, 128])
    manual.step(WorkerReady(start.worker, 1.0))
    manual.step(WorkerLost(start.worker, LossCause.SIGNAL))
    assert manual.stream.state.units[0].setup_failures_in_a_row == 0


def test_a_delayed_replacement_is_dropped_if_a_replan_started_one() -> None:
    manual = ManualStream.of(
        [stage("a", workers=2)], options=StreamOptions(replan_every_s=1.0, max_setup_failure_share=1.0)
    )
    first, second = of_kind(manual.step(), StartWorker)
    manual.step(WorkerReady(first.worker, 1.0))
    for _ in range(4):
        manual.step(WorkerLost(second.worker, LossCause.SETUP_FAILED, "no"), after=0.1)
        second = next((s for _ in range(40) for s in of_kind(manual.step(after=0.25), StartWorker)), second)
    most = 0
    for _ in range(100):
        manual.step(after=0.25)
        most = max(most, len(manual.stream.state.units[0].workers))
    assert most == 2


def test_workers_that_die_repeatedly_without_work_fail_the_run() -> None:
    manual = ManualStream.of([stage("a", workers=1)])
    (start,) = of_kind(manual.step(), StartWorker)
    deaths = 0
    while not manual.stream.state.error and deaths < 100:
        manual.step(WorkerReady(start.worker, 1.0), after=0.1)
        deaths += 1
        commands = manual.step(WorkerLost(start.worker, LossCause.SIGNAL, "signal 11"), after=0.1)
        start = next(iter(of_kind(commands, StartWorker)), start)
    assert 10 <= deaths <= 13
    assert "died before they did any work: signal 11" in manual.stream.state.error


def test_deaths_with_a_suspect_do_not_count_as_idle_deaths() -> None:
    bad = Behaviour(0.2, item=lambda key, _: Kills() if key[0] < 40 else Gives())
    rig = simulate_stages([stage("a", workers=1, on_error="skip")], {"a": bad}, 60, options=STEADY)
    assert rig.run_state is RunState.FINISHED, rig.error
    assert len(rig.failed()) == 40


class Counts:
    """Maximum and minimum number of workers once all first workers are ready."""

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
    rig = simulate_stages(
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


def test_a_worker_is_recycled_soon_after_its_limit() -> None:
    rig = simulate_stages([stage("a", workers=2, recycle=5)], {"a": Behaviour(1.0)}, 100, options=STEADY)
    done = Counter(message.worker for message in rig.messages("a"))
    last = {start.worker for _, start in rig.starts("a")[-2:]}
    counts = {count for worker, count in done.items() if worker not in last}
    assert min(counts) == 5
    assert max(counts) <= 7, "one after the other, and then at once"


def test_short_batches_do_not_delay_recycling() -> None:
    """They share messages, but few enough that recycling is not delayed."""
    rig = simulate_stages([stage("a", workers=1, recycle=5)], {"a": Behaviour(0.00001)}, 500, world={"tracked": False})
    ages: Counter[int] = Counter()
    for message in rig.messages("a"):
        ages[message.worker] += message.items
    assert max(ages.values()) < 2 * 5
    assert rig.data.delivered["a"] == 500


def test_a_recycled_worker_is_replaced_by_one_with_the_current_memory() -> None:
    def too_large(key: Key, attempt: int) -> ItemOutcome:
        return OutOfMemory() if key == (5,) and attempt < 3 else Gives()

    rig = simulate_stages(
        [stage("a", resources=dt.Resources(cpus=1, memory="1GB"), recycle=3, workers=3)],
        {"a": Behaviour(0.5, peak_bytes=2 << 30, item=too_large)},
        300,
    )
    assert rig.out("a") == numbers(300)
    sizes = [start.seats[0].memory_bytes for _, start in rig.starts("a")]
    grown = sizes.index(max(sizes))
    assert set(sizes[grown:]) == {max(sizes)}


def test_the_seats_of_a_recycled_worker_are_kept_for_its_successor() -> None:
    """During its drain, a replan neither counts it as missing nor uses its seat."""
    manual = ManualStream.of(
        [stage("a", workers=2, recycle=1), stage("b")], cluster="1x(4cpu, 16GB)", options=StreamOptions()
    )
    manual.begin()
    sent = [m for m in of_kind(manual.items(8), RunBatches) if m.hosted == "a"]
    worker = manual.stream.state.workers[sent[0].worker]
    manual.stream.fleet.recycle(worker)
    assert worker.state is WorkerState.DRAINING
    for _ in range(4):
        manual.step(after=5.0)
        assert len(manual.stream.state.units_by_name["a"].workers) == 2
    stop = of_kind(manual.done(sent[0]), StopWorker)
    assert [s.worker for s in stop if s.worker == worker.id] == [worker.id]
    started = of_kind(manual.step(WorkerStopped(worker.id)), StartWorker)
    assert [start.hosted[0].name for start in started if start.seats == worker.seats][:1] == ["a"]


def test_a_worker_stopped_during_its_setup_stops() -> None:
    manual = ManualStream.of([stage("a", workers=1)])
    (start,) = of_kind(manual.step(), StartWorker)
    manual.stream.fleet.drain(manual.stream.state.workers[start.worker], "no")
    assert of_kind(manual.step(), StopWorker)
    assert not of_kind(manual.step(WorkerReady(start.worker, 1.0)), RunBatches)
    assert start.worker in manual.stream.state.workers
    manual.step(WorkerStopped(start.worker))
    assert start.worker not in manual.stream.state.workers


def test_a_cancelled_drain_lets_the_worker_continue() -> None:
    manual = ManualStream.of([stage("a", workers=1)])
    manual.begin()
    (sent,) = of_kind(manual.items(4), RunBatches)
    worker = manual.stream.state.workers[sent.worker]
    manual.stream.fleet.drain(worker, "not needed")
    manual.stream.fleet.cancel_drain(worker)
    again = of_kind(manual.done(sent), RunBatches)
    assert [message.worker for message in again] == [worker.id]
    assert not of_kind(manual.commands, StopWorker)


def test_finished_stages_release_their_seats_before_the_run_ends() -> None:
    rig = simulate_stages([stage("a"), stage("b")], {"a": Behaviour(0.1), "b": Behaviour(2.0)}, 100)
    assert max(now for now, _ in rig.stops("a")) < rig.seconds - 3
    assert all(stop.reason == "finished" for _, stop in rig.stops("a")[-1:])


def test_a_setup_that_fails_everywhere_fails_the_run_at_once() -> None:
    manual = ManualStream.of([stage("a", rate=1.0)], cluster="2x(4cpu, 64GB)")
    starts = of_kind(manual.step(), StartWorker)
    manual.step(
        *[WorkerLost(start.worker, LossCause.SETUP_FAILED, "ImportError: torch") for start in starts], after=1.0
    )
    assert "ImportError: torch" in manual.stream.state.error


def test_recycling_by_age_never_stops_a_whole_stage() -> None:
    least: list[int] = []

    def look(stream: StreamController) -> None:
        if 100 < stream.state.now < 1400:
            least.append(stream.view(stream.state.now).units[0].ready)

    rig = simulate_stages(
        [stage("gpu", workers=8, recycle="600s")],
        {"gpu": Behaviour(1.0, setup_s=60.0)},
        12_000,
        after_step=look,
        world=UNTRACKED,
    )
    assert min(least) >= 6
    assert len(rig.starts("gpu")) > 8


def test_a_hanging_teardown_is_killed_after_its_timeout_and_by_a_cancel() -> None:
    manual = ManualStream.of([stage("a", workers=1)], options=StreamOptions())
    (start,) = of_kind(manual.step(), StartWorker)
    manual.step(WorkerReady(start.worker, 1.0), InputEnded(0), after=1.0)
    assert manual.stream.state.run_state is RunState.STOPPING
    assert of_kind(manual.step(CancelRun(), after=1.0), StopWorker) == [
        StopWorker(start.worker, drain=False, reason="cancelled: requested")
    ]
    late = of_kind(manual.step(after=40.0), StopWorker)
    assert [stop.drain for stop in late] == [False]
    assert [note for note in of_kind(manual.commands, Note) if "did not stop within 30 s" in note.text]


def test_timeouts_need_one_timer_per_worker() -> None:
    """A timer that fires is a step without events; a timer per message would fire about 1500 times."""
    rig = simulate_stages([stage("a", timeout="2s", workers=4)], {"a": Behaviour(0.01)}, 3000, world=UNTRACKED)
    assert sum(not events for _, events, _ in rig.log.steps) < 60


def test_one_timer_per_worker_finds_a_hanging_call_among_many() -> None:
    def item(key: Key, attempt: int) -> Any:
        return Hangs() if key == (500,) else Gives(1)

    rig = simulate_stages(
        [stage("a", timeout="20s", workers=4, on_error="skip")], {"a": Behaviour(0.05, item=item)}, 1000
    )
    assert set(rig.failed()) == {(500,)}
    assert rig.out("a") == numbers(1000) - rig.failed()


def test_recycling_continues_until_the_run_ends() -> None:
    rig = simulate_stages(
        [stage("a", workers=20, recycle="20s")],
        {"a": Behaviour(1.0, setup_s=2.0, deaths_per_hour=60.0, setup_failures=0.1)},
        12_000,
        cluster="4x(8cpu, 64GB)",
        options=StreamOptions(max_setup_failure_share=1.0),
        world=UNTRACKED,
    )
    recycled = [now for now, stop in rig.stops("a") if stop.reason == "recycled"]
    assert len([now for now in recycled if now > rig.seconds / 2]) > 0.3 * len(recycled)
    assert rig.stream.state.units_by_name["a"].recycling_workers == 0


def test_early_setup_failures_do_not_fail_the_run_while_other_setups_are_running() -> None:
    manual = ManualStream.of([stage("a", rate=1.0)], cluster="4x(16cpu, 64GB)")
    starts = of_kind(manual.step(), StartWorker)
    failed = [WorkerLost(start.worker, LossCause.SETUP_FAILED, "OSError: hub timeout") for start in starts[:3]]
    manual.step(*failed, after=2.0)
    assert manual.stream.state.run_state is RunState.RUNNING
