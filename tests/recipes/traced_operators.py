"""Small operators and runs for tests of traces and the monitor."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import dovetail as dt
from dovetail.recipes.operators.base import (
    STATS_FIELD,
    Deduplicator,
    Filter,
    Grouper,
    Mapper,
    Row,
    Selector,
    TextMapper,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

CLUSTER = "1x(2cpu, 8GB)"
HALF = dt.Resources(cpus=0.5)


def rows(count: int) -> list[Row]:
    """Rows: one text of three has a capital letter, one of four is short."""
    return [
        {"id": n, "text": ("Abc" if n % 3 == 0 else "abc") + "x" * (n % 4) * 10 + str(n % 50)} for n in range(count)
    ]


class Lower(TextMapper):
    def change(self, text: str) -> str:
        return text.lower()


class Words(Mapper):
    """Each character becomes a row."""

    def __call__(self, row: Row) -> Iterator[Row]:
        for character in row["text"]:
            yield {**row, "text": character}


class Long(Filter):
    def __init__(self, least: int = 6) -> None:
        self.least = least

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        stats["text_len"] = len(self.text_of(row))

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:
        return bool(stats["text_len"] >= self.least)


class Batched(Filter):
    """Gets lists."""

    batch_size = 8

    def __call__(self, batch: Any) -> Any:
        return [row for row in batch if row["id"] % 5]


class Same(Deduplicator):
    def compute_hash(self, row: Row) -> Any:
        return self.text_of(row)

    def originals(self, hashes: Iterable[Any]) -> Sequence[int]:
        seen: dict[Any, int] = {}
        return [seen.setdefault(one, number) for number, one in enumerate(hashes)]


class Largest(Selector):
    """Select the rows with the largest ids, largest first."""

    def __init__(self, count: int, *, sort: bool = True) -> None:
        self.count, self.sort = count, sort

    def select_rows(self, rows: Iterable[Row]) -> Sequence[int]:
        found = sorted(range(len(list(rows))), reverse=True)[: self.count]
        return found if self.sort else found[::-1]


class ByLength(Grouper):
    def groups(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        found: dict[int, list[Row]] = {}
        for row in rows:
            found.setdefault(len(row["text"]), []).append(row)
        yield from found.values()


class Deadly(Lower):
    """Kills its worker at a row, once."""

    def __init__(self, mark: Path, at: int) -> None:
        self.mark, self.at = mark, at

    def __call__(self, row: Row) -> Row:
        if row["id"] == self.at and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(row)


class Fussy(TextMapper):
    """Fails for some rows."""

    def __call__(self, row: Row) -> Row:
        if row["id"] % 10 == 7:
            raise ValueError("this row fails")
        return super().__call__(row)

    def change(self, text: str) -> str:
        return text.upper()


def stage(name: str, run: Any, **more: Any) -> dt.Stage:
    """A stage: one row per call, unless the operator has a batch size or is a barrier."""
    alone = not more.get("barrier") and getattr(run, "batch_size", 1) == 1
    size = {} if alone or more.get("barrier") else {"batch_size": run.batch_size}
    return dt.Stage(name, dt.each(run) if alone else run, HALF, **size, **more)


def run(*stages: dt.Stage, source: Iterable[Any], folder: Path, **settings: Any) -> list[Row]:
    """Results in the order of the source."""
    handle = dt.run(
        dt.Pipeline(list(stages)),
        source,
        cluster=CLUSTER,
        profiles=False,
        run_dir=str(folder),
        ordered=True,
        **settings,
    )
    return list(handle)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dropped_by(least: int, source: Sequence[Row]) -> list[Row]:
    """Samples of the rows that `Long` drops."""
    short = [row for row in source if len(row["text"]) < least]
    return [{**row, STATS_FIELD: {"text_len": len(row["text"])}} for row in short]
