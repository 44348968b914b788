"""What is a service made of? Its arguments checked; plan, claim, engine, controller, and requests at both ends."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import dovetail
from dovetail.control.events import CancelRun
from dovetail.control.lifecycle import RunState
from dovetail.data.ends import Ends
from dovetail.data.serving import QueueSource, TicketSink, closed
from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.local.limits import SHARE_OF_MEMORY
from dovetail.errors import ConfigError, Problem, did_you_mean, shown
from dovetail.observe.door import Door
from dovetail.observe.folder import create_run
from dovetail.observe.recorder import About, Recorder
from dovetail.pipeline.durations import parse_duration
from dovetail.pipeline.pipeline import Pipeline
from dovetail.running.claiming import place_for
from dovetail.running.looking import item_of, key_of, refresh
from dovetail.running.measuring import Measuring
from dovetail.running.observed import run_observed
from dovetail.running.paired import paired
from dovetail.running.undoing import remove, undone
from dovetail.scheduling.plan import Plan
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.controller import Stream
from dovetail.streaming.options import Options
from dovetail.streaming.work import works_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dovetail.observe.folder import RunFolder
    from dovetail.resources.cluster import Cluster
    from dovetail.running.claiming import Place
    from dovetail.streaming.work import Work

BEAT_S = 1.0
HOP_S = 0.0002
FIRST_REPLAN_S = 1.0
EPOCH_BATCHES = 8
"""While there is more to do than can be done: who asked for something that was dropped waits for about so many batches,
and about one batch of so many is not full."""
STREAMING = "streaming"


@dataclass(frozen=True)
class Served:
    """The parts of a service."""

    plan: Plan
    folder: Path
    engine: LocalEngine
    source: QueueSource
    sink: TicketSink
    go: Callable[[], None]
    """Drives it to its end."""
    why_failed: Callable[[], tuple[str, str] | None]
    """Error and details."""
    refresh: Callable[[], None]
    """Writes down how it stands now."""
    deadline_s: float | None
    max_pending: int


def served(
    pipeline: Pipeline,
    engine: str,
    cluster: Cluster | str,
    *,
    plan: Plan | None,
    max_wait: float | str,
    max_pending: int,
    deadline: float | str | None,
    run_dir: str | Path | None,
    wait: bool,
    pin_cpus: bool,
) -> Served:
    problems = [
        *_of_pipeline(pipeline, engine, plan),
        *_of_durations(max_wait=max_wait, deadline=deadline),
        *_of_the_rest(max_pending, run_dir, wait=wait, pin_cpus=pin_cpus),
    ]
    if problems:
        raise ConfigError(problems)
    alone = plan or make_plan(pipeline, cluster, STREAMING)
    options = _options(parse_duration(max_wait), alone.cluster)
    planned = partial(make_plan, pipeline, mode=STREAMING) if plan is None else None
    with undone() as undo:
        folder = create_run(alone.name, run_dir)
        undo.append(partial(remove, folder))
        place = place_for(folder.id, alone, planned, wait=wait)
        undo.append(place.leave)
        works = tuple(_served_work(work) for work in works_of(pipeline, place.plan))
        limits = (None if deadline is None else parse_duration(deadline), max_pending)
        return _assembled(works, place, folder, options, limits, pin_cpus=pin_cpus)


# --- what was given


def _of_pipeline(pipeline: object, engine: object, plan: object) -> Iterator[Problem]:
    if engine != "local":
        hint = did_you_mean(str(engine), ("local",))
        yield Problem("DT331", f"there is no engine {shown(engine)} that serves{hint}", fixes=('engine="local"',))
    if not isinstance(pipeline, Pipeline):
        yield Problem("DT337", f"{shown(pipeline)} is not a Pipeline", fixes=('dt.Pipeline([dt.Stage("name", fn)])',))
        return
    for stage in pipeline:
        if stage.barrier:
            message = f"stage {stage.name!r} waits for the end of its input (barrier=True), and requests have no end"
            yield Problem("DT375", message, fixes=("leave it out: dt.run runs pipelines with barriers",))
    if plan is None:
        return
    if not isinstance(plan, Plan):
        yield Problem("DT338", f"plan={shown(plan)} is not a Plan", fixes=("plan=dt.plan(pipeline, cluster)",))
    elif sorted(name for unit in plan.units for name in unit.stages) != sorted(stage.name for stage in pipeline):
        yield Problem("DT338", "the plan is for another pipeline", fixes=("plan=dt.plan(pipeline, cluster)",))
    elif len(plan.waves) > 1:
        message = f"the plan runs {len(plan.waves)} waves one after another, and requests have no end"
        yield Problem("DT375", message, fixes=('plan=dt.plan(pipeline, cluster, mode="streaming")',))


def _of_durations(**given: object) -> Iterator[Problem]:
    for name, value in given.items():
        if value is None and name == "deadline":
            continue
        try:
            parse_duration(value)
        except ValueError as error:
            yield Problem("DT375", f"{name}={shown(value)} {error}", fixes=(f'{name}="20ms"',))


def _of_the_rest(max_pending: object, run_dir: object, **booleans: object) -> Iterator[Problem]:
    if isinstance(max_pending, bool) or not isinstance(max_pending, int) or max_pending < 1:
        message = f"max_pending={shown(max_pending)} is not a whole number from 1 on"
        yield Problem("DT375", message, fixes=("max_pending=10_000",))
    if run_dir is not None and not isinstance(run_dir, str | os.PathLike):
        yield Problem("DT375", f"run_dir={shown(run_dir)} is not a path", fixes=('run_dir="runs/today"',))
    for name, value in booleans.items():
        if not isinstance(value, bool):
            yield Problem("DT375", f"{name}={shown(value)} is not True or False", fixes=(f"{name}=True",))


# --- what it becomes


def _options(max_wait_s: float, cluster: Cluster) -> Options:
    options = Options(
        serving=True,
        eager=True,
        max_wait_s=max_wait_s,
        hop_s=HOP_S,
        first_replan_s=FIRST_REPLAN_S,
        epoch_batches=EPOCH_BATCHES,
        payloads_survive=True,
    )
    memory = sum(node.memory_bytes for node in cluster.nodes)
    if not memory:
        return options
    return replace(options, byte_budget=min(options.byte_budget, memory // SHARE_OF_MEMORY))


def _served_work(work: Work) -> Work:
    """One request that fails is told so, and harms nobody."""
    stages: Any = work.hosted.work
    hosted = replace(work.hosted, work=tuple(paired(stage) for stage in stages))
    return replace(work, skips=True, hosted=hosted)


def ways_of(works: tuple[Work, ...]) -> int:
    """From the source to leaves: how many results a request has, if nothing is dropped or multiplied."""
    ways: dict[str, int] = {}
    for work in works:  # parents first
        ways[work.name] = sum(ways[name] for name in work.parents) if work.parents else 1
    inner = {name for work in works for name in work.parents}
    return sum(count for name, count in ways.items() if name not in inner)


def _assembled(
    works: tuple[Work, ...],
    place: Place,
    folder: RunFolder,
    options: Options,
    limits: tuple[float | None, int],
    *,
    pin_cpus: bool,
) -> Served:
    plan = place.plan
    memory_bytes = sum(node.memory_bytes for node in plan.cluster.nodes)
    engine = LocalEngine(folder.path, plan.cluster, memory_bytes=memory_bytes // SHARE_OF_MEMORY, pin_cpus=pin_cpus)
    try:
        engine.prepare([work.hosted for work in works])
        stream = Stream(works, plan, options, reserved=place.reserved)
        recorder = _recorder(folder, plan, stream, engine)
    except BaseException:
        engine.close()
        raise
    measuring = Measuring(engine, works, plan.cluster, recorder)
    sink = TicketSink(engine, ways_of(works))
    source = sink.source = QueueSource(engine, limits[1], sink.refuse)
    door = Door(folder.path, partial(_act, engine, source))
    door.start()

    def go() -> None:
        measuring.start()
        try:
            keepers = place.keepers(engine.post)
            run_observed(stream, engine, Ends(source, sink), recorder, [recorder], keepers=keepers, beat_s=BEAT_S)
        finally:
            measuring.stop()
            door.close()
            place.leave()

    failed, looked_at = partial(_why_failed, stream), partial(refresh, recorder, engine)
    return Served(plan, folder.path, engine, source, sink, go, failed, looked_at, *limits)


def _act(engine: LocalEngine, source: QueueSource, do: str, reason: str) -> None:
    """Somebody outside says `dovetail drain` or `cancel`: what is pending is answered, or told."""
    source.refuse_more(closed(f"is ended ({reason}): it takes no more requests"))
    if do == "drain":
        source.finish()
    else:
        engine.post(CancelRun(reason))


def _why_failed(stream: Stream) -> tuple[str, str] | None:
    board = stream.board
    return (board.error, board.error_detail) if board.state is RunState.FAILED else None


def _recorder(folder: RunFolder, plan: Plan, stream: Stream, engine: LocalEngine) -> Recorder:
    about = About(plan.name, "dt.serve", "local", plan.cluster.spec(), version=dovetail.__version__)
    return Recorder(
        folder,
        about,
        stream.view,
        stream.workers,
        plan=plan.to_json(),
        item=partial(item_of, engine),
        key=partial(key_of, engine),
    )
