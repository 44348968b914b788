"""Filter rows by the aspect ratio of their images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.recipes.operators.support.images import ImageFilter, image_shape

if TYPE_CHECKING:
    from dovetail.recipes.operators.base import Row


class ImageAspectRatioFilter(ImageFilter):
    """The ratio is width by height of the image in its display orientation."""

    def __init__(self, min_ratio: float = 0.333, max_ratio: float = 3.0, any_or_all: str = "any") -> None:
        super().__init__(any_or_all)
        self.min_ratio = min_ratio
        self.max_ratio = max_ratio

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        if "aspect_ratios" not in stats:
            shapes = [image_shape(source) for source in self.images_of(row)]
            stats["aspect_ratios"] = [width / height for width, height in shapes]

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        return self.keeps_by_images(
            [self.in_range(ratio, self.min_ratio, self.max_ratio) for ratio in stats["aspect_ratios"]]
        )
