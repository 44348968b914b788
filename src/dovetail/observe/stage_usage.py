"""Usage of resources per stage or operator over a run: CPU, memory, GPU, counts and rates.

`to_dict` is an entry of a recipe's monitor.json, in Data-Juicer's format: samples (`resource`), `time` and
`resource_analysis`. "util." is a share of the whole machine, "mem." is in MB, and GPU values are lists with one number
per card. Data-Juicer records the whole machine while an operator runs; here operators run at the same time, and each
has what its own workers used. What was not measured is left out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.observe.cpu_attribution import NearestSample, TimeSlice, UnitTimeline, spaced_ticks, unit_timeline
from dovetail.observe.run_folder import number_field
from dovetail.observe.stage_counts import StageCounts, count_stages, merge_counts, unit_stages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.observe.history import RunHistory, WorkerLifetime

MB = 1 << 20
STATIC_KEYS = ("timestamp", "CPU count", "Total mem.", "GPU total mem.")
"""Keys of a sample that do not change, and so have no maximum or average."""
DIGITS = 4

Card = tuple[str, int]
"""Node ("" on one machine) and number."""
StageGroup = tuple[str, tuple[str, ...]]
"""A name, and the consecutive stages that it stands for: a deduplicator of a recipe has two."""


@dataclass(slots=True)
class StageUsage:
    """One stage, or one operator of a recipe, over a run."""

    name: str
    stages: tuple[str, ...]
    units: tuple[str, ...]
    """The units that ran the stages; fused stages share the workers of their unit."""
    shared_with: tuple[str, ...]
    """Names that ran in the same workers: memory is that of all of them."""
    counts: StageCounts
    gpus: tuple[str, ...] = ()
    gpus_shared_with: tuple[str, ...] = ()
    """Names that ran on the same cards: GPU values are those of the cards."""
    measured: bool = True
    """Whether CPU time was measured; in a run that was too short it is the time in the stage's code."""
    rate: float = 0.0
    """Items per second that it took in, from its first to its last."""
    workers: int = 0
    """Maximum at one time."""
    peak_bytes: int | None = None
    """Maximum of one worker."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    times: list[tuple[float, float, float, int | None]] = field(default_factory=list)
    """End, length, CPU seconds and memory of each time slice."""

    @property
    def cpu_s(self) -> float:
        return sum(cpu_s for _, _, cpu_s, _ in self.times)

    def to_dict(self) -> dict[str, Any]:
        gaps = [length for _, length, _, _ in self.times]
        counts = self.counts
        data: dict[str, Any] = {
            "name": self.name,
            "time": round(counts.seconds, DIGITS),
            "sampling interval": round(statistics.median(gaps), DIGITS) if gaps else None,
            "resource": self.samples,
            "resource_analysis": resource_analysis(self.samples),
            "shared_with": list(self.shared_with),
            "CPU from": "processes" if self.measured else "seconds in code",
            "rows_in": counts.items_in,
            "rows_out": counts.items_out,
            "dropped": counts.dropped,
            "failed": counts.failed,
            "rows_per_second": round(self.rate, DIGITS),
            "workers": self.workers,
        }
        if self.peak_bytes is not None:
            data["peak mem. of a worker"] = round(self.peak_bytes / MB, DIGITS)
        if self.gpus:
            data |= {"gpus": list(self.gpus), "gpus_shared_with": list(self.gpus_shared_with)}
        return data


def recorded_groups(history: RunHistory) -> list[StageGroup]:
    """The operators of a recipe, as run.json lists them; for any other run, its stages."""
    more = history.header.get("more")
    listed = more.get("operators") if isinstance(more, dict) else None
    groups = [(str(one[0]), tuple(map(str, one[1]))) for one in listed or () if isinstance(one, list) and len(one) == 2]
    stages = [stage for unit in history.units for stage in unit_stages(history, unit)]
    grouped = {stage for _, names in groups for stage in names}
    return [*groups, *((stage, (stage,)) for stage in stages if stage not in grouped)]


def stage_usages(history: RunHistory, groups: Sequence[StageGroup]) -> list[StageUsage]:
    """Usage of each group. A name that occurs more than once is replaced by the name of its last stage."""
    unit_of = {stage: unit for unit in history.units for stage in unit_stages(history, unit)}
    timelines = {unit: unit_timeline(history, unit) for unit in dict.fromkeys(unit_of.values())}
    counts = count_stages(history)
    occurrences = Counter(name for name, _ in groups)
    found = [
        _stage_usage(history, name if occurrences[name] == 1 else stages[-1], stages, unit_of, timelines, counts)
        for name, stages in groups
    ]
    for usage in found:
        others = [other for other in found if other is not usage]
        usage.shared_with = _names(other for other in others if {*other.units} & {*usage.units})
        usage.gpus_shared_with = _names(other for other in others if {*other.gpus} & {*usage.gpus})
    return found


def _names(usages: Iterable[StageUsage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(usage.name for usage in usages))


def _stage_usage(
    history: RunHistory,
    name: str,
    stages: tuple[str, ...],
    unit_of: Mapping[str, str],
    timelines: Mapping[str, UnitTimeline],
    counts: Mapping[str, StageCounts],
) -> StageUsage:
    seen = [stage for stage in stages if stage in unit_of]
    units = tuple(dict.fromkeys(unit_of[stage] for stage in seen))
    usage = StageUsage(name, stages, units, (), merge_counts(name, counts, seen) or StageCounts(name))
    if not seen:
        return usage
    usage.measured = all(timelines[unit].measured for unit in units)
    usage.rate = _rate(history, seen[0], unit_of[seen[0]], usage.counts.items_in)
    usage.workers = max(_max_workers(history, unit) for unit in units)
    peaks = [int(number_field(use, "peak_bytes")) for unit in units for use in history.unit_uses.get(unit, [])]
    usage.peak_bytes = max(peaks, default=None)
    usage.times = _time_slices(seen, unit_of, timelines)
    cards = _UnitCards(history, units)
    usage.gpus = tuple(f"{node}:{card}" if node else str(card) for node, card in cards.all)
    usage.samples = list(_resource_samples(history, usage, [timelines[unit] for unit in units], cards))
    return usage


def _max_workers(history: RunHistory, unit: str) -> int:
    seen = [tick.units[unit] for tick in history.ticks if unit in tick.units]
    most = max((number_field(one, "ready") + number_field(one, "draining") for one in seen), default=0)
    # a short run may end before its first view
    return max(int(most), int(bool(number_field(history.units[unit], "taken_total"))))


def _rate(history: RunHistory, stage: str, unit: str, items: int) -> float:
    """Items per second from the last view without an item of the stage to the first with all of them."""
    taken = [(tick.t, _items_taken(tick.units.get(unit, {}), stage)) for tick in spaced_ticks(history)]
    final = taken[-1][1] if taken else 0
    begin = max((t for t, count in taken if not count), default=0.0)
    end = min((t for t, count in taken if count >= final), default=0.0)
    seconds = end - begin if end > begin else history.seconds
    return items / seconds if seconds > 0 else 0.0


def _items_taken(unit: Mapping[str, Any], stage: str) -> int:
    lines = unit.get("stages")
    found = [line[1] for line in lines if line[0] == stage] if isinstance(lines, list) else []
    return int(found[0]) if found else 0


def _time_slices(
    stages: Sequence[str], unit_of: Mapping[str, str], timelines: Mapping[str, UnitTimeline]
) -> list[tuple[float, float, float, int | None]]:
    """Sums over the stages; the slices of all units have the same times."""
    shares = [timelines[unit_of[stage]].stage_cpu_s(stage) for stage in stages]
    units = [timelines[unit] for unit in dict.fromkeys(unit_of[stage] for stage in stages)]
    found = []
    for place, one in enumerate(units[0].slices):
        memory = [unit.slices[place].memory_bytes for unit in units if unit.slices[place].workers]
        known = [size for size in memory if size is not None]
        found.append((one.t, one.length_s, sum(share[place] for share in shares), sum(known) if known else None))
    return found


def _resource_samples(
    history: RunHistory, usage: StageUsage, units: Sequence[UnitTimeline], cards: _UnitCards
) -> Iterator[dict[str, Any]]:
    """One sample per time slice in which there were workers or CPU time."""
    zero = _start_time(history)
    machines = NearestSample(history.machine_uses)
    machine = history.machine_uses[-1] if history.machine_uses else {}
    count = number_field(machine, "cpu_count") or _planned_cpus(history)
    total = number_field(machine, "memory_bytes")
    for place, (t, length_s, cpu_s, memory) in enumerate(usage.times):
        slices: list[TimeSlice] = [unit.slices[place] for unit in units]
        if not (cpu_s or any(one.workers for one in slices)):
            continue
        cpus = cpu_s / length_s
        sample: dict[str, Any] = {"timestamp": round(zero + t, 3)}
        if count:
            sample |= {"CPU count": int(count), "CPU util.": round(cpus / count, DIGITS)}
        sample["CPUs"] = round(cpus, DIGITS)
        if total:
            sample["Total mem."] = round(total / MB, 1)
        if memory is not None:
            sample["Used mem."] = round(memory / MB, 1)
            if total:
                sample["Mem. util."] = round(memory / total, DIGITS)
        if (available := _available_memory(machines.at(t))) is not None:
            sample["Available mem."] = round(available / MB, 1)
        yield sample | cards.at(t - length_s, t)


def _start_time(history: RunHistory) -> float:
    """Wall-clock time at which the run's clock was 0; a resumed run leaves out the time between its parts."""
    for name in ("ended", "heartbeat"):
        if isinstance(history.header.get(name), int | float):
            return float(history.header[name]) - history.seconds
    return number_field(history.header, "started")


