"""MinHash signatures, LSH band hashes, and the best number of bands for a Jaccard threshold.

A permutation of 32-bit hashes h is `(h * a + b) mod 2**64 mod (2**61 - 1) mod 2**32`. The product overflows 64 bits in
Data-Juicer; this is harmless, and kept so that the same rows are found.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

_PRIME = (1 << 61) - 1
_BLOCK = 128
"""Shingles per block: 256 KB with 256 permutations, which fit into the caches of a core."""
_AMBIGUOUS_LIMIT = 8
_sha1 = hashlib.sha1


class MinHash:
    """Signatures and band hashes with the permutations of Data-Juicer."""

    def __init__(self, bands: int, rows_per_band: int, permutations: int) -> None:
        self.bands = bands
        self.rows_per_band = rows_per_band
        used = bands * rows_per_band
        draw = np.random.RandomState(seed=42)
        # drawn one after the other, as in Data-Juicer
        drawn = [
            (draw.randint(1, _PRIME, dtype=np.uint64), draw.randint(0, _PRIME, dtype=np.uint64))
            for _ in range(permutations)
        ]
        table = np.array(drawn, dtype=np.uint64)[:used].T
        self._factors = np.ascontiguousarray(table[0])
        self._addends = np.ascontiguousarray(table[1])
        self._addends_and_one = self._addends + np.uint64(1)
        # odd, so that two bands of a single value are equal only if their values are
        self._mixers = np.random.RandomState(seed=7).randint(0, 1 << 63, rows_per_band, dtype=np.uint64) * 2 + 1

    def signature(self, shingles: Collection[bytes]) -> NDArray[np.uint32]:
        """The minimum of each permutation over all shingles; there must be at least one.

        For x = h * a + b, the remainder modulo p = 2**61 - 1 is (x mod 2**61) + (x >> 61), or that minus p. The code
        uses x + 1: values from which p would have to be subtracted then have low 32 bits of at most 8. If no minimum is
        that small, all minima are exact, but one too high; else (once in 20,000 rows) they are computed by division.
        """
        digests = b"".join([_sha1(shingle, usedforsecurity=False).digest() for shingle in shingles])
        hashes = np.frombuffer(digests, dtype="<u4")[::5].astype(np.uint64)[:, None]
        least: NDArray[np.uint32] | None = None
        for start in range(0, len(hashes), _BLOCK):
            values = hashes[start : start + _BLOCK] * self._factors
            values += self._addends_and_one
            values += values >> 61
            found = values.astype(np.uint32).min(axis=0)
            least = found if least is None else np.minimum(least, found, out=least)
        assert least is not None
        if least.min() <= _AMBIGUOUS_LIMIT:
            return self._by_division(hashes)
        least -= np.uint32(1)
        return least

    def _by_division(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
        least = np.full(len(self._factors), 0xFFFFFFFF, dtype=np.uint32)
        for start in range(0, len(hashes), _BLOCK):
            values = (hashes[start : start + _BLOCK] * self._factors + self._addends) % np.uint64(_PRIME)
            np.minimum(least, values.astype(np.uint32).min(axis=0), out=least)
        return least

    def band_hashes(self, signature: NDArray[np.uint32]) -> bytes:
        """8 bytes per band. Different bands collide about once in 2**62 comparisons."""
        mixed: NDArray[np.uint64] = signature.reshape(self.bands, self.rows_per_band) @ self._mixers
        return mixed.astype("<u8", copy=False).tobytes()

    def exact_text_hashes(self, text: bytes) -> bytes:
        """Band hashes of a text that match only the same text."""
        return hashlib.blake2b(text, digest_size=8).digest() * self.bands


@lru_cache(maxsize=64)
def best_bands(threshold: float, permutations: int) -> tuple[int, int]:
    """(bands, rows per band) that minimise false positives below plus false negatives above the threshold, for
    uniformly distributed similarities; ties: the fewest bands, then rows."""
    below, weights_below = _quadrature_nodes(0.0, threshold)
    above, weights_above = _quadrature_nodes(threshold, 1.0)
    nodes = np.concatenate([below, above])
    # misses minus hits below the threshold; the hits are 1 - misses, and the sum of their 1 is the threshold
    weights = np.concatenate([-weights_below, weights_above])
    differs = 1.0 - nodes ** np.arange(1, permutations + 1)[:, None]
    missed = np.ones_like(differs)
    best, least = (0, 0), np.inf
    for bands in range(1, permutations + 1):
        most_rows = permutations // bands
        missed = missed[:most_rows] * differs[:most_rows]
        errors = missed @ weights
        rows = int(np.argmin(errors))
        if errors[rows] < least:
            best, least = (bands, rows + 1), errors[rows]
    return best


def _quadrature_nodes(start: float, end: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points and weights of Gauss quadrature on 16 intervals, which is exact to the last digits for these
    polynomials."""
    pieces = 16
    places, weights = np.polynomial.legendre.leggauss(24)
    width = (end - start) / pieces
    starts = start + width * np.arange(pieces)
    return (starts[:, None] + width * (places + 1) / 2).ravel(), np.tile(weights * width / 2, pieces)
