"""Replace matches of regular expressions in texts."""

from __future__ import annotations

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.parameter_checks import check_texts
from dovetail.recipes.operators.support.regex import check_replacement, compile_pattern


class ReplaceContentMapper(TextMapper):
    """Apply the patterns in order, each with its replacement, or all with a single one."""

    def __init__(self, pattern: str | list[str] | None = None, repl: str | list[str] = "") -> None:
        patterns = [] if pattern is None else check_texts("pattern", pattern)
        replacements = [repl] * len(patterns) if isinstance(repl, str) else check_texts("repl", repl)
        if patterns and len(replacements) != len(patterns):
            raise ValueError(
                f"pattern and repl must have the same length: there are {len(patterns)} patterns and "
                f"{len(replacements)} replacements"
            )
        self.steps = []
        for number, (one, replacement) in enumerate(zip(patterns, replacements, strict=False)):
            name, other = ("pattern", "repl") if isinstance(pattern, str) else (f"pattern[{number}]", f"repl[{number}]")
            ready = compile_pattern(name, one)
            self.steps.append((ready, check_replacement(other, replacement, ready)))

    def change(self, text: str) -> str:
        for pattern, replacement in self.steps:
            text = pattern.sub(replacement, text)
        return text
