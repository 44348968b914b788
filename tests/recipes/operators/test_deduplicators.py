"""Deduplicators keep the rows that Data-Juicer keeps, with the same hashes, except for its errors."""

from __future__ import annotations

import hashlib
import pickle
import re
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.recipes.operators.base import HASH_FIELD, BadField
from dovetail.recipes.operators.document_deduplicator import DocumentDeduplicator
from dovetail.recipes.operators.document_minhash_deduplicator import DocumentMinhashDeduplicator
from recipes.golden_aids import cases, errors, rows
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

np = pytest.importorskip("numpy", reason="numpy is not installed: pip install 'dovetail-ml[recipes]'")

from dovetail.recipes.operators.support import duplicate_groups, minhash  # noqa: E402
from dovetail.recipes.operators.support.ngrams import punctuation_pattern, shingler  # noqa: E402

Deduplicators = (DocumentDeduplicator, DocumentMinhashDeduplicator)


def named(case: dict[str, Any]) -> str:
    return str(case["name"])


def kept(originals: Sequence[int]) -> list[int]:
    return [number for number, original in enumerate(originals) if number == original]


def clusters(originals: Sequence[int]) -> list[list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for number, original in enumerate(originals):
        found[original].append(number)
    return [members for members in found.values() if len(members) > 1]


def originals_of(operator: Any, texts: Iterable[str]) -> list[int]:
    return list(operator.originals(operator.compute_hash({"text": text}) for text in texts))


# exact


@pytest.mark.parametrize("case", cases(op="document_deduplicator"), ids=named)
def test_equal_texts_are_those_of_data_juicer(case: dict[str, Any]) -> None:
    operator = DocumentDeduplicator(**case["params"])
    hashes = [operator.compute_hash(row) for row in rows()]
    assert [one.hex() for one in hashes] == case["hashes"]
    originals = operator.originals(iter(hashes))
    assert kept(originals) == case["rows"]
    # Data-Juicer reports at most two rows of a group
    assert [members[:2] for members in clusters(originals)] == [pair["ids"] for pair in case["pairs"]]


def test_ignore_non_character_ignores_spaces_digits_and_punctuation() -> None:
    operator = DocumentDeduplicator(ignore_non_character=True)
    texts = ["ab", " a,\t1b\u3000", "a\u0663b", "a“b", "A b", "a\x1cb"]
    assert originals_of(operator, texts) == [0, 0, 0, 3, 4, 5]
    assert originals_of(DocumentDeduplicator(True, True), texts)[4] == 0


def test_surrounding_white_space_is_ignored() -> None:
    assert originals_of(DocumentDeduplicator(), ["a b", "\n a b\u2003", "a  b", "", " \t"]) == [0, 0, 2, 3, 3]


@given(st.lists(st.sampled_from([bytes([n]) * 16 for n in range(6)] + [b"\0" * 15 + bytes([n]) for n in range(3)])))
def test_duplicates_are_those_of_a_dictionary(digests: list[bytes]) -> None:
    first: dict[bytes, int] = {}
    wanted = [first.setdefault(digest, number) for number, digest in enumerate(digests)]
    assert duplicate_groups.first_equal(iter(digests)) == array("q", wanted)


# minhash


@pytest.mark.parametrize("case", cases(op="document_minhash_deduplicator"), ids=named)
def test_signatures_are_those_of_data_juicer_except_for_short_texts(case: dict[str, Any]) -> None:
    operator = DocumentMinhashDeduplicator(**case["params"])
    assert operator.bands() == (case["num_bands"], case["num_rows_per_band"])
    _, hashing = operator.tools()
    assert hashing._factors[:4].tolist() == case["perm_a_first4"]
    assert hashing._addends[:4].tolist() == case["perm_b_first4"]
    texts = [row["text"] for row in rows()]
    long = [number for number, text in enumerate(texts) if shingles_of(operator, text)]
    found = {number: signature_of(operator, texts[number]) for number in long}
    assert {number: md5(one) for number, one in found.items()} == {n: case["minhash_md5"][n] for n in long}
    samples = {int(number): "".join(bands) for number, bands in case["minhash_bands_hex_sample"].items()}
    assert {n: found[n].astype(">u8").tobytes().hex() for n in samples if n in found} == {
        n: sample for n, sample in samples.items() if n in found
    }
    assert len(samples.keys() & found.keys()) >= 3
    short = [number for number in range(len(texts)) if number not in found]
    assert len({case["minhash_md5"][number] for number in short}) == 1
    assert len({operator.compute_hash({"text": texts[number]}) for number in short}) > 1


def shingles_of(operator: DocumentMinhashDeduplicator, text: str) -> set[bytes]:
    text = text.lower() if operator.lowercase else text
    text = operator.ignore_pattern.sub("", text) if operator.ignore_pattern else text
    return shingler(operator.tokenization, operator.window_size)(text)[1]


def signature_of(operator: DocumentMinhashDeduplicator, text: str) -> Any:
    return operator.tools()[1].signature(shingles_of(operator, text))


def md5(signature: Any) -> str:
    return hashlib.md5(signature.astype(">u8").tobytes()).hexdigest()


@pytest.mark.parametrize("case", cases(op="document_minhash_deduplicator"), ids=named)
def test_clusters_are_those_of_data_juicer_except_for_short_texts(case: dict[str, Any]) -> None:
    operator = DocumentMinhashDeduplicator(**case["params"])
    texts = [row["text"] for row in rows()]
    short = {number for number, text in enumerate(texts) if not shingles_of(operator, text)}
    theirs = [set(pair["ids"]) for pair in case["pairs"]]
    # in Data-Juicer all short texts are one cluster, though 87 of them have little in common
    assert [cluster for cluster in theirs if cluster & short] == [short]
    originals = originals_of(operator, texts)
    ours = [set(cluster) for cluster in clusters(originals)]
    assert [cluster for cluster in ours if not cluster & short] == [cluster for cluster in theirs if cluster != short]
    for cluster in ours:
        if cluster & short:
            assert len({plain(operator, texts[number]) for number in cluster}) == 1
    assert set(case["rows"]) <= set(kept(originals))


def plain(operator: DocumentMinhashDeduplicator, text: str) -> str:
    text = text.lower() if operator.lowercase else text
    text = operator.ignore_pattern.sub("", text) if operator.ignore_pattern else text
    return text if operator.tokenization == "character" else " ".join(text.split(" ")).strip(" ")


def test_short_texts_are_duplicates_only_if_their_tokens_are_equal() -> None:
    texts = ["one two", "ONE  two", "two one", "", " ", "three", "one two three four five", "one two three four"]
    assert originals_of(DocumentMinhashDeduplicator(), texts) == [0, 0, 2, 3, 3, 5, 6, 7]
    by_character = DocumentMinhashDeduplicator(tokenization="character")
    assert originals_of(by_character, ["abc", "abd", "ABC", "abcde"]) == [0, 1, 0, 3]
    by_punctuation = DocumentMinhashDeduplicator(tokenization="punctuation")
    assert originals_of(by_punctuation, ["a,b", "a.b", "a b", "a,b"]) == [0, 0, 2, 0]


def test_tokens_between_punctuation_are_kept_even_if_empty() -> None:
    shingles_and_whole = shingler("punctuation", 2)
    assert shingles_and_whole("a, b。c,")[1] == {b"a  b", b" b c", b"c "}
    assert shingles_and_whole("plain") == (b"plain", set())
    assert punctuation_pattern().split("a\u2e60b\u2014c") == ["a", "b", "c"]


@given(st.text(alphabet="ab \n,é😀", max_size=40), st.integers(1, 6), st.sampled_from(["space", "character"]))
def test_shingles_are_every_run_of_tokens(text: str, window: int, tokenization: str) -> None:
    tokens = [*text] if tokenization == "character" else [word for word in text.split(" ") if word]
    glue = "" if tokenization == "character" else " "
    runs = {glue.join(tokens[n : n + window]).encode() for n in range(len(tokens) - window + 1)}
    whole, found = shingler(tokenization, window)(text)
    assert found == runs
    assert whole == (b"" if runs else glue.join(tokens).encode())


def test_shingles_of_any_window_size_are_correct() -> None:
    words = [str(number).encode() for number in range(200)]
    text = b" ".join(words).decode()
    for window in (64, 65, 199, 200):
        wanted = {b" ".join(words[n : n + window]) for n in range(200 - window + 1)}
        assert shingler("space", window)(text)[1] == wanted


def by_definition(shingles: set[bytes], permutations: int, used: int) -> list[int]:
    """Formula of Data-Juicer with Python's unlimited integers."""
    draw = np.random.RandomState(seed=42)
    prime = (1 << 61) - 1
    least = []
    for _ in range(permutations):
        a = int(draw.randint(1, prime, dtype=np.uint64))
        b = int(draw.randint(0, prime, dtype=np.uint64))
        values = [int.from_bytes(hashlib.sha1(one).digest()[:4], "little") for one in shingles]
        least.append(min((value * a + b) % 2**64 % prime % 2**32 for value in values))
    return least[:used]


@given(st.sets(st.binary(max_size=8), min_size=1, max_size=200))
def test_a_signature_has_the_minimum_of_each_permutation(shingles: set[bytes]) -> None:
    assert minhash.MinHash(4, 3, 13).signature(shingles).tolist() == by_definition(shingles, 13, 12)


def test_values_near_the_modulus_are_exact() -> None:
    """The fast path misses one reduction for 64 of 2**64 values; it must detect all of them."""
    prime = (1 << 61) - 1
    edge = [lap * (prime + 1) + offset for lap in range(8) for offset in (*range(12), *range(prime - 20, prime + 1))]
    hashing = minhash.MinHash(1, len(edge), len(edge))
    shingle = b"any"
    value = int.from_bytes(hashlib.sha1(shingle).digest()[:4], "little")
    factors = np.array([3] * len(edge), dtype=np.uint64)
    for others in ([], [b"more", b"and more"]):
        hashing._factors = factors
        hashing._addends = np.array([(x - 3 * value) % 2**64 for x in edge], dtype=np.uint64)
        hashing._addends_and_one = hashing._addends + np.uint64(1)
        values = [int.from_bytes(hashlib.sha1(one).digest()[:4], "little") for one in (shingle, *others)]
        wanted = [min((3 * one + int(addend)) % 2**64 % prime % 2**32 for one in values) for addend in hashing._addends]
        assert hashing.signature([shingle, *others]).tolist() == wanted
        for number, addend in enumerate(hashing._addends):  # one at a time: an ambiguous value must not hide another
            alone = minhash.MinHash(1, 1, 1)
            alone._factors, alone._addends = factors[:1], np.array([addend], dtype=np.uint64)
            alone._addends_and_one = alone._addends + np.uint64(1)
            assert alone.signature([shingle, *others]).tolist() == wanted[number : number + 1]


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=2, max_size=2))
def test_bands_are_equal_if_and_only_if_their_values_are(signatures: list[list[int]]) -> None:
    hashing = minhash.MinHash(3, 2, 6)
    one, other = (hashing.band_hashes(np.array(values, dtype=np.uint32)) for values in signatures)
    for band in range(3):
        same = signatures[0][2 * band : 2 * band + 2] == signatures[1][2 * band : 2 * band + 2]
        assert (one[8 * band : 8 * band + 8] == other[8 * band : 8 * band + 8]) is same


