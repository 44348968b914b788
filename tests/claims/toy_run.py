"""A run without an engine, in a process of its own: takes its place in a ledger, starts all the workers it may, and
drains those it must; writes what it holds into a file at every change. Used by test_processes.

python toy_run.py LEDGER NAME FOLDER CPUS     until there is a file FOLDER/NAME.stop
"""

from __future__ import annotations

import json
import queue
import sys
import time
from pathlib import Path

import dovetail as dt
from dovetail.claims.keeper import Keeper
from dovetail.claims.ledger_db import About, ClaimBook
from dovetail.claims.waiting import wait_for_claim
from dovetail.control.commands import StartWorker
from dovetail.control.events import Reserved, WorkerStopped
from dovetail.resources.amounts import amounts_of
from dovetail.resources.ledger import Ledger
from dovetail.resources.seat import Seat
from dovetail.streaming.reserve import Reserve

STEP_S = 0.01
DRAIN_STEPS = 5


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(ledger: str, name: str, folder: Path, cpus: int) -> None:
    cluster = dt.Cluster.of(f"1x({cpus}cpu, 64GB)")
    book = ClaimBook(ledger, "here", cluster)
    seat = Seat("node-0", 1000)
    grant = wait_for_claim(book, About(name), (seat,), say=tell)
    assert grant is not None
    posted: queue.SimpleQueue[Reserved] = queue.SimpleQueue()
    keeper = Keeper(book, grant, posted.put, every_s=0.2, poll_s=0.02)  # type: ignore[arg-type]
    held, reserve = Ledger(cluster), Reserve(grant.reserved)
    workers: dict[int, int] = {}
    number, most = 0, 0
    ending = False
    while not ending or workers:
        ending = (folder / f"{name}.stop").exists()
        events: list[Reserved | WorkerStopped] = []
        while not posted.empty():
            events.append(posted.get())
            reserve = Reserve(events[-1].seats)  # type: ignore[union-attr]
        over = reserve.over(cluster, amounts_of(held.seats())).get(("node-0", -1, "cpu_milli"), 0)
        for worker in list(workers)[: len(workers) if ending else -(-over // 1000)]:
            workers[worker] -= 1
            if workers[worker] <= 0:
                del workers[worker]
                held.give_back(seat)
                events.append(WorkerStopped(worker))
        starts = []
        while not ending and reserve.leaves(held.free_on("node-0"), seat) and held.takes(seat):
            number += 1
            workers[number] = DRAIN_STEPS
            starts.append(StartWorker(number, (seat,), ()))
        most = max(most, len(workers))
        now = time.monotonic()  # before anybody hears of it
        keeper.saw(0.0, events, starts)
        if starts or events:
            with (folder / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps({"now": now, "cpus": len(workers)}) + "\n")
        time.sleep(STEP_S)
    keeper.close(0.0)
    tell(f"most {most}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
