"""Functions of processes that race for the same file or lease; importable without pytest and Lance."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from dovetail.backfill.lease import Lease
from dovetail.backfill.store import TableStore
from dovetail.errors import RunError


def create_files(uri: str, count: int, barrier: Any, mine: str, got: Any) -> None:
    """Create files that the others create at the same moment; put the numbers of those that were not there."""
    store = TableStore(uri)
    for at in range(count):
        barrier.wait()
        if store.create(f"a/{at}", mine.encode()):
            got.put((at, mine))
    got.put(None)


def take_leases(uri: str, rounds: int, barrier: Any, results: Any) -> None:
    """Take a lease that the others take at the same moment; put the round, and why it was refused."""
    store = TableStore(uri)
    for at in range(rounds):
        barrier.wait()
        try:
            lease: Lease | None = Lease.acquire(store, "u", f"run-{os.getpid()}", wait=False, say=_refuse)
        except RunError as error:
            lease = None
            results.put((at, str(error)))
        else:
            results.put((at, None))
        barrier.wait()  # no process releases it before all have tried
        if lease is not None:
            lease.release()


def _refuse(text: str) -> NoReturn:
    raise AssertionError(f"unexpected message: {text}")
