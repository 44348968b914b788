"""Out of memory: smaller batches and larger workers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import pytest

import dovetail as dt
from dovetail.control.commands import RunBatches, StartWorker
from dovetail.control.events import BatchesDone, CallFailure, ItemsArrived, WorkerReady
from dovetail.control.lifecycle import RunState
from dovetail.control.payload import Segment
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, OutOfMemory
from dovetail.streaming.dispatch import _dispatch_suspects
from dovetail.streaming.settings import StreamOptions
from dovetail.streaming.worker_pool import Suspect
from streaming.harness import ManualStream, SimulatedRun, numbers, of_kind, simulate_stages, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import ItemOutcome, Key

GB = 1 << 30
How = Literal["death", "raise"]
BOTH: list[How] = ["death", "raise"]


def one_gb(**settings: object) -> dt.Stage:
    return stage("a", resources=dt.Resources(cpus=1, memory="1GB"), **settings)


def memory_of_workers(rig: SimulatedRun) -> list[int]:
    return [start.seats[0].memory_bytes for _, start in rig.starts("a")]


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize(("batch", "fits", "ends"), [(16, 5, 4), (16, 8, 8), (7, 1, 1), (16, 16, 16)])
def test_half_batches_succeed_and_become_the_batch_size(how: How, batch: int, fits: int, ends: int) -> None:
    rig = simulate_stages([stage("a", batch_size=batch)], {"a": Behaviour(0.1, memory_items=fits, oom=how)}, 400)
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.out("a") == numbers(400)
    assert rig.stream.state.units[0].batch_size == ends
    assert not rig.data.failed_items
    notes = rig.notes("out of memory with")
    assert bool(notes) == (fits < batch)
    if notes:
        assert notes[-1].data["batch_size"] == ends
    late = rig.messages("a")[-5:]
    assert all(message.batch_size <= ends for message in late)


@pytest.mark.parametrize("how", BOTH)
def test_halving_does_not_count_as_an_attempt(how: How) -> None:
    """Four halvings with two retries: no item fails because of them."""
    rig = simulate_stages(
        [stage("a", batch_size=16, retries=2, on_error="skip")], {"a": Behaviour(0.1, memory_items=1, oom=how)}, 64
    )
    assert rig.out("a") == numbers(64)


@pytest.mark.parametrize(("memory_bytes", "reserved"), [(0, True), (GB, True), (4 * GB, False)])
def test_only_a_worker_that_is_large_enough_is_reserved_for_an_item(memory_bytes: int, reserved: bool) -> None:
    manual = ManualStream.of([one_gb(workers=1, batch_size=1)])
    manual.begin()
    unit = manual.stream.state.units[0]
    unit.pool.set_max_messages(2)
    (message,) = of_kind(manual.items(1), RunBatches)
    epoch = next(iter(manual.stream.state.epochs.values()))
    unit.add_suspects([Suspect(epoch, message.parts, 1, 1, 1, memory_bytes=memory_bytes)])
    _dispatch_suspects(manual.stream.state, unit)
    assert (unit.quarantine_worker is not None) == reserved


def large_one(key: Key, _attempt: int) -> ItemOutcome:
    return OutOfMemory() if key == (5,) else Gives()


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("replan", [True, False])
def test_a_single_item_gets_a_worker_with_the_measured_memory_and_then_fails(how: How, replan: bool) -> None:
    rig = simulate_stages(
        [one_gb(on_error="skip")],
        {"a": Behaviour(0.5, item=large_one, oom=how, peak_bytes=4 * GB)},
        60,
        options=StreamOptions(replan=replan),
        limit_s=500,
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.failed() == Counter([(5,)])
    assert rig.out("a") == numbers(60) - rig.failed()
    tried_by = [
        next(s.seats[0].memory_bytes for _, s in rig.starts("a") if s.worker == message.worker)
        for message in rig.messages("a")
        if (5,) in part_keys(message.parts)
    ]
    assert tried_by[0] == GB
    assert tried_by[-1] == 5 * GB, "what was measured, and a quarter more"
    assert rig.notes("a single item ran out of memory with 1GB; retrying it with 5GB")


def test_a_memory_increase_that_helps_is_kept() -> None:
    """The item succeeds on a larger worker, and all later workers have that size."""

    def first_times(key: Key, attempt: int) -> ItemOutcome:
        return OutOfMemory() if key == (5,) and attempt < 3 else Gives()

    rig = simulate_stages([one_gb()], {"a": Behaviour(0.5, item=first_times, peak_bytes=4 * GB)}, 60)
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.out("a") == numbers(60)
    assert rig.stream.state.units[0].shape.memory_bytes == 5 * GB


def test_a_memory_increase_that_does_not_help_is_undone() -> None:
    rig = simulate_stages([one_gb(on_error="skip")], {"a": Behaviour(0.5, item=large_one, peak_bytes=4 * GB)}, 60)
    assert rig.stream.state.units[0].shape.memory_bytes == GB
    assert rig.notes("more memory did not help")


@pytest.mark.parametrize("how", BOTH)
def test_a_worker_is_not_made_larger_than_any_node(how: How) -> None:
    rig = simulate_stages(
        [one_gb(on_error="skip")],
        {"a": Behaviour(0.5, item=large_one, oom=how, peak_bytes=60 * GB)},
        60,
        limit_s=500,
    )
    assert rig.run_state is RunState.FINISHED
    assert set(memory_of_workers(rig)) == {GB}
    assert rig.failed() == Counter([(5,)])


def test_without_a_measurement_the_requested_memory_is_doubled() -> None:
    rig = simulate_stages(
        [one_gb(on_error="skip")], {"a": Behaviour(0.5, item=large_one, oom="raise")}, 60, limit_s=500
    )
    assert rig.failed() == Counter([(5,)])
    assert 2 * GB in memory_of_workers(rig)


def test_other_items_continue_while_one_waits_for_a_larger_worker() -> None:
    """On a full node, other workers must stop before the larger worker can start."""
    rig = simulate_stages(
        [one_gb(on_error="skip")],
        {"a": Behaviour(0.5, item=large_one, peak_bytes=6 * GB)},
        100,
        cluster="1x(8cpu, 8GB)",
        limit_s=500,
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.out("a") == numbers(100) - Counter([(5,)])


def test_on_error_fail_names_memory() -> None:
    rig = simulate_stages([one_gb()], {"a": Behaviour(0.5, item=large_one)}, 60)
    assert rig.run_state is RunState.FAILED
    assert "out of memory" in rig.error


def test_one_item_out_of_memory_does_not_reduce_the_batch_size_permanently() -> None:
    def item(key: Key, attempt: int) -> Any:
        return OutOfMemory() if key == (777,) else Gives(1)

    rig = simulate_stages([stage("a", batch_size=16, on_error="skip")], {"a": Behaviour(0.1, item=item)}, 2000)
    assert rig.stream.state.units_by_name["a"].batch_size == 16
    assert set(rig.failed()) == {(777,)}


def test_a_reduced_batch_size_grows_again() -> None:
    def item(key: Key, attempt: int) -> Any:
        return OutOfMemory() if key[0] < 32 and attempt == 1 else Gives(1)

    rig = simulate_stages([stage("a", batch_size=16, workers=2)], {"a": Behaviour(0.02, item=item)}, 20_000)
    assert rig.notes("out of memory with 16 items per batch")
    assert rig.notes("batch size raised to 16")
    assert rig.out("a") == numbers(20_000)


def test_gpu_memory_errors_do_not_raise_the_host_memory_of_workers() -> None:
    needs = dt.Resources(gpus=0.25, cpus=1, memory="2GB")
    manual = ManualStream.of(
        [stage("a", resources=needs, workers=1, on_error="skip")], cluster="1x(8cpu, 32GB, 1xL40S:48GB)"
    )
    (start,) = of_kind(manual.step(), StartWorker)
    commands = manual.step(WorkerReady(start.worker, 1.0), ItemsArrived(0, [Segment(1, 1)]), after=1.0)
    (message,) = of_kind(commands, RunBatches)
    failure = CallFailure(0, 1, "OutOfMemoryError: CUDA out of memory", out_of_memory=True, on_gpu=True)
    before = manual.stream.state.all_units[0].shape
    manual.step(BatchesDone(start.worker, message.message, [], 0.1, [failure], peak_bytes=1 << 34), after=1.0)
    assert manual.stream.state.all_units[0].shape == before
