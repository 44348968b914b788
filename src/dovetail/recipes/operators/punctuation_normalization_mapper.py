"""Makes plain punctuation of that of Chinese, of typographers, and of others."""

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
    """Replaces 33 characters. Unlike Data-Juicer's, which makes a quotation mark of it, the wide digit 1 stays."""

    def change(self, text: str) -> str:
        return text if text.isascii() else REPLACEABLE.sub(lambda found: ASCII_FORMS[found[0]], text)
