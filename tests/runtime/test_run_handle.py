"""The handle of a run: iterating, waiting, stats, errors, signals."""

from __future__ import annotations

import io
import shutil
import signal
import sys
import threading
from itertools import count, islice
from typing import TYPE_CHECKING, NoReturn

import pytest

import dovetail as dt
from dovetail.data import iterator_sink
from dovetail.runtime import assembly
from runtime.aids import GatedSource, Script, run_of
from stage_functions import same
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from pathlib import Path
pytestmark = pytest.mark.time_limit


def test_two_iterators_over_one_run_lose_nothing() -> None:
    count = 3000
    run = run_of(dt.Stage("same", same, batch_size=10), source=range(count))
    outer = iter(run)
    found = [next(outer)]
    while True:
        inner = iter(run)
        found += islice(inner, 3)
        inner.close()  # type: ignore[attr-defined]
        following = next(outer, None)
        if following is None:
            break
        found.append(following)
    found += run
    assert sorted(found) == list(range(count))


def test_threads_that_iterate_over_one_run_share_its_results() -> None:
    count = 30_000
    run = run_of(dt.Stage("same", same, batch_size=1), source=range(count))
    found: list[list[int]] = [[] for _ in range(6)]
    errors: list[BaseException] = []

    def read(into: list[int]) -> None:
        try:
            into.extend(run)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(into,), daemon=True) for into in found]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(number for one in found for number in one) == list(range(count))


def test_results_are_kept_after_a_wait_that_timed_out(gated: list[GatedSource]) -> None:
    source = GatedSource(50, 50)
    gated.append(source)
    run = run_of(dt.Stage("same", same), source=source)
    until(lambda: run._sink._items == 50, "results wait for their reader")
    with pytest.raises(TimeoutError):
        run.wait(0.01)
    source.released.set()
    assert sorted(run) == list(range(100))


def test_a_run_waits_for_its_reader_after_a_wait_that_timed_out(
    monkeypatch: pytest.MonkeyPatch, gated: list[GatedSource]
) -> None:
    monkeypatch.setattr(iterator_sink, "MAX_QUEUED_ITEMS", 10)
    source = GatedSource(1, 500)
    gated.append(source)
    run = run_of(dt.Stage("same", same), source=source)
    found = [next(iter(run))]
    with pytest.raises(TimeoutError):
        run.wait(0.01)
    source.released.set()
    for number in run:
        found.append(number)
        until(lambda: not run._sink.has_space() or run.done, "more waits than there is room for")
    assert sorted(found) == list(range(501))


def test_iterating_after_a_wait_reports_the_results_that_were_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterator_sink, "MAX_QUEUED_ITEMS", 10)
    run = run_of(dt.Stage("same", same), source=range(1000))
    assert run.wait().finished == 1000
    found: list[int] = []
    with pytest.raises(dt.RunError, match="were discarded") as raised:
        found.extend(run)
    assert raised.value.codes == ("DT339",)
    assert len(found) < 1000


def test_the_with_block_of_a_failed_run_raises_its_error() -> None:
    def bad(items: list[int]) -> list[int]:
        raise ValueError("always")

    with pytest.raises(dt.RunError, match="always"), run_of(dt.Stage("bad", bad), source=range(3)) as run:
        until(lambda: run.done, "it failed")


def test_a_failed_run_reports_its_error_although_its_folder_was_removed(tmp_path: Path) -> None:
    def bad(items: list[int]) -> list[int]:
        raise ValueError("always")

    run = run_of(dt.Stage("bad", bad), source=range(3), run_dir=tmp_path / "run")
    until(lambda: run.done, "it failed")
    shutil.rmtree(run.folder)
    with pytest.raises(dt.RunError, match="always") as raised:
        list(run)
    assert raised.value.codes == ("DT330",)


