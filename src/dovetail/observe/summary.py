"""Summary of a run in numbers: rates, units, nodes, bottlenecks, resource use."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dovetail.control.events import LossCause
from dovetail.documents.yaml_writer import yaml_literal
from dovetail.errors import Change, Subject
from dovetail.observe.run_folder import number_field, read_json_object
from dovetail.observe.run_header import run_kind
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.streaming.view import CALLS
from dovetail.text_format import terminal_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.observe.history import RunHistory, TimelineEvent, ViewRecord

STOPPED_ON_COMMAND = f"{LossCause.STOPPED.value}: "


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node over the whole run. None: not measured."""

    name: str
    workers: dict[str, int]
    """Unit -> the maximum number of its workers with a rank on this node, as far as recorded."""
    cpus: float | None = None
    """Average busy CPUs of its machine, including other work."""
    cpu_count: int | None = None
    peak_bytes: int | None = None
    """Peak memory use of its machine, including other work."""
    memory_bytes: int | None = None
    gpu_share: float | None = None
    """Average utilisation of its cards."""
    left: str | None = None
    """Why it left; None: it was present until the end."""


def summarize_nodes(history: RunHistory) -> tuple[NodeSummary, ...]:
    """Every node that had a worker, was measured, joined or left, in the order of their names."""
    lives, left = _peak_workers(history), _departure_reasons(history)
    names = {*lives, *left, *history.node_uses} - {""}
    return tuple(_summarize_node(history, name, lives.get(name, {}), left.get(name)) for name in sorted(names))


def _summarize_node(history: RunHistory, name: str, alive: Mapping[str, int], left: str | None) -> NodeSummary:
    lines = history.node_uses.get(name, [])
    workers = dict(alive)
    for line in lines:
        value = line.get("workers")
        counts: dict[str, Any] = value if isinstance(value, dict) else {}
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
    """Every node that joined or left -> why it left."""
    found: dict[str, str | None] = {}
    for it in history.timeline:
        if it.kind == "node" and isinstance(it.data.get("node"), str):
            gone = it.data.get("do") == "left"
            found[it.data["node"]] = str(it.data.get("why") or "unknown reason") if gone else None
    return found


def _peak_workers(history: RunHistory) -> dict[str, dict[str, int]]:
    """Node -> unit -> the maximum number of workers at once, from individual worker lines."""
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
        # a worker that starts when another ends does not run beside it
        there = most = 0
        for _, step in sorted(steps):
            there += step
            most = max(most, there)
        if most:
            found.setdefault(node, {})[unit] = most
    return found


STEADY_FROM_SHARE, STEADY_TO_SHARE = 0.2, 0.8
MIN_DISTINCT_COUNTS = 5
"""Minimum number of different counts for a steady rate."""


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage of a unit over the whole run."""

    name: str
    taken: int
    given: int
    seconds: float
    """Seconds in its own code, of all workers together."""


@dataclass(frozen=True, slots=True)
class UnitSummary:
    """One unit over the whole run."""

    name: str
    wave: int
    taken: int
    given: int
    failed: int
    retries: int
    rate: float
    """Input items per second, from its first item to its last."""
    queued: int
    ready: int
    most_workers: int
    started: int
    stopped: int
    lost: int
    busy: float | None
    """Share of its workers' time since they were ready that was spent in user code."""
    setup_s: float
    bottleneck: float
    """Share of the time in which it was the bottleneck."""
    cpus: float | None = None
    """Average CPUs used by one ready worker; None: not measured."""
    peak_bytes: int | None = None
    """Peak memory of one worker; None: not measured."""
    stages: tuple[StageSummary, ...] = ()
    """Stages of the unit, in real runs; several if fused."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Amount of a resource that workers held, in its integer unit."""

    mean: float
    peak: int
    total: int


RECIPE_KEYS = {"cpus": "num_cpus", "memory": "memory"}
"""Keys of an operator of a recipe for what a worker requests."""
KNOWN_RATE_SOURCES = ("measured", "given")
"""Origins of speeds from which a rate can be predicted, the weakest first."""


