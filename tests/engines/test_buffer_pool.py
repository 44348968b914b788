"""Buffer pool: reuse of shared memory without readers, limits, spilling, and release of all memory."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
import pytest

from dovetail.engines.local import buffer_pool as pool_module
from dovetail.engines.local.buffer_pool import BufferPool, MappedPayload, PlacedPayload
from dovetail.engines.local.payload_codec import pack_items, unpack_payload
from dovetail.engines.local.payload_recovery import BrokenItem, recover_items

if TYPE_CHECKING:
    from collections.abc import Iterator

MB = 1_000_000
pytestmark = pytest.mark.xdist_group("models")  # one process imports torch


def tensor(value: float) -> Any:
    import torch

    return torch.full((MB,), float(value))


def array(fill: int, size: int = MB) -> Any:
    return np.full(size, fill, np.uint8)


def refuse(*args: object) -> NoReturn:
    raise RuntimeError("cannot be made")


class BadReduce:
    def __reduce__(self) -> Any:
        return refuse, (1,)


def load(placed: PlacedPayload) -> tuple[MappedPayload, list[Any]]:
    reading = MappedPayload(placed.fd, placed.lengths)
    return reading, unpack_payload(reading.stream, reading.buffers)[1]


def values(placed: PlacedPayload) -> list[int]:
    """The first element of each array; every array has one value."""
    reading, items = load(placed)
    found = [int(item[0]) for item in items]
    assert all((item == item[0]).all() for item in items)
    del items
    assert reading.close()
    return found


def open_files() -> Counter[str]:
    """Number of open descriptors by kind."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the one that lists the folder
        found["memfd" if target.startswith("/memfd:dovetail") else target] += 1
    return found


