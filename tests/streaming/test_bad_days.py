"""What once went wrong on bad days, and must not again: noise, bad nodes, slow sources, hung ends, full memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.control.commands import Note, RunBatches, StartWorker, StopWorker
from dovetail.control.events import (
    BatchesDone,
    CallFailure,
    CancelRun,
    InputEnded,
    ItemsArrived,
    LossCause,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.lifecycle import RunState
from dovetail.control.payload import Segment
from dovetail.engines.simulated.world import (
    Behaviour,
    Gives,
    Hangs,
    JoinNode,
    Lognormal,
    LoseNode,
    OutOfMemory,
    Raises,
    ScriptedEvent,
    Slow,
)
from dovetail.streaming.queues import UnitQueue
from dovetail.streaming.settings import StreamOptions
from dovetail.streaming.throughput import ThroughputEstimator
from streaming.rigs import Hand, Rig, go, numbers, of_kind, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import Key
    from dovetail.streaming.controller import StreamController

COUNTED = {"tracked": False}


@pytest.mark.parametrize(
    ("straggle", "setup_s"), [pytest.param((0.0, 1.0), 10.0, marks=pytest.mark.long), ((0.1, 4.0), 10.0)]
)
def test_heavy_tails_move_hardly_anybody(straggle: tuple[float, float], setup_s: float) -> None:
    seconds = {"a": 2.0, "b": 4.0, "c": 1.0, "d": 3.0}
    world = {
        name: Behaviour(each, spread=Lognormal(1.0), stragglers=straggle, setup_s=setup_s)
        for name, each in seconds.items()
    }
    stages = [stage(name, rate=1 / each) for name, each in seconds.items()]
    rig = go(stages, world, 12_000, cluster="4x(16cpu, 64GB)", world=COUNTED)
    late = [now for name in seconds for now, _ in rig.starts(name) + rig.stops(name) if 300 < now < 0.75 * rig.seconds]
    assert len(late) <= 20


def test_a_unit_that_becomes_slow_is_seen_before_its_messages_end() -> None:
    """Ten times slower from one moment on: with ages, workers move before the first slow message has ended."""
    speeds = ThroughputEstimator(None, None)
    for _ in range(100):
        speeds.add(1, 1.0, 1)
    assert speeds.rate([(1, 0.5)] * 10)[0] == pytest.approx(1.0)
    slow, sure = speeds.rate([(1, 6.0)] * 10)
    assert slow is not None
    assert slow < 0.25
    assert sure <= 0.5


def test_one_poison_item_out_of_memory_does_not_make_batches_small_for_good() -> None:
    def item(key: Key, attempt: int) -> Any:
        return OutOfMemory() if key == (777,) else Gives(1)

    rig = go([stage("a", batch_size=16, on_error="skip")], {"a": Behaviour(0.1, item=item)}, 2000)
    assert rig.stream.state.units_by_name["a"].batch_size == 16
    assert set(rig.aside()) == {(777,)}


def test_batches_that_had_to_be_small_for_a_while_grow_again() -> None:
    def item(key: Key, attempt: int) -> Any:
        return OutOfMemory() if key[0] < 32 and attempt == 1 else Gives(1)

    rig = go([stage("a", batch_size=16, workers=2)], {"a": Behaviour(0.02, item=item)}, 20_000)
    assert rig.notes("out of memory with 16 items per batch")
    assert rig.notes("batch size raised to 16")
    assert rig.out("a") == numbers(20_000)


def on_the_way(hand: Hand, bad: str) -> int:
    """Every worker on one node is lost with it, one report after the other; starts on that node meanwhile."""
    starts = of_kind(hand.step(), StartWorker)
    hand.step(*[WorkerReady(start.worker, 1.0) for start in starts], after=1.0)
    there = 0
    lost = [start.worker for start in starts if start.seats[0].node == bad]
    for worker in lost:
        commands = hand.step(WorkerLost(worker, LossCause.NODE_LOST, "gone"), after=0.01)
        there += sum(start.seats[0].node == bad for start in of_kind(commands, StartWorker))
    return there


def test_nobody_is_started_on_a_node_whose_workers_say_it_is_gone_and_replans_are_few() -> None:
    hand = Hand.of([stage("a", rate=1.0)], cluster="4x(16cpu, 64GB)")
    assert on_the_way(hand, "node-1") == 0
    assert hand.stream.replanner.replans <= 2


def setup_fails_on(hand: Hand, bad: str, seconds: int) -> None:
    """Answers every start, for so long: ready, or failed on that node."""
    waiting = of_kind(hand.step(), StartWorker)
    for _ in range(seconds):
        events = [
            WorkerLost(start.worker, LossCause.SETUP_FAILED, "RuntimeError: no card")
            if start.seats[0].node == bad
            else WorkerReady(start.worker, 1.0)
            for start in waiting
        ]
        waiting = of_kind(hand.step(*events, after=1.0), StartWorker)


def test_one_bad_node_does_not_fail_a_run_that_the_others_can_do() -> None:
    hand = Hand.of([stage("a", rate=1.0, resources=dt.Resources(cpus=4))], cluster="10x(4cpu, 64GB)")
    setup_fails_on(hand, "node-3", 2000)
    assert hand.stream.state.run_state is RunState.RUNNING, hand.stream.state.error
    assert len(hand.stream.state.workers) >= 9
    assert [note for note in of_kind(hand.said, Note) if "times in a row on node node-3" in note.text]


def test_a_setup_that_fails_everywhere_fails_the_run_at_once() -> None:
    hand = Hand.of([stage("a", rate=1.0)], cluster="2x(4cpu, 64GB)")
    starts = of_kind(hand.step(), StartWorker)
    hand.step(*[WorkerLost(start.worker, LossCause.SETUP_FAILED, "ImportError: torch") for start in starts], after=1.0)
    assert "ImportError: torch" in hand.stream.state.error


def test_recycling_by_age_never_takes_the_whole_stage_down() -> None:
    least: list[int] = []

    def look(stream: StreamController) -> None:
        if 100 < stream.state.now < 1400:
            least.append(stream.view(stream.state.now).units[0].ready)

    rig = go(
        [stage("gpu", workers=8, recycle="600s")],
        {"gpu": Behaviour(1.0, setup_s=60.0)},
        12_000,
        after_step=look,
        world=COUNTED,
    )
    assert min(least) >= 6
    assert len(rig.starts("gpu")) > 8


def test_a_teardown_that_hangs_is_ended_by_time_and_by_a_second_request() -> None:
    hand = Hand.of([stage("a", workers=1)], options=StreamOptions())
    (start,) = of_kind(hand.step(), StartWorker)
    hand.step(WorkerReady(start.worker, 1.0), InputEnded(0), after=1.0)
    assert hand.stream.state.run_state is RunState.STOPPING
    assert of_kind(hand.step(CancelRun(), after=1.0), StopWorker) == [
        StopWorker(start.worker, drain=False, reason="cancelled: requested")
    ]
    late = of_kind(hand.step(after=40.0), StopWorker)
    assert [stop.drain for stop in late] == [False]
    assert [note for note in of_kind(hand.said, Note) if "did not stop within 30 s" in note.text]


def slow_source() -> Rig:
    return go(
        [stage("a"), stage("b"), stage("c", resources=dt.Resources(gpus=1))],
        {"a": Behaviour(0.5, setup_s=5.0), "b": Behaviour(2.0, setup_s=5.0), "c": Behaviour(0.8, setup_s=30.0)},
        2000,
        cluster="4x(16cpu, 64GB, 2xL40S:48GB)",
        source={"rate": 1.0},
        world=COUNTED,
    )


def test_workers_are_not_started_for_a_rate_that_the_source_does_not_give() -> None:
    rig = slow_source()
    assert len(rig.starts("a")) + len(rig.starts("b")) + len(rig.starts("c")) <= 40  # there is room for 70
    assert rig.notes("the source is the bottleneck: 1 items/s")
    view = rig.stream.view(rig.seconds)
    assert view.read == 2000


def test_what_an_epoch_holds_is_bounded_by_bytes() -> None:
    most = [0]

    def look(stream: StreamController) -> None:
        most[0] = max(most[0], stream.state.held_bytes)

    budget = 1 << 30
    rig = go(
        [stage("filter", rate=50.0, returns=0.01), stage("b", batch_size=64, rate=10.0)],
        {"filter": Behaviour(0.02, returns=0.01), "b": Behaviour(0.1)},
        20_000,
        options=StreamOptions(byte_budget=budget),
        source={"item_bytes": 5_000_000},
        after_step=look,
        world=COUNTED,
    )
    assert rig.run_state is RunState.FINISHED
    assert most[0] < 12 * budget


def test_a_stage_that_gives_a_thousand_for_one_does_not_flood_the_next() -> None:
    most = [0]

    def look(stream: StreamController) -> None:
        most[0] = max(most[0], stream.state.units_by_name["b"].queue.bytes)

    budget = 1 << 30
    go(
        [stage("a", rate=1.0, returns=1000.0), stage("b", rate=500.0)],
        {"a": Behaviour(1.0, returns=1000.0, bytes_out=1_000_000), "b": Behaviour(0.002)},
        200,
        cluster="4x(16cpu, 64GB)",
        options=StreamOptions(byte_budget=budget),
        after_step=look,
        world=COUNTED,
    )
    assert most[0] < 40 * budget  # the first round goes out before anything is known of it


def test_with_ordered_output_what_waits_for_a_stuck_epoch_is_bounded_by_bytes() -> None:
    def item(key: Key, attempt: int) -> Any:
        return Slow(3000.0) if key == (5,) else Gives(1)

    most = [0]

    def look(stream: StreamController) -> None:
        most[0] = max(most[0], stream.state.held_bytes)

    budget = 1 << 28
    rig = go(
        [stage("a", rate=5.0)],
        {"a": Behaviour(0.2, bytes_out=1_000_000, item=item)},
        4000,
        options=StreamOptions(ordered=True, byte_budget=budget),
        after_step=look,
    )
    assert rig.out("a") == numbers(4000)
    assert most[0] < 3 * budget


def test_a_card_that_runs_out_of_memory_does_not_make_workers_larger_on_the_host() -> None:
    needs = dt.Resources(gpus=0.25, cpus=1, memory="2GB")
    hand = Hand.of([stage("a", resources=needs, workers=1, on_error="skip")], cluster="1x(8cpu, 32GB, 1xL40S:48GB)")
    (start,) = of_kind(hand.step(), StartWorker)
    commands = hand.step(WorkerReady(start.worker, 1.0), ItemsArrived(0, [Segment(1, 1)]), after=1.0)
    (message,) = of_kind(commands, RunBatches)
    failure = CallFailure(0, 1, "OutOfMemoryError: CUDA out of memory", out_of_memory=True, on_gpu=True)
    before = hand.stream.state.all_units[0].shape
    hand.step(BatchesDone(start.worker, message.message, [], 0.1, [failure], peak_bytes=1 << 34), after=1.0)
    assert hand.stream.state.all_units[0].shape == before


def test_deadlines_need_one_timer_per_worker_however_many_messages_there_are() -> None:
    most = [0]

    def look(stream: StreamController) -> None:
        most[0] = max(most[0], len(stream.state._timers))

    go([stage("a", timeout="600s", workers=4)], {"a": Behaviour(0.01)}, 3000, after_step=look, world=COUNTED)
    assert most[0] < 30


def test_a_hung_call_among_many_is_found_by_the_one_timer() -> None:
    def item(key: Key, attempt: int) -> Any:
        return Hangs() if key == (500,) else Gives(1)

    rig = go([stage("a", timeout="20s", workers=4, on_error="skip")], {"a": Behaviour(0.05, item=item)}, 1000)
    assert set(rig.aside()) == {(500,)}
    assert rig.out("a") == numbers(1000) - rig.aside()


def test_after_a_lost_node_input_comes_again_in_smaller_pieces_and_exactly() -> None:
    rig = go(
        [stage("a", rate=2.0), stage("b", batch_size=4, rate=2.0)],
        {"a": Behaviour(0.5, bytes_out=9), "b": Behaviour(0.5)},
        600,
        cluster="4x(4cpu, 16GB)",
        script=(ScriptedEvent(20.0, LoseNode("node-0")), ScriptedEvent(24.0, LoseNode("node-1"))),
    )
    assert rig.out("b") == numbers(600)
    sizes = [deliver.last - deliver.first for deliver in rig.data.log]
    assert min(sizes) < max(sizes) / 2


@pytest.mark.parametrize("options", [StreamOptions(byte_budget=1000), StreamOptions(ordered=True, max_open_epochs=2)])
def test_a_unit_that_waits_for_seats_and_a_full_budget_do_not_wait_for_each_other(options: StreamOptions) -> None:
    rig = go(
        [stage("a", rate=2.0, cpus=4), stage("b", rate=2.0, cpus=4)],
        {"a": Behaviour(0.5, bytes_out=100), "b": Behaviour(0.5)},
        200,
        cluster="2x(4cpu, 16GB)",
        options=options,
        script=(ScriptedEvent(10.0, LoseNode("node-0")),),
        source={"item_bytes": 100},
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.out("b") == numbers(200)


def test_what_comes_back_to_a_queue_in_a_hurry_is_in_a_hurry_too() -> None:
    queue = UnitQueue(4)
    segment = Segment(1, 6)
    queue.add(1, segment, 0.0)
    taken, _ = queue.take(1, 4)
    queue.flush_stale(1)
    queue.put_back(1, taken[:1], 5.0)
    queue.resize(8)
    assert list(queue.ready) == [1]
    assert queue.by_epoch[1].can_send_partial


def test_recycling_goes_on_for_as_long_as_the_run() -> None:
    rig = go(
        [stage("a", workers=20, recycle="20s")],
        {"a": Behaviour(1.0, setup_s=2.0, deaths_per_hour=60.0, setup_failures=0.1)},
        12_000,
        cluster="4x(8cpu, 64GB)",
        options=StreamOptions(max_setup_failure_share=1.0),
        world=COUNTED,
    )
    recycled = [now for now, stop in rig.stops("a") if stop.reason == "recycled"]
    assert len([now for now in recycled if now > rig.seconds / 2]) > 0.3 * len(recycled)
    assert rig.stream.state.units_by_name["a"].recycling_workers == 0


def test_quick_failures_do_not_fail_a_run_whose_other_workers_are_still_setting_up() -> None:
    hand = Hand.of([stage("a", rate=1.0)], cluster="4x(16cpu, 64GB)")
    starts = of_kind(hand.step(), StartWorker)
    failed = [WorkerLost(start.worker, LossCause.SETUP_FAILED, "OSError: hub timeout") for start in starts[:3]]
    hand.step(*failed, after=2.0)
    assert hand.stream.state.run_state is RunState.RUNNING


def test_a_unit_is_not_starved_by_the_fan_out_before_it() -> None:
    rig = go(
        [stage("a", rate=4.0), stage("b", rate=2.0, returns=50.0), stage("c", rate=100.0)],
        {"a": Behaviour(0.25), "b": Behaviour(0.5, returns=50.0), "c": Behaviour(0.01)},
        3000,
        cluster="1x(16cpu, 64GB)",
        world=COUNTED,
    )
    assert 3000 / rig.seconds > 0.8 * rig.stream.plan.rate


def test_the_first_of_many_failures_of_a_call_whose_input_is_gone_begins_its_epoch_again() -> None:
    def item(key: Key, attempt: int) -> Any:
        return Raises("OSError: only once") if key == (3,) and attempt == 1 else Gives(1)

    node = dt.Node("node-0", 4000, 16 << 30)
    rig = go(
        [stage("a", workers=2), stage("b", batch_size=8, workers=2, on_error="skip")],
        {"a": Behaviour(0.2, bytes_out=9), "b": Behaviour(2.0, item=item)},
        100,
        cluster="2x(4cpu, 16GB)",
        script=(ScriptedEvent(12.0, LoseNode("node-0")), ScriptedEvent(12.5, JoinNode(node))),
    )
    assert rig.out("b") == numbers(100)


def test_one_false_report_of_a_lost_node_is_forgotten_after_a_minute() -> None:
    hand = Hand.of([stage("a", workers=8)], cluster="1x(16cpu, 64GB)", options=StreamOptions())
    starts = of_kind(hand.step(), StartWorker)
    hand.step(*[WorkerReady(start.worker, 1.0) for start in starts], after=1.0)
    hand.step(WorkerLost(starts[0].worker, LossCause.NODE_LOST, "maybe"), after=1.0)
    for _ in range(30):
        commands = hand.step(after=5.0)
        hand.step(*[WorkerReady(start.worker, 1.0) for start in of_kind(commands, StartWorker)])
        hand.step(*[WorkerStopped(stop.worker) for stop in of_kind(commands, StopWorker)])
    assert hand.stream.state.run_state is RunState.RUNNING
    assert len(hand.stream.state.workers) == 8
