"""Results that a compaction copied into new fragments stay done."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

import dovetail as dt  # noqa: E402
import fill_functions as fns  # noqa: E402
from backfill_aids import HALF, by_id, create_table, rows_from, twice  # noqa: E402
from dovetail.backfill import compaction_history  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.backfill.result import BackfillResult
    from dovetail.backfill.udf import Udf


def compact(uri: str, **how: Any) -> None:
    before = {one.fragment_id for one in lance.dataset(uri).get_fragments()}
    lance.dataset(uri).optimize.compact_files(**how)
    assert not before & {one.fragment_id for one in lance.dataset(uri).get_fragments()}, "all of them are others now"


def fill(uri: str, udf: Udf = fns.doubled, **how: Any) -> BackfillResult:
    return dt.table(uri).backfill("n", udf, cluster=HALF, **how)


def count_unfilled_rows(uri: str, udf: Udf = fns.doubled, **how: Any) -> int:
    """Rows that would be computed."""
    return dt.table(uri).plan_backfill("n", udf, cluster=HALF, sample=False, **how).rows


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A table with four fragments, all of them filled."""
    uri = create_table(tmp_path, 80, 20)
    assert fill(uri).rows == 80
    return uri


def test_compacted_results_are_not_computed_again(uri: str) -> None:
    compact(uri)
    assert count_unfilled_rows(uri) == 0
    result = fill(uri)
    assert (result.rows, result.done_before, result.notes) == (0, 80, [])
    assert by_id(uri, "n") == twice(range(80))


def test_rows_appended_after_a_compaction_are_computed(uri: str) -> None:
    compact(uri)
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    assert fill(uri).rows == 10
    assert by_id(uri, "n") == twice(range(90))


def test_several_compactions_are_followed(uri: str) -> None:
    compact(uri, target_rows_per_fragment=40)
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    fill(uri)
    dataset = lance.dataset(uri)
    dataset.delete("id IN (3, 33, 85)")
    compact(uri, target_rows_per_fragment=100)
    assert fill(uri).rows == 0
    assert by_id(uri, "n") == twice(set(range(90)) - {3, 33, 85})


def test_rows_deleted_before_and_after_a_compaction_have_no_effect(uri: str) -> None:
    lance.dataset(uri).delete("id % 7 = 0")
    compact(uri)
    lance.dataset(uri).delete("id % 5 = 0")
    assert fill(uri).rows == 0
    assert by_id(uri, "n") == twice(row for row in range(80) if row % 7 and row % 5)


def test_a_result_found_once_is_known_after_old_versions_are_cleaned_up(uri: str) -> None:
    compact(uri)
    assert fill(uri).rows == 0
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    assert fill(uri).rows == 0
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    new = max(one.fragment_id for one in lance.dataset(uri).get_fragments())
    assert fill(uri, fragments=[new]).rows == 10
    assert fill(uri).rows == 0


def test_without_the_history_a_fragment_is_computed_again_with_a_note(uri: str) -> None:
    compact(uri)
    lance.dataset(uri).add_columns({"more": "id"})
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    result = fill(uri)
    assert result.rows == 80
    assert any("unknown origin" in note for note in result.notes)
    assert fill(uri).rows == 0


def test_a_history_that_takes_too_long_is_not_read(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compact(uri)
    for at in range(3):
        lance.dataset(uri).add_columns({f"more{at}": "id"})
    assert count_unfilled_rows(uri) == 0
    monkeypatch.setattr(compaction_history, "MAX_READ_S", -1.0)
    assert count_unfilled_rows(uri) == 80


def test_a_fragment_merged_with_unfinished_rows_is_computed_again(uri: str) -> None:
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    compact(uri)
    result = fill(uri)
    assert result.rows == 90
    assert 'where="n IS NULL" computes only empty rows' in result.notes[0]
    assert by_id(uri, "n") == twice(range(90))


def test_a_compacted_fragment_is_computed_again_by_another_version(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 80, 20)
    fill(uri, fns.first_version)
    compact(uri)
    assert count_unfilled_rows(uri, fns.first_version) == 0
    assert fill(uri, fns.second_version).rows == 80
    assert count_unfilled_rows(uri, fns.second_version) == 0
    assert count_unfilled_rows(uri, fns.first_version) == 80


def test_a_fragment_merged_from_two_versions_is_computed_again(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 80, 20)
    fill(uri, fns.first_version)
    fill(uri, fns.second_version, fragments=[2])
    compact(uri)
    assert count_unfilled_rows(uri, fns.first_version) == count_unfilled_rows(uri, fns.second_version) == 80


def test_a_compacted_fragment_can_be_recomputed(uri: str) -> None:
    compact(uri)
    assert fill(uri, recompute=True).rows == 80
    assert count_unfilled_rows(uri) == 0


def test_failed_rows_are_computed_again_after_a_compaction(tmp_path: Path) -> None:
    """Another call on other rows may finish in between."""
    uri = create_table(tmp_path, 80, 20)
    assert fill(uri, fns.every_tenth_fails, on_error="skip").errors == 8
    compact(uri)
    fill(uri, fns.every_tenth_fails, where="id = 1")
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    new = max(one.fragment_id for one in lance.dataset(uri).get_fragments())
    fill(uri, fns.every_tenth_fails, fragments=[new], on_error="skip")
    result = fill(uri, fns.every_tenth_fails, on_error="skip")
    assert (result.rows, result.errors) == (80, 8)
    assert len(dt.table(uri).errors("n")) == 9
    assert count_unfilled_rows(uri, fns.every_tenth_fails) == 0
    assert len(dt.table(uri).errors("n")) == 9


def test_values_changed_by_others_are_computed_again_after_a_compaction(uri: str) -> None:
    lance.dataset(uri).update({"n": "7"}, where="id = 5")
    compact(uri)
    assert fill(uri).rows == 80
    assert by_id(uri, "n") == twice(range(80))


def test_a_compacted_fragment_with_changed_input_is_computed_again(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 80, 20)
    table = dt.table(uri)
    table.backfill("other", fns.doubled, cluster=HALF)
    of_other = dt.udf(input_columns=["other"], version="1")(fns.doubled.fn)
    assert fill(uri, of_other).rows == 80
    compact(uri)
    assert fill(uri, of_other).rows == 0
    table.backfill("other", fns.tripled, cluster=HALF)
    assert fill(uri, of_other).rows == 80
    assert by_id(uri, "n") == {row: 6 * row for row in range(80)}


def test_the_result_of_a_condition_stays_done_after_a_compaction(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 80, 20)
    assert fill(uri, where="id % 2 = 0").rows == 40
    compact(uri)
    assert fill(uri, where="id % 2 = 0").rows == 0
    assert fill(uri, where="id % 2 = 1").rows == 40
    assert by_id(uri, "n") == twice(range(80))
    assert count_unfilled_rows(uri) == 80


def test_a_column_that_was_dropped_and_added_again_is_computed_after_a_compaction(uri: str) -> None:
    compact(uri)
    assert fill(uri).rows == 0
    dt.table(uri).drop("n")
    assert fill(uri).rows == 80
    assert by_id(uri, "n") == twice(range(80))


def test_several_columns_of_one_function_stay_done_after_a_compaction(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 80, 20)
    table = dt.table(uri)
    names = [name for name, _ in fns.pair.outputs()]
    table.backfill(names, fns.pair, cluster=HALF)
    compact(uri)
    assert table.backfill(names, fns.pair, cluster=HALF).rows == 0
    lance.dataset(uri).drop_columns(names[1:])
    assert table.backfill(names, fns.pair, cluster=HALF).rows == 80
