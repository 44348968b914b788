"""Remove repeated sentences from texts."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.parameter_checks import ADAPTER_HINT, NeedsDataJuicer, check_int

SENTENCE_END = re.compile("([.。！!？?])([^’”])")  # noqa: RUF001
ELLIPSIS_END = re.compile("(…{2})([^’”])")  # noqa: RUF001
QUOTED_SENTENCE_END = re.compile("([.。!！？?{6}…2][’”])([^’”])")  # noqa: RUF001
SPECIAL_CHARACTERS = re.compile(r"[^a-zA-Z0-9\u4e00-\u9fa5\n\t ]+")


def split_sentences(line: str) -> list[str]:
    """Parts of a line that end with a full stop or similar, or with a quotation mark after it.

    Data-Juicer's rule for six full stops in a row is left out, because it never applies: its first step separates them.
    """
    line = SENTENCE_END.sub(r"\1\n\2", line)
    if "……" in line:
        line = ELLIPSIS_END.sub(r"\1\n\2", line)
    if "’" in line or "”" in line:  # noqa: RUF001
        line = QUOTED_SENTENCE_END.sub(r"\1\n\2", line)
    return line.split("\n")


class RemoveRepeatSentencesMapper(TextMapper):
    """Keep the first of equal sentences, and all that are shorter than `min_repeat_sentence_length`. As in Data-Juicer,
    a full stop inside a number ends a sentence, too."""

    def __init__(
        self,
        lowercase: bool = False,
        ignore_special_character: bool = True,
        min_repeat_sentence_length: int = 2,
        tokenizer: str | None = None,
    ) -> None:
        if tokenizer is not None:
            raise NeedsDataJuicer(
                f"tokenizer is not supported, because Dovetail does not run code from a recipe; {ADAPTER_HINT}"
            )
        self.lowercase = lowercase
        self.ignore_special_character = ignore_special_character
        self.min_repeat_sentence_length = check_int("min_repeat_sentence_length", min_repeat_sentence_length)

    def change(self, text: str) -> str:
        seen: set[str] = set()
        return "\n".join(["".join(self._new(line, seen)) for line in text.split("\n")])

    def _new(self, line: str, seen: set[str]) -> list[str]:
        kept = []
        for sentence in split_sentences(line):
            compared = sentence.strip()
            if self.lowercase:
                compared = compared.lower()
            if self.ignore_special_character:
                compared = SPECIAL_CHARACTERS.sub("", compared)
            if len(compared) >= self.min_repeat_sentence_length:
                if compared in seen:
                    continue
                seen.add(compared)
            kept.append(sentence)
        return kept
