"""Execution modes (streaming, sequential, waves), the choice between them, and the division of units into waves.

Waves are formed here and nowhere else: the units of a plan carry the number of their wave, and a run follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dovetail.errors import InfeasibleError
from dovetail.resources.sizes import format_milli
from dovetail.scheduling.sizing import Sizing, size_units
from dovetail.text_format import format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.pipeline.units import Unit
    from dovetail.resources.ledger import Ledger
    from dovetail.scheduling.plan import UnitPlan

UnitT = TypeVar("UnitT", bound="Unit | UnitPlan")

FEWER_CPUS = (1.0, 0.5, 0.25, 0.1)
MIN_RATE_RATIO = 1.01
"""Smallest ratio of two rates that is reported as a difference. Fewer waves at the same rate are reported as well,
because less data waits on disk."""


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode with its reason, and the units and the sizing of each wave."""

    mode: str
    reason: str
    waves: list[tuple[list[UnitPlan], Sizing]]
    warnings: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Source items per second over all waves, whose times add up."""
        rates = [sizing.rate for _, sizing in self.waves]
        return rates[0] if len(rates) == 1 else 1 / sum(1 / rate for rate in rates)


def choose_mode(units: list[UnitPlan], ledger: Ledger, mode: str) -> ModeChoice:
    """Divide units into waves and size them. `auto` streams if every unit gets its workers, else it takes the fewest
    waves."""
    parts = split_at_barriers(units)
    if mode in ("auto", "streaming"):
        sized = [(part, size_units(part, ledger)) for part in parts]
        if all(sizing is not None for _, sizing in sized):
            waves = [(part, sizing) for part, sizing in sized if sizing is not None]
            return ModeChoice("streaming", _streaming_reason(units), waves)
        short = [part for part, sizing in sized if sizing is None]
        if mode == "streaming":
            raise _infeasible_error(short, units, ledger)
        _require_each_alone(units, ledger)
        return _fewest_waves(units, ledger, short[0])
    _require_each_alone(units, ledger)
    if mode == "waves":
        return _fewest_waves(units, ledger, None)
    waves = [([unit], _require_sizing([unit], ledger)) for unit in units]
    return ModeChoice("sequential", "sequential: requested; one unit at a time, each on the whole cluster", waves)


def size_same_waves(units: tuple[UnitPlan, ...], ledger: Ledger, mode: str, reason: str) -> ModeChoice:
    """Size the units of a plan again, in the waves that they have."""
    waves = [[unit for unit in units if unit.wave == wave] for wave in range(max(unit.wave for unit in units) + 1)]
    sized = [(wave, size_units(wave, ledger)) for wave in waves]
    short = [wave for wave, sizing in sized if sizing is None]
    if short:
        raise _infeasible_error(short, list(units), ledger)
    return ModeChoice(mode, reason, [(wave, sizing) for wave, sizing in sized if sizing is not None])


def _fewest_waves(units: list[UnitPlan], ledger: Ledger, short: list[UnitPlan] | None) -> ModeChoice:
    """Run neighbours together as long as they fit together. Taking as many as fit each time gives the fewest waves."""
    waves: list[tuple[list[UnitPlan], Sizing]] = []
    for part in split_at_barriers(units):
        group: list[UnitPlan] = []
        for unit in part:
            if group and not _can_run_together([*group, unit], ledger):
                waves.append((group, _require_sizing(group, ledger)))
                group = []
            group.append(unit)
        waves.append((group, _require_sizing(group, ledger)))
    count = f"{len(waves)} wave{'s' if len(waves) > 1 else ''}"
    if short is None:
        return ModeChoice("waves", f"waves: requested; {count}", waves)
    reason = f"{count}: not all units fit at once ({_shortage_text(short, ledger)})"
    chosen = ModeChoice("waves", reason, waves)
    return replace(
        chosen, warnings=(*_fewer_cpus_warnings(units, ledger), *_worker_count_warnings(units, ledger, chosen))
    )


def _fewer_cpus_warnings(units: list[UnitPlan], ledger: Ledger) -> tuple[str, ...]:
    """The largest request of CPUs with which all units would run at once."""
    for cpus in FEWER_CPUS:
        milli = int(1000 * cpus)
        fewer = [replace(unit, shape=replace(unit.shape, cpu_milli=min(unit.shape.cpu_milli, milli))) for unit in units]
        if fewer != units and is_feasible(fewer, ledger, "streaming"):
            return (f"all stages would run at once if none requested more than {cpus:g} CPUs (resources: cpus)",)
    return ()


def is_feasible(units: list[UnitPlan], ledger: Ledger, mode: str) -> bool:
    """Whether every unit would get its minimum number of workers in this mode."""
    groups = split_at_barriers(units) if mode == "streaming" else [[unit] for unit in units]
    return all(_can_run_together(group, ledger) for group in groups)


def _can_run_together(units: list[UnitPlan], ledger: Ledger) -> bool:
    return size_units([replace(unit, high=unit.low) for unit in units], ledger) is not None


def _require_sizing(units: list[UnitPlan], ledger: Ledger) -> Sizing:
    sizing = size_units(units, ledger)
    assert sizing is not None, f"{[unit.name for unit in units]} fit, and could not be sized"
    return sizing


def _infeasible_error(short: list[list[UnitPlan]], units: list[UnitPlan], ledger: Ledger) -> InfeasibleError:
    from dovetail.scheduling.diagnose.feasibility import infeasible_error  # late: most plans are feasible

    return infeasible_error(short, units, ledger, is_feasible)


def _require_each_alone(units: list[UnitPlan], ledger: Ledger) -> None:
    """Raise an InfeasibleError with all units that do not fit even when they have the cluster to themselves."""
    short = [[unit] for unit in units if not _can_run_together([unit], ledger)]
    if short:
        raise _infeasible_error(short, units, ledger)


def _worker_count_warnings(units: list[UnitPlan], ledger: Ledger, chosen: ModeChoice) -> tuple[str, ...]:
    """What the plan would gain without the worker counts that the pipeline sets."""
    pinned = [unit for unit in units if unit.has_set_counts]
    if not pinned:
        return ()
    try:
        other = choose_mode([unit.without_set_counts() for unit in units], ledger, "auto")
    except InfeasibleError:
        return ()
    gain = other.rate / chosen.rate
    if gain < 1 / MIN_RATE_RATIO or (gain < MIN_RATE_RATIO and len(other.waves) == len(chosen.waves)):
        return ()
    how = "all at once" if len(other.waves) == 1 else f"in {len(other.waves)} waves"
    names = ", ".join(unit.name for unit in pinned)
    return (
        f"without the worker counts of {names} it would run {how} at {format_number(other.rate)} items/s, "
        f"not {format_number(chosen.rate)}",
    )


def _shortage_text(units: list[UnitPlan], ledger: Ledger) -> str:
    free = sum(state.cards.idle_milli for state in ledger.free)
    cpus = sum(state.cpu_milli for state in ledger.free)
    need_gpu = sum(unit.low * unit.shape.ranks * unit.shape.cards * unit.shape.gpu_milli for unit in units)
    need_cpu = sum(unit.low * unit.shape.ranks * unit.shape.cpu_milli for unit in units)
    gpus = f"{format_milli(need_gpu)} GPUs of {format_milli(free)} and " if need_gpu else ""
    return f"they need {gpus}{format_milli(need_cpu)} CPUs of {format_milli(cpus)}"


def _streaming_reason(units: list[UnitPlan]) -> str:
    barriers = sum(unit.barrier for unit in units)
    if not barriers:
        return "streaming: all stages run at once, each with at least its minimum number of workers"
    where = f"{barriers} barrier{'s' if barriers > 1 else ''}"
    together = "stages between barriers run at once, each with at least its minimum number of workers"
    return f"streaming, split at {where}: {together}"


def split_at_barriers(units: Sequence[UnitT]) -> list[list[UnitT]]:
    """Groups of units that may run at the same time. A barrier is alone: it starts when its input is complete, and
    nothing that follows it can start before it has finished."""
    parts: list[list[UnitT]] = []
    for unit in units:
        if unit.barrier or not parts or parts[-1][-1].barrier:
            parts.append([])
        parts[-1].append(unit)
    return parts
