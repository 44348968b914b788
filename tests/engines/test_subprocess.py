"""Does a stream of items survive the deaths of real processes?"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from dovetail.control.commands import Hosted
from dovetail.control.loop import drive
from engines.naive_controller import NaiveController
from engines.subprocess_engine import ListData, SubprocessEngine

if TYPE_CHECKING:
    from pathlib import Path


class DiesOnceAt:
    """Doubles numbers; the first to come to one of these kills its process, and leaves a mark."""

    def __init__(self, numbers: set[int], folder: Path) -> None:
        self._numbers = numbers
        self._folder = folder

    def __call__(self, items: list[int]) -> list[int]:
        for item in items:
            mark = self._folder / str(item)
            if item in self._numbers and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return [2 * item for item in items]


def test_killed_processes_lose_no_item(tmp_path: Path) -> None:
    engine = SubprocessEngine()
    data = ListData(engine, range(2000), segment_items=50)
    controller = NaiveController(
        Hosted("a", DiesOnceAt({0, 77, 1000, 1999}, tmp_path)), workers=2, items=2000, batch_size=7
    )
    try:
        assert drive(controller, engine, data) == []
    finally:
        engine.close()
    assert sorted(data.outputs["a"]) == [2 * number for number in range(2000)]
    assert controller.deaths == 4
