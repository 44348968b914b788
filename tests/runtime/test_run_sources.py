"""Sources of `dt.run` that block, raise, or wait for results."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, NoReturn

import pytest

import dovetail as dt
from runtime.aids import GatedSource, descriptors, run_of, workers_of
from stage_functions import same
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
pytestmark = pytest.mark.time_limit


@pytest.mark.parametrize("burst", [9, 100, 1000])
def test_items_are_processed_while_the_source_blocks(gated: list[GatedSource], burst: int) -> None:
    source = GatedSource(burst, 20)
    gated.append(source)
    run = run_of(dt.Stage("same", same), source=source)
    found = iter(run)
    assert sorted(next(found) for _ in range(burst)) == list(range(burst))
    source.released.set()
    assert sorted(found) == list(range(burst, burst + 20))


def test_a_source_can_wait_for_each_result_before_it_yields_the_next_item() -> None:
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


def test_drain_delivers_the_items_that_a_source_yielded_before_it_blocked(gated: list[GatedSource]) -> None:
    source = GatedSource(10)
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


def test_the_generator_of_a_source_is_closed_when_its_run_is_cancelled() -> None:
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


def test_a_run_with_a_blocking_subclass_of_list_as_source_can_be_cancelled(gated: list[GatedSource]) -> None:
    blocking = GatedSource(3)
    gated.append(blocking)

    class Lazy(list[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(blocking)

    run = run_of(dt.Stage("same", same), source=Lazy())
    assert blocking.blocks.wait(PATIENCE_S)
    run.cancel()
    assert run.wait(PATIENCE_S).status == "cancelled"
    assert not blocking.released.is_set()


@pytest.mark.processes
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
@pytest.mark.processes
def test_a_source_can_raise_an_exception_without_a_text(first: int) -> None:
    def source() -> Iterator[int]:
        yield from range(first)
        raise CannotBeShown

    run = run_of(dt.Stage("same", same), source=source())
    with pytest.raises(CannotBeShown):
        list(run)
    assert not workers_of(run.folder)


def first(items: list[list[int]]) -> list[int]:
    return [item[0] for item in items]
