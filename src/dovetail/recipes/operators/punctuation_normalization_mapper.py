"""Replace Chinese, typographic and other punctuation by ASCII punctuation."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper

ASCII_FORMS = {
    **dict.fromkeys("„”“«»」「《》", '"'),
    **dict.fromkeys("´’", "'"),  # noqa: RUF001
    **dict.fromkeys("，、", ","),  # noqa: RUF001
    **dict.fromkeys("∶：", ":"),  # noqa: RUF001
    **dict.fromkeys("–━►", "-"),  # noqa: RUF001
    **dict(zip("。？！（）；～〈〉【】％", ".?!();~<>[]%", strict=True)),  # noqa: RUF001
    "—": " - ",
    "．": ". ",  # noqa: RUF001
    "…": "...",
}
REPLACEABLE = re.compile(f"[{''.join(ASCII_FORMS)}]")


class PunctuationNormalizationMapper(TextMapper):
    """Replace 33 characters. Data-Juicer also replaces the full-width digit 1 by a quotation mark; Dovetail does
    not."""

    def change(self, text: str) -> str:
        return text if text.isascii() else REPLACEABLE.sub(lambda found: ASCII_FORMS[found[0]], text)
