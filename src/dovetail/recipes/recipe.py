"""`Recipe`: load, plan and run a recipe file; and `RecipeRunSpec`, the run that `dovetail run` starts from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.data.readers.json_array import READ_ROWS_TARGET as ARRAYS
from dovetail.data.readers.json_array import is_json_array
from dovetail.documents.parser import read_document
from dovetail.errors import ConfigError, PipelineError, Problem
from dovetail.pipeline.overrides import Override
from dovetail.pipeline.pipeline import Pipeline
from dovetail.recipes.compiler import RESULTS_STAGE, STATS_STAGE, CompileOptions, compile_stages, step_stages
from dovetail.recipes.file_keys import (
    DEFAULT_MAX_ERRORS,
    DEFAULT_TRACE_NUM,
    STDIN_SOURCE,
    dataset_paths,
    value_or_default,
)
from dovetail.recipes.overrides import apply_recipe_overrides
from dovetail.recipes.recipe_file import parse_recipe
from dovetail.runtime.run_spec import STDIO, RunSpec, absolute_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.documents.document import Document
    from dovetail.observe.summary import RunSummary
    from dovetail.recipes.recipe_file import RecipeStep
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.run_handle import Run
    from dovetail.scheduling.plan import Plan

SOURCE_SINK_KEYS = {"source": "dataset_path", "sink": "export_path"}


@dataclass(frozen=True)
class Recipe:
    """A list of operators over a dataset, loaded from a file with `Recipe.load`."""

    file: Path
    document: Document
    settings: Mapping[str, Any]
    steps: tuple[RecipeStep, ...]
    notes: tuple[str, ...]
    folder: Path
    """Folder of its relative paths."""

    @classmethod
    def load(
        cls,
        file: str | Path,
        sets: Sequence[str] = (),
        source: str | None = None,
        sink: str | None = None,
        typed_in: Path | None = None,
    ) -> Recipe:
        """Read and check a file. Raises PipelineError with every problem.

        `sets`, `source` and `sink` are as on the command line, typed in the folder `typed_in`.
        """
        path = Path(file).absolute()
        document = read_document(file)
        typed = typed_in or Path.cwd()
        changed = apply_recipe_overrides(document, sets, list(_source_sink_overrides(source, sink, typed)), typed)
        found = parse_recipe(changed, path.parent)
        if found.problems:
            raise PipelineError(found.problems)
        folder, note = _base_folder(found.settings, path.parent, typed)
        recipe = cls(path, changed, found.settings, found.steps, (*found.notes, *note), folder)
        if isinstance(recipe.source, Mapping) and recipe.source.get("run") == ARRAYS:
            note_text = "the input is one JSON array, which one process reads; .jsonl is read by all workers"
            return replace(recipe, notes=(*recipe.notes, note_text))
        return recipe

    # --- settings of the file

    @property
    def name(self) -> str:
        name = str(value_or_default(self.settings, "project_name", self.file.stem))
        return "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name)[:90] or "recipe"

    @property
    def source(self) -> Any:
        """Source for `dt.run`; None if the recipe has no input."""
        paths = value_or_default(self.settings, "dataset_path", dataset_paths(self.settings.get("dataset")))
        if isinstance(paths, Mapping) or paths is None:
            return paths
        listed = [
            absolute_path(path, self.folder, pattern=True) for path in ([paths] if isinstance(paths, str) else paths)
        ]
        if all(map(is_json_array, listed)):
            return {"run": ARRAYS, "args": {"paths": listed}}
        return listed[0] if len(listed) == 1 else {"path": listed}

    @property
    def sink(self) -> Any:
        """Sink as in a pipeline file; None: the caller reads the results."""
        path = self.settings.get("export_path")
        if path is None:
            return None
        main: dict[str, Any] = {"path": absolute_path(path, self.folder, pattern=False)}
        kind = value_or_default(self.settings, "export_type", "json" if str(path).endswith(".json") else None)
        if kind is not None:
            main["format"] = "jsonl" if kind == "json" else kind
        size = self.settings.get("export_shard_size")
        if size is not None:
            main["shard_size"] = f"{size}B" if isinstance(size, int) else size
        if not self._exports_stats:
            return main
        return {"stages": {RESULTS_STAGE: main, STATS_STAGE: {"path": self.path_beside_export("_stats.jsonl")}}}

    def path_beside_export(self, ending: str) -> str:
        """Path of a file beside the results: out/clean.jsonl.gz -> out/clean_stats.jsonl."""
        from dovetail.data.file_formats import COMPRESSED_SUFFIXES, SUFFIXES

        path = absolute_path(self.settings["export_path"], self.folder, pattern=False)
        for suffix in (*COMPRESSED_SUFFIXES, *SUFFIXES):
            path = path.removesuffix(suffix)
        return path + ending

    @property
    def mode(self) -> str:
        return str(value_or_default(self.settings, "mode", "auto"))

    @property
    def ordered(self) -> bool:
        return bool(value_or_default(self.settings, "ordered", True))

    @property
    def max_errors(self) -> int | float | str | None:
        limit: int | float | str = value_or_default(self.settings, "max_errors", DEFAULT_MAX_ERRORS)
        return limit

    @property
    def engine(self) -> str:
        """Engine that the file specifies."""
        if not str(value_or_default(self.settings, "executor_type", "default")).startswith("ray"):
            return "local"
        address = self.settings.get("ray_address")
        return "ray" if address is None else f"ray:{address}"

    @property
    def work_dir(self) -> Path:
        """Folder for monitor/ and trace/."""
        given = self.settings.get("work_dir")
        if given is not None:
            return Path(absolute_path(given, self.folder, pattern=False))
        export = self.settings.get("export_path")
        if export is None or "://" in export:
            return self.folder
        return Path(absolute_path(export, self.folder, pattern=False)).parent

    @property
    def traced_stages(self) -> tuple[tuple[str, ...], int]:
        """The stages to trace, and the number of samples per stage."""
        if not value_or_default(self.settings, "open_tracer", False):
            return (), 0
        only = self.settings.get("op_list_to_trace")
        names = tuple(step.name for step in self.steps if only is None or step.op in only or step.name in only)
        return names, value_or_default(self.settings, "trace_num", DEFAULT_TRACE_NUM)

    @property
    def _exports_stats(self) -> bool:
        wanted = value_or_default(self.settings, "export_stats", False) and self.settings.get("export_path") is not None
        return bool(wanted) and any(step.kind == "filter" for step in self.steps)

    # --- compilation, plan and run

    def compile_options(self, cluster: Cluster | None = None) -> CompileOptions:
        texts = value_or_default(self.settings, "text_keys", "text")
        return CompileOptions(
            auto_workers=value_or_default(self.settings, "auto_op_parallelism", True),
            np=self.settings.get("np"),
            has_gpus=cluster is None or any(node.gpus for node in cluster.nodes),
            keep_stats=value_or_default(self.settings, "keep_stats_in_res_ds", False),
            export_stats=self._exports_stats,
            reads_text_lines=_is_text_source(self.source),
            text_key=texts[0] if isinstance(texts, list) else texts,
        )

    def pipeline(self, cluster: Cluster | None = None) -> Pipeline:
        """The compiled pipeline. On a cluster without GPUs, operators run on CPUs unless the file requests a GPU."""
        return Pipeline(compile_stages(self.steps, self.compile_options(cluster), self._wrap), self.name)

    def operator_stages(self) -> list[tuple[str, tuple[str, ...]]]:
        """Each operator with the names of its stages, in the order of the recipe."""
        return [(step.op, step_stages(step)) for step in self.steps]

    def _wrap(self, run: Callable[..., Any], name: str) -> Callable[..., Any]:
        names, limit = self.traced_stages
        if name not in names:
            return run
        from dovetail.recipes.tracer import trace_run

        return trace_run(run, name, str(self.work_dir / "trace"), limit)

    def digest(self) -> str:
        """Hash of the recipe with the changes of the command line."""
        return hashlib.sha256(json.dumps(self.document.data, sort_keys=True, default=str).encode()).hexdigest()[:20]

    def unready(self) -> list[Problem]:
        """Reasons why operators cannot run in this environment, with line and column. Planning works without them."""
        return [
            replace(step.unready, place=self.document.place(("process", step.number, step.op)))
            for step in self.steps
            if step.unready is not None
        ]

    def plan(self, cluster: Cluster | str = "auto", mode: str | None = None, **how: Any) -> Plan:
        """Plan as `dt.plan` does. InfeasibleError has lines of the file and fixes that were tried."""
        from dovetail.recipes.recipe_plan import plan_recipe

        made = plan_recipe(self, cluster, mode, **how)
        return recipe_run_spec(self, made.cluster).complete_plan(made)

    def start(self, **arguments: Any) -> Run:
        """Start a run, as `dt.run(recipe)` does; arguments as in `dt.run`, by default those of the file."""
        from dovetail.recipes.runner import start_recipe

        return start_recipe(self, **arguments)

    def run(self, **arguments: Any) -> RunSummary:
        """Run to the end. Arguments as in `dt.run`; `probe=False` does not measure operators first.

        Traces and the monitor are written if the file asks for them.
        """
        return self.start(**arguments).wait()


def _source_sink_overrides(source: str | None, sink: str | None, folder: Path) -> Any:
    for key, text in (("source", source), ("sink", sink)):
        if text == "":
            raise ConfigError(Problem("DT360", f"--{key} is empty", fixes=(f"--{key} data.jsonl",)))
        if text is None:
            continue
        found: Any = absolute_path(text, folder, pattern=key == "source")
        if text == STDIO:
            found = STDIN_SOURCE if key == "source" else None
        if key == "source":
            yield Override(("dataset",), None, f"--source {text}")
        yield Override((SOURCE_SINK_KEYS[key],), found, f"--{key} {text}")


def _base_folder(top: Mapping[str, Any], beside: Path, typed: Path) -> tuple[Path, tuple[str, ...]]:
    """Folder of relative paths: the file's folder, or, if the input exists only there, the current folder as in
    Data-Juicer."""
    paths = value_or_default(top, "dataset_path", dataset_paths(top.get("dataset")))
    first = paths[0] if isinstance(paths, list) and paths else paths
    if not isinstance(first, str) or beside == typed:
        return beside, ()
    here, there = (
        next(iter(_matching_paths(absolute_path(first, folder, pattern=True))), None) for folder in (beside, typed)
    )
    if here is None and there is not None:
        return typed, (f"relative paths start at {typed}, as in Data-Juicer: {first} does not exist beside the recipe",)
    return beside, ()


def _matching_paths(path: str) -> list[str]:
    from glob import glob

    return [path] if Path(path).exists() or "://" in path else glob(path, recursive=True)  # noqa: PTH207


def _is_text_source(source: Any) -> bool:
    from dovetail.data.file_formats import format_from_suffix

    path = source.get("path") if isinstance(source, Mapping) else source
    first = path[0] if isinstance(path, list) and path else path
    if not isinstance(first, str) or "://" in first:
        return isinstance(first, str) and format_from_suffix(first) == "text"
    forms = (format_from_suffix(str(file)) for found in _matching_paths(first) for file in _files_under(Path(found)))
    return next(filter(None, forms), None) == "text"


def _files_under(path: Path) -> Iterable[Path]:
    return (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


@dataclass(frozen=True, slots=True)
class RecipeRunSpec(RunSpec):
    recipe: Recipe | None = None


def load_recipe_spec(
    file: str | Path,
    sets: Sequence[str] = (),
    source: str | None = None,
    sink: str | None = None,
    typed_in: Path | None = None,
) -> RecipeRunSpec:
    """Load a recipe as `run_spec.load_pipeline_spec` loads a pipeline file."""
    return recipe_run_spec(Recipe.load(file, sets, source, sink, typed_in))


def recipe_run_spec(recipe: Recipe, cluster: Cluster | None = None) -> RecipeRunSpec:
    return RecipeRunSpec(
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


def spec_for_cluster(job: RunSpec, cluster: Cluster) -> RunSpec:
    """The run compiled for a cluster; a pipeline is returned unchanged."""
    if not isinstance(job, RecipeRunSpec) or job.recipe is None:
        return job
    return replace(job, pipeline=job.recipe.pipeline(cluster))
