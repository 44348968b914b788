"""Split texts into chunks: at a pattern, at a length, or at the last pattern before a length."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Any

from dovetail.recipes.operators.base import Mapper, Row
from dovetail.recipes.operators.support.parameter_checks import ADAPTER_HINT, NeedsDataJuicer, check_int, check_text

if TYPE_CHECKING:
    from collections.abc import Iterator


class TextChunkMapper(Mapper):
    """Return a row per chunk, with copies of all other fields.

    With a pattern only, chunks of white space are dropped, and so is a row without other chunks. With a length, a chunk
    starts `overlap_len` characters before the end of the previous one. Patterns are those of Python's `re`.
    """

    def __init__(
        self,
        max_len: int | None = None,
        split_pattern: str | None = "\\n\\n",
        overlap_len: int = 0,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if tokenizer is not None:
            raise NeedsDataJuicer(f"tokenizer {tokenizer!r} is a model, which Data-Juicer downloads; {ADAPTER_HINT}")
        if max_len is None and split_pattern is None:
            raise ValueError("max_len and split_pattern must not both be null: give at least one")
        self.max_len = None if max_len is None else check_int("max_len", max_len, 1)
        self.overlap_len = check_int("overlap_len", overlap_len, 0)
        if max_len is not None and overlap_len >= max_len:
            raise ValueError(f"overlap_len {overlap_len} must be less than max_len {max_len}")
        self.pattern = None if split_pattern is None else _compile_split_pattern(split_pattern)
        self.trust_remote_code = trust_remote_code

    def __call__(self, row: Row) -> Iterator[Row]:
        return self._rows(row, self.pieces(self.text_of(row)))

    def _rows(self, row: Row, pieces: list[str]) -> Iterator[Row]:
        for piece in pieces[:-1]:
            copy = {field: copy_value(value) for field, value in row.items()}
            copy[self.text_key] = piece
            yield copy
        if pieces:
            row[self.text_key] = pieces[-1]
            yield row

    def pieces(self, text: str) -> list[str]:
        if self.max_len is None:
            assert self.pattern is not None
            return [piece for piece in self.pattern.split(text) if piece is not None and piece.strip()]
        if len(text) <= self.max_len:
            return [text]
        if self.pattern is None:
            step = self.max_len - self.overlap_len
            return [text[start : start + self.max_len] for start in range(0, len(text), step)]
        return self._pieces_at_patterns(text, self.pattern, self.max_len)

    def _pieces_at_patterns(self, text: str, pattern: re.Pattern[str], max_len: int) -> list[str]:
        pieces = []
        at = 0
        while len(text) - at > max_len:
            piece = text[at : at + max_len]
            found = deque(pattern.finditer(piece), maxlen=1)
            if found and found[0].end() > 0:
                piece = piece[: found[0].start()]
                at += found[0].end()
            else:
                # an empty match at the start would repeat without end
                at += max_len - self.overlap_len
            pieces.append(piece)
        return [*pieces, text[at:]]


def copy_value(value: Any) -> Any:
    """A deep copy of lists and mappings, because later operators change rows in place."""
    if isinstance(value, dict):
        return {key: copy_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [copy_value(inner) for inner in value]
    return value


def _compile_split_pattern(pattern: object) -> re.Pattern[str]:
    checked = check_text("split_pattern", pattern)
    try:
        return re.compile(checked)
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}: {checked[error.pos : error.pos + 20]!r}"
        raise ValueError(f"split_pattern {pattern!r} is not a regular expression: {error.msg}{where}") from None
