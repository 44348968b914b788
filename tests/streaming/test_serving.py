"""When does somebody who waits for one item hear of it, beside by its result?"""

from __future__ import annotations

from dovetail.control.commands import Deliver, RunBatches
from dovetail.control.events import BatchesDone, CallFailure, ItemsArrived
from dovetail.streaming.settings import StreamOptions
from streaming.rigs import Hand, of_kind, stage

SERVING = StreamOptions(
    serving=True, eager=True, target_epoch_s=5.0, max_wait_s=0.2, replan=False, payloads_survive=True
)


def hand_of(batch_size: int = 1, options: StreamOptions = SERVING, workers: int = 1) -> Hand:
    stages = [stage("a", batch_size=batch_size, workers=workers, retries=1, on_error="skip")]
    hand = Hand.of(stages, options=options)
    hand.begin()
    return hand


def test_an_item_that_fails_is_told_before_its_epoch_ends_and_only_once() -> None:
    hand = hand_of()
    (first,) = of_kind(hand.items(1), RunBatches)
    hand.step(ItemsArrived(1, [hand.segment(1)]))
    failed = BatchesDone(first.worker, first.message, [], 0.01, [CallFailure(0, 1, "ValueError: no", keys=((0,),))])
    said = hand.step(failed, after=0.01)
    (told,) = of_kind(said, Deliver)
    assert [(aside.key, aside.error) for aside in told.failed_items] == [((0,), "ValueError: no")]
    assert told.first == told.last, "its epoch is still open: the other item is at work"
    (second,) = of_kind(said, RunBatches)
    ended = of_kind(hand.done(second), Deliver)[-1]
    assert (ended.first, ended.last, ended.failed_items) == (0, 2, [])


def test_without_serving_it_is_told_with_its_epoch() -> None:
    hand = hand_of(options=StreamOptions(replan=False))
    (message,) = of_kind(hand.items(1), RunBatches)
    done = BatchesDone(message.worker, message.message, [], 0.01, [CallFailure(0, 1, "ValueError: no", keys=((0,),))])
    assert not of_kind(hand.step(done, after=0.01), Deliver)


def test_what_was_dropped_is_known_at_once_if_nothing_else_is_there() -> None:
    hand = hand_of()
    (message,) = of_kind(hand.items(1), RunBatches)
    (ended,) = of_kind(hand.done(message, out=0), Deliver)
    assert (ended.first, ended.last) == (0, 1)
    assert not hand.stream.state.epochs


def test_what_was_dropped_is_known_after_the_longest_wait_while_others_come_and_nobody_is_busy() -> None:
    hand = hand_of(workers=2)
    (first,) = of_kind(hand.items(1), RunBatches)
    (second,) = of_kind(hand.step(ItemsArrived(1, [hand.segment(1)])), RunBatches)
    assert not of_kind(hand.done(first, out=0), Deliver)
    hand.step(after=0.2)
    (third,) = of_kind(hand.step(ItemsArrived(2, [hand.segment(1)])), RunBatches)
    (ended,) = of_kind(hand.done(second, out=0), Deliver)
    assert (ended.first, ended.last) == (0, 2), "what came later is in another epoch"
    (ended,) = of_kind(hand.done(third, out=0), Deliver)
    assert (ended.first, ended.last) == (2, 3)


def test_an_epoch_stays_open_while_its_items_wait_for_workers_that_are_busy() -> None:
    """A batch of four takes long; what comes meanwhile becomes a full batch, however old the epoch is by then."""
    hand = hand_of(batch_size=4)
    (first,) = of_kind(hand.items(4), RunBatches)
    assert not of_kind(hand.step(ItemsArrived(4, [hand.segment(2)])), RunBatches)
    for _ in range(50):
        assert not of_kind(hand.step(after=0.2), RunBatches), "the worker is busy"
    hand.step(ItemsArrived(6, [hand.segment(2)]))
    assert len(hand.stream.state.epochs) == 1, "ten seconds, and still one epoch"
    (second,) = of_kind(hand.done(first), RunBatches)
    assert second.items == 4
    ended = of_kind(hand.done(second), Deliver)[-1]
    assert (ended.first, ended.last) == (0, 8)
