"""Utilisation verdicts per operator (under-utilised, over-utilised, CPU-bottlenecked) and what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.observe.monitor import resource_analysis
from dovetail.observe.run_folder import number_field, read_json_object
from dovetail.observe.summary import summarize_run
from dovetail.observe.text_format import format_count, format_number, format_percent
from dovetail.resources.sizes import format_exact_size, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.observe.history import RunHistory
    from dovetail.observe.monitor import OperatorUsage
    from dovetail.observe.summary import UnitSummary

LOW_UTILISATION = 0.5
"""A card, or a worker, that is busy for less than this could do more."""
HIGH_UTILISATION = 0.85
FULL_MEMORY_SHARE = 0.95
MEMORY_MARGIN = 1.15
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: str
    why: str
    """The figures."""
    change: str = ""
    """What to do; nothing, if it is well as it is."""


@dataclass(frozen=True, slots=True)
class _Requested:
    cpus: float
    memory_bytes: int


def operator_verdicts(history: RunHistory, operators: Sequence[OperatorUsage]) -> list[Verdict]:
    """One per operator."""
    units = {unit.name: unit for unit in summarize_run(history).units}
    asked = _requested_by_unit(read_json_object(history.folder.plan))
    found = []
    for operator in operators:
        there = [units[name] for name in operator.units if name in units]
        if not there or not operator.rows_in:
            found.append(Verdict("did not run", "no row came to it"))
            continue
        # of a deduplicator, where it spent most of its time
        unit = max(there, key=lambda one: sum(stage.seconds for stage in one.stages if stage.name in operator.stages))
        found.append(_operator_verdict(history, operator, unit, asked.get(unit.name, _Requested(1.0, 0))))
    return found


def _requested_by_unit(plan: Mapping[str, Any]) -> dict[str, _Requested]:
    units = plan.get("units")
    found = {}
    for unit in units if isinstance(units, list) else ():
        shape = unit.get("shape") if isinstance(unit, dict) else None
        if isinstance(shape, dict):
            ranks = max(1.0, number_field(shape, "ranks"))
            cpus, memory = (
                number_field(shape, "cpu_milli") * ranks / 1000,
                int(number_field(shape, "memory_bytes") * ranks),
            )
            found[str(unit.get("name"))] = _Requested(cpus, memory)
    return found


def _operator_verdict(history: RunHistory, operator: OperatorUsage, unit: UnitSummary, asked: _Requested) -> Verdict:
    figures = resource_analysis(operator.samples)
    over = _overuse_verdict(history, operator, unit, asked, figures)
    if over is not None:
        return over
    cards = figures.get("GPU util.")
    return _card_verdict(cards["avg"], unit, asked) if cards else _cpu_verdict(history, operator, unit, asked)


def _overuse_verdict(
    history: RunHistory,
    operator: OperatorUsage,
    unit: UnitSummary,
    asked: _Requested,
    figures: Mapping[str, Mapping[str, float]],
) -> Verdict | None:
    kind = "over-utilised"
    lives = [life for life in history.worker_lifetimes.values() if life.unit == unit.name and life.end == "lost"]
    ran_out = sum(life.why.startswith("out of memory") for life in lives)
    if ran_out:
        why = f"{format_count(ran_out, 'worker')} ran out of memory"
        return Verdict(kind, why, "fewer workers (num_proc), a larger num_gpus per worker, or a larger memory")
    totals = [total for sample in operator.samples for total in sample.get("GPU total mem.", ())]
    used = figures.get("GPU used mem.", {}).get("max", 0.0)
    if totals and used >= FULL_MEMORY_SHARE * max(totals):
        why = f"its cards hold up to {format_size(round(used * MB))} of {format_size(round(max(totals) * MB))}"
        return Verdict(kind, why, "fewer workers (num_proc), a larger num_gpus per worker, or a larger memory")
    if asked.memory_bytes and unit.peak_bytes and unit.peak_bytes > asked.memory_bytes and not operator.gpus:
        enough = format_exact_size(math.ceil(MEMORY_MARGIN * unit.peak_bytes / (128 * MB)) * 128 * MB)
        why = f"a worker had {format_size(unit.peak_bytes)} and asked for {format_size(asked.memory_bytes)}"
        return Verdict(kind, why, f"memory: '{enough}'")
    return None


def _card_verdict(use: float, unit: UnitSummary, asked: _Requested) -> Verdict:
    if use >= LOW_UTILISATION:
        return Verdict("well used", f"its cards were busy {format_percent(use)} of the time")
    each = unit.cpus
    if each is not None and asked.cpus and each >= HIGH_UTILISATION * asked.cpus:
        why = (
            f"its cards were busy {format_percent(use)} of the time, while a worker used "
            f"{_cpus_text(each)} of {_cpus_text(asked.cpus)}"
        )
        more = math.ceil(2 * asked.cpus)
        return Verdict(
            "CPU-bottlenecked", why, f"num_cpus: {more} for it, or fewer workers of CPU operators (num_proc)"
        )
    why = f"its cards were busy {format_percent(use)} of the time"
    change = f"more workers (num_proc: {2 * max(1, unit.most_workers)}), a larger batch_size, or fewer num_cpus"
    return Verdict("under-utilised", why, change)


def _cpu_verdict(history: RunHistory, operator: OperatorUsage, unit: UnitSummary, asked: _Requested) -> Verdict:
    busy, each = min(1.0, unit.busy or 0.0), unit.cpus if operator.measured else None
    workers = max(1, unit.most_workers)
    if unit.busy is None:
        return Verdict("too short to tell", "its workers were not seen at work")
    if busy >= LOW_UTILISATION and each is not None and each < LOW_UTILISATION * busy * min(1.0, asked.cpus or 1.0):
        why = f"its workers were in its code {format_percent(busy)} of the time, and used {_cpus_text(each)} each"
        return Verdict("short of CPUs", why, _cpu_shortage_advice(history, workers))
    if unit.bottleneck >= LOW_UTILISATION and busy >= LOW_UTILISATION:
        why = f"the run waited for it {format_percent(unit.bottleneck)} of the time"
        change = f"more workers (num_proc: {workers + 1}) if CPUs are free, else fewer of other operators"
        return Verdict("CPU-bottlenecked", why, change)
    if busy < LOW_UTILISATION:
        why = f"{format_count(workers, 'worker')} with work for {format_percent(busy)} of the time"
        enough = max(1, math.ceil(workers * busy / HIGH_UTILISATION))
        change = f"num_proc: {enough} would do" if enough < workers else ""
        return Verdict("under-utilised", why, change)
    return Verdict("well used", f"its workers were busy {format_percent(busy)} of the time")


def _cpu_shortage_advice(history: RunHistory, workers: int) -> str:
    """What to do for workers that do not get, or do not want, the CPUs that they have."""
    looks = [line for line in history.machine_uses if "cpus" in line]
    count = sum(number_field(line, "cpu_count") for line in looks)
    if looks and sum(number_field(line, "cpus") for line in looks) >= HIGH_UTILISATION * count:
        return "the machine was full, so fewer workers of other operators, or end what else runs there"
    return f"more workers (num_proc: {2 * workers}), because it waits for disks or the network"


def _cpus_text(count: float) -> str:
    return f"{format_number(round(count, 2))} CPUs"
