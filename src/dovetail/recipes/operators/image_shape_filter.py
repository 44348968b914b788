"""Filter rows by the width and height of their images."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dovetail.recipes.operators.support.images import ImageFilter, image_shape

if TYPE_CHECKING:
    from dovetail.recipes.operators.base import Row


class ImageShapeFilter(ImageFilter):
    """Width and height are in pixels, in the display orientation of the image. Only the header of a file is read, so a
    truncated file is not noticed."""

    def __init__(
        self,
        min_width: int = 1,
        max_width: int = sys.maxsize,
        min_height: int = 1,
        max_height: int = sys.maxsize,
        any_or_all: str = "any",
    ) -> None:
        super().__init__(any_or_all)
        self.min_width = min_width
        self.max_width = max_width
        self.min_height = min_height
        self.max_height = max_height

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        if "image_width" in stats and "image_height" in stats:
            return
        shapes = [image_shape(source) for source in self.images_of(row)]
        stats["image_width"] = [width for width, _ in shapes]
        stats["image_height"] = [height for _, height in shapes]

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        shapes = zip(stats["image_width"], stats["image_height"], strict=True)
        return self.keeps_by_images(
            [
                self.in_range(width, self.min_width, self.max_width)
                and self.in_range(height, self.min_height, self.max_height)
                for width, height in shapes
            ]
        )
