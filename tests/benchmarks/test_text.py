"""The text and rows benchmarks run, compare their outputs and write their keys."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.benchmark_runs import run_benchmark
from text_operators import (
    OPERATORS,
    clean_links,
    few_repetitions,
    few_special_characters,
    fit_length,
    normalize_whitespace,
)
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORDS = "soil seed rain tide rope quay flour oven orbit moon dust train track bridge signal engine".split()  # noqa: SIM905


def documents(count: int) -> Iterator[dict[str, Any]]:
    """Of ten rows, five are kept, two are changed, and one of each kind is dropped."""
    chance = random.Random(3)
    for number in range(count):
        good = " ".join(chance.choices(WORDS, k=90))
        kinds = (
            *[good] * 5,
            *[f"{good} \u00a0\u3000 https://example.org/a?b=c “quoted”"] * 2,
            "too short",
            "#$% 123 &*( " * 20,
            "the same again and " * 20,
        )
        yield {"id": number, "text": kinds[number % len(kinds)], "meta": {"from": "généré"}}


def test_the_output_of_text_is_compared_with_that_of_a_plain_loop(tmp_path: Path, compiled: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in documents(500)), encoding="utf-8")
    sizes = ("--source", str(source), "--repeat", "1", "--compiled", str(compiled))
    found = run_benchmark("text", tmp_path, "--engine", "local", *sizes)
    assert found["kept"] == 350
    for kind in ("", "unfused_", "plain_"):
        for key in ("cpu_s", "wall_s"):
            assert found[kind + key] > 0, kind + key
    assert 0 < found["driver_cpu_s"] < found["cpu_s"]
    assert found["cpu_ratio"] == pytest.approx(found["cpu_s"] / found["plain_cpu_s"])
    assert found["unfused_cpu_ratio"] == pytest.approx(found["unfused_cpu_s"] / found["plain_cpu_s"])
    assert found["wall_ratio"] == pytest.approx(found["wall_s"] / found["plain_wall_s"])


@pytest.mark.bar
def test_the_bars_for_text_hold(tmp_path: Path) -> None:
    """Except for wall time, which needs an idle machine."""
    source = tmp_path / "rows.jsonl"
    with source.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in documents(50_000))
    found = run_benchmark("text", tmp_path, "--engine", "local", "--source", str(source))
    assert found["kept"] == 35_000
    assert found["cpu_ratio"] <= 1.2
    assert found["unfused_cpu_ratio"] <= 1.35
    assert found["driver_share"] <= 0.1


def test_rows_per_cpu_second_and_peak_memory_are_measured(tmp_path: Path, compiled: Path) -> None:
    kinds = {"file": "", "range": "range_"} if LONG else {"file": ""}
    sizes = ("--rows", "20000", "--repeat", "1", "--kinds", ",".join(kinds), "--compiled", str(compiled))
    found = run_benchmark("rows", tmp_path, *sizes)
    assert found["rows"] == 20000
    for prefix in kinds.values():
        assert found[f"{prefix}peak_mb"] > 5
        assert found[f"{prefix}rows_per_cpu_s"] > 1000
        assert found[f"{prefix}small_rows_per_cpu_s"] > 0
        assert found[f"{prefix}ratio"] > 0


@pytest.mark.parametrize(
    ("operator", "text", "then"),
    [
        (normalize_whitespace, " a\u00a0b\u3000c\td\u200be\n", "a b c d e"),
        (normalize_whitespace, "a\nb", "a\nb"),
        (clean_links, "see https://example.org/a?b=c(d), or www.example.org/x.", "see , or ."),
        (clean_links, "at 10:30, and/or not", "at 10:30, and/or not"),
        (fit_length, "x" * 49, None),
        (fit_length, "x" * 50, "x" * 50),
        (fit_length, "x" * 5000, "x" * 5000),
        (fit_length, "x" * 5001, None),
        (few_special_characters, "abc ", "abc "),
        (few_special_characters, "ab1 “é” ", None),
        (few_special_characters, "", ""),
        (few_repetitions, "a b c d e f g h i j", "a b c d e f g h i j"),
        (few_repetitions, "Yes, we can do it. " * 3, None),
        (few_repetitions, "a b", "a b"),
    ],
)
def test_an_operator_changes_or_drops_a_row(operator: Any, text: str, then: str | None) -> None:
    row = operator({"id": 1, "text": text})
    assert row == (None if then is None else {"id": 1, "text": then})


def test_the_five_operators_have_different_names() -> None:
    assert len({operator.__name__ for operator in OPERATORS}) == 5


@pytest.mark.bar
def test_ten_million_rows_cost_what_small_runs_cost_in_the_memory_of_one_million(tmp_path: Path) -> None:
    found = run_benchmark("rows", tmp_path, "--rows", "10000000", "--kinds", "file")
    assert found["ratio"] >= 0.85
    assert found["peak_ratio"] <= 1.25
