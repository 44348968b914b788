"""Counters of the controller against queues, messages and workers, after every step of random runs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.control.lifecycle import WorkerState
from dovetail.control.loop import run_loop
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import unit_specs
from streaming.harness import StepLog, assert_no_idle_worker
from streaming.random_runs import random_case


def assert_counters_agree(stream: StreamController) -> None:
    state = stream.state
    for unit in state.units:
        messages = [message for worker in unit.workers.values() for message in worker.messages.values()]
        assert unit.items_in_flight == sum(message.items for message in messages)
        report_workers_lost_with = [
            m for parent in unit.parents for worker in parent.workers.values() for m in worker.messages.values()
        ]
        assert unit.incoming_messages == len(report_workers_lost_with)
        assert unit.incoming_bytes == sum(message.expected_bytes for message in report_workers_lost_with)
        ready = [worker for worker in unit.workers.values() if worker.state is WorkerState.READY]
        free = [worker for worker in ready if not (worker.exclusive or worker.paused)]
        can = [worker for worker in free if len(worker.messages) < unit.pool.max_messages]
        assert unit.pool.free_count == len(can)
        assert unit.quarantine_worker is None or unit.quarantine_worker.exclusive
        there: Counter[int] = Counter({number: q.items for number, q in unit.queue.by_epoch.items()})
        for message in messages:
            for _, part in message.by_epoch():
                there[part.epoch.id] += 0 if part.epoch.discarded else part.items
        for suspect in unit.waiting_suspects():
            there[suspect.epoch.id] += suspect.items
        for epoch in state.epochs.values():
            there[epoch.id] += sum(segment.items for _, segment in epoch.unsorted.get(unit.index, ()))
        if not state.is_ending:
            pending = {epoch.id: epoch.pending[unit.index] for epoch in state.epochs.values()}
            assert +there == +Counter(pending)
            assert unit.queue.by_epoch.keys() <= state.epochs.keys()
    for unit in state.all_units:
        if unit.spec.wave < state.wave:
            assert not unit.queue.items
            assert not list(unit.waiting_suspects())
    assert_no_idle_worker(stream)


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 10**9))
def test_counters_agree_with_queues_and_messages_after_every_step(seed: int) -> None:
    case = random_case(seed)
    engine = SimulatedEngine(case.world, case.cluster, limit_s=500_000)
    stream = StreamController(unit_specs(case.pipeline, case.plan), case.plan, case.options)
    dropped = run_loop(stream, engine, SimulatedData(engine, case.items), [StepLog(stream, assert_counters_agree)])
    if dropped:
        raise dropped[0][1]
    assert not stream.state.epochs
    assert not stream.epoch_tracker.undelivered
    assert all(unit.is_empty and unit.failures.trial is None for unit in stream.state.all_units)
    assert not any(worker.paused for worker in stream.state.workers.values())
