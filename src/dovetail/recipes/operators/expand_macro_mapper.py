r"""Expand LaTeX macros: `\newcommand{\name}{value}` and `\def\name{value}`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import BadField, TextMapper
from dovetail.recipes.operators.support.regex import SPACE_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = re.compile(r"\\newcommand\*?\{(\\[a-zA-Z0-9]++)\}\{")
DEFINITION = re.compile(rf"\\def[{SPACE_CLASS}]*+(\\[a-zA-Z0-9]++)[{SPACE_CLASS}]*+\{{")
MAX_EXPANDED_CHARACTERS = 10_000_000
"""Macros that use macros can double a text each time; real texts do not get this long."""
MAX_SCANNED_CHARACTERS = 1_000_000_000
"""Each macro is a pass over the text; this many characters take one or two seconds."""


def macro_definitions(opening: re.Pattern[str], text: str) -> Iterator[tuple[str, str]]:
    """Names and values. A value ends at the brace at the end of its line; without that brace it is not a definition."""
    at = 0
    line_end = -1
    while found := opening.search(text, at):
        start = at = found.end()
        if line_end < start:
            line_end = text.find("\n", start)
            line_end = len(text) if line_end < 0 else line_end
        if line_end > start and text[line_end - 1] == "}":
            yield found[1], text[start : line_end - 1]
            at = line_end


class ExpandMacroMapper(TextMapper):
    """Expand macros without arguments, one after another, also in their definitions, as in Data-Juicer."""

    def change(self, text: str) -> str:
        if "\\newcommand" not in text and "\\def" not in text:
            return text
        macros = dict(macro_definitions(COMMAND, text))
        macros.update(macro_definitions(DEFINITION, text))
        if len(macros) * len(text) > MAX_SCANNED_CHARACTERS:
            raise BadField(f"{len(macros):,} macros in a text of {len(text):,} characters are too many")
        for name, value in macros.items():
            if len(value) * text.count(name) > MAX_EXPANDED_CHARACTERS:
                raise BadField(f"expanded macros exceed {MAX_EXPANDED_CHARACTERS:,} characters")
            # the match includes the character after a name, so of two adjacent names only the first is replaced
            uses = re.compile(re.escape(name) + "([^a-zA-Z0-9])")
            text = uses.sub(value.replace("\\", r"\\") + r"\1", text)
        return text
