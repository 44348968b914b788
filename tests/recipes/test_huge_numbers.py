"""Integers of 400 digits, which no float can hold, are problems with a fix and not tracebacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dovetail as dt

if TYPE_CHECKING:
    from pathlib import Path

HUGE = "1" + "0" * 400
RECIPE = "dataset_path: in.jsonl\nexport_path: out.jsonl\nprocess:\n  - {operator}:\n      {key}: {value}\n"


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(
    ("operator", "key"),
    [
        ("text_length_filter", "num_cpus"),
        ("text_length_filter", "min_len"),
        ("document_deduplicator", "lowercase"),
    ],
)
def test_a_huge_parameter_of_an_operator_is_no_traceback(tmp_path: Path, operator: str, key: str, sign: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(operator=operator, key=key, value=sign + HUGE))
    with pytest.raises(dt.DovetailError) as caught:
        dt.Recipe.load(file)
    assert all(problem.fix_texts for problem in caught.value.problems)


def test_a_huge_upper_bound_bounds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(operator="alphanumeric_filter", key="max_ratio", value=HUGE))
    assert dt.Recipe.load(file).steps


@pytest.mark.parametrize("key", ["count", "cpus"])
def test_a_huge_amount_of_a_cluster_is_no_traceback(tmp_path: Path, key: str) -> None:
    file = tmp_path / "cluster.yaml"
    amounts = {"count": "1", "cpus": "4", "memory": "8GB", key: HUGE}
    file.write_text("nodes:\n  -\n" + "".join(f"    {name}: {value}\n" for name, value in amounts.items()))
    with pytest.raises(dt.DovetailError, match="of more than 300 digits"):
        dt.Cluster.of(str(file))
