"""Runs that share one machine."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from runtime.aids import Script, run_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.time_limit

CPUS = 4
BOTH = """
import time
from pathlib import Path
import dovetail as dt

def slowly(items):
    time.sleep(0.02)
    return items

Path(__file__).with_suffix(".here").touch()
while len(list(Path(__file__).parent.glob("*.here"))) < 2:
    time.sleep(0.001)
stages = [dt.Stage("first", slowly, fuse=False), dt.Stage("second", slowly, fuse=False)]
run = dt.run(dt.Pipeline(stages), range({items}), cluster="1x({cpus}cpu, 8GB)", run_dir={folder!r}, record=True)
print(len(list(run)))
"""


def worker_lifetimes(folder: Path) -> list[tuple[float, float]]:
    """Start and end of each worker of a run, by the clock that all processes share."""
    first_step = (folder / "replay.log").read_text().splitlines()[1]
    started = json.loads(first_step)[0]
    born: dict[int, float] = {}
    found = []
    for line in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
        if line["k"] == "worker" and line["do"] == "start":
            born[line["w"]] = started + line["t"]
        elif line["k"] == "worker" and line["do"] in ("stopped", "lost"):
            found.append((born.pop(line["w"]), started + line["t"]))
    assert not born, f"workers of {folder} that never ended: {born}"
    return found


def at_once(spans: list[tuple[float, float]], at: float) -> int:
    return sum(begin <= at < end for begin, end in spans)


def test_two_runs_that_start_together_share_the_machine_and_both_finish(tmp_path: Path) -> None:
    items = 300
    folders = [tmp_path / name for name in ("one", "two")]
    texts = [BOTH.format(items=items, cpus=CPUS, folder=str(folder)) for folder in folders]
    with Script(tmp_path, texts[0], warm=True) as one, Script(tmp_path, texts[1], warm=True) as two:
        for script in (one, two):
            assert script.finish().strip().endswith(str(items))
    spans = [worker_lifetimes(folder) for folder in folders]
    moments = sorted({moment for both in spans for span in both for moment in span})
    for moment in moments:
        # a worker's seat is free when it is gone, which others may hear of before its own run has written it down
        together = sum(at_once(mine, moment - 1e-3) for mine in spans)
        assert together <= CPUS, f"{together} workers at once on {CPUS} CPUs"
    begin = max(min(begin for begin, _ in mine) for mine in spans)
    end = min(max(end for _, end in mine) for mine in spans)
    assert end > begin, "they did not run at the same time"
    held = [sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in mine) for mine in spans]
    assert min(held) >= 0.35 * sum(held), f"CPU-seconds while both ran: {held}"


def test_a_run_that_must_not_wait_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    first = run_of(dt.Stage("slow", slowly, workers=2), source=range(10_000))
    with pytest.raises(dt.InfeasibleError) as raised:
        run_of(dt.Stage("next", slowly, workers=2), source=range(10), wait=False, run_dir=tmp_path / "next")
    assert raised.value.codes == ("DT120",)
    assert first.folder.name in str(raised.value)
    assert not (tmp_path / "next").exists()
    first.cancel()
    first.wait()


def slowly(items: list[int]) -> list[int]:
    time.sleep(0.01)
    return items


def runs_inside(items: list[int]) -> list[int]:
    inner = dt.run(dt.Pipeline([dt.Stage("inner", slowly)]), items, cluster="1x(1cpu, 1GB)", progress=False)
    return list(inner)


@pytest.mark.processes
def test_a_run_inside_a_stage_does_not_wait_for_the_run_it_belongs_to() -> None:
    outer = run_of(dt.Stage("outer", runs_inside, batch_size=5), source=range(10), cluster="1x(1cpu, 1GB)")
    assert sorted(outer) == list(range(10))
