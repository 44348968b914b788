"""What are the lines of a text? As Python parts them, at every kind of line end; a text without any has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dovetail.recipes.operators.figures import FigureFilter
from dovetail.recipes.operators.shared import shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.worker import Worker


class LineFilter(FigureFilter):
    """A filter whose figure is about the lines of a text."""

    shares: ClassVar[tuple[str, ...]] = ("lines",)
    lines: Callable[[str], list[str]] = staticmethod(str.splitlines)

    def setup(self, worker: Worker) -> None:  # noqa: ARG002
        self.lines = shared("lines", str.splitlines) if self.sharing else str.splitlines