def test_a_signal_handler_that_is_set_while_results_are_read_is_kept() -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in run_of(dt.Stage("same", same), source=range(3)):
            signal.signal(signal.SIGINT, mine)
        assert signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for _ in run_of(dt.Stage("same", same), source=range(3)):
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_the_main_thread_prints_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(io.StringIO):
        def write(self, _: str) -> NoReturn:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = run_of(dt.Stage("same", same), source=count())
        for found in run:
            if found == 3:
                with monkeypatch.context() as printing:
                    printing.setattr(sys, "stderr", Busy())
                    signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.status == "drained"


def test_the_stats_of_a_running_run_are_current(monkeypatch: pytest.MonkeyPatch, gated: list[GatedSource]) -> None:
    monkeypatch.setattr(assembly, "REFRESH_TIMEOUT_S", PATIENCE_S)  # on a busy machine, too
    source = GatedSource(30, 3)
    gated.append(source)
    run = run_of(dt.Stage("same", same, workers=1), source=source)
    found = iter(run)
    for _ in range(30):
        next(found)
    stats = run.stats
    (unit,) = stats.units
    assert (stats.status, stats.read, unit.taken, unit.given) == ("running", 30, 30, 30)
    source.released.set()
    assert len(list(found)) == 3
    (unit,) = run.stats.units
    assert (unit.taken, unit.most_workers) == (33, 1)
    assert type(unit.most_workers) is int


def test_a_run_works_in_a_program_without_standard_output(tmp_path: Path) -> None:
    text = """
import os, sys
if len(sys.argv) == 1:
    os.close(1)
    os.close(2)
    os.execv(sys.executable, [sys.executable, __file__, "again"])
import dovetail as dt
none = sys.stderr is None
found = sorted(dt.run(dt.Pipeline([dt.Stage("same", lambda items: items)]), range(5), cluster="1x(2cpu, 4GB)"))
with open("found", "w") as file:
    file.write(f"{none} {found}")
"""
    with Script(tmp_path, text) as script:
        script.finish()
        assert (tmp_path / "found").read_text() == "True [0, 1, 2, 3, 4]"


# --- what a prompt or a notebook shows


def odd(numbers: list[int]) -> list[int]:
    return [number for number in numbers if number % 2]


@pytest.mark.usefixtures("in_process")
def test_a_list_of_functions_is_a_pipeline() -> None:
    run = dt.run([dt.each(double), odd, double_all], range(10), cluster="1x(2cpu, 4GB)")
    assert sorted(run) == []
    assert [stage for unit in run.plan.units for stage in unit.stages] == ["double", "odd", "double_all"]
    with pytest.raises(dt.ConfigError, match=r"is not a dt\.Stage or a function"):
        dt.run([5], range(3))  # type: ignore[list-item]


def double(number: int) -> int:
    return 2 * number


def double_all(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


@pytest.mark.usefixtures("in_process")
def test_the_repr_of_a_run_says_how_it_ended(tmp_path: Path) -> None:
    sink = {"even": str(tmp_path / "even.jsonl"), "odd": str(tmp_path / "odd.jsonl")}
    stages = [dt.Stage("even", double_all, after=[]), dt.Stage("odd", odd, after=[])]
    run = dt.run(dt.Pipeline(stages), range(10), sink=sink, cluster="1x(2cpu, 4GB)")
    summary = run.wait()
    assert repr(run).startswith(f"<Run {run.folder.name}: finished after ")
    assert repr(run).endswith(" s, 10 of 10 items in, 15 out, 0 failed>")
    assert summary.outputs == tuple(sink.values())
    assert ", even.jsonl, odd.jsonl\n" in str(summary)
    assert f"<b>Run {run.folder.name}: finished after " in run._repr_html_()
    assert "<tr><td>odd</td><td>10</td><td>5</td>" in run._repr_html_()
    shutil.rmtree(run.folder)
    assert repr(run) == f"<Run {run.folder.name}: its folder was removed>"


@pytest.mark.usefixtures("in_process")
def test_the_repr_of_a_failed_run_says_so() -> None:
    run = dt.run([dt.each(fails)], range(3), cluster="1x(2cpu, 4GB)")
    with pytest.raises(dt.RunError):
        run.wait()
    assert f"<Run {run.folder.name}: failed after " in repr(run)


def fails(number: int) -> NoReturn:
    raise ValueError(number)
