"""Remove everything before the first heading of a LaTeX text."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper

HEADING = re.compile(r"\\(chapter|part|(?:sub){0,2}section|paragraph)\*?([\[{])")
SUBPARAGRAPH = re.compile(r"\}\\subparagraph\*?([\[{])")


class RemoveHeaderMapper(TextMapper):
    r"""Keep the text from its first `\chapter{}`, `\part{}`, `\section{}`, `\subsection{}` or `\subsubsection{}`, each
    optionally with a * and with [...] before the braces; as in Data-Juicer, `\paragraph{}` is a heading only if
    `\subparagraph{}` follows. A text without headings becomes empty (`drop_no_head`) or is kept."""

    def __init__(self, drop_no_head: bool = True) -> None:
        self.drop_no_head = drop_no_head

    def change(self, text: str) -> str:
        ends = _LastClosings(text, text.rfind("}"))
        behind: _LastClosings | None = None
        for heading in HEADING.finditer(text):
            if heading[1] == "paragraph":
                behind = behind or _LastClosings(text, _last_subparagraph(text, ends))
                closed = behind.close(heading)
            else:
                closed = ends.close(heading)
            if closed:
                return text[heading.start() :]
        return "" if self.drop_no_head else text


class _LastClosings:
    """Last possible ends of {...} and [...]{...}: found once per text, not once per heading."""

    def __init__(self, text: str, last: int) -> None:
        self.brace = last
        self.bracket = text.rfind("]{", 0, last) if last >= 0 else -1

    def close(self, opening: re.Match[str]) -> bool:
        return (self.bracket if opening[0][-1] == "[" else self.brace) >= opening.end()


def _last_subparagraph(text: str, ends: _LastClosings) -> int:
    return max((behind.start() for behind in SUBPARAGRAPH.finditer(text) if ends.close(behind)), default=-1)