@dataclass(frozen=True, slots=True, repr=False)
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
    failed: int
    mean_rate: float
    """Source items per second over the whole run."""
    steady_rate: float | None
    """See `steady_rate`; None: too few data."""
    predicted: float
    rates: tuple[float, ...]
    """Source items per second, one number per interval between two views."""
    replans: int
    source_limited: float
    """Share of the time in which all units waited for the source."""
    use: dict[str, ResourceUse]
    worker_seconds: float
    setup_s: float
    units: tuple[UnitSummary, ...]
    decisions: tuple[tuple[float, str], ...]
    errors: tuple[tuple[float, str], ...]
    folder: str
    advice: tuple[str, ...] = ()
    """Resource requests to change."""
    planned: float = 0.0
    """Source items per second that the initial plan expects; 0: no plan, or the speed of a stage was not known."""
    planned_from: str = ""
    """Origin of that plan's speeds: given, measured or unknown; the weakest of all."""
    nodes: tuple[NodeSummary, ...] = ()
    """Every node with a recorded event."""
    table: str = ""
    column: str = ""
    """The table and the column that a backfill fills."""
    noun: str = "items"
    """What `finished`, `total`, `delivered` and `failed` count; stages always count items."""
    outputs: tuple[str, ...] = ()
    """Files, folders and tables that results are written to; they are complete when the run has finished."""

    def __str__(self) -> str:
        from dovetail.observe.summary_text import short_summary  # late: it imports this module

        return terminal_text("\n".join(short_summary(self).lines()))

    def __repr__(self) -> str:
        return f"<RunSummary {self.id}: {self.outcome}>"

    def details(self) -> str:
        """All figures as text, as `dovetail status` prints them."""
        from dovetail.observe.summary_text import result_lines

        return terminal_text("\n".join(result_lines(self)))

    @property
    def outcome(self) -> str:
        """'finished after 3.2 s, 1000 of 1000 items in, 990 out, 10 failed'."""
        from dovetail.observe.summary_text import count_text, status_text

        return f"{status_text(self)}, {count_text(self)}"

    def _repr_html_(self) -> str:
        from dovetail.observe.summary_text import unit_html

        return unit_html(self)

    @property
    def dropped(self) -> int:
        """Input items of a stage without output, as far as counts show: not visible if other items fan out."""
        return sum(max(0, unit.taken - unit.failed - unit.given) for unit in self.units)

    @property
    def setup_share(self) -> float:
        """Share of all worker time that was spent in setup."""
        return min(1.0, self.setup_s / self.worker_seconds) if self.worker_seconds else 0.0

    @property
    def reached(self) -> float:
        """The steady rate, else that of the whole run."""
        return self.steady_rate or self.mean_rate

    @property
    def expected(self) -> float:
        """The rate to compare with: the prediction of the plan; for a simulated run, that of its replans. 0: there is
        none, because the speed of a stage was not known."""
        if self.planned_from not in KNOWN_RATE_SOURCES:
            return 0.0
        return self.predicted if self.virtual else self.planned

    def to_dict(self) -> dict[str, Any]:
        more = {"reached": self.reached, "expected": self.expected}
        return asdict(self) | {"setup_share": self.setup_share, "dropped": self.dropped} | more


def summarize_run(history: RunHistory, wall: float | None = None) -> RunSummary:
    run, header = history.run, history.header
    finished = int(number_field(run, "finished"))
    shares = history.bottlenecks()
    units = tuple(_summarize_unit(history, name, shares.get(name, 0.0)) for name in history.units)
    total = run.get("total") if run.get("total") is not None else header.get("items")
    errors = _error_events(history)
    planned, planned_from = _planned_rate(history)
    recorded = header.get("more")
    more = recorded if isinstance(recorded, dict) else {}
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
        failed=int(number_field(run, "failed")),
        mean_rate=finished / history.seconds if history.seconds > 0 else 0.0,
        steady_rate=steady_rate(history),
        predicted=_predicted_rate(history),
        rates=_interval_rates(history),
        replans=int(number_field(run, "replans")),
        source_limited=shares.get("source", 0.0) if "source" not in history.units else 0.0,
        use=_resource_use(history.ticks),
        worker_seconds=sum(
            _worker_seconds(last_session(history.ticks), unit.name, with_starting=True) for unit in units
        ),
        setup_s=sum(unit.setup_s for unit in units),
        units=units,
        decisions=tuple((it.t, it.text) for it in history.notes("decision")),
        errors=tuple((it.t, it.text) for it in errors),
        folder=str(history.folder.path),
        advice=_latest_advice(history),
        planned=planned,
        planned_from=planned_from,
        nodes=summarize_nodes(history),
        table=str(more.get("table", "")),
        column=str(more.get("column", "")),
        noun=str(run.get("noun") or (CALLS if run_kind(header) == "actors" else "items")),
        outputs=tuple(map(str, sinks)) if isinstance(sinks := more.get("sinks"), list) else (),
    )


