"""Stages of the demo pipeline: ordinary functions and a class. Change them and run the pipeline again."""

import re
import zlib
from collections import Counter
from typing import Any

import dovetail as dt

Row = dict[str, Any]

LINK = re.compile(r"https?://\S+|\bwww\.\S+")
SPACE = re.compile(r"\s+")
WORD = re.compile(r"[a-z]+")
COMMON = "a all an and are as at be by for from has have in is it its not of on or that the this to was with"
HASH_SEEDS = range(12)
BITS = 0xFFFFFFFF


@dt.each
def clean(row: Row) -> Row:
    """One item in, one item out: removes links and repeated spaces."""
    return {**row, "text": SPACE.sub(" ", LINK.sub("", row["text"])).strip()}


@dt.each
def judge(row: Row) -> Row | None:
    """Drops the row (None) if it is too short, has too many symbols, or repeats itself."""
    text = row["text"]
    letters = sum(map(str.isalpha, text))
    words = text.lower().split()
    if len(words) < 20 or letters < 0.7 * len(text):
        return None
    runs = Counter(zip(words, words[1:], words[2:], strict=False))
    return row if runs.most_common(1)[0][1] < 0.1 * len(words) else None


class Describe:
    """Set up once per worker, then called with lists of up to `batch_size` rows. `setup` would load a model."""

    def setup(self, worker: Any) -> None:  # noqa: ARG002 - has the stage, the node, the GPUs
        self.common = frozenset(COMMON.split())
        self.salts = [zlib.crc32(bytes([seed])) for seed in HASH_SEEDS]

    def __call__(self, rows: list[Row]) -> list[Row]:
        return [{**row, **self.describe(row["text"])} for row in rows]

    def describe(self, text: str) -> Row:
        """The most frequent words, and a fingerprint that is similar for near-duplicates."""
        words = WORD.findall(text.lower())
        topics = Counter(word for word in words if word not in self.common).most_common(3)
        shingles = {zlib.crc32(" ".join(words[at : at + 3]).encode()) for at in range(len(words) - 2)}
        fingerprint = [min((shingle ^ salt) * 2654435761 & BITS for shingle in shingles) for salt in self.salts]
        return {"words": len(words), "topics": [word for word, _ in topics], "fingerprint": fingerprint}
