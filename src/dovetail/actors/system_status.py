"""Status of a live system: one row per instance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dovetail.actors.instance_directory import InstanceState, instance_name
from dovetail.resources.sizes import format_size
from dovetail.text_format import align_table, format_count, format_duration, format_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.actors.heartbeat_monitor import Heartbeat
    from dovetail.actors.process_state import ProcessState

MAX_REASON_CHARACTERS = 60


@dataclass(frozen=True)
class InstanceStatus:
    """One instance at one moment. Figures of calls are current, or those of the last answer of an instance that
    does not answer within 0.2 s."""

    role: str
    index: int
    state: str
    reason: str
    since_s: float
    """Seconds since it entered this state."""
    incarnation: int
    restarts: int
    node: str
    gpus: tuple[int, ...]
    worker: int | None
    """Number of its process, as in the logs of the run."""
    pids: tuple[int, ...] = ()
    outstanding: int = 0
    """Calls that are running or waiting for a slot."""
    calls: int = 0
    failed: int = 0
    calls_per_s: float = 0.0
    p50_s: float | None = None
    p95_s: float | None = None
    memory_bytes: int | None = None
    """Memory of its process."""
    doing: str = ""
    """The method that runs longest at present."""
    doing_s: float | None = None


@dataclass(frozen=True)
class SystemStatus:
    """A live system at one moment; `print(live.status())` shows it as a table."""

    name: str
    run: str
    state: str
    error: str
    instances: tuple[InstanceStatus, ...]
    advice: tuple[str, ...] = ()
    """Advice on roles that request more than they use."""
    warnings: tuple[str, ...] = ()
    """Notes on roles that are not scaled, because their signal cannot be measured."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SystemStatus:
        """Inverse of `to_dict`; the data may have been JSON in between."""
        rows = tuple(InstanceStatus(**{**row, "gpus": tuple(row["gpus"])}) for row in data["instances"])
        texts = {name: tuple(data.get(name, ())) for name in ("advice", "warnings")}
        return cls(**{**data, "instances": rows, **texts})

    def __str__(self) -> str:
        ready = sum(one.state == InstanceState.READY.value for one in self.instances)
        total = format_count(len(self.instances), "instance")
        lines = [f"{self.name} ({self.run}): {self.state}, {ready} of {total} ready"]
        lines += [self.error] if self.error else []
        columns = [
            "instance",
            "state",
            "node",
            "gpus",
            "calls",
            "calls/s",
            "running",
            "p50",
            "p95",
            "memory",
            "restarts",
        ]
        rows = [[*columns, "doing"], *(_row(one) for one in self.instances)]
        lines += align_table(rows, left=3)
        lines += [f"warning: {one}" for one in self.warnings]
        return "\n".join([*lines, *(f"advice: {one}" for one in self.advice)])


def _row(one: InstanceStatus) -> list[str]:
    doing = f"{one.doing} for {format_duration(one.doing_s)}" if one.doing and one.doing_s is not None else ""
    return [
        instance_name(one.role, one.index),
        one.state,
        one.node,
        ",".join(map(str, one.gpus)) or "-",
        str(one.calls),
        format_rate(one.calls_per_s),
        str(one.outstanding),
        _seconds(one.p50_s),
        _seconds(one.p95_s),
        "-" if one.memory_bytes is None else format_size(one.memory_bytes),
        str(one.restarts),
        doing or one.reason[:MAX_REASON_CHARACTERS],
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 0.001:
        return f"{1e6 * value:.0f} us"
    return f"{1000 * value:.3g} ms" if value < 1 else format_duration(value)


def instance_rows(
    processes: Sequence[ProcessState],
    now: float,
    heartbeats: Mapping[tuple[str, int], Heartbeat],
    memory_of: Callable[[int], int | None],
    pids_of: Callable[[int], tuple[int, ...]],
    waiting: Callable[[str, int], int],
) -> list[InstanceStatus]:
    """`waiting`: calls of the driver to an instance that are not finished."""
    rows = []
    for process in processes:
        worker = process.worker
        for role, index in process.instances:
            beat = heartbeats.get((role, index))
            if beat is not None and beat.worker != worker:
                beat = None  # of an earlier incarnation
            figures = {} if beat is None else beat.figures
            state, reason, since = process.instance_state((role, index))
            running = figures.get("running") or [("", None)]
            rows.append(
                InstanceStatus(
                    role,
                    index,
                    state.value,
                    reason,
                    now - since,
                    process.incarnation,
                    process.restarts,
                    ",".join(dict.fromkeys(seat.node for seat in process.seats)),
                    tuple(card for seat in process.seats for card in seat.gpus),
                    worker,
                    () if worker is None else pids_of(worker),
                    max(figures.get("outstanding", 0), waiting(role, index)),
                    figures.get("calls", 0),
                    figures.get("failed", 0),
                    figures.get("rate", 0.0),
                    figures.get("p50_s"),
                    figures.get("p95_s"),
                    None if worker is None else memory_of(worker),
                    *running[0],
                )
            )
    return sorted(rows, key=lambda row: (_order(processes, row.role), row.index))


def _order(processes: Sequence[ProcessState], role: str) -> int:
    """Roles in the order of their first process."""
    return next(
        number for number, process in enumerate(processes) if any(name == role for name, _ in process.instances)
    )
