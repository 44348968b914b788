"""Image operators: the results of Data-Juicer, from files and from bytes."""

from __future__ import annotations

import base64
import io
import struct
import subprocess
import sys
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.recipes.operators.base import STATS_FIELD, BadField
from dovetail.recipes.operators.image_aspect_ratio_filter import ImageAspectRatioFilter
from dovetail.recipes.operators.image_deduplicator import ImageDeduplicator
from dovetail.recipes.operators.image_shape_filter import ImageShapeFilter
from dovetail.recipes.operators.image_size_filter import ImageSizeFilter
from dovetail.recipes.operators.support.images import file_size, image_shape, image_sources, load_rgb
from recipes.golden_aids import cases, errors

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'dovetail-ml[recipes]'")

FILTERS: dict[str, Any] = {
    "image_shape_filter": ImageShapeFilter,
    "image_size_filter": ImageSizeFilter,
    "image_aspect_ratio_filter": ImageAspectRatioFilter,
}
OF_FILTERS = [case for name in FILTERS for case in cases(op=name)]
OF_DEDUPLICATOR = cases(op="image_deduplicator")
HALF_A_KB = {"min_size": "100", "max_size": "0.5KB"}


def named(case: dict[str, Any]) -> str:
    return str(case["name"])


def with_bytes(case: dict[str, Any]) -> list[dict[str, Any]]:
    images = [base64.b64decode(text) for text in case["inputs"]["images_png_base64"]]
    return [{**row, "images": [images[number] for number in row["images"]]} for row in case["inputs"]["rows"]]


