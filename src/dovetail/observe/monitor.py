"""Monitor of resource use per operator: CPU, memory, GPU and row counts as monitor.json and monitor.html.

A list, in the order of the recipe: per operator samples (`resource`), `time` and `resource_analysis`. "util." is a
share of the whole machine, "mem." is in MB, and what concerns GPUs is a list with one figure per card. Data-Juicer
records the whole machine while an operator runs; here operators run at the same time, and each has what its own workers
used. What was not measured is left out.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.observe.cpu_attribution import NearestSample, TimeSlice, UnitTimeline, spaced_ticks, unit_timeline
from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import number_field, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.observe.history import WorkerLifetime

MB = 1 << 20
STATIC_KEYS = ("timestamp", "CPU count", "Total mem.", "GPU total mem.")
"""What is in samples, and not worth a maximum."""
STAGE_IN_ERROR = re.compile(r"in stage '([^']*)'\n")
DIGITS = 4

Card = tuple[str, int]
"""Node ("" on one machine) and number."""


@dataclass(slots=True)
class OperatorUsage:
    """One operator over a run. Of a deduplicator both its stages together."""

    name: str
    stages: tuple[str, ...]
    units: tuple[str, ...]
    """Where they ran; several stages of a unit share its workers."""
    shared_with: tuple[str, ...]
    """The operators in the same workers: memory is that of all of them."""
    gpus: tuple[str, ...] = ()
    gpus_shared_with: tuple[str, ...] = ()
    """The operators on the same cards: GPU figures are those of the cards."""
    measured: bool = True
    """Whether CPU use is what processes used; of a run that was too short it is the seconds in code."""
    rows_in: int = 0
    rows_out: int = 0
    aside: int = 0
    seconds: float = 0.0
    """In its own code, of all workers."""
    rate: float = 0.0
    """Rows per second that it took in, from its first to its last."""
    workers: int = 0
    """At most."""
    peak_bytes: int | None = None
    """Of that worker that had most."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    times: list[tuple[float, float, float, int | None]] = field(default_factory=list)
    """Per slice its end, its length, CPU seconds, and memory."""

    @property
    def dropped(self) -> int:
        """As far as counts tell: of one that makes several rows of one it is not seen."""
        return max(0, self.rows_in - self.aside - self.rows_out)

    @property
    def cpu_s(self) -> float:
        return sum(cpu_s for _, _, cpu_s, _ in self.times)

    def to_dict(self) -> dict[str, Any]:
        gaps = [length for _, length, _, _ in self.times]
        data: dict[str, Any] = {
            "name": self.name,
            "time": round(self.seconds, DIGITS),
            "sampling interval": round(statistics.median(gaps), DIGITS) if gaps else None,
            "resource": self.samples,
            "resource_analysis": resource_analysis(self.samples),
            "shared_with": list(self.shared_with),
            "CPU from": "processes" if self.measured else "seconds in code",
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": self.dropped,
            "set_aside": self.aside,
            "rows_per_second": round(self.rate, DIGITS),
            "workers": self.workers,
        }
        if self.peak_bytes is not None:
            data["peak mem. of a worker"] = round(self.peak_bytes / MB, DIGITS)
        if self.gpus:
            data |= {"gpus": list(self.gpus), "gpus_shared_with": list(self.gpus_shared_with)}
        return data


def write_monitor(run_folder: str, stages: Sequence[tuple[str, str]], into: str) -> None:
    """Writes monitor.json and monitor.html into the folder `into`, which is made if there is none.

    `stages`: name of the operator and of its stage, in the order of the recipe; of a deduplicator that which makes its
    hashes may be left out. Everything is read from the run's folder, so that it works for a run that still goes on,
    after it, and for one of another machine.
    """
    from dovetail.observe.html_report import html_report

    history = RunHistory.load(run_folder)
    operators = operator_usages(history, stages)
    folder = Path(into)
    folder.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(json.dumps(operator.to_dict(), allow_nan=False) for operator in operators)
    write_atomically(folder / "monitor.json", f"[\n{text}\n]\n")
    write_atomically(folder / "monitor.html", html_report(history, operators))


def operator_usages(history: RunHistory, stages: Sequence[tuple[str, str]]) -> list[OperatorUsage]:
    unit_of = {stage: unit for unit in history.units for stage in _unit_stages(history, unit)}
    times = {unit: unit_timeline(history, unit) for unit in dict.fromkeys(unit_of.values())}
    counts = _RowCounts(history)
    found = [
        _operator_usage(history, name, own, unit_of, times, counts)
        for name, own in group_stages(_with_hash_stages(stages, unit_of))
    ]
    for operator in found:
        others = [other for other in found if other is not operator]
        operator.shared_with = _names(other for other in others if {*other.units} & {*operator.units})
        operator.gpus_shared_with = _names(other for other in others if {*other.gpus} & {*operator.gpus})
    return found


