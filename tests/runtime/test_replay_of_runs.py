"""Replay of runs with real processes: the controller decides the same."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.observe.replay import controller_from_record, replay
from runtime.aids import run_of
from waiting import time_limit

if TYPE_CHECKING:
    from pathlib import Path


class DiesOnceAt:
    """kill -9 at each of some numbers, the first time it comes."""

    def __init__(self, numbers: set[int], folder: Path) -> None:
        self._numbers, self._folder = numbers, folder

    def __call__(self, items: list[int]) -> list[int]:
        for number in self._numbers.intersection(items):
            mark = self._folder / str(number)
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return items


def twice(items: list[int]) -> list[int]:
    return [item for item in items for _ in range(2)]


@pytest.mark.processes
def test_a_recorded_run_with_deaths_and_errors_is_replayed_to_the_same_commands(tmp_path: Path) -> None:
    stages = [
        dt.Stage("deadly", DiesOnceAt({3, 50, 151}, tmp_path), batch_size=4, fuse=False),
        dt.Stage("twice", twice, fuse=False),
    ]
    with time_limit():
        run = run_of(*stages, source=range(200), record=True, run_dir=tmp_path / "run")
        assert sorted(run) == sorted(2 * list(range(200)))
    assert sum(unit.lost for unit in run.stats.units) == 3
    compared = replay(tmp_path / "run" / "replay.log", controller_from_record)
    assert compared.is_same, compared.difference
    assert compared.commands > 20
