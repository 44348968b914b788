"""Results that a compaction copied into new fragments stay done."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

import dovetail as dt  # noqa: E402
import fill_functions as fns  # noqa: E402
from backfill_aids import HALF, by_id, made, rows_from, twice  # noqa: E402
from dovetail.backfill import compaction_history  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.backfill.result import BackfillResult
    from dovetail.backfill.udf import Udf


def compacted(uri: str, **how: Any) -> None:
    before = {one.fragment_id for one in lance.dataset(uri).get_fragments()}
    lance.dataset(uri).optimize.compact_files(**how)
    assert not before & {one.fragment_id for one in lance.dataset(uri).get_fragments()}, "all of them are others now"


def filled(uri: str, udf: Udf = fns.doubled, **how: Any) -> BackfillResult:
    return dt.table(uri).backfill("n", udf, cluster=HALF, **how)


def left(uri: str, udf: Udf = fns.doubled, **how: Any) -> int:
    """Rows that would be computed."""
    return dt.table(uri).plan_backfill("n", udf, cluster=HALF, sample=False, **how).rows


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Of four fragments, all done."""
    uri = made(tmp_path, 80, 20)
    assert filled(uri).rows == 80
    return uri


def test_compacted_results_are_not_computed_again(uri: str) -> None:
    compacted(uri)
    assert left(uri) == 0
    told = filled(uri)
    assert (told.rows, told.done_before, told.notes) == (0, 80, [])
    assert by_id(uri, "n") == twice(range(80))


def test_rows_appended_after_a_compaction_are_computed(uri: str) -> None:
    compacted(uri)
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    assert filled(uri).rows == 10
    assert by_id(uri, "n") == twice(range(90))


def test_several_compactions_are_followed(uri: str) -> None:
    compacted(uri, target_rows_per_fragment=40)
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    filled(uri)
    dataset = lance.dataset(uri)
    dataset.delete("id IN (3, 33, 85)")
    compacted(uri, target_rows_per_fragment=100)
    assert filled(uri).rows == 0
    assert by_id(uri, "n") == twice(set(range(90)) - {3, 33, 85})


def test_rows_deleted_before_and_after_a_compaction_have_no_effect(uri: str) -> None:
    lance.dataset(uri).delete("id % 7 = 0")
    compacted(uri)
    lance.dataset(uri).delete("id % 5 = 0")
    assert filled(uri).rows == 0
    assert by_id(uri, "n") == twice(row for row in range(80) if row % 7 and row % 5)


def test_a_result_found_once_is_known_after_old_versions_are_cleaned_up(uri: str) -> None:
    compacted(uri)
    assert filled(uri).rows == 0
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    assert filled(uri).rows == 0
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    new = max(one.fragment_id for one in lance.dataset(uri).get_fragments())
    assert filled(uri, fragments=[new]).rows == 10
    assert filled(uri).rows == 0


def test_without_the_history_a_fragment_is_computed_again_with_a_note(uri: str) -> None:
    compacted(uri)
    lance.dataset(uri).add_columns({"more": "id"})
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    told = filled(uri)
    assert told.rows == 80
    assert any("unknown origin" in note for note in told.notes)
    assert filled(uri).rows == 0


