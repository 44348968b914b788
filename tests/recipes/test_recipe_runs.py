"""Runs of recipes give the rows of a plain loop over the operators, in the same order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.observe.history import RunHistory
from dovetail.observe.stage_counts import count_stages
from dovetail.recipes.catalogue import native_class
from dovetail.recipes.operator_tables import run_table
from dovetail.recipes.operators.base import STATS_FIELD, DatasetOperator, Deduplicator
from recipes.recipe_aids import errors, load, own_operator, read_rows, run, some_rows

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


# --- the same as a plain loop

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
def test_operators_over_all_rows_stand_anywhere(tmp_path: Path, operators: list[tuple[str, dict[str, Any]]]) -> None:
    rows = varied(160)
    wanted = plain(rows, *operators)
    assert wanted
    run(tmp_path, as_yaml(*operators), rows=rows)
    assert read_rows(tmp_path / "out.jsonl") == wanted


def test_a_selector_by_chance_keeps_as_many_as_it_says(tmp_path: Path) -> None:
    run(tmp_path, "[text_length_filter, {random_selector: {select_num: 11}}, clean_links_mapper]", rows=varied(100))
    found = [row["n"] for row in read_rows(tmp_path / "out.jsonl")]
    assert len(set(found)) == 11


def test_no_rows_at_all_are_no_results(tmp_path: Path) -> None:
    summary = run(tmp_path, as_yaml(*CLEANING, ("document_deduplicator", {})), rows=[])
    assert (summary.status, read_rows(tmp_path / "out.jsonl")) == ("finished", [])


# --- stats


def test_stats_are_dropped_kept_or_exported_as_the_file_says(tmp_path: Path) -> None:
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
def test_stats_are_dropped_whatever_the_last_operator_is(tmp_path: Path, last: str) -> None:
    run(tmp_path, f"\n  - text_length_filter\n  - {last}", rows=varied(40))
    assert all(STATS_FIELD not in row for row in read_rows(tmp_path / "out.jsonl"))


def test_neighbours_share_their_words_and_lines_and_find_the_same(tmp_path: Path) -> None:
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


# --- bad rows


def test_one_bad_row_costs_one_row(tmp_path: Path) -> None:
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
    if row["n"] in (5, 17) and not (HERE / "mended").exists():
        raise ValueError(f"row {row['n']} is bad")
    return row
"""


def test_a_row_that_makes_an_operator_raise_is_set_aside_and_can_be_run_again(tmp_path: Path) -> None:
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
    (tmp_path / "mended").touch()
    again = run(tmp_path, process, run_dir=None, retry_errors=str(tmp_path / "run"), sink=str(tmp_path / "more.jsonl"))
    assert again.delivered == 2
    assert [row["n"] for row in read_rows(tmp_path / "more.jsonl")] == [5, 17]


def test_a_row_is_known_by_its_number_behind_a_deduplicator(tmp_path: Path) -> None:
    name = own_operator(tmp_path, "raises_behind", RAISES)
    rows = [{"text": "the same text", "n": -1}, {"text": "the same text", "n": -2}, *some_rows(30)]
    run(tmp_path, f"[document_deduplicator, '{name}:check']", rows=rows)
    assert sorted(error["key"] for error in errors(tmp_path)) == [[7], [19]]
    assert len(read_rows(tmp_path / "out.jsonl")) == 29


def test_more_bad_rows_than_are_allowed_fail_the_run(tmp_path: Path) -> None:
    rows = [{"text": n if n < 30 else f"a text {n}"} for n in range(60)]
    with pytest.raises(dt.RunError) as raised:
        run(tmp_path, "[text_length_filter]", "max_errors: 9", rows)
    message = str(raised.value)
    assert "items failed, more than max_errors allows (9)" in message
    assert "field 'text' is int, not a string" in message
    assert not (tmp_path / "out.jsonl").exists()


def test_the_first_bad_row_ends_the_run_where_none_may_be_skipped(tmp_path: Path) -> None:
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


def test_one_bad_line_of_the_input_costs_one_line(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in some_rows(50)]
    lines[20] = lines[20][:-5]
    lines[30] = '"not a row"'
    lines[40] = ""
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    run(tmp_path, "[{text_length_filter: {min_len: 0}}]")
    assert [row["n"] for row in read_rows(tmp_path / "out.jsonl")] == [n for n in range(50) if n not in (20, 30, 40)]
    assert len(errors(tmp_path)) == 2


def test_results_that_were_there_stay_if_a_run_fails(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("before\n")
    with pytest.raises(dt.RunError):
        run(tmp_path, "[text_length_filter]", "skip_op_error: false", [{"text": 5}])
    assert (tmp_path / "out.jsonl").read_text() == "before\n"


def test_results_may_come_in_any_order_if_the_file_says_so(tmp_path: Path) -> None:
    rows = varied(100)
    run(tmp_path, as_yaml(*CLEANING), "ordered: false", rows)
    found = read_rows(tmp_path / "out.jsonl")
    assert sorted(found, key=lambda row: row["n"]) == plain(rows, *CLEANING)


def test_the_table_and_the_monitor_count_rows_that_fail_in_two_fused_operators_alike(tmp_path: Path) -> None:
    own_operator(
        tmp_path,
        "fails_twice",
        "def first(row):\n    assert row['n'] % 50, 'first'\n    return row\n"
        "def second(row):\n    assert row['n'] % 60 != 1, 'second'\n    return row\n",
    )
    process = "['fails_twice:first', 'fails_twice:second', {text_length_filter: {min_len: 1}}]"
    summary = run(tmp_path, process, "open_monitor: true", rows=some_rows(300))
    history = RunHistory.load(summary.folder)
    assert list(history.units) == ["first+second+text_length_filter"]
    counts = count_stages(history).values()
    wanted = [(300, 294, 6), (294, 289, 5), (289, 289, 0)]
    assert [(one.items_in, one.items_out, one.failed) for one in counts] == wanted
    monitor = json.loads((tmp_path / "monitor" / "monitor.json").read_text())
    assert [(one["rows_in"], one["rows_out"], one["set_aside"]) for one in monitor] == wanted
    table = run_table(load(tmp_path, f"process: {process}\n"), history)
    cells = [line.split() for line in table[1:4]]
    assert [(int(line[1]), int(line[2]), int(line[4])) for line in cells] == wanted
