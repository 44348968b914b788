"""Convert HTML to plain text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.recipes.operators.base import BadField, TextMapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.worker_context import Worker

OPTIONAL_END_TAGS = (
    "area|base|br|col|dd|dt|embed|hr|img|input|li|link|meta|option|p|param|source|tbody|td|tfoot|th|thead|tr|track|wbr"
)
OPENING_TAG = re.compile(rf"<(?!(?:{OPTIONAL_END_TAGS})\b)[a-z]", re.IGNORECASE)
MAX_OPEN_ELEMENTS = 20_000
"""The time of the parser grows with the square of the open elements; this many take half a second."""


class CleanHtmlMapper(TextMapper):
    """Remove all tags and keep their contents, with a star before the items of a list. As in Data-Juicer, the contents
    of scripts and styles stay, and blocks are joined without a space."""

    extra: ClassVar[str] = "recipes"
    needs: ClassVar[tuple[str, ...]] = ("selectolax",)

    def __init__(self) -> None:
        self.parse: Callable[[str], Any] | None = None

    def setup(self, worker: Worker) -> None:  # noqa: ARG002
        self._load()

    def _load(self) -> Callable[[str], Any]:
        from selectolax.lexbor import LexborHTMLParser

        self.parse = LexborHTMLParser
        return self.parse

    def change(self, text: str) -> str:
        parse = self.parse or self._load()
        if text.count("<") > MAX_OPEN_ELEMENTS:
            unclosed = len(OPENING_TAG.findall(text)) - text.count("</")
            if unclosed > MAX_OPEN_ELEMENTS:
                raise BadField(
                    f"{unclosed:,} elements of HTML are never closed; the most that can be read is "
                    f"{MAX_OPEN_ELEMENTS:,}"
                )
        text = text.replace("<li>", "\n*").replace("</li>", "").replace("<ol>", "\n*").replace("</ol>", "")
        plain: str = parse(text).text()
        return plain
