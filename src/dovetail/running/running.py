"""How does a pipeline run on this machine? Plan, claim, engine, controller, data and observers put together."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import dovetail
from dovetail.control.lifecycle import RunState
from dovetail.data.ends import Ends
from dovetail.data.iterables import IterableSource, is_at_hand
from dovetail.data.results import IteratorSink
from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.local.limits import SHARE_OF_MEMORY
from dovetail.observe.folder import create_run
from dovetail.observe.recorder import About, Recorder
from dovetail.running.arguments import check_arguments
from dovetail.running.claiming import place_for
from dovetail.running.handle import Run
from dovetail.running.measuring import Measuring
from dovetail.running.observed import run_observed
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.controller import Stream
from dovetail.streaming.options import Options
from dovetail.streaming.work import works_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from dovetail.control.engine import Observer
    from dovetail.control.segments import Part
    from dovetail.observe.folder import RunFolder
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.running.claiming import Place
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.work import Work

BEAT_S = 1.0
FIRST_REPLAN_S = 1.0
REFRESH_S = 0.5
"""How long somebody who asks how a run stands waits for the newest figures."""
HOP_S = 0.0002
"""What a message to a process on this machine costs, about."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a source."""

    at_hand: bool
    ours: bool
    """Its iterator is known to nobody else."""


@dataclass(frozen=True, slots=True)
class Watching:
    """What is written down and shown of a run."""

    record: bool
    progress: bool | None
    verbose: bool


def run(
    pipeline: Pipeline,
    source: Iterable[Any],
    engine: str = "local",
    cluster: Cluster | str = "auto",
    mode: str = "auto",
    *,
    plan: Plan | None = None,
    ordered: bool = False,
    max_errors: int | None = None,
    options: Options | None = None,
    run_dir: str | Path | None = None,
    record: bool = False,
    progress: bool | None = None,
    verbose: bool = False,
    wait: bool = True,
    pin_cpus: bool = False,
) -> Run:
    """Starts the pipeline over the items of `source` in processes on this machine, and returns when it has begun.

    Iterate over what is returned for the results (in the order of the source with `ordered=True`), or `.wait()` for
    the end. `cluster` says what may be used, by default this machine. More items set aside than `max_errors` fail the
    run. `progress` shows how far it is, by default in a terminal; `verbose` what workers print; `record` keeps the
    controller's exact input. If other runs hold what it needs, it waits until they give back; with `wait=False` that
    is an InfeasibleError. `pin_cpus` binds workers to CPUs, one after another.
    """
    booleans = {"ordered": ordered, "record": record, "verbose": verbose, "wait": wait, "pin_cpus": pin_cpus}
    check_arguments(pipeline, source, engine, plan, options, max_errors, run_dir, booleans)
    read = iter(source)
    alone = plan or make_plan(pipeline, cluster, mode)
    options = _options(options, ordered, max_errors, alone.cluster)
    planned = partial(make_plan, pipeline, mode=mode) if plan is None else None
    folder = create_run(alone.name, run_dir)
    with _nothing_left(folder):
        place = place_for(folder.id, alone, planned, wait=wait)
        with _nothing_left(folder, place):
            watching = Watching(record, progress, verbose)
            kind = Kind(is_at_hand(source), read is not source)
            works = works_of(pipeline, place.plan)
            return _started(works, read, place, folder, options, watching, kind, pin_cpus=pin_cpus)


