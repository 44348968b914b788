"""Filter rows by a number in a field."""

from __future__ import annotations

import math
import sys
from typing import Any

from dovetail.recipes.operators.base import BadField, Row
from dovetail.recipes.operators.support.fields import FieldFilter
from dovetail.recipes.operators.support.parameter_checks import check_bound


class SpecifiedNumericFieldFilter(FieldFilter):
    """Keep rows whose field is a number, or a string with a number, within bounds. Rows without a number are dropped.

    Two differences to Data-Juicer: it always drops the number 0, but not the string "0"; and an empty `field_key` is an
    error at the first row there, and before the run here.
    """

    def __init__(
        self,
        *,
        field_key: str = "",
        min_value: float | None = -sys.maxsize,
        max_value: float | None = sys.maxsize,
    ) -> None:
        super().__init__(field_key)
        self.low = check_bound("min_value", min_value)
        self.high = check_bound("max_value", max_value)

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        value = stats[self.field_key]
        if value is None:
            return False
        try:
            number = float(value)
        except ValueError:
            return False
        except OverflowError:
            number = math.inf if value > 0 else -math.inf
        except TypeError:
            raise BadField(f"field {self.field_key!r} is {type(value).__name__}, not a number") from None
        return self.in_range(number, self.low, self.high)