def shared_mappings() -> int:
    return sum("/memfd:dovetail" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture(autouse=True)
def _tests_before_left_no_memory(collected: None) -> None:
    """Collect garbage of earlier tests, which would otherwise be released during this one."""
    gc.collect()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[BufferPool]:
    """A pool; afterwards there are no new descriptors and mappings."""
    before = open_files(), shared_mappings()
    made = BufferPool(64 * MB, tmp_path / "spill")
    yield made
    made.close()
    assert (open_files() - before[0], shared_mappings()) == (Counter(), before[1])


def test_a_payload_round_trips(pool: BufferPool) -> None:
    items = [array(1), tensor(1), pa.array(range(MB)), bytes(MB), bytearray(MB), {"a": [1, "x"]}]
    placed = pool.put(pack_items([7], items))
    assert not placed.spilled
    reading = MappedPayload(placed.fd, placed.lengths)
    keys, back = unpack_payload(reading.stream, reading.buffers)
    assert keys == [7]
    assert (back[0] == 1).all()
    assert back[1].equal(items[1])
    assert back[2].equals(items[2])
    assert back[3:] == items[3:]
    del back
    assert reading.close()


def test_a_payload_of_many_parts_round_trips(pool: BufferPool) -> None:
    items = [bytes([n % 251]) * 70_000 for n in range(1500)]
    for _ in range(2):  # written first, then copied into the mapping
        placed = pool.put(pack_items((), items))
        reading, back = load(placed)
        assert back == items
        assert reading.close()
        pool.free(placed.buffer)


def test_a_freed_buffer_is_reused(pool: BufferPool) -> None:
    first = pool.put(pack_items((), [array(1)]))
    pool.free(first.buffer)
    for fill in range(2, 6):
        again = pool.put(pack_items((), [array(fill)]))
        assert (again.buffer, again.fd) == (first.buffer, first.fd)
        assert values(again) == [fill]
        pool.free(again.buffer)
    assert open_files()["memfd"] == 1 + (sys.version_info < (3, 13))


def test_a_buffer_in_use_is_not_reused(pool: BufferPool) -> None:
    placed = [pool.put(pack_items((), [array(fill)])) for fill in range(5)]
    assert len({one.buffer for one in placed}) == 5
    assert [values(one) for one in placed] == [[fill] for fill in range(5)]


def test_slightly_larger_payloads_reuse_the_same_buffer(pool: BufferPool) -> None:
    size = MB
    numbers = set()
    for step in range(8):
        placed = pool.put(pack_items((), [array(step, size)]))
        numbers.add(placed.buffer)
        assert values(placed) == [step]
        pool.free(placed.buffer)
        size += 3000
    assert len(numbers) == 1


def test_much_smaller_payloads_get_a_new_buffer(pool: BufferPool) -> None:
    large = pool.put(pack_items((), [array(1, 10 * MB)]))
    pool.free(large.buffer)
    assert pool.put(pack_items((), [array(2, 4 * MB)])).buffer != large.buffer
    assert pool.put(pack_items((), [array(2, 9 * MB)])).buffer == large.buffer


def test_the_smallest_fitting_buffer_is_reused(pool: BufferPool) -> None:
    placed = [pool.put(pack_items((), [array(1, size)])) for size in (4 * MB, 3 * MB, 5 * MB)]
    for one in placed:
        pool.free(one.buffer)
    assert pool.put(pack_items((), [array(2, 3 * MB - 5000)])).buffer == placed[1].buffer


def test_a_discarded_buffer_is_never_reused(pool: BufferPool) -> None:
    first = pool.put(pack_items((), [array(1)]))
    pool.discard(first.buffer)
    pool.free(first.buffer)
    assert pool.put(pack_items((), [array(2)])).buffer != first.buffer
    assert open_files()["memfd"] == 1


KEPT: dict[str, Any] = {
    "array": (lambda: array(1), lambda item: item[5:10], lambda kept: kept.tolist() == [1] * 5),
    "tensor": (lambda: tensor(1), lambda item: item[5:10], lambda kept: kept.tolist() == [1] * 5),
    "table": (lambda: pa.array([1] * MB), lambda item: item[5:10], lambda kept: kept.to_pylist() == [1] * 5),
    "view": (lambda: array(1), lambda item: memoryview(item), lambda kept: bytes(kept) == bytes([1]) * MB),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_kept_view_is_detected_and_does_not_change(pool: BufferPool, kind: str) -> None:
    make, keep, unchanged = KEPT[kind]
    placed = pool.put(pack_items((), [make()]))
    mapped = shared_mappings()
    reading, items = load(placed)
    kept = keep(items[0])
    del items
    assert not reading.close()
    del reading
    assert unchanged(kept)
    pool.discard(placed.buffer)
    for fill in range(3):
        pool.free(pool.put(pack_items((), [array(fill)])).buffer)
    assert unchanged(kept)
    del kept
    assert shared_mappings() == mapped + 1  # the reused one


def test_a_kept_view_would_change_if_its_buffer_were_reused(pool: BufferPool) -> None:
    """The reason for the result of `close`: copy-on-write protects the producer, not the reader."""
    placed = pool.put(pack_items((), [array(1)]))
    reading, items = load(placed)
    assert not reading.close()
    pool.free(placed.buffer)
    pool.put(pack_items((), [array(2)]))
    assert items[0][0] == 2


def test_writes_of_a_reader_are_private(pool: BufferPool) -> None:
    placed = pool.put(pack_items((), [array(1), tensor(1)]))
    reading, items = load(placed)
    other, others = load(placed)
    items[0][:] = 9
    items[1].fill_(9)
    assert (others[0] == 1).all()
    assert (others[1] == 1).all()
    later, those = load(placed)
    assert (those[0] == 1).all()
    del items, others, those
    assert [one.close() for one in (reading, other, later)] == [True, True, True]
    pool.free(placed.buffer)
    again = pool.put(pack_items((), [array(3), tensor(3)]))
    assert again.buffer == placed.buffer
    assert values(again) == [3, 3]


def test_the_descriptor_may_be_closed_after_mapping(pool: BufferPool) -> None:
    placed = pool.put(pack_items((), [array(4)]))
    copy = os.dup(placed.fd)
    reading = MappedPayload(copy, placed.lengths)
    os.close(copy)
    pool.discard(placed.buffer)
    _, items = unpack_payload(reading.stream, reading.buffers)
    assert (items[0] == 4).all()
    del items
    assert reading.close()
    assert reading.close()


def test_a_failed_load_keeps_nothing_mapped(pool: BufferPool) -> None:
    placed = pool.put(pack_items((), [array(4), BadReduce(), tensor(1)]))
    reading = MappedPayload(placed.fd, placed.lengths)
    with pytest.raises(RuntimeError, match="cannot be made") as caught:
        unpack_payload(reading.stream, reading.buffers)
    assert caught.tb is not None  # its frames still refer to the views
    _, (first, bad, last) = recover_items(reading.stream, reading.buffers)
    assert (first.sum(), type(bad), last.sum()) == (4 * MB, BrokenItem, MB)
    del first, last
    assert reading.close()


def test_a_truncated_payload_is_an_error_and_no_crash(pool: BufferPool) -> None:
    placed = pool.put(pack_items((), [array(4)]))
    with pytest.raises(ValueError, match="mmap length"):
        MappedPayload(placed.fd, (*placed.lengths, 10 * MB))


def test_another_process_can_read_a_payload(pool: BufferPool) -> None:
    pool.free(pool.put(pack_items((), [array(1)])).buffer)
    placed = pool.put(pack_items((), [array(6)]))
    code = (
        "from dovetail.engines.local.buffer_pool import MappedPayload; from "
        "dovetail.engines.local.payload_codec import unpack_payload\n"
    )
    code += f"reading = MappedPayload({placed.fd}, {placed.lengths})\n"
    code += "array = unpack_payload(reading.stream, reading.buffers)[1][0]\n"
    code += "print(array.sum()); array[:] = 0; del array; print(reading.close())"
    run = [sys.executable, "-c", code]
    shown = subprocess.run(run, check=True, capture_output=True, text=True, pass_fds=[placed.fd])
    assert shown.stdout.split() == [str(6 * MB), "True"]
    assert values(placed) == [6]


# -------------------------------------------------------------------------------------------------------------- limits


def test_idle_memory_stays_within_its_limit(tmp_path: Path) -> None:
    pool = BufferPool(3 * MB, tmp_path)
    placed = [pool.put(pack_items((), [array(n)])) for n in range(6)]
    assert pool.used_bytes >= 6 * MB
    for one in placed:
        pool.free(one.buffer)
        assert pool.idle_bytes <= 3 * MB
    assert pool.used_bytes == 0
    assert open_files()["memfd"] == 2
    assert pool.put(pack_items((), [array(7)])).buffer in {placed[4].buffer, placed[5].buffer}
    pool.close()


def test_idle_buffers_stay_within_their_number(tmp_path: Path) -> None:
    before = open_files()
    pool = BufferPool(1000 * MB, tmp_path)
    placed = [pool.put(pack_items((), [array(n, 20_000)])) for n in range(pool_module.MAX_IDLE_BUFFERS + 10)]
    for one in placed:
        pool.free(one.buffer)
    assert open_files()["memfd"] == pool_module.MAX_IDLE_BUFFERS
    pool.close()
    assert not open_files() - before


def test_a_buffer_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    pool = BufferPool(0, tmp_path)
    pool.free(pool.put(pack_items((), [array(1)])).buffer)
    assert "memfd" not in open_files()
    pool.close()


def test_unwritten_capacity_uses_no_memory(pool: BufferPool) -> None:
    placed = pool.put(pack_items((), [array(1, 9 * MB)]))
    used = os.fstat(placed.fd)
    assert used.st_size > placed.size
    assert used.st_blocks * 512 <= placed.size + mmap.PAGESIZE
    assert pool.used_bytes == used.st_blocks * 512


def shared_kb() -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssShmem"].split()[0])


def test_shared_memory_is_released(pool: BufferPool) -> None:
    before = shared_kb()
    first = pool.put(pack_items((), [array(1, 20 * MB)]))
    pool.free(first.buffer)
    second = pool.put(pack_items((), [array(1, 20 * MB)]))
    assert second.buffer == first.buffer
    assert shared_kb() >= before + 19_000
    pool.discard(second.buffer)
    assert shared_kb() <= before + 100


# ------------------------------------------------------------------------------------------------------------ spilling


def test_a_spilled_payload_round_trips_and_leaves_no_file(pool: BufferPool, tmp_path: Path) -> None:
    placed = pool.put(pack_items((), [array(5), array(6)]), spill=True)
    assert placed.spilled
    assert list((tmp_path / "spill").iterdir()) == []
    assert str(tmp_path) in str(Path(f"/proc/self/fd/{placed.fd}").readlink())
    pool.free(placed.buffer)
    pool.discard(placed.buffer)
    assert values(placed) == [5, 6]
    os.close(placed.fd)
    assert pool.put(pack_items((), [array(1)])).buffer != placed.buffer


def test_spilling_works_on_file_systems_without_unnamed_files(
    pool: BufferPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_without_unnamed_files(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real_open(path, flags, *args)

    monkeypatch.setattr(os, "open", open_without_unnamed_files)
    placed = pool.put(pack_items((), [array(5)]), spill=True)
    assert list((tmp_path / "spill").iterdir()) == []
    assert values(placed) == [5]
    os.close(placed.fd)


def short_of(what: str, monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
    """Let a function of `os` fail for unnamed memory, as it does when memory is short."""
    real = getattr(os, what)

    def fail(*args: Any) -> Any:
        if isinstance(args[0], int) and "/memfd:" not in str(Path(f"/proc/self/fd/{args[0]}").readlink()):
            return real(*args)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, what, fail)


@pytest.mark.parametrize("what", ["memfd_create", "ftruncate", "pwritev"])
def test_without_memory_a_payload_is_spilled(pool: BufferPool, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = pool.put(pack_items((), [array(1, 10 * MB)]))
    pool.free(idle.buffer)
    with monkeypatch.context() as patch:
        short_of(what, patch)
        placed = pool.put(pack_items((), [array(8)]))
    assert placed.spilled
    assert values(placed) == [8]
    os.close(placed.fd)
    assert "memfd" not in open_files()  # idle buffers are released, too
    assert not pool.put(pack_items((), [array(9)])).spilled


def test_a_buffer_that_cannot_grow_is_released(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pool.put(pack_items((), [array(1, 9 * MB)]))
    pool.free(first.buffer)
    with monkeypatch.context() as patch:
        short_of("pwritev", patch, errno.ENOMEM)
        warm = pool.put(pack_items((), [array(2, 9 * MB)]))
        pool.free(warm.buffer)
        grown = pool.put(pack_items((), [array(3, 9 * MB + 100_000)]))
    assert (warm.buffer, warm.spilled, grown.spilled) == (first.buffer, False, True)
    assert values(grown) == [3]
    os.close(grown.fd)
    assert "memfd" not in open_files()


def test_a_buffer_that_cannot_be_mapped_is_written_with_write_calls(
    pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.ENOMEM, "no room for a mapping")

    first = pool.put(pack_items((), [array(1)]))
    pool.free(first.buffer)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        again = pool.put(pack_items((), [array(2)]))
    assert (again.buffer, again.spilled) == (first.buffer, False)
    assert values(again) == [2]


def test_a_full_disk_is_an_error_and_leaves_no_descriptor(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()

    def fail(*args: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(OSError, match="no space left"):
            pool.put(pack_items((), [array(1)]))
    assert not open_files() - before


def test_partial_writes_are_completed(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def little(fd: int, parts: list[memoryview], at: int) -> int:
        return real(fd, [parts[0][:33_333]], at)

    monkeypatch.setattr(os, "pwritev", little)
    for spill in (False, True):
        placed = pool.put(pack_items((), [array(5, 100_000), array(6, 100_001), array(7, 100_000)]), spill)
        assert values(placed) == [5, 6, 7]
        if spill:
            os.close(placed.fd)
