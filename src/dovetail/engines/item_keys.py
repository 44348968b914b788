"""Item keys: the source item that each item descends from.

A key is the number of a source item, or a tuple of that number and one child number per step that changed the item
count. No key in a list is a prefix of another, and child keys preserve this, so keys stay unique. Key lists are never
modified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Key = int | tuple[int, ...]
Keys = range | list[Key]
"""One key per item; a range while the numbers are consecutive, which costs no memory."""
CountChange = tuple[int, int, int]
"""Items [start, stop) produced this number of items. Items outside of all changes map one to one."""

NO_KEYS = range(0)
KEYS_PER_DENSE_CHANGE = 8


def as_tuple(key: Key) -> tuple[int, ...]:
    """The sortable form: source number, child numbers."""
    return key if isinstance(key, tuple) else (key,)


def child_key(key: Key, number: int) -> tuple[int, ...]:
    return (*as_tuple(key), number)


def as_tuples(keys: Keys) -> tuple[tuple[int, ...], ...]:
    return tuple([as_tuple(key) for key in keys])


def slice_keys(keys: Keys, start: int, stop: int) -> Keys:
    return keys[start:stop]


def join_keys(many: Iterable[Keys]) -> Keys:
    """Concatenate key lists; consecutive ranges become one range. May return one of the arguments: do not modify it."""
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
    """Keys of the output: children of the first item of each change, and all other keys unchanged."""
    if not changes:
        return keys
    found: list[Key] = []
    begin = 0
    if len(changes) > len(keys) // KEYS_PER_DENSE_CHANGE:
        keys = list(keys)  # slicing a list is cheaper than slicing a range
    for start, stop, count in changes:
        if start > begin:
            found += keys[begin:start]
        if count:
            parent = as_tuple(keys[start])
            found += [(*parent, number) for number in range(count)]
        begin = stop
    found += keys[begin:]
    return found
