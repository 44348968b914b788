"""Summary of a run in numbers: rates, units, nodes, bottlenecks, resource use."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dovetail.observe.run_folder import number_field, read_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.observe.history import RunHistory, ViewRecord


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node over the whole run. None: nobody measured."""

    name: str
    workers: dict[str, int]
    """Unit -> the most of its workers that were there at once, all or in part, as far as that was seen."""
    cpus: float | None = None
    """CPUs of its machine that were busy on average, with the work of others."""
    cpu_count: int | None = None
    peak_bytes: int | None = None
    """The most memory of its machine that was in use, with the work of others."""
    memory_bytes: int | None = None
    gpu_share: float | None = None
    """Of the time something ran on its cards, on average over them."""
    left: str | None = None
    """Why it is not there any more; None: it is, or was till the end."""


def summarize_nodes(history: RunHistory) -> tuple[NodeSummary, ...]:
    """By name, every node that had a worker, was measured, came or went."""
    lives, left = _peak_workers(history), _departure_reasons(history)
    names = {*lives, *left, *history.node_uses} - {""}
    return tuple(_summarize_node(history, name, lives.get(name, {}), left.get(name)) for name in sorted(names))


def _summarize_node(history: RunHistory, name: str, alive: Mapping[str, int], left: str | None) -> NodeSummary:
    lines = history.node_uses.get(name, [])
    workers = dict(alive)
    for line in lines:
        told = line.get("workers")
        counts: dict[str, Any] = told if isinstance(told, dict) else {}
        for unit in counts:
            workers[unit] = max(workers.get(unit, 0), int(number_field(counts, unit)))
    last = lines[-1] if lines else {}
    cpus = [number_field(line, "cpus") for line in lines if "cpus" in line]
    memory = [int(number_field(line, "memory_used_bytes")) for line in lines if "memory_used_bytes" in line]
    return NodeSummary(
        name=name,
        workers={unit: most for unit, most in sorted(workers.items()) if most},
        cpus=sum(cpus) / len(cpus) if cpus else None,
        cpu_count=int(number_field(last, "cpu_count")) or None,
        peak_bytes=max(memory, default=None),
        memory_bytes=int(number_field(last, "memory_bytes")) or None,
        gpu_share=_gpu_share([it for (node, _), it in history.gpu_uses.items() if node == name]),
        left=left,
    )


