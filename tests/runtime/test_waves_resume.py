"""Resume in every mode, killed within a wave or between two."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from runtime.kills import Killed, make_rows, rows_of
from waiting import LONG

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 100_000 if LONG else 4000
SLEEP = 0.0 if LONG else 0.0002


def job(folder: Path, pipeline: str, mode: str, **options: Any) -> Killed:
    folder.mkdir()
    make_rows(folder / "in.jsonl", ROWS)
    sink: Any = str(folder / "out.jsonl")
    if pipeline == "leaves":
        sink = {"a": str(folder / "a.jsonl"), "b": str(folder / "b.jsonl")}
    source = str(folder / "in.jsonl")
    return Killed(
        folder, {"source": source, "sink": sink, "pipeline": pipeline, "mode": mode, "sleep": SLEEP, **options}
    )


def sink_contents(killed: Killed) -> dict[str, Any]:
    sink = killed.options["sink"]
    names = sink.values() if isinstance(sink, dict) else [sink]
    paths = [killed.folder / name.rpartition("/")[2] for name in names]
    return {path.name: rows_of(path) for path in paths}


def waves_done(killed: Killed) -> int:
    return max((entry.wave for entry in killed.log_contents().entries.values()), default=-1)


def undisturbed(folder: Path, pipeline: str, mode: str) -> dict[str, Any]:
    killed = job(folder, pipeline, mode, sleep=0.0)
    killed.finish()
    return sink_contents(killed)


@pytest.mark.parametrize("mode", ["sequential", "waves"])
@pytest.mark.parametrize("pipeline", ["rebatch", "barrier", pytest.param("leaves", marks=pytest.mark.long), "diamond"])
def test_all_modes_write_the_same_bytes(tmp_path: Path, pipeline: str, mode: str) -> None:
    streamed = undisturbed(tmp_path / "streamed", pipeline, "auto" if pipeline == "barrier" else "streaming")
    assert all(streamed.values())
    killed = job(tmp_path / mode, pipeline, mode)
    killed.processes = LONG
    dice = Random(f"{pipeline} {mode}")
    resume: dict[str, Any] = {}
    for _ in range(3 if LONG else 2):
        before = len(killed.log_contents().entries)
        goal = before + dice.randrange(1, 4)
        if not killed.kill_when(lambda goal=goal: len(killed.log_contents().entries) >= goal, "more is done", **resume):  # type: ignore[misc]
            break
        resume = {"resume": str(killed.run_dir)}
        if killed.log_contents().finished is not None:  # killed at its very end
            break
    if killed.log_contents().finished is None:
        killed.finish(**resume)
    assert sink_contents(killed) == streamed


def test_killed_between_two_waves(tmp_path: Path) -> None:
    """After the last entry of the first wave, before the first of the second."""
    killed = job(tmp_path / "run", "rebatch", "sequential")
    killed.processes = True
    assert killed.kill_when(
        lambda: (
            sum(entry.last - entry.first for entry in killed.log_contents().entries.values() if not entry.wave) == ROWS
        ),
        "the first wave is done",
        hold=0,  # the second wave does not get any further
    )
    called = killed.called()
    killed.resume()
    assert sink_contents(killed) == undisturbed(tmp_path / "streamed", "rebatch", "streaming")
    assert killed.called() >= called


def test_a_mode_that_changes_on_the_way(tmp_path: Path) -> None:
    """Spooled results belong to the units of the run that spooled them, also if a new plan has other units."""
    killed = job(tmp_path / "run", "rebatch", "streaming")
    killed.committed()
    killed.dies("wave:1", resume=str(killed.run_dir), mode="sequential")
    assert waves_done(killed) == 1, "something is spooled"
    killed.dies("wave:2", resume=str(killed.run_dir))
    assert waves_done(killed) == 2, "the end is near"
    killed.resume()
    assert sink_contents(killed) == undisturbed(tmp_path / "streamed", "rebatch", "streaming")


def test_a_spool_that_is_gone_is_made_again(tmp_path: Path) -> None:
    """Killed in the last wave: what came of the spool is in the sink's parts, and must not be there twice."""
    killed = job(tmp_path / "run", "rebatch", "sequential")
    killed.dies("wave:2")
    assert waves_done(killed) == 2, "the last wave has begun"
    for path in (killed.run_dir / "spool").iterdir():
        path.unlink()
        break
    assert "computed again" in killed.resume()
    assert sink_contents(killed) == undisturbed(tmp_path / "streamed", "rebatch", "streaming")


def test_other_names_are_refused_when_something_is_spooled_for_the_old_ones(tmp_path: Path) -> None:
    killed = job(tmp_path / "run", "rebatch", "sequential")
    killed.dies("wave:1")
    assert waves_done(killed) == 1, "something is spooled"
    error = killed.refused(resume=str(killed.run_dir), pipeline="renamed")
    assert "DT389" in error
    assert "fan2" in error
    killed.resume()
    assert sink_contents(killed) == undisturbed(tmp_path / "streamed", "rebatch", "streaming")
