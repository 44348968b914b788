"""Random sequences of calls and of changes by others: every value is right, and every NULL is listed."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

import dovetail as dt  # noqa: E402
from backfill_aids import HALF  # noqa: E402
from dovetail.errors import DovetailError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LONG = bool(os.environ.get("DOVETAIL_TEST_LONG"))
SEEDS, STEPS = (12, 40) if LONG else (2, 12)


def function(version: int, bad: int) -> Any:
    """Rows whose `x` ends with that digit fail, which is not part of the version: the world was different."""

    def computed(x: int) -> int:
        if x % 10 == bad:
            raise ValueError(f"bad {x}")
        return x * 10 + version

    return dt.udf(computed, version=f"v{version}")


class TableScenario:
    """A table, and what was done to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice = Random(seed)
        self.uri = str(folder / "t.lance")
        self.rows = 90
        stable = self.dice.random() < 0.3
        lance.write_dataset(self._some(0, 90), self.uri, max_rows_per_file=30, enable_stable_row_ids=stable)
        self.table = dt.table(self.uri)
        self.table.add_column("n", function(1, 3))
        self.steps: list[str] = []

    def _some(self, start: int, stop: int) -> Any:
        return pa.table({"id": pa.array(range(start, stop)), "x": pa.array(range(start, stop))})

    def _fragments(self) -> list[int]:
        there = [one.fragment_id for one in lance.dataset(self.uri).get_fragments()]
        return self.dice.sample(there, k=min(len(there), self.dice.randint(1, 2)))

    def _where(self) -> str:
        return self.dice.choice(["x % 2 = 0", "x < 40", "x > 1000", "n IS NULL", "n > 300"])

    def step(self) -> bool:
        """Whether everything is done now."""
        acts: dict[str, Callable[[], object]] = {
            "append": self._append,
            "delete": lambda: self._between(5, lambda where: lance.dataset(self.uri).delete(where)),
            "update": lambda: self._between(5, lambda where: lance.dataset(self.uri).update({"x": "x + 1"}, where)),
            "compact": lambda: lance.dataset(self.uri).optimize.compact_files(target_rows_per_fragment=60),
            "retry": lambda: self.table.retry_errors("n", self._function(), cluster=HALF, on_error="skip"),
        }
        calls: dict[str, dict[str, Any]] = {
            "full": {},
            "full again": {},
            "recompute": {"recompute": True},
            "where": {"where": self._where()},
            "fragments": {"fragments": self._fragments()},
            "one fragment": {"fragments": 1},
            "recompute some": {"recompute": True, "fragments": self._fragments()},
            "recompute where": {"recompute": True, "where": self._where()},
            "recompute some where": {"recompute": True, "fragments": self._fragments(), "where": self._where()},
            "until it fails": {"on_error": "fail"},
            "where until it fails": {"where": self._where(), "on_error": "fail"},
        }
        name = self.dice.choice([*acts, *calls])
        how = {"on_error": "skip", **calls.get(name, {})}
        self.steps.append(f"{name} {how if name in calls else ''}")
        try:
            acts[name]() if name in acts else self.table.backfill("n", self._function(), cluster=HALF, **how)
        except ValueError as error:
            self.steps.append(f"  {error}"[:80])
            return False
        return name in calls and not {"where", "fragments"} & {*how}

    def _function(self) -> Any:
        version, bad = self.dice.choice([1, 1, 1, 2]), self.dice.choice([3, 3, 5, 11, 11])
        self.steps.append(f"  by v{version}, bad {bad}")
        return function(version, bad)

    def _append(self) -> None:
        lance.write_dataset(self._some(self.rows, self.rows + 20), self.uri, mode="append")
        self.rows += 20

    def _between(self, count: int, act: Callable[[str], object]) -> None:
        first = self.dice.randrange(self.rows)
        act(f"id >= {first} AND id < {first + count}")

    def check(self, *, done: bool) -> None:
        found = lance.dataset(self.uri).scanner(columns=["x", "n"], with_row_address=True).to_table().to_pylist()
        values = {row["_rowaddr"]: (row["x"], row["n"]) for row in found}
        errors = {row.row for row in self.table.errors("n")}
        steps = "\n".join(self.steps)
        assert {row for row in errors if row not in values or values[row][1] is not None} == set(), steps
        if done:
            assert {row for row, (_, value) in values.items() if value is None} == errors, steps
            assert {row: it for row, it in values.items() if it[1] is not None and it[1] // 10 != it[0]} == {}, steps


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_value_is_right_and_every_null_is_listed(tmp_path: Path, seed: int) -> None:
    story = TableScenario(tmp_path, seed)
    for _ in range(STEPS):
        story.check(done=story.step())
    try:
        story.table.backfill("n", function(1, 3), cluster=HALF, on_error="skip")
    except DovetailError as error:
        raise AssertionError("\n".join(story.steps)) from error
    story.check(done=True)
