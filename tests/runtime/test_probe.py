"""Probe: the given items through every stage, and no trace but the measurements."""

from __future__ import annotations

import os
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.observe.run_folder import runs_folder
from dovetail.runtime.probe import probe
from dovetail.runtime.stage_profiles import load_profiles
from stage_functions import same
from waiting import time_limit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def written_to(folder: Path) -> Callable[[int], int]:
    """Function that writes a file per item, named after the item and the process."""

    def note(item: int) -> int:
        time.sleep(0.003)
        (folder / f"{item}-{os.getpid()}").touch()
        return item

    return note


@pytest.mark.processes
def test_a_probe_runs_the_given_number_of_items_through_one_worker_per_stage(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    pipe = dt.Pipeline(
        [
            dt.Stage("note", dt.each(written_to(tmp_path / "seen"))),
            dt.Stage("twice", lambda items: items * 2, fuse=False, batch_size=4),
        ]
    )
    with time_limit():
        profile = probe(pipe, count(), 40)
    assert profile.read == 40
    names = [path.name.split("-") for path in (tmp_path / "seen").iterdir()]
    assert sorted(int(item) for item, _ in names) == list(range(40))
    assert len({pid for _, pid in names}) == 1
    assert os.getpid() not in {int(pid) for _, pid in names}
    found = load_profiles(pipe, dt.Cluster.of("auto"), "iterable")
    assert found["twice"].returns == 2
    assert 0 < found["note"].items <= 40
    assert 0 < found["twice"].items <= 40
    assert found["note"].rate < 334
    assert not runs_folder().exists() or list(runs_folder().iterdir()) == []


def refuse(item: int) -> Any:
    raise ValueError(f"not {item}")


def nothing(_: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("stages", "source", "error", "code"),
    [
        ([dt.Stage("s", dt.each(refuse), retries=0)], range(20), dt.RunError, "DT330"),
        ([dt.Stage("s", dt.each(nothing))], [], dt.ConfigError, "DT372"),
        ([dt.Stage("s", dt.each(nothing)), dt.Stage("t", same, fuse=False)], range(9), dt.ConfigError, "DT374"),
        ([dt.Stage("s", same, dt.Resources(gpus=64))], range(9), dt.InfeasibleError, "DT370"),
        ([dt.Stage("s", same, dt.Resources(cpus=4096))], range(9), dt.InfeasibleError, "DT370"),
    ],
)
def test_a_probe_reports_why_it_fails(
    stages: list[dt.Stage], source: Any, error: type[dt.DovetailError], code: str
) -> None:
    with time_limit(), pytest.raises(error) as raised:
        probe(dt.Pipeline(stages), source, 9)
    assert raised.value.codes == (code,)
    assert all(problem.fix_texts for problem in raised.value.problems)


def test_an_item_that_fails_is_skipped_by_a_probe_and_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"n": {number}}}\n' for number in range(40)), encoding="utf-8")

    def invert(row: dict[str, Any]) -> dict[str, Any]:
        return {"inverse": 1 / (row["n"] - 7)}

    pipe = dt.Pipeline([dt.Stage("invert", dt.each(invert)), dt.Stage("then", same, fuse=False)])
    with time_limit():
        probed = probe(pipe, str(rows), 40)
    assert probed.read == 40
    assert probed.note.startswith(f"note: 1 of 40 items failed in the probe; {rows}:8  invert: ZeroDivisionError")
    assert set(load_profiles(pipe, dt.Cluster.of("auto"), "jsonl")) == {"invert", "then"}


@pytest.mark.processes
def test_a_probe_whose_calls_do_not_return_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(item: int) -> int:
        while item == 30:
            time.sleep(0.01)
        return item

    monkeypatch.setattr("dovetail.runtime.probe.MAX_CALL_S", 0.5)
    pipe = dt.Pipeline([dt.Stage("hangs", dt.each(hangs)), dt.Stage("then", same, fuse=False)])
    with time_limit(), pytest.raises(dt.RunError, match=r"no call returned for 0\.5 s") as raised:
        probe(pipe, range(40), 40)
    assert raised.value.codes == ("DT373",)
