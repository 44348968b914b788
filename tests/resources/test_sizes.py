from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dovetail.resources.sizes import (
    SIZE_LIMIT_BYTES,
    format_exact_size,
    format_milli,
    format_size,
    parse_milli,
    parse_size,
)

KB, MB, GB, TB, PB = (1024**power for power in range(1, 6))

SIZES = [
    ("1.5GB", GB * 3 // 2),
    ("2g", 2 * GB),
    ("2G", 2 * GB),
    ("500m", 500 * MB),
    ("500M", 500 * MB),
    ("1500MB", 1500 * MB),
    ("64KB", 64 * KB),
    ("64KiB", 64 * KB),
    ("64kib", 64 * KB),
    ("64k", 64 * KB),
    ("3MB", 3 * MB),
    ("3MiB", 3 * MB),
    ("3GiB", 3 * GB),
    ("3gb", 3 * GB),
    ("3Gb", 3 * GB),
    ("2TB", 2 * TB),
    ("2TiB", 2 * TB),
    ("2t", 2 * TB),
    ("1PB", PB),
    ("1024PB", SIZE_LIMIT_BYTES),
    (".5GB", GB // 2),
    ("0.5g", GB // 2),
    ("1.GB", GB),
    ("+1GB", GB),
    ("1e3MB", 1000 * MB),
    ("1_000MB", 1000 * MB),
    ("7B", 7),
    ("7b", 7),
    ("0B", 0),
    ("0GB", 0),
    (" 4 GB ", 4 * GB),
    ("4\tGB\n", 4 * GB),
]

# what the systems before us read wrongly (recipes.md, 5), and what else a slip of the pen makes
MISTAKES: list[Any] = [
    "",
    "  ",
    "1500",
    "1.5",
    "-2",
    "-2GB",
    "-0.5MB",
    "-0GB",
    "nan",
    "NaN",
    "nanGB",
    "inf",
    "infGB",
    "GB",
    "B",
    "four GB",
    "4 GB RAM",
    "4GBs",
    "4XB",
    "4EB",
    "1,5GB",
    "1.5.2GB",
    "1_GB",
    "1__0GB",
    "_1GB",
    "1e999GB",
    "1025PB",
    "2000PB",
    "0x10GB",
    "4GB\x00",
    "1" * 5000 + "GB",
    1500,
    0,
    -2,
    10**30,
    10**400,
    10**5000,
    1.5,
    -1.5,
    1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
    True,
    None,
    b"4GB",
    ["4GB"],
    {"GB": 4},
    Fraction(1, 3),
    4j,
]


def size_or_error(value: object) -> int | ValueError:
    """Any other exception is not meant to be."""
    try:
        return parse_size(value)
    except ValueError as error:
        return error


def message_of(value: object) -> str:
    with pytest.raises(ValueError) as caught:
        parse_size(value)
    return str(caught.value)


def what_to_write(message: str) -> list[str]:
    """The sizes that a message tells people to write."""
    return re.findall(r"'([^']*)'", message.rpartition(": write ")[2])


@pytest.mark.parametrize(("text", "size_bytes"), SIZES)
def test_a_size_is_read_as_its_users_mean_it(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("value", MISTAKES, ids=lambda value: repr(value)[:20] if not isinstance(value, int) else "int")
def test_a_mistake_in_a_size_is_a_value_error_that_says_what_to_write(value: object) -> None:
    message = message_of(value)
    assert ": write " in message
    suggested = what_to_write(message)
    assert suggested, message
    for text in suggested:
        assert 0 <= parse_size(text) <= SIZE_LIMIT_BYTES, f"{message}: not even {text!r} is right"


@pytest.mark.parametrize(
    ("value", "wrong"),
    [("-2GB", "negative"), ("1500", "no unit"), (1500, "no unit"), ("x", "is not a size"), ("2000PB", "the limit")],
)
def test_the_message_names_the_value_and_what_is_wrong_with_it(value: object, wrong: str) -> None:
    message = message_of(value)
    assert message.startswith(repr(value))
    assert wrong in message


def test_a_bare_number_is_shown_with_each_unit() -> None:
    assert what_to_write(message_of(1500)) == ["1500GB", "1500MB", "1500B"]
    assert what_to_write(message_of("1.5")) == ["1.5GB", "1.5MB", "1.5B"]


@given(
    st.one_of(
        st.text(max_size=12),
        st.text(alphabet="0123456789", max_size=4).flatmap(
            lambda digits: st.text(alphabet="0159._-+eEkKmMgGtTpPiIbB \t\u212a\u0663\u00b2", max_size=8).map(
                lambda rest: digits + rest
            )
        ),
        st.integers(),
        st.floats(),
        st.binary(max_size=4),
        st.none(),
    )
)
@settings(max_examples=10 * settings().max_examples)
def test_whatever_is_given_is_bytes_or_a_value_error_that_says_what_to_write(value: object) -> None:
    size_bytes = size_or_error(value)
    if isinstance(size_bytes, ValueError):
        assert ": write " in str(size_bytes)
        assert all(parse_size(text) >= 0 for text in what_to_write(str(size_bytes)))
    else:
        assert type(size_bytes) is int
        assert 0 <= size_bytes <= SIZE_LIMIT_BYTES


@given(
    st.integers(0, 10**6),
    st.sampled_from([("k", KB), ("m", MB), ("g", GB), ("t", TB)]),
    st.sampled_from(["", "b", "ib"]),
    st.sampled_from([str.lower, str.upper, str.title]),
    st.sampled_from(["", " ", "  "]),
)
def test_every_unit_is_1024_based_in_any_case(
    number: int, unit: tuple[str, int], ending: str, case: Any, space: str
) -> None:
    assert parse_size(f"{number}{space}{case(unit[0] + ending)}") == number * unit[1]


@given(st.integers(0, 9999), st.integers(0, 999), st.sampled_from([("B", 1), ("KB", KB), ("MB", MB), ("GB", GB)]))
def test_decimals_are_decimals(whole: int, thousandths: int, unit: tuple[str, int]) -> None:
    exact = (whole + Fraction(thousandths, 1000)) * unit[1]
    assert abs(parse_size(f"{whole}.{thousandths:03d}{unit[0]}") - exact) <= Fraction(1, 2)


@given(st.integers(0, SIZE_LIMIT_BYTES))
@example(SIZE_LIMIT_BYTES)
@example(SIZE_LIMIT_BYTES - 1)
@example(2**53 + 1)
@example(3 * GB // 2)
@settings(max_examples=5 * settings().max_examples)
def test_an_exact_size_is_read_back_to_the_very_same_number(size_bytes: int) -> None:
    assert parse_size(format_exact_size(size_bytes)) == size_bytes


@given(st.integers(0, 2**30), st.integers(0, 50))
def test_an_exact_size_of_few_bits_is_read_back_too(number: int, shift: int) -> None:
    size_bytes = min(number << shift, SIZE_LIMIT_BYTES)
    assert parse_size(format_exact_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KB"),
        (1536, "1.5KB"),
        (40 * GB, "40GB"),
        (GB * 3 // 2, "1.5GB"),
        (1500 * MB, "1500MB"),
        (1025, "1025B"),
        (TB, "1TB"),
        (PB, "1PB"),
    ],
)
def test_an_exact_size_is_written_in_the_largest_unit_that_is_exact(size_bytes: int, text: str) -> None:
    assert format_exact_size(size_bytes) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KB"),
        (1500 * MB, "1.46GB"),
        (40 * GB, "40GB"),
        (85_094_825_984, "79.3GB"),
        (128 * GB - 1, "128GB"),
        (SIZE_LIMIT_BYTES, "1020PB"),
    ],
)
def test_about_size_keeps_three_digits(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, SIZE_LIMIT_BYTES).flatmap(lambda top: st.integers(0, top)))
def test_about_size_is_short_and_never_half_a_percent_off(size_bytes: int) -> None:
    text = format_size(size_bytes)
    assert re.fullmatch(r"\d{1,4}(\.\d{1,2})?(B|KB|MB|GB|TB|PB)", text)
    assert abs(parse_size(text) - size_bytes) <= size_bytes * 0.005


def test_n_workers_of_one_nth_fit_in_one_and_waste_less_than_a_thousandth_each() -> None:
    shares = {parts: parse_milli(1 / parts) for parts in range(1, 1001)}
    assert [parts for parts, share in shares.items() if share * parts > 1000] == []
    assert shares == {parts: 1000 // parts for parts in range(1, 1001)}


@given(st.integers(0, 10**9))
@example(290)
@example(10**9)
def test_thousandths_are_read_exactly_up_to_the_most_cpus(amount_milli: int) -> None:
    assert parse_milli(amount_milli / 1000) == amount_milli
    assert parse_milli(float(format_milli(amount_milli))) == amount_milli


@given(st.integers(0, 10**12))
@example(33_554_446_565)
@example(10**12 - 1)
@settings(max_examples=5 * settings().max_examples)
def test_thousandths_are_read_exactly_up_to_the_most_of_a_custom_resource(amount_milli: int) -> None:
    assert parse_milli(amount_milli / 1000) == amount_milli


@given(st.floats(0, 65_536))
def test_a_share_is_rounded_down_never_up(number: float) -> None:
    exact = Fraction(number) * 1000
    assert exact - 1 < parse_milli(number) <= exact + Fraction(2, 10**6)


@pytest.mark.parametrize(
    ("amount_milli", "text"),
    [(2500, "2.5"), (1000, "1"), (1, "0.001"), (0, "0"), (-250, "-0.25"), (1_000_010, "1000.01")],
)
def test_thousandths_are_written_as_people_write_them(amount_milli: int, text: str) -> None:
    assert format_milli(amount_milli) == text