def _with_hash_stages(stages: Sequence[tuple[str, str]], there: Iterable[str]) -> list[tuple[str, str]]:
    """Also the stages that make the hashes of deduplicators, where only the operators were named."""
    missing = {*there} - {stage for _, stage in stages}
    found = []
    for name, stage in stages:
        found += [(name, one) for one in (f"{stage}_hash",) if one in missing]
        found.append((name, stage))
    return found


def _names(operators: Iterable[OperatorUsage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(operator.name for operator in operators))


def group_stages(stages: Sequence[tuple[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """Operators with their stages; that which makes the hashes of a deduplicator belongs to the one behind it. An
    operator that is there twice is called by its stages."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for name, stage in stages:
        if found and found[-1] == (name, (f"{stage}_hash",)):
            found[-1] = name, (f"{stage}_hash", stage)
        else:
            found.append((name, (stage,)))
    often = Counter(name for name, _ in found)
    return [(name if often[name] == 1 else own[-1], own) for name, own in found]


def _unit_stages(history: RunHistory, unit: str) -> tuple[str, ...]:
    told = history.units[unit].get("stages")
    named = [str(one[0]) for one in told if isinstance(one, list) and one] if isinstance(told, list) else []
    return tuple(dict.fromkeys([*named, *unit.split("+")]))


def _operator_usage(
    history: RunHistory,
    name: str,
    stages: tuple[str, ...],
    unit_of: Mapping[str, str],
    times: Mapping[str, UnitTimeline],
    counts: _RowCounts,
) -> OperatorUsage:
    there = [stage for stage in stages if stage in unit_of]
    units = tuple(dict.fromkeys(unit_of[stage] for stage in there))
    operator = OperatorUsage(name, stages, units, ())
    if not there:
        return operator
    operator.measured = all(times[unit].measured for unit in units)
    operator.rows_in, operator.rows_out = counts.rows(there[0])[0], counts.rows(there[-1])[1]
    operator.aside = sum(counts.aside[stage] for stage in there)
    operator.seconds = sum(counts.last[stage][2] for stage in there)
    operator.rate = counts.rate(there[0], operator.rows_in)
    operator.workers = max(_max_workers(history, unit) for unit in units)
    peaks = [int(number_field(use, "peak_bytes")) for unit in units for use in history.unit_uses.get(unit, [])]
    operator.peak_bytes = max(peaks, default=None)
    operator.times = _time_slices(there, unit_of, times)
    cards = _UnitCards(history, units)
    operator.gpus = tuple(f"{node}:{card}" if node else str(card) for node, card in cards.all)
    operator.samples = list(_resource_samples(history, operator, [times[unit] for unit in units], cards))
    return operator


def _max_workers(history: RunHistory, unit: str) -> int:
    seen = [tick.units[unit] for tick in history.ticks if unit in tick.units]
    most = max((number_field(one, "ready") + number_field(one, "draining") for one in seen), default=0)
    # a run may be over before anybody looked
    return max(int(most), int(bool(number_field(history.units[unit], "taken_total"))))


def _time_slices(
    stages: Sequence[str], unit_of: Mapping[str, str], times: Mapping[str, UnitTimeline]
) -> list[tuple[float, float, float, int | None]]:
    """Of all its stages together; all units have the same slices."""
    shares = [times[unit_of[stage]].stage_cpu_s(stage) for stage in stages]
    units = [times[unit] for unit in dict.fromkeys(unit_of[stage] for stage in stages)]
    found = []
    for place, one in enumerate(units[0].slices):
        memory = [unit.slices[place].memory_bytes for unit in units if unit.slices[place].workers]
        known = [size for size in memory if size is not None]
        found.append((one.t, one.length_s, sum(share[place] for share in shares), sum(known) if known else None))
    return found


class _RowCounts:
    """Rows in and out of each stage. Stages only count what did not fail later in the same unit: rows that were set
    aside are added to all stages that they had passed."""

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self.last: dict[str, tuple[int, int, float]] = {}
        self.aside: Counter[str] = Counter()
        self._passed: dict[str, tuple[int, int]] = {}
        """Rows that are missing in its counts: going in, and coming out."""
        self._unit: dict[str, str] = {}
        blamed = _failed_rows(history)
        for unit, told in history.units.items():
            stages = _unit_stages(history, unit)
            numbers = {str(one[0]): one for one in told.get("stages") or () if isinstance(one, list) and len(one) == 4}
            known = {stage: blamed[unit, stage] for stage in stages if blamed[unit, stage]}
            # whose row it was is not known of all, and of a lost worker of none
            known[stages[0]] = known.get(stages[0], 0) + max(
                0, int(number_field(told, "aside_total")) - sum(known.values())
            )
            for place, stage in enumerate(stages):
                one = numbers.get(stage, [stage, 0, 0, 0.0])
                self.last[stage] = int(one[1]), int(one[2]), float(one[3])
                self._unit[stage] = unit
                behind = sum(known.get(other, 0) for other in stages[place + 1 :])
                self._passed[stage] = known.get(stage, 0) + behind, behind
                self.aside[stage] = known.get(stage, 0)

    def rows(self, stage: str) -> tuple[int, int]:
        into, out, _ = self.last[stage]
        return into + self._passed[stage][0], out + self._passed[stage][1]

    def rate(self, stage: str, rows: int) -> float:
        """From the last view without a row of it to the first with all of them: the time in which it worked."""
        unit, final = self._unit[stage], self.last[stage][0]
        taken = [(tick.t, _rows_taken(tick.units.get(unit, {}), stage)) for tick in spaced_ticks(self._history)]
        begin = max((t for t, count in taken if not count), default=0.0)
        end = min((t for t, count in taken if count >= final), default=0.0)
        seconds = end - begin if end > begin else self._history.seconds
        return rows / seconds if seconds > 0 else 0.0


def _rows_taken(unit: Mapping[str, Any], stage: str) -> int:
    told = unit.get("stages")
    found = [one[1] for one in told if one[0] == stage] if isinstance(told, list) else []
    return int(found[0]) if found else 0


def _failed_rows(history: RunHistory) -> Counter[tuple[str, str]]:
    """(unit, stage) -> rows that failed there; read only if there are any."""
    found: Counter[tuple[str, str]] = Counter()
    if not any(number_field(unit, "aside_total") for unit in history.units.values()):
        return found
    for line in history.set_aside():
        unit, told = str(line.get("unit")), STAGE_IN_ERROR.match(str(line.get("detail", "")))
        found[unit, told[1] if told else unit] += 1
    return found


def _resource_samples(
    history: RunHistory, operator: OperatorUsage, units: Sequence[UnitTimeline], cards: _UnitCards
) -> Iterator[dict[str, Any]]:
    """One per slice in which it had workers; at least one, if it did anything."""
    zero = _start_time(history)
    machines = NearestSample(history.machine_uses)
    machine = history.machine_uses[-1] if history.machine_uses else {}
    count = number_field(machine, "cpu_count") or _planned_cpus(history)
    total = number_field(machine, "memory_bytes")
    for place, (t, length_s, cpu_s, memory) in enumerate(operator.times):
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
    """When the run's clock was at 0; of a run that was resumed, without the time in which nobody worked on it."""
    for name in ("ended", "heartbeat"):
        if isinstance(history.header.get(name), int | float):
            return float(history.header[name]) - history.seconds
    return number_field(history.header, "started")


def _planned_cpus(history: RunHistory) -> float:
    """Of a run that was too short for a look at the machine: those that it was planned for."""
    use = history.run.get("use")
    pair = use.get("CPUs") if isinstance(use, dict) else None
    return pair[1] / 1000 if isinstance(pair, list) and len(pair) == 2 else 0.0


def _available_memory(line: Mapping[str, Any] | None) -> float | None:
    if line is None or "memory_used_bytes" not in line or "memory_bytes" not in line:
        return None
    return number_field(line, "memory_bytes") - number_field(line, "memory_used_bytes")


class _UnitCards:
    """The cards on which the workers of some units were."""

    FIGURES = (
        ("GPU total mem.", "memory_bytes", 1 / MB),
        ("GPU used mem.", "memory_used_bytes", 1 / MB),
        ("GPU util.", "use_percent", 1 / 100),
        ("GPU power", "power_w", 1.0),
    )

    def __init__(self, history: RunHistory, units: Sequence[str]) -> None:
        self._uses = {card: NearestSample(lines) for card, lines in history.gpu_uses.items()}
        self._lives = [life for life in history.worker_lifetimes.values() if life.unit in units and life.gpus]
        self.all = sorted({card for life in self._lives for card in self._of(life)})

    def _of(self, life: WorkerLifetime) -> list[Card]:
        """On one machine cards are told without its name."""
        alone = any(not node for node, _ in self._uses) or not self._uses
        return [("" if alone else life.node, card) for card in life.gpus]

    def at(self, begin: float, end: float) -> dict[str, list[float]]:
        lives = [life for life in self._lives if (life.started or 0.0) <= end and (life.ended or end) >= begin]
        cards = sorted({card for life in lives for card in self._of(life)})
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
    """Of everything that changes its maximum, minimum and average, of all cards together."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            if name not in STATIC_KEYS:
                values.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return {
        name: {"max": max(found), "min": min(found), "avg": round(sum(found) / len(found), DIGITS)}
        for name, found in values.items()
    }
