"""Reader of files that contain one JSON array; read as a whole in the driver.

An array has no lines that could be distributed to workers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

READ_ROWS_TARGET = "dovetail.data.readers.json_array:read_rows"
SNIFF_BYTES = 1 << 16
JSON_WHITESPACE = b"\xef\xbb\xbf \t\r\n"


def is_json_array(path: str) -> bool:
    """Whether a .json file contains one array. Several lines with a list each are rows."""
    if not path.lower().endswith(".json") or "://" in path or not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        first = b""
        while not first.strip(JSON_WHITESPACE):
            line = file.readline(SNIFF_BYTES)
            if not line:
                return False
            first = line
        more = bool(file.read(SNIFF_BYTES).strip(JSON_WHITESPACE))
    if not first.lstrip(JSON_WHITESPACE).startswith(b"["):
        return False
    try:
        json.loads(first)
    except ValueError:
        return True
    return not more


def read_rows(paths: Sequence[str]) -> Iterator[Any]:
    """Rows of all files, one file after another."""
    for path in paths:
        try:
            with Path(path).open(encoding="utf-8-sig") as file:
                found = json.load(file)
        except ValueError as error:
            fix = "fix the file, or write one row per line to a .jsonl file"
            raise ConfigError(Problem("DT418", f"is not a JSON array: {error}", fixes=(fix,), place=path)) from None
        yield from found
