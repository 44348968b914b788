"""A backfill whose driver and workers take one step at a time, as a test has them do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

import dovetail as dt
from backfill_aids import HALF
from dovetail.backfill.commit_thread import Committer
from dovetail.backfill.driver import BackfillDriver
from dovetail.backfill.range_worker import RangeWorker
from dovetail.backfill.store import TableStore
from dovetail.backfill.target import make_target
from dovetail.backfill.task import RangeTask
from dovetail.backfill.task_queue import FragmentTracker, TaskQueue
from dovetail.engines.worker_context import Worker

if TYPE_CHECKING:
    from dovetail.backfill.udf import Udf


PATIENCE_S = 30.0


NEVER_S = 1e6


WORKERS: list[RangeWorker] = []


class Staged:
    """A backfill of column `n` whose driver and workers do only what a test has them do."""

    def __init__(self, uri: str, udf: Udf, **how: Any) -> None:
        self.table = dt.table(uri)
        found, _, names, before, asked = self.table._check_call("n", udf, {"cluster": HALF, **how})
        ready, record = self.table._ensure_columns(found, udf, names, before)
        aim = make_target(ready, udf, record, asked)
        self.udf, self.found = udf, ready
        self.filling = BackfillDriver(ready, TableStore(uri), udf, aim, asked, "run")
        self.inputs = aim.input_hash(ready, ready.fragments()[0])
        self.before = aim.kept_values_hash(ready, ready.fragments()[0])
        self.rows = ready.fragments()[0].rows

    def task(self, start: int, stop: int) -> RangeTask:
        """A task of the first fragment."""
        return RangeTask(0, self.rows, self.inputs, start, stop, before=self.before, budget_s=PATIENCE_S)

    def worker(self) -> RangeWorker:
        made = RangeWorker(self.filling._make_fill_spec(), self.udf)
        made.setup(Worker(0, "fill"))
        WORKERS.append(made)
        return made

    def leave(self, worker: RangeWorker, start: int, stop: int) -> None:
        """A part, by a worker that was not asked to tidy up."""
        batch = pa.record_batch([pa.array([2 * row for row in range(start, stop)], pa.int64())], ["n"])
        worker.checkpoints.save(self.task(start, stop), start, stop, [batch], [])

    def committer(self) -> Committer:
        return Committer(self.found, NEVER_S, self.filling.target.input_hash, self.filling._on_commit)

    def dealer(self, *tasks: RangeTask) -> TaskQueue:
        """Dealer of these tasks, as at the begin of `_round`."""
        self.filling._tracker = FragmentTracker(tasks)
        dealer = TaskQueue((), 2)
        dealer._outstanding = len(tasks)
        return dealer
