"""Do items keep the numbers they came with?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.engines.keys import Change, Key, Keys, after, as_tuple, as_tuples, child, join, slice_of

KEY = st.one_of(st.integers(0, 50), st.lists(st.integers(0, 50), min_size=2, max_size=4).map(tuple))
RANGE = st.tuples(st.integers(0, 50), st.integers(0, 10)).map(lambda two: range(two[0], two[0] + two[1]))
KEYS = st.one_of(RANGE, st.lists(KEY))


def test_a_child_is_numbered_behind_its_parent() -> None:
    assert child(7, 0) == (7, 0)
    assert child((7, 0), 3) == (7, 0, 3)
    assert as_tuple(7) == (7,)
    assert as_tuple((7, 1)) == (7, 1)
    assert as_tuples(range(2)) == ((0,), (1,))


def test_consecutive_ranges_become_one() -> None:
    assert join([range(3), range(0), range(3, 5)]) == range(5)
    assert join([]) == range(0)
    assert join([range(3), range(4, 5)]) == [0, 1, 2, 4]
    assert isinstance(slice_of(range(10), 2, 5), range)


@given(st.lists(KEYS))
def test_a_join_is_all_of_them_and_changes_none(many: list[Keys]) -> None:
    copies = [list(keys) for keys in many]
    assert list(join(many)) == [key for keys in copies for key in keys]
    assert [list(keys) for keys in many] == copies


@given(KEYS, st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 4))))
def test_changes_give_children_of_their_first_item_and_leave_the_others(
    keys: Keys, steps: list[tuple[int, int, int]]
) -> None:
    changes: list[Change] = []
    expected: list[Key] = []
    begin = 0
    for gap, length, count in steps:
        start, stop = begin + gap, begin + gap + length
        if stop > len(keys):
            break
        changes.append((start, stop, count))
        expected += list(keys)[begin:start]
        expected += [child(keys[start], number) for number in range(count)]
        begin = stop
    expected += list(keys)[begin:]
    assert list(after(keys, changes)) == expected
    if not changes:
        assert after(keys, changes) is keys
