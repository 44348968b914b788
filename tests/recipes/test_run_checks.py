"""Checks before a run starts: input, fields, operators, folders."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.recipes.column_check import missing_columns
from recipes.recipe_aids import HERE, load, own_operator, read_rows, run, some_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_a_missing_field_is_reported_before_a_run_starts(tmp_path: Path) -> None:
    rows = [{"content": "a text of some length", "n": 1}]
    with pytest.raises(dt.ConfigError) as raised:
        run(tmp_path, "[clean_links_mapper, {specified_numeric_field_filter: {field_key: m}}]", rows=rows)
    text, field = raised.value.problems
    assert "clean_links_mapper needs the field 'text'" in text.message
    assert text.fix_texts == ("text_keys: content",)
    assert text.place.endswith("recipe.yaml:4:11")
    assert "needs the field 'm'" in field.message
    assert not (tmp_path / "run").exists()
    run(tmp_path, "[clean_links_mapper]", text.fix_texts[0])
    assert len(read_rows(tmp_path / "out.jsonl")) == 1


def test_fields_that_an_earlier_operator_may_add_are_not_checked(tmp_path: Path) -> None:
    name = own_operator(tmp_path, "makes_text", "def make(row):\n    return {'text': f\"number {row['n']:9}\"}\n")
    run(tmp_path, f"['{name}:make', text_length_filter]", rows=[{"n": 1}, {"n": 2}])
    assert [row["text"] for row in read_rows(tmp_path / "out.jsonl")] == ["number         1", "number         2"]


def test_operators_that_cannot_run_here_are_refused_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(dt.ConfigError) as raised:
        run(tmp_path, "[text_length_filter, image_aesthetics_filter]", rows=some_rows(3))
    (problem,) = raised.value.problems
    assert "image_aesthetics_filter" in problem.message
    assert problem.place.endswith("recipe.yaml:4:31")
    assert "adapter: data_juicer" in problem.fix_texts
    assert not (tmp_path / "run").exists()


def test_a_recipe_without_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dt.ConfigError, match="no dataset_path: add it to the file"):
        load(tmp_path, "process: [text_length_filter]").run(cluster=HERE)


@pytest.mark.parametrize("path", ["nowhere.jsonl", "nothing/*.jsonl", "empty"])
def test_a_missing_input_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(dt.ConfigError):
        run(tmp_path, "[text_length_filter]", f"dataset_path: {path}")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_damaged_file_is_one_error(tmp_path: Path) -> None:
    data = gzip.compress(b'{"text": "a"}\n' * 1000)
    (tmp_path / "in.jsonl.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(dt.ConfigError):
        run(tmp_path, "[text_length_filter]", "dataset_path: in.jsonl.gz")


def test_images_may_be_given_as_bytes_only(tmp_path: Path) -> None:
    recipe = load(tmp_path, "process: [{image_shape_filter: {min_width: 1}}]")
    assert list(missing_columns(recipe, [{"image_bytes": [b"..."]}])) == []
    assert [problem.code for problem in missing_columns(recipe, [{"text": "no image"}])] == ["DT416"]


def test_a_field_that_several_operators_miss_is_one_problem_whose_fix_works(tmp_path: Path) -> None:
    process = "[text_length_filter, words_num_filter, clean_links_mapper, {image_shape_filter: {min_width: 1}}]"
    rows = [{"n": 1, "txt": "a"}, {"n": 2, "txt": "b"}]
    text, images = missing_columns(load(tmp_path, f"process: {process}"), rows)
    assert text.message == (
        "3 operators need the field 'text', which none of the first 2 rows has (did you mean 'txt'?)"
    )
    assert text.evidence == (
        "operators: text_length_filter, words_num_filter, clean_links_mapper",
        "fields of these rows: n, txt",
    )
    assert text.place.endswith("recipe.yaml:1:11")
    assert images.message.startswith("image_shape_filter needs the field 'images', which none of the first 2 rows has")
    (fix,) = text.fix_texts
    assert fix == "text_keys: txt"
    fixed = load(tmp_path, f"{fix}\nprocess: {process}")
    assert [problem.at("") for problem in missing_columns(fixed, rows)] == [images.at("")]


def test_a_missing_word_list_is_reported_before_a_run_starts(tmp_path: Path) -> None:
    process = f"[{{stopwords_filter: {{stopwords_dir: {tmp_path}/none}}}}]"
    assert load(tmp_path, f"process: {process}").plan("1x(2cpu, 8GB)").units
    with pytest.raises(dt.ConfigError, match="no list of stopwords") as raised:
        run(tmp_path, process, rows=some_rows(3))
    assert raised.value.problems[0].place.endswith("recipe.yaml:4:12")


def test_a_trace_folder_that_cannot_be_written_is_reported_before_a_run_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    head = f"work_dir: {tmp_path}/file/below\nopen_tracer: true"
    with pytest.raises(dt.ConfigError, match="cannot be written") as raised:
        run(tmp_path, "[text_length_filter]", head, some_rows(3))
    assert raised.value.problems[0].code == "DT025"
