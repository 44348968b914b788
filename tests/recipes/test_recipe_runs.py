"""Runs of recipes give the rows of a plain loop over the operators, in the same order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.recipes.catalogue import native_class
from dovetail.recipes.operators.base import STATS_FIELD, DatasetOperator, Deduplicator
from dovetail.streaming.view import WorkCounts
from recipes.recipe_aids import HERE, load, read_rows, run, some_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TEXTS = [
    "Hello   world, this is a text of some words. Visit https://example.com/x?y=1 now!",
    "short",
    "",
    "写一个中文的句子 里面有一些字 " * 3,
    "aaaa aaaa aaaa aaaa aaaa aaaa aaaa aaaa aaaa aaaa aaaa",
    "Mail me at someone@example.org, or at 127.0.0.1, about the weather of the day and other things",
    "مرحبا بالعالم هذا نص طويل بما يكفي للاختبار " * 2,
    "😀😀😀 emoji and words enough to be kept by most filters 😀",
]


def plain(rows: Iterable[dict[str, Any]], *operators: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The same operators, one after another, over lists."""
    rows = [dict(row) for row in rows]
    for name, parameters in operators:
        cls = native_class(name)
        assert cls is not None
        operator: Any = cls(**parameters)
        if isinstance(operator, Deduplicator):
            rows = [operator(row) for row in rows]
        rows = (
            list(operator.process_rows(rows)) if isinstance(operator, DatasetOperator) else list(_each(operator, rows))
        )
    return [{key: value for key, value in row.items() if key != STATS_FIELD} for row in rows]


def _each(operator: Any, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        made = operator(row)
        if isinstance(made, dict):
            yield made
        elif made is not None:
            yield from made


def as_yaml(*operators: tuple[str, dict[str, Any]]) -> str:
    return json.dumps([{name: parameters} for name, parameters in operators])


def varied(count: int = 300) -> list[dict[str, Any]]:
    return [{"text": TEXTS[n % len(TEXTS)] + (f" {n}" if n % 3 else ""), "n": n, "group": n % 5} for n in range(count)]


# --- rows and their order

CLEANING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("whitespace_normalization_mapper", {}),
    ("clean_links_mapper", {}),
    ("clean_email_mapper", {"repl": "<mail>"}),
    ("text_length_filter", {"min_len": 10}),
    ("words_num_filter", {"min_num": 3}),
    ("word_repetition_filter", {"rep_len": 3, "max_ratio": 0.6}),
    ("alphanumeric_filter", {"min_ratio": 0.3}),
    ("special_characters_filter", {"max_ratio": 0.5}),
)


@pytest.mark.processes
def test_rows_and_their_order_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    rows = varied()
    summary = run(tmp_path, as_yaml(*CLEANING), rows=rows)
    wanted = plain(rows, *CLEANING)
    assert 0 < len(wanted) < len(rows)
    assert read_rows(tmp_path / "out.jsonl") == wanted
    assert (summary.status, summary.finished, summary.delivered) == ("finished", len(rows), len(wanted))


BARRIERS: list[list[tuple[str, dict[str, Any]]]] = [
    [("document_deduplicator", {"lowercase": True})],
    [("document_deduplicator", {}), ("text_length_filter", {"min_len": 20}), ("clean_links_mapper", {})],
    [("clean_links_mapper", {}), ("document_minhash_deduplicator", {"jaccard_threshold": 0.6})],
    [("text_length_filter", {}), ("document_minhash_deduplicator", {}), ("words_num_filter", {"min_num": 3})],
    [
        ("document_deduplicator", {}),
        ("document_minhash_deduplicator", {}),
        ("topk_specified_field_selector", {"field_key": "n", "topk": 7}),
    ],
    [("topk_specified_field_selector", {"field_key": "n", "topk": 9}), ("text_length_filter", {})],
    [
        ("text_length_filter", {}),
        ("range_specified_field_selector", {"field_key": "n", "lower_rank": 3, "upper_rank": 20}),
        ("clean_ip_mapper", {}),
    ],
    [("frequency_specified_field_selector", {"field_key": "group", "topk": 2})],
    [("text_length_filter", {}), ("key_value_grouper", {"group_by_keys": ["group"]})],
    [("text_chunk_mapper", {"max_len": 30, "overlap_len": 5, "split_pattern": None}), ("document_deduplicator", {})],
    [
        ("document_deduplicator", {}),
        ("text_chunk_mapper", {"max_len": 25, "split_pattern": None}),
        ("text_length_filter", {"min_len": 5}),
    ],
]
LONGER = (2, 4, 5, 7)


@pytest.mark.parametrize(
    "operators",
    [pytest.param(one, marks=[pytest.mark.long] if number in LONGER else []) for number, one in enumerate(BARRIERS)],
    ids=lambda operators: "+".join(name for name, _ in operators),
)
def test_operators_that_need_all_rows_may_be_at_any_position(
    tmp_path: Path, operators: list[tuple[str, dict[str, Any]]]
) -> None:
    rows = varied(160)
    wanted = plain(rows, *operators)
    assert wanted
    run(tmp_path, as_yaml(*operators), rows=rows)
    assert read_rows(tmp_path / "out.jsonl") == wanted


def test_random_selector_keeps_the_requested_number_of_rows(tmp_path: Path) -> None:
    run(tmp_path, "[text_length_filter, {random_selector: {select_num: 11}}, clean_links_mapper]", rows=varied(100))
    found = [row["n"] for row in read_rows(tmp_path / "out.jsonl")]
    assert len(set(found)) == 11