def _planned_cpus(history: RunHistory) -> float:
    """CPUs of the plan, for a run that was too short to measure the machine."""
    use = history.run.get("use")
    pair = use.get("CPUs") if isinstance(use, dict) else None
    return pair[1] / 1000 if isinstance(pair, list) and len(pair) == 2 else 0.0


def _available_memory(line: Mapping[str, Any] | None) -> float | None:
    if line is None or "memory_used_bytes" not in line or "memory_bytes" not in line:
        return None
    return number_field(line, "memory_bytes") - number_field(line, "memory_used_bytes")


class _UnitCards:
    """The cards that the workers of some units used."""

    FIGURES = (
        ("GPU total mem.", "memory_bytes", 1 / MB),
        ("GPU used mem.", "memory_used_bytes", 1 / MB),
        ("GPU util.", "use_percent", 1 / 100),
        ("GPU power", "power_w", 1.0),
    )

    def __init__(self, history: RunHistory, units: Sequence[str]) -> None:
        self._uses = {card: NearestSample(lines) for card, lines in history.gpu_uses.items()}
        self._lives = [life for life in history.worker_lifetimes.values() if life.unit in units and life.gpus]
        self.all = sorted({card for life in self._lives for card in self._cards_of(life)})

    def _cards_of(self, life: WorkerLifetime) -> list[Card]:
        """On one machine cards are recorded without a node name."""
        alone = any(not node for node, _ in self._uses) or not self._uses
        return [("" if alone else life.node, card) for card in life.gpus]

    def at(self, begin: float, end: float) -> dict[str, list[float]]:
        lives = [life for life in self._lives if (life.started or 0.0) <= end and (life.ended or end) >= begin]
        cards = sorted({card for life in lives for card in self._cards_of(life)})
        lines = [line for card in cards if card in self._uses and (line := self._uses[card].at(end)) is not None]
        found = {
            name: [round(number_field(line, key) * factor, DIGITS) for line in lines if key in line]
            for name, key, factor in self.FIGURES
        }
        both = [line for line in lines if "memory_bytes" in line and "memory_used_bytes" in line]
        found["GPU free mem."] = [
            round((number_field(line, "memory_bytes") - number_field(line, "memory_used_bytes")) / MB, DIGITS)
            for line in both
        ]
        return {name: values for name, values in found.items() if values}


def resource_analysis(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Maximum, minimum and average of every value that changes; all cards together."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            if name not in STATIC_KEYS:
                values.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return {
        name: {"max": max(found), "min": min(found), "avg": round(sum(found) / len(found), DIGITS)}
        for name, found in values.items()
    }
