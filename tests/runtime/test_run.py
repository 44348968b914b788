"""`dt.run`: results exactly once, bounded buffers, inputs that stay unchanged."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dovetail as dt
from dovetail.control.commands import HostedObject, RunBatches, StartWorker
from dovetail.control.events import BatchesDone
from dovetail.data import iterator_sink
from dovetail.engines.local.engine import LocalEngine
from dovetail.resources.seat import Seat
from dovetail.streaming.settings import StreamOptions
from runtime.aids import Script, run_of
from stage_functions import same
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.time_limit(1200 if LONG else 120)


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def one_of_two(items: list[int]) -> list[int]:
    return [item for item in items if item % 2]


def thrice(items: list[int]) -> list[int]:
    return [item for item in items for _ in range(3)]


# Results


@pytest.mark.processes
def test_every_item_is_delivered_once_and_counted_in_the_stats() -> None:
    run = run_of(dt.Stage("double", double), source=range(1000))
    assert sorted(run) == [2 * number for number in range(1000)]
    stats = run.stats
    assert (stats.status, stats.read, stats.finished, stats.failed) == ("finished", 1000, 1000, 0)


def test_items_may_be_dropped_and_multiplied() -> None:
    stages = [dt.Stage("half", one_of_two, batch_size=3), dt.Stage("thrice", thrice, batch_size=2)]
    assert sorted(run_of(*stages, source=range(100))) == sorted(list(range(1, 100, 2)) * 3)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sorted_at_once", [iterator_sink.MAX_SORTED_ITEMS, 1])
def test_ordered_output_is_in_the_order_of_the_source(
    workers: int, sorted_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterator_sink, "MAX_SORTED_ITEMS", sorted_at_once)
    stages = [dt.Stage("jitter", jitter, workers=workers, fuse=False), dt.Stage("thrice", thrice, fuse=False)]
    found = list(run_of(*stages, source=range(300), ordered=True, cluster="1x(4cpu, 4GB)"))
    assert found == [number for number in range(300) for _ in range(3)]


def jitter(items: list[int]) -> list[int]:
    time.sleep(items[0] % 5 / 1000)
    return items


def test_nothing_in_nothing_out() -> None:
    run = run_of(dt.Stage("double", double), source=[])
    assert list(run) == []
    assert run.status == "finished"


def test_none_and_odd_values_are_items_too() -> None:
    values: list[Any] = [None, 0, "", [], {}, b"", (), float("inf"), {"a": [1, {2}]}, 1 << 200]
    run = run_of(dt.Stage("same", lambda items: items, batch_size=3), source=values)
    assert sorted(map(repr, run)) == sorted(map(repr, values))


def test_a_dag_gives_the_union_of_its_leaves() -> None:
    stages = [
        dt.Stage("read", double),
        dt.Stage("a", lambda items: [("a", item) for item in items], after=["read"]),
        dt.Stage("b", lambda items: [("b", item) for item in items], after=["read"]),
    ]
    found = sorted(run_of(*stages, source=range(50), cluster="1x(4cpu, 4GB)"))
    assert found == [(name, 2 * number) for name in "ab" for number in range(50)]


def test_an_exception_fails_the_run_and_names_the_stage_and_the_line() -> None:
    run = run_of(dt.Stage("double", double), dt.Stage("picky", picky), source=range(100))
    with pytest.raises(dt.RunError, match="picky") as raised:
        list(run)
    assert "ValueError: not fifty" in str(raised.value)
    assert run.status == "failed"


def picky(items: list[int]) -> list[int]:
    if 50 in items:
        raise ValueError("not fifty")
    return items


def test_more_errors_than_allowed_fail_the_run() -> None:
    def bad(items: list[int]) -> list[int]:
        raise ValueError("always")

    run = run_of(dt.Stage("bad", bad, on_error="skip", retries=0), source=range(1000), max_errors=5)
    with pytest.raises(dt.RunError, match="always"):
        list(run)
    assert run.stats.read < 1000 or run.stats.failed > 5


def test_two_runs_may_be_read_in_turn() -> None:
    first = run_of(dt.Stage("double", double), source=range(200), cluster="1x(1cpu, 1GB)")
    second = run_of(dt.Stage("thrice", thrice), source=range(200), cluster="1x(1cpu, 1GB)")
    found = [pair for pair in zip(first, second, strict=False)]  # noqa: C416
    assert len(found) == 200
    rest = list(second)
    assert len(rest) >= 399


@pytest.mark.parametrize("wrong", [5, None, 1.5])
def test_a_source_must_be_an_iterable_of_items(wrong: Any) -> None:
    with pytest.raises(dt.ConfigError, match="source"):
        run_of(dt.Stage("double", double), source=wrong)


# What waits


def slow_batch(items: list[int]) -> list[int]:
    time.sleep(0.001)
    return items


def test_a_generator_is_never_read_far_ahead_of_a_slow_last_stage() -> None:
    items = 200_000 if LONG else 30_000
    read = 0
    ahead = []

    def source() -> Iterator[int]:
        nonlocal read
        for number in range(items):
            read = number
            yield number

    stages = [
        dt.Stage("double", double, batch_size=64, fuse=False),
        dt.Stage("slow", slow_batch, batch_size=16, fuse=False, workers=1),
    ]
    run = run_of(*stages, source=source())
    count = 0
    for _ in run:
        count += 1
        ahead.append(read - count)
    assert count == items
    assert max(ahead) < 20_000


def test_a_generator_is_not_read_while_results_are_not_read() -> None:
    read = 0

    def source() -> Iterator[bytes]:
        nonlocal read
        for number in range(3000):
            read = number
            yield b"x" * 1_000_000

    run = run_of(dt.Stage("same", lambda items: items), source=source(), options=options(32 << 20))
    first = next(iter(run))
    assert len(first) == 1_000_000
    until(lambda: _stands(lambda: read), "nothing more is read")
    assert read < 600
    run.cancel()
    list(run)


def _stands(value: Any) -> bool:
    before = value()
    time.sleep(0.5)
    return bool(value() == before)


def options(byte_budget: int) -> StreamOptions:
    return StreamOptions(byte_budget=byte_budget, hop_s=0.0002, eager=True)


def megabytes(items: list[int]) -> list[Any]:
    return [np.full(1 << 17, item, dtype=np.int64) for item in items]


def slow_first(items: list[Any]) -> list[int]:
    time.sleep(0.002)
    assert all((item == item[0]).all() for item in items)
    return [int(item[0]) for item in items]


def memory_bytes() -> int:
    """Bytes in anonymous memory files (memfd) of this process."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if "memfd:" in os.readlink(f"/proc/self/fd/{fd}"):  # noqa: PTH115
                total += os.fstat(int(fd)).st_blocks * 512
        except OSError:
            continue
    return total