def _gpu_share(cards: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    found = [number_field(line, "use_percent") for lines in cards for line in lines if "use_percent" in line]
    return sum(found) / len(found) / 100 if found else None


def _departure_reasons(history: RunHistory) -> dict[str, str | None]:
    """Every node that came or went -> why it is not there any more."""
    found: dict[str, str | None] = {}
    for it in history.timeline:
        if it.kind == "node" and isinstance(it.data.get("node"), str):
            gone = it.data.get("do") == "left"
            found[it.data["node"]] = str(it.data.get("why") or "no reason is known") if gone else None
    return found


def _peak_workers(history: RunHistory) -> dict[str, dict[str, int]]:
    """Node -> unit -> the most workers at once, by the lines of those that have some."""
    moves: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for life in history.worker_lifetimes.values():
        begun = life.started if life.started is not None else life.ready
        for node in dict.fromkeys(life.nodes or (life.node,)):
            steps = moves.setdefault((node, life.unit), [])
            if begun is not None:
                steps.append((begun, 1))
                steps.append((float("inf") if life.ended is None else life.ended, -1))
    found: dict[str, dict[str, int]] = {}
    for (node, unit), steps in moves.items():
        # one that comes when another goes is not beside it
        there = most = 0
        for _, step in sorted(steps):
            there += step
            most = max(most, there)
        if most:
            found.setdefault(node, {})[unit] = most
    return found


STEADY_FROM_SHARE, STEADY_TO_SHARE = 0.2, 0.8
MIN_DISTINCT_COUNTS = 5
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
class RunSummary:
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
        from dovetail.observe.summary_text import summary_lines  # late: it needs this module

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


def summarize_run(history: RunHistory, wall: float | None = None) -> RunSummary:
    run, header = history.run, history.header
    finished = int(number_field(run, "finished"))
    shares = history.bottlenecks()
    units = tuple(_summarize_unit(history, name, shares.get(name, 0.0)) for name in history.units)
    total = run.get("total") if run.get("total") is not None else header.get("items")
    errors = [it for it in history.timeline if it.kind == "lost" or it.data.get("what") == "error"]
    planned, planned_from = _planned_rate(history)
    return RunSummary(
        id=history.id,
        name=history.name,
        status=history.status(wall),
        error=str(header.get("error") or run.get("error") or ""),
        engine=str(header.get("engine", "")),
        cluster=str(header.get("cluster", "")),
        virtual=history.virtual,
        seconds=history.seconds,
        read=int(number_field(run, "read")),
        total=total if isinstance(total, int) else None,
        finished=finished,
        delivered=int(number_field(run, "delivered")),
        aside=int(number_field(run, "aside")),
        mean_rate=finished / history.seconds if history.seconds > 0 else 0.0,
        steady_rate=steady_rate(history),
        predicted=_predicted_rate(history),
        rates=_interval_rates(history),
        replans=int(number_field(run, "replans")),
        source_limited=shares.get("source", 0.0) if "source" not in history.units else 0.0,
        use=_resource_use(history.ticks),
        worker_seconds=sum(_worker_seconds(history.ticks, unit.name, with_starting=True) for unit in units),
        setup_s=sum(unit.setup_s for unit in units),
        units=units,
        decisions=tuple((it.t, it.text) for it in history.notes("decision")),
        errors=tuple((it.t, it.text) for it in errors),
        folder=str(history.folder.path),
        advice=_latest_advice(history),
        planned=planned,
        planned_from=planned_from,
        nodes=summarize_nodes(history),
    )


def steady_rate(history: RunHistory) -> float | None:
    """Source items per second without ramp-up and tail.

    The slope between the first view with a fifth of all items done and the first with four fifths: while workers are
    still being set up few items are done, and what waits for the last stragglers is beyond the four fifths. See
    `_done`. A run in several waves has no steady state: its rate is items over the whole time. None if too little
    happened between two views to say.
    """
    finished = number_field(history.run, "finished")
    if not history.ticks or not finished:
        return None
    if number_field(history.run, "waves") > 1:
        return finished / history.seconds if history.seconds > 0 else None
    window = _steady_window(history)
    if window is None:
        return None
    done, (first, last) = _items_done(history), window
    seconds = history.ticks[last].t - history.ticks[first].t
    return (done[last] - done[first]) / seconds if seconds > 0 else None


def _steady_window(history: RunHistory) -> tuple[int, int] | None:
    """The first and the last view of the steady state."""
    done = _items_done(history)
    if len(set(done)) <= MIN_DISTINCT_COUNTS:
        return None
    first = next(i for i, items in enumerate(done) if items >= STEADY_FROM_SHARE * done[-1])
    return first, next(i for i, items in enumerate(done) if items >= STEADY_TO_SHARE * done[-1])


def _items_done(history: RunHistory) -> list[float]:
    """Source items that are done by each view.

    `finished` moves by whole epochs. Smoother, and the same in the end, is the mean share of their items that the units
    have taken.
    """
    finished = number_field(history.run, "finished")
    shares = _share_taken(history.ticks)
    return [share * finished for share in shares] or [number_field(tick.run, "finished") for tick in history.ticks]


def _share_taken(ticks: Sequence[ViewRecord]) -> list[float]:
    """Of the items that each unit takes in the whole run, the share that it has taken by each tick; their mean."""
    totals = {name: number_field(unit, "taken_total") for name, unit in ticks[-1].units.items()} if ticks else {}
    totals = {name: total for name, total in totals.items() if total}
    if not totals:
        return []
    return [
        sum(number_field(tick.units.get(name, {}), "taken_total") / total for name, total in totals.items())
        / len(totals)
        for tick in ticks
    ]


def _predicted_rate(history: RunHistory) -> float:
    """What the plans of the steady state expected, in the middle; if there was none, the last that said something. Of a
    run in several waves: what its plan said of all of them together."""
    if number_field(history.run, "waves") > 1:
        plan = history.plan()
        return plan.rate if plan else 0.0
    window = _steady_window(history)
    ticks = history.ticks[window[0] : window[1] + 1] if window is not None else history.ticks[-1:]
    found = [value for value in (number_field(tick.run, "predicted") for tick in ticks) if value]
    if found:
        return statistics.median(found)
    return next(
        (
            number_field(tick.run, "predicted")
            for tick in reversed(history.ticks)
            if number_field(tick.run, "predicted")
        ),
        0.0,
    )


def _planned_rate(history: RunHistory) -> tuple[float, str]:
    """What the plan in the folder says, and where it has its speeds from. Read by hand: a plan of a large cluster takes
    long to check, and this is asked often."""
    plan = read_json_object(history.folder.plan)
    units = plan.get("units")
    sources = {unit.get("rate_source") for unit in units if isinstance(unit, dict)} if isinstance(units, list) else ()
    weakest = next((source for source in ("assumed", "measured", "given") if source in sources), "")
    return (number_field(plan, "rate") if weakest in ("measured", "given") else 0.0), weakest


def _interval_rates(history: RunHistory) -> tuple[float, ...]:
    views = list(zip(history.ticks, _items_done(history), strict=True))
    return tuple(
        max(0.0, (after[1] - before[1]) / (after[0].t - before[0].t))
        for before, after in pairwise(views)
        if after[0].t > before[0].t
    )


def _summarize_unit(history: RunHistory, name: str, bottleneck: float) -> UnitSummary:
    ticks, last = history.ticks, history.units[name]
    taken = [(tick.t, number_field(tick.units.get(name, {}), "taken_total")) for tick in ticks]
    final = taken[-1][1]
    # from the last view without an item to the first with all of them: the time in which it worked
    begin = max((t for t, count in taken if not count), default=taken[0][0])
    end = min(t for t, count in taken if count >= final)
    alive = _worker_seconds(ticks, name, with_starting=False)
    seen = [tick.units[name] for tick in ticks if name in tick.units]
    whole = {key: int(number_field(last, key)) for key in ("queued", "ready")}
    totals = {
        key: int(number_field(last, f"{key}_total"))
        for key in ("given", "aside", "retries", "started", "stopped", "lost")
    }
    return UnitSummary(
        name=name,
        wave=int(number_field(last, "wave")),
        taken=int(final),
        rate=final / (end - begin) if end > begin else 0.0,
        # a run may be over before anybody looked
        most_workers=max(
            int(bool(final)), int(max(number_field(unit, "ready") + number_field(unit, "draining") for unit in seen))
        ),
        busy=number_field(last, "busy_s_total") / alive if alive else None,
        setup_s=number_field(last, "setup_s_total"),
        bottleneck=bottleneck,
        stages=_parse_stages(last.get("stages")),
        **_measured_use(history.unit_uses.get(name, [])),
        **whole,
        **totals,
    )


def _parse_stages(told: object) -> tuple[StageSummary, ...]:
    """What the last view says; nothing, where it does not or cannot be read."""
    return tuple(
        StageSummary(str(stage[0]), int(stage[1]), int(stage[2]), float(stage[3]))
        for stage in (told if isinstance(told, list) else ())
        if isinstance(stage, list) and len(stage) == 4 and all(isinstance(it, int | float) for it in stage[1:])
    )


def _measured_use(uses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a run that was resumed, the peak of all its parts."""
    cpus = next((number_field(use, "cpus") for use in reversed(uses) if "cpus" in use), None)
    return {"cpus": cpus, "peak_bytes": int(max(number_field(use, "peak_bytes") for use in uses)) if uses else None}


def _latest_advice(history: RunHistory) -> tuple[str, ...]:
    """The last that was said about each."""
    notes = [(it, it.data.get("data")) for it in history.notes("advice")]
    said = {(str(data.get("unit")), str(data.get("about"))): it.text for it, data in notes if isinstance(data, dict)}
    return tuple(said.values())


def _worker_seconds(ticks: Sequence[ViewRecord], unit: str, *, with_starting: bool) -> float:
    """Workers over time, by trapezoids between views."""
    states = ("ready", "draining", "starting") if with_starting else ("ready", "draining")
    total = 0.0
    for before, after in pairwise(ticks):
        ends = (before.units.get(unit, {}), after.units.get(unit, {}))
        total += sum(number_field(data, state) for data in ends for state in states) / 2 * (after.t - before.t)
    return total


def _resource_use(ticks: Sequence[ViewRecord]) -> dict[str, ResourceUse]:
    found: dict[str, ResourceUse] = {}
    names = dict.fromkeys(name for tick in ticks for name in _used_at(tick))
    for name in names:
        pairs = [(tick.t, *_used_at(tick).get(name, (0, 0))) for tick in ticks]
        held = sum(before[1] * (after[0] - before[0]) for before, after in pairwise(pairs))
        seconds = pairs[-1][0] - pairs[0][0]
        mean = held / seconds if seconds > 0 else float(pairs[-1][1])
        found[name] = ResourceUse(mean, max(used for _, used, _ in pairs), max(total for *_, total in pairs))
    return found


def _used_at(tick: ViewRecord) -> dict[str, tuple[int, int]]:
    use = tick.run.get("use")
    if not isinstance(use, dict):
        return {}
    good = {name: pair for name, pair in use.items() if isinstance(pair, list) and len(pair) == 2}
    return {name: (pair[0], pair[1]) for name, pair in good.items() if all(isinstance(it, int) for it in pair)}
