"""Which kind of file was named, and what job is in it? A pipeline has stages, a recipe a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.cli.advice import for_files
from dovetail.documents import read_document
from dovetail.errors import InfeasibleError
from dovetail.recipes import is_recipe

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dovetail.errors import DovetailError
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.cluster import Cluster
    from dovetail.running.job import Job


def load_job(
    file: str,
    sets: Sequence[str] = (),
    source: str | None = None,
    sink: str | None = None,
    folder: Path | None = None,
) -> Job:
    if is_recipe(read_document(file).data):
        from dovetail.recipes.job import load as load_recipe  # late: most files are pipelines

        return load_recipe(file, sets, source, sink, folder)
    from dovetail.running.job import load

    return load(file, sets, source, sink, folder)


def recipe_of(job: Job) -> Recipe | None:
    """What it was compiled from, if it is a recipe."""
    return getattr(job, "recipe", None)


def on_cluster(job: Job, cluster: Cluster) -> Job:
    """The job as it is where it is planned."""
    if recipe_of(job) is None:
        return job
    from dovetail.recipes.job import fitted

    return fitted(job, cluster)


def explained(
    error: DovetailError, job: Job, cluster: Cluster, mode: str | None, *, on_ray: bool = False
) -> DovetailError:
    """What does not fit, with the lines of the file."""
    recipe = recipe_of(job)
    if recipe is not None and isinstance(error, InfeasibleError):
        from dovetail.recipes.infeasible import told

        return told(recipe, cluster, mode, error)
    return for_files(error, job.document.name, cluster, on_ray=on_ray)
