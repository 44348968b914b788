"""Measured profiles of stages: lookup for planning, and the observer that measures a run for later ones.

A profile is the number of items per second that one worker takes in while it always has input. Time in user code
alone
underestimates the cost of messages, so for units that were saturated the ratio of elapsed to busy time corrects it;
other
units get a typical overhead per message.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.errors import DovetailError
from dovetail.observe.profiles import ProfileKey, StageMeasurement, read_profile, write_profiles
from dovetail.observe.text_format import format_count, format_duration
from dovetail.pipeline.code_hash import code_hash
from dovetail.scheduling.demand import Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.pipeline.stage import Stage
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.run_spec import RunSpec
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import UnitSpec
    from dovetail.streaming.view import StreamView, UnitView

SinkKinds = str | Mapping[str, str]
"""Kind of sink: one for all leaves, or leaf -> kind."""

SAMPLE_INTERVAL_S = 0.1
MIN_SATURATED_WORKER_S = 0.25
"""Minimum worker-seconds for a measurement of a saturated unit."""
MIN_SATURATED_MESSAGES = 4.0
MIN_BUSY_SHARE = 0.5
"""Minimum busy share of its slots for a unit to count as saturated: a unit that is blocked by later units also has a
backlog."""
MESSAGE_OVERHEAD_S = 0.0003
MIN_MESSAGE_WORK_S = 0.004
"""Approximate cost of a message outside of user code, and the work in the smallest message."""


# --- before a run


def load_profiles(
    pipeline: Pipeline, cluster: Cluster, reads: str = "", writes: SinkKinds = "", wall: float | None = None
) -> dict[str, Profile]:
    """Stage -> measurements of earlier runs, where there are any. `reads` and `writes` are the kinds of source and
    sink; measurements with other kinds are used if there are no better ones."""
    now = time.time() if wall is None else wall
    models = _card_models(cluster)
    found = {}
    for stage in pipeline.order:
        measured = _first_stored(_lookup_keys(pipeline, stage, models, reads, writes))
        if measured is not None:
            found[stage.name] = _profile(measured, now)
    return found


def source_sink_kinds(job: RunSpec) -> tuple[str, dict[str, str]]:
    """Kinds of the source and the sinks of a file, without opening them; "" matches any kind."""
    leaves = job.pipeline.leaves()
    if isinstance(job.sink, Mapping) and "stages" in job.sink:
        given = job.sink["stages"]
        return _source_kind(job.source), {leaf: _sink_kind(given.get(leaf)) for leaf in leaves}
    return _source_kind(job.source), dict.fromkeys(leaves, _sink_kind(job.sink))


def _source_kind(source: Any) -> str:
    """By the name of the first file; unknown for a folder."""
    if source is None:
        return ""
    if isinstance(source, Mapping) and "run" in source:
        return "iterable"
    from dovetail.data.file_formats import format_from_suffix  # late: most plans read no file
    from dovetail.data.sources import as_source_spec

    with suppress(DovetailError):
        spec = as_source_spec({"path": source} if isinstance(source, list) else source)
        return "" if spec is None else spec.format or format_from_suffix(spec.paths[0]) or ""
    return ""


def _sink_kind(sink: Any) -> str:
    if sink is None or (isinstance(sink, Mapping) and "run" in sink):
        return ""
    from dovetail.data.sinks import as_sink_spec

    with suppress(DovetailError):
        spec = as_sink_spec(sink)
        return "" if spec is None else spec.form[0]
    return ""


def _lookup_keys(
    pipeline: Pipeline, stage: Stage, models: Sequence[str], reads: str, writes: SinkKinds
) -> Iterator[ProfileKey]:
    """Keys, best first. The GPU model is not known before planning: the most frequent comes first."""
    code = code_hash(stage.run)
    for card in models if stage.shape.cards else ("",):
        exact = _key(pipeline, stage, code, card, reads, writes)
        yield exact
        if exact.reads or exact.writes:
            yield _key(pipeline, stage, code, card, "", "")


def _key(pipeline: Pipeline, stage: Stage, code: str, card: str, reads: str, writes: SinkKinds) -> ProfileKey:
    shape = stage.shape
    gpu = f"{shape.ranks} x {shape.cards} x ({shape.gpu_milli} {shape.gpu_memory_bytes})" if shape.cards else ""
    kind = writes if isinstance(writes, str) else writes.get(stage.name, "")
    return ProfileKey(
        code=code,
        batch_size=stage.batch_size,
        slots=stage.slots or 1,
        cpu_milli=shape.cpu_milli,
        gpu=gpu,
        card=card,
        reads=reads if not pipeline.parents(stage.name) else "",
        writes=kind if not pipeline.children(stage.name) else "",
    )


def _card_models(cluster: Cluster) -> list[str]:
    """GPU models of the cluster, the most frequent first."""
    counts = Counter(card.model for node in cluster.nodes for card in node.gpus)
    return [model for model, _ in counts.most_common()]


def _first_stored(keys: Iterator[ProfileKey]) -> StageMeasurement | None:
    return next((measured for measured in map(read_profile, keys) if measured is not None), None)


def _profile(measured: StageMeasurement, now: float) -> Profile:
    ago = format_duration(now - measured.when)
    runs = f"in {format_count(measured.runs, 'run')}, {'the last ' if measured.runs > 1 else ''}{ago} ago"
    return Profile(
        rate=1 / measured.seconds_per_item,
        returns=measured.returns,
        setup_s=measured.setup_s,
        peak_bytes=measured.peak_bytes,
        items=measured.items,
        when=measured.when,
        origin_text=runs,
    )


# --- during and after a run


def storage_keys(
    pipeline: Pipeline, plan: Plan, reads: str = "", writes: SinkKinds = ""
) -> dict[str, tuple[ProfileKey, ...]]:
    """Stage -> keys for the measurements of this run: exact, and for any kind of source and sink."""
    nodes = {node.name: node for node in plan.cluster.nodes}
    found = {}
    for stage in pipeline.order:
        seat = next(iter(plan.seats.get(stage.name, ())), None)
        card = nodes[seat.node].gpus[seat.gpus[0]].model if seat is not None and seat.gpus else ""
        code = code_hash(stage.run)
        keys = (_key(pipeline, stage, code, card, reads, writes), _key(pipeline, stage, code, card, "", ""))
        found[stage.name] = tuple(dict.fromkeys(keys))
    return found


@dataclass(slots=True)
class _SaturatedTime:
    """Time during which all workers of a unit had a backlog."""

    worker_s: float = 0.0
    busy_s: float = 0.0


class ProfileObserver:
    """Observer that samples a few times per second and stores measurements at the end."""

    def __init__(
        self,
        view: Callable[[float], StreamView],
        units: Sequence[UnitSpec],
        keys: Mapping[str, Sequence[ProfileKey]],
        *,
        peaks: Callable[[], Mapping[str, int]] = dict,
        keep: Callable[[Mapping[ProfileKey, StageMeasurement]], str] = write_profiles,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`keys` as from `storage_keys`; `peaks`: unit -> peak memory of one of its workers."""
        self._view = view
        self._slots = {unit.name: unit.slots for unit in units}
        self._keys = keys
        self._peaks, self._store, self._say = peaks, keep, say
        self._due = 0.0
        self._at = 0.0
        self._before: dict[str, UnitView] = {}
        self._saturated: dict[str, dict[int, _SaturatedTime]] = {}
        self._closed = False

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002
        if now >= self._due:
            self._due = now + SAMPLE_INTERVAL_S
            self._sample(now)

    def close(self, now: float) -> None:
        """Stores the measurements once."""
        if self._closed:
            return
        self._closed = True
        view = self._view(now)
        warning = self._store(self.measured(view))
        if warning:
            self._say(warning)

    def _sample(self, now: float) -> None:
        view, passed = self._view(now), now - self._at
        for unit in view.units:
            before = self._before.get(unit.name)
            if before is not None and _is_steady(before, unit):
                by_count = self._saturated.setdefault(unit.name, {})
                sums = by_count.setdefault(unit.ready, _SaturatedTime())
                sums.worker_s += unit.ready * passed
                sums.busy_s += unit.busy_s_total - before.busy_s_total
        self._before = {unit.name: unit for unit in view.units}
        self._at = now

    def measured(self, view: StreamView) -> dict[ProfileKey, StageMeasurement]:
        """Measurements of stages that did work, under all their keys."""
        peaks = self._peaks()
        found: dict[ProfileKey, StageMeasurement] = {}
        for unit in view.units:
            factor = self._overhead_factor(unit)
            ready = unit.started_total - unit.starting - unit.lost_total
            setup_s = unit.setup_s_total / ready if ready > 0 else None
            for name, taken, given, seconds in unit.stages:
                if taken > 0 and seconds > 0:
                    measured = StageMeasurement(
                        seconds_per_item=factor * seconds / taken,
                        returns=given / taken,
                        items=taken,
                        seconds=seconds,
                        setup_s=setup_s,
                        peak_bytes=peaks.get(unit.name),
                    )
                    found |= dict.fromkeys(self._keys.get(name, ()), measured)
        return found

    def _overhead_factor(self, unit: UnitView) -> float:
        """Worker seconds per second in user code."""
        slots = self._slots.get(unit.name, 1)
        longest = max(
            self._saturated.get(unit.name, {}).values(), key=lambda sums: sums.worker_s, default=_SaturatedTime()
        )
        per_batch = unit.busy_s_total / unit.batches_total if unit.batches_total else 0.0
        enough = max(MIN_SATURATED_WORKER_S, MIN_SATURATED_MESSAGES * per_batch)
        if longest.worker_s >= enough and longest.busy_s >= MIN_BUSY_SHARE * slots * longest.worker_s:
            return longest.worker_s / longest.busy_s
        return (1 + MESSAGE_OVERHEAD_S / max(MIN_MESSAGE_WORK_S, per_batch)) / slots


def _is_steady(before: UnitView, now: UnitView) -> bool:
    """Whether the workers were the same in both samples and all had a backlog."""
    if not (before.backlogged and now.backlogged and now.ready and before.ready == now.ready):
        return False
    return before.started_total == now.started_total and not (now.starting or now.draining or before.draining)