@pytest.mark.processes
def test_a_stage_that_gives_much_is_held_by_the_byte_budget() -> None:
    items = 2000 if LONG else 300
    peaks: list[int] = []

    def source() -> Iterator[int]:
        for number in range(items):
            peaks.append(memory_bytes())
            yield number

    stages = [
        dt.Stage("much", megabytes, fuse=False, workers=1),
        dt.Stage("slow", slow_first, fuse=False, workers=1),
    ]
    run = run_of(*stages, source=source(), options=options(64 << 20))
    assert sorted(run) == list(range(items))
    assert max(peaks) < 3 * (64 << 20)


@pytest.mark.long
def test_a_million_items_need_little_memory(tmp_path: Path) -> None:
    text = """
import os, time
import psutil
import dovetail as dt

def add(items):
    return [item + 1 for item in items]

def slow(items):
    time.sleep(0.0005)
    return items

pipe = dt.Pipeline([
    dt.Stage("add", add, batch_size=64, fuse=False), dt.Stage("slow", slow, batch_size=64, fuse=False, workers=1)
])
most = count = 0
me = psutil.Process()
for item in dt.run(pipe, (n for n in range(1_000_000)), cluster="1x(2cpu, 4GB)"):
    count += 1
    if count % 50_000 == 1:
        used = 0
        for process in (me, *me.children(recursive=True)):
            try:
                used += process.memory_full_info().uss
            except psutil.Error:
                pass
        most = max(most, used)
print("END", count, most)
"""
    with Script(tmp_path, text) as script:
        script.process.wait(600)
        words = script.finish().split()
        assert words[-2] == "1000000"
        assert int(words[-1]) < 300 << 20


# What was read never changes


