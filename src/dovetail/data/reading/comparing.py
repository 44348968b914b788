"""What changed in a source since a run began? In sentences, for who wants to resume it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.resources.sizes import about_size

if TYPE_CHECKING:
    from collections.abc import Mapping

SHOWN = 10
WORDS = {"count": "the number of files", "bytes": "the bytes of all files together", "digest": "the list of files"}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if before.get("kind") != now.get("kind"):
        return [f"the source was {before.get('kind')} and is {now.get('kind')} now"]
    found: list[str] = []
    for key in sorted({*before, *now} - {"kind"}):
        old, new = before.get(key), now.get(key)
        if key == "files" and old is not None and new is not None:
            found += _files(old, new)
        elif key == "tables":
            found += _tables(old or [], new or [])
        elif _plain(old) != _plain(new):
            found.append(_changed(key, old, new))
    if len(found) > SHOWN:
        return [*found[:SHOWN], f"and {len(found) - SHOWN} more changes"]
    return found


def _changed(key: str, old: Any, new: Any) -> str:
    if key == "dataset":
        return "a Ray Dataset ends with its driver: computed anew, its rows may come in another order"
    if key in ("files", "digest", "content", "schema"):
        what = {"files": "the list of files", "content": "the content of the table", "schema": "the table's columns"}
        return f"{what.get(key, WORDS.get(key, key))} changed"
    return f"{WORDS.get(key, key)} was {_words(old)} and is {_words(new)} now"


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not given" if value is None else f"{value:,}" if type(value) is int else str(value)


def _files(old: list[Any], new: list[Any]) -> list[str]:
    was, now = {one[0]: one for one in old}, {one[0]: one for one in new}
    found = [f"{path} is gone" for path in was if path not in now]
    found += [f"{path} was not there" for path in now if path not in was]
    for path in was:
        if path in now and _plain(was[path]) != _plain(now[path]):
            found.append(f"{path} {_difference(was[path], now[path])}")
    if not found and [one[0] for one in old] != [one[0] for one in new]:
        found.append("the files come in another order")
    return found


def _difference(was: list[Any], now: list[Any]) -> str:
    if was[1] != now[1]:
        before, after = about_size(was[1]), about_size(now[1])
        if before == after:
            before, after = f"{was[1]:,} bytes", f"{now[1]:,} bytes"
        return f"was {before} and is {after} now"
    return "was written to or replaced (same size, another time)"


def _tables(old: list[Any], new: list[Any]) -> list[str]:
    was, now = dict(old), dict(new)
    found = [f"the table {uri} is not read any more" for uri in was if uri not in now]
    found += [f"the table {uri} was not read" for uri in now if uri not in was]
    for uri in was:
        if uri in now and was[uri] != now[uri]:
            found.append(f"the table {uri} was read at version {was[uri]} and is at version {now[uri]} now")
    return found


def _plain(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
