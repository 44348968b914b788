"""A run without an engine in a process of its own: claims its share of a ledger, starts and drains imaginary workers as
granted, and writes what it holds to a file at every change. Used by test_sharing_processes.

python toy_run.py LEDGER NAME FOLDER CPUS     until there is a file FOLDER/NAME.stop
"""

from __future__ import annotations

import json
import queue
import sys
import time
from pathlib import Path

import dovetail as dt
from dovetail.claims.sqlite_store import ClaimRequest, MachineClaimStore
from dovetail.claims.updater import ClaimUpdater
from dovetail.claims.wait import wait_for_claim
from dovetail.control.commands import StartWorker
from dovetail.control.events import CapacityReserved, WorkerStopped
from dovetail.resources.amounts import sum_seats
from dovetail.resources.ledger import Ledger
from dovetail.resources.seat import Seat
from dovetail.streaming.reserved_capacity import ReservedCapacity

STEP_S = 0.01
DRAIN_STEPS = 5


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(ledger: str, name: str, folder: Path, cpus: int) -> None:
    cluster = dt.Cluster.of(f"1x({cpus}cpu, 64GB)")
    book = MachineClaimStore(ledger, "here", cluster)
    seat = Seat("node-0", 1000)
    grant = wait_for_claim(book, ClaimRequest(name), (seat,), say=tell)
    assert grant is not None
    posted: queue.SimpleQueue[CapacityReserved] = queue.SimpleQueue()
    keeper = ClaimUpdater(book, grant, posted.put, every_s=0.2, poll_s=0.02)  # type: ignore[arg-type]
    held, reserve = Ledger(cluster), ReservedCapacity(grant.reserved)
    workers: dict[int, int] = {}
    number, most = 0, 0
    ending = False
    while not ending or workers:
        ending = (folder / f"{name}.stop").exists()
        events: list[CapacityReserved | WorkerStopped] = []
        while not posted.empty():
            events.append(posted.get())
            reserve = ReservedCapacity(events[-1].seats)  # type: ignore[union-attr]
        over = reserve.excess(cluster, sum_seats(held.seats())).get(("node-0", -1, "cpu_milli"), 0)
        for worker in list(workers)[: len(workers) if ending else -(-over // 1000)]:
            workers[worker] -= 1
            if workers[worker] <= 0:
                del workers[worker]
                held.give_back(seat)
                events.append(WorkerStopped(worker))
        starts = []
        while not ending and reserve.allows(held.free_on("node-0"), seat) and held.try_take(seat):
            number += 1
            workers[number] = DRAIN_STEPS
            starts.append(StartWorker(number, (seat,), ()))
        most = max(most, len(workers))
        now = time.monotonic()  # before it is reported
        keeper.on_step(0.0, events, starts)
        if starts or events:
            with (folder / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps({"now": now, "cpus": len(workers)}) + "\n")
        time.sleep(STEP_S)
    keeper.close(0.0)
    tell(f"most {most}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
