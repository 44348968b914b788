"""The function that a table names: loaded only if the caller names or confirms it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, by_id, create_table, twice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRAP = "from pathlib import Path\nPath({mark!r}).touch()\ndef fill(id: int) -> int:\n    return 0\n"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that exists once the module `trap_module` was imported."""
    mark = tmp_path / "imported"
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "trap_module.py").write_text(TRAP.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "trap_module", raising=False)
    return mark


def name_trap_as_function(uri: str) -> None:
    """Change the record of column `n`; write access to the table is enough."""
    (record,) = (path for path in (_folder(uri) / "_dovetail" / "columns").iterdir())
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"reference": "trap_module:fill", "name": "fill"}))


def _folder(uri: str) -> Path:
    from pathlib import Path

    return Path(uri)


CALLS: dict[str, Callable[[dt.Table], Any]] = {
    "backfill": lambda table: table.backfill("n", cluster=HALF),
    "plan_backfill": lambda table: table.plan_backfill("n", cluster=HALF),
    "plan_backfill of a trusted table": lambda table: table.plan_backfill("n", cluster=HALF, trust_table=True),
    "retry_errors": lambda table: table.retry_errors("n", cluster=HALF),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_function_that_only_the_table_names_is_not_imported(
    tmp_path: Path, trap: Path, call: Callable[[dt.Table], Any]
) -> None:
    uri = create_table(tmp_path, 20, 10)
    dt.table(uri).add_column("n", fns.doubled)
    name_trap_as_function(uri)
    with pytest.raises(dt.ConfigError, match="trap_module:fill") as caught:
        call(dt.table(uri))
    assert [problem.code for problem in caught.value.problems] == ["DT452"]
    assert not trap.exists()


def test_listing_errors_history_and_dropping_import_nothing(tmp_path: Path, trap: Path) -> None:
    uri = create_table(tmp_path, 20, 10)
    dt.table(uri).add_column("n", fns.doubled)
    name_trap_as_function(uri)
    table = dt.table(uri)
    assert (table.errors("n"), table.history("n")) == ([], [])
    table.drop("n")
    assert not trap.exists()


def test_a_function_that_was_replaced_in_the_table_is_not_the_one_that_was_passed(tmp_path: Path, trap: Path) -> None:
    uri = create_table(tmp_path, 20, 10)
    table = dt.table(uri)
    table.add_column("n", fns.doubled)
    name_trap_as_function(uri)
    with pytest.raises(dt.ConfigError, match="trap_module:fill"):
        table.backfill("n", cluster=HALF)
    assert not trap.exists()


def test_the_fixes_name_the_function_or_trust_the_table(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 20, 10)
    dt.table(uri).add_column("n", fns.doubled)
    with pytest.raises(dt.ConfigError) as caught:
        dt.table(uri).backfill("n", cluster=HALF)
    named, trusted = caught.value.problems[0].fix_texts
    assert named == 'table.backfill("n", udf="fill_functions:doubled")'
    assert trusted == 'table.backfill("n", trust_table=True)  # loads what the table names'
    with pytest.raises(dt.ConfigError) as caught:
        dt.table(uri).plan_backfill("n", cluster=HALF)
    assert caught.value.problems[0].fix_texts == ('table.plan_backfill("n", udf="fill_functions:doubled")',)
    assert dt.table(uri).plan_backfill("n", "fill_functions:doubled", cluster=HALF, sample=False).rows == 20
    assert dt.table(uri).backfill("n", cluster=HALF, trust_table=True).rows == 20
    assert by_id(uri, "n") == twice(range(20))
