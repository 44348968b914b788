"""Filter rows by a number in a field."""

from __future__ import annotations

import math
import sys
from typing import Any

from dovetail.recipes.operators.base import BadField, Filter, Row
from dovetail.recipes.operators.support.fields import FieldReader, check_field_name
from dovetail.recipes.operators.support.text_filters import check_bound


class SpecifiedNumericFieldFilter(Filter):
    """Keep rows whose field is a number, or a string with a number, within bounds. Rows without a number are dropped.

    Two things differ from Data-Juicer. It drops the number 0, whatever the bounds, though it keeps the text "0": here
    0 is a number. And if `field_key` is empty it raises at the first row: here that is said when the operator is made.
    """

    def __init__(
        self,
        *,
        field_key: str = "",
        min_value: float | None = -sys.maxsize,
        max_value: float | None = sys.maxsize,
    ) -> None:
        self.field_key = check_field_name(field_key, needed=True)
        self.low = check_bound("min_value", min_value)
        self.high = check_bound("max_value", max_value)
        self._read = FieldReader(field_key)

    def columns(self) -> tuple[str, ...]:
        return (self.field_key,)

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        if self.field_key not in stats:
            stats[self.field_key] = self._read(row)

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
