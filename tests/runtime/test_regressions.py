"""Does what reviewers once broke in `dt.run` stay mended?"""

from __future__ import annotations

import io
import shutil
import signal
import sys
import threading
from collections import Counter
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import dovetail as dt
from dovetail.data import iterator_sink
from dovetail.runtime import assembly, run
from runtime.aids import CLUSTER, Script, descriptors, run_of, workers_of
from stage_functions import same
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.time_limit


class Gated:
    """So many items, then nothing until it is let go, and then so many more."""

    def __init__(self, before: int, after: int = 0) -> None:
        self._before, self._after = before, after
        self.blocks = threading.Event()
        self.let_go = threading.Event()
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(self._before)
            self.blocks.set()
            self.let_go.wait()
            yield from range(self._before, self._before + self._after)
        finally:
            self.closed.set()


@pytest.fixture
def gated() -> Iterator[list[Gated]]:
    """Those that are added are let go at the end, whatever happens."""
    made: list[Gated] = []
    yield made
    for source in made:
        source.let_go.set()


# Sources


@pytest.mark.parametrize("burst", [9, 100, 1000])
def test_what_was_read_comes_out_although_the_next_item_takes_long(gated: list[Gated], burst: int) -> None:
    source = Gated(burst, 20)
    gated.append(source)
    run = run_of(dt.Stage("same", same), source=source)
    found = iter(run)
    assert sorted(next(found) for _ in range(burst)) == list(range(burst))
    source.let_go.set()
    assert sorted(found) == list(range(burst, burst + 20))


def test_a_source_that_waits_for_each_result_before_it_gives_the_next_item_gets_it() -> None:
    came = threading.Semaphore(1)

    def source() -> Iterator[int]:
        for number in range(40):
            assert came.acquire(timeout=2 * PATIENCE_S)
            yield number

    found = []
    for result in run_of(dt.Stage("a", same, fuse=False), dt.Stage("b", same, fuse=False), source=source()):
        found.append(result)
        came.release()
    assert found == list(range(40))


def test_drain_delivers_what_a_source_gave_before_it_blocked(gated: list[Gated]) -> None:
    source = Gated(10)
    gated.append(source)
    run = run_of(dt.Stage("same", same), source=source)
    found = iter(run)
    results = [next(found)]
    assert source.blocks.wait(PATIENCE_S)
    until(lambda: run.stats.read == 10, "all that was read is known")
    run.drain()
    results += found
    assert sorted(results) == list(range(10))
    assert run.status == "drained"


def test_the_generator_of_a_source_is_closed_when_its_run_was_cancelled() -> None:
    class Endless:
        def __init__(self) -> None:
            self.closed = threading.Event()

        def __iter__(self) -> Iterator[int]:
            try:
                while True:
                    yield 1
            finally:
                self.closed.set()

    source = Endless()
    run = run_of(dt.Stage("same", same), source=source)
    assert next(iter(run)) == 1
    run.cancel()
    run.wait()
    assert source.closed.wait(PATIENCE_S)


