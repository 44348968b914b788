"""MinHash on many rows: near-duplicates found, in little memory.

Every tenth row is a copy of an earlier one with some words replaced, whose shingles have a Jaccard similarity of at
least the threshold with it, computed here and not estimated; some rows are copies to the letter. Rows are hashed and
compared in a process of its own, whose greatest memory is asked for.

How many are found is decided by the bands: a pair of similarity s has an equal one with a probability of
1 - (1 - s**rows) ** bands. Those that Data-Juicer chooses for a threshold of 0.7 (25 of 10) weigh misses and false
finds alike, and find 51 % of the pairs exactly at the threshold. To find nearly all, use more bands of fewer rows.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytest.importorskip("numpy", reason="numpy is not installed: pip install 'dovetail-ml[recipes]'")

THRESHOLD = 0.7
BANDS_OF_RECALL = {"jaccard_threshold": THRESHOLD, "num_bands": 42, "num_rows_per_band": 6}
BANDS_OF_DATA_JUICER = {"jaccard_threshold": THRESHOLD}
WINDOW = 5
WORDS = 100
MOST_BYTES = 1_000_000_000

PROGRAM = """
import json, sys, time
from dovetail.recipes.operators.document_minhash_deduplicator import DocumentMinhashDeduplicator

operator = DocumentMinhashDeduplicator(**json.loads(sys.argv[2]))
spent = [0.0]

def hashes():
    with open(sys.argv[1]) as lines:
        for line in lines:
            begun = time.process_time()
            found = operator.compute_hash({"text": line.rstrip("\\n")})
            spent[0] += time.process_time() - begun
            yield found

begun = time.process_time()
originals = operator.originals(hashes())
seconds = time.process_time() - begun
# not ru_maxrss, which begins with that of the process that started this one
status = dict(line.split(":") for line in open("/proc/self/status") if ":" in line and line.count(":") == 1)
bytes_used = int(status["VmHWM"].split()[0]) * 1024
with open(sys.argv[3], "wb") as file:
    file.write(originals.tobytes())
print(json.dumps({"hashing": spent[0], "comparing": seconds - spent[0], "bytes": bytes_used}))
"""


def jaccard(one: list[str], other: list[str]) -> float:
    first, second = shingles(one), shingles(other)
    return len(first & second) / len(first | second)


def shingles(words: list[str]) -> set[tuple[str, ...]]:
    return set(zip(*(words[start:] for start in range(WINDOW)), strict=False))


def changed(words: list[str], chance: random.Random, vocabulary: list[str]) -> tuple[float, list[str]]:
    """Similarity, at or above the threshold, and text of a copy in which up to four words are replaced."""
    while True:
        copy = list(words)
        for place in chance.sample(range(len(words)), chance.randint(1, 4)):
            copy[place] = chance.choice(vocabulary)
        similarity = jaccard(words, copy)
        if copy != words and similarity >= THRESHOLD:
            return similarity, copy


@dataclass
class Planted:
    near: dict[int, int] = field(default_factory=dict)
    """Row -> the one that it nearly repeats."""
    similarities: list[float] = field(default_factory=list)
    exact: dict[int, int] = field(default_factory=dict)


def plant(file: Path, count: int) -> Planted:
    chance = random.Random(8)
    vocabulary = ["".join(chance.choices("abcdefghijklmnoprstuvw", k=chance.randint(2, 9))) for _ in range(20_000)]
    planted = Planted()
    sources: list[tuple[int, list[str]]] = []
    with file.open("w") as lines:
        for number in range(count):
            if sources and number % 10 == 9:
                planted.near[number], words = chance.choice(sources)
                similarity, words = changed(words, chance, vocabulary)
                planted.similarities.append(similarity)
            elif sources and number % 100 == 50:
                planted.exact[number], words = chance.choice(sources)
            else:
                words = chance.choices(vocabulary, k=WORDS)
                sources.append((number, words))
                if len(sources) > 5000:
                    sources[chance.randrange(5000)] = sources.pop()
            lines.write(" ".join(words) + "\n")
    return planted


def originals_of(folder: Path, parameters: dict[str, float]) -> Sequence[int]:
    command = [sys.executable, "-c", PROGRAM, str(folder / "texts"), json.dumps(parameters), str(folder / "originals")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    print(parameters, figures)  # noqa: T201 - shown with -s
    assert figures["bytes"] < MOST_BYTES
    originals = array("q")
    originals.frombytes((folder / "originals").read_bytes())
    return originals


def check_the_rest(folder: Path, planted: Planted, originals: Sequence[int]) -> None:
    """No exact duplicate is left, and nothing is alike that was not planted: other words were drawn by chance."""
    assert all(originals[copy] == originals[source] for copy, source in planted.exact.items())
    texts = (folder / "texts").read_text().splitlines()
    assert len(texts) == len(originals)
    left = [text for number, text in enumerate(texts) if originals[number] == number]
    assert len(left) == len(set(left))
    copies = planted.near.keys() | planted.exact.keys()
    assert all(originals[number] == number for number in range(len(texts)) if number not in copies)


def recall_of(planted: Planted, originals: Sequence[int]) -> float:
    found = sum(originals[copy] == originals[source] for copy, source in planted.near.items())
    return found / len(planted.near)


COUNTS = [5_000, pytest.param(200_000, marks=pytest.mark.long)]


@pytest.mark.parametrize("count", COUNTS)
def test_with_many_bands_nearly_all_pairs_above_the_threshold_are_found(tmp_path: Path, count: int) -> None:
    planted = plant(tmp_path / "texts", count)
    assert len(planted.near) == count / 10
    assert min(planted.similarities) < THRESHOLD + 0.02
    originals = originals_of(tmp_path, BANDS_OF_RECALL)
    check_the_rest(tmp_path, planted, originals)
    assert recall_of(planted, originals) >= 0.95


@pytest.mark.parametrize("count", COUNTS)
def test_the_bands_of_data_juicer_find_the_expected_share_of_pairs(tmp_path: Path, count: int) -> None:
    planted = plant(tmp_path / "texts", count)
    originals = originals_of(tmp_path, BANDS_OF_DATA_JUICER)
    check_the_rest(tmp_path, planted, originals)
    promised = sum(1 - (1 - similarity**10) ** 25 for similarity in planted.similarities) / len(planted.similarities)
    assert 0.85 < promised < 0.95
    # a copy may also be found through another copy
    assert promised - 0.05 < recall_of(planted, originals) < promised + 0.05