def _error_events(history: RunHistory) -> list[TimelineEvent]:
    """Errors and losses of workers, without the workers that were stopped because the run ended."""
    ends = [
        it.t for it in history.timeline if it.data.get("what") == "run" and "verdict" in (it.data.get("data") or {})
    ]
    end = min(ends, default=float("inf"))
    return [
        it
        for it in history.timeline
        if it.data.get("what") == "error"
        or (it.kind == "lost" and not (it.t >= end and str(it.data.get("why")).startswith(STOPPED_ON_COMMAND)))
    ]


def steady_rate(history: RunHistory) -> float | None:
    """Source items per second without ramp-up and tail.

    The slope between the first view with a fifth of all items done and the first with four fifths: few items are done
    while workers are being set up, and stragglers come after four fifths. See `_items_done`. A run in several waves has
    no steady state: its rate is items over the whole time. None: too few data between two views.
    """
    finished = number_field(history.run, "finished")
    if not history.ticks or not finished:
        return None
    if number_field(history.run, "waves") > 1:
        return finished / history.seconds if history.seconds > 0 else None
    views = last_session(history.ticks)
    window = _steady_window(views)
    if window is None:
        return None
    done, (first, last) = _items_done(views), window
    seconds = views[last].t - views[first].t
    return (done[last] - done[first]) / seconds if seconds > 0 else None


def last_session(ticks: Sequence[ViewRecord]) -> Sequence[ViewRecord]:
    """The views since the last resume. Totals of units count from there: one that decreases marks the start."""
    for place in range(len(ticks) - 1, 0, -1):
        before, after = ticks[place - 1].units, ticks[place].units
        if any(_has_restarted(before.get(name, {}), unit) for name, unit in after.items()):
            return ticks[place:]
    return ticks


