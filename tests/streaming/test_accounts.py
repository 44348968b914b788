"""Whatever happens: do all counters agree with what is there, after every step?"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.control.lifecycle import WorkerState
from dovetail.control.loop import run_loop
from dovetail.engines.simulated.data import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import unit_specs
from streaming.rigs import Log, nobody_idles
from streaming.worlds import a_case


def accounts_agree(stream: StreamController) -> None:
    board = stream.state
    for lane in board.units:
        messages = [message for worker in lane.workers.values() for message in worker.messages.values()]
        assert lane.items_in_flight == sum(message.items for message in messages)
        on_the_way = [
            m for parent in lane.parents for worker in parent.workers.values() for m in worker.messages.values()
        ]
        assert lane.incoming_messages == len(on_the_way)
        assert lane.incoming_bytes == sum(message.expected_bytes for message in on_the_way)
        ready = [worker for worker in lane.workers.values() if worker.state is WorkerState.READY]
        can = [worker for worker in ready if not worker.exclusive and len(worker.messages) < lane.pool.max_messages]
        assert lane.pool.free_count == len(can)
        assert lane.quarantine_worker is None or lane.quarantine_worker.exclusive
        there: Counter[int] = Counter({number: q.items for number, q in lane.queue.by_epoch.items()})
        for message in messages:
            there[message.epoch.id] += 0 if message.epoch.discarded else message.items
        for suspect in lane.suspects:
            there[suspect.epoch.id] += suspect.items
        for epoch in board.epochs.values():
            there[epoch.id] += sum(segment.items for _, segment in epoch.unsorted.get(lane.index, ()))
        if not board.is_ending:
            pending = {epoch.id: epoch.pending[lane.index] for epoch in board.epochs.values()}
            assert +there == +Counter(pending)
            assert lane.queue.by_epoch.keys() <= board.epochs.keys()
    for lane in board.all_units:
        if lane.spec.wave < board.wave:
            assert not lane.queue.items
            assert not lane.suspects
    nobody_idles(stream)


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 10**9))
def test_counters_agree_with_what_is_there_after_every_step(seed: int) -> None:
    case = a_case(seed)
    engine = SimulatedEngine(case.world, case.cluster, limit_s=500_000)
    stream = StreamController(unit_specs(case.pipeline, case.plan), case.plan, case.options)
    dropped = run_loop(stream, engine, SimulatedData(engine, case.items), [Log(stream, accounts_agree)])
    if dropped:
        raise dropped[0][1]
    assert not stream.state.epochs
    assert not stream.epoch_tracker.undelivered
    assert all(lane.is_empty for lane in stream.state.all_units)
