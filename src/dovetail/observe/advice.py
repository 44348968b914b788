"""Do workers use more than they asked for, and what should they ask for instead?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.observe.words import number
from dovetail.resources.sizes import about_size, exact_size

if TYPE_CHECKING:
    from dovetail.observe.use import UnitUse

CPUS_FACTOR, CPUS_MORE = 1.25, 0.25
"""Up to 1.25 times as many CPUs as asked for, and a quarter, is noise."""
MEMORY_MARGIN = 1.15
AGAIN = 2.0
"""What was said is said again when it has grown to so many times as much."""
MB, GB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Asked:
    """What a worker asked for, as its author wrote it: for a gang, what each rank asked for."""

    cpus: float
    memory_bytes: int | None = None
    """None: nothing was said about memory."""
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Advice:
    unit: str
    about: str
    """cpus or memory."""
    used: float
    text: str


class Adviser:
    """Says everything once."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], float] = {}

    def news(self, use: UnitUse, asked: Asked) -> list[Advice]:
        """What was not said yet of this unit, or has doubled since."""
        fresh = [it for it in advice_on(use, asked) if it.used >= AGAIN * self._said.get((it.unit, it.about), 0.0)]
        self._said |= {(it.unit, it.about): it.used for it in fresh}
        return fresh


def overuse(use: UnitUse, asked: Asked) -> list[str]:
    """In what the workers of a unit use more than they asked for, and what to write instead: one sentence each."""
    return [it.text for it in advice_on(use, asked)]


def advice_on(use: UnitUse, asked: Asked) -> list[Advice]:
    each = "worker" if asked.ranks == 1 else "rank"
    return [*_on_cpus(use, asked, each), *_on_memory(use, asked, each)]


def _on_cpus(use: UnitUse, asked: Asked, each: str) -> list[Advice]:
    if use.cpus_recent is None or use.cpus_least is None:
        return []
    if use.cpus_least / asked.ranks <= CPUS_FACTOR * asked.cpus + CPUS_MORE:
        return []
    used = use.cpus_recent / asked.ranks
    text = f"stage {use.unit} uses {number(round(used, 1))} CPUs per {each} and asked for {number(float(asked.cpus))}"
    return [Advice(use.unit, "cpus", used, f"{text}: Resources(cpus={_enough_cpus(used):g})")]


def _on_memory(use: UnitUse, asked: Asked, each: str) -> list[Advice]:
    peak = use.peak_bytes / asked.ranks
    if asked.memory_bytes is None or peak <= asked.memory_bytes:
        return []
    shown = f"peak memory {about_size(round(peak))} per {each}, asked for {about_size(asked.memory_bytes)}"
    text = f'stage {use.unit}: {shown}: Resources(memory="{exact_size(_enough_memory(peak))}")'
    return [Advice(use.unit, "memory", peak, text)]


def _enough_cpus(used: float) -> float:
    """To the nearest half, from 4 on to the nearest whole."""
    step = 0.5 if used < 4 else 1.0
    return max(step, math.floor(used / step + 0.5) * step)


def _enough_memory(peak_bytes: float) -> int:
    """With a margin, and round."""
    step = 128 * MB if peak_bytes < GB else GB // 2 if peak_bytes < 4 * GB else GB
    return math.ceil(MEMORY_MARGIN * peak_bytes / step) * step
