"""Remove the bibliography, and all that follows it, from a LaTeX text."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper

OPENING = "\\bibliography{"
BIBLIOGRAPHY_START = re.compile(r"\\(?:appendix|begin\{(?:references|REFERENCES|thebibliography)\}|bibliography\{)")


class RemoveBibliographyMapper(TextMapper):
    """Remove the text from the start of its appendix, references or bibliography."""

    def change(self, text: str) -> str:
        last_brace = -2
        for start in BIBLIOGRAPHY_START.finditer(text):
            if start[0] == OPENING:
                # searched once, from the end: a pattern would scan the text from every start
                last_brace = text.rfind("}") if last_brace == -2 else last_brace
                if last_brace < start.end():
                    continue
            return text[: start.start()]
        return text
