"""Contract suite of the engine port. A test class of an engine subclasses it and supplies a rig."""

from __future__ import annotations

import gc
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dovetail.control.commands import Cancel, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import CallOptions, DeadlineExceededError, WorkerLostError
from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    Breadcrumb,
    Drain,
    LossCause,
    WorkerLost,
    WorkerReady,
)
from dovetail.engines.simulated.world import Gives, Hangs, Kills, Raises
from dovetail.errors import CallCycleError
from dovetail.pipeline.stage_code import StageCode
from dovetail.resources.seat import Seat
from engines.scene import (
    NODE,
    SEVERAL_CHECKS_S,
    AsyncNeighbour,
    Caller,
    Does,
    Held,
    Neighbour,
    Notebook,
    PlainServer,
    Rig,
    Scene,
    Server,
    Units,
)
from waiting import LONG, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dovetail.control.events import CallFailure

    SceneOf = Callable[..., Scene]


def ranges(failures: list[CallFailure]) -> list[tuple[int, int]]:
    return [(failure.start, failure.stop) for failure in failures]


def container_sizes(root: object) -> dict[str, int]:
    """Path of attributes -> length of each container that the object and its parts hold."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    pending = [("engine", root)]
    while pending:
        path, one = pending.pop()
        if isinstance(one, dict | list | set | deque):
            found[path] = len(one)
        elif type(one).__module__.startswith("dovetail.") and id(one) not in seen:
            seen.add(id(one))
            names = [*getattr(one, "__dict__", ()), *getattr(type(one), "__slots__", ())]
            pending += [(f"{path}.{name}", getattr(one, name, None)) for name in names]
    return found


def begun(file: Path) -> bool:
    """Whether a method of `Server` waits for this file."""
    return Path(f"{file}.begun").exists()


class EngineContract(ABC):
    @abstractmethod
    def rig(self, units: Units) -> Rig: ...

    @pytest.fixture
    def scene_of(self) -> Iterator[SceneOf]:
        """Factory of scenes; its keywords map names of hosted objects to their behaviour."""
        made: list[Scene] = []

        def make(**units: type[Notebook | Server | Caller | Neighbour] | Does | tuple[StageCode, ...]) -> Scene:
            made.append(Scene(self.rig({"a": Does(), **units})))
            return made[-1]

        yield make
        for scene in made:
            scene.rig.let_go()
            scene.engine.close()

    # Batches

    def test_a_started_worker_reports_ready_and_runs_batches(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        scene.start(1, "a")
        done = scene.done(scene.message(1, "a", [0, 1, 2]))
        assert isinstance(scene.log[0], WorkerReady)
        assert scene.keys(done) == [(0,), (1,), (2,)]
        assert done.failures == []
        assert done.seconds >= 0

    def test_a_message_is_split_into_calls_of_batch_size(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(n,): Raises("ValueError: no") for n in range(7)}))
        scene.ready(1, "a")
        done = scene.done(scene.message(1, "a", list(range(7)), batch_size=3))
        assert ranges(done.failures) == [(0, 3), (3, 6), (6, 7)]
        assert done.segments == []

    def test_parts_of_several_segments_keep_their_order_and_calls_span_them(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(4,): Raises("ValueError: no")}))
        scene.ready(1, "a")
        first, second = scene.rig.segment([(n,) for n in range(4)]), scene.rig.segment([(n,) for n in range(4, 9)])
        parts = [(first, 2, 4), (second, 0, 3), (first, 0, 1)]
        done = scene.done(scene.send(RunBatches(77, 1, "a", parts, 6, 3, 100)))
        assert ranges(done.failures) == [(0, 3)]
        assert scene.keys(done) == [(5,), (6,), (0,)]

    def test_output_is_split_into_segments_on_the_workers_node(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        scene.ready(1, "a")
        done = scene.done(scene.message(1, "a", list(range(7)), batch_size=2, cut=3))
        assert [segment.items for segment in done.segments] == [3, 3, 1]
        assert [scene.rig.read(segment) for segment in done.segments][1] == [(3,), (4,), (5,)]
        assert {segment.node for segment in done.segments} == {NODE}
        assert len({segment.id for segment in done.segments}) == 3

    def test_spooled_output_survives_the_loss_of_its_node(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        scene.ready(1, "a")
        (segment,) = scene.done(scene.message(1, "a", [0], spool=True)).segments
        assert segment.node == ""

    def test_output_of_one_worker_is_input_of_another(self, scene_of: SceneOf) -> None:
        scene = scene_of(b=Does({(1,): Gives(0)}))
        scene.ready(1, "a")
        scene.ready(2, "b")
        (segment,) = scene.done(scene.message(1, "a", [0, 1, 2])).segments
        done = scene.done(scene.send(RunBatches(77, 2, "b", [(segment, 0, 3)], 3, 1, 100)))
        assert scene.keys(done) == [(0,), (2,)]

    def test_no_result_drops_an_item_and_several_fan_it_out(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Gives(0), (1,): Gives(3)}))
        scene.ready(1, "a")
        done = scene.done(scene.message(1, "a", [0, 1, 2], batch_size=3))
        assert scene.keys(done) == [(1, 0), (1, 1), (1, 2), (2,)]

    def test_a_message_without_results_has_no_segment(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Gives(0)}))
        scene.ready(1, "a")
        assert scene.done(scene.message(1, "a", [0])).segments == []

    def test_a_failed_call_is_reported_with_its_range_and_the_others_succeed(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(3,): Raises("KeyError: 'colour'")}))
        scene.ready(1, "a")
        done = scene.done(scene.message(1, "a", list(range(6)), batch_size=2))
        assert ranges(done.failures) == [(2, 4)]
        assert "KeyError" in done.failures[0].error
        assert "colour" in done.failures[0].error
        assert not done.failures[0].out_of_memory
        assert scene.keys(done) == [(0,), (1,), (4,), (5,)]

    def test_a_worker_continues_after_an_exception(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Raises("ValueError: no")}))
        scene.ready(1, "a")
        scene.done(scene.message(1, "a", [0]))
        assert scene.keys(scene.done(scene.message(1, "a", [1]))) == [(1,)]

    def test_two_workers_run_at_the_same_time(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Hangs()}))
        scene.ready(1, "a")
        scene.ready(2, "a")
        hanging = scene.message(1, "a", [0])
        scene.running(1, hanging)
        assert scene.keys(scene.done(scene.message(2, "a", [1]))) == [(1,)]
        assert scene.rig.runs(1, hanging)

    def test_messages_are_answered_in_the_order_sent(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        scene.start(1, "a")
        sent = [scene.message(1, "a", [n]) for n in range(20)]
        scene.done(sent[-1])
        assert [event.message for event in scene.all(BatchesDone)] == sent

    def test_a_worker_with_two_slots_runs_two_messages_at_once(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Hangs()}))
        scene.ready(1, "a", slots=2)
        scene.message(1, "a", [0])
        assert scene.keys(scene.done(scene.message(1, "a", [1]))) == [(1,)]

    # Cancelling and stopping

    def test_cancel_returns_a_queued_message_and_not_a_running_one(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Held()}))
        scene.ready(1, "a")
        runs, waits, stays = (scene.message(1, "a", [n]) for n in range(3))
        scene.running(1, runs)
        scene.submit(Cancel(runs, 1), Cancel(waits, 1))
        scene.until(lambda: bool(scene.all(BatchesReturned)), "something is returned")
        assert scene.all(BatchesReturned) == [BatchesReturned(1, waits)]
        scene.rig.let_go()
        assert scene.keys(scene.done(runs)) == [(0,)]
        assert scene.keys(scene.done(stays)) == [(2,)]

    def test_cancel_of_a_finished_or_unknown_message_has_no_effect(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        scene.ready(1, "a")
        message = scene.message(1, "a", [0])
        scene.done(message)
        scene.submit(Cancel(message, 1), Cancel(999, 1))
        assert scene.keys(scene.done(scene.message(1, "a", [1]))) == [(1,)]
        assert scene.all(BatchesReturned) == []

    def test_drain_finishes_all_messages_sent(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        scene.start(1, "a")
        sent = [scene.message(1, "a", [n]) for n in range(5)]
        scene.submit(StopWorker(1))
        scene.stopped(1)
        assert [event.message for event in scene.all(BatchesDone)] == sent

    def test_a_worker_can_be_stopped_before_it_is_ready(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        scene.start(1, "a")
        scene.submit(StopWorker(1))
        scene.stopped(1)

    def test_a_stop_without_drain_is_a_loss_with_its_reason(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(1,): Hangs()}))
        scene.ready(1, "a")
        message = scene.message(1, "a", [1])
        scene.running(1, message)
        scene.submit(StopWorker(1, drain=False, reason="too slow"))
        lost = scene.lost(1)
        assert (lost.cause, lost.detail) == (LossCause.STOPPED, "too slow")
        assert lost.breadcrumbs == (Breadcrumb(message, 0),)

    def test_a_stop_without_drain_ends_a_slow_drain(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Hangs()}))
        scene.ready(1, "a")
        scene.running(1, scene.message(1, "a", [0]))
        scene.submit(StopWorker(1), StopWorker(1, drain=False))
        assert scene.lost(1).cause is LossCause.STOPPED

    # Losses

    def test_a_kill_is_a_loss_whose_breadcrumb_identifies_the_call(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(5,): Kills()}))
        scene.ready(1, "a")
        message = scene.message(1, "a", list(range(9)), batch_size=2)
        lost = scene.lost(1)
        assert lost.cause is LossCause.SIGNAL
        assert "9" in lost.detail
        assert lost.breadcrumbs == (Breadcrumb(message, 4),)

    def test_a_worker_killed_while_idle_leaves_no_breadcrumb(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        scene.ready(1, "a")
        scene.done(scene.message(1, "a", [0]))
        scene.rig.kill(1)
        assert (scene.lost(1).cause, scene.lost(1).breadcrumbs) == (LossCause.SIGNAL, ())

    def test_results_finished_before_a_loss_are_reported_before_it(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(3,): Kills()}))
        scene.start(1, "a")
        sent = [scene.message(1, "a", [n]) for n in range(6)]
        lost = scene.lost(1)
        assert [event.message for event in scene.all(BatchesDone)] == sent[:3]
        assert scene.log[-1] is lost
        assert lost.breadcrumbs == (Breadcrumb(sent[3], 0),)

    def test_an_exit_is_a_loss_with_its_exit_code(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Kills(LossCause.EXIT, 37)}))
        scene.ready(1, "a")
        message = scene.message(1, "a", [0])
        lost = scene.lost(1)
        assert lost.cause is LossCause.EXIT
        assert "37" in lost.detail
        assert lost.breadcrumbs == (Breadcrumb(message, 0),)

    def test_a_failed_setup_is_a_loss_with_the_message_of_the_exception(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does(setup_error="no such model"))
        scene.start(1, "a")
        scene.message(1, "a", [0])
        lost = scene.lost(1)
        assert lost.cause is LossCause.SETUP_FAILED
        assert "no such model" in lost.detail
        assert scene.all(WorkerReady) == []

    def test_commands_for_dead_workers_are_ignored(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        scene.ready(1, "a")
        scene.ready(2, "a")
        scene.rig.kill(1)
        scene.message(1, "a", [0])  # perhaps before its loss is known
        scene.lost(1)
        scene.message(1, "a", [0])
        scene.submit(Cancel(1, 1), StopWorker(1), StopWorker(1, drain=False), StopWorker(99))
        assert scene.keys(scene.done(scene.message(2, "a", [1]))) == [(1,)]
        assert len(scene.all(WorkerLost)) == 1

    def test_the_loss_of_a_worker_affects_no_other_worker(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Held(), (1,): Kills()}))
        scene.ready(1, "a")
        scene.ready(2, "a")
        held = scene.message(1, "a", [0])
        scene.running(1, held)
        scene.message(2, "a", [1])
        scene.lost(2)
        scene.rig.let_go()
        assert scene.keys(scene.done(held)) == [(0,)]

    def test_nothing_grows_with_the_number_of_workers_ever_started(self, scene_of: SceneOf) -> None:
        scene = scene_of(book=Notebook)

        def use(worker: int) -> dict[str, int]:
            scene.ready(worker, "a", "book")
            scene.done(scene.message(worker, "a", [0]))
            scene.result(scene.engine.call(worker, "book", "note", "x"))
            scene.result(scene.engine.call_with(CallOptions(deadline_s=PATIENCE_S), worker, "book", "note", "x"))
            scene.engine.call(worker, "book", "note", "x").cancel()
            scene.submit(StopWorker(worker))
            scene.stopped(worker)
            gc.collect()
            return container_sizes(scene.engine)

        before = use(1)
        use(2)
        assert use(3) == before

    # Poll, post, close

    def test_poll_returns_an_empty_list_after_its_timeout(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        began = scene.engine.now()
        assert scene.engine.poll(0.02) == []
        assert scene.engine.now() - began >= 0.02 - 1e-6
        assert scene.engine.poll(0) == []

    def test_post_from_another_thread_wakes_poll(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        event = Drain("thread")
        thread = threading.Thread(target=scene.engine.post, args=(event,))
        thread.start()
        scene.until(lambda: event in scene.log, "the posted event comes")
        thread.join()

    def test_posted_events_are_returned_once_and_in_order(self, scene_of: SceneOf) -> None:
        scene = scene_of()
        for number in range(5):
            scene.engine.post(Drain(str(number)))
        scene.until(lambda: len(scene.log) == 5, "all came")
        assert scene.log == [Drain(str(number)) for number in range(5)]
        assert scene.engine.poll(0.01) == []

    def test_close_twice_and_with_busy_workers_leaves_no_process(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Hangs()}))
        scene.ready(1, "a")
        scene.ready(2, "a")
        scene.running(1, scene.message(1, "a", [0]))
        scene.start(3, "a")
        scene.engine.close()
        assert scene.rig.processes() == 0
        scene.engine.close()

    # Calls

    def test_a_call_on_a_hosted_object_returns_its_result(self, scene_of: SceneOf) -> None:
        scene = scene_of(book=Notebook)
        scene.ready(1, "book")
        assert scene.result(scene.engine.call(1, "book", "note", "x", times=2)) == 2
        assert scene.result(scene.engine.call(1, "book", "note", "y")) == 3

    def test_a_call_that_raises_ends_with_its_exception(self, scene_of: SceneOf) -> None:
        scene = scene_of(book=Notebook)
        scene.ready(1, "book")
        error = scene.error(scene.engine.call(1, "book", "tear"))
        assert isinstance(error, ValueError)
        assert str(error) == "torn"
        assert isinstance(scene.error(scene.engine.call(1, "book", "burn")), AttributeError)
        assert isinstance(scene.error(scene.engine.call(1, "no such book", "note")), LookupError)

    def test_calls_end_when_their_worker_does(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Hangs()}))
        scene.ready(1, "a")
        scene.running(1, scene.message(1, "a", [0]))
        waiting = scene.engine.call(1, "a", "__str__")
        scene.listen()
        assert not waiting.done()
        scene.rig.kill(1)
        assert isinstance(scene.error(waiting), WorkerLostError)
        scene.lost(1)
        assert isinstance(scene.error(scene.engine.call(1, "a", "__str__")), WorkerLostError)

    def test_calls_end_when_the_engine_is_closed(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Hangs()}))
        scene.ready(1, "a")
        scene.running(1, scene.message(1, "a", [0]))
        waiting = scene.engine.call(1, "a", "__str__")
        scene.engine.close()
        assert isinstance(waiting.exception(0), WorkerLostError)
        assert isinstance(scene.engine.call(1, "a", "__str__").exception(0), WorkerLostError)

    def test_a_call_may_come_from_another_thread(self, scene_of: SceneOf) -> None:
        scene = scene_of(book=Notebook)
        scene.ready(1, "book")
        results: list[int] = []

        def note() -> None:
            results.append(scene.engine.call(1, "book", "note", "x").result(PATIENCE_S))

        thread = threading.Thread(target=note)
        thread.start()
        scene.until(lambda: bool(results), "the thread has its result")
        thread.join()
        assert results == [1]

    def test_a_call_from_the_polling_thread_is_sent_at_once(self, scene_of: SceneOf) -> None:
        """It does not wait for the end of `poll`, which may wait without limit."""
        scene = scene_of(book=Notebook)
        scene.ready(1, "book")
        future = scene.engine.call(1, "book", "note", "x")
        future.add_done_callback(lambda _: scene.engine.post(Drain("answered")))
        until = time.monotonic() + PATIENCE_S
        while not future.done():
            assert time.monotonic() < until, "the call was not sent while poll waited"
            scene.listen(PATIENCE_S)
        assert future.result() == 1

    def test_a_call_to_a_starting_worker_waits_for_it(self, scene_of: SceneOf) -> None:
        scene = scene_of(book=Notebook)
        scene.start(1, "book")
        assert scene.result(scene.engine.call(1, "book", "note", "x")) == 1
        assert scene.all(WorkerReady)

    def test_calls_arrive_in_the_order_made(self, scene_of: SceneOf) -> None:
        scene = scene_of(book=Notebook)
        scene.start(1, "book")
        early = [scene.engine.call(1, "book", "note", "x") for _ in range(10)]
        scene.until(lambda: bool(scene.all(WorkerReady)), "the worker is ready")
        late = [scene.engine.call(1, "book", "note", "x") for _ in range(10)]
        assert [scene.result(future) for future in (*early, *late)] == list(range(1, 21))

    def test_a_drain_finishes_more_calls_than_a_busy_worker_has_room_for(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Held()}))
        scene.ready(1, "a")
        held = scene.message(1, "a", [0])
        scene.running(1, held)
        calls = [scene.engine.call(1, "a", "__str__") for _ in range(600)]
        scene.submit(StopWorker(1))
        assert isinstance(scene.error(scene.engine.call(1, "a", "__str__")), WorkerLostError)
        scene.rig.let_go()
        scene.done(held)
        for call in calls:
            scene.result(call)
        scene.stopped(1)

    @pytest.mark.parametrize("ready", [True, False], ids=["ready", "starting"])
    def test_a_drain_finishes_calls_made_before_it_and_refuses_later_ones(self, scene_of: SceneOf, ready: bool) -> None:
        scene = scene_of(book=Notebook)
        scene.ready(1, "book") if ready else scene.start(1, "book")
        before = scene.engine.call(1, "book", "note", "x")
        scene.submit(StopWorker(1))
        after = scene.engine.call(1, "book", "note", "y")
        assert scene.result(before) == 1
        assert isinstance(scene.error(after), WorkerLostError)
        scene.stopped(1)

    def test_a_call_that_waits_can_be_cancelled(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Held()}))
        scene.ready(1, "a")
        held = scene.message(1, "a", [0])
        scene.running(1, held)
        cancelled, after = scene.engine.call(1, "a", "__str__"), scene.engine.call(1, "a", "__str__")
        assert cancelled.cancel()
        assert cancelled.cancelled()
        assert cancelled.cancel()
        with pytest.raises(CancelledError):
            cancelled.result(0)
        scene.listen()
        assert wait([cancelled], 0).done == {cancelled}
        scene.rig.let_go()
        scene.done(held)
        scene.result(after)
        assert not after.cancel()

    def test_a_call_that_has_not_begun_at_its_deadline_never_runs(self, scene_of: SceneOf) -> None:
        scene = scene_of(book=Notebook)
        scene.start(1, "book")
        late = scene.engine.call_with(CallOptions(deadline_s=0.0), 1, "book", "note", "x")
        in_time = scene.engine.call_with(CallOptions(deadline_s=PATIENCE_S), 1, "book", "note", "x")
        assert isinstance(scene.error(late), DeadlineExceededError)
        assert scene.result(in_time) == 1

    def test_the_polling_thread_may_wait_for_a_result(self, scene_of: SceneOf) -> None:
        """Events that occur meanwhile are returned by the next `poll`."""
        scene = scene_of(book=Notebook)
        scene.engine.poll(0)
        scene.start(1, "book")
        assert scene.engine.call(1, "book", "note", "x").result(PATIENCE_S) == 1
        scene.until(lambda: bool(scene.all(WorkerReady)), "the worker is ready")
        late = scene.engine.call_with(CallOptions(deadline_s=0.0), 1, "book", "note", "x")
        with pytest.raises(DeadlineExceededError):
            late.result(PATIENCE_S)

    def test_a_call_of_health_takes_no_slot(self, scene_of: SceneOf) -> None:
        scene = scene_of(server=Server)
        scene.ready(1, "server")
        assert scene.result(scene.engine.call(1, "server", "health")) == "fine"
        assert scene.result(scene.engine.call(1, "server", "note", "x")) == ["x"]

    def test_a_hosted_object_is_made_with_its_arguments(self, scene_of: SceneOf) -> None:
        scene = scene_of(book=(StageCode("book", Notebook, args=("first", "second")),))
        scene.ready(1, "book")
        assert scene.result(scene.engine.call(1, "book", "note", "third")) == 3

    def test_several_objects_in_one_worker_are_addressed_by_name(self, scene_of: SceneOf) -> None:
        scene = scene_of(b=Does({(0,): Gives(2)}), book=Notebook, other=Notebook)
        scene.ready(1, "a", "b", "book", "other")
        a, b = scene.message(1, "a", [0]), scene.message(1, "b", [0])
        assert scene.keys(scene.done(a)) == [(0,)]
        assert scene.keys(scene.done(b)) == [(0, 0), (0, 1)]
        assert scene.result(scene.engine.call(1, "book", "note", "x")) == 1
        assert scene.result(scene.engine.call(1, "other", "note", "x")) == 1
        assert scene.result(scene.engine.call(1, "book", "note", "x")) == 2

    def test_objects_of_one_worker_run_concurrently(self, scene_of: SceneOf) -> None:
        scene = scene_of(a=Does({(0,): Hangs()}), b=Does())
        scene.ready(1, "a", "b")
        scene.running(1, scene.message(1, "a", [0]))
        assert scene.keys(scene.done(scene.message(1, "b", [0]))) == [(0,)]


class ProcessContract(EngineContract):
    """Contract of engines whose workers run the user's code."""

    @pytest.mark.parametrize("slots", [1, 2])
    def test_a_drain_waits_for_the_calls_of_running_messages_and_of_the_teardown(
        self, scene_of: SceneOf, slots: int
    ) -> None:
        """A worker reads answers while it finishes its work."""
        scene = scene_of(a=Does({(0,): Held()}), caller=Caller, book=Notebook)
        scene.ready(1, "caller", slots=slots)
        scene.ready(2, "a", "book")
        scene.running(2, scene.message(2, "a", [0]))  # the call of worker 1 waits behind it
        calls = scene.message(1, "caller", [0])
        scene.running(1, calls)
        scene.submit(StopWorker(1))
        scene.listen()
        scene.rig.let_go()
        assert scene.keys(scene.done(calls)) == [(0,)]
        scene.stopped(1)
        assert scene.result(scene.engine.call(2, "book", "note", "from the test")) == 2

    @pytest.mark.parametrize("slots", [1, 2])
    @pytest.mark.parametrize("kind", [Server, PlainServer])
    def test_a_running_sync_method_keeps_its_slot_when_its_call_is_cancelled(
        self, scene_of: SceneOf, tmp_path: Path, slots: int, kind: type[Server]
    ) -> None:
        scene = scene_of(server=kind)
        scene.ready(1, "server", slots=slots)
        files = [tmp_path / str(number) for number in range(slots)]
        running = [scene.engine.call(1, "server", "wait_for", str(file)) for file in files]
        scene.until(lambda: all(begun(file) for file in files), "all slots are busy")
        cancelled = scene.engine.call(1, "server", "note", "cancelled")
        late = scene.engine.call_with(CallOptions(deadline_s=0.01), 1, "server", "note", "late")
        after = scene.engine.call(1, "server", "note", "after")
        assert running[0].cancel()
        assert cancelled.cancel()
        assert isinstance(scene.error(late), DeadlineExceededError)
        if kind is Server:
            assert scene.result(scene.engine.call(1, "server", "health")) == "fine"
        assert not after.done()
        for file in files:
            file.touch()
        assert scene.result(after) == ["after"]
        assert [scene.result(call) for call in running[1:]] == ["waited"] * (slots - 1)

    @pytest.mark.parametrize("slots", [1, 2])
    def test_a_running_async_method_is_cancelled_with_its_call(
        self, scene_of: SceneOf, tmp_path: Path, slots: int
    ) -> None:
        scene = scene_of(server=PlainServer)
        scene.ready(1, "server", slots=slots)
        file = tmp_path / "never"
        call = scene.engine.call(1, "server", "wait_for_async", str(file))
        scene.until(lambda: begun(file), "the method runs")
        assert call.cancel()
        scene.until(Path(f"{file}.cancelled").exists, "the method is cancelled")
        assert scene.result(scene.engine.call(1, "server", "note", "x")) == ["x"]

    @pytest.mark.parametrize("slots", [1, 2])
    def test_a_running_async_method_is_cancelled_at_its_deadline(
        self, scene_of: SceneOf, tmp_path: Path, slots: int
    ) -> None:
        scene = scene_of(server=PlainServer)
        scene.ready(1, "server", slots=slots)
        file = tmp_path / "never"
        for deadline_s in (0.2, 2.0, 20.0):  # on a busy machine a method may begin late
            call = scene.engine.call_with(CallOptions(deadline_s=deadline_s), 1, "server", "wait_for_async", str(file))
            assert isinstance(scene.error(call), DeadlineExceededError)
            if begun(file):
                break
        scene.until(Path(f"{file}.cancelled").exists, "the method is cancelled")
        assert scene.result(scene.engine.call(1, "server", "note", "x")) == ["x"]

    @pytest.mark.parametrize("megabytes", [0.05, 10, *([300] if LONG else [])])
    def test_large_arguments_and_results_are_passed(self, scene_of: SceneOf, megabytes: float) -> None:
        scene = scene_of(server=Server)
        scene.ready(1, "server")
        array = np.arange(megabytes * (1 << 17), dtype=np.float64)
        results = []
        for number in range(2):  # the second call while the first result is kept
            array[0] = number
            results.append(scene.result(scene.engine.call(1, "server", "negate", array, name="b" * 200_000)))
        for number, (negated, name) in enumerate(results):
            assert negated[0] == -number
            assert np.array_equal(negated[1:], -array[1:])
            negated[0] = 5
            assert name == "b" * 200_000
        lost = scene.engine.call(2, "server", "negate", array, name="")
        assert isinstance(scene.error(lost), WorkerLostError)
        scene.engine.call(1, "server", "negate", array, name="").cancel()
        assert scene.result(scene.engine.call(1, "server", "kept")) == [0, 1]

    def test_threads_wait_for_calls_while_the_worker_runs_messages(self, scene_of: SceneOf) -> None:
        """Threads that wait for answers also receive what is meant for the polling thread."""
        scene = scene_of(book=Notebook)
        scene.ready(1, "a", "book")
        counts: list[int] = []

        def call() -> None:
            for _ in range(50):
                counts.append(scene.engine.call(1, "book", "note", "x").result(PATIENCE_S))

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        messages = [scene.message(1, "a", [number]) for number in range(50)]
        assert [scene.keys(scene.done(message)) for message in messages] == [[(number,)] for number in range(50)]
        scene.until(lambda: not any(thread.is_alive() for thread in threads), "all threads end")
        assert sorted(counts) == list(range(1, 151))

    def test_a_thread_that_waits_learns_of_the_end_of_the_worker(self, scene_of: SceneOf, tmp_path: Path) -> None:
        scene = scene_of(server=PlainServer)
        scene.ready(1, "server")
        errors: list[BaseException | None] = []

        def call() -> None:
            for file in (tmp_path / "1", tmp_path / "2"):
                errors.append(scene.engine.call(1, "server", "wait_for", str(file)).exception(PATIENCE_S))

        thread = threading.Thread(target=call)
        thread.start()
        scene.until(lambda: begun(tmp_path / "1"), "the method runs")
        scene.rig.kill(1)
        scene.lost(1)
        scene.until(lambda: not thread.is_alive(), "the thread ends")
        assert [isinstance(error, WorkerLostError) for error in errors] == [True, True]

    def test_callbacks_run_outside_of_the_polling_thread(self, scene_of: SceneOf, tmp_path: Path) -> None:
        scene = scene_of(server=Server)
        scene.ready(1, "server")
        gate = tmp_path / "gate"
        seen: list[tuple[int, int]] = []
        scene.engine.call(1, "server", "wait_for", str(gate))
        for _ in range(5):
            call = scene.engine.call(1, "server", "note", "x")
            call.add_done_callback(lambda call: seen.append((len(call.result()), threading.get_ident())))
        gate.touch()  # a callback that is added to a call that has ended would be called here
        scene.until(lambda: len(seen) == 5, "all callbacks were called")
        assert sorted(result for result, _ in seen) == [1, 2, 3, 4, 5], "answers may overtake each other on the way"
        assert threading.get_ident() not in {thread for _, thread in seen}

    def test_every_rank_of_a_gang_can_be_called(self, scene_of: SceneOf) -> None:
        scene = scene_of(book=Notebook)
        scene.ready(1, "book", ranks=2)
        calls = [scene.engine.call_with(CallOptions(rank=rank), 1, "book", "variable", "RANK") for rank in (0, 1)]
        assert [scene.result(call) for call in calls] == ["0", "1"]
        assert scene.result(scene.engine.call(1, "book", "variable", "RANK")) == "0"
        unknown = scene.engine.call_with(CallOptions(rank=2), 1, "book", "variable", "RANK")
        assert isinstance(scene.error(unknown), LookupError)

    @pytest.mark.parametrize("slots", [1, 2])
    def test_async_methods_are_awaited_whatever_the_other_methods_are(self, scene_of: SceneOf, slots: int) -> None:
        scene = scene_of(book=Notebook)
        scene.ready(1, "book", slots=slots)
        assert scene.result(scene.engine.call(1, "book", "note_later", "x")) == 1
        assert scene.result(scene.engine.call(1, "book", "note", "y")) == 2

    def test_a_worker_may_call_a_worker_that_is_starting(self, scene_of: SceneOf) -> None:
        scene = scene_of(caller=Caller, book=Notebook)
        scene.ready(1, "caller")
        scene.start(2, "a", "book")
        calls = scene.message(1, "caller", [0])
        assert scene.keys(scene.done(calls)) == [(0,)]
        assert [event.worker for event in scene.all(WorkerReady)] == [1, 2]

    # Calls between objects of one process

    @pytest.mark.parametrize("kind", [Neighbour, AsyncNeighbour])
    def test_objects_of_one_process_share_arguments_and_results_of_their_calls(
        self, scene_of: SceneOf, kind: type[Neighbour]
    ) -> None:
        """Their calls are not sent and not pickled, whatever the methods are."""
        scene = scene_of(one=Neighbour, other=kind, book=Notebook)
        scene.ready(1, "one", "other", "book")
        call = scene.engine.call
        assert scene.result(call(1, "one", "shares", "other"))
        assert scene.result(call(1, "other", "ask_later", "book", "note_later", "x")) == 1
        assert scene.result(call(1, "one", "ask", "book", "note_later", "y")) == 2
        assert isinstance(scene.error(call(1, "one", "ask", "book", "tear")), ValueError)
        assert isinstance(scene.error(call(1, "one", "ask", "book", "no_such_method")), AttributeError)
        assert isinstance(scene.error(call(1, "one", "ask", "nobody", "note", "x")), LookupError)
        assert scene.result(call(1, "one", "repeat", 5, "book", "note", "z")) == [3, 4, 5, 6, 7]

    @pytest.mark.parametrize("slots", [1, 2])
    def test_calls_within_a_process_take_slots(self, scene_of: SceneOf, slots: int) -> None:
        scene = scene_of(one=Neighbour, other=Neighbour)
        hosted = (scene.rig.hosted("one", 4), scene.rig.hosted("other", slots))
        scene.submit(StartWorker(1, (Seat(NODE, 100),), hosted))
        calls = [scene.engine.call(1, "one", "ask", "other", "linger", 0.02) for _ in range(3)]
        calls += [scene.engine.call(1, "other", "linger", 0.02) for _ in range(3)]
        calls += [scene.engine.call(1, "one", "repeat", 3, "other", "linger", 0.02)]
        for call in calls:
            scene.result(call)
        assert scene.result(scene.engine.call(1, "other", "busiest")) == slots

    def test_a_drain_finishes_calls_within_the_process(self, scene_of: SceneOf) -> None:
        scene = scene_of(one=Neighbour, other=Neighbour)
        scene.ready(1, "one", "other", slots=2)
        calls = [
            scene.engine.call(1, name, "repeat", 2, other, "linger", 0.02)
            for name, other in (("one", "other"), ("other", "one"))
        ]
        scene.submit(StopWorker(1))
        assert [scene.result(call) for call in calls] == [[None, None]] * 2
        scene.stopped(1)

    # Calls between workers

    @pytest.mark.parametrize("slots", [1, 2])
    def test_calls_of_a_worker_arrive_in_the_order_made(self, scene_of: SceneOf, slots: int) -> None:
        """This includes the first calls, which wait until the called worker has started."""
        scene = scene_of(one=Neighbour, book=Notebook)
        scene.ready(1, "one", slots=slots)
        early = scene.engine.call(1, "one", "results", 2, 20, "book", "note", "x")
        scene.start(2, "book")
        assert scene.result(early) == list(range(1, 21))
        late = scene.engine.call(1, "one", "results", 2, 20, "book", "note", "x")
        assert scene.result(late) == list(range(21, 41))

    def test_a_worker_calls_every_rank_of_a_gang(self, scene_of: SceneOf) -> None:
        scene = scene_of(one=Neighbour, book=Notebook)
        scene.ready(1, "one")
        scene.ready(2, "book", ranks=2)
        calls = [scene.engine.call(1, "one", "ask_worker", 2, "book", "variable", "RANK", rank=rank) for rank in (0, 1)]
        assert [scene.result(call) for call in calls] == ["0", "1"]

    @pytest.mark.parametrize("items", [1_000, 5_000, 1_000_000], ids=["8KB", "40KB", "8MB"])
    def test_arrays_arrive_as_writable_copies(self, scene_of: SceneOf, items: int) -> None:
        scene = scene_of(one=Neighbour, other=Neighbour)
        scene.ready(1, "one")
        scene.ready(2, "other")
        assert scene.result(scene.engine.call(1, "one", "doubled_elsewhere", 2, items)) == (items, 3 * items)

    def test_calls_of_a_worker_end_with_the_worker_that_it_calls(self, scene_of: SceneOf) -> None:
        scene = scene_of(one=Neighbour, other=Neighbour, a=Does({(0,): Hangs()}))
        scene.ready(1, "one", slots=2)
        scene.ready(2, "a", "other")
        assert scene.result(scene.engine.call(1, "one", "outcomes", 2, 1, "other", "give_back", 1)) == ["int"]
        scene.running(2, scene.message(2, "a", [0]))
        waiting = scene.engine.call(1, "one", "outcomes", 2, 2, "a", "__str__")
        scene.listen()
        scene.rig.kill(2)
        assert scene.result(waiting) == ["lost"] * 2
        scene.lost(2)
        again = scene.engine.call(1, "one", "outcomes", 2, 1, "other", "give_back", 1)
        assert scene.result(again) == ["lost"]

    @pytest.mark.parametrize("slots", [1, 2])
    def test_a_drain_answers_the_calls_that_a_worker_made_before_and_refuses_the_others(
        self, scene_of: SceneOf, slots: int
    ) -> None:
        scene = scene_of(one=Neighbour, other=Neighbour)
        scene.ready(1, "one")
        scene.ready(2, "other", slots=slots)
        assert scene.result(scene.engine.call(1, "one", "outcomes", 2, 1, "other", "linger", 0.0)) == ["NoneType"]
        calls = scene.engine.call(1, "one", "outcomes", 2, 20, "other", "linger", 0.01)
        again = scene.engine.call(1, "one", "outcomes", 2, 1, "other", "linger", 0.0)
        scene.submit(StopWorker(2))
        assert set(scene.result(calls)) <= {"NoneType", "lost"}
        scene.stopped(2)
        assert scene.result(again) in (["NoneType"], ["lost"])
        last = scene.engine.call(1, "one", "outcomes", 2, 1, "other", "linger", 0.0)
        assert scene.result(last) == ["lost"]

    def test_a_call_of_health_from_a_worker_takes_no_slot(self, scene_of: SceneOf, tmp_path: Path) -> None:
        scene = scene_of(one=Neighbour, server=Server)
        scene.ready(1, "one", "server")
        scene.ready(2, "one")
        gate = tmp_path / "gate"
        busy = scene.engine.call(1, "server", "wait_for", str(gate))
        scene.until((tmp_path / "gate.begun").exists, "the only slot is taken")
        assert scene.result(scene.engine.call(1, "one", "ask", "server", "health")) == "fine"
        assert scene.result(scene.engine.call(2, "one", "ask_worker", 1, "server", "health")) == "fine"
        gate.touch()
        assert scene.result(busy) == "waited"

    # Calls that wait for each other

    def test_a_cycle_of_calls_that_wait_for_each_other_fails_and_is_named(self, scene_of: SceneOf) -> None:
        scene = scene_of(one=Neighbour, other=Neighbour)
        scene.ready(1, "one")
        scene.ready(2, "other")
        ask = ("ask_worker", 1, "one", "give_back", 7)
        error = scene.error(scene.engine.call(1, "one", "ask_worker", 2, "other", *ask))
        assert isinstance(error, CallCycleError)
        assert "other (worker 2) -> one (worker 1) -> other (worker 2)" in str(error)
        assert scene.result(scene.engine.call(1, "one", "ask_worker", 2, "other", "give_back", 7)) == 7

    def test_calls_in_both_directions_that_wait_for_each_other_do_not_hang(self, scene_of: SceneOf) -> None:
        """None of the two began within the other."""
        scene = scene_of(one=Neighbour, other=Neighbour)
        scene.ready(1, "one")
        scene.ready(2, "other")
        calls = [
            scene.engine.call(1, "one", "ask_after", 0.2, 2, "other", "give_back", 7),
            scene.engine.call(2, "other", "ask_after", 0.2, 1, "one", "give_back", 7),
        ]
        errors = [scene.error(call) for call in calls]
        assert any(isinstance(error, CallCycleError) for error in errors)
        assert all(error is None or isinstance(error, CallCycleError) for error in errors)

    @pytest.mark.parametrize("objects", [("one",), ("one", "other")])
    def test_an_object_that_waits_for_its_own_only_slot_fails(
        self, scene_of: SceneOf, objects: tuple[str, ...]
    ) -> None:
        scene = scene_of(one=Neighbour, other=Neighbour)
        scene.ready(1, *objects)
        error = scene.error(scene.engine.call(1, "one", "ask", "one", "give_back", 7))
        assert isinstance(error, CallCycleError)
        assert "one (worker 1) -> one (worker 1)" in str(error)
        assert scene.result(scene.engine.call(1, "one", "give_back", 7)) == 7

    def test_a_cycle_of_calls_within_a_process_fails(self, scene_of: SceneOf) -> None:
        scene = scene_of(one=Neighbour, other=Neighbour)
        scene.ready(1, "one", "other")
        error = scene.error(scene.engine.call(1, "one", "ask", "other", "ask", "one", "give_back", 7))
        assert isinstance(error, CallCycleError)
        assert "other (worker 1) -> one (worker 1) -> other (worker 1)" in str(error)

    def test_long_waits_that_end_are_no_cycles(self, scene_of: SceneOf) -> None:
        """With a free slot, behind other work, and if the called object makes a call and does not wait for it."""
        scene = scene_of(one=Neighbour, other=Neighbour, third=AsyncNeighbour)
        scene.ready(1, "one")
        scene.ready(2, "other", "third", slots=2)
        call = scene.engine.call
        back = ("ask_worker", 2, "other", "linger", SEVERAL_CHECKS_S)
        assert scene.result(call(2, "other", "ask_worker", 1, "one", *back)) is None
        assert scene.result(call(1, "one", "ask_worker", 2, "other", "tell", 1, "one", "give_back", 7)) is None
        assert scene.result(call(1, "one", "ask_worker", 2, "third", "linger", SEVERAL_CHECKS_S)) is None
        busy = call(1, "one", "linger", SEVERAL_CHECKS_S)
        assert scene.result(call(2, "other", "ask_worker", 1, "one", "give_back", 7)) == 7
        assert scene.result(busy) is None
