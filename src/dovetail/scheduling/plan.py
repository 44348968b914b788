"""Plan of a pipeline (units, seats, rate, bottleneck) and its checked JSON form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from dovetail.errors import ClusterError, ConfigError, LedgerError, Problem
from dovetail.pipeline.units import short_unit_name
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.seat import Seat
from dovetail.resources.shape import Shape
from dovetail.scheduling.demand import Demand
from dovetail.scheduling.stage_rates import ASSUMED
from dovetail.text_format import format_count, format_number, format_rate, html_table

if TYPE_CHECKING:
    from collections.abc import Mapping

PLAN_VERSION = 2
MAX_UNITS_NAMED = 4
"""Units that a plan of one line names."""
UNKNOWN = "unknown"
"""Text of a speed that was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan(Demand):
    """Demand of a unit with its stages, its wave and its number of workers."""

    stages: tuple[str, ...]
    workers: int
    rate_source: str
    """given, measured or assumed."""
    wave: int = 0
    barrier: bool = False
    cpu_s: float | None = None
    """CPU seconds per item; None: not measured."""

    @property
    def cpu_s_per_source_item(self) -> float:
        return (self.cpu_s or 0.0) * self.per_source

    @property
    def has_set_counts(self) -> bool:
        """Whether the pipeline limits the number of workers. A barrier has one worker in any case."""
        return not self.barrier and (self.low > 1 or self.high is not None or self.per_node is not None)

    def without_set_counts(self) -> UnitPlan:
        """The same unit without the limits that the pipeline sets."""
        return replace(self, low=1, high=None, per_node=None) if self.has_set_counts else self

    @property
    def throughput(self) -> float:
        """Source items per second of all its workers together, from an assumed rate if it is unknown."""
        return self.workers * self.speed

    @property
    def has_known_rate(self) -> bool:
        return self.rate_source != ASSUMED

    def rate_text(self) -> str:
        """Items per second of one worker."""
        return format_number(self.rate) if self.has_known_rate else UNKNOWN

    def throughput_text(self) -> str:
        return format_number(self.throughput) if self.has_known_rate else UNKNOWN


@dataclass(frozen=True, slots=True)
class PlannedUse:
    """Planned use of a resource, as integers (milli, bytes, pieces)."""

    used: int
    total: int