class Keeps:
    """Keeps every input, and looks whether any has changed since."""

    def setup(self) -> None:
        self.kept: list[tuple[Any, int]] = []

    def __call__(self, items: list[Any]) -> list[int]:
        self.kept += [(item, int(item[0])) for item in items]
        assert all((item == value).all() for item, value in self.kept)
        return [int(item[0]) for item in items]


class KeepsSome(Keeps):
    """Only slices, and only of every third."""

    def __call__(self, items: list[Any]) -> list[int]:
        self.kept += [(item[10:20], int(item[0])) for item in items if item[0] % 3 == 0]
        assert all((item == value).all() for item, value in self.kept)
        return [int(item[0]) for item in items]


@pytest.mark.parametrize(
    ("keeper", "slots"),
    [
        pytest.param(Keeps, 1, marks=pytest.mark.processes),
        (Keeps, 2),
        (KeepsSome, 1),
        pytest.param(KeepsSome, 2, marks=pytest.mark.processes),
    ],
)
def test_a_function_that_keeps_its_inputs_never_sees_them_change(keeper: type[Keeps], slots: int) -> None:
    items = 400 if LONG else 80
    stages = [
        dt.Stage("make", megabytes, fuse=False, workers=1),
        dt.Stage("keep", keeper, fuse=False, workers=1, slots=slots),
    ]
    assert sorted(run_of(*stages, source=range(items))) == list(range(items))


def test_results_stay_valid_after_the_run() -> None:
    kept = []
    for item in run_of(dt.Stage("make", megabytes, workers=1), source=range(100)):
        kept.append((item, int(item[0])))
        assert all((array == value).all() for array, value in kept)
    assert sorted(value for _, value in kept) == list(range(100))


def test_results_are_writable() -> None:
    for item in run_of(dt.Stage("make", megabytes), source=range(5)):
        item += 1
        assert (item == item[0]).all()


def writes_in_place(items: list[Any]) -> list[Any]:
    for item in items:
        item += 1000
    return items


def test_a_function_may_write_into_its_inputs() -> None:
    stages = [
        dt.Stage("make", megabytes, fuse=False),
        dt.Stage("a", writes_in_place, fuse=False, after=["make"]),
        dt.Stage("b", slow_first, fuse=False, after=["make"]),
    ]
    found = [
        int(item) if isinstance(item, int) else int(item[0])
        for item in run_of(*stages, source=range(40), cluster="1x(4cpu, 8GB)")
    ]
    assert sorted(found) == sorted([*range(40), *range(1000, 1040)])


@pytest.mark.parametrize(
    "kind", [pytest.param("bytes", marks=pytest.mark.processes), "bytearray", "torch", "arrow", "strings", "fortran"]
)
def test_large_values_of_many_kinds_come_through(kind: str) -> None:
    def make(items: list[int]) -> list[Any]:
        if kind == "bytes":
            return [bytes([item]) * 500_000 for item in items]
        if kind == "bytearray":
            return [bytearray([item]) * 500_000 for item in items]
        if kind == "strings":
            return ["ä" * 500_000 + str(item) for item in items]
        if kind == "fortran":
            return [np.asfortranarray(np.arange(90_000.0).reshape(300, 300) + item)[:, ::2] for item in items]
        if kind == "torch":
            import torch

            return [torch.full((300, 300), item) for item in items]
        import pyarrow

        return [pyarrow.table({"a": [item] * 50_000, "b": ["x"] * 50_000}) for item in items]

    found = list(run_of(dt.Stage("make", make, fuse=False), dt.Stage("same", same, fuse=False), source=range(6)))
    expected = make(list(range(6)))
    key = {"arrow": lambda v: v["a"][0].as_py(), "torch": lambda v: int(v[0, 0]), "fortran": lambda v: v[0, 0]}.get(
        kind
    )
    found.sort(key=key or bytes if kind in ("bytes", "bytearray") else key)
    if kind in ("fortran", "torch"):
        assert all(bool((a == b).all()) for a, b in zip(found, expected, strict=True))
    else:
        assert found == expected


