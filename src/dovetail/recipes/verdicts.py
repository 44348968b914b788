"""Is an operator under-utilised, over-utilised or CPU-bottlenecked, and what should be changed?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.observe.folder import num, read_object
from dovetail.observe.summary import summary
from dovetail.observe.words import counted, number, percent
from dovetail.recipes.monitoring import analysis
from dovetail.resources.sizes import about_size, exact_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.observe.history import History
    from dovetail.observe.summary import UnitSummary
    from dovetail.recipes.monitoring import OperatorUse

LOW = 0.5
"""A card, or a worker, that is busy for less than this could do more."""
HIGH = 0.85
FULL = 0.95
MARGIN = 1.15
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: str
    why: str
    """The figures."""
    change: str = ""
    """What to do; nothing, if it is well as it is."""


@dataclass(frozen=True, slots=True)
class _Asked:
    cpus: float
    memory_bytes: int


def verdicts(history: History, operators: Sequence[OperatorUse]) -> list[Verdict]:
    """One per operator."""
    units = {unit.name: unit for unit in summary(history).units}
    asked = _asked(read_object(history.folder.plan))
    found = []
    for operator in operators:
        there = [units[name] for name in operator.units if name in units]
        if not there or not operator.rows_in:
            found.append(Verdict("did not run", "no row came to it"))
            continue
        # of a deduplicator, where it spent most of its time
        unit = max(there, key=lambda one: sum(stage.seconds for stage in one.stages if stage.name in operator.stages))
        found.append(_verdict(history, operator, unit, asked.get(unit.name, _Asked(1.0, 0))))
    return found


def _asked(plan: Mapping[str, Any]) -> dict[str, _Asked]:
    units = plan.get("units")
    found = {}
    for unit in units if isinstance(units, list) else ():
        shape = unit.get("shape") if isinstance(unit, dict) else None
        if isinstance(shape, dict):
            ranks = max(1.0, num(shape, "ranks"))
            cpus, memory = num(shape, "cpu_milli") * ranks / 1000, int(num(shape, "memory_bytes") * ranks)
            found[str(unit.get("name"))] = _Asked(cpus, memory)
    return found


def _verdict(history: History, operator: OperatorUse, unit: UnitSummary, asked: _Asked) -> Verdict:
    figures = analysis(operator.samples)
    over = _over(history, operator, unit, asked, figures)
    if over is not None:
        return over
    cards = figures.get("GPU util.")
    return _on_cards(cards["avg"], unit, asked) if cards else _on_cpus(history, operator, unit, asked)


def _over(
    history: History,
    operator: OperatorUse,
    unit: UnitSummary,
    asked: _Asked,
    figures: Mapping[str, Mapping[str, float]],
) -> Verdict | None:
    kind = "over-utilised"
    lives = [life for life in history.lives.values() if life.unit == unit.name and life.end == "lost"]
    ran_out = sum(life.why.startswith("out of memory") for life in lives)
    if ran_out:
        why = f"{counted(ran_out, 'worker')} ran out of memory"
        return Verdict(kind, why, "fewer workers (num_proc), a larger num_gpus per worker, or a larger memory")
    totals = [total for sample in operator.samples for total in sample.get("GPU total mem.", ())]
    used = figures.get("GPU used mem.", {}).get("max", 0.0)
    if totals and used >= FULL * max(totals):
        why = f"its cards hold up to {about_size(round(used * MB))} of {about_size(round(max(totals) * MB))}"
        return Verdict(kind, why, "fewer workers (num_proc), a larger num_gpus per worker, or a larger memory")
    if asked.memory_bytes and unit.peak_bytes and unit.peak_bytes > asked.memory_bytes and not operator.gpus:
        enough = exact_size(math.ceil(MARGIN * unit.peak_bytes / (128 * MB)) * 128 * MB)
        why = f"a worker had {about_size(unit.peak_bytes)} and asked for {about_size(asked.memory_bytes)}"
        return Verdict(kind, why, f"memory: '{enough}'")
    return None


def _on_cards(use: float, unit: UnitSummary, asked: _Asked) -> Verdict:
    if use >= LOW:
        return Verdict("well used", f"its cards were busy {percent(use)} of the time")
    each = unit.cpus
    if each is not None and asked.cpus and each >= HIGH * asked.cpus:
        why = (
            f"its cards were busy {percent(use)} of the time, while a worker used {_cpus(each)} of {_cpus(asked.cpus)}"
        )
        more = math.ceil(2 * asked.cpus)
        return Verdict(
            "CPU-bottlenecked", why, f"num_cpus: {more} for it, or fewer workers of CPU operators (num_proc)"
        )
    why = f"its cards were busy {percent(use)} of the time"
    change = f"more workers (num_proc: {2 * max(1, unit.most_workers)}), a larger batch_size, or fewer num_cpus"
    return Verdict("under-utilised", why, change)


def _on_cpus(history: History, operator: OperatorUse, unit: UnitSummary, asked: _Asked) -> Verdict:
    busy, each = min(1.0, unit.busy or 0.0), unit.cpus if operator.measured else None
    workers = max(1, unit.most_workers)
    if unit.busy is None:
        return Verdict("too short to tell", "its workers were not seen at work")
    if busy >= LOW and each is not None and each < LOW * busy * min(1.0, asked.cpus or 1.0):
        why = f"its workers were in its code {percent(busy)} of the time, and used {_cpus(each)} each"
        return Verdict("short of CPUs", why, _instead(history, workers))
    if unit.bottleneck >= LOW and busy >= LOW:
        why = f"the run waited for it {percent(unit.bottleneck)} of the time"
        change = f"more workers (num_proc: {workers + 1}) if CPUs are free, else fewer of other operators"
        return Verdict("CPU-bottlenecked", why, change)
    if busy < LOW:
        why = f"{counted(workers, 'worker')} with work for {percent(busy)} of the time"
        enough = max(1, math.ceil(workers * busy / HIGH))
        change = f"num_proc: {enough} would do" if enough < workers else ""
        return Verdict("under-utilised", why, change)
    return Verdict("well used", f"its workers were busy {percent(busy)} of the time")


def _instead(history: History, workers: int) -> str:
    """What to do for workers that do not get, or do not want, the CPUs that they have."""
    looks = [line for line in history.machine_uses if "cpus" in line]
    count = sum(num(line, "cpu_count") for line in looks)
    if looks and sum(num(line, "cpus") for line in looks) >= HIGH * count:
        return "the machine was full, so fewer workers of other operators, or end what else runs there"
    return f"more workers (num_proc: {2 * workers}), because it waits for disks or the network"


def _cpus(count: float) -> str:
    return f"{number(round(count, 2))} CPUs"
