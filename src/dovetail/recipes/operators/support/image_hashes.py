"""Perceptual image hashes (phash, dhash, whash, ahash) as computed by imagededup 0.3.3."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from PIL import Image


def _grey(image: Image.Image, width: int, height: int) -> NDArray[np.uint8]:
    from PIL.Image import Resampling

    return np.asarray(image.resize((width, height), Resampling.LANCZOS).convert("L"))


def _pack_bits(bits: NDArray[np.bool_]) -> bytes:
    return np.packbits(bits).tobytes()


def ahash(image: Image.Image) -> bytes:
    """Bits: pixel at least as bright as the mean."""
    grey = _grey(image, 8, 8)
    return _pack_bits(grey >= grey.mean())


def dhash(image: Image.Image) -> bytes:
    """Bits: pixel brighter than its left neighbour."""
    grey = _grey(image, 9, 8)
    return _pack_bits(grey[:, 1:] > grey[:, :-1])


def phash(image: Image.Image) -> bytes:
    """Bits: low frequency at least as strong as the median.

    Rounded, because in a plain image most of them are 0, and half of the bits would depend on the last digits, which
    differ between processors. `imagededup` does not round: of 1,150 drawn images 10 have other bits there.
    """
    cosines = _cosines()
    coefficients = np.round(cosines @ _grey(image, 32, 32) @ cosines.T, 6)
    return _pack_bits(coefficients >= np.median(coefficients.ravel()[1:]))


@cache
def _cosines() -> NDArray[np.float64]:
    """The first 8 of 32 frequencies of the cosine transform (type II)."""
    places = (2 * np.arange(32) + 1) * np.arange(8)[:, None]
    return np.asarray(2 * np.cos(np.pi * places / 64))


def whash(image: Image.Image) -> bytes:
    """Bits: square of 8 x 8 at least as bright as the median, by Haar wavelets."""
    values = _grey(image, 256, 256) / 255
    half = 0.7071067811865476
    for _ in range(5):
        values = half * values[1::2] + half * values[::2]
        values = half * values[:, 1::2] + half * values[:, ::2]
    return _pack_bits(values >= np.median(values))


HASH_METHODS: dict[str, Callable[[Image.Image], bytes]] = {
    "phash": phash,
    "dhash": dhash,
    "whash": whash,
    "ahash": ahash,
}
