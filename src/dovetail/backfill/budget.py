"""How many rows may fail before a backfill ends?"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.backfill.failures import TOO_MANY
from dovetail.errors import Problem, RunError


@dataclass(frozen=True, slots=True)
class Budget:
    column: str
    limit: int | float | None
    """So many, or this share of them."""
    before: int
    """Rows that failed in earlier calls: a call that is made again must not succeed for that."""
    rows: int
    """That are asked for."""

    def is_over(self, errors: int) -> bool:
        if self.limit is None:
            return False
        return self.before + errors > (self.limit * self.rows if isinstance(self.limit, float) else self.limit)

    def error(self, errors: int) -> RunError:
        limit, column = self.limit or 0, self.column
        allowed = f"{100 * limit:g} % of {self.rows:,} rows" if isinstance(limit, float) else f"{limit:,}"
        message = f"column {column!r}: {self.before + errors:,} rows failed, more than the {allowed} that may"
        earlier = (f"{self.before:,} of them in earlier calls",) if self.before else ()
        fixes = (
            f'table.errors("{column}") says why; table.retry_errors("{column}") computes them again',
            "or a larger max_errors=; what is finished is committed",
        )
        return RunError(Problem(TOO_MANY, message, earlier, fixes))