def test_a_message_may_have_more_payloads_than_one_packet_has_descriptors() -> None:
    engine = LocalEngine()
    try:
        engine.submit([StartWorker(1, (Seat("node-0", 100),), (HostedObject("first", firsts, 1),))])
        segments = [engine.store([n], [np.full(20_000, n)]) for n in range(600)]
        assert {type(segment.ref).__name__ for segment in segments} == {"SharedRef"}
        parts = [(segment, 0, 1) for segment in segments]
        engine.submit([RunBatches(1, 1, "first", parts, 600, 50, 1000)])
        log: list[Any] = []

        def done() -> bool:
            log.extend(event for event in engine.poll(0.1) if isinstance(event, BatchesDone))
            return bool(log)

        until(done, "it is done")
        assert [item for segment in log[0].segments for item in engine.load(segment)[1]] == list(range(600))
    finally:
        engine.close()


def firsts(items: list[Any]) -> list[int]:
    return [int(item[0]) for item in items]


# On disk


def test_payloads_that_do_not_fit_in_memory_come_through_files(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path, memory_bytes=1 << 20)
    try:
        hosted = HostedObject("add", writes_in_place, 1)
        engine.submit([StartWorker(1, (Seat("node-0", 100),), (hosted,))])
        segments = [engine.store(range(2), megabytes([number, number])) for number in range(10)]
        log: list[Any] = []

        def all_done(count: int) -> bool:
            log.extend(event for event in engine.poll(0.1) if isinstance(event, BatchesDone))
            return len(log) == count

        for number, segment in enumerate(segments):
            for round_ in (1, 2):
                engine.submit([RunBatches(round_ * 100 + number, 1, "add", [(segment, 0, 2)], 2, 1, 1)])
        until(lambda: all_done(20), "all are done")
        spilled = [segment for done in log for segment in done.segments if type(segment.ref).__name__ == "SpilledRef"]
        assert spilled
        for done in log:
            for segment in done.segments:
                _, items = engine.load(segment)
                assert len(items) == 1
                assert (items[0] == done.message % 100 + 1000).all()
        assert list((tmp_path / "spool").glob("*")) == []
    finally:
        engine.close()


def test_spilled_payloads_stop_counting_when_they_are_freed(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path, memory_bytes=1 << 20)
    try:
        hosted = HostedObject("add", writes_in_place, 1)
        engine.submit([StartWorker(1, (Seat("node-0", 100),), (hosted,))])
        segment = engine.store(range(8), megabytes(list(range(8))))
        for number in range(20):
            engine.submit([RunBatches(number, 1, "add", [(segment, 0, 8)], 8, 1, 1)])
            until(lambda: any(isinstance(event, BatchesDone) for event in engine.poll(0.1)), "it is done")
        assert engine._payloads._descriptors < 60
    finally:
        engine.close()


def test_waves_give_the_same_and_leave_files_only_in_the_run_folder(tmp_path: Path) -> None:
    stages = [dt.Stage("make", megabytes, batch_size=4), dt.Stage("read", slow_first, batch_size=3)]
    run = run_of(*stages, source=range(60), mode="sequential", run_dir=tmp_path / "run")
    assert sorted(run) == list(range(60))
    assert run.plan.mode == "sequential"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.processes
def test_waves_survive_kill_9(tmp_path: Path) -> None:
    stages = [
        dt.Stage("make", Kills(str(tmp_path / "a"), 21, megabytes), batch_size=4),
        dt.Stage("read", Kills(str(tmp_path / "b"), 40, slow_first), batch_size=3),
    ]
    run = run_of(*stages, source=range(60), mode="sequential", run_dir=tmp_path / "run")
    assert sorted(run) == list(range(60))
    assert sum(unit.lost for unit in run.stats.units) == 2


class Kills:
    """Kills its worker once, at an item."""

    def __init__(self, mark: str, number: int, work: Any) -> None:
        self._mark, self._number, self._work = mark, number, work

    def __call__(self, items: list[Any]) -> list[Any]:
        numbers = [item if isinstance(item, int) else int(item[0]) for item in items]
        if self._number in numbers and not os.path.exists(self._mark):  # noqa: PTH110
            open(self._mark, "w").close()  # noqa: PTH123
            os.kill(os.getpid(), 9)
        found: list[Any] = self._work(items)
        return found


class Word:
    def __init__(self, text: str) -> None:
        self.text = text.strip()


def test_each_calls_a_class_whose_objects_cannot_be_called_with_every_item() -> None:
    assert sorted(dt.run([dt.each(int)], ["1", "20"])) == [1, 20]
    assert [word.text for word in dt.run([dt.each(Word)], [" a "])] == ["a"]
