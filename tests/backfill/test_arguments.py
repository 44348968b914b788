"""Validation of the arguments of a backfill."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lance")
pytest.importorskip("pyarrow")

import lance
import pyarrow as pa

import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, create_table
from dovetail.backfill.arguments import parse_arguments, validate_arguments
from dovetail.backfill.udf import udf
from dovetail.errors import ConfigError
from dovetail.pipeline.error_policy import Retry

if TYPE_CHECKING:
    from pathlib import Path


def of_m(folder: Path) -> Any:
    """The same of a column `m`."""

    def function(m: int) -> int:
        if m % 10 == 0 and (folder / "bad").exists():
            raise ValueError("bad")
        return m + 1

    return dt.udf(function, version="1")


def not_null(uri: str, rows: int) -> str:
    """A table whose column `n` is there, and must have a value in every row."""
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("n", pa.int64(), nullable=False)])
    lance.write_dataset(pa.table([list(range(rows)), [7] * rows], schema=schema), uri)
    return uri


def messages(given: dict[str, Any]) -> list[str]:
    return [problem.message for problem in validate_arguments(given)[1]]


def halves(n: int) -> int:
    return n / 2  # type: ignore[return-value]


@pytest.mark.parametrize(
    "how",
    [{"fragments": [99]}, {"slots": 20_000}, {"workers": (4, 8)}, {"worker": 2}, {"where": "unknown = 1"}],
    ids=str,
)
def test_a_rejected_call_adds_no_column(tmp_path: Path, how: dict[str, Any]) -> None:
    table = dt.table(create_table(tmp_path, 20, 10))
    with pytest.raises(dt.DovetailError):
        table.backfill("n", fns.doubled, cluster=HALF, **how)
    assert (table.version, "n" in table.schema.names) == (1, False)
    assert not (tmp_path / "t.lance/_dovetail").exists()


@pytest.mark.parametrize("name", ["_rowid", "_rowaddr", "_rowoffset", 5, None, [], ["a", "a"], "a`b"])
def test_reserved_column_names_are_rejected(tmp_path: Path, name: Any) -> None:
    table = dt.table(create_table(tmp_path, 20, 10))
    with pytest.raises(ConfigError):
        table.add_column(name, fns.doubled)
    assert table.version == 1


def test_a_misspelled_argument_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown argument worker=.*workers"):
        dt.table(create_table(tmp_path, 20, 10)).backfill("n", fns.doubled, worker=2)


def test_problems_of_arguments_and_of_the_table_are_reported_at_once(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 20, 10))
    for call in (table.backfill, table.plan_backfill):
        with pytest.raises(ConfigError) as caught:
            call("n", dt.udf(of_m(tmp_path).fn), workers=0, commit_every="often")
        problem_texts = "".join(problem.message for problem in caught.value.problems)
        assert all(words in problem_texts for words in ("workers=0", "commit_every='often'", "'m'")), problem_texts


def test_skipping_rows_of_a_column_that_is_not_nullable_is_rejected(tmp_path: Path) -> None:
    table = dt.table(not_null(str(tmp_path / "t.lance"), 30))
    with pytest.raises(ConfigError, match="is not nullable") as caught:
        table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip")
    assert 'on_error="fail"' in str(caught.value)
    assert table.history() == []


def test_a_misspelled_argument_beside_recompute_computes_nothing(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 20, 20))
    table.backfill("n", fns.doubled, cluster=HALF)
    with pytest.raises(ConfigError, match="spark"):
        table.backfill("n", fns.doubled, cluster=HALF, engine="spark", recompute=True)
    assert table.backfill("n", fns.doubled, cluster=HALF).rows == 0


@pytest.mark.parametrize("env_from", ["HOME", 3, ["not a name"]])
def test_invalid_arguments_are_reported_together(tmp_path: Path, env_from: Any) -> None:
    table: Any = dt.table(create_table(tmp_path, 20, 20))
    with pytest.raises(ConfigError) as caught:
        table.backfill("n", fns.doubled, env_from=env_from, progress="yes", engine="spark")
    problem_texts = " ".join(problem.message for problem in caught.value.problems)
    assert all(name in problem_texts for name in ("env_from=", "progress=", "unknown engine 'spark'")), problem_texts
    assert "n" not in table.schema.names


def test_an_unknown_option_of_retry_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"Retry\(\) has no option time=3 \(did you mean 'times'\?\)"):
        Retry(time=3)


def test_a_problem_names_the_alias_that_was_used() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments({"concurrency": 0, "num_frags": 0, "intra_applier_concurrency": 0})
    texts = [problem.message for problem in caught.value.problems]
    assert [text.partition("=")[0] for text in texts] == ["concurrency", "intra_applier_concurrency", "num_frags"]
    assert caught.value.problems[0].fix_texts == ('concurrency="auto"', "concurrency=(1, 4)")


@pytest.mark.parametrize("first", ["concurrency", "workers"])
def test_an_argument_and_its_alias_with_different_values_are_rejected(first: str) -> None:
    second = "workers" if first == "concurrency" else "concurrency"
    assert messages({first: 2, second: 3}) == [f"{first} and {second} are the same argument with different values"]
    assert parse_arguments({first: 2, second: 2}).workers == 2


@pytest.mark.parametrize(
    ("given", "found"),
    [(0, 0), (5, 5), (0.5, 0.5), ("1%", 0.01), ("0%", 0.0), ("100%", 1.0), (" 50 % ", 0.5)],
)
def test_max_errors_is_a_count_or_a_share(given: Any, found: float) -> None:
    budget = parse_arguments({"max_errors": given}).max_errors
    assert (budget, type(budget)) == (found, type(found))


@pytest.mark.parametrize("wrong", [False, True, -1, 1.0, 1.5, "101%", "-1%", "nan%", "%", "5", math.nan])
def test_other_values_of_max_errors_are_rejected(wrong: Any) -> None:
    assert len(messages({"max_errors": wrong})) == 1


def test_functions_and_calls_have_the_same_limit_of_slots() -> None:
    assert parse_arguments({"slots": 10_000}).slots == udf(halves, slots=10_000).slots == 10_000
    assert messages({"slots": 10_001}) == ["slots=10001 is not a whole number from 1 to 10,000"]
    with pytest.raises(ConfigError, match="from 1 to 10,000"):
        udf(halves, slots=10_001)
