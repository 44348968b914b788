"""Results that a worker stores while their call is running: where they are kept, and what is discarded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dovetail.control.engine import UnsendableItemError
from dovetail.engines.local.protocol import FLAG_NO_OUTPUT, KIND_FILE, KIND_INLINE, KIND_SHARED, KIND_WRITTEN
from dovetail.engines.local.protocol import FLAG_SPOOL as SPOOL
from dovetail.engines.local.result_packer import PieceStore, ResultPacker
from dovetail.engines.local.worker_spec import WorkerSpec
from dovetail.engines.result_stream import ResultsNotStoredError
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE = [bytes([number % 256]) * 1000 for number in range(300)]
"""More than travels inside a message."""


@pytest.fixture
def packer(tmp_path: Path) -> Iterator[ResultPacker]:
    seat = Seat("here", 1000)
    found = ResultPacker(WorkerSpec(1, (), seat, 0, 1, 0, (), (), "", str(tmp_path / "spool"), 1_000_000))
    yield found
    found.close()


def store_of(packer: ResultPacker, flags: int = 0, cut: int = 1000, writer: Any = None) -> PieceStore:
    return PieceStore(packer, flags, cut, writer, lambda: None)


def keys(items: list[Any]) -> list[Any]:
    return [(0, number) for number in range(len(items))]


def kinds(pieces: list[Any]) -> list[int]:
    return [piece.place.output[0][0][2] for piece in pieces]


def test_pieces_are_kept_in_shared_memory_and_discarded_if_their_call_failed(packer: ResultPacker) -> None:
    store = store_of(packer)
    (kept,), (failed,) = store(keys(LARGE), LARGE), store(keys(LARGE), LARGE)
    assert kinds([kept, failed]) == [KIND_SHARED, KIND_SHARED]
    assert packer.pool is not None
    both = packer.pool.used_bytes
    store.discard_unused(["another result", kept])
    assert packer.pool.used_bytes == both / 2
    store.discard_unused([])
    assert packer.pool.used_bytes == 0


def test_what_exceeds_the_memory_of_a_message_goes_to_files(packer: ResultPacker) -> None:
    store = store_of(packer)
    pieces = [piece for _ in range(5) for piece in store(keys(LARGE), LARGE)]
    assert [bool(piece.place.output[3]) for piece in pieces] == [False, False, False, True, True]
    assert packer.pool is not None
    assert packer.pool.used_bytes < 1_300_000
    store.discard_unused([])


def test_descriptors_of_one_message_are_limited(packer: ResultPacker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.engines.local.result_packer.resource.getrlimit", lambda _: (8, 8))
    pieces = [piece for _ in range(4) for piece in store_of(packer)(keys(LARGE), LARGE)]
    assert kinds(pieces) == [KIND_SHARED] * 4
    store = store_of(packer)
    assert kinds([piece for _ in range(4) for piece in store(keys(LARGE), LARGE)])[-1] == KIND_INLINE


def test_pieces_have_the_size_that_the_next_stage_wants(packer: ResultPacker) -> None:
    pieces = store_of(packer, cut=7)(keys(LARGE[:20]), LARGE[:20])
    assert [piece.items for piece in pieces] == [7, 7, 6]


def test_pieces_for_a_later_wave_go_to_the_spool(packer: ResultPacker) -> None:
    assert kinds(store_of(packer, SPOOL)(keys(LARGE), LARGE)) == [KIND_FILE]


def test_a_rank_without_output_stores_nothing(packer: ResultPacker) -> None:
    (piece,) = store_of(packer, FLAG_NO_OUTPUT)(keys(LARGE), LARGE)
    assert (piece.items, piece.place) == (300, None)


def test_with_a_sink_pieces_are_written_while_the_call_is_running(packer: ResultPacker) -> None:
    class Writer:
        rows = 0

        def begin(self, part: str) -> None: ...

        def write(self, keys: list[Any], items: list[Any]) -> list[Any]:
            self.rows += len(items)
            return [("part", 0, 1, keys)]

    writer = Writer()
    assert kinds(store_of(packer, writer=writer)(keys(LARGE), LARGE)) == [KIND_WRITTEN]
    assert writer.rows == 300


def test_results_that_cannot_be_pickled_are_blamed_and_a_broken_disk_is_not_blamed_on_them(
    packer: ResultPacker, tmp_path: Path
) -> None:
    generator = (number for number in range(3))
    with pytest.raises(UnsendableItemError, match="generator"):
        store_of(packer)([0], [generator])
    (tmp_path / "spool").write_text("not a folder")
    with pytest.raises(ResultsNotStoredError):
        store_of(packer, SPOOL)(keys(LARGE), LARGE)
