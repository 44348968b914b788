"""Runs in waves: their spool is removed, and a drain delivers what was read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from runtime.aids import GatedSource, run_of
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path
pytestmark = pytest.mark.time_limit


def waves(source: Any, folder: Path) -> dt.Run:
    stages = [dt.Stage("a", kilobytes, fuse=False), dt.Stage("b", first, fuse=False, batch_size=5)]
    return run_of(*stages, source=source, mode="sequential", run_dir=folder)


def kilobytes(items: list[int]) -> list[list[int]]:
    return [[item] * 200 for item in items]


def first(items: list[list[int]]) -> list[int]:
    return [item[0] for item in items]


def spooled(run: dt.Run) -> list[Path]:
    return list((run.folder / "spool").glob("*"))


def test_the_spool_of_a_run_in_waves_is_removed_when_it_finishes(tmp_path: Path, gated: list[GatedSource]) -> None:
    source = GatedSource(100, 100)
    gated.append(source)
    run = waves(source, tmp_path / "run")
    until(lambda: spooled(run), "something is spooled")
    source.released.set()
    assert sorted(run) == list(range(200))
    assert not (run.folder / "spool").exists()


def test_the_spool_of_a_run_in_waves_is_removed_when_it_is_cancelled(tmp_path: Path, gated: list[GatedSource]) -> None:
    source = GatedSource(100)
    gated.append(source)
    run = waves(source, tmp_path / "run")
    until(lambda: spooled(run), "something is spooled")
    run.cancel()
    assert run.wait().status == "cancelled"
    assert not (run.folder / "spool").exists()


def test_a_drain_of_a_run_in_waves_delivers_all_items_that_were_read(tmp_path: Path, gated: list[GatedSource]) -> None:
    source = GatedSource(100)
    gated.append(source)
    run = waves(source, tmp_path / "run")
    until(lambda: run.stats.read == 100, "all that was read is known")
    run.drain()
    assert sorted(run) == list(range(100))
    stats = run.stats
    assert (stats.status, stats.finished) == ("drained", 100)
    assert not (run.folder / "spool").exists()
