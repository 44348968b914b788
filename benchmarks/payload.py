"""Throughput of large arrays between processes, and leftovers in shared memory.

    python benchmarks/payload.py --arrays 2000 --json result.json

New arrays of 10 MB pass through two unfused stages; the reader sums all of them. Compared with the same functions in
processes that pickle through pipes, in turn. GB/s count items, from the first result to the last; median of the rounds.
`--arrays` sets the length of the run whose memory is measured.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import tempfile
import time
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

import dovetail as dt
import report
from resource_usage import cpu_s, descriptors, memory_peak, shmem_mb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

    Array = np.ndarray[Any, np.dtype[np.float64]]
    Function = Callable[[list[Any]], list[Any]]

CLUSTER = "1x(4cpu, 8GB)"
MB = 10
FRESH = multiprocessing.get_context("spawn")


def added(arrays: list[Array]) -> list[Array]:
    return [array + 1 for array in arrays]


def added_in_place(arrays: list[Array]) -> list[Array]:
    for array in arrays:
        array += 1
    return arrays


def looked_at(arrays: list[Array]) -> list[Array]:
    assert all(array[0] >= 0 for array in arrays)
    return arrays


def same(texts: list[bytes]) -> list[bytes]:
    return texts


KINDS: dict[str, Function] = {"new": added, "in_place": added_in_place, "read_only": looked_at, "bytes": same}
"""Functions of the two stages."""


def items(kind: str, count: int, mb: float) -> Iterator[Any]:
    """New arrays, or bytes."""
    size = int(mb * 1e6)
    for number in range(count):
        yield bytes(size) if kind == "bytes" else np.full(size // 8, float(number))


def total(item: Any) -> float:
    return float(item[0] + item[-1]) if isinstance(item, bytes) else float(item.sum())


def rate(kind: str, count: int, mb: float, results: Iterable[Any]) -> float:
    """GB/s from the first result to the last; checks all results."""
    found = 0.0
    began = 0.0
    for number, item in enumerate(results):
        found += total(item)
        if not number:
            began = time.perf_counter()
    seconds = time.perf_counter() - began
    changes = 2 if KINDS[kind] in (added, added_in_place) else 0
    size = int(mb * 1e6) // 8
    wanted = 0.0 if kind == "bytes" else size * sum(number + changes for number in range(count))
    assert found == wanted, f"{kind}: {found} instead of {wanted}"
    return (count - 1) * mb / 1000 / seconds


def through_dovetail(kind: str, count: int, mb: float) -> float:
    stages = [dt.Stage(name, KINDS[kind], dt.Resources(cpus=1), workers=1, fuse=False) for name in ("one", "two")]
    with tempfile.TemporaryDirectory() as folder:
        results = dt.run(
            dt.Pipeline(stages), items(kind, count, mb), cluster=CLUSTER, run_dir=f"{folder}/run", progress=False
        )
        return rate(kind, count, mb, results)


def through_pipes(kind: str, count: int, mb: float) -> float:
    ends = [FRESH.Pipe(duplex=False) for _ in range(3)]
    workers = [
        FRESH.Process(target=_relay, args=(KINDS[kind], ends[at][0], ends[at + 1][1]), daemon=True) for at in range(2)
    ]
    for worker in workers:
        worker.start()
    feeder = Thread(target=_feed, args=(ends[0][1], items(kind, count, mb)), daemon=True)
    feeder.start()
    found = rate(kind, count, mb, (ends[2][0].recv()[0] for _ in range(count)))
    feeder.join()
    for worker in workers:
        worker.join()
    for reading, writing in ends:
        reading.close()
        writing.close()
    return found


def _relay(run: Function, come: Connection, go: Connection) -> None:
    while (batch := come.recv()) is not None:
        go.send(run(batch))
    go.send(None)


def _feed(go: Connection, made: Iterator[Any]) -> None:
    for item in made:
        go.send([item])
    go.send(None)


def compare(count: int, mb: float, rounds: int, kinds: list[str]) -> dict[str, Any]:
    """Dovetail and pipes in turn."""
    through_dovetail("read_only", 3, mb)
    found: dict[str, Any] = {}
    for kind in kinds:
        both = [
            (_timed(through_dovetail, kind, count, mb), _timed(through_pipes, kind, count, mb)) for _ in range(rounds)
        ]
        (ours, our_cpu), (theirs, their_cpu) = (
            [statistics.median(column) for column in zip(*side, strict=True)] for side in zip(*both, strict=True)
        )
        found[kind] = {
            "gb_per_s": ours,
            "pipe_gb_per_s": theirs,
            "ratio": ours / theirs,
            "cpu_ms": our_cpu,
            "pipe_cpu_ms": their_cpu,
            "rounds": both,
        }
    return found


def _timed(through: Callable[[str, int, float], float], kind: str, count: int, mb: float) -> tuple[float, float]:
    """GB/s, and CPU milliseconds per array, including all processes."""
    before = cpu_s()
    found = through(kind, count, mb)
    return found, 1e3 * (cpu_s() - before) / count


def watch(count: int, mb: float) -> dict[str, Any]:
    """Memory of a long run, and leftovers after it."""
    gc.collect()
    before = {"shmem_before_mb": least_shmem_mb(), "descriptors_before": descriptors()}
    with memory_peak() as peak:
        through = through_dovetail("new", count, mb)
    kept = descriptors()
    gc.collect()
    after = {"shmem_after_mb": least_shmem_mb(), "descriptors_after": descriptors(), "descriptors_uncollected": kept}
    return {**before, **after, "arrays": count, "long_gb_per_s": through, "peak_mb": peak.mb, "growth": peak.growth}


def least_shmem_mb() -> float:
    """Minimum over a second: other processes of the machine use shared memory, too."""
    found = [shmem_mb()]
    for _ in range(10):
        time.sleep(0.1)
        found.append(shmem_mb())
    return min(found)


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--arrays", type=int, default=2000, help="arrays of the run whose memory is measured")
    arguments.add_argument("--compared", type=int, default=100, help="arrays per round of the comparison")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--mb", type=float, default=MB, help="MB per array")
    arguments.add_argument("--kinds", default=",".join(KINDS), help="comma-separated; new is always measured")
    asked = arguments.parse_args()
    kinds = compare(asked.compared, asked.mb, asked.rounds, list(dict.fromkeys(("new", *asked.kinds.split(",")))))
    keys = ["gb_per_s", "pipe_gb_per_s", "ratio", "cpu_ms", "pipe_cpu_ms"]
    header = ["functions", "GB/s", "by pipes", "ratio", "CPU ms per array", "by pipes"]
    report.table(header, [[kind, *(kinds[kind][key] for key in keys)] for kind in kinds])
    watched = watch(asked.arrays, asked.mb)
    report.table(list(watched), [list(watched.values())])
    result = {key: kinds["new"][key] for key in keys}
    for kind in kinds.keys() - {"new"}:
        result |= {f"{kind}_{key}": kinds[kind][key] for key in keys}
    report.write(asked.json, result | watched | {"kinds": kinds})


if __name__ == "__main__":
    main()
