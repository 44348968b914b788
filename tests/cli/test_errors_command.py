"""`dovetail errors`, and the item with which a run failed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from cli.jobs import CLUSTER, CommandFolder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.time_limit


@pytest.fixture
def place(tmp_path: Path) -> CommandFolder:
    return CommandFolder(tmp_path / "job")


@pytest.fixture
def skipping(place: CommandFolder) -> CommandFolder:
    """A run that skipped the rows 7 and 17, which are lines 8 and 18."""
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens", more=", on_error: skip")
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 0
    return place


def test_a_failed_run_names_the_row_and_shows_it(place: CommandFolder) -> None:
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 1
    assert f"error[DT330] {place.folder}/in.jsonl:8  no_sevens: item failed: ValueError: a seven: 7" in done.stderr
    assert '\n  item: {"n": 7}\n' in done.stderr
    assert "errors.jsonl" not in done.stderr, "nothing was skipped"
    shown = place.run("errors")
    assert shown.stdout == (
        f'1 item in no_sevens, ended the run: ValueError: a seven: 7\n  {place.folder}/in.jsonl:8  {{"n": 7}}\n'
    )
    status = place.run("status").stdout
    assert f"{place.folder}/in.jsonl:8 in no_sevens: ValueError: a seven: 7" in " ".join(status.split())
    assert "was lost" not in status, "workers are stopped when the run has failed"
    assert json.loads(place.run("status", "--json").stdout)["failed"] == 0


def test_the_error_of_a_run_has_the_place(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"id": 2}\n')
    run = dt.run(dt.Pipeline([dt.Stage("need", lambda batch: [row["text"] for row in batch])]), rows)
    with pytest.raises(dt.RunError) as failed:
        list(run)
    (problem,) = failed.value.problems
    assert problem.place == f"{rows}:2"
    assert problem.evidence[0] == 'item: {"id": 2}'
    assert run.errors == []


def test_skipped_items_have_their_place(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"id": 2}\n')
    stages = [
        dt.Stage("twice", lambda batch: [row for row in batch for _ in range(2)]),
        dt.Stage("need", lambda batch: [row["text"] for row in batch], on_error="skip", fuse=False),
    ]
    run = dt.run(dt.Pipeline(stages), rows)
    assert list(run) == ["a", "a"]
    assert [error.place for error in run.errors] == [f"{rows}:2"] * 2


def test_the_item_of_an_iterable_is_named_by_its_number() -> None:
    run = dt.run(dt.Pipeline([dt.Stage("parse", lambda batch: list(map(int, batch)))]), ["1", "2", "three"])
    with pytest.raises(dt.RunError) as failed:
        list(run)
    assert failed.value.problems[0].place == "item 2"
    assert failed.value.problems[0].evidence[0] == 'item: "three"'


@pytest.mark.parametrize("function", [lambda row: row["n"], lambda row: row.get("n"), lambda row: row + 1])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_function_that_expects_one_item_gets_a_hint(function: Any, batch_size: int) -> None:
    rows = [{"n": 1}, {"n": 2}]
    with pytest.raises(dt.RunError) as failed:
        list(dt.run(dt.Pipeline([dt.Stage("f", function, batch_size=batch_size)]), rows))
    assert any("decorate it with @dt.each" in line for line in failed.value.problems[0].evidence)


def test_errors_are_grouped_with_counts_and_places(skipping: CommandFolder) -> None:
    shown = skipping.run("errors", "last")
    where = f"{skipping.folder}/in.jsonl"
    assert shown.stdout == (
        f'2 items in no_sevens: ValueError: a seven: 7\n  {where}:8  {{"n": 7}}\n  {where}:18  {{"n": 17}}\n'
    )
    assert "  and 1 more\n" in skipping.run("errors", "--items", "1").stdout
    assert "  | ValueError: a seven: 7\n" in skipping.run("errors", "--traceback").stdout


def test_errors_are_filtered_and_printed_as_json(skipping: CommandFolder) -> None:
    rows = [json.loads(line) for line in skipping.run("errors", "--json").stdout.splitlines()]
    assert [(row["stage"], row["error"], row["item"], row["ended_run"]) for row in rows] == [
        ("no_sevens", "ValueError", '{"n": 7}', False),
        ("no_sevens", "ValueError", '{"n": 17}', False),
    ]
    assert len(skipping.run("errors", "--stage", "no_sevens", "--type", "ValueError").stdout.splitlines()) == 3
    other = skipping.run("errors", "--type", "KeyError")
    assert (other.returncode, other.stdout) == (0, "")
    assert "no failed items that match" in other.stderr
    assert "exceptions with failures: ValueError" in other.stderr
    assert "stages with" not in other.stderr
    misspelt = skipping.run("errors", "--stage", "no_sevns")
    assert "stages with failures: no_sevens (did you mean 'no_sevens'?)" in misspelt.stderr


def test_an_item_that_ended_an_earlier_attempt_is_shown_once_or_not_at_all(place: CommandFolder) -> None:
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens")
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 1
    assert "ended the run" in place.run("errors").stdout
    assert place.run("run", "--resume", "last", "--set", "stages.*.on_error=skip").returncode == 0
    shown = place.run("errors").stdout
    assert "ended the run" not in shown
    assert shown.count("in.jsonl:8 ") == 1


def test_a_run_without_failed_items_says_so(place: CommandFolder) -> None:
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 0
    shown = place.run("errors")
    assert (shown.returncode, shown.stdout) == (0, "")
    assert "no failed items in run" in shown.stderr


def test_control_characters_of_an_item_do_not_reach_the_terminal(place: CommandFolder) -> None:
    (place.folder / "in.jsonl").write_text(json.dumps({"n": 7, "text": "\x1b]0;owned\x07"}) + "\n")
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens", more=", on_error: skip")
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 0
    assert "\x1b" not in place.run("errors", "--traceback").stdout


def test_failed_rows_of_a_backfill_are_shown_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, lance = pytest.importorskip("pyarrow"), pytest.importorskip("lance")
    place = CommandFolder(tmp_path / "job")
    lance.write_dataset(pa.table({"n": list(range(10))}), str(place.folder / "t.lance"))
    (place.folder / "functions.py").write_text(
        "def half(n: int) -> int:\n    if n == 7:\n        raise ValueError('a seven')\n    return n // 2\n"
    )
    monkeypatch.chdir(place.folder)
    done = place.run("backfill", "run", "t.lance", "half", "--udf", "functions:half", "--on-error", "skip", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert place.run("errors").stdout == "1 row in half: ValueError: a seven\n  row 7 (fragment 0, offset 7)\n"