def _has_restarted(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return any(number_field(after, name) < number_field(before, name) for name in ("taken_total", "started_total"))


def _steady_window(views: Sequence[ViewRecord]) -> tuple[int, int] | None:
    """The first and the last view of the steady state."""
    done = _items_done(views)
    if len(set(done)) <= MIN_DISTINCT_COUNTS:
        return None
    first = next(i for i, items in enumerate(done) if items >= STEADY_FROM_SHARE * done[-1])
    return first, next(i for i, items in enumerate(done) if items >= STEADY_TO_SHARE * done[-1])


def _items_done(views: Sequence[ViewRecord]) -> list[float]:
    """Source items done by each view, of those that were done in these views.

    `finished` advances by whole epochs. The share of items that every unit has taken is smoother and ends at the same
    value. A fast unit runs ahead of a slow one until its queue is full, so the unit that is furthest behind counts.
    """
    counts = [number_field(view.run, "finished") for view in views]
    shares = _share_taken(views)
    if not shares:
        return counts
    finished_before = 0.0 if shares[0] else counts[0]  # by the sessions before a resume
    return [share * (counts[-1] - finished_before) for share in shares]


def _share_taken(views: Sequence[ViewRecord]) -> list[float]:
    """Share of its input that the unit furthest behind has taken, at each view."""
    totals = {name: number_field(unit, "taken_total") for name, unit in views[-1].units.items()} if views else {}
    totals = {name: total for name, total in totals.items() if total}
    if not totals:
        return []
    return [
        min(number_field(view.units.get(name, {}), "taken_total") / total for name, total in totals.items())
        for view in views
    ]


def _predicted_rate(history: RunHistory) -> float:
    """Median of what the plans of the steady state expected; without a steady state, the last expectation. For a run in
    several waves: what its plan expected for all of them together."""
    if number_field(history.run, "waves") > 1:
        plan = history.plan()
        return plan.rate or 0.0 if plan else 0.0
    views = last_session(history.ticks)
    window = _steady_window(views)
    ticks = views[window[0] : window[1] + 1] if window is not None else views[-1:]
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
    """Expected rate and origin of speeds in the plan file. Parsed directly: validating the plan of a large cluster is
    slow, and this is called often."""
    plan = read_json_object(history.folder.plan)
    units = plan.get("units")
    sources = {unit.get("rate_source") for unit in units if isinstance(unit, dict)} if isinstance(units, list) else ()
    unknown = [source for source in sources if source not in KNOWN_RATE_SOURCES]
    if unknown or not sources:
        return 0.0, str(unknown[0]) if unknown else ""
    return number_field(plan, "rate"), next(source for source in KNOWN_RATE_SOURCES if source in sources)


def _interval_rates(history: RunHistory) -> tuple[float, ...]:
    session = last_session(history.ticks)
    views = list(zip(session, _items_done(session), strict=True))
    return tuple(
        max(0.0, (after[1] - before[1]) / (after[0].t - before[0].t))
        for before, after in pairwise(views)
        if after[0].t > before[0].t
    )


def _summarize_unit(history: RunHistory, name: str, bottleneck: float) -> UnitSummary:
    ticks, last = last_session(history.ticks), history.units[name]
    taken = [(tick.t, number_field(tick.units.get(name, {}), "taken_total")) for tick in ticks]
    final = taken[-1][1]
    # from the last view without an item to the first with all of them: its working time
    begin = max((t for t, count in taken if not count), default=taken[0][0])
    end = min(t for t, count in taken if count >= final)
    alive = _worker_seconds(ticks, name, with_starting=False)
    seen = [tick.units[name] for tick in ticks if name in tick.units]
    whole = {key: int(number_field(last, key)) for key in ("queued", "ready")}
    totals = {
        key: int(number_field(last, f"{key}_total"))
        for key in ("given", "failed", "retries", "started", "stopped", "lost")
    }
    return UnitSummary(
        name=name,
        wave=int(number_field(last, "wave")),
        taken=int(final),
        rate=final / (end - begin) if end > begin else 0.0,
        # a run may end before the first view
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


def _parse_stages(value: object) -> tuple[StageSummary, ...]:
    """A value of the last view; empty if missing or unreadable."""
    return tuple(
        StageSummary(str(stage[0]), int(stage[1]), int(stage[2]), float(stage[3]))
        for stage in (value if isinstance(value, list) else ())
        if isinstance(stage, list) and len(stage) == 4 and all(isinstance(it, int | float) for it in stage[1:])
    )


def _measured_use(uses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For a resumed run, the peak over all sessions."""
    cpus = next((number_field(use, "cpus") for use in reversed(uses) if "cpus" in use), None)
    return {"cpus": cpus, "peak_bytes": int(max(number_field(use, "peak_bytes") for use in uses)) if uses else None}


def _latest_advice(history: RunHistory) -> tuple[str, ...]:
    """The last note about each subject, with the change as it is written for this run."""
    notes = [(it.text, it.data.get("data")) for it in history.notes("advice")]
    latest = {
        (str(data.get("unit")), str(data.get("about"))): (text, data) for text, data in notes if isinstance(data, dict)
    }
    return tuple(_advice_text(history, unit, about, *last) for (unit, about), last in latest.items())


def _advice_text(history: RunHistory, unit: str, about: str, text: str, data: Mapping[str, Any]) -> str:
    """As an option for a run of a pipeline file, as a key for a recipe, else as Python."""
    more, reason, value = history.header.get("more"), data.get("reason"), data.get("value")
    if not isinstance(more, dict) or not isinstance(reason, str) or not isinstance(value, str | float | int):
        return text
    if "recipe" in more:
        return f"{reason}: {RECIPE_KEYS.get(about, about)}: {yaml_literal(value)}"
    asked = more.get("asked")
    if not isinstance(asked, dict) or not isinstance(asked.get("file"), str):
        return text
    subject = Subject("stage", unit, tuple(unit.split("+")))
    return f"{reason}: {OptionRenderer().fix(Change({about: value}, (subject,)))}"


def _worker_seconds(ticks: Sequence[ViewRecord], unit: str, *, with_starting: bool) -> float:
    """Worker-seconds, by trapezoids between views."""
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
