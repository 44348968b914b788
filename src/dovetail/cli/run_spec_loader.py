"""Loading of pipeline and recipe files into a `RunSpec`, and planning errors with lines of the file."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.actors import is_actors_file
from dovetail.cli.fix_text import error_for_file
from dovetail.data.file_formats import format_from_suffix
from dovetail.documents.parser import read_document
from dovetail.errors import ConfigError, InfeasibleError, Problem
from dovetail.jobs import is_job_simulation
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.recipes import is_recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.errors import DovetailError
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.run_spec import RunSpec


def load_run_spec(
    file: str,
    sets: Sequence[str] = (),
    source: str | None = None,
    sink: str | None = None,
    folder: Path | None = None,
) -> RunSpec:
    _check_suffix(file)
    data = read_document(file).data
    if is_actors_file(data):
        message = "is an actors file, not a pipeline or a recipe"
        raise ConfigError(Problem("DT035", message, fixes=(f"dovetail actors up {shlex.quote(file)}",), place=file))
    if is_job_simulation(data):
        message = "describes a queue of jobs for a simulation, not a pipeline or a recipe"
        raise ConfigError(Problem("DT035", message, fixes=(f"dovetail simulate {shlex.quote(file)}",), place=file))
    if is_recipe(data):
        from dovetail.recipes.recipe import load_recipe_spec as load_recipe  # late: most files are pipelines

        return load_recipe(file, sets, source, sink, folder)
    from dovetail.runtime.run_spec import leaf_sinks, load_pipeline_spec

    try:
        return load_pipeline_spec(file, sets, source, sink, folder)
    except ConfigError as error:
        renderer = OptionRenderer(leaf_sinks=leaf_sinks(data, Path(file).absolute().parent))
        raise type(error)(replace(one, fixes=renderer.fixes(one)) for one in error.problems) from None


def _check_suffix(file: str) -> None:
    """Raises ConfigError for a Python program or a data file, which would be read as YAML."""
    ending = Path(file).suffix.lower()
    if ending == ".json" or not Path(file).is_file() or (ending != ".py" and format_from_suffix(file) is None):
        return
    beside: list[str] = []
    with suppress(OSError):
        beside += (str(path) for path in Path(file).parent.iterdir() if path.suffix in (".yaml", ".yml"))
    instead = shlex.quote(beside[0]) if len(beside) == 1 else ""
    if ending == ".py":
        message = "is Python code, not a pipeline or a recipe"
        fixes: tuple[str, ...] = (
            instead or "dovetail init pipeline",
            f"python {shlex.quote(file)}  # if it is a program",
        )
    else:
        message = "is data, not a pipeline or a recipe"
        fixes = (f"{instead or 'pipeline.yaml'} --source {shlex.quote(file)}",)
    raise ConfigError(Problem("DT035", message, fixes=fixes, place=file))


def recipe_of(job: RunSpec) -> Recipe | None:
    """The recipe that it was compiled from, if any."""
    return getattr(job, "recipe", None)


def fit_to_cluster(job: RunSpec, cluster: Cluster) -> RunSpec:
    """The run as compiled for this cluster."""
    if recipe_of(job) is None:
        return job
    from dovetail.recipes.recipe import spec_for_cluster

    return spec_for_cluster(job, cluster)


def infeasible_error_for_file(
    error: DovetailError,
    job: RunSpec,
    cluster: Cluster,
    mode: str | None,
    *,
    on_ray: bool = False,
    is_real: bool = False,
) -> DovetailError:
    """The planning error with the lines of the file; `is_real`: of a run, not of a plan or simulation."""
    recipe = recipe_of(job)
    if recipe is not None and isinstance(error, InfeasibleError):
        from dovetail.recipes.recipe_plan import explain_infeasible

        return explain_infeasible(recipe, cluster, mode, error)
    return error_for_file(error, job.document.name, cluster, on_ray=on_ray, is_real=is_real)
