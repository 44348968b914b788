"""Controllers, updaters and one ledger in real time; only the workers are simulated."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import dovetail as dt
from claims.test_fair_share import cpus_of
from dovetail.claims.shared_plan import max_seats, min_seats, plan_around
from dovetail.claims.sqlite_store import ClaimRequest, MachineClaimStore
from dovetail.claims.updater import ClaimUpdater
from dovetail.claims.wait import wait_for_claim
from dovetail.control.lifecycle import RunState
from dovetail.control.loop import run_loop
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.world import Behaviour, World
from dovetail.resources.amounts import sum_seats
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs
from streaming.harness import numbers, stage
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dovetail.control.commands import Command
    from dovetail.control.events import Event

MACHINE = dt.Cluster.of("1x(8cpu, 64GB)")
FASTER = 20
"""Virtual seconds per real one."""


class Paced(SimulatedEngine):
    """Virtual time that does not run ahead of the clock, and does not hurry after it when the machine was busy."""

    began: float

    def poll(self, timeout_s: float | None) -> list[Event]:
        found = super().poll(0.2 if timeout_s is None else min(timeout_s, 0.2))
        early = self.began + self.now() / FASTER - time.monotonic()
        time.sleep(max(0.0, early))
        self.began -= min(0.0, early)
        return found


class HeldSeats:
    """Seats that all runs of a test hold, step by step."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: dict[str, int] = {}
        self.seen: list[dict[str, int]] = []

    def note(self, name: str, cpus: int) -> None:
        with self.lock:
            self.now[name] = cpus
            self.seen.append(dict(self.now))


class HeldSeatsRecorder:
    def __init__(self, name: str, stream: StreamController, held: HeldSeats) -> None:
        self.name, self.stream, self.held = name, stream, held

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        workers = self.stream.state.workers.values()
        self.held.note(self.name, cpus_of(sum_seats(seat for worker in workers for seat in worker.seats)))

    def close(self, now: float) -> None:
        pass


def run(name: str, path: Path, items: int, held: HeldSeats, out: dict[str, object]) -> None:
    """Run a pipeline as a real run does: claim, run, release."""
    pipeline = dt.Pipeline([stage("x"), stage("y")])
    book = MachineClaimStore(path, "here", MACHINE)
    alone = dt.plan(pipeline, MACHINE)
    messages: list[str] = []
    grant = wait_for_claim(book, ClaimRequest(name), min_seats(alone), max_seats(alone), say=messages.append)
    assert grant is not None
    plan = plan_around(lambda cluster: dt.plan(pipeline, cluster), MACHINE, grant.reserved)
    works = unit_specs(pipeline, plan)
    engine = Paced(World({work.name: Behaviour(0.5) for work in works}, tracked=True), MACHINE)
    engine.began = time.monotonic()
    data = SimulatedData(engine, items)
    stream = StreamController(works, plan, StreamOptions(), reserved=grant.reserved)
    keeper = ClaimUpdater(book, grant, engine.post, messages.append, every_s=0.2, poll_s=0.02)
    # the watch first: what it sees is noted before others can hear of it
    out[name] = (
        run_loop(stream, engine, data, [HeldSeatsRecorder(name, stream, held), keeper]),
        stream.state.run_state,
    )
    out[f"{name} items"] = Counter(data.outputs["y"])


def test_two_runs_share_a_machine_in_real_time(tmp_path: Path) -> None:
    held = HeldSeats()
    out: dict[str, object] = {}
    threads = [
        threading.Thread(target=run, args=(name, tmp_path / "ledger.db", 400, held, out)) for name in ("one", "two")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name in ("one", "two"):
        assert out[name] == ([], RunState.FINISHED)
        assert out[f"{name} items"] == numbers(400)
    assert max(sum(now.values()) for now in held.seen) <= 8000
    both = [now for now in held.seen if min(now.get("one", 0), now.get("two", 0)) >= 2000]
    assert Counter(frozenset(now.items()) for now in both).most_common(1)[0][0] == {("one", 4000), ("two", 4000)}
    until(lambda: MachineClaimStore(tmp_path / "ledger.db", "here", MACHINE).owners() == [])
