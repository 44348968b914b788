"""Helpers for tests of sinks: a sink with several writers, and independent readers."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import PartFileRange
from dovetail.data.sinks import FileSink, open_sink, sink

if TYPE_CHECKING:
    from collections.abc import Iterable

TYPES = ["jsonl", "jsonl.gz", "jsonl.zst", "csv", "tsv", "csv.gz", "parquet", "lance"]


def opened(path: Path | str, run_id: str = "r1", **settings: Any) -> FileSink:
    made = open_sink(sink(path, **settings), run_id, Path(str(settings.get("spare", "/nonexistent"))))
    made.prepare(resumed=False)
    return made


def writers(target: FileSink, count: int, name: str = "w") -> list[Any]:
    """Writers as workers have them: unpickled."""
    made = [pickle.loads(pickle.dumps(target.writer())) for _ in range(count)]
    for number, writer in enumerate(made):
        writer.begin(f"{name}{number}")
    return made


def through_log(pieces: Iterable[PartFileRange]) -> list[PartFileRange]:
    """Pieces as the commit log returns them."""
    return [PartFileRange(*json.loads(json.dumps(piece))) for piece in pieces]


def tear(target: FileSink, seed: int = 0) -> None:
    """Bytes behind the last piece of every part, as a killed worker leaves them."""
    chance = random.Random(seed)
    for path in target.parts.iterdir():
        if path.is_file() and not path.name.startswith("."):
            with path.open("ab") as file:
                file.write(chance.randbytes(chance.randrange(1, 300)))


def in_batches(
    keys: list[Any], rows: list[Any], sizes: int, chance: random.Random
) -> list[tuple[list[Any], list[Any]]]:
    """Keys and rows, shuffled within windows and cut at random, so that pieces overlap."""
    order = sorted(range(len(rows)), key=lambda at: at + chance.randrange(4 * sizes))
    found = []
    while order:
        some = [order.pop(0) for _ in range(min(len(order), chance.randrange(1, sizes + 1)))]
        found.append(([keys[at] for at in some], [rows[at] for at in some]))
    return found


def written(
    target: FileSink, keys: list[Any], rows: list[Any], *, count: int = 3, seed: int = 1
) -> list[PartFileRange]:
    """Several writers, in turn as chance has it."""
    chance = random.Random(seed)
    workers = writers(target, count)
    pieces = [chance.choice(workers).write(*some) for some in in_batches(keys, rows, 7, chance)]
    for worker in workers:
        worker.end()
    return through_log(pieces)


def bytes_of(path: Path) -> bytes:
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix == ".zst":
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True) as source:
            return bytes(source.read())
    return path.read_bytes()


def rows_of(path: Path | str) -> list[Any]:
    """All rows of a finished file, read with the usual reader of the format."""
    path = Path(path)
    if ".parquet" in path.suffixes:
        import pyarrow.parquet as pq

        return list(pq.read_table(path).to_pylist())
    if ".lance" in path.suffixes:
        import lance

        return list(lance.dataset(str(path)).to_table().to_pylist())
    text = bytes_of(path).decode()
    if ".jsonl" in path.suffixes:
        assert text == "" or text.endswith("\n")
        return [json.loads(line) for line in text.split("\n")[:-1]]
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    csv.field_size_limit(1 << 40)
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))


def as_csv(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Simple rows as they are read back from CSV."""
    return [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]
