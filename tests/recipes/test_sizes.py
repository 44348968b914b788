"""Sizes in recipes, including those that Data-Juicer misreads."""

from __future__ import annotations

import pytest

from dovetail.resources.sizes import parse_size

KB, MB, GB, TB = (1024**power for power in range(1, 5))


def test_decimals_are_read_unlike_in_data_juicer() -> None:
    assert parse_size("1.5GB") == GB * 3 // 2  # Data-Juicer: 15 GB
    assert parse_size("0.25GB") == GB // 4


@pytest.mark.parametrize("negative", ["-2GB", "-0.5MB", "-1b", " -2GB"])
def test_negative_sizes_are_refused_unlike_in_data_juicer(negative: str) -> None:
    with pytest.raises(ValueError, match=r"is negative: write '4GB'"):
        parse_size(negative)


@pytest.mark.parametrize("bare", ["1500", 1500])
def test_a_number_without_a_unit_is_refused_because_data_juicer_reads_it_as_bytes_or_gigabytes(bare: object) -> None:
    with pytest.raises(ValueError, match=r"has no unit: write '1500GB', '1500MB' or '1500B'"):
        parse_size(bare)


@pytest.mark.parametrize("bare", [1.5, 0, True, None, [1500], {"memory": 1}])
def test_other_values_without_a_unit_are_refused_with_a_fix(bare: object) -> None:
    with pytest.raises(ValueError, match=r"has no unit: write .*MB'"):
        parse_size(bare)


@pytest.mark.parametrize(
    ("size", "size_bytes"), [("2g", 2 * GB), ("2G", 2 * GB), ("500m", 500 * MB), ("64k", 64 * KB), ("1t", TB)]
)
def test_short_units_are_accepted_unlike_in_data_juicer(size: str, size_bytes: int) -> None:
    assert parse_size(size) == size_bytes


@pytest.mark.parametrize(("unit", "size_bytes"), [("K", KB), ("M", MB), ("G", GB), ("T", TB)])
def test_units_are_1024_based_with_and_without_the_i_in_any_case(unit: str, size_bytes: int) -> None:
    for spelling in (f"{unit}B", f"{unit}iB", f"{unit}b", f"{unit}ib", f"{unit}IB"):
        for written in (spelling, spelling.lower(), spelling.upper()):
            assert parse_size(f"3{written}") == 3 * size_bytes
            assert parse_size(f"3 {written}") == 3 * size_bytes


def test_common_sizes_are_parsed() -> None:
    assert parse_size("1500MB") == 1500 * MB
    assert parse_size("2GB") == 2 * GB


@pytest.mark.parametrize("nonsense", ["", "GB", "2GBs", "two GB", "2..5GB", "1,5GB", "2GB 3GB", "nanGB", "infGB"])
def test_invalid_sizes_are_refused_with_examples(nonsense: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size: write '4GB', '500MB' or '64KiB'"):
        parse_size(nonsense)
