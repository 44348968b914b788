"""Baseline of the text and recipe benchmarks: a loop that reads JSONL, calls operators and writes JSONL."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def run_plain_loop(
    operators: Sequence[Callable[[Any], Any]], source: str, sink: str, remove: Sequence[str] = ()
) -> int:
    """Call all operators for each row, one after the other; None drops the row. Returns the number of rows written.

    The fields `remove` are not written.
    """
    kept = 0
    with open(source, encoding="utf-8") as lines, open(sink, "w", encoding="utf-8") as out:  # noqa: PTH123
        for line in lines:
            row = json.loads(line)
            for operator in operators:
                row = operator(row)
                if row is None:
                    break
            else:
                kept += 1
                for field in remove:
                    row.pop(field, None)
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
    return kept
