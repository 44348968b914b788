"""Tables that `backfill.py` fills, and the check of the results."""

from __future__ import annotations

import os
import random
import shutil
from typing import TYPE_CHECKING, Any

os.environ.setdefault("LANCE_LOG", "error")  # it warns of every commit that replaces data

import lance
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORDS = (  # noqa: SIM905
    "the of and to in is that for it with as was on be at by this had not are but from or have an they which one you "
    "were all her she there would their we him been has when who will no more if out so up said what its about than "
    "into them can only other time new some could these two may first then do any like my now over such our man me "
    "even most made after also well before must years where through still between water house garden winter letter"
).split()
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
HALVES = 5_000
HALF_LETTERS = 46


def text_of(number: int, halves: list[str]) -> str:
    """About 100 characters, and no two rows are the same: an encoding that stores equal values once gains nothing."""
    first = halves[number * 7919 % HALVES]
    return f"{first} {number} {halves[(number * 104_729 + number // HALVES) % HALVES]}"


def made_halves() -> list[str]:
    """Of sentences that mean nothing; the same ones every time."""
    chance = random.Random(9)
    return [_sentence(chance) for _ in range(HALVES)]


def _sentence(chance: random.Random) -> str:
    words = chance.choice(WORDS).capitalize()
    while len(words) < HALF_LETTERS:
        words += f" {chance.choice(WORDS)}"
    return words


def make(uri: Path, rows: int, fragments: int) -> Path:
    """A table with columns `id` and `text`, all of its fragments of one size, as far as the number of rows allows."""
    each = -(-rows // fragments)
    reader = pa.RecordBatchReader.from_batches(SCHEMA, _batches(rows, each))
    made = lance.write_dataset(reader, str(uri), max_rows_per_file=each)
    assert made.count_rows() == rows, made.count_rows()
    assert len(made.get_fragments()) == -(-rows // each), len(made.get_fragments())
    return uri


def _batches(rows: int, each: int) -> Iterator[pa.RecordBatch]:
    halves = made_halves()
    for first in range(0, rows, each):
        numbers = range(first, min(rows, first + each))
        texts = [text_of(number, halves) for number in numbers]
        yield pa.record_batch([pa.array(numbers, pa.int64()), pa.array(texts, pa.string())], schema=SCHEMA)


def copy(table: Path, to: Path) -> Path:
    """A fresh one, in which nothing is done already."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(table, to)
    return to


def check(original: Path, filled: Path, column: str) -> None:
    """Row by row: nothing else has changed, and the column has what it should have."""
    before: Any = lance.dataset(str(original)).to_table()
    after: Any = lance.dataset(str(filled)).to_table()
    assert after.select(before.column_names).equals(before), f"{filled}: other columns have changed"
    wanted = pc.utf8_upper(before["text"])
    wrong = after.num_rows - (pc.sum(pc.fill_null(pc.equal(after[column], wanted), False)).as_py() or 0)
    assert not wrong, f"{filled}: {wrong} of {after.num_rows} values of {column!r} are wrong or missing"
