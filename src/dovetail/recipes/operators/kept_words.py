"""What is left of a text if some of its words go? The others, in their lines, with one space or tab between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.recipes.operators.characters import SPECIAL

if TYPE_CHECKING:
    from collections.abc import Callable


def words_kept(text: str, keeps: Callable[[str], bool] | None) -> str:
    """Lines, cells between tabs and words that are empty, or become it, go with their separators."""
    if keeps is None and "  " not in text and "\n" not in text and "\t" not in text:
        return text.strip(" ")
    lines = []
    for line in text.split("\n"):
        if "\t" in line:
            cells = [_cell(cell, keeps) for cell in line.split("\t")]
            kept = "\t".join([cell for cell in cells if cell])
        else:
            kept = _cell(line, keeps)
        if kept:
            lines.append(kept)
    return "\n".join(lines)


def _cell(cell: str, keeps: Callable[[str], bool] | None) -> str:
    words = cell.split(" ")
    if keeps is None:
        return " ".join([word for word in words if word])
    return " ".join([word for word in words if word and keeps(word)])


def stripped(word: str) -> str:
    """Without the special characters at both ends."""
    start, end = 0, len(word)
    while start < end and word[start] in SPECIAL:
        start += 1
    while end > start and word[end - 1] in SPECIAL:
        end -= 1
    return word[start:end]
