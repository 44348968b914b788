"""Run of a recipe from Python: input checks, probe, run, then traces and monitor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import SourceSinkError
from dovetail.errors import ConfigError, DovetailError, InfeasibleError, Problem
from dovetail.observe.text_format import format_duration
from dovetail.pipeline.units import fuse_stages
from dovetail.recipes.column_check import missing_columns, sample_rows
from dovetail.recipes.file_keys import STDIN_SOURCE, value_or_default
from dovetail.recipes.recipe import recipe_run_spec
from dovetail.resources.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.observe.summary import RunSummary
    from dovetail.recipes.recipe import Recipe

PROBE_ROWS = 200
INPUT_ERROR_CODE = "DT418"


def check_operators(recipe: Recipe) -> None:
    """For who needs no input: only whether all operators can run here."""
    problems = recipe.unready()
    if problems:
        raise ConfigError(problems)


def check_recipe(recipe: Recipe) -> None:
    """All that would stop it, before anything starts: operators that cannot run here, fields that are not there."""
    problems = recipe.unready()
    if recipe.source is None:
        fixes = ("dataset_path: data.jsonl", "on the command line: --source data.jsonl")
        problems.append(
            Problem(
                INPUT_ERROR_CODE, "says no dataset_path: where do rows come from?", fixes=fixes, place=str(recipe.file)
            )
        )
    else:
        try:
            problems += missing_columns(recipe, sample_rows(recipe.source))
        except SourceSinkError as error:
            problems.append(Problem(error.code, error.message, fixes=(error.fix,), place=error.place))
    if problems:
        raise ConfigError(problems)


def probe_recipe(recipe: Recipe, cluster: Cluster, say: Callable[[str], object], *, always: bool = False) -> None:
    """Runs a few real rows through all operators on this machine, if there is something to balance of which nobody
    knows the speed yet. What it measured is found by whoever plans next; that it cannot be done stops nobody."""
    from dovetail.runtime.probe import probe as run_probe
    from dovetail.runtime.run_spec import add_import_path, open_source_and_sink
    from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds

    job = recipe_run_spec(recipe, cluster)
    pipeline = job.pipeline
    if not always and len(fuse_stages(pipeline)) < 2:
        return
    if recipe.source == STDIN_SOURCE:
        say("not probed: what is read from stdin can be read only once")
        return
    add_import_path(recipe.file.parent)
    known = load_profiles(pipeline, cluster, *source_sink_kinds(job))
    if all(stage.name in known or stage.rate is not None for stage in pipeline):
        return
    if any(stage.resources.gpus or stage.resources.gpu_memory for stage in pipeline):
        local = Cluster.local()
        if not any(node.gpus for node in local.nodes):
            say("not probed: it needs GPUs, and this machine has none")
            return
    try:
        told = run_probe(_untraced_pipeline(recipe, cluster), open_source_and_sink(job)[0], PROBE_ROWS)
        say(f"probed with {told.read} rows in {format_duration(told.seconds)}")
    except (ConfigError, InfeasibleError) as error:
        say(f"not probed: {error.problems[0].message}")
    except DovetailError as error:
        say(f"the probe failed: {error.problems[0].message}")


def _untraced_pipeline(recipe: Recipe, cluster: Cluster) -> Any:
    """A probe leaves no samples."""
    top = {key: item for key, item in recipe.settings.items() if key != "open_tracer"}
    return replace(recipe, settings=top).pipeline(cluster)


def prepare_traces(recipe: Recipe) -> None:
    """Before a run that begins anew: what an earlier one left of its samples goes away."""
    if not recipe.traced_stages[0]:
        return
    from dovetail.recipes.tracer import prepare_trace_folder as begin_traces

    try:
        begin_traces(str(recipe.work_dir / "trace"))
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        fixes = ("work_dir: a folder that you may write", "open_tracer: false")
        raise ConfigError(Problem("DT025", message, fixes=fixes, place=str(recipe.work_dir))) from None


def write_reports(recipe: Recipe, folder: str | Path, *, resumed: bool = False) -> list[str]:
    """Traces and the monitor, where the file asks for them; what there is to say about that."""
    try:
        return _write_reports(recipe, folder, resumed=resumed)
    except OSError as error:  # the results are there; these are only about them
        return [f"traces and monitor cannot be written: {error}"]


def _write_reports(recipe: Recipe, folder: str | Path, *, resumed: bool) -> list[str]:
    said: list[str] = []
    names, limit = recipe.traced_stages
    if names:
        from dovetail.recipes.tracer import merge_samples

        into = recipe.work_dir / "trace"
        said += merge_samples(str(into), names, limit, run_folder=str(folder), add=resumed)
        said.append(f"traces: {into}")
    if value_or_default(recipe.settings, "open_monitor", False):
        from dovetail.observe.monitor import write_monitor

        into = recipe.work_dir / "monitor"
        write_monitor(str(folder), [(step.op, step.name) for step in recipe.steps], str(into))
        said.append(f"monitor: {into / 'monitor.html'}")
    return said


def run_recipe(recipe: Recipe, *, engine: str | None = None, cluster: Cluster | str = "auto", **how: Any) -> RunSummary:
    """As `dt.run(...).wait()`, with everything that a recipe says; `how` goes to `dt.run`."""
    from dovetail.engines.ray.address import is_ray_engine
    from dovetail.recipes.recipe_plan import explain_infeasible
    from dovetail.runtime.run import run as start
    from dovetail.runtime.run_spec import add_import_path, open_source_and_sink, with_append

    engine = engine or recipe.engine
    wants_probe = how.pop("probe", True)
    retried = how.get("retry_errors") is not None
    resumed = retried or how.get("resume") is not None
    check_operators(recipe) if retried else check_recipe(recipe)
    there = Cluster.local() if is_ray_engine(engine) else Cluster.of(cluster)
    add_import_path(recipe.file.parent)
    if wants_probe and not resumed:
        probe_recipe(recipe, there, lambda _: None)
    job = recipe_run_spec(recipe, None if is_ray_engine(engine) else there)
    if retried:  # which reads what was set aside, not the source
        job = replace(job, source=(), sink=with_append(job.sink))
    if not resumed:
        prepare_traces(recipe)
    source, sink = open_source_and_sink(job)
    settings = {"mode": recipe.mode, "ordered": recipe.ordered, "max_errors": recipe.max_errors, "sink": sink} | how
    where = "auto" if is_ray_engine(engine) else there
    try:
        running = start(job.pipeline, source, engine, where, what="dt.Recipe.run", **settings)
    except InfeasibleError as error:
        raise explain_infeasible(recipe, there, how.get("mode"), error) from None
    try:
        return running.wait()
    finally:
        write_reports(recipe, running.stats.folder, resumed=resumed)
