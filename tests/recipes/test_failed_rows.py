"""Rows that fail: recorded, counted, retried; the other rows are written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from recipes.recipe_aids import errors, own_operator, read_rows, run, some_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_one_bad_row_fails_alone(tmp_path: Path) -> None:
    rows: list[Any] = some_rows(120)
    rows[7]["text"] = 7
    del rows[50]["text"]
    rows[99]["text"] = None
    summary = run(tmp_path, "[clean_links_mapper, {text_length_filter: {min_len: 0}}]", rows=rows)
    assert [row["n"] for row in read_rows(tmp_path / "out.jsonl")] == [n for n in range(120) if n not in (7, 50, 99)]
    found = sorted(errors(tmp_path), key=lambda error: error["key"])
    assert [error["stage"] for error in found] == ["clean_links_mapper"] * 3
    assert [error["key"] for error in found] == [[7], [50], [99]]
    assert found[0]["message"] == "field 'text' is int, not a string"
    assert found[1]["message"] == "no field 'text'; fields of the row: 'n'"
    assert all("Traceback" in error["detail"] and "in text_of" in error["detail"] for error in found)
    assert summary.status == "finished"
    assert (summary.finished, summary.delivered) == (120, 117)


RAISES = """
from pathlib import Path
HERE = Path(__file__).parent

def check(row):
    if row["n"] in (5, 17) and not (HERE / "corrected").exists():
        raise ValueError(f"row {row['n']} is bad")
    return row
"""


def test_a_row_whose_operator_raises_is_recorded_and_can_be_retried(tmp_path: Path) -> None:
    name = own_operator(tmp_path, "raises_for_two", RAISES)
    process = f"[{{text_length_filter: {{min_len: 0}}}}, '{name}:check', clean_links_mapper]"
    summary = run(tmp_path, process, rows=some_rows(60))
    assert summary.delivered == 58
    found = errors(tmp_path)
    assert {error["stage"] for error in found} == {"check"}
    assert sorted((error["key"], error["message"]) for error in found) == [
        ([5], "row 5 is bad"),
        ([17], "row 17 is bad"),
    ]
    assert all('raise ValueError(f"row' in error["detail"] for error in found)
    (tmp_path / "corrected").touch()
    again = run(tmp_path, process, run_dir=None, retry_errors=str(tmp_path / "run"), sink=str(tmp_path / "more.jsonl"))
    assert again.delivered == 2
    assert [row["n"] for row in read_rows(tmp_path / "more.jsonl")] == [5, 17]


def test_a_failed_row_after_a_deduplicator_has_the_number_of_the_input(tmp_path: Path) -> None:
    name = own_operator(tmp_path, "raises_behind", RAISES)
    rows = [{"text": "the same text", "n": -1}, {"text": "the same text", "n": -2}, *some_rows(30)]
    run(tmp_path, f"[document_deduplicator, '{name}:check']", rows=rows)
    assert sorted(error["key"] for error in errors(tmp_path)) == [[7], [19]]
    assert len(read_rows(tmp_path / "out.jsonl")) == 29


def test_a_row_that_ends_the_run_names_its_operator_and_not_all_that_share_its_workers(tmp_path: Path) -> None:
    process = "[text_length_filter, words_num_filter, alphanumeric_filter, clean_links_mapper]"
    with pytest.raises(dt.RunError) as raised:
        run(tmp_path, process, "defaults: {on_error: fail}", [*some_rows(2), {"text": 5}])
    (problem,) = raised.value.problems
    assert problem.message == "text_length_filter: item failed: BadField: field 'text' is int, not a string"
    assert problem.place.endswith("in.jsonl:3")


def test_more_failed_rows_than_max_errors_fail_the_run(tmp_path: Path) -> None:
    rows = [{"text": n if n < 30 else f"a text {n}"} for n in range(60)]
    with pytest.raises(dt.RunError) as raised:
        run(tmp_path, "[text_length_filter]", "max_errors: 9", rows)
    message = str(raised.value)
    assert "items failed, more than max_errors allows (9)" in message
    assert "field 'text' is int, not a string" in message
    assert not (tmp_path / "out.jsonl").exists()


def test_without_skip_op_error_the_first_bad_row_fails_the_run(tmp_path: Path) -> None:
    rows = [{"text": f"some text {n}"} for n in range(40)]
    rows[20]["text"] = 5  # type: ignore[assignment]
    for number, (head, process) in enumerate(
        [("skip_op_error: false", "[text_length_filter]"), ("", "[{text_length_filter: {skip_op_error: false}}]")]
    ):
        with pytest.raises(dt.RunError, match="text_length_filter"):
            run(tmp_path, process, head, rows, run_dir=str(tmp_path / f"run{number}"))
        assert not (tmp_path / "out.jsonl").exists()
    run(tmp_path, "[{text_length_filter: {skip_op_error: true}}]", "skip_op_error: false")
    assert len(read_rows(tmp_path / "out.jsonl")) == 39


def test_one_bad_line_of_the_input_fails_alone(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in some_rows(50)]
    lines[20] = lines[20][:-5]
    lines[30] = '"not a row"'
    lines[40] = ""
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    run(tmp_path, "[{text_length_filter: {min_len: 0}}]")
    assert [row["n"] for row in read_rows(tmp_path / "out.jsonl")] == [n for n in range(50) if n not in (20, 30, 40)]
    assert len(errors(tmp_path)) == 2


def test_existing_results_are_kept_if_a_run_fails(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("before\n")
    with pytest.raises(dt.RunError):
        run(tmp_path, "[text_length_filter]", "skip_op_error: false", [{"text": 5}])
    assert (tmp_path / "out.jsonl").read_text() == "before\n"


def test_retried_rows_that_fail_again_change_no_result_and_need_no_input(tmp_path: Path) -> None:
    rows: list[Any] = some_rows(40)
    rows[7]["text"] = 7
    process = "[{text_length_filter: {min_len: 1}}]"
    summary = run(tmp_path, process, rows=rows)
    assert (summary.delivered, summary.failed, len(read_rows(tmp_path / "out.jsonl"))) == (39, 1, 39)
    (tmp_path / "in.jsonl").unlink()
    run(tmp_path, process, run_dir=None, retry_errors=str(tmp_path / "run"))
    assert len(read_rows(tmp_path / "out.jsonl")) == 39


@pytest.mark.parametrize(
    ("operator", "bad_row"),
    [
        ("topk_specified_field_selector: {field_key: n, topk: 5}", {"text": "without a number"}),
        ("range_specified_field_selector: {field_key: n, lower_rank: 1, upper_rank: 9}", {"text": "none"}),
        ("frequency_specified_field_selector: {field_key: n, topk: 3}", {"text": "x", "n": [1]}),
        ("key_value_grouper: {group_by_keys: [n]}", ["not", "a", "mapping"]),
        ("document_deduplicator: {}", {"text": 5}),
    ],
)
def test_one_bad_row_fails_alone_in_operators_that_need_all_rows(tmp_path: Path, operator: str, bad_row: Any) -> None:
    rows: list[Any] = some_rows(30)
    rows[3] = bad_row
    summary = run(tmp_path, f"[{{{operator}}}]", rows=rows)
    assert (summary.status, summary.failed) == ("finished", 1)
    (error,) = errors(tmp_path)
    assert error["key"] == [3]
    assert read_rows(tmp_path / "out.jsonl")
