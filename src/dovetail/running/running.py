"""How does a pipeline run on this machine? Input, output, plan and place are found; then it starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.engines.local.limits import SHARE_OF_MEMORY
from dovetail.engines.ray.where import is_ray
from dovetail.observe.folder import create_run
from dovetail.running import outputs as where
from dovetail.running.arguments import check_arguments
from dovetail.running.hold import Hold
from dovetail.running.inputs import Kept, open_input
from dovetail.running.sites import site_of
from dovetail.running.starting import Asked, Begun
from dovetail.running.undoing import remove, undone
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.options import Options
from dovetail.streaming.work import works_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dovetail.observe.folder import RunFolder
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.running.claiming import Place
    from dovetail.running.handle import Run
    from dovetail.running.inputs import Input
    from dovetail.running.resuming import Earlier
    from dovetail.running.retrying import Again
    from dovetail.running.sites import Site
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.work import Work

FIRST_REPLAN_S = 1.0
DURABLE_EPOCH_S = 1.0
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
    options: Options | None = None,
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
    with undone() as undo:
        reached = partial(site_of, engine, share=share, env_from=tuple(env_from))
        computed = type(source).__module__.startswith("ray.data.")  # by the Ray that is asked for, not by any other
        site = reached() if computed else None
        earlier = _earlier(resume)
        if earlier is not None:
            undo.append(earlier.hold.let_go)
        again = _again(retry_errors, sink, earlier)
        want = where.wanted(sink if again is None else again.sink, pipeline, ordered=ordered)
        on_ray = is_ray(engine)
        given = open_input(source, limit, _before(earlier), on_ray=on_ray) if again is None else Kept()
        undo.append(given.close)
        if earlier is None:
            where.check_apart(want, given.files())
        site = site or reached()  # last: it may start a Ray
        site.check(pipeline)
        begun = _Begin(pipeline, site, given, want, earlier, again, undo)
        begun.plan(plan, site.cluster(cluster), mode, profiles=profiles)
        begun.claim(run_dir, wait=wait, force=force_resume)
        asked = Asked(record, progress, verbose, pin_cpus, what, dict(more or {}))
        found = _options(options, ordered, max_errors, begun.alone.cluster, want)
        return begun.start(site.options(found, given=options is not None), asked)


def _earlier(what: str | Path | None) -> Earlier | None:
    if what is None:
        return None
    from dovetail.running.resuming import Earlier

    return Earlier(what)


def _before(earlier: Earlier | None) -> dict[str, object] | None:
    return earlier.told.beginning.get("source") if earlier is not None else None


def _again(what: str | Path | None, sink: object, earlier: Earlier | None) -> Again | None:
    """What is to be run again: as said, or as the run that goes on began."""
    began_with = earlier.told.beginning.get("again_folder") if earlier is not None else None
    if what is None and began_with is None:
        return None
    from dovetail.running.retrying import Again, sinks_of

    if what is None and earlier is not None:
        return Again(str(began_with), sinks_of(earlier.told) or sink)
    return Again(str(what), sink)


def _options(
    options: Options | None, ordered: bool, max_errors: int | None, cluster: Cluster, want: where.Wanted
) -> Options:
    durable = want.durable
    usual = Options(eager=not (ordered or durable), first_replan_s=FIRST_REPLAN_S)
    memory = sum(node.memory_bytes for node in cluster.nodes)
    if memory:
        usual = replace(usual, byte_budget=min(usual.byte_budget, memory // SHARE_OF_MEMORY))
    if durable:
        usual = replace(usual, epoch_most_s=DURABLE_EPOCH_S, message_s=DURABLE_MESSAGE_S)
    found = replace(options or usual, finish_waves=not durable)
    if durable:
        found = replace(found, eager=False, in_order=want.in_order)
    if ordered:
        found = replace(found, ordered=True, eager=False)
    return found if max_errors is None else replace(found, max_aside=max_errors)


@dataclass
class _Begin:
    """What is put together before a run starts, step by step."""

    pipeline: Pipeline
    site: Site
    given: Input
    want: where.Wanted
    earlier: Earlier | None
    again: Again | None
    undo: list[Callable[[], None]]
    alone: Plan = field(init=False)
    """The plan for an empty machine."""
    _planned: Callable[[Cluster], Plan] | None = None
    _folder: RunFolder = field(init=False)
    _place: Place = field(init=False)
    _works: tuple[Work, ...] = field(init=False)
    _hold: Hold = field(init=False)
    _notes: list[str] = field(default_factory=list)
    _learns: bool = True
    """Whether it uses what earlier runs measured, and tells later ones."""

    def plan(self, plan: Plan | None, cluster: Cluster | str, mode: str, *, profiles: bool) -> None:
        self._learns = profiles
        if plan is None:
            known = self._profiles(cluster) if profiles else {}
            self._planned = partial(make_plan, self.pipeline, mode=mode, profiles=known)
            plan = self._planned(cluster)
        else:
            plan, self._planned = self.site.adopted(plan, earlier=False)
        self.alone = plan
        if self.earlier is not None and not self.earlier.check_units(works_of(self.pipeline, plan)):
            # what lies in its spool belongs to other units: those of the plan it began with
            self.alone, self._planned = self.site.adopted(self.earlier.plan(), earlier=True)

    def _profiles(self, cluster: Cluster | str) -> Mapping[str, Any]:
        from dovetail.resources.cluster import Cluster as Cluster_
        from dovetail.running.profiling import profiles_for

        return profiles_for(self.pipeline, Cluster_.of(cluster), *self._reads_and_writes())

    def _reads_and_writes(self) -> tuple[str, dict[str, str]]:
        """What was measured of stages holds for the same kinds of source and sink."""
        return self.given.kind, self.want.kinds(self.pipeline)

    def claim(self, run_dir: str | Path | None, *, wait: bool, force: bool) -> None:
        if self.earlier is not None:
            self._notes = self.earlier.check_source(self.given.fingerprint(), force=force)
            self._folder, self._hold = self.earlier.folder, self.earlier.hold
        else:
            self._folder = create_run(self.alone.name, run_dir)
            self.undo.append(partial(remove, self._folder))
            self._hold = Hold(self._folder)
            self.undo.append(self._hold.let_go)
        self._place = self.site.place(self._folder.id, self.alone, self._planned, wait=wait)
        self.undo.append(self._place.leave)
        self._works = works_of(self.pipeline, self._place.plan)

    def start(self, options: Options, asked: Asked) -> Run:
        return Begun(
            self.pipeline,
            self._works,
            self.site,
            self._place,
            self._folder,
            self._hold,
            self.given,
            self._reads_and_writes() if self._learns and self.again is None else None,
            where.opened(self.want, self._folder.id, self._folder.path / "parts"),
            options,
            asked,
            self.earlier,
            self.again,
            self._notes,
        ).start()
