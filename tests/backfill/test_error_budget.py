"""`max_errors` over repeated calls and with conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("lance")
pytest.importorskip("pyarrow")


import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, by_id, create_table, twice
from backfill_scenes import BAD, brittle_function
from dovetail.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def failed(tmp_path: Path) -> dt.Table:
    """A column `n` of two fragments in which one row failed; it would not again."""
    (tmp_path / "bad").touch()
    table = dt.table(create_table(tmp_path, 20, 10))
    table.backfill("n", brittle_function(tmp_path), on_error="skip", cluster=HALF)
    (tmp_path / "bad").unlink()
    assert [error.offset for error in table.errors("n")] == [BAD]
    return table


def test_a_repeated_call_does_not_exceed_its_error_budget(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 200, 50))
    for _ in range(2):
        with pytest.raises(RunError, match=r"rows failed, more than max_errors allows \(5\)"):
            table.backfill("n", fns.every_tenth_fails, on_error="skip", max_errors=5, cluster=HALF)
    filled = table.backfill("n", fns.every_tenth_fails, on_error="skip", max_errors=20, cluster=HALF)
    assert by_id(table.uri, "n") == twice(range(200), range(0, 200, 10))
    again = table.backfill("n", fns.every_tenth_fails, on_error="skip", cluster=HALF)
    assert (filled.status, again.rows, again.failed_before) == ("finished", 0, 20)
    assert str(again) == "n: nothing to do, 200 rows are already filled, 20 of them failed (NULL)"


def test_a_percentage_of_errors_applies_to_the_rows_of_the_condition(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 200, 200))
    with pytest.raises(RunError, match=r"1 row failed, more than max_errors allows \(50% of 1 row\)"):
        table.backfill("n", fns.every_tenth_fails, where="id = 10", on_error="skip", max_errors="50%", cluster=HALF)
