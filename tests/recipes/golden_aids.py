"""Results of Data-Juicer 1.6.1 on 400 rows, per operator and configuration.

`golden/cases/<operator>__<number>.json` holds one configuration each. For mappers `rows[i]` is the text of row i
afterwards, None if it is unchanged (`text_chunk_mapper`: a list of strings). For filters it is `{"stats", "keep"}`, for
deduplicators `rows` are the numbers of the rows that are kept, for selectors in the order in which they leave, for
groupers a list of numbers per group.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
WORDS = GOLDEN / "words"
"""Small lists of stop words and flagged words for those filters."""
GENERATED = 250
"""Number of rows of generated prose at the start; the rows after them have unusual texts."""

Case = dict[str, Any]


@cache
def _lines() -> tuple[str, ...]:
    return tuple((GOLDEN / "input.jsonl").read_text().splitlines())


def rows() -> list[dict[str, Any]]:
    """The 400 rows; a new copy for every caller, because operators change them in place."""
    return [json.loads(line) for line in _lines()]


@cache
def _all_cases() -> tuple[Case, ...]:
    files = sorted((GOLDEN / "cases").glob("*.json"))
    return tuple({"name": file.stem, **json.loads(file.read_text())} for file in files)


def cases(*, kind: str | None = None, op: str | None = None) -> list[Case]:
    """Cases of one kind ("mapper", "filter", "deduplicator", "selector", "grouper") and of one operator.

    `name` is that of the file. Cases are shared: do not change them.
    """
    return [case for case in _all_cases() if kind in (None, case["kind"]) and op in (None, case["op"])]


def errors(*, op: str | None = None) -> list[Case]:
    """Configurations that Data-Juicer refuses: `op`, `params`, `stage` (None: it does not), `exception`, `message`."""
    found: list[Case] = json.loads((GOLDEN / "errors.json").read_text())
    return [error for error in found if op in (None, error["op"])]
