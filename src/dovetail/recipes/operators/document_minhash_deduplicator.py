"""Remove rows with nearly the same text by MinHash; the first row of each cluster is kept."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import Deduplicator, Row
from dovetail.recipes.operators.support.ngrams import TOKENIZATIONS, shingler
from dovetail.recipes.operators.support.parameter_checks import (
    ADAPTER_HINT,
    NeedsDataJuicer,
    check_choice,
    check_int,
    check_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.recipes.operators.support.minhash import MinHash
    from dovetail.recipes.operators.support.ngrams import Shingles


class DocumentMinhashDeduplicator(Deduplicator):
    """Rows with an equal band of MinHash values are in one cluster, transitively.

    Two rows of similarity s share a band with a probability of 1 - (1 - s**num_rows_per_band) ** num_bands. The default
    bands of a threshold give false negatives and false positives the same weight: for 0.7 they are 25 bands of 10,
    which find half of the pairs at the threshold and 94 % of the pairs at 0.8. With `num_bands: 42` and
    `num_rows_per_band: 6`, 99 % of the pairs at 0.7 are found.

    Values and clusters are those of Data-Juicer, except for texts with fewer tokens than `window_size`: Data-Juicer
    gives all of them the same values, so unrelated short texts become one row. Here such a text equals only texts with
    the same tokens. A row is compared by 8 bytes per band, 200 bytes with the defaults. The comparison holds up to
    256 MB of them in memory and the rest in a temporary file; ten million rows need about 0.5 GB.
    """

    extra = "recipes"
    needs = ("numpy",)

    def __init__(
        self,
        tokenization: str = "space",
        window_size: int = 5,
        lowercase: bool = True,
        ignore_pattern: str | None = None,
        num_permutations: int = 256,
        jaccard_threshold: float = 0.7,
        num_bands: int | None = None,
        num_rows_per_band: int | None = None,
        tokenizer_model: str | None = None,
    ) -> None:
        _check_tokenization(tokenization)
        check_int("window_size", window_size, 1)
        check_int("num_permutations", num_permutations, 1)
        check_ratio("jaccard_threshold", jaccard_threshold)
        if num_bands is not None and num_rows_per_band is not None:
            check_int("num_bands", num_bands, 1)
            check_int("num_rows_per_band", num_rows_per_band, 1)
            _check_product(num_bands, num_rows_per_band, num_permutations)
        self.tokenization = tokenization
        self.window_size = window_size
        self.lowercase = lowercase
        self.ignore_pattern = _compile_ignore_pattern(ignore_pattern)
        self.num_permutations = num_permutations
        self.jaccard_threshold = jaccard_threshold
        self.num_bands = num_bands
        self.num_rows_per_band = num_rows_per_band
        self.tokenizer_model = tokenizer_model
        self._tools: tuple[Shingles, MinHash] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Pickled without tables, which each worker computes again."""
        return {**self.__dict__, "_tools": None}

    def tools(self) -> tuple[Shingles, MinHash]:
        if self._tools is None:
            from dovetail.recipes.operators.support.minhash import MinHash

            bands, rows_per_band = self.bands()
            hashing = MinHash(bands, rows_per_band, self.num_permutations)
            self._tools = shingler(self.tokenization, self.window_size), hashing
        return self._tools

    def bands(self) -> tuple[int, int]:
        """(bands, rows per band): as given, else the best for the threshold."""
        from dovetail.recipes.operators.support.minhash import best_bands

        if self.num_bands is None or self.num_rows_per_band is None:
            return best_bands(self.jaccard_threshold, self.num_permutations)
        return self.num_bands, self.num_rows_per_band

    def compute_hash(self, row: Row) -> bytes:
        shingles_of, hashing = self._tools or self.tools()
        text = self.text_of(row)
        if self.lowercase:
            text = text.lower()
        if self.ignore_pattern is not None:
            text = self.ignore_pattern.sub("", text)
        whole, shingles = shingles_of(text)
        if not shingles:
            return hashing.exact_text_hashes(whole)
        return hashing.band_hashes(hashing.signature(shingles))

    def originals(self, hashes: Iterable[bytes]) -> Sequence[int]:
        from dovetail.recipes.operators.support.duplicate_groups import BandColumns, UnionFind

        with BandColumns(hashes, self.bands()[0]) as bands:
            union = UnionFind(bands.size)
            for column in bands.columns():
                union.join_equal(column)
        return union.representatives()


def _check_tokenization(tokenization: str) -> None:
    if tokenization == "sentencepiece":
        raise NeedsDataJuicer(f"tokenization: sentencepiece needs a sentencepiece model; {ADAPTER_HINT}")
    check_choice("tokenization", tokenization, TOKENIZATIONS)


def _check_product(bands: int, rows_per_band: int, permutations: int) -> None:
    """Data-Juicer would shorten the last bands, and treat all rows as equal if a band is empty."""
    if bands * rows_per_band > permutations:
        raise ValueError(
            f"{bands} num_bands of {rows_per_band} num_rows_per_band need {bands * rows_per_band} num_permutations, "
            f"and there are {permutations}"
        )


def _compile_ignore_pattern(pattern: str | None) -> re.Pattern[str] | None:
    if not pattern:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"ignore_pattern {pattern!r} is not a regular expression: {error}") from None
