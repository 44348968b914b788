"""`dt.run`: open input and output, plan, admit, and start a run over a source."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from dovetail.control.commands import Deliver
from dovetail.control.lifecycle import RunState
from dovetail.data.interfaces import SourceAndSink
from dovetail.data.iterator_sink import IteratorSink
from dovetail.documents.configuration import QUIET, VERBOSE, ConfiguredText, configured
from dovetail.engines.payload_memory import limit_payload_memory
from dovetail.engines.ray.address import is_ray_engine
from dovetail.errors import PipelineError
from dovetail.observe.run_header import write_unstarted_header
from dovetail.pipeline.error_policy import parse_max_errors
from dovetail.pipeline.pipeline import Pipeline
from dovetail.runtime.admission import print_stderr
from dovetail.runtime.arguments import check_arguments
from dovetail.runtime.assembly import (
    PROBE_RUN,
    AdmittedRun,
    LaunchOptions,
    create_locked_run,
    describe_run,
    plan_on_site,
)
from dovetail.runtime.configured_engine import THIS_MACHINE, configured_engine, described_cluster
from dovetail.runtime.inputs import PreloadedInput, open_input
from dovetail.runtime.outputs import attach_writers, check_sinks_apart_from_source, open_sinks, parse_sinks
from dovetail.runtime.run_handle import NOT_STARTED_CODES, Run
from dovetail.runtime.sites import open_site
from dovetail.streaming.epoch_size import DURABLE_EPOCH_S, DURABLE_MESSAGE_S
from dovetail.streaming.partial_batches import warn_of_partial_batches
from dovetail.streaming.settings import FIRST_REPLAN_S, StreamOptions, unit_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dovetail.control.events import RunFailure
    from dovetail.data.commit_log import CommitLog
    from dovetail.data.commit_sink import CommitSink
    from dovetail.data.interfaces import RunOutputs, Source
    from dovetail.pipeline.stage import Run as StageFunction
    from dovetail.pipeline.stage import Stage
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.assembly import ActiveRun
    from dovetail.runtime.failed_item_retry import FailedItemRetry
    from dovetail.runtime.inputs import Input
    from dovetail.runtime.outputs import SinkRequest
    from dovetail.runtime.resume import ResumedRun
    from dovetail.runtime.sites import PlanFactory, RunEngine, Site
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import UnitSpec
    from dovetail.streaming.view import WorkCounts


@runtime_checkable
class Startable(Protocol):
    """An object that starts a run of its own pipeline, such as a recipe."""

    def start(self, **arguments: Any) -> Run: ...


def run(
    pipeline: Pipeline | Startable | Sequence[Stage | StageFunction],
    source: Any = (),
    engine: str | None = None,
    cluster: Cluster | str | None = None,
    mode: str | None = None,
    *,
    plan: Plan | None = None,
    sink: Any = None,
    resume: str | Path | None = None,
    retry_errors: str | Path | None = None,
    force_resume: bool = False,
    ordered: bool | None = None,
    limit: int | None = None,
    max_errors: float | str | None = None,
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
    counts: Callable[[], WorkCounts] | None = None,
) -> Run:
    """Start the pipeline over the items of `source`, on this machine or on a Ray cluster; return once it has started.

    `source` is an iterable, a path, glob or URL of files or tables, `dt.source(...)`, or a table in memory; `limit` is
    the maximum number of items to read. `sink` is a path, `dt.sink(...)`, a function that takes a list of results, or a
    mapping {leaf stage: one of those}. Without a sink, iterate over the returned `Run` to get the results (in the order
    of the source with `ordered=True`). With a sink, call `.wait()`.

    `resume` continues an earlier run (its id, "last", or its folder); pass the same pipeline, source and sink. If the
    source has changed, the resume is refused unless `force_resume=True`. `retry_errors` processes only the failed items
    of an earlier run and adds the results to its sink.

    `engine` selects where to run: "local" (processes on this machine), "ray" (a Ray cluster that is started on this
    machine and stops with this program), "ray:HOST:PORT" (the cluster with that head node) or "ray:auto" (the cluster
    that RAY_ADDRESS names, or the one started on this machine). A program can use one Ray cluster at a time. On Ray,
    `share=0.5` limits the run to half of the cluster; without `share`, a run uses what other runs leave free and
    releases workers when more runs arrive. Workers on Ray receive selected environment variables of this program
    (PYTHONPATH, HF_*, AWS_*, ...); `env_from=["MY_TOKEN"]` adds others. Local workers inherit all of them.

    `cluster` limits what a local run may use (default: this machine, "auto"). `max_errors` is the number of failed
    items above which the run fails. `progress` shows progress (default: if stderr is a terminal), `verbose` the output
    of workers. The environment and the project file can have other defaults of these and of `engine`.
    `record=True` records the controller's input for `dovetail replay`. If other runs hold the resources that the run
    needs, it waits for them; with `wait=False` it raises InfeasibleError. `pin_cpus` binds each worker to its own CPUs.
    `profiles=False` plans without measurements of earlier runs. `what` and `more` are stored in run.json.
    `counts` returns the progress in another unit than items, such as rows, for displays and summaries.

    Instead of a pipeline, `dt.run` takes a list of functions, classes and stages, `dt.run([clean, Score], "in.jsonl")`,
    which becomes a `dt.Pipeline`; or a recipe (`dt.Recipe.load`). For a recipe, source, sink, engine, mode,
    ordered and max_errors are those of the recipe, unless given here.
    """
    verbosity = configured("verbosity")
    verbose = verbose or verbosity == VERBOSE
    progress = False if progress is None and verbosity == QUIET else progress
    if isinstance(pipeline, list | tuple):
        with suppress(PipelineError):  # `check_arguments` reports its problems with all others
            pipeline = Pipeline(pipeline)
    if not isinstance(pipeline, Pipeline) and isinstance(pipeline, Startable) and callable(pipeline.start):
        own = {"source": source or None, "engine": engine, "mode": mode, "ordered": ordered, "sink": sink}
        own |= {"max_errors": max_errors}
        return pipeline.start(
            cluster=cluster,
            plan=plan,
            resume=resume,
            retry_errors=retry_errors,
            force_resume=force_resume,
            limit=limit,
            options=options,
            run_dir=run_dir,
            record=record,
            progress=progress,
            verbose=verbose,
            wait=wait,
            pin_cpus=pin_cpus,
            profiles=profiles,
            share=share,
            env_from=env_from,
            what=what,
            more=more,
            counts=counts,
            **{name: value for name, value in own.items() if value is not None},
        )
    engine, cluster = configured_engine(engine, cluster)
    if isinstance(cluster, ConfiguredText) and cluster != THIS_MACHINE:
        cluster = described_cluster(cluster)
    mode, ordered = mode or "auto", False if ordered is None else ordered
    flags = {"ordered": ordered, "record": record, "verbose": verbose, "wait": wait, "pin_cpus": pin_cpus}
    flags |= {"force_resume": force_resume, "profiles": profiles}
    check_arguments(pipeline, source, engine, plan, options, max_errors, limit, run_dir, flags, share, env_from)
    request = RunRequest(
        pipeline=cast("Pipeline", pipeline),  # `check_arguments` refuses anything else
        source=source,
        engine=engine,
        cluster=cluster,
        mode=mode,
        plan=plan,
        sink=sink,
        resume=resume,
        retry_errors=retry_errors,
        force_resume=force_resume,
        ordered=ordered,
        limit=limit,
        max_errors=max_errors,
        options=options,
        run_dir=run_dir,
        wait=wait,
        profiles=profiles,
        share=share,
        env_from=tuple(env_from),
        launch=LaunchOptions(record, progress, verbose, pin_cpus, what, dict(more or {}), counts),
    )
    return _start_run(request)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """Checked arguments of `dt.run`."""

    pipeline: Pipeline
    source: Any
    engine: str
    cluster: Cluster | str
    mode: str
    plan: Plan | None
    sink: Any
    resume: str | Path | None
    retry_errors: str | Path | None
    force_resume: bool
    ordered: bool
    limit: int | None
    max_errors: float | str | None
    options: StreamOptions | None
    run_dir: str | Path | None
    wait: bool
    profiles: bool
    share: float | None
    env_from: tuple[str, ...]
    launch: LaunchOptions

    def open_site(self) -> Site:
        return open_site(self.engine, share=self.share, env_from=self.env_from)


def _start_run(request: RunRequest) -> Run:
    pipeline = request.pipeline
    with ExitStack() as undo:
        # 1. Ray, if the source is a Ray Dataset: the cluster must be the one that was asked for
        site = request.open_site() if _is_ray_data(request.source) else None
        # 2. the earlier run, input and output
        earlier = _open_resumed(request.resume)
        if earlier is not None:
            undo.callback(earlier.lock.release)
        resumed = earlier if earlier is not None and earlier.has_begun else None
        retry = _open_retry(request.retry_errors, request.sink, earlier)
        sinks = parse_sinks(request.sink if retry is None else retry.sink, pipeline, ordered=request.ordered)
        run_input = _open_run_input(request, resumed) if retry is None else PreloadedInput()
        undo.callback(run_input.close)
        if resumed is None:
            check_sinks_apart_from_source(sinks, run_input.files())
        # 3. the site; after all checks, because it may start a Ray cluster
        site = site or request.open_site()
        site.check_runtime_envs(pipeline.stages)
        # 4. the plan
        kinds = (run_input.kind, sinks.kinds(pipeline))
        exclusive_plan, plan_for = _make_plan(request, site, kinds, resumed)
        # 5. the run folder and the claim on the machine or cluster
        notes = resumed.check_source(run_input.fingerprint(), force=request.force_resume) if resumed is not None else []
        about = describe_run(site, exclusive_plan, request.launch, [spec.path for spec in sinks.files.values()])
        unstarted = _unstarted_fields(sinks, retry)
        if earlier is None:
            folder, lock = create_locked_run(about, request.run_dir, undo, unstarted)
        else:
            folder, lock = earlier.folder, earlier.lock
            if resumed is None:
                write_unstarted_header(folder, about, unstarted, time.time())
        admission = site.admit(folder.id, exclusive_plan, plan_for, wait=request.wait)
        undo.callback(admission.release)
        order = ["ordered"] if request.ordered else sinks.order_settings
        plan = warn_of_partial_batches(admission.plan, pipeline, order, durable=sinks.durable)
        admission = replace(admission, plan=plan)
        # 6. engine, controller, observers, source and sink
        options = site.adjust_options(
            _stream_options(request, exclusive_plan.cluster, sinks), given=request.options is not None
        )
        started = _Launch(
            pipeline,
            AdmittedRun(site, admission, folder, lock, options, request.launch),
            unit_specs(pipeline, admission.plan),
            run_input,
            open_sinks(sinks, folder.id, folder.path / "parts"),
            kinds if request.profiles and retry is None else None,
            resumed,
            retry,
            notes,
            discard_parts=earlier is not None and resumed is None,
        ).start()
        undo.pop_all()
    return started


def _unstarted_fields(sinks: SinkRequest, retry: FailedItemRetry | None) -> dict[str, Any]:
    """What commit.log will say, for a run that is killed before it exists."""
    specs = {label: asdict(spec) for label, spec in sinks.files.items()}
    return {
        "durable": sinks.durable,
        "sinks": specs,
        "again_folder": None if retry is None else str(retry.folder.path),
    }


def _open_run_input(request: RunRequest, resumed: ResumedRun | None) -> Input:
    recorded = resumed.commits.header.get("source") if resumed is not None else None
    return open_input(request.source, request.limit, recorded, on_ray=is_ray_engine(request.engine))


def _make_plan(
    request: RunRequest, site: Site, kinds: tuple[str, dict[str, str]], resumed: ResumedRun | None
) -> tuple[Plan, PlanFactory | None]:
    """The plan for an otherwise empty site, and a function that plans for the part that other runs leave free."""
    where = site.cluster(request.cluster)
    use_profiles = request.profiles and request.plan is None
    known = _load_profiles(request.pipeline, where, kinds) if use_profiles else {}
    plan, plan_for = plan_on_site(site, request.pipeline, request.plan, where, request.mode, known)
    if resumed is not None and not resumed.check_units(unit_specs(request.pipeline, plan)):
        return site.adapt_plan(resumed.plan(), earlier=True)  # spooled items belong to the units of the earlier plan
    return plan, plan_for


def _is_ray_data(source: object) -> bool:
    return type(source).__module__.startswith("ray.data.")


def _load_profiles(pipeline: Pipeline, cluster: Cluster | str, kinds: tuple[str, dict[str, str]]) -> Mapping[str, Any]:
    """Measurements of earlier runs, with the same kinds of source and sink if there are any."""
    from dovetail.runtime.stage_profiles import load_profiles

    return load_profiles(pipeline, cluster, *kinds)


def _open_resumed(run: str | Path | None) -> ResumedRun | None:
    if run is None:
        return None
    from dovetail.runtime.resume import ResumedRun

    return ResumedRun(run)


def _open_retry(run: str | Path | None, sink: object, resumed: ResumedRun | None) -> FailedItemRetry | None:
    """The run whose failed items are processed: the given one, or the one that the resumed run was started with."""
    recorded = resumed.retried_folder if resumed is not None else None
    if run is None and recorded is None:
        return None
    from dovetail.runtime.failed_item_retry import FailedItemRetry, recorded_sinks

    if run is None and resumed is not None:
        return FailedItemRetry(str(recorded), recorded_sinks(resumed.commits) or sink)
    return FailedItemRetry(str(run), sink)


def _stream_options(request: RunRequest, cluster: Cluster, sinks: SinkRequest) -> StreamOptions:
    durable, ordered = sinks.durable, request.ordered
    usual = StreamOptions(eager=not (ordered or durable), first_replan_s=FIRST_REPLAN_S)
    usual = replace(usual, byte_budget=limit_payload_memory(usual.byte_budget, cluster))
    if durable:
        usual = replace(usual, max_epoch_s=DURABLE_EPOCH_S, target_message_s=DURABLE_MESSAGE_S)
    found = replace(request.options or usual, drain_finishes_input=not durable and request.launch.what != PROBE_RUN)
    if durable:
        found = replace(found, eager=False, ordered_batches=sinks.in_order)
    if ordered:
        found = replace(found, ordered=True, eager=False)
    if request.max_errors is None:
        return found
    return replace(found, max_failed_items=parse_max_errors(request.max_errors))


@dataclass
class _Launch:
    """Source and sinks of an admitted run, and the start of all its parts."""

    pipeline: Pipeline
    admitted: AdmittedRun
    units: tuple[UnitSpec, ...]
    run_input: Input
    outputs: RunOutputs
    kinds: tuple[str, dict[str, str]] | None
    """Kinds of source and sinks, under which measurements are stored; None: store none."""
    resumed: ResumedRun | None
    retry: FailedItemRetry | None
    notes: list[str]
    discard_parts: bool = False
    """Part files are those of a run that was killed before it began."""

    @property
    def durable(self) -> bool:
        return bool(self.outputs.files or self.outputs.functions)

    def start(self) -> Run:
        with ExitStack() as undo:
            self._prepare_sinks(undo)
            writes = [str(sink.parts) for sink in self.outputs.files.values()]
            engine = self.admitted.start_engine(
                undo, files=self.run_input.files(), writes=writes, keep_spool=self.durable
            )
            self.units = attach_writers(self.units, self.outputs, self.pipeline)
            engine.prepare([unit.hosted for unit in self.units])
            done, lost = (
                self.resumed.completed_deliveries(engine, self.outputs) if self.resumed is not None else ([], [])
            )
            kept = [Deliver(-1, 0, 0, 0, {}, self.retry.segments(engine, self.units))] if self.retry else []
            log = self._open_commit_log(lost, undo)
            active = self.admitted.connect(
                engine,
                self.units,
                undo,
                resume=[*kept, *done],
                sinks=[sink.spec.path for sink in self.outputs.files.values()],
                durable=self.durable,
                profile_keys=self._profile_keys(),
            )
            for note in [*self.notes, *(self.retry.notes if self.retry is not None else ())]:
                print_stderr(f"note: {note}")
            run = self._run(active, log, done)
            undo.pop_all()
        return run

    def _profile_keys(self) -> Mapping[str, Any] | None:
        if self.kinds is None:
            return None
        from dovetail.runtime.stage_profiles import storage_keys

        return storage_keys(self.pipeline, self.admitted.admission.plan, *self.kinds)

    # --- source and sinks

    def _prepare_sinks(self, undo: ExitStack) -> None:
        """Checks that every sink can be written before anything starts."""
        before = self.resumed.commits.header["sinks"] if self.resumed is not None else {}
        if self.retry is not None:
            self.retry.check_not_started(self.resumed.folder.id if self.resumed is not None else None)
        if self.resumed is not None:
            self.resumed.check_retry_of(self.retry.folder.id if self.retry is not None else None)
            specs = {label: asdict(sink.spec) for label, sink in self.outputs.files.items()}
            self.resumed.check_sinks(specs, sorted(self.outputs.functions))
        for label, sink in self.outputs.files.items():
            undo.callback(sink.close)
            if self.discard_parts:
                sink.discard()
            if self.resumed is None:
                undo.callback(sink.discard)
            else:
                sink.set_base(before[label]["base"])
            sink.prepare(resumed=self.resumed is not None)

    def _open_commit_log(self, lost: list[int], undo: ExitStack) -> CommitLog | None:
        if not self.durable:
            return None
        from dovetail.data.commit_log import CommitLog
        from dovetail.runtime.resume import unit_waves

        log = CommitLog(self.admitted.folder.commit_log)
        undo.callback(log.close)
        units = unit_waves(self.units)
        if self.resumed is None:
            sinks = {
                label: {"path": sink.spec.path, "kind": sink.kind, "base": sink.base(), "spec": asdict(sink.spec)}
                for label, sink in self.outputs.files.items()
            }
            about: dict[str, Any] = {
                "run": self.admitted.folder.id,
                "source": self.run_input.fingerprint(),
                "sinks": sinks,
                "units": units,
            }
            again = self.retry.folder if self.retry is not None else None
            about["functions"] = sorted(self.outputs.functions)
            about["again"] = None if again is None else again.id
            about["again_folder"] = None if again is None else str(again.path)
            log.begin(about)
            if self.retry is not None:
                self.retry.mark_retried(self.admitted.folder)
            return log
        if self.resumed.units != units:
            log.units(units)
        if lost:
            log.void_entries(lost)
            self.notes.append(f"{len(lost)} finished epochs have lost their files and are computed again")
        return log

    def _committed_sink(
        self, log: CommitLog, results: IteratorSink, engine: RunEngine, done: list[Deliver], source: Source
    ) -> CommitSink:
        from dovetail.data.commit_sink import CommitSink, SeekableSource

        sink = CommitSink(
            log,
            self.outputs,
            results,
            engine,
            engine,
            self.admitted.folder.path / "spool",
            ordered=self.admitted.options.ordered,
            done=[one for deliver in done if not deliver.wave for one in deliver.ranges],
        )
        if isinstance(source, SeekableSource):
            sink.source = source
        return sink

    def _run(self, active: ActiveRun, log: CommitLog | None, done: list[Deliver]) -> Run:
        engine = active.engine
        results = IteratorSink(engine, ordered=self.admitted.options.ordered)
        source = self.run_input.make_source(engine, self.resumed.marks() if self.resumed is not None else {})
        active.recorder.set_place_lookup(source.place_of)
        sink = self._committed_sink(log, results, engine, done, source) if log is not None else None
        ends = SourceAndSink(source, sink or results)
        results.on_space = ends.on_space
        if sink is not None:
            sink.on_space = ends.on_space
        files: list[str] = []

        def finish() -> None:
            complete = active.state is RunState.FINISHED
            if sink is not None and active.state is not RunState.FAILED:
                files.extend(sink.finish(complete=complete))
            if complete:
                engine.keep_spool = False
                if self.retry is not None:
                    self.retry.mark_retried(active.folder, done=True)

        def close_ends() -> None:
            source.close()
            self.run_input.close()
            if sink is not None:
                sink.close()
            if active.error.startswith(NOT_STARTED_CODES):
                for file in self.outputs.files.values():
                    file.discard()

        def failure() -> BaseException | RunFailure | None:
            return source.error or (sink.error if sink is not None else None) or active.failure

        drive = partial(active.drive, ends, on_end=finish, close_ends=close_ends)
        return Run(active, results, drive, failure, files, source.place_of)
