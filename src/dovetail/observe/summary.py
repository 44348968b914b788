"""How did a run go? In numbers; `summary_lines.py` puts them in words."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dovetail.observe.folder import num, read_object
from dovetail.observe.nodes import NodeSummary, node_summaries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.observe.history import History, Tick

FROM_SHARE, TO_SHARE = 0.2, 0.8
LEAST_STEPS = 5
"""Fewer different counts than this say nothing about a steady rate."""


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage of a unit, over the whole run."""

    name: str
    taken: int
    given: int
    seconds: float
    """In its own code, of all workers together."""


@dataclass(frozen=True, slots=True)
class UnitSummary:
    """One unit over the whole run."""

    name: str
    wave: int
    taken: int
    given: int
    aside: int
    retries: int
    rate: float
    """Items per second that it took in, from its first item to its last."""
    queued: int
    ready: int
    most_workers: int
    started: int
    stopped: int
    lost: int
    busy: float | None
    """Share of its workers' time, since they were ready, that was spent in the user's code."""
    setup_s: float
    bottleneck: float
    """Share of the time in which it was the bottleneck."""
    cpus: float | None = None
    """CPUs that one ready worker used on average; None: nobody measured."""
    peak_bytes: int | None = None
    """The most memory that one worker had; None: nobody measured."""
    stages: tuple[StageSummary, ...] = ()
    """Of real runs; several if they are fused."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """How much of a resource was held by workers, in its own integers."""

    mean: float
    peak: int
    total: int


@dataclass(frozen=True, slots=True)
class Summary:
    id: str
    name: str
    status: str
    error: str
    engine: str
    cluster: str
    virtual: bool
    seconds: float
    read: int
    total: int | None
    finished: int
    delivered: int
    aside: int
    mean_rate: float
    """Source items per second over the whole run."""
    steady_rate: float | None
    """See `steady_rate`; None: too little happened to say."""
    predicted: float
    rates: tuple[float, ...]
    """Source items per second, one number per interval between two views."""
    replans: int
    source_limited: float
    """Share of the time in which everybody waited for the source."""
    use: dict[str, ResourceUse]
    worker_seconds: float
    setup_s: float
    units: tuple[UnitSummary, ...]
    decisions: tuple[tuple[float, str], ...]
    errors: tuple[tuple[float, str], ...]
    folder: str
    advice: tuple[str, ...] = ()
    """What workers should ask for instead."""
    planned: float = 0.0
    """Source items per second that the plan it started with expects; 0: it has none, or its speeds were assumed."""
    planned_from: str = ""
    """Where that plan has its speeds from: given, measured or assumed, the weakest of all."""
    nodes: tuple[NodeSummary, ...] = ()
    """Every node on which something happened."""

    def __str__(self) -> str:
        from dovetail.observe.summary_lines import summary_lines  # late: it needs this module

        return "\n".join(summary_lines(self))

    @property
    def dropped(self) -> int:
        """Items that a stage took and gave nothing for, as far as counts tell: where others fan out it is not seen."""
        return sum(max(0, unit.taken - unit.aside - unit.given) for unit in self.units)

    @property
    def setup_share(self) -> float:
        """Of all the time that workers were there, how much went into setting them up."""
        return min(1.0, self.setup_s / self.worker_seconds) if self.worker_seconds else 0.0

    @property
    def reached(self) -> float:
        """The steady rate, or, if there is none, that of the whole run."""
        return self.steady_rate or self.mean_rate

    @property
    def expected(self) -> float:
        """What the rate is measured against: what the plan said before the run; of a simulated one, and of one whose
        speeds nobody knew before, what the replans said. 0: nobody said anything."""
        return self.planned if self.planned and not self.virtual else self.predicted

    def to_dict(self) -> dict[str, Any]:
        more = {"reached": self.reached, "expected": self.expected}
        return asdict(self) | {"setup_share": self.setup_share, "dropped": self.dropped} | more


def summary(history: History, wall: float | None = None) -> Summary:
    run, header = history.run, history.header
    finished = int(num(run, "finished"))
    shares = history.bottlenecks()
    units = tuple(_unit(history, name, shares.get(name, 0.0)) for name in history.units)
    total = run.get("total") if run.get("total") is not None else header.get("items")
    errors = [it for it in history.happenings if it.kind == "lost" or it.data.get("what") == "error"]
    planned, planned_from = _planned(history)
    return Summary(
        id=history.id,
        name=history.name,
        status=history.status(wall),
        error=str(header.get("error") or run.get("error") or ""),
        engine=str(header.get("engine", "")),
        cluster=str(header.get("cluster", "")),
        virtual=history.virtual,
        seconds=history.seconds,
        read=int(num(run, "read")),
        total=total if isinstance(total, int) else None,
        finished=finished,
        delivered=int(num(run, "delivered")),
        aside=int(num(run, "aside")),
        mean_rate=finished / history.seconds if history.seconds > 0 else 0.0,
        steady_rate=steady_rate(history),
        predicted=_predicted(history),
        rates=_rates(history),
        replans=int(num(run, "replans")),
        source_limited=shares.get("source", 0.0) if "source" not in history.units else 0.0,
        use=_use(history.ticks),
        worker_seconds=sum(_worker_seconds(history.ticks, unit.name, with_starting=True) for unit in units),
        setup_s=sum(unit.setup_s for unit in units),
        units=units,
        decisions=tuple((it.t, it.text) for it in history.notes("decision")),
        errors=tuple((it.t, it.text) for it in errors),
        folder=str(history.folder.path),
        advice=_advice(history),
        planned=planned,
        planned_from=planned_from,
        nodes=node_summaries(history),
    )


def steady_rate(history: History) -> float | None:
    """Source items per second without ramp-up and tail.

    The slope between the first view with a fifth of all items done and the first with four fifths: while workers are
    still being set up few items are done, and what waits for the last stragglers is beyond the four fifths. See
    `_done`. A run in several waves has no steady state: its rate is items over the whole time. None if too little
    happened between two views to say.
    """
    finished = num(history.run, "finished")
    if not history.ticks or not finished:
        return None
    if num(history.run, "waves") > 1:
        return finished / history.seconds if history.seconds > 0 else None
    window = _steady(history)
    if window is None:
        return None
    done, (first, last) = _done(history), window
    seconds = history.ticks[last].t - history.ticks[first].t
    return (done[last] - done[first]) / seconds if seconds > 0 else None


def _steady(history: History) -> tuple[int, int] | None:
    """The first and the last view of the steady state."""
    done = _done(history)
    if len(set(done)) <= LEAST_STEPS:
        return None
    first = next(i for i, items in enumerate(done) if items >= FROM_SHARE * done[-1])
    return first, next(i for i, items in enumerate(done) if items >= TO_SHARE * done[-1])


def _done(history: History) -> list[float]:
    """Source items that are done by each view.

    `finished` moves by whole epochs. Smoother, and the same in the end, is the mean share of their items that the units
    have taken.
    """
    finished = num(history.run, "finished")
    shares = _share_taken(history.ticks)
    return [share * finished for share in shares] or [num(tick.run, "finished") for tick in history.ticks]


def _share_taken(ticks: Sequence[Tick]) -> list[float]:
    """Of the items that each unit takes in the whole run, the share that it has taken by each tick; their mean."""
    totals = {name: num(unit, "taken_total") for name, unit in ticks[-1].units.items()} if ticks else {}
    totals = {name: total for name, total in totals.items() if total}
    if not totals:
        return []
    return [
        sum(num(tick.units.get(name, {}), "taken_total") / total for name, total in totals.items()) / len(totals)
        for tick in ticks
    ]


def _predicted(history: History) -> float:
    """What the plans of the steady state expected, in the middle; if there was none, the last that said something. Of a
    run in several waves: what its plan said of all of them together."""
    if num(history.run, "waves") > 1:
        plan = history.plan()
        return plan.rate if plan else 0.0
    window = _steady(history)
    ticks = history.ticks[window[0] : window[1] + 1] if window is not None else history.ticks[-1:]
    found = [value for value in (num(tick.run, "predicted") for tick in ticks) if value]
    if found:
        return statistics.median(found)
    return next((num(tick.run, "predicted") for tick in reversed(history.ticks) if num(tick.run, "predicted")), 0.0)


def _planned(history: History) -> tuple[float, str]:
    """What the plan in the folder says, and where it has its speeds from. Read by hand: a plan of a large cluster takes
    long to check, and this is asked often."""
    plan = read_object(history.folder.plan)
    units = plan.get("units")
    sources = {unit.get("rate_source") for unit in units if isinstance(unit, dict)} if isinstance(units, list) else ()
    weakest = next((source for source in ("assumed", "measured", "given") if source in sources), "")
    return (num(plan, "rate") if weakest in ("measured", "given") else 0.0), weakest


def _rates(history: History) -> tuple[float, ...]:
    views = list(zip(history.ticks, _done(history), strict=True))
    return tuple(
        max(0.0, (after[1] - before[1]) / (after[0].t - before[0].t))
        for before, after in pairwise(views)
        if after[0].t > before[0].t
    )


def _unit(history: History, name: str, bottleneck: float) -> UnitSummary:
    ticks, last = history.ticks, history.units[name]
    taken = [(tick.t, num(tick.units.get(name, {}), "taken_total")) for tick in ticks]
    final = taken[-1][1]
    # from the last view without an item to the first with all of them: the time in which it worked
    begin = max((t for t, count in taken if not count), default=taken[0][0])
    end = min(t for t, count in taken if count >= final)
    alive = _worker_seconds(ticks, name, with_starting=False)
    seen = [tick.units[name] for tick in ticks if name in tick.units]
    whole = {key: int(num(last, key)) for key in ("queued", "ready")}
    totals = {
        key: int(num(last, f"{key}_total")) for key in ("given", "aside", "retries", "started", "stopped", "lost")
    }
    return UnitSummary(
        name=name,
        wave=int(num(last, "wave")),
        taken=int(final),
        rate=final / (end - begin) if end > begin else 0.0,
        # a run may be over before anybody looked
        most_workers=max(int(bool(final)), int(max(num(unit, "ready") + num(unit, "draining") for unit in seen))),
        busy=num(last, "busy_s_total") / alive if alive else None,
        setup_s=num(last, "setup_s_total"),
        bottleneck=bottleneck,
        stages=_stages(last.get("stages")),
        **_measured(history.unit_uses.get(name, [])),
        **whole,
        **totals,
    )


def _stages(told: object) -> tuple[StageSummary, ...]:
    """What the last view says; nothing, where it does not or cannot be read."""
    return tuple(
        StageSummary(str(stage[0]), int(stage[1]), int(stage[2]), float(stage[3]))
        for stage in (told if isinstance(told, list) else ())
        if isinstance(stage, list) and len(stage) == 4 and all(isinstance(it, int | float) for it in stage[1:])
    )


def _measured(uses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a run that was resumed, the peak of all its parts."""
    cpus = next((num(use, "cpus") for use in reversed(uses) if "cpus" in use), None)
    return {"cpus": cpus, "peak_bytes": int(max(num(use, "peak_bytes") for use in uses)) if uses else None}


