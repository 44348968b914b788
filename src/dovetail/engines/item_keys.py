"""Item keys: the source item that each item descends from.

A key is the number of a source item, or a tuple of it and the numbers of children, one per step that changed counts.
No key of a list is the beginning of another one, and children keep it that way: keys stay unique. Lists of keys are
never changed after they were made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Key = int | tuple[int, ...]
Keys = range | list[Key]
"""One per item; a range as long as they are consecutive numbers, because that costs nothing."""
CountChange = tuple[int, int, int]
"""Items [start, stop) gave so many others; all that is not in a change is row by row what it was."""

NO_KEYS = range(0)
KEYS_PER_DENSE_CHANGE = 8


def as_tuple(key: Key) -> tuple[int, ...]:
    """The form that sorts: source number, child numbers."""
    return key if isinstance(key, tuple) else (key,)


def child_key(key: Key, number: int) -> tuple[int, ...]:
    return (*as_tuple(key), number)


def as_tuples(keys: Keys) -> tuple[tuple[int, ...], ...]:
    return tuple([as_tuple(key) for key in keys])


def slice_keys(keys: Keys, start: int, stop: int) -> Keys:
    return keys[start:stop]


def join_keys(many: Iterable[Keys]) -> Keys:
    """All of them, one after another; consecutive ranges become one. May be one of those given, so do not change it."""
    found: Keys = NO_KEYS
    copied = False
    for keys in many:
        if not len(keys):
            continue
        if not len(found):
            found = keys
        elif isinstance(found, range) and isinstance(keys, range) and found.stop == keys.start:
            found = range(found.start, keys.stop)
        else:
            if not isinstance(found, list) or not copied:
                found, copied = list(found), True
            found += keys
    return found


def derive_keys(keys: Keys, changes: Sequence[CountChange]) -> Keys:
    """Keys of what came out: children of the first item of each change, and all others as they were."""
    if not changes:
        return keys
    found: list[Key] = []
    begin = 0
    if len(changes) > len(keys) // KEYS_PER_DENSE_CHANGE:
        keys = list(keys)  # slices of a list cost less than those of a range
    for start, stop, count in changes:
        if start > begin:
            found += keys[begin:start]
        if count:
            parent = as_tuple(keys[start])
            found += [(*parent, number) for number in range(count)]
        begin = stop
    found += keys[begin:]
    return found
