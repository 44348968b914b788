"""Measured profiles of stages: lookup for planning, and the observer that measures a run for later ones.

A profile is the number of items per second that one worker takes in while it always has input. Every message is
measured from the moment when its worker could begin it until its result arrives, which includes the cost of the
message. Time in which a worker waited for input, or for space in a queue after it, does not count, nor do the first
message of a worker and batches that were not full.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapreplace
from typing import TYPE_CHECKING, Any, Self

from dovetail.control.commands import RunBatches
from dovetail.control.events import BatchesDone, BatchesReturned, WorkerLost
from dovetail.errors import DovetailError
from dovetail.observe.profile_store import (
    SMALL_SAMPLE_ITEMS,
    ProfileKey,
    StageMeasurement,
    read_profile,
    write_profiles,
)
from dovetail.pipeline.code_hash import code_hash
from dovetail.resources.cluster import Cluster
from dovetail.runtime.probe_end import MIN_PROBE_MESSAGES, is_precise
from dovetail.scheduling.stage_rates import Profile
from dovetail.streaming.settings import StreamOptions
from dovetail.text_format import format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.pipeline.stage import Stage
    from dovetail.runtime.run_spec import RunSpec
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import UnitSpec
    from dovetail.streaming.view import StreamView

USUAL_MESSAGE_S = StreamOptions().target_message_s
"""Least work in a message once the speed of its unit is known."""

SinkKinds = str | Mapping[str, str]
"""Kind of sink: one for all leaves, or leaf -> kind."""


# --- before a run


def load_profiles(
    pipeline: Pipeline,
    cluster: Cluster | str = "auto",
    reads: str = "",
    writes: SinkKinds = "",
    wall: float | None = None,
) -> dict[str, Profile]:
    """Measurements of the stages by earlier runs, for `dt.plan` and `dt.simulate`: stage -> profile.

    `reads` and `writes` are the kinds of source and sink, such as "jsonl"; measurements with other kinds are used if
    there are no better ones. `wall`: the time from which their age is given.
    """
    now = time.time() if wall is None else wall
    models = _card_models(Cluster.of(cluster))
    found = {}
    for stage in pipeline.order:
        measured = _best_stored(_lookup_keys(pipeline, stage, models, reads, writes))
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
    """Kind of a source, by the name of its first file; unknown for a folder."""
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


def _best_stored(keys: Iterator[ProfileKey]) -> StageMeasurement | None:
    """The first one, unless a later one is from a newer probe: a probe has no sink."""
    found = [measured for measured in map(read_profile, keys) if measured is not None]
    newer = [measured for measured in found[1:] if measured.probed and measured.when > found[0].when]
    return max(newer, key=lambda measured: measured.when) if newer else found[0] if found else None


def _profile(measured: StageMeasurement, now: float) -> Profile:
    ago = format_duration(now - measured.when)
    runs = f"in {format_count(measured.runs, 'run')}, {'the last ' if measured.runs > 1 else ''}{ago} ago"
    return Profile(
        rate=1 / measured.seconds_per_item,
        returns=measured.returns,
        setup_s=measured.setup_s,
        peak_bytes=measured.peak_bytes,
        cpu_s=measured.cpu_s_per_item,
        standard_error=measured.standard_error if measured.probed else None,
        source_rate=measured.source_rate,
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
class _WorkTime:
    """Work of a unit: slot-seconds, and items in, items out and seconds in user code per stage."""

    slot_s: float
    cpu_s: float
    messages: int
    stages: list[list[float]]
    squares: list[float]
    """Sums over messages: items squared, items times seconds, seconds squared."""

    @classmethod
    def of(cls, stages: int) -> Self:
        return cls(0.0, 0.0, 0, [[0, 0, 0.0] for _ in range(stages)], [0.0, 0.0, 0.0])

    def add(self, slot_s: float, cpu_s: float, stages: list[tuple[int, int, float]]) -> None:
        """`stages` ends with the stage that dropped all items."""
        self.slot_s += slot_s
        self.cpu_s += cpu_s
        self.messages += 1
        items = stages[0][0] if stages else 0
        for index, value in enumerate((items * items, items * slot_s, slot_s * slot_s)):
            self.squares[index] += value
        for total, counts in zip(self.stages, stages, strict=False):
            for index, count in enumerate(counts):
                total[index] += count

    @property
    def code_s(self) -> float:
        return sum(seconds for _, _, seconds in self.stages)

    @property
    def items(self) -> float:
        return self.stages[0][0]

    @property
    def standard_error(self) -> float | None:
        """Standard error of the seconds per item, as a share of them; None: too few messages."""
        if self.messages < MIN_PROBE_MESSAGES or not self.slot_s or not self.items:
            return None
        ratio = self.slot_s / self.items
        items, product, seconds = self.squares
        residuals = max(0.0, seconds - 2 * ratio * product + ratio * ratio * items)
        return float((residuals * self.messages / (self.messages - 1)) ** 0.5 / self.slot_s)

    @property
    def usual_slot_s(self) -> float:
        """Slot-seconds in messages of the usual size. Messages are smaller until the speed of a unit is known, and the
        cost of a message does not depend on its size."""
        usual_messages = self.code_s / USUAL_MESSAGE_S
        return self.code_s + max(0.0, self.slot_s - self.code_s) * min(1.0, usual_messages / self.messages)


@dataclass(slots=True)
class _SentMessage:
    """A message at a worker."""

    at: float
    worker: int
    unit: str
    full: bool
    """Whether all of its batches have the configured size."""


class _WorkerTime:
    """When the slots of a worker became free."""

    __slots__ = ("_free_at", "messages")

    def __init__(self, slots: int) -> None:
        self._free_at = [0.0] * slots
        self.messages = 0

    def end_message(self, sent_at: float, now: float) -> float:
        """Seconds for which a message that was sent then has used a slot. A message that was sent in advance waited
        until a slot became free."""
        self.messages += 1
        return now - max(sent_at, heapreplace(self._free_at, now))


class ProfileObserver:
    """Observer that measures every message and stores profiles at the end."""

    def __init__(
        self,
        view: Callable[[float], StreamView],
        units: Sequence[UnitSpec],
        keys: Mapping[str, Sequence[ProfileKey]],
        *,
        end_probe: Callable[[], None] | None = None,
        peaks: Callable[[], Mapping[str, int]] = dict,
        keep: Callable[[Mapping[ProfileKey, StageMeasurement]], str] = write_profiles,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`keys` as from `storage_keys`; `peaks`: unit -> peak memory of one of its workers; `end_probe`: the run is a
        probe, and this ends it when its measurements are precise enough."""
        self._view = view
        self._units = {unit.name: unit for unit in units}
        self._keys = keys
        self._probe = end_probe is not None
        self._end_probe = end_probe
        self._peaks, self._store, self._say = peaks, keep, say
        self._sent: dict[int, _SentMessage] = {}
        self._workers: dict[int, _WorkerTime] = {}
        self._steady: dict[str, _WorkTime] = {}
        self._first: dict[str, _WorkTime] = {}
        """First messages of workers, and messages with incomplete batches."""
        self._closed = False
        self._began_s: float | None = None
        """When the first message of a probe ended."""

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        for event in events:
            if isinstance(event, BatchesDone):
                self._end_message(now, event)
            elif isinstance(event, BatchesReturned):
                self._sent.pop(event.message, None)
            elif isinstance(event, WorkerLost) and self._workers.pop(event.worker, None) is not None:
                self._sent = {number: sent for number, sent in self._sent.items() if sent.worker != event.worker}
        for command in commands:
            if isinstance(command, RunBatches):
                full = command.items % command.batch_size == 0
                self._sent[command.message] = _SentMessage(now, command.worker, command.hosted, full)
        if self._end_probe is not None and self._is_precise(now):
            self._end_probe()
            self._end_probe = None

    def _is_precise(self, now: float) -> bool:
        if not self._first:
            return False
        if self._began_s is None:
            self._began_s = now
        works = [self._steady.get(unit.name) for unit in self._units.values() if not unit.barrier]
        return is_precise(works, now - self._began_s)

    def close(self, now: float) -> None:
        """Stores the measurements once."""
        if self._closed:
            return
        self._closed = True
        warning = self._store(self.measured(self._view(now)))
        if warning:
            self._say(warning)

    def _end_message(self, now: float, event: BatchesDone) -> None:
        message = self._sent.pop(event.message, None)
        if message is None or event.stages is None:
            return
        spec = self._units[message.unit]
        worker = self._workers.get(event.worker)
        if worker is None:
            worker = self._workers[event.worker] = _WorkerTime(spec.slots)
        is_first = not worker.messages
        slot_s = worker.end_message(message.at, now)
        if not event.failures:
            kind = self._first if is_first or not message.full else self._steady
            if message.unit not in kind:
                kind[message.unit] = _WorkTime.of(len(spec.stages))
            kind[message.unit].add(slot_s, event.cpu_s, event.stages)

    def _reads_iterable(self) -> bool:
        return all(key.reads in ("", "iterable") for keys in self._keys.values() for key in keys)

    def measured(self, view: StreamView) -> dict[ProfileKey, StageMeasurement]:
        """Measurements of stages that did work, under all their keys."""
        peaks = self._peaks()
        # a probe seeks in files, which takes longer than reading them
        source_rate = None if self._probe and not self._reads_iterable() else view.source_rate
        found: dict[ProfileKey, StageMeasurement] = {}
        for unit in view.units:
            steady = self._steady.get(unit.name)
            work = steady or self._first.get(unit.name)
            if work is None:
                continue
            ready = unit.started_total - unit.starting - unit.lost_total
            setup_s = unit.setup_s_total / ready if ready > 0 else None
            spec = self._units[unit.name]
            for name, (taken, given, seconds) in zip(spec.stages, work.stages, strict=True):
                if taken > 0 and seconds > 0:
                    share = seconds / work.code_s
                    worker_s = share * work.usual_slot_s / spec.slots
                    measured = StageMeasurement(
                        seconds_per_item=worker_s / taken,
                        returns=given / taken,
                        items=int(taken) if steady else min(int(taken), SMALL_SAMPLE_ITEMS),
                        seconds=worker_s,
                        setup_s=setup_s,
                        peak_bytes=peaks.get(unit.name),
                        cpu_s_per_item=share * work.cpu_s / taken if steady and work.cpu_s else None,
                        stage=name,
                        probed=self._probe,
                        standard_error=work.standard_error if steady else None,
                    )
                    for key in self._keys.get(name, ()):
                        found[key] = replace(measured, source_rate=source_rate) if key.reads else measured
        return found
