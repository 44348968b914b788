"""Advice for stages whose workers use more CPUs or memory than they request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.resources.sizes import format_exact_size, format_size
from dovetail.text_format import format_number

if TYPE_CHECKING:
    from dovetail.observe.telemetry import UnitUse

CPU_TOLERANCE_FACTOR, CPU_TOLERANCE = 1.25, 0.25
"""Up to 1.25 times the requested CPUs, plus a quarter, is noise."""
MEMORY_MARGIN_FACTOR = 1.15
REPEAT_GROWTH_FACTOR = 2.0
"""Repeat advice when the value has grown by this factor."""
MB, GB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class RequestedResources:
    """The request of a worker as written by the user; of a gang, that of each rank."""

    cpus: float
    memory_bytes: int | None = None
    """None: no memory requested."""
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Advice:
    unit: str
    about: str
    """cpus or memory."""
    used: float
    text: str
    """The reason and the change, as Python."""
    reason: str = ""
    value: str | float | None = None
    """The request to write instead."""


class Adviser:
    """Gives each piece of advice once."""

    def __init__(self) -> None:
        self._reported_use: dict[tuple[str, str], float] = {}

    def new_advice(self, use: UnitUse, asked: RequestedResources) -> list[Advice]:
        """Advice for this unit that is new or whose value has doubled."""
        fresh = [
            it
            for it in find_overuse(use, asked)
            if it.used >= REPEAT_GROWTH_FACTOR * self._reported_use.get((it.unit, it.about), 0.0)
        ]
        self._reported_use |= {(it.unit, it.about): it.used for it in fresh}
        return fresh


def overuse_texts(use: UnitUse, asked: RequestedResources) -> list[str]:
    """Resources of which the workers of a unit use more than requested, and the request to write instead; one sentence
    each."""
    return [it.text for it in find_overuse(use, asked)]


def find_overuse(use: UnitUse, asked: RequestedResources) -> list[Advice]:
    each = "worker" if asked.ranks == 1 else "rank"
    return [*_cpu_overuse(use, asked, each), *_memory_overuse(use, asked, each)]


def _cpu_overuse(use: UnitUse, asked: RequestedResources, each: str) -> list[Advice]:
    if use.cpus_recent is None or use.cpus_least is None:
        return []
    if use.cpus_least / asked.ranks <= CPU_TOLERANCE_FACTOR * asked.cpus + CPU_TOLERANCE:
        return []
    used = use.cpus_recent / asked.ranks
    text = (
        f"stage {use.unit} uses {format_number(round(used, 1))} CPUs per {each} and requests "
        f"{format_number(float(asked.cpus))}"
    )
    cpus = _suggested_cpus(used)
    return [Advice(use.unit, "cpus", used, f"{text}: Resources(cpus={cpus:g})", text, cpus)]


def _memory_overuse(use: UnitUse, asked: RequestedResources, each: str) -> list[Advice]:
    peak = use.peak_bytes / asked.ranks
    if asked.memory_bytes is None or peak <= asked.memory_bytes:
        return []
    shown = f"peak memory {format_size(round(peak))} per {each}, requested {format_size(asked.memory_bytes)}"
    reason, memory = f"stage {use.unit}: {shown}", format_exact_size(_suggested_memory_bytes(peak))
    return [Advice(use.unit, "memory", peak, f'{reason}: Resources(memory="{memory}")', reason, memory)]


def _suggested_cpus(used: float) -> float:
    """Rounded to halves, from 4 on to whole numbers."""
    step = 0.5 if used < 4 else 1.0
    return max(step, math.floor(used / step + 0.5) * step)


def _suggested_memory_bytes(peak_bytes: float) -> int:
    """Rounded, with a margin."""
    step = 128 * MB if peak_bytes < GB else GB // 2 if peak_bytes < 4 * GB else GB
    return math.ceil(MEMORY_MARGIN_FACTOR * peak_bytes / step) * step
