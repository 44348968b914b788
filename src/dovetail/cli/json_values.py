"""Results of pipelines as JSON."""

from __future__ import annotations

from typing import Any


def json_default(value: Any) -> Any:
    """`default` of `json.dumps`: converts values of numpy, dates and times."""
    for name in ("tolist", "isoformat"):
        convert = getattr(value, name, None)
        if callable(convert):
            return convert()
    raise TypeError(f"{type(value).__name__} is not JSON")