@dataclass(frozen=True, repr=False)
class Plan:
    """Plan of a pipeline: worker counts, seats, predicted rate, bound, bottleneck and reasons."""

    name: str
    mode: str
    """streaming, sequential or waves."""
    requested: str
    """The mode that was asked for: one of these, or auto."""
    reason: str
    """Why this mode."""
    cluster: Cluster
    units: tuple[UnitPlan, ...]
    seats: Mapping[str, tuple[Seat, ...]]
    """Stage -> the seat of each of its processes."""
    rate: float | None
    """Source items per second; None: the speed of a stage is unknown."""
    bound: float | None
    """Upper bound of the rate of any plan: the scarcest resource over the need of one source item."""
    bottleneck: str | None
    """The unit that limits the rate; None, like the bound and its resource, if a speed is unknown."""
    binding: str | None
    """The resource that limits the bound."""
    use: Mapping[str, PlannedUse]
    fragmentation: float
    """Share of all GPUs that is idle and not usable for this workload."""
    idle_gpus: int
    headroom: float
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    phases: tuple[str, ...] = field(default=())
    """Result of each phase of sizing, as text."""
    source_rate: float | None = None
    """Items per second that the source delivers; None: not measured."""

    @property
    def workers(self) -> dict[str, int]:
        """Stage -> number of workers."""
        return {stage: unit.workers for unit in self.units for stage in unit.stages}

    @property
    def waves(self) -> tuple[tuple[str, ...], ...]:
        """Names of the units that run at the same time, wave by wave."""
        count = max(unit.wave for unit in self.units) + 1
        return tuple(tuple(unit.name for unit in self.units if unit.wave == wave) for wave in range(count))

    @property
    def notes(self) -> tuple[str, ...]:
        """Reason of the mode, assumptions and warnings."""
        return (self.reason, *self.assumptions, *self.warnings)

    def explain(self, stage: str | None = None) -> str:
        """Text report of the plan with the gain of one more node, GPU or CPU; or the reasons for one stage."""
        from dovetail.scheduling.plan_report import plan_text, stage_text

        return plan_text(self) if stage is None else stage_text(self, stage)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": PLAN_VERSION,
            "name": self.name,
            "mode": self.mode,
            "requested": self.requested,
            "reason": self.reason,
            "rate": self.rate,
            "bound": self.bound,
            "bottleneck": self.bottleneck,
            "binding": self.binding,
            "workers": self.workers,
            "waves": [list(wave) for wave in self.waves],
            "units": [_unit_to_dict(unit) for unit in self.units],
            "use": {name: {"used": use.used, "total": use.total} for name, use in self.use.items()},
            "fragmentation": self.fragmentation,
            "idle_gpus": self.idle_gpus,
            "headroom": self.headroom,
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "phases": list(self.phases),
            "source_rate": self.source_rate,
            "cluster": self.cluster.to_dict(),
            "seats": {name: [seat.to_dict() for seat in seats] for name, seats in self.seats.items()},
        }

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; anything else is a ConfigError."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            from dovetail.scheduling.plan_validation import invalid_plan_error  # late: most plans are made, not read

            raise invalid_plan_error([str(error)]) from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """The inverse of `to_dict`, checked: form, numbers, and seats that can be taken."""
        from dovetail.scheduling.plan_validation import check_plan_data, invalid_plan_error

        try:
            plan = cls._from_checked(check_plan_data(data))
            for wave in range(len(plan.waves)):
                stages = [unit.stages[0] for unit in plan.units if unit.wave == wave]
                Ledger(plan.cluster, (seat for stage in stages for seat in plan.seats[stage]))
        except (ClusterError, LedgerError, ValueError) as error:
            raise invalid_plan_error([str(error)]) from None
        return plan

    @classmethod
    def _from_checked(cls, data: dict[str, Any]) -> Plan:
        return cls(
            name=data["name"],
            mode=data["mode"],
            requested=data["requested"],
            reason=data["reason"],
            cluster=Cluster.from_dict(data["cluster"]),
            units=tuple(_unit_from_dict(unit) for unit in data["units"]),
            seats={name: tuple(Seat.from_dict(seat) for seat in seats) for name, seats in data["seats"].items()},
            rate=data["rate"],
            bound=data["bound"],
            bottleneck=data["bottleneck"],
            binding=data["binding"],
            use={name: PlannedUse(use["used"], use["total"]) for name, use in data["use"].items()},
            fragmentation=data["fragmentation"],
            idle_gpus=data["idle_gpus"],
            headroom=data["headroom"],
            assumptions=tuple(data["assumptions"]),
            warnings=tuple(data["warnings"]),
            phases=tuple(data["phases"]),
            source_rate=data["source_rate"],
        )

    def require_cluster(self, cluster: Cluster) -> None:
        """Raise ConfigError, with the differences, if this plan was made for another cluster."""
        changes = cluster_changes(self.cluster, cluster)
        if changes:
            message = f"the plan {self.name!r} was made for another cluster"
            fixes = ("plan again: dovetail plan FILE --out plan.json",)
            raise ConfigError(Problem("DT037", message, tuple(changes), fixes))

    def __repr__(self) -> str:
        return f"<Plan {self.name}: {self.mode}, {self.worker_text()}; {self.rate_text()}>"

    def worker_text(self) -> str:
        """'read 1 worker, caption 4 workers', or the total of many stages."""
        if len(self.units) > MAX_UNITS_NAMED:
            return f"{format_count(sum(unit.workers for unit in self.units), 'worker')} of {len(self.units)} stages"
        return ", ".join(f"{short_unit_name(unit.name)} {format_count(unit.workers, 'worker')}" for unit in self.units)

    def rate_text(self) -> str:
        """'176/s predicted, limited by caption'."""
        if self.rate is None or self.bottleneck is None:
            return "rate unknown"
        return f"{format_rate(self.rate)} predicted, limited by {short_unit_name(self.bottleneck)}"

    def _repr_html_(self) -> str:
        columns = ("stage", "workers", "items/s each", "items/s", "one worker")
        rows = [
            (unit.name, unit.workers, unit.rate_text(), unit.throughput_text(), unit.shape.describe())
            for unit in self.units
        ]
        return html_table(f"{self.name}: {self.mode}, {self.rate_text()}", columns, rows)


def cluster_changes(old: Cluster, new: Cluster) -> list[str]:
    """Differences node by node; the first twelve."""
    before = {node.name: node.spec() for node in old.nodes}
    now = {node.name: node.spec() for node in new.nodes}
    lines = [f"gone: {name} {before[name]}" for name in before if name not in now]
    lines += [f"new: {name} {now[name]}" for name in now if name not in before]
    other = [name for name in before if now.get(name, before[name]) != before[name]]
    lines += [f"changed: {name} {before[name]} -> {now[name]}" for name in other]
    return lines if len(lines) <= 12 else [*lines[:12], f"and {len(lines) - 12} more"]


def _unit_to_dict(unit: UnitPlan) -> dict[str, Any]:
    data = {item.name: getattr(unit, item.name) for item in fields(unit) if item.name != "shape"}
    return data | {"stages": list(unit.stages), "shape": unit.shape.to_dict(), "throughput": unit.throughput}


def _unit_from_dict(data: dict[str, Any]) -> UnitPlan:
    known = {item.name: data[item.name] for item in fields(UnitPlan)}
    return UnitPlan(**known | {"stages": tuple(data["stages"]), "shape": Shape.from_dict(data["shape"])})
