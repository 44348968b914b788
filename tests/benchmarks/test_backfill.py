"""The backfill benchmark runs, checks the filled columns and writes its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import backfill_tables as tables
from benchmarks.benchmark_runs import run_benchmark_here

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 2_000


@pytest.mark.usefixtures("in_process")
def test_backfills_are_compared_with_pylance_and_another_process_sees_the_first_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))  # the benchmark sets it, and unsets the others
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(name, raising=False)
    found = run_benchmark_here("backfill", tmp_path, monkeypatch, "--rows", str(ROWS), "--repeat", "1")
    assert found["rows"] == ROWS
    for kind in ("upper", "arrow"):
        for prefix in ("", "pylance_"):
            assert found[f"{prefix}{kind}_rows_s"] > 0
            assert found[f"{prefix}{kind}_cpu_s"] > 0
        assert found[f"{kind}_ratio"] == pytest.approx(found[f"{kind}_rows_s"] / found[f"pylance_{kind}_rows_s"])
    assert found["first_commit_s"] > 0
    assert found["first_commit_rows"] >= ROWS // 10
    assert found["sleep_one_rows_s"] < 1000
    assert found["sleep_speedup"] == pytest.approx(found["sleep_two_rows_s"] / found["sleep_one_rows_s"])
    assert not any(key.startswith("peer_") for key in found)


def test_a_generated_table_is_reproducible_and_its_rows_differ(tmp_path: Path) -> None:
    made = [lance.dataset(str(tables.make(tmp_path / name, ROWS, 20))) for name in ("one.lance", "two.lance")]
    assert [len(table.get_fragments()) for table in made] == [20, 20]
    one, two = (table.to_table() for table in made)
    assert one.equals(two)
    assert pc.count_distinct(one["text"]).as_py() == ROWS
    assert 90 < pc.mean(pc.utf8_length(one["text"])).as_py() < 115


@pytest.mark.parametrize("wrong", ["a value", "a null", "another column"])
def test_the_check_finds_one_wrong_value(tmp_path: Path, wrong: str) -> None:
    original = tables.make(tmp_path / "original.lance", 100, 4)
    table = lance.dataset(str(original)).to_table()
    texts = table["text"].to_pylist()
    values: list[str | None] = [text.upper() for text in texts]
    if wrong == "another column":
        texts[42] = "changed"
    else:
        values[42] = "changed" if wrong == "a value" else None
    both = {"id": table["id"], "text": pa.array(texts), "u": pa.array(values)}
    lance.write_dataset(
        pa.table(both, schema=tables.SCHEMA.append(pa.field("u", pa.string()))), tmp_path / "filled.lance"
    )
    with pytest.raises(AssertionError, match="1 of 100 values" if wrong != "another column" else "other columns"):
        tables.check(original, tmp_path / "filled.lance", "u")
