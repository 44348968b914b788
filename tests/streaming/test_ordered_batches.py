"""Ordered batches: a batch contains neighbouring items of the source."""

from __future__ import annotations

import pytest

import dovetail as dt
from dovetail.control.payload import Segment
from dovetail.scheduling.stage_rates import Profile
from dovetail.streaming.controller import StreamController
from dovetail.streaming.partial_batches import warn_of_partial_batches
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


def planned_warnings(
    stages: list[dt.Stage], *, mode: str = "streaming", durable: bool = True, profiles: dict[str, Profile] | None = None
) -> list[str]:
    pipeline = dt.Pipeline(stages)
    plan = dt.plan(pipeline, SMALL, mode=mode, profiles=profiles)
    warned = warn_of_partial_batches(plan, pipeline, ["ordered"], durable=durable)
    assert warn_of_partial_batches(warned, pipeline, ["ordered"], durable=durable) == warned, (
        "the warning is printed once"
    )
    assert warn_of_partial_batches(plan, pipeline, [], durable=durable) == plan, "without order, batches are full"
    return [warning for warning in warned.warnings if warning not in plan.warnings]


@pytest.mark.parametrize(
    ("stages", "warned"),
    [
        ([stage("keep", returns=0.5), stage("batch", batch_size=4)], "batch"),
        ([stage("keep", returns=None), stage("batch", batch_size=4)], "batch"),
        ([stage("keep", returns=1), stage("batch", batch_size=4)], ""),
        ([stage("keep", returns=0.5), stage("batch")], ""),
        ([stage("batch", batch_size=4)], ""),
        ([stage("four", batch_size=4, returns=1), stage("eight", batch_size=8)], ""),
        ([stage("four", batch_size=4, returns=1), stage("ten", batch_size=10)], "four"),
        (
            [stage("keep", returns=2), *(stage(name, batch_size=4, returns=1) for name in "abcdef")],
            "a, b, c, d and 2 more",
        ),
        ([stage("keep", returns=0.5), stage("all", batch_size=4, barrier=True)], ""),
        ([stage("keep", returns=0.5), stage("all", barrier=True, returns=1), stage("batch", batch_size=4)], ""),
    ],
)
def test_a_plan_names_the_stages_whose_batches_end_with_their_epoch(stages: list[dt.Stage], warned: str) -> None:
    found = planned_warnings(stages)
    assert len(found) == bool(warned)
    assert all(
        f"may be smaller than batch_size in {warned}; for full batches: --set ordered=false" in one for one in found
    )


def test_a_stage_that_never_changed_the_number_of_items_needs_no_warning() -> None:
    stages = [stage("keep", rate=None, returns=None), stage("batch", rate=None, batch_size=4)]
    assert not planned_warnings(stages, profiles={"keep": Profile(5.0, returns=1.0), "batch": Profile(5.0)})
    assert planned_warnings(stages, profiles={"keep": Profile(5.0, returns=0.9), "batch": Profile(5.0)})


def test_a_stage_that_asks_for_batches_that_end_with_epochs_needs_no_warning() -> None:
    assert not planned_warnings([stage("keep", returns=0.5), stage("batch", batch_size=4, partial_batches="epoch")])


def test_items_that_waited_for_a_wave_fill_their_batches() -> None:
    assert not planned_warnings([stage("keep", returns=0.5), stage("batch", batch_size=4)], mode="sequential")


def test_a_function_that_is_called_with_items_needs_no_full_batch() -> None:
    each = dt.Stage("each", dt.each(str), batch_size=4, fuse=False)
    assert not planned_warnings([stage("keep", returns=0.5), each])


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (1000.0, "(about 1.0 s of input, which a resume repeats)"),
        (2.0, "(about 8.0 s of input, which a resume repeats)"),
        (None, "(about 1.0 s of input, or some batches if those take longer, which a resume repeats)"),
    ],
)
def test_the_warning_says_how_much_a_resume_repeats_as_far_as_it_is_known(rate: float | None, expected: str) -> None:
    stages = [stage("keep", rate=5000.0, returns=0.5), stage("batch", rate=rate, batch_size=4, workers=1)]
    assert expected in planned_warnings(stages)[0]
    assert "resume" not in planned_warnings(stages, durable=False)[0]


@pytest.mark.parametrize("rate", [100.0, None])
def test_an_epoch_that_ends_earlier_than_intended_still_ends_with_full_batches(rate: float | None) -> None:
    pipeline = dt.Pipeline([stage("read", rate=rate), stage("batch", rate=rate, batch_size=4)])
    plan = dt.plan(pipeline, SMALL, mode="streaming")
    stream = StreamController(unit_specs(pipeline, plan), plan, StreamOptions(ordered=True))
    stream.step(0.0, [])
    size = stream.feeder.epoch_size
    assert [size.target_items(0, filled_items=1000 + more) for more in (0, 1, 4)] == [1000, 1004, 1004]