def _options(options: Options | None, ordered: bool, max_errors: int | None, cluster: Cluster) -> Options:
    usual = Options(hop_s=HOP_S, eager=not ordered, first_replan_s=FIRST_REPLAN_S)
    memory = sum(node.memory_bytes for node in cluster.nodes)
    if memory:
        usual = replace(usual, byte_budget=min(usual.byte_budget, memory // SHARE_OF_MEMORY))
    found = replace(options or usual, payloads_survive=True, finish_waves=True)
    if ordered:
        found = replace(found, ordered=True, eager=False)
    return found if max_errors is None else replace(found, max_aside=max_errors)


@contextmanager
def _nothing_left(folder: RunFolder, place: Place | None = None) -> Iterator[None]:
    """Of a run that did not begin there is no folder and no claim."""
    try:
        yield
    except BaseException:
        if place is not None:
            place.leave()
        from shutil import rmtree  # late: most runs begin

        rmtree(folder.path, ignore_errors=True)
        raise


def _started(
    works: tuple[Work, ...],
    source: Iterator[Any],
    place: Place,
    folder: RunFolder,
    options: Options,
    watching: Watching,
    kind: Kind,
    *,
    pin_cpus: bool,
) -> Run:
    memory_bytes = sum(node.memory_bytes for node in place.plan.cluster.nodes)
    workers = LocalEngine(
        folder.path, place.plan.cluster, memory_bytes=memory_bytes // SHARE_OF_MEMORY, pin_cpus=pin_cpus
    )
    observers: list[Observer] = []
    try:
        workers.prepare([work.hosted for work in works])
        stream = Stream(works, place.plan, options, reserved=place.reserved)
        recorder = _recorder(folder, place.plan, stream, workers)
        observers += [recorder, *_observers(folder, place, works, stream, watching)]
    except BaseException:
        for observer in observers:
            observer.close(workers.now())
        workers.close()
        raise
    measuring = Measuring(workers, works, place.plan.cluster, recorder)
    sink = IteratorSink(workers, ordered=options.ordered)
    items = IterableSource(source, workers, at_hand=kind.at_hand, ours=kind.ours)
    ends = Ends(items, sink)
    sink.wanted = ends.wanted

    def go() -> None:
        observers.extend(place.keepers(workers.post))
        measuring.start()
        try:
            run_observed(stream, workers, ends, recorder, observers, beat_s=BEAT_S)
        finally:
            measuring.stop()
            items.close()
            place.leave()

    open_ = (partial(_item, workers), partial(_key, workers))
    return Run(
        place.plan,
        folder.path,
        workers,
        sink,
        go,
        open_,
        partial(_why_failed, stream, items),
        partial(_refresh, recorder, workers),
    )


def _refresh(recorder: Recorder, workers: LocalEngine) -> None:
    written = recorder.look_now()
    workers.nudge()
    written.wait(REFRESH_S)


def _why_failed(stream: Stream, source: IterableSource) -> BaseException | tuple[str, str] | None:
    """What the source raised, or the error and its details."""
    board = stream.board
    return source.error or ((board.error, board.error_detail) if board.state is RunState.FAILED else None)


def _recorder(folder: RunFolder, plan: Plan, stream: Stream, workers: LocalEngine) -> Recorder:
    return Recorder(
        folder,
        About(plan.name, "dt.run", "local", plan.cluster.spec(), version=dovetail.__version__),
        stream.view,
        stream.workers,
        plan=plan.to_json(),
        item=partial(_item, workers),
        key=partial(_key, workers),
    )


def _observers(
    folder: RunFolder, place: Place, works: tuple[Work, ...], stream: Stream, watching: Watching
) -> list[Observer]:
    """What most runs do not need is imported late."""
    found: list[Observer] = []
    if watching.record:
        from dovetail.observe.replay import ReplayRecorder
        from dovetail.streaming.remake import header_of

        header = header_of(works, place.plan, stream.board.options, reserved=place.reserved)
        found.append(ReplayRecorder(folder.replay_log, header))
    if watching.verbose:
        from dovetail.observe.tail import LogTail

        found.append(LogTail(folder.logs))
    if watching.progress or (watching.progress is None and sys.stderr is not None and sys.stderr.isatty()):
        from dovetail.observe.progress import Progress

        found.append(Progress(stream.view, name=place.plan.name))
    return found


def _item(workers: LocalEngine, part: Part) -> object:
    segment, start, _ = part
    return workers.load(segment)[1][start]


def _key(workers: LocalEngine, part: Part) -> tuple[int, ...]:
    segment, start, _ = part
    key = workers.load(segment)[0][start]
    return key if isinstance(key, tuple) else (key,)
