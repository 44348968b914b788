"""Rows that leave their worker broken, in random schedules of workers and tasks: exactly the bad rows fail."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("lance")

import pyarrow as pa

import dovetail as dt
from backfill_aids import create_table
from dovetail.backfill.checkpoints import errors_folder
from dovetail.backfill.range_worker import RangeWorker, WorkerBrokenError
from dovetail.backfill.store import TableStore
from staged_backfill import PATIENCE_S, Staged
from waiting import LONG

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.backfill.task import RangeTask

ROWS = 90
MAX_STEPS = 3000
MAX_RESTARTS = 6
"""Per row that breaks workers; four in 1,450 schedules."""


class AcceleratorError(RuntimeError):
    """Stands in for torch.AcceleratorError."""


def make_function(dice: Random, breaking: set[int], bad: set[int]) -> dt.Udf:
    """Fails for bad rows; from a breaking row on, its object fails for all rows."""
    error = dice.choice([ValueError, AcceleratorError])

    class Fails:
        def __init__(self) -> None:
            self.broken = False

        def call(self, row: int) -> int:
            if row in bad and not self.broken:
                raise ValueError("bad row")
            self.broken = self.broken or row in breaking
            if self.broken:
                raise error("CUDA error")
            return 2 * row

    class Values(Fails):
        def __call__(self, id: int) -> int:  # noqa: A002
            return self.call(id)

    class Awaited(Fails):
        async def __call__(self, id: int) -> int:  # noqa: A002
            return self.call(id)

    class Arrays(Fails):
        def __call__(self, id: pa.Array) -> pa.Array:  # noqa: A002
            return pa.array(map(self.call, id.to_pylist()), pa.int64())

    kind: Any = dice.choice([Values, Values, Awaited, Arrays])
    return dt.udf(kind, data_type="int64", input_columns=["id"])


class Schedule:
    """Workers that get tasks in a random order, some ahead, and whose time is often over after one row."""

    def __init__(self, staged: Staged, dice: Random) -> None:
        self._staged, self._dice = staged, dice
        cuts = sorted(dice.sample(range(1, ROWS), dice.randrange(3)))
        starts, stops = [0, *cuts], [*cuts, ROWS]
        self._queue = [staged.task(start, stop) for start, stop in zip(starts, stops, strict=True)]
        self._workers: list[tuple[RangeWorker, list[RangeTask]]] = []
        for _ in range(dice.choice([1, 1, 2, 3])):
            self._workers.append((staged.worker(), []))
        self.restarts = 0
        self.errors = 0

    def play(self) -> None:
        for _ in range(MAX_STEPS):
            if not self._queue and not any(tasks for _, tasks in self._workers):
                return
            self._step(self._dice.randrange(len(self._workers)))
        raise AssertionError("the tasks do not end")

    def _step(self, number: int) -> None:
        worker, tasks = self._workers[number]
        while self._queue and len(tasks) < self._dice.choice([1, 2]):
            tasks.append(self._queue.pop(0))
        if not tasks:
            return
        task = replace(tasks.pop(0), budget_s=self._dice.choice([0.0, 0.0, PATIENCE_S]))
        try:
            (done,) = worker([task])
        except WorkerBrokenError:
            self._replace(number, task)
            return
        assert not done.worker_error
        self.errors += done.errors
        if done.reached < task.stop:
            self._queue.insert(0, replace(task, start=done.reached))

    def _replace(self, number: int, task: RangeTask) -> None:
        worker, tasks = self._workers[number]
        for queued in tasks if self._dice.random() < 0.5 else ():  # run before the worker is gone
            with pytest.raises(WorkerBrokenError):
                worker([queued])
        self._queue[:0] = [task, *tasks]
        self._workers[number] = self._staged.worker(), []
        self.restarts += 1


def failed_rows(staged: Staged) -> list[int]:
    spec, store = staged.filling._make_fill_spec(), TableStore(staged.found.uri)
    folder = errors_folder(spec.folder, spec.parts)
    texts = [store.get(f"{folder}/{name}") or b"" for name in store.names(folder)]
    return sorted(json.loads(line)["offset"] for text in texts for line in text.splitlines())


@pytest.mark.parametrize("seed", range(300 if LONG else 15))
def test_exactly_the_bad_rows_fail_in_any_schedule(tmp_path: Path, seed: int) -> None:
    dice = Random(seed)
    breaking = set(dice.sample(range(ROWS), dice.choice([0, 1, 1, 2, 3])))
    bad = set(dice.sample(range(ROWS), dice.choice([0, 0, 1, 5]))) - breaking
    staged = Staged(create_table(tmp_path, ROWS, ROWS), make_function(dice, breaking, bad), on_error="skip")
    schedule = Schedule(staged, dice)
    schedule.play()
    assert failed_rows(staged) == sorted(breaking | bad)
    assert schedule.errors == len(breaking | bad)
    assert schedule.restarts <= MAX_RESTARTS * len(breaking) + len(bad), "a bad first row of a worker costs one"
