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
SEEDS = range(12)
BITS = 0xFFFFFFFF


@dt.each
def clean(row: Row) -> Row:
    """One item in, one out: without links, and with single spaces."""
    return {**row, "text": SPACE.sub(" ", LINK.sub("", row["text"])).strip()}


@dt.each
def judge(row: Row) -> Row | None:
    """None drops it: too short, too many symbols, or the same words over and over."""
    text = row["text"]
    letters = sum(map(str.isalpha, text))
    words = text.lower().split()
    if len(words) < 20 or letters < 0.7 * len(text):
        return None
    runs = Counter(zip(words, words[1:], words[2:], strict=False))
    return row if runs.most_common(1)[0][1] < 0.1 * len(words) else None


class Describe:
    """Set up once per worker, then called with a list of up to `batch_size` rows. Here a model would be loaded."""

    def setup(self, worker: Any) -> None:  # noqa: ARG002 - it tells the stage, the node, its cards
        self.common = frozenset(COMMON.split())
        self.salts = [zlib.crc32(bytes([seed])) for seed in SEEDS]

    def __call__(self, rows: list[Row]) -> list[Row]:
        return [{**row, **self.describe(row["text"])} for row in rows]

    def describe(self, text: str) -> Row:
        """The words it is about, and a fingerprint that near-duplicates share most of."""
        words = WORD.findall(text.lower())
        topics = Counter(word for word in words if word not in self.common).most_common(3)
        shingles = {zlib.crc32(" ".join(words[at : at + 3]).encode()) for at in range(len(words) - 2)}
        fingerprint = [min((shingle ^ salt) * 2654435761 & BITS for shingle in shingles) for salt in self.salts]
        return {"words": len(words), "topics": [word for word, _ in topics], "fingerprint": fingerprint}
