"""Remove tables from texts: consecutive lines with the same number of columns."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.parameter_checks import check_int
from dovetail.recipes.operators.support.regex import SPACE_CLASS

LINE_AND_LINE_ENDS = re.compile(r"([^\n]+)(\n*)")
ROW = re.compile(rf"[^{SPACE_CLASS}]+(?:[ \t][^{SPACE_CLASS}]+)*+")
BAR = re.compile(rf"[^{SPACE_CLASS}]\|(?=[^{SPACE_CLASS}])")
MIN_LINE_ENDS = 3
"""One before a table, and one at each end of its two rows."""
MIN_COLUMNS, MAX_COLUMNS = 2, 20


class _Line:
    """A line with its line ends, and the minimum and maximum number of separators in it."""

    __slots__ = ("least", "most", "text")

    def __init__(self, text: str, ends: str) -> None:
        self.text = text + ends
        self.least, self.most = 1, 0
        if ends and ROW.fullmatch(text):
            self.least = text.count(" ") + text.count("\t")
            # a bar may be a separator or a part of a cell
            self.most = self.least + (len(BAR.findall(text)) if "|" in text else 0)


class RemoveTableTextMapper(TextMapper):
    """Remove two or more rows of `min_col` to `max_col` columns, separated by a space, a tab or a bar.

    Data-Juicer's pattern tries all ways to divide a line; here each line is measured once.
    """

    def __init__(self, min_col: int = MIN_COLUMNS, max_col: int = MAX_COLUMNS) -> None:
        self.min_col = check_int("min_col", min_col, MIN_COLUMNS, MAX_COLUMNS)
        self.max_col = check_int("max_col", max_col, MIN_COLUMNS, MAX_COLUMNS)
        if min_col > max_col:
            raise ValueError(f"min_col {min_col} must not be greater than max_col {max_col}")

    def change(self, text: str) -> str:
        if text.count("\n") < MIN_LINE_ENDS:
            return text
        first = len(text) - len(text.lstrip("\n"))
        lines = [_Line(*found) for found in LINE_AND_LINE_ENDS.findall(text, first)]
        if first == 0 and lines:
            # it is the first line, so at most the heading of a table
            lines[0].least, lines[0].most = 1, 0
        count = len(lines)
        for separators in range(self.min_col - 1, self.max_col):
            lines = _without_tables(lines, separators)
        return text if len(lines) == count else text[:first] + "".join(line.text for line in lines)


def _without_tables(lines: list[_Line], separators: int) -> list[_Line]:
    kept: list[_Line] = []
    rows: list[_Line] = []
    for line in lines:
        if line.least <= separators <= line.most:
            rows.append(line)
            continue
        if len(rows) == 1:
            kept += rows
        rows = []
        kept.append(line)
    return kept + rows if len(rows) == 1 else kept
