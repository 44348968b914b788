"""Remove rows whose images look the same by perceptual hash; the first one is kept."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import Deduplicator, Row
from dovetail.recipes.operators.document_deduplicator import DocumentDeduplicator
from dovetail.recipes.operators.support.images import ImageSource, image_sources, load_rgb
from dovetail.recipes.operators.support.parameter_checks import check_choice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_METHODS = ("phash", "dhash", "whash", "ahash")


class ImageDeduplicator(Deduplicator):
    """Compares all images of a row, in order; a path that occurs twice in a row counts once. Rows without images are
    kept, unless `consider_text` compares their texts, too."""

    extra = "recipes"
    needs = ("numpy", "PIL")

    def __init__(self, method: str = "phash", consider_text: bool = False) -> None:
        self.method = check_choice("method", method, _METHODS)
        self.consider_text = consider_text
        self._text = DocumentDeduplicator()

    def columns(self) -> tuple[str, ...]:
        return (self.image_key, self.text_key) if self.consider_text else (self.image_key,)

    def compute_hash(self, row: Row) -> bytes:
        """8 bytes per image, then 16 bytes for the text; empty without images."""
        from dovetail.recipes.operators.support.image_hashes import HASH_METHODS

        look = HASH_METHODS[self.method]
        images = image_sources(row, self.image_key, self.image_bytes_key)
        found = b"".join([look(load_rgb(image)) for image in _unique_by_path(row.get(self.image_key), images)])
        return found + self._text.digest(self.text_of(row)) if self.consider_text else found

    def originals(self, hashes: Iterable[bytes]) -> Sequence[int]:
        from dovetail.recipes.operators.support.duplicate_groups import first_equal

        # a row without images gets a unique digest: its number, which is shorter than any hash
        return first_equal(_digest(found or number.to_bytes(7, "little")) for number, found in enumerate(hashes))


def _unique_by_path(given: object, images: list[ImageSource]) -> Iterable[ImageSource]:
    if isinstance(given, list) and len(given) == len(images) and all(isinstance(one, str) for one in given):
        return dict(zip(given, images, strict=True)).values()
    return images


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
