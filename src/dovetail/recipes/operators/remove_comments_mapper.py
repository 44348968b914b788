"""Remove comments from LaTeX texts."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.parameter_checks import check_texts

INLINE_COMMENT = re.compile(r"(?:\A%|\n|(?<=[^\\\n%])|(?<=\\%))%.+$", re.MULTILINE)
COMMENT_LINE = re.compile(r"^%.*\n?", re.MULTILINE)


class RemoveCommentsMapper(TextMapper):
    r"""Remove text after a % (`inline`), and lines that start with one (`multiline`); `\%` is not a comment.

    Unlike Data-Juicer, Dovetail keeps the character before the %: "50% of" becomes "50", not "5".
    """

    def __init__(self, doc_type: str | list[str] = "tex", inline: bool = True, multiline: bool = True) -> None:
        if set(check_texts("doc_type", doc_type)) != {"tex"}:
            raise ValueError(f"doc_type must be 'tex', the only kind whose comments are known, not {doc_type!r}")
        self.inline = inline
        self.multiline = multiline

    def change(self, text: str) -> str:
        if "%" not in text:
            return text
        if self.inline:
            text = INLINE_COMMENT.sub("", text)
        return COMMENT_LINE.sub("", text) if self.multiline else text
