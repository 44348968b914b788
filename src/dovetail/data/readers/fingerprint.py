"""Fingerprint of the files of a source: by what a resume recognises that the input has changed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.data.readers.file_discovery import FileRef


MAX_FILES_LISTED = 1000
"""Maximum number of files listed in a fingerprint; for more it has a digest."""
MAX_DIFFERENCES_SHOWN = 10
FIELD_TEXTS = {
    "count": "the number of files",
    "bytes": "the bytes of all files together",
    "digest": "the list of files",
}


def files_fingerprint(files: Sequence[FileRef]) -> dict[str, object]:
    # without the inode: a file restored from a backup with its time is unchanged
    listed = [[ref.path, ref.size, list(ref.stamp[:2]) if isinstance(ref.stamp, tuple) else ref.stamp] for ref in files]
    if len(files) <= MAX_FILES_LISTED:
        return {"files": listed}
    digest = hashlib.sha256()
    for one in listed:
        digest.update(repr(one).encode("utf-8", "surrogateescape"))
    return {"count": len(files), "bytes": sum(ref.size for ref in files), "digest": digest.hexdigest()}


def fingerprint_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if before.get("kind") != now.get("kind"):
        return [f"the source was {before.get('kind')} and is {now.get('kind')} now"]
    found: list[str] = []
    for key in sorted({*before, *now} - {"kind"}):
        old, new = before.get(key), now.get(key)
        if key == "files" and old is not None and new is not None:
            found += _file_differences(old, new)
        elif key == "tables":
            found += _table_differences(old or [], new or [])
        elif _as_lists(old) != _as_lists(new):
            found.append(_field_difference(key, old, new))
    if len(found) > MAX_DIFFERENCES_SHOWN:
        return [*found[:MAX_DIFFERENCES_SHOWN], f"and {len(found) - MAX_DIFFERENCES_SHOWN} more changes"]
    return found


def _field_difference(key: str, old: Any, new: Any) -> str:
    if key == "dataset":
        return "a Ray Dataset ends with its driver; when computed again, its rows may be in another order"
    if key in ("files", "digest", "content", "schema"):
        what = {"files": "the list of files", "content": "the content of the table", "schema": "the table's columns"}
        return f"{what.get(key, FIELD_TEXTS.get(key, key))} changed"
    return f"{FIELD_TEXTS.get(key, key)} was {_value_text(old)} and is {_value_text(new)} now"


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not given" if value is None else f"{value:,}" if type(value) is int else str(value)


def _file_differences(old: list[Any], new: list[Any]) -> list[str]:
    was, now = {one[0]: one for one in old}, {one[0]: one for one in new}
    found = [f"{path} is gone" for path in was if path not in now]
    found += [f"{path} was not there" for path in now if path not in was]
    for path in was:
        if path in now and _as_lists(was[path]) != _as_lists(now[path]):
            found.append(f"{path} {_file_difference(was[path], now[path])}")
    if not found and [one[0] for one in old] != [one[0] for one in new]:
        found.append("the order of the files changed")
    return found


def _file_difference(was: list[Any], now: list[Any]) -> str:
    if was[1] != now[1]:
        before, after = format_size(was[1]), format_size(now[1])
        if before == after:
            before, after = f"{was[1]:,} bytes", f"{now[1]:,} bytes"
        return f"was {before} and is {after} now"
    return "was written to or replaced (same size, another time)"


def _table_differences(old: list[Any], new: list[Any]) -> list[str]:
    was, now = dict(old), dict(new)
    found = [f"the table {uri} is no longer a source" for uri in was if uri not in now]
    found += [f"the table {uri} is new" for uri in now if uri not in was]
    for uri in was:
        if uri in now and was[uri] != now[uri]:
            found.append(f"the table {uri} was read at version {was[uri]} and is at version {now[uri]} now")
    return found


def _as_lists(value: Any) -> Any:
    """Convert tuples to lists, as JSON does."""
    return [_as_lists(one) for one in value] if isinstance(value, list | tuple) else value
