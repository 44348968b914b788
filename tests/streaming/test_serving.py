"""Serving: when failed and dropped items are reported."""

from __future__ import annotations

from dovetail.control.commands import Deliver, RunBatches
from dovetail.control.events import BatchesDone, CallFailure, ItemsArrived
from dovetail.streaming.settings import StreamOptions
from streaming.harness import ManualStream, of_kind, stage

SERVING = StreamOptions(
    serving=True, eager=True, target_epoch_s=5.0, max_wait_s=0.2, replan=False, payloads_survive=True
)


def hand_of(batch_size: int = 1, options: StreamOptions = SERVING, workers: int = 1) -> ManualStream:
    stages = [stage("a", batch_size=batch_size, workers=workers, retries=0, on_error="skip")]
    manual = ManualStream.of(stages, options=options)
    manual.begin()
    return manual


def test_a_failed_item_is_reported_before_its_epoch_ends_and_only_once() -> None:
    manual = hand_of()
    (first,) = of_kind(manual.items(1), RunBatches)
    manual.step(ItemsArrived(1, [manual.segment(1)]))
    failed = BatchesDone(first.worker, first.message, [], 0.01, [CallFailure(0, 1, "ValueError: no", keys=((0,),))])
    commands = manual.step(failed, after=0.01)
    (report,) = of_kind(commands, Deliver)
    assert [(aside.key, aside.error) for aside in report.failed_items] == [((0,), "ValueError: no")]
    assert report.first == report.last, "its epoch is still open: the other item is at work"
    (second,) = of_kind(commands, RunBatches)
    ended = of_kind(manual.done(second), Deliver)[-1]
    assert (ended.first, ended.last, ended.failed_items) == (0, 2, [])


def test_without_serving_a_failed_item_is_reported_with_its_epoch() -> None:
    stages = [stage("a", workers=1, retries=1, on_error="skip", rate=100.0)]
    manual = ManualStream.of(stages, options=StreamOptions(replan=False))
    manual.begin()
    (message,) = of_kind(manual.items(1), RunBatches)
    done = BatchesDone(message.worker, message.message, [], 0.01, [CallFailure(0, 1, "ValueError: no", keys=((0,),))])
    assert not of_kind(manual.step(done, after=0.01), Deliver)


def test_a_dropped_item_is_reported_immediately_if_no_other_item_is_open() -> None:
    manual = hand_of()
    (message,) = of_kind(manual.items(1), RunBatches)
    (ended,) = of_kind(manual.done(message, out=0), Deliver)
    assert (ended.first, ended.last) == (0, 1)
    assert not manual.stream.state.epochs


def test_a_dropped_item_is_reported_after_max_wait_while_other_items_arrive() -> None:
    manual = hand_of(workers=2)
    (first,) = of_kind(manual.items(1), RunBatches)
    (second,) = of_kind(manual.step(ItemsArrived(1, [manual.segment(1)])), RunBatches)
    assert not of_kind(manual.done(first, out=0), Deliver)
    manual.step(after=0.2)
    (third,) = of_kind(manual.step(ItemsArrived(2, [manual.segment(1)])), RunBatches)
    (ended,) = of_kind(manual.done(second, out=0), Deliver)
    assert (ended.first, ended.last) == (0, 2), "what came later is in another epoch"
    (ended,) = of_kind(manual.done(third, out=0), Deliver)
    assert (ended.first, ended.last) == (2, 3)


def test_an_epoch_stays_open_while_its_items_wait_for_busy_workers() -> None:
    """Items that arrive during a long batch of four become a full batch, at any age of the epoch."""
    manual = hand_of(batch_size=4)
    (first,) = of_kind(manual.items(4), RunBatches)
    assert not of_kind(manual.step(ItemsArrived(4, [manual.segment(2)])), RunBatches)
    for _ in range(50):
        assert not of_kind(manual.step(after=0.2), RunBatches), "the worker is busy"
    manual.step(ItemsArrived(6, [manual.segment(2)]))
    assert len(manual.stream.state.epochs) == 1, "ten seconds, and still one epoch"
    (second,) = of_kind(manual.done(first), RunBatches)
    assert second.items == 4
    ended = of_kind(manual.done(second), Deliver)[-1]
    assert (ended.first, ended.last) == (0, 8)
