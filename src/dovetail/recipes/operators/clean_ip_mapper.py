"""Takes IP addresses out of texts, 192.168.0.1 as well as 2001:db8:0:0:0:0:0:1."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.patterns import checked_replacement, compiled

NUMBER = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
OLD = rf"(?<![0-9]){NUMBER}\.{NUMBER}\.{NUMBER}\.{NUMBER}(?![0-9])"
NEW = r"([\da-fA-F]{1,4}:){7}[\da-fA-F]{1,4}"
BOTH = re.compile(f"{OLD}|{NEW}")
ONLY_OLD = re.compile(f"{OLD}|(?!)()")
"""With the same group, to which a replacement may refer."""
HINT = re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]")
"""Quickly found, because it starts with a digit; an old address has it."""
COLONS = 7
"""A new address has so many."""


class CleanIpMapper(TextMapper):
    """Replaces addresses, or whatever `pattern` finds, by `repl`.

    Unlike Data-Juicer's, it cuts no number in two: 256.1.1.1 is no address and stays, where that one leaves a 2 and
    takes 56.1.1.1 away.
    """

    def __init__(self, pattern: str | None = None, repl: str = "") -> None:
        self.pattern = None if pattern is None else compiled("pattern", pattern)
        self.repl = checked_replacement("repl", repl, self.pattern or BOTH)

    def change(self, text: str) -> str:
        if self.pattern:
            return self.pattern.sub(self.repl, text)
        if text.count(":") >= COLONS:
            return BOTH.sub(self.repl, text)
        return ONLY_OLD.sub(self.repl, text) if HINT.search(text) else text
