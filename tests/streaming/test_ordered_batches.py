"""Ordered batches: a batch contains neighbouring items of the source."""

from __future__ import annotations

import pytest

import dovetail as dt
from dovetail.control.payload import Segment
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs
from streaming.harness import SMALL, stage


@pytest.mark.parametrize("in_order", [True, False])
def test_results_in_another_order_are_sorted_before_they_are_batched(in_order: bool) -> None:
    pipeline = dt.Pipeline([stage("read"), stage("batch", batch_size=4)])
    plan = dt.plan(pipeline, SMALL, mode="streaming")
    stream = StreamController(unit_specs(pipeline, plan), plan, StreamOptions(ordered_batches=in_order))
    stream.step(0.0, [])
    read, batch = stream.state.units
    epoch = stream.feeder.open_epoch(0)
    sources = [Segment(number, 4, first=(4 * number,)) for number in range(3)]
    for segment in sources:
        stream.feeder.add_input(epoch, "", (segment, 0, 4))
    read.queue.remove_epoch(epoch.id)
    for number in (2, 0, 1):  # the order in which three workers finish
        stream.epoch_tracker.route(read, epoch, [Segment(10 + number, 4)], (sources[number], 0, 4))
    waiting = batch.queue.by_epoch.get(epoch.id)
    assert (waiting is None) == in_order, "it waits until all of it is there"
    epoch.pending[read.index] = 0
    stream.epoch_tracker.close_epoch(epoch)
    order = [segment.id for segment, _, _ in batch.queue.by_epoch[epoch.id].parts]
    assert order == ([10, 11, 12] if in_order else [12, 10, 11])
    assert not epoch.unsorted
