"""Utilisation verdicts per stage (under-utilised, over-utilised, CPU-bottlenecked, ...) with the change to make."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.observe.run_folder import number_field, read_json_object
from dovetail.observe.stage_usage import resource_analysis
from dovetail.resources.sizes import format_exact_size, format_size
from dovetail.text_format import format_count, format_number, format_percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.observe.history import RunHistory
    from dovetail.observe.stage_usage import StageUsage
    from dovetail.observe.summary import RunSummary, UnitSummary

LOW_UTILISATION = 0.5
"""Below this share of the time, a card or a worker could do more."""
HIGH_UTILISATION = 0.85
FULL_MEMORY_SHARE = 0.95
MEMORY_MARGIN = 1.15
MEMORY_STEP_BYTES = 128 << 20
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class SettingNames:
    """Names of settings in the file, or the call, that a run was started from."""

    workers: str = "workers"
    cpus: str = "cpus"
    gpus: str = "gpus"
    memory: str = "memory"
    batch_size: str = "batch_size"
    stage: str = "stage"
    """The word for a stage."""


PIPELINE_SETTINGS = SettingNames()
RECIPE_SETTINGS = SettingNames(workers="num_proc", cpus="num_cpus", gpus="num_gpus", stage="operator")


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: str
    why: str
    """The evidence, with numbers."""
    change: str = ""
    """The change to make; empty: none."""


@dataclass(frozen=True, slots=True)
class RequestedResources:
    """Request of one worker of a unit, summed over the ranks of a gang; 0: nothing."""

    cpus: float = 1.0
    memory_bytes: int = 0
    workers: int = 0
    """Workers in the plan that the run started with."""


def requested_resources(history: RunHistory) -> dict[str, RequestedResources]:
    """Requests by unit, from plan.json. Read without checks, because a plan of a large cluster takes long to check."""
    units = read_json_object(history.folder.plan).get("units")
    found = {}
    for unit in units if isinstance(units, list) else ():
        shape = unit.get("shape") if isinstance(unit, dict) else None
        if isinstance(shape, dict):
            ranks = max(1.0, number_field(shape, "ranks"))
            cpus = number_field(shape, "cpu_milli") * ranks / 1000
            memory = int(number_field(shape, "memory_bytes") * ranks)
            found[str(unit.get("name"))] = RequestedResources(cpus, memory, int(number_field(unit, "workers")))
    return found


def setting_names(history: RunHistory) -> SettingNames:
    more = history.header.get("more")
    return RECIPE_SETTINGS if isinstance(more, dict) and "recipe" in more else PIPELINE_SETTINGS


def judge_stages(
    history: RunHistory,
    summary: RunSummary,
    usages: Sequence[StageUsage],
    requested: Mapping[str, RequestedResources],
    names: SettingNames,
) -> list[Verdict]:
    """One verdict per usage."""
    units = {unit.name: unit for unit in summary.units}
    judge = _Judge(history, requested, names)
    found = []
    for usage in usages:
        seen = [units[name] for name in usage.units if name in units]
        if not seen or not usage.counts.items_in:
            found.append(Verdict("did not run", "it got no items"))
            continue
        # of a deduplicator, where it spent most of its time
        unit = max(seen, key=lambda one: sum(stage.seconds for stage in one.stages if stage.name in usage.stages))
        found.append(judge.verdict(usage, unit))
    return found


@dataclass(frozen=True, slots=True)
class _Judge:
    history: RunHistory
    requested: Mapping[str, RequestedResources]
    names: SettingNames

    def verdict(self, usage: StageUsage, unit: UnitSummary) -> Verdict:
        request = self.requested.get(unit.name, RequestedResources())
        figures = resource_analysis(usage.samples)
        cards = figures.get("GPU util.")
        over = self._overuse(usage, unit, request, figures)
        if over is not None:
            return over
        return self._card_use(cards["avg"], unit, request) if cards else self._cpu_use(usage, unit, request)

    def _overuse(
        self, usage: StageUsage, unit: UnitSummary, request: RequestedResources, figures: Mapping[str, Any]
    ) -> Verdict | None:
        kind, names = "over-utilised", self.names
        less = f"a smaller {names.workers}, a larger {names.gpus}, or a larger {names.memory}"
        lost = [
            life for life in self.history.worker_lifetimes.values() if life.unit == unit.name and life.end == "lost"
        ]
        ran_out = sum(life.why.startswith("out of memory") for life in lost)
        if ran_out:
            return Verdict(kind, f"{format_count(ran_out, 'worker')} ran out of memory", less)
        totals = [total for sample in usage.samples for total in sample.get("GPU total mem.", ())]
        used = figures.get("GPU used mem.", {}).get("max", 0.0)
        if totals and used >= FULL_MEMORY_SHARE * max(totals):
            why = f"up to {format_size(round(used * MB))} of {format_size(round(max(totals) * MB))} GPU memory in use"
            return Verdict(kind, why, less)
        if request.memory_bytes and unit.peak_bytes and unit.peak_bytes > request.memory_bytes and not usage.gpus:
            enough = math.ceil(MEMORY_MARGIN * unit.peak_bytes / MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES
            why = f"a worker used {format_size(unit.peak_bytes)} and requests {format_size(request.memory_bytes)}"
            return Verdict(kind, why, f"{names.memory}: '{format_exact_size(enough)}'")
        return None

    def _card_use(self, use: float, unit: UnitSummary, request: RequestedResources) -> Verdict:
        names = self.names
        why = f"GPUs busy {format_percent(use)} of the time"
        if use >= LOW_UTILISATION:
            return Verdict("well used", why)
        each = unit.cpus
        if each is not None and request.cpus and each >= HIGH_UTILISATION * request.cpus:
            why += f", while a worker used {_cpus_text(each)} of {_cpus_text(request.cpus)}"
            more = math.ceil(2 * request.cpus)
            change = f"{names.cpus}: {more}, or a smaller {names.workers} for {names.stage}s that use only CPUs"
            return Verdict("CPU-bottlenecked", why, change)
        more = 2 * max(1, unit.most_workers)
        change = f"{names.workers}: {more}, a larger {names.batch_size}, or a smaller {names.cpus}"
        return Verdict("under-utilised", why, change)

    def _cpu_use(self, usage: StageUsage, unit: UnitSummary, request: RequestedResources) -> Verdict:
        names = self.names
        busy, each = min(1.0, unit.busy or 0.0), unit.cpus if usage.measured else None
        workers = max(1, unit.most_workers)
        if unit.busy is None:
            return Verdict("too short to tell", "the run ended before workers were measured")
        if busy >= LOW_UTILISATION and each is not None and each < LOW_UTILISATION * busy * min(1.0, request.cpus or 1):
            why = f"workers busy {format_percent(busy)} of the time, with {_cpus_text(each)} each"
            return Verdict("short of CPUs", why, self._cpu_shortage_change(workers))
        if unit.bottleneck >= LOW_UTILISATION and busy >= LOW_UTILISATION:
            why = f"the bottleneck {format_percent(unit.bottleneck)} of the time"
            other = f"a smaller {names.workers} for other {names.stage}s"
            change = f"{names.workers}: {workers + 1} if CPUs are free, else {other}"
            return Verdict("CPU-bottlenecked", why, change)
        if busy < LOW_UTILISATION:
            why = f"{format_count(workers, 'worker')} busy {format_percent(busy)} of the time"
            enough = max(1, math.ceil(workers * busy / HIGH_UTILISATION))
            return Verdict("under-utilised", why, f"{names.workers}: {enough}" if enough < workers else "")
        return Verdict("well used", f"workers busy {format_percent(busy)} of the time")

    def _cpu_shortage_change(self, workers: int) -> str:
        """The change for workers that do not get, or do not use, their CPUs."""
        samples = [line for line in self.history.machine_uses if "cpus" in line]
        count = sum(number_field(line, "cpu_count") for line in samples)
        if samples and sum(number_field(line, "cpus") for line in samples) >= HIGH_UTILISATION * count:
            other = f"a smaller {self.names.workers} for other {self.names.stage}s"
            return f"all CPUs of the machine were busy: {other}, or stop other programs"
        return f"{self.names.workers}: {2 * workers}, because workers wait for disks or the network"


def _cpus_text(count: float) -> str:
    return f"{format_number(round(count, 2))} CPUs"
