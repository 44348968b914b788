"""A recipe as a job of `dovetail run`: what a pipeline file would be, compiled from operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.recipes.recipe import Recipe
from dovetail.running.job import Job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dovetail.resources.cluster import Cluster


@dataclass(frozen=True, slots=True)
class RecipeJob(Job):
    recipe: Recipe | None = None


def load(
    file: str | Path,
    sets: Sequence[str] = (),
    source: str | None = None,
    sink: str | None = None,
    typed_in: Path | None = None,
) -> RecipeJob:
    """As `running.job.load` does it for a pipeline file."""
    return job_of(Recipe.load(file, sets, source, sink, typed_in))


def job_of(recipe: Recipe, cluster: Cluster | None = None) -> RecipeJob:
    return RecipeJob(
        recipe.file,
        recipe.document,
        recipe.pipeline(cluster),
        recipe.source,
        recipe.sink,
        recipe.mode,
        recipe.ordered,
        recipe.max_errors,
        recipe,
    )


def fitted(job: Job, cluster: Cluster) -> Job:
    """The job where it is planned: on CPUs where there are no GPUs. A pipeline stays as it is."""
    if not isinstance(job, RecipeJob) or job.recipe is None:
        return job
    return replace(job, pipeline=job.recipe.pipeline(cluster))
