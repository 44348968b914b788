"""Groups of failed items."""

from __future__ import annotations

from itertools import permutations

from dovetail.observe.failed_items import RecordedFailure, group_failures


def test_groups_are_in_the_order_of_size_then_of_the_source_whatever_failed_first() -> None:
    bad_row = RecordedFailure("count", "count", "BadRow", "line 30", key=(30,))
    zero = RecordedFailure("score", "score", "ZeroDivisionError", "division by zero", key=(12,))
    often = [RecordedFailure("score", "score", "KeyError", f"'{row}'", key=(row,)) for row in (40, 50)]
    for order in permutations([bad_row, zero, *often]):
        groups = group_failures(order)
        assert [group[0].error for group in groups] == ["KeyError", "ZeroDivisionError", "BadRow"]
        assert len(groups[0]) == 2
