"""Filter rows by the file size of their images."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dovetail.recipes.operators.support.images import ImageFilter, file_size
from dovetail.resources.sizes import parse_size

if TYPE_CHECKING:
    from dovetail.recipes.operators.base import Row

_BARE_NUMBER = re.compile(r"\s*\d+\s*")


class ImageSizeFilter(ImageFilter):
    """Sizes have a unit ('0.5KB', '2MiB'; all units are powers of 1024), or are a whole number of bytes.

    Data-Juicer ignores the decimal point and reads '0.5KB' as 5 KB; Dovetail reads it as 512 bytes.
    """

    needs = ()

    def __init__(self, min_size: str = "0", max_size: str = "1TB", any_or_all: str = "any") -> None:
        super().__init__(any_or_all)
        self.min_size = _parse_bytes("min_size", min_size)
        self.max_size = _parse_bytes("max_size", max_size)

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        if "image_sizes" not in stats:
            stats["image_sizes"] = [file_size(source) for source in self.images_of(row)]

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        return self.keeps_by_images(
            [self.in_range(size, self.min_size, self.max_size) for size in stats["image_sizes"]]
        )


def _parse_bytes(name: str, size: str) -> int:
    try:
        return parse_size(f"{size}B".replace(" ", "") if _BARE_NUMBER.fullmatch(str(size)) else size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
