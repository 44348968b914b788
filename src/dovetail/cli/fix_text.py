"""Errors with lines of the file and fixes as options of the command line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.documents.parser import read_document
from dovetail.errors import AddNodes
from dovetail.pipeline.option_renderer import OptionRenderer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.documents.document import Document
    from dovetail.errors import DovetailError, Problem
    from dovetail.resources.cluster import Cluster


def error_for_file(
    error: DovetailError, file: str, cluster: Cluster, *, on_ray: bool = False, is_real: bool = False
) -> DovetailError:
    """The same error with the lines of a pipeline file, and with fixes as options of the command line. `is_real`: the
    command runs the pipeline, so that it cannot have nodes that do not exist."""
    document = read_document(file)
    nodes = dict.fromkeys(fix for problem in error.problems for fix in problem.fixes if isinstance(fix, AddNodes))
    renderer = OptionRenderer(None if on_ray else cluster, tuple(nodes), is_real=is_real)
    return type(error)(
        replace(renderer.problem(problem), place=problem.place or _stage_place(problem, document))
        for problem in error.problems
    )


def _stage_place(problem: Problem, document: Document) -> str:
    names: Sequence[str] = problem.subject.names if problem.subject and problem.subject.kind == "stage" else ()
    stages = document.data.get("stages", ()) if isinstance(document.data, dict) else ()
    for number, stage in enumerate(stages):
        if isinstance(stage, dict) and stage.get("name") in names:
            return document.place(("stages", number))
    return document.place(("stages",))
