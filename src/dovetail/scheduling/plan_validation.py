"""Check the data of a plan file before a plan is made from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dovetail.documents.document import Document
from dovetail.documents.validation import validate_document
from dovetail.errors import ConfigError, Problem
from dovetail.scheduling.plan import PLAN_VERSION

MAX_INTEGER = 1 << 62


@dataclass(frozen=True)
class ShapeEntry:
    kind: str
    cpu_milli: int
    memory_bytes: int
    cards: int
    gpu_milli: int
    gpu_memory_bytes: int
    nvdecs: int
    nvencs: int
    accelerators: list[str]
    labels: dict[str, list[str]]
    custom: dict[str, int]
    ranks: int


@dataclass(frozen=True)
class UnitEntry:
    name: str
    stages: list[str]
    shape: ShapeEntry
    workers: int
    rate: float
    rate_source: str
    per_source: float
    wave: int
    low: int
    high: int | None
    per_node: int | None
    barrier: bool
    cpu_s: float | None


@dataclass(frozen=True)
class UseEntry:
    used: int
    total: int


@dataclass(frozen=True)
class ShareEntry:
    card: int
    milli: int
    memory_bytes: int
    nvdecs: int
    nvencs: int


@dataclass(frozen=True)
class SeatEntry:
    node: str
    cpu_milli: int
    memory_bytes: int
    cards: list[ShareEntry]
    custom: dict[str, int]


@dataclass(frozen=True)
class PlanFile:
    version: int
    name: str
    mode: str
    requested: str
    reason: str
    rate: float | None
    bound: float | None
    bottleneck: str | None
    binding: str | None
    units: list[UnitEntry]
    use: dict[str, UseEntry]
    fragmentation: float
    idle_gpus: int
    headroom: float
    assumptions: list[str]
    warnings: list[str]
    phases: list[str]
    source_rate: float | None
    cluster: dict[str, Any]
    seats: dict[str, list[SeatEntry]]


def check_plan_data(data: object) -> dict[str, Any]:
    """The data of a plan, of the right form and with numbers in range; else a ConfigError that says what is wrong."""
    if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
        version = data.get("version") if isinstance(data, dict) else type(data).__name__
        raise invalid_plan_error([f"its version is {version!r}, not {PLAN_VERSION}"])
    try:
        written = validate_document(Document("plan", data), PlanFile, ignore_unknown=True)
    except ConfigError as error:
        raise invalid_plan_error([problem.message for problem in error.problems]) from None
    wrong = [*_number_errors(data, "plan"), *_consistency_errors(written)]
    if wrong:
        raise invalid_plan_error(wrong)
    return data


def invalid_plan_error(why: list[str]) -> ConfigError:
    shown = tuple(why[:8]) + ((f"and {len(why) - 8} more",) if len(why) > 8 else ())
    return ConfigError(Problem("DT038", "this is not a plan", shown, ("dovetail plan FILE --out plan.json",)))


def _number_errors(value: object, path: str) -> list[str]:
    """Every number is finite, not negative and not absurd."""
    if isinstance(value, dict):
        return [line for key, inner in value.items() for line in _number_errors(inner, f"{path}.{key}")]
    if isinstance(value, list):
        return [line for number, inner in enumerate(value) for line in _number_errors(inner, f"{path}[{number}]")]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    if isinstance(value, float):
        return [] if math.isfinite(value) and value >= 0 else [f"{path} is out of range"]
    return [] if 0 <= value <= MAX_INTEGER else [f"{path} is out of range"]


def _consistency_errors(plan: PlanFile) -> list[str]:
    """What the form does not show: units that are complete, and numbers that belong together."""
    wrong = []
    stages = [stage for unit in plan.units for stage in unit.stages]
    waves = sorted({unit.wave for unit in plan.units})
    if not plan.units or not all(unit.stages for unit in plan.units) or len(set(stages)) < len(stages):
        wrong.append("its units have no stages, or share some")
    if waves != list(range(len(waves))):
        wrong.append("its waves are not numbered from 0 on")
    wrong += [
        f"the barrier {barrier.name} is not alone in its wave, or has several workers"
        for barrier in plan.units
        if barrier.barrier and (barrier.workers > 1 or sum(unit.wave == barrier.wave for unit in plan.units) > 1)
    ]
    if plan.requested not in ("auto", "streaming", "sequential", "waves"):
        wrong.append(f"{plan.requested!r} is not a mode")
    if any(value is not None and value <= 0 for value in (plan.rate, plan.bound)):
        wrong.append("its rate or bound is not above 0")
    if any(use.total < use.used or not use.total for use in plan.use.values()):
        wrong.append("more is in use than there is")
    for unit in plan.units:
        wrong += _unit_errors(unit)
        for stage in unit.stages:
            if len(plan.seats.get(stage, ())) != unit.workers * unit.shape.ranks:
                wrong.append(f"{stage} has not as many seats as processes")
    if set(plan.seats) != set(stages):
        wrong.append("it has seats for other stages than it has units")
    return wrong


def _unit_errors(unit: UnitEntry) -> list[str]:
    shape = unit.shape
    fine = unit.rate > 0 and unit.workers >= 1 and unit.low >= 1 and shape.ranks >= 1
    fine = fine and (unit.high is None or unit.high >= unit.low) and (unit.per_node is None or unit.per_node >= 1)
    fine = fine and shape.gpu_milli <= 1000 and (shape.cards > 0) == (shape.kind != "cpu only")
    sized = shape.kind != "fractional gpu" or shape.gpu_milli or shape.gpu_memory_bytes
    codecs = shape.kind != "codec" or shape.nvdecs or shape.nvencs
    return [] if fine and sized and codecs else [f"the numbers of {unit.name} contradict each other"]
