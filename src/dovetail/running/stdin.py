"""How does what another program prints become items? `dovetail run FILE --source -`: one JSON value per line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, Problem, shown

if TYPE_CHECKING:
    from collections.abc import Iterator


def rows() -> Iterator[Any]:
    if sys.stdin is None:
        raise ConfigError(Problem("DT363", "stdin is closed", fixes=("--source data.jsonl",), place="stdin"))
    for number, line in enumerate(sys.stdin.buffer, 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            message = f"is not JSON: {error}: {shown(line.decode(errors='replace'))}"
            fixes = ("one JSON value per line: jq -c . does that",)
            raise ConfigError(Problem("DT363", message, fixes=fixes, place=f"stdin:{number}")) from None
