"""Remove IPv4 and IPv6 addresses from texts."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.regex import check_replacement, compile_pattern

OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
IPV4 = rf"(?<![0-9]){OCTET}\.{OCTET}\.{OCTET}\.{OCTET}(?![0-9])"
IPV6 = r"([\da-fA-F]{1,4}:){7}[\da-fA-F]{1,4}"
IPV4_OR_IPV6 = re.compile(f"{IPV4}|{IPV6}")
IPV4_ONLY = re.compile(f"{IPV4}|(?!)()")
"""With the same groups as above, because a replacement may refer to them."""
IPV4_HINT = re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]")
"""Part of every IPv4 address; fast to find, because it starts with a digit."""
IPV6_COLONS = 7
"""Colons of an IPv6 address."""


class CleanIpMapper(TextMapper):
    """Replace addresses, or matches of `pattern`, by `repl`.

    Unlike Data-Juicer, it does not split numbers: 256.1.1.1 is not an address and is kept, while Data-Juicer removes
    56.1.1.1 and leaves the 2.
    """

    def __init__(self, pattern: str | None = None, repl: str = "") -> None:
        self.pattern = None if pattern is None else compile_pattern("pattern", pattern)
        self.repl = check_replacement("repl", repl, self.pattern or IPV4_OR_IPV6)

    def change(self, text: str) -> str:
        if self.pattern:
            return self.pattern.sub(self.repl, text)
        if text.count(":") >= IPV6_COLONS:
            return IPV4_OR_IPV6.sub(self.repl, text)
        return IPV4_ONLY.sub(self.repl, text) if IPV4_HINT.search(text) else text