def best_by_definition(threshold: float, permutations: int) -> tuple[tuple[int, int], float]:
    """Best bands by Data-Juicer's definition, with the trapezoidal rule; and the margin to the second best."""
    below, above = np.linspace(0, threshold, 4001), np.linspace(threshold, 1, 4001)
    found = []
    for bands in range(1, permutations + 1):
        for per_band in range(1, permutations // bands + 1):
            false_finds = np.trapezoid(1 - (1 - below**per_band) ** bands, below)
            misses = np.trapezoid((1 - above**per_band) ** bands, above)
            found.append((false_finds * 0.5 + misses * 0.5, (bands, per_band)))
    found.sort()
    return found[0][1], found[1][0] - found[0][0]


@pytest.mark.parametrize("permutations", [16, 50, 64, 128])
def test_bands_minimise_the_error(permutations: int) -> None:
    compared = 0
    for threshold in (0.05, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        wanted, margin = best_by_definition(threshold, permutations)
        if margin > 1e-6:  # larger than the error of the trapezoidal rule
            assert minhash.best_bands(threshold, permutations) == wanted
            compared += 1
    assert compared >= 6


THRESHOLDS = (0.0, 0.05, 0.25, 0.5, 0.7, 0.8, 0.95, 1.0)
BEST = {  # results of Data-Juicer's function with scipy 1.17.1
    16: [(16, 1), (16, 1), (8, 2), (5, 3), (3, 5), (2, 8), (1, 16), (1, 16)],
    64: [(64, 1), (32, 1), (18, 2), (14, 4), (8, 8), (5, 11), (2, 32), (1, 64)],
    128: [(128, 1), (32, 1), (42, 3), (25, 5), (14, 9), (9, 13), (3, 42), (1, 128)],
    256: [(256, 1), (32, 1), (64, 3), (42, 6), (25, 10), (17, 15), (5, 51), (1, 256)],
    512: [(512, 1), (256, 2), (128, 4), (73, 7), (42, 12), (28, 18), (9, 56), (1, 512)],
}


@pytest.mark.parametrize("permutations", BEST)
def test_bands_are_those_that_data_juicer_chooses(permutations: int) -> None:
    assert [minhash.best_bands(threshold, permutations) for threshold in THRESHOLDS] == BEST[permutations]


def test_given_bands_are_used_only_with_given_rows_per_band() -> None:
    assert DocumentMinhashDeduplicator(num_bands=8, num_rows_per_band=4).bands() == (8, 4)
    assert DocumentMinhashDeduplicator(num_bands=8).bands() == (25, 10)
    assert len(DocumentMinhashDeduplicator(num_bands=8, num_rows_per_band=4).compute_hash({"text": "a b"})) == 64


def test_a_chain_of_similar_texts_is_one_cluster() -> None:
    """The first and the last text have no words in common, but each is similar to the next one."""
    words = [f"w{number}" for number in range(140)]
    texts = [" ".join(words[start : start + 100]) for start in range(0, 40, 4)]
    mixed = [texts[number] for number in (5, 2, 9, 0, 7, 3, 8, 1, 4, 6)]
    operator = DocumentMinhashDeduplicator(num_permutations=256, num_bands=64, num_rows_per_band=4)
    assert originals_of(operator, ["something else that has enough words", *mixed]) == [0] + [1] * 10


Joins = st.lists(st.lists(st.integers(0, 5), min_size=12, max_size=12), min_size=1, max_size=5)


@given(Joins)
def test_union_find_gives_the_clusters_of_a_simple_algorithm(columns: list[list[int]]) -> None:
    parents = list(range(12))

    def root(number: int) -> int:
        return number if parents[number] == number else root(parents[number])

    for column in columns:
        for one in range(12):
            for other in range(one):
                if column[one] == column[other]:
                    low, high = sorted((root(one), root(other)))
                    parents[high] = low
    found = duplicate_groups.UnionFind(12)
    for column in columns:
        found.join_equal(np.array(column, dtype=np.uint64))
    assert list(found.representatives()) == [root(number) for number in range(12)]


def test_long_chains_and_large_groups_are_joined_quickly() -> None:
    """Each number is joined to the next one, half of them by one column, half by the other; then all at once."""
    size = 200_000
    numbers = np.arange(size, dtype=np.uint64)
    begun = time.process_time()
    chain = duplicate_groups.UnionFind(size)
    chain.join_equal(numbers // 2)
    chain.join_equal((numbers + 1) // 2)
    assert set(chain.representatives()) == {0}
    group = duplicate_groups.UnionFind(size)
    group.join_equal(np.zeros(size, dtype=np.uint64))
    assert set(group.representatives()) == {0}
    assert time.process_time() - begun < 5


def test_bands_in_a_file_are_read_back_column_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicate_groups, "BLOCK_ROWS", 7)
    monkeypatch.setattr(duplicate_groups, "MAX_BYTES_IN_MEMORY", 100)
    table = np.arange(60, dtype="<u8").reshape(20, 3)
    with duplicate_groups.BandColumns((row.tobytes() for row in table), 3) as bands:
        assert bands.size == 20
        assert [column.tolist() for column in bands.columns()] == table.T.tolist()


def test_an_operator_is_created_with_the_parameters_of_the_recipe() -> None:
    operator = DocumentMinhashDeduplicator(ignore_pattern="x+")
    before = operator.compute_hash({"text": "a b c d e f"})
    sent = pickle.dumps(operator)
    assert len(sent) < 1000
    assert pickle.loads(sent).compute_hash({"text": "a b c d e fxx"}) == before


# both


@pytest.mark.parametrize("kind", Deduplicators)
def test_empty_and_single_row_datasets_are_accepted(kind: Any) -> None:
    operator = kind()
    assert list(operator.originals(iter([]))) == []
    assert originals_of(operator, ["alone"]) == [0]


@pytest.mark.parametrize("kind", Deduplicators)
def test_the_first_of_equal_rows_is_kept_without_its_hash(kind: Any) -> None:
    operator = kind()
    texts = ["one", "two", "one", "", "two", ""]
    hashed = [operator({"text": text, "number": number}) for number, text in enumerate(texts)]
    assert all(HASH_FIELD in row for row in hashed)
    assert list(operator.process_rows(hashed)) == [{"text": texts[number], "number": number} for number in (0, 1, 3)]


@pytest.mark.parametrize("kind", Deduplicators)
@pytest.mark.parametrize("row", [{}, {"other": "a"}, {"text": None}, {"text": 5}, {"text": ["a"]}, {"text": b"a"}])
def test_a_missing_or_wrong_text_is_reported(kind: Any, row: dict[str, Any]) -> None:
    with pytest.raises(BadField, match="'text'"):
        kind().compute_hash(row)


@pytest.mark.parametrize("kind", Deduplicators)
def test_the_text_is_read_from_the_text_key(kind: Any) -> None:
    operator = kind()
    operator.text_key = "body"
    assert operator.columns() == ("body",)
    assert operator.compute_hash({"body": "a"}) == kind().compute_hash({"text": "a"})


NASTY = ["", "\0", "\ud800", "😀👨‍👩‍👧", "שלום עולם مرحبا", "e\u0301", "\u00e9", "\ufeff", "İ", "a" * 50]
TOKENIZATIONS = ["space", "punctuation", "character"]


@pytest.mark.parametrize("operator", [DocumentDeduplicator(), *map(DocumentMinhashDeduplicator, TOKENIZATIONS)])
def test_unusual_texts_are_equal_only_to_themselves(operator: Any) -> None:
    long = [f"{text} " * 9 for text in NASTY[1:]]
    texts = [*NASTY, *long]
    numbers = list(range(len(texts)))
    assert originals_of(operator, texts * 2) == numbers * 2


@pytest.mark.parametrize("tokenization", TOKENIZATIONS)
@pytest.mark.parametrize("piece", ["word ", "x", " ", "日本, ", "a.b "])
def test_a_long_text_takes_seconds(tokenization: str, piece: str) -> None:
    operator = DocumentMinhashDeduplicator(tokenization)
    size = 1_000_000 if LONG else 250_000
    text = (piece * size)[:size]
    begun = time.process_time()
    assert operator.compute_hash({"text": text}) == operator.compute_hash({"text": text})
    assert DocumentDeduplicator(True, True).compute_hash({"text": text})
    assert time.process_time() - begun < 10


def test_a_text_of_many_different_words_needs_little_memory() -> None:
    """170,000 shingles by 256 permutations at once would be 350 MB."""
    import tracemalloc

    operator = DocumentMinhashDeduplicator()
    text = " ".join(f"{number:05x}" for number in range(170_000))
    operator.tools()
    tracemalloc.start()
    try:
        operator.compute_hash({"text": text})
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("error", errors(op="document_minhash_deduplicator"))
def test_configurations_that_data_juicer_refuses_are_refused(error: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokenization"):
        DocumentMinhashDeduplicator(**error["params"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokenization": "sentencepiece", "tokenizer_model": "m"}, "adapter: data_juicer"),
        ({"window_size": 0}, "window_size must be a whole number of at least 1, not 0"),
        ({"window_size": 2.5}, "window_size must be a whole number of at least 1, not 2.5"),
        ({"num_permutations": True}, "num_permutations must be a whole number of at least 1, not True"),
        ({"jaccard_threshold": 1.5}, "jaccard_threshold must be a number from 0 to 1, not 1.5"),
        ({"jaccard_threshold": float("nan")}, "jaccard_threshold must be a number from 0 to 1, not nan"),
        ({"num_bands": 0, "num_rows_per_band": 2}, "num_bands must be a whole number of at least 1, not 0"),
        ({"num_bands": 30, "num_rows_per_band": 10}, "need 300 num_permutations, and there are 256"),
        ({"ignore_pattern": "a(b"}, "at position 1"),
    ],
)
def test_invalid_values_are_reported(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DocumentMinhashDeduplicator(**wrong)


def test_planning_imports_no_numpy() -> None:
    script = (
        "import sys; from dovetail.recipes.operators.document_minhash_deduplicator import *;"
        "DocumentMinhashDeduplicator().columns(); assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