def test_a_list_of_another_class_may_block_and_is_cancelled_all_the_same(gated: list[Gated]) -> None:
    blocking = Gated(3)
    gated.append(blocking)

    class Lazy(list[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(blocking)

    run = run_of(dt.Stage("same", same), source=Lazy())
    assert blocking.blocks.wait(PATIENCE_S)
    run.cancel()
    assert run.wait(PATIENCE_S).status == "cancelled"
    assert not blocking.let_go.is_set()


def test_a_source_that_cannot_be_iterated_leaves_no_descriptor_no_folder_and_no_claim(tmp_path: Path) -> None:
    class Broken:
        def __iter__(self) -> NoReturn:
            raise LookupError("no such table")

    assert sorted(run_of(dt.Stage("same", same), source=range(2))) == [0, 1]  # what is opened once
    before = Counter(link.partition(":")[0] for link in descriptors())
    for _ in range(3):
        with pytest.raises(LookupError, match="no such table"):
            run_of(dt.Stage("same", same), source=Broken(), run_dir=tmp_path / "run")
    # those of earlier tests may go meanwhile
    assert not Counter(link.partition(":")[0] for link in descriptors()) - before
    assert list(tmp_path.iterdir()) == []
    assert sorted(run_of(dt.Stage("same", same), source=range(2), wait=False)) == [0, 1]


class CannotBeShown(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("first", [0, 5])
def test_a_source_may_raise_what_cannot_be_shown(first: int) -> None:
    def source() -> Iterator[int]:
        yield from range(first)
        raise CannotBeShown

    run = run_of(dt.Stage("same", same), source=source())
    with pytest.raises(CannotBeShown):
        list(run)
    assert not workers_of(run.folder)


# Who reads the results


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


def test_results_are_still_there_after_a_wait_that_took_too_long(gated: list[Gated]) -> None:
    source = Gated(50, 50)
    gated.append(source)
    run = run_of(dt.Stage("same", same), source=source)
    until(lambda: run._sink._items == 50, "results wait for their reader")
    with pytest.raises(TimeoutError):
        run.wait(0.01)
    source.let_go.set()
    assert sorted(run) == list(range(100))


def test_who_reads_after_a_wait_that_took_too_long_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, gated: list[Gated]
) -> None:
    monkeypatch.setattr(iterator_sink, "MAX_QUEUED_ITEMS", 10)
    source = Gated(1, 500)
    gated.append(source)
    run = run_of(dt.Stage("same", same), source=source)
    found = [next(iter(run))]
    with pytest.raises(TimeoutError):
        run.wait(0.01)
    source.let_go.set()
    for number in run:
        found.append(number)
        until(lambda: not run._sink.has_space() or run.done, "more waits than there is room for")
    assert sorted(found) == list(range(501))


def test_results_that_wait_had_to_let_go_are_told_to_who_iterates_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterator_sink, "MAX_QUEUED_ITEMS", 10)
    run = run_of(dt.Stage("same", same), source=range(1000))
    assert run.wait().finished == 1000
    found: list[int] = []
    with pytest.raises(dt.RunError, match="were discarded") as told:
        found.extend(run)
    assert told.value.codes == ("DT339",)
    assert len(found) < 1000


def test_a_run_that_failed_says_so_at_the_end_of_its_with_block() -> None:
    def bad(items: list[int]) -> list[int]:
        raise ValueError("always")

    with pytest.raises(dt.RunError, match="always"), run_of(dt.Stage("bad", bad), source=range(3)) as run:
        until(lambda: run.done, "it failed")


def test_a_run_whose_folder_is_gone_still_tells_why_it_failed(tmp_path: Path) -> None:
    def bad(items: list[int]) -> list[int]:
        raise ValueError("always")

    run = run_of(dt.Stage("bad", bad), source=range(3), run_dir=tmp_path / "run")
    until(lambda: run.done, "it failed")
    shutil.rmtree(run.folder)
    with pytest.raises(dt.RunError, match="always") as told:
        list(run)
    assert told.value.codes == ("DT330",)


def test_a_handler_that_is_set_while_results_are_read_stays() -> None:
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


# Waves


def waves(source: Any, folder: Path) -> dt.Run:
    stages = [dt.Stage("a", kilobytes, fuse=False), dt.Stage("b", first, fuse=False, batch_size=5)]
    return run_of(*stages, source=source, mode="sequential", run_dir=folder)


def kilobytes(items: list[int]) -> list[list[int]]:
    return [[item] * 200 for item in items]


def first(items: list[list[int]]) -> list[int]:
    return [item[0] for item in items]


def spooled(run: dt.Run) -> list[Path]:
    return list((run.folder / "spool").glob("*"))


def test_the_spool_of_a_run_in_waves_is_gone_when_it_finished(tmp_path: Path, gated: list[Gated]) -> None:
    source = Gated(100, 100)
    gated.append(source)
    run = waves(source, tmp_path / "run")
    until(lambda: spooled(run), "something is spooled")
    source.let_go.set()
    assert sorted(run) == list(range(200))
    assert not (run.folder / "spool").exists()


def test_the_spool_of_a_run_in_waves_is_gone_when_it_was_cancelled(tmp_path: Path, gated: list[Gated]) -> None:
    source = Gated(100)
    gated.append(source)
    run = waves(source, tmp_path / "run")
    until(lambda: spooled(run), "something is spooled")
    run.cancel()
    assert run.wait().status == "cancelled"
    assert not (run.folder / "spool").exists()


def test_a_drain_of_a_run_in_waves_delivers_what_was_read(tmp_path: Path, gated: list[Gated]) -> None:
    source = Gated(100)
    gated.append(source)
    run = waves(source, tmp_path / "run")
    until(lambda: run.stats.read == 100, "all that was read is known")
    run.drain()
    assert sorted(run) == list(range(100))
    stats = run.stats
    assert (stats.status, stats.finished) == ("drained", 100)
    assert not (run.folder / "spool").exists()


# What is said


def test_everything_wrong_with_the_arguments_is_told_at_once(tmp_path: Path) -> None:
    wrong: Any = {"engine": "lokal", "max_errors": -1, "ordered": "no", "options": {"a": 1}, "run_dir": 5}
    not_a_pipeline: Any = [same]
    with pytest.raises(dt.ConfigError) as told:
        dt.run(not_a_pipeline, 5, **wrong)
    assert sorted(told.value.codes) == ["DT331", "DT332", "DT337", *["DT338"] * 4]
    for name in ("lokal", "max_errors=-1", "ordered='no'", "options=", "run_dir=5"):
        assert name in str(told.value)


def test_a_share_is_one_of_a_cluster() -> None:
    for share in (0.5, 1):
        with pytest.raises(dt.ConfigError, match="this run is local") as told:
            dt.run(dt.Pipeline([dt.Stage("same", same)]), range(3), share=share)
        assert told.value.codes == ("DT338",)


@pytest.mark.parametrize(
    "wrong", [{"source": "nothing/*.jsonl"}, {"sink": 5}, {"resume": "nobody"}, {"retry_errors": "nobody"}]
)
def test_no_cluster_is_reached_for_what_cannot_run(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "open_site", lambda *_, **__: pytest.fail("it was reached"))
    with pytest.raises(dt.DovetailError):
        dt.run(dt.Pipeline([dt.Stage("same", same)]), **({"source": range(3), "engine": "ray"} | wrong))


@pytest.mark.parametrize("of_another", [True, False])
def test_a_plan_must_be_one_for_this_pipeline(of_another: bool) -> None:
    plan: Any = dt.plan(dt.Pipeline([dt.Stage("other", same)]), CLUSTER) if of_another else "fast"
    with pytest.raises(dt.ConfigError) as told:
        run_of(dt.Stage("same", same), source=range(3), plan=plan)
    assert told.value.codes == ("DT338",)


def test_the_stats_of_a_running_run_are_those_of_now(monkeypatch: pytest.MonkeyPatch, gated: list[Gated]) -> None:
    monkeypatch.setattr(assembly, "REFRESH_TIMEOUT_S", PATIENCE_S)  # on a busy machine, too
    source = Gated(30, 3)
    gated.append(source)
    run = run_of(dt.Stage("same", same, workers=1), source=source)
    found = iter(run)
    for _ in range(30):
        next(found)
    stats = run.stats
    (unit,) = stats.units
    assert (stats.status, stats.read, unit.taken, unit.given) == ("running", 30, 30, 30)
    source.let_go.set()
    assert len(list(found)) == 3
    (unit,) = run.stats.units
    assert (unit.taken, unit.most_workers) == (33, 1)
    assert type(unit.most_workers) is int


def test_the_driver_may_have_been_started_without_standard_output(tmp_path: Path) -> None:
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