def with_paths(case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    for number, text in enumerate(case["inputs"]["images_png_base64"]):
        (folder / f"{number}.png").write_bytes(base64.b64decode(text))
    return [
        {**row, "images": [str(folder / f"{number}.png") for number in row["images"]]} for row in case["inputs"]["rows"]
    ]


def with_both(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {**row, "images": [f"/gone/{number}" for number in range(len(row["images"]))], "image_bytes": row["images"]}
        for row in with_bytes(case)
    ]


def given_as(how: str, case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return with_paths(case, folder) if how == "paths" else with_bytes(case) if how == "bytes" else with_both(case)


def png(width: int = 4, height: int = 3, colour: tuple[int, int, int] = (9, 99, 199)) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


# filters


@pytest.mark.parametrize("how", ["paths", "bytes", "both"])
@pytest.mark.parametrize("case", OF_FILTERS, ids=named)
def test_stats_and_kept_rows_of_images_are_those_of_data_juicer(case: dict[str, Any], how: str, tmp_path: Path) -> None:
    operator = FILTERS[case["op"]](**case["params"])
    for row, wanted in zip(given_as(how, case, tmp_path), case["rows"], strict=True):
        kept = operator(row)
        assert row[STATS_FIELD] == wanted["stats"]
        if case["params"] != HALF_A_KB:
            assert (kept is row) is wanted["keep"]


def test_half_a_kilobyte_is_512_bytes_where_data_juicer_reads_5_kilobytes() -> None:
    case = next(case for case in OF_FILTERS if case["params"] == HALF_A_KB)
    there = ImageSizeFilter(min_size="100", max_size="5KB")
    here = ImageSizeFilter(**case["params"])
    differing = []
    for number, (row, wanted) in enumerate(zip(with_bytes(case), case["rows"], strict=True)):
        assert (there(row) is row) is wanted["keep"]
        if (here(row) is row) is not wanted["keep"]:
            differing.append(number)
        sizes = wanted["stats"]["image_sizes"]
        assert (here(row) is row) is (not sizes or any(100 <= size <= 512 for size in sizes))
    assert [min(case["rows"][number]["stats"]["image_sizes"]) > 512 for number in differing] == [True] * 6


@pytest.mark.parametrize(
    ("written", "wanted"), [("0", 0), ("100", 100), (100, 100), ("1KB", 1024), ("1.5 kib", 1536), ("1TB", 1 << 40)]
)
def test_sizes_are_read_with_and_without_units(written: Any, wanted: int) -> None:
    assert ImageSizeFilter(max_size=written).max_size == wanted


@pytest.mark.parametrize("wrong", ["-2KB", "many", "", "1.5", None, "3 QB"])
def test_an_invalid_size_is_reported_with_the_name_of_the_parameter(wrong: Any) -> None:
    with pytest.raises(ValueError, match="min_size: "):
        ImageSizeFilter(min_size=wrong)


@pytest.mark.parametrize(
    "error",
    [*errors(op="image_shape_filter"), *errors(op="image_size_filter"), *errors(op="image_aspect_ratio_filter")],
)
def test_configurations_that_data_juicer_refuses_are_refused(error: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="any_or_all must be one of any, all, not 'some'"):
        FILTERS[error["op"]](**error["params"])


def test_any_or_all_images_must_be_in_range() -> None:
    images = [png(4, 3), png(40, 3)]
    for make in (
        lambda which: ImageShapeFilter(max_width=10, any_or_all=which),
        lambda which: ImageAspectRatioFilter(max_ratio=5, any_or_all=which),
        lambda which: ImageSizeFilter(max_size=str(len(images[0])), any_or_all=which),
    ):
        assert make("any")({"images": images}) is not None
        assert make("all")({"images": images}) is None
        assert make("all")({"images": images[:1]}) is not None
        assert make("any")({"images": images[1:]}) is None


def test_bounds_may_be_open_and_ranges_reversed() -> None:
    operator = ImageAspectRatioFilter(min_ratio=1.0, max_ratio=2.0)
    on_the_bound, inside, outside = ({"images": [png(width, 4)]} for width in (8, 6, 12))
    assert [operator(row) is row for row in (on_the_bound, inside, outside)] == [True, True, False]
    operator.max_closed_interval = False
    assert [operator(row) is row for row in (on_the_bound, inside, outside)] == [False, True, False]
    operator.reversed_range = True
    assert [operator(row) is row for row in (on_the_bound, inside, outside)] == [False, False, True]
    operator.max_closed_interval = True
    assert [operator(row) is row for row in (on_the_bound, inside, outside)] == [True, False, True]


def test_existing_stats_are_not_computed_again() -> None:
    stats = {"image_width": [5], "image_height": [6], "aspect_ratios": [2.5], "image_sizes": [7]}
    for make in FILTERS.values():
        row = {"images": ["/nowhere"], STATS_FIELD: dict(stats)}
        assert make()(row) is row
        assert row[STATS_FIELD] == stats


@pytest.mark.parametrize("make", FILTERS.values())
@pytest.mark.parametrize(
    "row", [{}, {"images": []}, {"images": None}, {"images": ""}, {"images": (), "image_bytes": []}]
)
def test_rows_without_images_are_kept(make: Any, row: dict[str, Any]) -> None:
    row = dict(row)
    assert make()(row) is row
    assert all(value == [] for value in row[STATS_FIELD].values())


@pytest.mark.parametrize("make", [*FILTERS.values(), ImageDeduplicator])
def test_a_missing_file_is_reported_with_its_path(make: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "missing image.png")
    with pytest.raises(BadField, match=r"missing image\.png' cannot be read: No such file or directory"):
        make()({"images": [path]})


@pytest.mark.parametrize("make", [ImageShapeFilter, ImageAspectRatioFilter, ImageDeduplicator])
@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", png()[:20], b"GIF89a\0"])
def test_a_file_that_is_not_an_image_is_reported_with_its_path(make: Any, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises(BadField, match=r"broken\.png' cannot be read"):
        make()({"images": [str(path)]})
    if content:
        with pytest.raises(BadField, match=f"of {len(content)} bytes cannot be read"):
            make()({"images": [content]})


def test_a_truncated_file_is_reported_by_operators_that_read_pixels(tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "cut.png"
    Image.effect_noise((64, 64), 90).save(path)
    path.write_bytes(path.read_bytes()[:1500])
    assert image_shape(str(path)) == (64, 64)
    with pytest.raises(BadField, match=r"cut\.png' cannot be read"):
        ImageDeduplicator()({"images": [str(path)]})


def test_a_small_file_that_claims_a_million_million_pixels_is_refused() -> None:
    head = struct.pack(">IIBBBBB", 1_000_000, 1_000_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    for make in (ImageShapeFilter, ImageDeduplicator):
        with pytest.raises(BadField, match="exceeds limit"):
            make()({"images": [bomb + png()[33:]]})


@pytest.mark.parametrize("wrong", [[5], [None], [["a"]], 5, [{"nothing": 1}], [""], ["https://example.org/a.png"]])
def test_a_value_that_is_neither_a_path_nor_bytes_is_reported(wrong: Any) -> None:
    for make in (*FILTERS.values(), ImageDeduplicator):
        with pytest.raises(BadField, match=r"images|example\.org"):
            make()({"images": wrong})


def test_images_are_given_in_several_ways(tmp_path: Path) -> None:
    path = tmp_path / "a b é.png"
    path.write_bytes(png(7, 5))
    ways = [str(path), path.as_uri(), path, path.read_bytes(), bytearray(path.read_bytes())]
    ways += [{"bytes": path.read_bytes(), "path": None}, {"bytes": None, "path": str(path)}]
    for way in ways:
        found = image_sources({"images": [way]}, "images", "image_bytes")
        assert [image_shape(source) for source in found] == [(7, 5)]
        assert file_size(found[0]) == path.stat().st_size
    assert image_sources({"images": str(path)}, "images", "image_bytes") == [str(path)]


def test_bytes_are_used_only_if_there_are_as_many_as_paths() -> None:
    row = {"images": ["a", "b"], "image_bytes": [b"1"]}
    assert image_sources(row, "images", "image_bytes") == ["a", "b"]
    assert image_sources({**row, "images": ["a"]}, "images", "image_bytes") == [b"1"]
    assert image_sources({"image_bytes": [b"1"]}, "images", "image_bytes") == [b"1"]


def test_images_are_read_from_the_image_key() -> None:
    for make in FILTERS.values():
        operator = make()
        operator.image_key = "pictures"
        assert operator.columns() == ("pictures",)
        row = {"pictures": [png()]}
        operator(row)
        assert all(len(value) == 1 for value in row[STATS_FIELD].values())  # type: ignore[attr-defined]


def test_an_image_is_rotated_by_its_exif_orientation() -> None:
    from PIL import Image

    file = io.BytesIO()
    image = Image.new("RGB", (40, 20))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(file, "JPEG", exif=exif)
    assert image_shape(file.getvalue()) == (20, 40)
    assert load_rgb(file.getvalue()).size == (20, 40)


# hashes


@pytest.mark.parametrize("how", ["paths", "bytes", "both"])
@pytest.mark.parametrize("case", OF_DEDUPLICATOR, ids=named)
def test_duplicate_images_are_those_of_data_juicer(case: dict[str, Any], how: str, tmp_path: Path) -> None:
    operator = ImageDeduplicator(**case["params"])
    hashes = [operator.compute_hash(row) for row in given_as(how, case, tmp_path)]
    assert [one.hex() for one in hashes] == case["hashes"]
    originals = operator.originals(iter(hashes))
    assert [number for number, original in enumerate(originals) if number == original] == case["rows"]


def test_consider_text_compares_texts() -> None:
    red, blue = png(32, 32, (255, 0, 0)), png(32, 32, (0, 0, 0))
    rows: list[dict[str, Any]] = [
        {"text": "a", "images": [red]},
        {"text": "b", "images": [red]},
        {"text": " a ", "images": [red]},
        {"text": "a", "images": []},
        {"text": "a"},
        {"text": "b", "images": []},
        {"text": "a", "images": [red, blue]},
    ]
    with_text, without = ImageDeduplicator(consider_text=True), ImageDeduplicator()
    assert list(with_text.originals(with_text.compute_hash(row) for row in rows)) == [0, 1, 0, 3, 3, 5, 6]
    # rows without images are all kept
    assert list(without.originals(without.compute_hash(row) for row in rows)) == [0, 0, 0, 3, 4, 5, 6]
    assert with_text.columns() == ("images", "text")


def test_a_path_that_occurs_twice_in_a_row_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png())
    operator = ImageDeduplicator()
    once = operator.compute_hash({"images": [str(path)]})
    assert operator.compute_hash({"images": [str(path)] * 2}) == once
    assert operator.compute_hash({"images": [str(path)] * 2, "image_bytes": [png()] * 2}) == once
    assert operator.compute_hash({"images": [png()] * 2}) == once * 2


def test_a_wrong_text_is_reported_only_if_texts_are_compared() -> None:
    row = {"text": 5, "images": [png()]}
    assert ImageDeduplicator().compute_hash(row)
    with pytest.raises(BadField, match="'text' is int"):
        ImageDeduplicator(consider_text=True).compute_hash(row)


@pytest.mark.parametrize("method", ["phash", "dhash", "whash", "ahash"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_images_of_all_kinds_are_hashed(method: str, mode: str) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (9, 7), (200, 30, 60)).convert("L" if mode == "I;16" else mode).save(file, "TIFF")
    if mode == "I;16":
        file = io.BytesIO()
        Image.new("I;16", (9, 7), 999).save(file, "TIFF")
    assert len(ImageDeduplicator(method).compute_hash({"images": [file.getvalue()]})) == 8


def test_a_smaller_copy_has_the_same_hash() -> None:
    from PIL import Image

    large = Image.radial_gradient("L").convert("RGB")
    hashes = set()
    for image in (large, large.resize((128, 128))):
        file = io.BytesIO()
        image.save(file, "PNG")
        hashes.add(ImageDeduplicator("dhash").compute_hash({"images": [file.getvalue()]}))
    assert len(hashes) == 1


def test_an_unknown_method_is_refused() -> None:
    for error in errors(op="image_deduplicator"):
        with pytest.raises(ValueError, match="method must be one of phash, dhash, whash, ahash, not 'xhash'"):
            ImageDeduplicator(**error["params"])


def test_planning_imports_neither_pillow_nor_numpy() -> None:
    names = "image_deduplicator, image_shape_filter, image_size_filter, image_aspect_ratio_filter"
    script = (
        f"import sys; from dovetail.recipes.operators import {names};"
        "image_deduplicator.ImageDeduplicator(); image_size_filter.ImageSizeFilter();"
        "assert not {'PIL', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
