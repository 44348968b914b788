"""Images of a row: sources, opening, orientation, size, RGB pixels; base class of image filters.

The image field holds a list of paths, `file://` URLs or file contents. If the row also has a field with the contents of
as many files, these are used. Images are opened one at a time, and only as far as necessary: their shape needs only the
first bytes of a file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

from dovetail.recipes.operators.base import BadField, Filter, Row, not_a_string
from dovetail.recipes.operators.support.parameter_checks import check_choice

if TYPE_CHECKING:
    from PIL import Image

ImageSource = str | bytes
"""A path, or the contents of a file."""
_ROTATED_ORIENTATIONS = frozenset({5, 6, 7, 8})
"""EXIF orientations whose width is stored as height."""
_ORIENTATION_TAG = 0x0112


def image_sources(row: Row, key: str, bytes_key: str) -> list[ImageSource]:
    """Paths or contents of the images of a row; empty if it has none, which is not an error."""
    given = _as_list(row, key)
    contents = _as_list(row, bytes_key)
    if contents and (not given or len(contents) == len(given)):
        return [_source(bytes_key, content) for content in contents]
    return [_source(key, one) for one in given]


def _as_list(row: Row, key: str) -> Sequence[Any]:
    given = row.get(key)
    if given is None:
        return ()
    if isinstance(given, str | bytes | bytearray | memoryview | Mapping):
        return (given,) if given else ()
    if isinstance(given, list | tuple):
        return given
    if hasattr(given, "tolist"):  # an array, as tables give it
        return list(given.tolist())
    raise BadField(f"field {key!r} is {type(given).__name__}, not a list of paths or bytes")


def _source(key: str, one: object) -> ImageSource:
    if isinstance(one, Mapping):  # as the library `datasets` stores images
        one = one.get("bytes") or one.get("path")
    if isinstance(one, bytearray | memoryview):
        return bytes(one)
    if isinstance(one, bytes):
        return one
    if isinstance(one, os.PathLike):
        one = os.fspath(one)
    if not isinstance(one, str) or not one:
        raise not_a_string(key, one) if not isinstance(one, str) else BadField(f"field {key!r} has an empty path")
    return _local_path(one)


def _local_path(path: str) -> str:
    scheme, separator, _ = path.partition("://")
    if not separator:
        return path
    if scheme.lower() == "file":
        return unquote(urlsplit(path).path)
    raise BadField(f"image {path!r} is not a file here: images are read from paths, file:// URLs or bytes")


def source_name(source: ImageSource) -> str:
    return repr(source) if isinstance(source, str) else f"of {len(source)} bytes"


@contextmanager
def open_image(source: ImageSource) -> Iterator[Image.Image]:
    """Open an image and read its header. Errors, here or in the block, become `BadField` with its path; so does an
    image of more than 178 million pixels (twice `PIL.Image.MAX_IMAGE_PIXELS`), which a small file can claim to have."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            yield image
    except (BadField, MemoryError):
        raise
    except OSError as error:
        raise BadField(f"image {source_name(source)} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # decoders raise many types
        raise BadField(f"image {source_name(source)} cannot be read: {type(error).__name__}: {error}") from error


def image_shape(source: ImageSource) -> tuple[int, int]:
    """Width and height in the display orientation."""
    with open_image(source) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _ROTATED_ORIENTATIONS else (width, height)


def _orientation(image: Image.Image) -> int:
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # reading it would decode the whole image
    return int(image.getexif().get(_ORIENTATION_TAG, 1))


def load_rgb(source: ImageSource) -> Image.Image:
    """The decoded image in RGB, in its display orientation."""
    from PIL import ImageOps

    with open_image(source) as image:
        image.load()
        upright = ImageOps.exif_transpose(image) if image.getexif().get(_ORIENTATION_TAG) is not None else image
        return upright.convert("RGB")


def file_size(source: ImageSource) -> int:
    if isinstance(source, bytes):
        return len(source)
    try:
        return os.path.getsize(source)  # noqa: PTH202 - faster than a Path for millions of files
    except (OSError, ValueError) as error:
        raise BadField(
            f"image {source_name(source)} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


class ImageFilter(Filter):
    """Keeps rows with any image, or all images, in range, and rows without images."""

    extra = "recipes"
    needs: ClassVar[tuple[str, ...]] = ("PIL",)

    def __init__(self, any_or_all: str) -> None:
        chosen = check_choice("any_or_all", any_or_all, ("any", "all"))
        self.combine: Callable[[Sequence[bool]], bool] = any if chosen == "any" else all

    def columns(self) -> tuple[str, ...]:
        return (self.image_key,)

    def images_of(self, row: Row) -> list[ImageSource]:
        return image_sources(row, self.image_key, self.image_bytes_key)

    def keeps_by_images(self, in_range: Sequence[bool]) -> bool:
        return not in_range or self.combine(in_range)