def test_an_empty_input_gives_an_empty_output(tmp_path: Path) -> None:
    summary = run(tmp_path, as_yaml(*CLEANING, ("document_deduplicator", {})), rows=[])
    assert (summary.status, read_rows(tmp_path / "out.jsonl")) == ("finished", [])


# --- stats


def test_stats_are_dropped_kept_or_exported(tmp_path: Path) -> None:
    rows = varied(60)
    process = "[{text_length_filter: {min_len: 20}}, clean_links_mapper, {words_num_filter: {min_num: 3}}]"
    run(tmp_path, process, rows=rows)
    bare = read_rows(tmp_path / "out.jsonl")
    assert all(set(row) == {"text", "n", "group"} for row in bare)
    run(tmp_path, process, "keep_stats_in_res_ds: true", run_dir=str(tmp_path / "second"))
    kept = read_rows(tmp_path / "out.jsonl")
    assert all(set(row[STATS_FIELD]) == {"text_len", "num_words"} for row in kept)
    assert [{key: row[key] for key in ("text", "n", "group")} for row in kept] == bare
    run(tmp_path, process, "export_stats: true\nexport_path: new.v1.jsonl", run_dir=str(tmp_path / "third"))
    assert read_rows(tmp_path / "new.v1.jsonl") == bare
    assert read_rows(tmp_path / "new.v1_stats.jsonl") == [{STATS_FIELD: row[STATS_FIELD]} for row in kept]


@pytest.mark.parametrize("last", ["document_deduplicator", "text_chunk_mapper: {max_len: 30, split_pattern: null}"])
def test_stats_are_dropped_for_any_last_operator(tmp_path: Path, last: str) -> None:
    run(tmp_path, f"\n  - text_length_filter\n  - {last}", rows=varied(40))
    assert all(STATS_FIELD not in row for row in read_rows(tmp_path / "out.jsonl"))


def test_filters_after_a_grouper_start_with_empty_stats(tmp_path: Path) -> None:
    process = "[{text_length_filter: {min_len: 1}}, {key_value_grouper: {group_by_keys: [kind]}}, "
    process += "{specified_field_filter: {field_key: kind, target_value: [[a, a], [b, b]]}}]"
    summary = run(tmp_path, process, rows=[{"text": "x", "kind": kind} for kind in "aabb"])
    assert summary.failed == 0


def test_exported_stats_need_no_cpus(tmp_path: Path) -> None:
    process = "[{text_length_filter: {num_proc: 2, min_len: 1}}]"
    head = "export_stats: true\nmode: streaming"
    recipe = load(tmp_path, f"{head}\nexport_path: out.jsonl\nprocess: {process}")
    assert recipe.plan(HERE).workers["text_length_filter"] == 2
    run(tmp_path, process, head, some_rows(30))
    assert len(read_rows(tmp_path / "out.jsonl")) == 30
    stats = read_rows(tmp_path / "out_stats.jsonl")
    assert stats[0] == {STATS_FIELD: {"text_len": 7}}
    assert len(stats) == 30


def test_adjacent_filters_share_words_and_lines_with_the_same_stats(tmp_path: Path) -> None:
    (tmp_path / "stopwords.json").write_text('{"en": ["the", "of"]}')
    words = "{word_repetition_filter: {max_ratio: 1}}, "
    words += f"{{stopwords_filter: {{min_ratio: 0, stopwords_dir: {tmp_path}}}}}"
    lines = "{average_line_length_filter: {min_len: 0}}, {maximum_line_length_filter: {min_len: 0}}"
    together = f"[{words}, {lines}]"
    apart = f"[{words}, {lines}]".replace("}, {", "}, clean_ip_mapper, {")
    stats = []
    for number, (process, sharing) in enumerate(((together, True), (apart, False))):
        recipe = load(tmp_path, f"process: {process}")
        recipe.pipeline()
        filters = [step.operator for step in recipe.steps if step.operator is not None and step.kind == "filter"]
        assert [operator.use_shared_cache for operator in filters] == [sharing] * 4
        rows = [{"text": text.replace("127.0.0.1", "") + f"\nand the line {n}", "n": n} for n, text in enumerate(TEXTS)]
        run(tmp_path, process, "keep_stats_in_res_ds: true", rows, run_dir=str(tmp_path / f"run{number}"))
        stats.append([row[STATS_FIELD] for row in read_rows(tmp_path / "out.jsonl")])
    assert stats[0] == stats[1]
    assert len(stats[0]) == len(TEXTS)


def test_ordered_false_writes_results_in_any_order(tmp_path: Path) -> None:
    rows = varied(100)
    run(tmp_path, as_yaml(*CLEANING), "ordered: false", rows)
    found = read_rows(tmp_path / "out.jsonl")
    assert sorted(found, key=lambda row: row["n"]) == plain(rows, *CLEANING)


def test_the_progress_of_a_recipe_is_in_the_unit_of_the_caller(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", some_rows(20))
    recipe = load(
        tmp_path, "dataset_path: in.jsonl\nexport_path: out.jsonl\nprocess: [whitespace_normalization_mapper]\n"
    )
    pages = WorkCounts("pages", finished=60, total=60, failed=0)
    handle = dt.run(recipe, cluster=HERE, run_dir=tmp_path / "run", progress=False, counts=lambda: pages)
    summary = handle.wait()
    assert (handle.progress.text, summary.delivered) == ("60 of 60 pages", 60)
