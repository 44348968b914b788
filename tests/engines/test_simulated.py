"""Simulated engine: time, randomness, exact counts, determinism, cost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import count
from math import exp
from random import Random
from statistics import mean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.control.commands import HostedObject, RunBatches
from dovetail.control.events import BatchesDone, Drain, LossCause, NodeLeft, WorkerLost, WorkerReady
from dovetail.control.loop import run_loop
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.worker_model import mean_factor
from dovetail.engines.simulated.world import (
    Behaviour,
    Constant,
    Lognormal,
    PostEvent,
    ScriptedEvent,
    Trace,
    World,
    world_from_pipeline,
)
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage import Stage
from dovetail.resources.cluster import Cluster
from engines.naive_controller import NaiveController
from engines.simulated_scenes import HOUR_S, NODES, all_events, engine_of, message, start, the

# Time


def test_a_message_takes_its_hop_and_its_calls() -> None:
    engine = engine_of(Behaviour(0.5, seconds_per_batch=10), workers=1, hop_s=0.25)
    engine.submit([message(engine, 1, 0, 7, batch_size=3)])
    log = all_events(engine, 100)
    assert [(at, type(event)) for at, event in log] == [(0.25, WorkerReady), (0.5 + 3 * 10 + 7 * 0.5, BatchesDone)]
    assert the(BatchesDone, log)[0].seconds == 3 * 10 + 7 * 0.5


def test_messages_wait_for_a_free_slot() -> None:
    engine = engine_of(Behaviour(1.0))
    engine.submit([start(0, "node-0", slots=2), *(message(engine, number, 0, 1) for number in range(5))])
    assert [at for at, event in all_events(engine, 10) if isinstance(event, BatchesDone)] == [1, 1, 2, 2, 3]


def test_events_within_a_time_step_are_reported_together_and_counted_exactly() -> None:
    world = World({"a": Behaviour(1.0, spread=Trace((1.0, 1.0005, 1.002)))}, hop_s=0)
    engine = SimulatedEngine(world, NODES, grain_s=0.001)
    engine.submit([start(worker, "node-0") for worker in range(3)])
    assert len(engine.poll(None)) == 3
    engine.submit([message(engine, worker, worker, 1) for worker in range(3)])
    assert [event.message for event in engine.poll(None) if isinstance(event, BatchesDone)] == [0, 1]
    assert engine.now() == 1.0005
    engine.poll(None)
    assert engine.now() == 1.002


def test_poll_does_not_exceed_its_timeout_by_a_time_step() -> None:
    engine = engine_of(
        Behaviour(1.0),
        workers=1,
        script=(ScriptedEvent(2.0, PostEvent(Drain())), ScriptedEvent(2.0004, PostEvent(Drain()))),
    )
    engine.poll(None)
    assert engine.poll(1.5) == []
    assert engine.now() == 1.5
    assert len(engine.poll(0.5)) == 1
    assert engine.now() == 2.0


def test_a_run_that_would_hang_is_an_error_with_the_waiting_work() -> None:
    engine = engine_of(Behaviour(1.0), workers=2)
    engine.poll(None)
    with pytest.raises(AssertionError, match=r"hangs at 0.000 s; 4 nodes; a: 2 of 2 workers ready"):
        engine.poll(None)


def test_a_run_that_never_ends_is_an_error() -> None:
    engine = SimulatedEngine(World({}, script=(ScriptedEvent(11.0, PostEvent(Drain())),)), NODES, limit_s=10)
    with pytest.raises(AssertionError, match="the run has not ended after 10 s"):
        engine.poll(None)


def test_a_run_that_makes_no_progress_is_an_error() -> None:
    engine = SimulatedEngine(World({"a": Behaviour()}), NODES)

    def start_again_and_again() -> None:
        for worker in count():
            engine.submit([start(worker, "no such node")])
            engine.poll(None)

    with pytest.raises(AssertionError, match=r"no progress at 0.000 s; 4 nodes; a: 0 of 0 workers"):
        start_again_and_again()


def test_an_unknown_unit_is_an_error_with_its_name() -> None:
    engine = SimulatedEngine(World({"b": Behaviour()}), NODES)
    with pytest.raises(LookupError, match=r"has no behaviour for 'a', only for \['b'\]"):
        engine.submit([start(0, "node-0")])


# Randomness

BUSY = Behaviour(
    0.5,
    spread=Lognormal(0.8),
    returns=0.7,
    setup_s=(2.0, 0.5),
    setup_failures=0.3,
    deaths_per_hour=20,
    stragglers=(0.2, 3.0),
)


def busy_log(seed: int) -> str:
    engine = engine_of(BUSY, workers=20, seed=seed, node_losses_per_hour=30, breadcrumb_share=0.5, inexact_share=0.5)
    engine.submit([message(engine, number, number % 20, 40, batch_size=4) for number in range(100)])
    return "\n".join(f"{at!r} {event!r}" for at, event in all_events(engine, 300))


def test_the_same_world_gives_the_same_log_and_another_seed_a_different_one() -> None:
    assert busy_log(1) == busy_log(1)
    assert busy_log(1) != busy_log(2)
    assert {"NODE_LOST", "SIGNAL", "SETUP_FAILED"} <= {word for word in LossCause.__members__ if word in busy_log(1)}


def test_the_log_does_not_depend_on_the_hash_seed() -> None:
    code = "import hashlib; from engines.test_simulated import *; print(hashlib.md5(busy_log(1).encode()).hexdigest())"
    digests = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        digests.add(
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment).stdout
        )
    assert len(digests) == 1


@pytest.mark.parametrize("calls", [1, 16, 1000])
def test_lognormal_factors_have_mean_one_and_the_variance_of_a_mean(calls: int) -> None:
    draw = mean_factor(Lognormal(0.8), Random(1))
    factors = [draw(calls) for _ in range(20_000)]
    variance = (exp(0.64) - 1) / calls
    assert abs(mean(factors) - 1) < 5 * (variance / 20_000) ** 0.5
    assert abs(pvariance(factors) / variance - 1) < 0.25


@given(factors=st.lists(st.integers(1, 9), min_size=1, max_size=5), calls=st.lists(st.integers(1, 12), max_size=9))
def test_a_trace_is_replayed_call_by_call_and_repeated(factors: list[int], calls: list[int]) -> None:
    draw = mean_factor(Trace(tuple(map(float, factors))), Random(1))
    place = 0
    for n in calls:
        expected = sum(factors[(place + i) % len(factors)] for i in range(n)) / n
        assert draw(n) == pytest.approx(expected)
        place += n


def test_constant_durations_do_not_vary() -> None:
    assert mean_factor(Constant(), Random(1))(7) == 1.0


@given(
    returns=st.one_of(st.integers(0, 300).map(lambda n: n / 100), st.sampled_from([1 / 3, 2 / 3, 1 / 7])),
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=20),
)
def test_the_total_number_of_results_is_exact(returns: float, sizes: list[int]) -> None:
    engine = engine_of(Behaviour(0.01, returns=returns, bytes_out=3), workers=3)
    engine.submit([message(engine, number, number % 3, size, cut=64) for number, size in enumerate(sizes)])
    segments = [segment for done in the(BatchesDone, all_events(engine, 1000)) for segment in done.segments]
    out = sum(segment.items for segment in segments)
    assert out == int(sum(sizes) * Fraction(returns).limit_denominator(1000))
    assert sum(segment.size_bytes for segment in segments) == 3 * out
    assert all(0 < segment.items <= 64 for segment in segments)


def test_a_tracked_item_has_the_same_results_at_every_attempt() -> None:
    engine = engine_of(Behaviour(0.01, returns=0.3), workers=1, tracked=True)
    engine.submit([message(engine, number, 0, 100) for number in range(2)])
    first, second = the(BatchesDone, all_events(engine, 100))
    assert [segment.ref for segment in first.segments] == [segment.ref for segment in second.segments]
    assert sum(segment.items for segment in first.segments) == 30


def test_workers_die_at_their_rate_and_only_once() -> None:
    engine = engine_of(Behaviour(deaths_per_hour=1.0), workers=1000)
    lost = the(WorkerLost, all_events(engine, HOUR_S))
    expected = 1000 * (1 - exp(-1))
    assert abs(len(lost) - expected) < 5 * (expected * exp(-1)) ** 0.5
    assert len({event.worker for event in lost}) == len(lost)
    assert {event.cause for event in lost} == {LossCause.SIGNAL}


def test_nodes_are_lost_at_their_rate() -> None:
    world = World({}, node_losses_per_hour=1.0)
    engine = SimulatedEngine(world, Cluster.parse("1000x(1cpu)"))
    left = the(NodeLeft, all_events(engine, HOUR_S))
    assert abs(len(left) - 632) < 80
    assert len(engine.nodes) == 1000 - len(left)


def test_setup_takes_its_mean_and_fails_by_its_share() -> None:
    behaviour = Behaviour(setup_s=(10.0, 0.5), setup_failures=0.25, setup_error="OSError: no disk")
    log = all_events(engine_of(behaviour, workers=2000), HOUR_S)
    ready, lost = the(WorkerReady, log), the(WorkerLost, log)
    assert abs(mean(event.setup_s for event in ready) - 10) < 0.7
    assert abs(len(lost) - 500) < 100
    assert {(event.cause, event.detail) for event in lost} == {(LossCause.SETUP_FAILED, "OSError: no disk")}


def test_a_share_of_the_workers_is_slower() -> None:
    engine = engine_of(Behaviour(1.0, stragglers=(0.1, 4.0)), workers=1000)
    engine.submit([message(engine, worker, worker, 1) for worker in range(1000)])
    seconds = Counter(done.seconds for done in the(BatchesDone, all_events(engine, 10)))
    assert set(seconds) == {1.0, 4.0}
    assert abs(seconds[4.0] - 100) < 50


def test_a_thousand_workers_are_as_fast_as_expected() -> None:
    engine = engine_of(Behaviour(0.01, spread=Lognormal(0.5), returns=2.0), hop_s=0.001)
    controller = NaiveController(HostedObject("a"), workers=1000, items=1_000_000)
    data = SimulatedData(engine, 1_000_000, segment_items=20)
    run_loop(controller, engine, data)
    assert data.delivered == {"a": 2_000_000}
    assert engine.now() == pytest.approx(1_000_000 / 20 * (0.001 + 20 * 0.01) / 1000, rel=0.05)


# A world for a pipeline


def test_a_world_is_as_fast_as_its_stages() -> None:
    stages = [
        Stage("a", len, rate=10, returns=3, batch_size=2, workers=1),
        Stage("b", len, rate=60, returns=0.5),
        Stage("c", len, rate=30),
        Stage("d", len, workers=2),
    ]
    world = world_from_pipeline(
        Pipeline(stages), every={"bytes_out": 7}, units={"a": {"setup_s": 9.0}}, seed=5, tracked=True
    )
    assert (world.seed, world.tracked) == (5, True)
    fused = world.behaviours["b+c"]
    assert fused.seconds_per_item == pytest.approx(1 / 60 + 0.5 / 30)
    assert (fused.returns, fused.bytes_out, fused.setup_s) == (0.5, 7, 0.0)
    assert world.behaviours["a"] == Behaviour(0.1, returns=3, bytes_out=7, setup_s=9.0)
    assert world.behaviours["d"].seconds_per_item == 1.0
    faster = world_from_pipeline(Pipeline(stages), rates={"d": 4.0}, returns={"d": 2.0})
    assert faster.behaviours["d"] == replace(Behaviour(), seconds_per_item=0.25, returns=2.0)


# Cost


def test_a_message_is_cheap_with_ten_thousand_workers() -> None:
    """Measured: 4 to 9 us. The bound is loose, because machines differ and are busy."""
    workers, messages = 10_000, 40_000
    engine = engine_of(Behaviour(0.01, spread=Lognormal(0.5)), workers=workers)
    all_events(engine, 0.001)
    part = (engine.new_segment(64, 0, ""), 0, 64)
    commands = [RunBatches(number, number % workers, "a", [part], 64, 1, 100) for number in range(messages)]
    began = time.thread_time()  # without threads of earlier tests
    engine.submit(commands)
    done = 0
    while done < messages:
        done += len(engine.poll(None))
    assert (time.thread_time() - began) / messages < 60e-6
