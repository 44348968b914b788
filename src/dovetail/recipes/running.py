"""How is a recipe run? Checked, probed, planned, run; and then what it leaves behind is put where its file says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.control.splits import Unusable
from dovetail.errors import ConfigError, DovetailError, InfeasibleError, Problem
from dovetail.observe.words import duration
from dovetail.pipeline.units import units_of
from dovetail.recipes.job import job_of
from dovetail.recipes.keys import STDIN, value
from dovetail.recipes.sampling import missing_columns, sample
from dovetail.resources.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.observe.summary import Summary
    from dovetail.recipes.recipe import Recipe

PROBED_ROWS = 200
DATA = "DT418"


def check_operators(recipe: Recipe) -> None:
    """For who needs no input: only whether all operators can run here."""
    problems = recipe.unready()
    if problems:
        raise ConfigError(problems)


def check(recipe: Recipe) -> None:
    """All that would stop it, before anything starts: operators that cannot run here, fields that are not there."""
    problems = recipe.unready()
    if recipe.source is None:
        fixes = ("dataset_path: data.jsonl", "or on the command line: --source data.jsonl")
        problems.append(
            Problem(DATA, "says no dataset_path: where do rows come from?", fixes=fixes, place=str(recipe.file))
        )
    else:
        try:
            problems += missing_columns(recipe, sample(recipe.source))
        except Unusable as error:
            problems.append(Problem(error.code, error.message, fixes=(error.fix,), place=error.place))
    if problems:
        raise ConfigError(problems)


def probe(recipe: Recipe, cluster: Cluster, say: Callable[[str], object], *, always: bool = False) -> None:
    """Runs a few real rows through all operators on this machine, if there is something to balance of which nobody
    knows the speed yet. What it measured is found by whoever plans next; that it cannot be done stops nobody."""
    from dovetail.running.job import importable, opened
    from dovetail.running.probing import probe as run_probe
    from dovetail.running.profiling import kinds_of, profiles_for

    job = job_of(recipe, cluster)
    pipeline = job.pipeline
    if not always and len(units_of(pipeline)) < 2:
        return
    if recipe.source == STDIN:
        say("not probed: what is read from stdin can be read only once")
        return
    importable(recipe.file.parent)
    known = profiles_for(pipeline, cluster, *kinds_of(job))
    if all(stage.name in known or stage.rate is not None for stage in pipeline):
        return
    if any(stage.resources.gpus or stage.resources.gpu_memory for stage in pipeline):
        local = Cluster.local()
        if not any(node.gpus for node in local.nodes):
            say("not probed: it needs GPUs, and this machine has none")
            return
    try:
        told = run_probe(_without_traces(recipe, cluster), opened(job)[0], PROBED_ROWS)
        say(f"probed with {told.read} rows in {duration(told.seconds)}")
    except (ConfigError, InfeasibleError) as error:
        say(f"not probed: {error.problems[0].message}")
    except DovetailError as error:
        say(f"the probe failed: {error.problems[0].message}")


def _without_traces(recipe: Recipe, cluster: Cluster) -> Any:
    """A probe leaves no samples."""
    top = {key: item for key, item in recipe.top.items() if key != "open_tracer"}
    return replace(recipe, top=top).pipeline(cluster)


def begin(recipe: Recipe) -> None:
    """Before a run that begins anew: what an earlier one left of its samples goes away."""
    if not recipe.traced[0]:
        return
    from dovetail.recipes.tracing import begin as begin_traces

    try:
        begin_traces(str(recipe.work_dir / "trace"))
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        fixes = ("work_dir: a folder that you may write", "or open_tracer: false")
        raise ConfigError(Problem("DT025", message, fixes=fixes, place=str(recipe.work_dir))) from None


def finish(recipe: Recipe, folder: str | Path, *, resumed: bool = False) -> list[str]:
    """Traces and the monitor, where the file asks for them; what there is to say about that."""
    try:
        return _finished(recipe, folder, resumed=resumed)
    except OSError as error:  # the results are there; these are only about them
        return [f"traces and monitor cannot be written: {error}"]


def _finished(recipe: Recipe, folder: str | Path, *, resumed: bool) -> list[str]:
    said: list[str] = []
    names, limit = recipe.traced
    if names:
        from dovetail.recipes.tracing import gather

        into = recipe.work_dir / "trace"
        said += gather(str(into), names, limit, run_folder=str(folder), add=resumed)
        said.append(f"traces: {into}")
    if value(recipe.top, "open_monitor", False):
        from dovetail.recipes.monitoring import write_monitor

        into = recipe.work_dir / "monitor"
        write_monitor(str(folder), [(step.op, step.name) for step in recipe.steps], str(into))
        said.append(f"monitor: {into / 'monitor.html'}")
    return said


def run(recipe: Recipe, *, engine: str | None = None, cluster: Cluster | str = "auto", **how: Any) -> Summary:
    """As `dt.run(...).wait()`, with everything that a recipe says; `how` goes to `dt.run`."""
    from dovetail.engines.ray.where import is_ray
    from dovetail.recipes.infeasible import told
    from dovetail.running.job import added_to, importable, opened
    from dovetail.running.running import run as start

    engine = engine or recipe.engine
    wants_probe = how.pop("probe", True)
    retried = how.get("retry_errors") is not None
    resumed = retried or how.get("resume") is not None
    check_operators(recipe) if retried else check(recipe)
    there = Cluster.local() if is_ray(engine) else Cluster.of(cluster)
    importable(recipe.file.parent)
    if wants_probe and not resumed:
        probe(recipe, there, lambda _: None)
    job = job_of(recipe, None if is_ray(engine) else there)
    if retried:  # which reads what was set aside, not the source
        job = replace(job, source=(), sink=added_to(job.sink))
    if not resumed:
        begin(recipe)
    source, sink = opened(job)
    settings = {"mode": recipe.mode, "ordered": recipe.ordered, "max_errors": recipe.max_errors, "sink": sink} | how
    where = "auto" if is_ray(engine) else there
    try:
        running = start(job.pipeline, source, engine, where, what="dt.Recipe.run", **settings)
    except InfeasibleError as error:
        raise told(recipe, there, how.get("mode"), error) from None
    try:
        return running.wait()
    finally:
        finish(recipe, running.stats.folder, resumed=resumed)
