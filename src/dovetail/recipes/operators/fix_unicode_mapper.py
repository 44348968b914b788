"""Repair texts decoded with the wrong encoding, and normalise Unicode."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.parameter_checks import check_choice, check_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.worker_context import Worker

MAYBE_BROKEN = re.compile(r"[^\t\n -%'-~]")
"""ASCII texts without entities and control characters never change, in any normal form."""
NORMAL_FORMS = ("NFC", "NFKC", "NFD", "NFKD")


class FixUnicodeMapper(TextMapper):
    """Apply `ftfy.fix_text`, with one of the four Unicode normal forms (default NFC)."""

    extra: ClassVar[str] = "recipes"
    needs: ClassVar[tuple[str, ...]] = ("ftfy",)

    def __init__(self, normalization: str | None = None) -> None:
        form = check_text("normalization", normalization or "NFC").upper()
        self.normalization = check_choice("normalization", form, NORMAL_FORMS)
        self.fix: Callable[..., str] | None = None

    def setup(self, worker: Worker) -> None:  # noqa: ARG002
        self._load()

    def _load(self) -> Callable[..., str]:
        import ftfy

        self.fix = ftfy.fix_text
        return self.fix

    def change(self, text: str) -> str:
        if not MAYBE_BROKEN.search(text):
            return text
        return (self.fix or self._load())(text, normalization=self.normalization)
