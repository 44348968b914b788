"""Advice about roles that request more than they use: CPUs, and GPUs that stay idle. Pure.

Roles that use more than they request are reported by `observe/resource_advice.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dovetail.text_format import format_duration, format_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.observe.telemetry import UnitUse
    from dovetail.resources.shape import Shape

MIN_MEASURED_S = 60.0
"""Minimum time for which a process must be ready before its use is compared with its request."""
MAX_USED_SHARE, MIN_SPARE_CPUS = 0.5, 0.5
"""CPUs are over-requested if less than this share of them is used, and at least this number is not."""
CPU_STEP = 0.25


def usage_advice(
    uses: Mapping[str, UnitUse], shapes: Mapping[str, Shape], ready_s: Mapping[str, float]
) -> tuple[str, ...]:
    """One sentence per kind of process and resource. `ready_s`: kind of process -> how long one of them has been
    ready."""
    found: list[str] = []
    for unit, shape in shapes.items():
        use, seconds = uses.get(unit), ready_s.get(unit, 0.0)
        if use is not None and seconds >= MIN_MEASURED_S:
            found += _idle_gpus(use, shape, seconds)
            found += _spare_cpus(use, shape, seconds)
    return tuple(found)


def _spare_cpus(use: UnitUse, shape: Shape, seconds: float) -> list[str]:
    requested = shape.cpu_milli / 1000
    if use.cpus is None:
        return []
    used = use.cpus / shape.ranks
    if used > MAX_USED_SHARE * requested or requested - used < MIN_SPARE_CPUS:
        return []
    enough = max(1, math.ceil(2 * used / CPU_STEP)) * CPU_STEP
    text = f"uses {format_number(round(used, 2))} of {format_number(requested)} CPUs on average"
    return [f"{use.unit} {text} over {format_duration(seconds)}: Resources(cpus={enough:g}) would be enough"]


def _idle_gpus(use: UnitUse, shape: Shape, seconds: float) -> list[str]:
    """Advice on GPUs whose memory was never used; none if the use of GPUs cannot be measured."""
    if not shape.cards or use.gpu_peak_bytes is None or use.gpu_peak_bytes > 0:
        return []
    gpus = "its GPU" if shape.cards == 1 else f"its {shape.cards} GPUs"
    return [f"{use.unit} has not used {gpus} for {format_duration(seconds)}: request none, or move the model there"]
