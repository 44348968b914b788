"""`dt.run`: check the arguments, open input and output, plan, admit, and start the run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.engines.local.process_setup import PAYLOAD_MEMORY_DIVISOR
from dovetail.engines.ray.address import is_ray_engine
from dovetail.observe.run_folder import create_run
from dovetail.runtime import outputs as where
from dovetail.runtime.arguments import check_arguments
from dovetail.runtime.assembly import LaunchOptions, PreparedRun, remove_run_folder, undo_on_error
from dovetail.runtime.inputs import PreloadedInput, open_input
from dovetail.runtime.run_lock import RunLock
from dovetail.runtime.sites import open_site
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.settings import StreamOptions, unit_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dovetail.observe.run_folder import RunFolder
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.admission import Admission
    from dovetail.runtime.failed_item_retry import FailedItemRetry
    from dovetail.runtime.inputs import Input
    from dovetail.runtime.resume import ResumedRun
    from dovetail.runtime.run_handle import Run
    from dovetail.runtime.sites import Site
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import UnitSpec

FIRST_REPLAN_S = 1.0
MAX_DURABLE_EPOCH_S = 1.0
"""Of a run that can be resumed an epoch is no more work than this, if that is some batches: it is what a kill costs."""

DURABLE_MESSAGE_S = 0.02
"""Nobody waits for single results of it: larger messages cost less."""


def run(
    pipeline: Pipeline,
    source: Any = (),
    engine: str = "local",
    cluster: Cluster | str = "auto",
    mode: str = "auto",
    *,
    plan: Plan | None = None,
    sink: Any = None,
    resume: str | Path | None = None,
    retry_errors: str | Path | None = None,
    force_resume: bool = False,
    ordered: bool = False,
    limit: int | None = None,
    max_errors: int | None = None,
    options: StreamOptions | None = None,
    run_dir: str | Path | None = None,
    record: bool = False,
    progress: bool | None = None,
    verbose: bool = False,
    wait: bool = True,
    pin_cpus: bool = False,
    profiles: bool = True,
    share: float | None = None,
    env_from: Sequence[str] = (),
    what: str = "dt.run",
    more: Mapping[str, object] | None = None,
) -> Run:
    """Starts the pipeline over the items of `source`, on this machine or on a Ray cluster; returns when it has begun.

    `source` is any iterable, a path, glob or URL of files or tables, `dt.source(...)`, or a table in memory; of its
    items, `limit` are read. `sink` is a path, `dt.sink(...)`, a function of a list of results, or {leaf stage: one of
    those}. Without a sink, iterate over what is returned for the results (in the order of the source with
    `ordered=True`); with one, `.wait()` for the end.

    `resume` goes on with an earlier run (its id, "last", its folder), given the same pipeline, source and sink; a
    source that has changed is refused unless `force_resume`. `retry_errors` runs what an earlier run set aside, and
    adds the results to its sink.

    `engine` is where it runs: "local" in processes on this machine; "ray" on a Ray that is started here for this
    program and ends with it; "ray:HOST:PORT" on the cluster with that head; "ray:auto" on the one that RAY_ADDRESS
    names, or that was started on this machine. A program uses one Ray at a time. There `share` caps what the run takes:
    0.5 is at most half of the cluster, whoever else is there; without it, it takes what others leave, and gives back
    when more come. Workers on Ray get some of this program's variables (PYTHONPATH, HF_*, AWS_*, ...); `env_from`
    names others to send: ["MY_TOKEN"]. On this machine they have all of them.

    `cluster` says what may be used, by default this machine; on Ray it is what Ray has. More items set aside than
    `max_errors` fail the run. `progress` shows how far it is, by default in a terminal; `verbose` what workers print;
    `record` keeps the controller's exact input. If other runs hold what it needs, it waits until they give back; with
    `wait=False` that is an InfeasibleError. `pin_cpus` binds workers to CPUs, one after another. `profiles=False` plans
    without what earlier runs measured. `what` and `more` are kept in the run's folder, for people.
    """
    booleans = {"ordered": ordered, "record": record, "verbose": verbose, "wait": wait, "pin_cpus": pin_cpus}
    booleans |= {"force_resume": force_resume, "profiles": profiles}
    check_arguments(pipeline, source, engine, plan, options, max_errors, limit, run_dir, booleans, share, env_from)
    with undo_on_error() as undo:
        reached = partial(open_site, engine, share=share, env_from=tuple(env_from))
        computed = type(source).__module__.startswith("ray.data.")  # by the Ray that is asked for, not by any other
        site = reached() if computed else None
        earlier = _open_resumed(resume)
        if earlier is not None:
            undo.append(earlier.lock.release)
        again = _open_retry(retry_errors, sink, earlier)
        want = where.parse_sinks(sink if again is None else again.sink, pipeline, ordered=ordered)
        on_ray = is_ray_engine(engine)
        given = (
            open_input(source, limit, _recorded_fingerprint(earlier), on_ray=on_ray)
            if again is None
            else PreloadedInput()
        )
        undo.append(given.close)
        if earlier is None:
            where.check_sinks_apart_from_source(want, given.files())
        site = site or reached()  # last: it may start a Ray
        site.check_pipeline(pipeline)
        begun = _RunBuilder(pipeline, site, given, want, earlier, again, undo)
        begun.plan(plan, site.cluster(cluster), mode, profiles=profiles)
        begun.admit(run_dir, wait=wait, force=force_resume)
        asked = LaunchOptions(record, progress, verbose, pin_cpus, what, dict(more or {}))
        found = _stream_options(options, ordered, max_errors, begun.exclusive_plan.cluster, want)
        return begun.start(site.adjust_options(found, given=options is not None), asked)


def _open_resumed(what: str | Path | None) -> ResumedRun | None:
    if what is None:
        return None
    from dovetail.runtime.resume import ResumedRun

    return ResumedRun(what)


def _recorded_fingerprint(earlier: ResumedRun | None) -> dict[str, object] | None:
    return earlier.commits.header.get("source") if earlier is not None else None


def _open_retry(what: str | Path | None, sink: object, earlier: ResumedRun | None) -> FailedItemRetry | None:
    """What is to be run again: as said, or as the run that goes on began."""
    began_with = earlier.commits.header.get("again_folder") if earlier is not None else None
    if what is None and began_with is None:
        return None
    from dovetail.runtime.failed_item_retry import FailedItemRetry, recorded_sinks

    if what is None and earlier is not None:
        return FailedItemRetry(str(began_with), recorded_sinks(earlier.commits) or sink)
    return FailedItemRetry(str(what), sink)


def _stream_options(
    options: StreamOptions | None, ordered: bool, max_errors: int | None, cluster: Cluster, want: where.SinkRequest
) -> StreamOptions:
    durable = want.durable
    usual = StreamOptions(eager=not (ordered or durable), first_replan_s=FIRST_REPLAN_S)
    memory = sum(node.memory_bytes for node in cluster.nodes)
    if memory:
        usual = replace(usual, byte_budget=min(usual.byte_budget, memory // PAYLOAD_MEMORY_DIVISOR))
    if durable:
        usual = replace(usual, max_epoch_s=MAX_DURABLE_EPOCH_S, target_message_s=DURABLE_MESSAGE_S)
    found = replace(options or usual, drain_finishes_waves=not durable)
    if durable:
        found = replace(found, eager=False, ordered_batches=want.in_order)
    if ordered:
        found = replace(found, ordered=True, eager=False)
    return found if max_errors is None else replace(found, max_failed_items=max_errors)


@dataclass
class _RunBuilder:
    """What is put together before a run starts, step by step."""

    pipeline: Pipeline
    site: Site
    run_input: Input
    sink_request: where.SinkRequest
    resumed: ResumedRun | None
    retry: FailedItemRetry | None
    undo: list[Callable[[], None]]
    exclusive_plan: Plan = field(init=False)
    """The plan for an empty machine."""
    _plan_for: Callable[[Cluster], Plan] | None = None
    _folder: RunFolder = field(init=False)
    _admission: Admission = field(init=False)
    _units: tuple[UnitSpec, ...] = field(init=False)
    _lock: RunLock = field(init=False)
    _notes: list[str] = field(default_factory=list)
    _uses_profiles: bool = True
    """Whether it uses what earlier runs measured, and tells later ones."""

    def plan(self, plan: Plan | None, cluster: Cluster | str, mode: str, *, profiles: bool) -> None:
        self._uses_profiles = profiles
        if plan is None:
            known = self._load_profiles(cluster) if profiles else {}
            self._plan_for = partial(make_plan, self.pipeline, mode=mode, profiles=known)
            plan = self._plan_for(cluster)
        else:
            plan, self._plan_for = self.site.adapt_plan(plan, earlier=False)
        self.exclusive_plan = plan
        if self.resumed is not None and not self.resumed.check_units(unit_specs(self.pipeline, plan)):
            # what lies in its spool belongs to other units: those of the plan it began with
            self.exclusive_plan, self._plan_for = self.site.adapt_plan(self.resumed.plan(), earlier=True)

    def _load_profiles(self, cluster: Cluster | str) -> Mapping[str, Any]:
        from dovetail.resources.cluster import Cluster as Cluster_
        from dovetail.runtime.stage_profiles import load_profiles

        return load_profiles(self.pipeline, Cluster_.of(cluster), *self._source_sink_kinds())

    def _source_sink_kinds(self) -> tuple[str, dict[str, str]]:
        """What was measured of stages holds for the same kinds of source and sink."""
        return self.run_input.kind, self.sink_request.kinds(self.pipeline)

    def admit(self, run_dir: str | Path | None, *, wait: bool, force: bool) -> None:
        if self.resumed is not None:
            self._notes = self.resumed.check_source(self.run_input.fingerprint(), force=force)
            self._folder, self._lock = self.resumed.folder, self.resumed.lock
        else:
            self._folder = create_run(self.exclusive_plan.name, run_dir)
            self.undo.append(partial(remove_run_folder, self._folder))
            self._lock = RunLock(self._folder)
            self.undo.append(self._lock.release)
        self._admission = self.site.admit(self._folder.id, self.exclusive_plan, self._plan_for, wait=wait)
        self.undo.append(self._admission.release)
        self._units = unit_specs(self.pipeline, self._admission.plan)

    def start(self, options: StreamOptions, asked: LaunchOptions) -> Run:
        return PreparedRun(
            self.pipeline,
            self._units,
            self.site,
            self._admission,
            self._folder,
            self._lock,
            self.run_input,
            self._source_sink_kinds() if self._uses_profiles and self.retry is None else None,
            where.open_sinks(self.sink_request, self._folder.id, self._folder.path / "parts"),
            options,
            asked,
            self.resumed,
            self.retry,
            self._notes,
        ).start()