def test_a_history_that_takes_too_long_is_not_read(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compacted(uri)
    for at in range(3):
        lance.dataset(uri).add_columns({f"more{at}": "id"})
    assert left(uri) == 0
    monkeypatch.setattr(compaction_history, "MAX_READ_S", -1.0)
    assert left(uri) == 80


def test_a_fragment_merged_with_unfinished_rows_is_computed_again(uri: str) -> None:
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    compacted(uri)
    told = filled(uri)
    assert told.rows == 90
    assert 'where="n IS NULL" computes only empty rows' in told.notes[0]
    assert by_id(uri, "n") == twice(range(90))


def test_a_compacted_fragment_is_computed_again_by_another_version(tmp_path: Path) -> None:
    uri = made(tmp_path, 80, 20)
    filled(uri, fns.first_version)
    compacted(uri)
    assert left(uri, fns.first_version) == 0
    assert filled(uri, fns.second_version).rows == 80
    assert left(uri, fns.second_version) == 0
    assert left(uri, fns.first_version) == 80


def test_a_fragment_merged_from_two_versions_is_computed_again(tmp_path: Path) -> None:
    uri = made(tmp_path, 80, 20)
    filled(uri, fns.first_version)
    filled(uri, fns.second_version, fragments=[2])
    compacted(uri)
    assert left(uri, fns.first_version) == left(uri, fns.second_version) == 80


def test_a_compacted_fragment_can_be_recomputed(uri: str) -> None:
    compacted(uri)
    assert filled(uri, recompute=True).rows == 80
    assert left(uri) == 0


def test_failed_rows_are_computed_again_after_a_compaction(tmp_path: Path) -> None:
    """Also if somebody finished a call about other rows in between."""
    uri = made(tmp_path, 80, 20)
    assert filled(uri, fns.every_tenth_fails, on_error="skip").errors == 8
    compacted(uri)
    filled(uri, fns.every_tenth_fails, where="id = 1")
    lance.write_dataset(rows_from(80, 90), uri, mode="append")
    new = max(one.fragment_id for one in lance.dataset(uri).get_fragments())
    filled(uri, fns.every_tenth_fails, fragments=[new], on_error="skip")
    told = filled(uri, fns.every_tenth_fails, on_error="skip")
    assert (told.rows, told.errors) == (80, 8)
    assert len(dt.table(uri).errors("n")) == 9
    assert left(uri, fns.every_tenth_fails) == 0
    assert len(dt.table(uri).errors("n")) == 9


def test_values_changed_by_others_are_computed_again_after_a_compaction(uri: str) -> None:
    lance.dataset(uri).update({"n": "7"}, where="id = 5")
    compacted(uri)
    assert filled(uri).rows == 80
    assert by_id(uri, "n") == twice(range(80))


def test_a_compacted_fragment_with_changed_input_is_computed_again(tmp_path: Path) -> None:
    uri = made(tmp_path, 80, 20)
    table = dt.table(uri)
    table.backfill("other", fns.doubled, cluster=HALF)
    of_other = dt.udf(input_columns=["other"], version="1")(fns.doubled.fn)
    assert filled(uri, of_other).rows == 80
    compacted(uri)
    assert filled(uri, of_other).rows == 0
    table.backfill("other", fns.tripled, cluster=HALF)
    assert filled(uri, of_other).rows == 80
    assert by_id(uri, "n") == {row: 6 * row for row in range(80)}


def test_the_result_of_a_condition_stays_done_after_a_compaction(tmp_path: Path) -> None:
    uri = made(tmp_path, 80, 20)
    assert filled(uri, where="id % 2 = 0").rows == 40
    compacted(uri)
    assert filled(uri, where="id % 2 = 0").rows == 0
    assert filled(uri, where="id % 2 = 1").rows == 40
    assert by_id(uri, "n") == twice(range(80))
    assert left(uri) == 80


def test_a_column_that_was_dropped_and_added_again_is_computed_after_a_compaction(uri: str) -> None:
    compacted(uri)
    assert filled(uri).rows == 0
    dt.table(uri).drop("n")
    assert filled(uri).rows == 80
    assert by_id(uri, "n") == twice(range(80))


def test_several_columns_of_one_function_stay_done_after_a_compaction(tmp_path: Path) -> None:
    uri = made(tmp_path, 80, 20)
    table = dt.table(uri)
    names = [name for name, _ in fns.pair.outputs()]
    table.backfill(names, fns.pair, cluster=HALF)
    compacted(uri)
    assert table.backfill(names, fns.pair, cluster=HALF).rows == 0
    lance.dataset(uri).drop_columns(names[1:])
    assert table.backfill(names, fns.pair, cluster=HALF).rows == 80
