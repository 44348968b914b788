"""Keys of items: joining, slicing and child keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.engines.item_keys import (
    CountChange,
    Key,
    Keys,
    as_tuple,
    as_tuples,
    child_key,
    derive_keys,
    join_keys,
    slice_keys,
)

KEY = st.one_of(st.integers(0, 50), st.lists(st.integers(0, 50), min_size=2, max_size=4).map(tuple))
RANGE = st.tuples(st.integers(0, 50), st.integers(0, 10)).map(lambda two: range(two[0], two[0] + two[1]))
KEYS = st.one_of(RANGE, st.lists(KEY))


def test_a_child_key_extends_the_key_of_its_parent() -> None:
    assert child_key(7, 0) == (7, 0)
    assert child_key((7, 0), 3) == (7, 0, 3)
    assert as_tuple(7) == (7,)
    assert as_tuple((7, 1)) == (7, 1)
    assert as_tuples(range(2)) == ((0,), (1,))


def test_consecutive_ranges_become_one() -> None:
    assert join_keys([range(3), range(0), range(3, 5)]) == range(5)
    assert join_keys([]) == range(0)
    assert join_keys([range(3), range(4, 5)]) == [0, 1, 2, 4]
    assert isinstance(slice_keys(range(10), 2, 5), range)


@given(st.lists(KEYS))
def test_joined_keys_are_the_concatenation_and_the_inputs_stay_unchanged(many: list[Keys]) -> None:
    copies = [list(keys) for keys in many]
    assert list(join_keys(many)) == [key for keys in copies for key in keys]
    assert [list(keys) for keys in many] == copies


@given(KEYS, st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 4))))
def test_count_changes_derive_child_keys_from_the_first_item_and_keep_other_keys(
    keys: Keys, steps: list[tuple[int, int, int]]
) -> None:
    changes: list[CountChange] = []
    expected: list[Key] = []
    begin = 0
    for gap, length, count in steps:
        start, stop = begin + gap, begin + gap + length
        if stop > len(keys):
            break
        changes.append((start, stop, count))
        expected += list(keys)[begin:start]
        expected += [child_key(keys[start], number) for number in range(count)]
        begin = stop
    expected += list(keys)[begin:]
    assert list(derive_keys(keys, changes)) == expected
    if not changes:
        assert derive_keys(keys, changes) is keys
