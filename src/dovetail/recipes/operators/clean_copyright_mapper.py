"""Remove the copyright notice at the top of source code."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper

NOTICE = re.compile("[Cc][Oo][Pp][Yy][Rr][Ii\u0130][Gg][Hh][Tt]")
COMMENT_LINE = r"(?:#|//|--)[^\n]*+"
TOP_COMMENTS = re.compile(rf"(?:(?:{COMMENT_LINE})?+\n)*+(?:{COMMENT_LINE}\Z)?+")


class CleanCopyrightMapper(TextMapper):
    """Remove the first /* comment */ if it contains "copyright". Without such a comment, remove all lines at the top
    that are empty or start with #, // or --, as Data-Juicer does, including Markdown titles."""

    def change(self, text: str) -> str:
        start = text.find("/*")
        end = text.find("*/", start + 2) if start >= 0 else -1
        if end < 0:
            top = TOP_COMMENTS.match(text)
            return text[top.end() :] if top else text
        end += 2
        return text[:start] + text[end:] if NOTICE.search(text, start, end) else text