def _advice(history: History) -> tuple[str, ...]:
    """The last that was said about each."""
    notes = [(it, it.data.get("data")) for it in history.notes("advice")]
    said = {(str(data.get("unit")), str(data.get("about"))): it.text for it, data in notes if isinstance(data, dict)}
    return tuple(said.values())


def _worker_seconds(ticks: Sequence[Tick], unit: str, *, with_starting: bool) -> float:
    """Workers over time, by trapezoids between views."""
    states = ("ready", "draining", "starting") if with_starting else ("ready", "draining")
    total = 0.0
    for before, after in pairwise(ticks):
        ends = (before.units.get(unit, {}), after.units.get(unit, {}))
        total += sum(num(data, state) for data in ends for state in states) / 2 * (after.t - before.t)
    return total


def _use(ticks: Sequence[Tick]) -> dict[str, ResourceUse]:
    found: dict[str, ResourceUse] = {}
    names = dict.fromkeys(name for tick in ticks for name in _used(tick))
    for name in names:
        pairs = [(tick.t, *_used(tick).get(name, (0, 0))) for tick in ticks]
        held = sum(before[1] * (after[0] - before[0]) for before, after in pairwise(pairs))
        seconds = pairs[-1][0] - pairs[0][0]
        mean = held / seconds if seconds > 0 else float(pairs[-1][1])
        found[name] = ResourceUse(mean, max(used for _, used, _ in pairs), max(total for *_, total in pairs))
    return found


def _used(tick: Tick) -> dict[str, tuple[int, int]]:
    use = tick.run.get("use")
    if not isinstance(use, dict):
        return {}
    good = {name: pair for name, pair in use.items() if isinstance(pair, list) and len(pair) == 2}
    return {name: (pair[0], pair[1]) for name, pair in good.items() if all(isinstance(it, int) for it in pair)}
