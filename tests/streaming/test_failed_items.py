"""Failed items in a run: suspects, retries, skipping and the error budget."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from dovetail.control.commands import Deliver, RunBatches, StopWorker
from dovetail.control.events import BatchesDone, Breadcrumb, CallFailure, LossCause, WorkerLost, WorkerReady
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, Kills, Raises
from dovetail.streaming.settings import StreamOptions
from streaming.harness import (
    ManualStream,
    SimulatedRun,
    assert_no_idle_worker,
    numbers,
    of_kind,
    simulate_stages,
    stage,
)

if TYPE_CHECKING:
    from dovetail.control.commands import Command
    from dovetail.engines.simulated.world import ItemOutcome, Key

STEADY = StreamOptions(replan=False, follow_plan=True)
BAD = (5,)


def bad_one(outcome: ItemOutcome, times: int = 99) -> Behaviour:
    def item(key: Key, attempt: int) -> ItemOutcome:
        return outcome if key == BAD and attempt <= times else Gives()

    return Behaviour(0.1, item=item)


def messages_with(rig: SimulatedRun, key: Key) -> list[tuple[int, int]]:
    """Items and items per call of every message that contains this item."""
    return [(m.items, m.batch_size) for m in rig.messages("a") if key in part_keys(m.parts)]


@pytest.mark.parametrize("outcome", [Raises(), Kills()], ids=["raises", "kills"])
@pytest.mark.parametrize(
    ("retries", "expected", "attempts"),
    [
        (0, [(4, 4)], 1),
        (1, [(4, 4), (4, 1), (1, 1)], 2),
        (2, [(4, 4), (4, 1), (1, 1)], 3),
        (3, [(4, 4), (4, 4), (4, 1), (1, 1)], 4),
    ],
)
def test_a_failed_batch_runs_alone_then_item_by_item_then_its_items_fail(
    outcome: ItemOutcome, retries: int, expected: list[tuple[int, int]], attempts: int
) -> None:
    rig = simulate_stages(
        [stage("a", batch_size=4, workers=2, retries=retries, on_error="skip")],
        {"a": bad_one(outcome)},
        40,
        options=STEADY,
    )
    assert rig.run_state is RunState.FINISHED
    assert messages_with(rig, BAD) == expected
    innocent = {(4,), (6,), (7,)} if not retries else set()
    assert rig.failed() == Counter([BAD, *innocent])
    assert {record.attempts for record in rig.data.failed_items} == {attempts}
    assert rig.out("a") == numbers(40) - rig.failed()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("outcome", [Raises(), Kills()], ids=["raises", "kills"])
def test_an_item_that_fails_once_is_delivered(outcome: ItemOutcome, times: int) -> None:
    rig = simulate_stages([stage("a", batch_size=4)], {"a": bad_one(outcome, times)}, 40)
    assert rig.run_state is RunState.FINISHED
    assert rig.out("a") == numbers(40)
    assert not rig.data.failed_items


def a_message(batch_size: int = 4, items: int = 12, **settings: object) -> tuple[ManualStream, RunBatches]:
    """A worker with one message of several batches."""
    manual = ManualStream.of([stage("a", batch_size=batch_size, workers=1, on_error="skip", **settings)])
    manual.begin()
    manual.stream.state.units[0].message_items = items
    sent = of_kind(manual.items(items, ends=True), RunBatches)
    assert [message.items for message in sent] == [items]
    return manual, sent[0]


def next_worker(manual: ManualStream, commands: list[Command]) -> list[Command]:
    """Report the worker that replaces the dead one as ready."""
    started = [command for command in commands if type(command).__name__ == "StartWorker"]
    assert len(started) == 1
    return manual.step(WorkerReady(started[0].worker, 1.0))  # type: ignore[union-attr]


def places(message: RunBatches) -> list[int]:
    return [number for _, start, stop in message.parts for number in range(start, stop)]


def test_a_breadcrumb_makes_one_batch_the_suspect_and_requeues_the_others() -> None:
    manual, message = a_message()
    died = manual.step(WorkerLost(message.worker, LossCause.SIGNAL, "signal 9", (Breadcrumb(message.message, 5),)))
    first = of_kind(next_worker(manual, died), RunBatches)
    assert [(places(m), m.batch_size) for m in first] == [([4, 5, 6, 7], 4)], "the suspect, alone"
    unit = manual.stream.state.units[0]
    assert unit.queue.items == 8
    then = of_kind(manual.done(first[0]), RunBatches)
    assert sorted(places(then[0])) == [0, 1, 2, 3, 8, 9, 10, 11]
    died = manual.step(WorkerLost(then[0].worker, LossCause.SIGNAL, "signal 9", (Breadcrumb(then[0].message, 0),)))
    again = of_kind(next_worker(manual, died), RunBatches)
    assert again[0].batch_size == 4, "its first charge: the first death did not count for it"


def test_an_inexact_breadcrumb_makes_the_whole_message_the_suspect() -> None:
    manual, message = a_message()
    died = manual.step(WorkerLost(message.worker, LossCause.SIGNAL, "", (Breadcrumb(message.message, 0, exact=False),)))
    first = of_kind(next_worker(manual, died), RunBatches)
    suspects = manual.stream.state.units[0].suspects
    assert [places(m) for m in first] == [[0, 1, 2, 3]]
    assert [suspect.items for suspect in suspects] == [8]
    assert not manual.stream.state.units[0].queue.items


def test_without_a_breadcrumb_the_items_of_the_worker_are_halved() -> None:
    manual, message = a_message(batch_size=3, items=12)
    died = manual.step(WorkerLost(message.worker, LossCause.SIGNAL))
    first = of_kind(next_worker(manual, died), RunBatches)
    assert [places(m) for m in first] == [[0, 1, 2, 3, 4, 5]]
    died = manual.step(WorkerLost(first[0].worker, LossCause.SIGNAL))
    other = of_kind(next_worker(manual, died), RunBatches)
    assert [places(m) for m in other] == [[6, 7, 8, 9, 10, 11]], "the other half does not wait for its twin"


def test_a_call_that_raises_is_the_suspect_and_the_other_calls_of_the_message_count() -> None:
    manual, message = a_message()
    failure = CallFailure(4, 8, "ValueError: no")
    out = [manual.segment(8)]
    sent = of_kind(manual.step(BatchesDone(message.worker, message.message, out, 1.0, [failure])), RunBatches)
    assert [(places(m), m.batch_size) for m in sent] == [([4, 5, 6, 7], 4)]
    assert manual.stream.state.units[0].items_taken == 8


def test_a_breadcrumb_of_a_cancelled_message_that_had_begun_counts_as_an_attempt() -> None:
    """The message was cancelled too late: it was running and killed the worker."""
    manual, message = a_message(items=4)
    worker = manual.stream.state.workers[message.worker]
    worker.messages[message.message].cancelled = True
    manual.step(WorkerLost(message.worker, LossCause.SIGNAL, "", (Breadcrumb(message.message, 0),)))
    assert [suspect.deaths for suspect in manual.stream.state.units[0].suspects] == [1]


@pytest.mark.parametrize("outcome", [Raises("KeyError: 'url'"), Kills()], ids=["raises", "kills"])
def test_on_error_fail_fails_the_run_with_the_stage_and_its_error(outcome: ItemOutcome) -> None:
    rig = simulate_stages([stage("first"), stage("a", workers=3)], {"a": bad_one(outcome)}, 4000)
    assert rig.run_state is RunState.FAILED
    assert rig.error.startswith("a: item failed: ")
    assert ("KeyError: 'url'" if isinstance(outcome, Raises) else "signal") in rig.error
    assert all(not stop.drain for stop in rig.all(StopWorker)), "all workers are stopped now"
    assert rig.stream.state.error == rig.stream.view(0.0).error
    assert rig.stream.state.items_failed == 0, "the item that ends a run is not skipped"


@pytest.mark.parametrize("outcome", [Raises(), Kills()], ids=["raises", "kills"])
def test_an_epoch_in_which_the_run_failed_is_never_delivered(outcome: ItemOutcome) -> None:
    """Otherwise a resumed run would count the item as done."""
    rig = simulate_stages([stage("a", retries=0)], {"a": bad_one(outcome)}, 6)
    assert rig.run_state is RunState.FAILED
    delivered = [number for deliver in rig.data.log for number in range(deliver.first, deliver.last)]
    assert BAD[0] not in delivered
    fixed = simulate_stages([stage("a")], {"a": Behaviour(0.1)}, 6, resume=rig.data.log)
    assert rig.out("a") + fixed.out("a") == numbers(6)


def test_skip_records_the_item_and_the_reason() -> None:
    rig = simulate_stages([stage("a", on_error="skip")], {"a": bad_one(Raises("KeyError: 'url'"))}, 20)
    assert rig.run_state is RunState.FINISHED
    (record,) = rig.data.failed_items
    assert (record.unit, record.error, record.attempts) == ("a", "KeyError: 'url'", 4)
    assert part_keys([record.part]) == [BAD]
    assert record.key == BAD, "as the failure named it"
    assert rig.notes("failed: KeyError: 'url'")
    assert rig.stream.view(0.0).failed == 1


def test_items_of_a_batch_that_fails_as_a_whole_keep_their_keys() -> None:
    rig = simulate_stages([stage("a", batch_size=4, retries=0, on_error="skip")], {"a": bad_one(Raises())}, 20)
    failed = rig.data.failed_items
    assert [record.key for record in failed] == part_keys(record.part for record in failed)
    assert len(failed) == 4


def test_more_failed_items_than_allowed_fail_the_run() -> None:
    bad = Behaviour(0.1, item=lambda key, _: Raises() if key[0] % 10 == 0 else Gives())
    rig = simulate_stages(
        [stage("a", on_error="skip", retries=0)], {"a": bad}, 1000, options=StreamOptions(max_failed_items=3)
    )
    assert rig.run_state is RunState.FAILED
    assert "4 items failed, more than max_errors allows (3)" in rig.error
    fine = simulate_stages(
        [stage("a", on_error="skip", retries=0)], {"a": bad}, 30, options=StreamOptions(max_failed_items=3)
    )
    assert fine.run_state is RunState.FINISHED


def test_a_suspect_runs_alone_on_its_worker() -> None:
    """Three slots: a worker that runs a suspect has no other message."""
    rig = simulate_stages(
        [stage("a", batch_size=2, slots=3, workers=2, on_error="skip")],
        {"a": Behaviour(0.3, item=lambda key, n: Raises() if key[0] % 9 == 0 and n < 3 else Gives())},
        200,
        options=STEADY,
        after_step=_suspects_are_alone,
    )
    assert rig.out("a") == numbers(200)
    assert rig.stream.state.units[0].retries > 20


def _suspects_are_alone(stream: object) -> None:
    for worker in stream.state.workers.values():  # type: ignore[attr-defined]
        if any(message.suspect is not None for message in worker.messages.values()):
            assert len(worker.messages) == 1
    assert_no_idle_worker(stream)  # type: ignore[arg-type]


def test_a_suspect_does_not_wait_for_a_partial_batch() -> None:
    manual = ManualStream.of([stage("a", batch_size=4, workers=1)])
    manual.begin()
    sent = of_kind(manual.items(6), RunBatches)
    failed = BatchesDone(sent[0].worker, sent[0].message, [], 1.0, [CallFailure(0, 4, "ValueError: no")])
    assert [message.items for message in of_kind(manual.step(failed), RunBatches)] == [4]
    assert manual.stream.state.units[0].queue.items == 2


def test_an_epoch_is_delivered_with_its_failed_items() -> None:
    rig = simulate_stages(
        [stage("a", on_error="skip")],
        {"a": bad_one(Raises())},
        60,
        options=StreamOptions(target_epoch_batches=3, target_epoch_s=0.01),
        source={"segment_items": 4},
    )
    for deliver in rig.all(Deliver):
        asides = part_keys(record.part for record in deliver.failed_items)
        assert all(deliver.first <= key[0] < deliver.last for key in asides)
        out = sum(segment.items for segments in deliver.outputs.values() for segment in segments)
        assert out + len(asides) == deliver.last - deliver.first


def test_a_percentage_of_failed_items_refers_to_the_items_read() -> None:
    bad = Behaviour(0.1, item=lambda key, _: Raises() if key[0] % 50 == 0 else Gives())
    for share, items, fails in ((0.01, 3000, True), (0.05, 3000, False), (0.01, 60, True), (0.04, 60, False)):
        rig = simulate_stages(
            [stage("a", on_error="skip", retries=0)],
            {"a": bad},
            items,
            options=StreamOptions(max_failed_items=share),
        )
        assert (rig.run_state is RunState.FAILED) is fails, (share, items, rig.error)
        assert ("more than max_errors allows (1% of" in rig.error) is fails
