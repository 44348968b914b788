"""A recipe: loaded, checked, planned and run. `dt.Recipe.load("recipe.yaml").run()`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.documents.read import read_document
from dovetail.errors import ConfigError, PipelineError, Problem
from dovetail.pipeline.changes import Change
from dovetail.pipeline.pipeline import Pipeline
from dovetail.recipes.arrays import RUN as ARRAYS
from dovetail.recipes.arrays import is_array
from dovetail.recipes.changes import with_sets
from dovetail.recipes.compiling import RESULTS, STATS_OUT, How, stages_of
from dovetail.recipes.keys import MOST_ERRORS, STDIN, TRACED, dataset_paths, value
from dovetail.recipes.reading import written
from dovetail.running.job import STANDARD, absolute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.documents.document import Document
    from dovetail.observe.summary import Summary
    from dovetail.recipes.reading import Step
    from dovetail.resources.cluster import Cluster
    from dovetail.scheduling.plan import Plan

ENDS = {"source": "dataset_path", "sink": "export_path"}


@dataclass(frozen=True)
class Recipe:
    """Operators over a dataset, as a file says. Make it with `Recipe.load`."""

    file: Path
    document: Document
    top: Mapping[str, Any]
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    folder: Path
    """Where its relative paths start."""

    @classmethod
    def load(
        cls,
        file: str | Path,
        sets: Sequence[str] = (),
        source: str | None = None,
        sink: str | None = None,
        typed_in: Path | None = None,
    ) -> Recipe:
        """Reads and checks a file, everything at once; `sets`, `source` and `sink` are as on the command line."""
        path = Path(file).absolute()
        document = read_document(file)
        typed = typed_in or Path.cwd()
        asked = with_sets(document, sets, list(_ends(source, sink, typed)), typed)
        found = written(asked, path.parent)
        if found.problems:
            raise PipelineError(found.problems)
        folder, note = _folder(found.top, path.parent, typed)
        recipe = cls(path, asked, found.top, found.steps, (*found.notes, *note), folder)
        if isinstance(recipe.source, Mapping) and recipe.source.get("run") == ARRAYS:
            said = "the input is one JSON array: it is read whole, by one process; .jsonl is read by all workers"
            return replace(recipe, notes=(*recipe.notes, said))
        return recipe

    # --- what it says

    @property
    def name(self) -> str:
        name = str(value(self.top, "project_name", self.file.stem))
        return "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name)[:90] or "recipe"

    @property
    def source(self) -> Any:
        """As `dt.run` takes it; None if the recipe names no input."""
        paths = value(self.top, "dataset_path", dataset_paths(self.top.get("dataset")))
        if isinstance(paths, Mapping) or paths is None:
            return paths
        listed = [absolute(path, self.folder, pattern=True) for path in ([paths] if isinstance(paths, str) else paths)]
        if all(map(is_array, listed)):
            return {"run": ARRAYS, "args": {"paths": listed}}
        return listed[0] if len(listed) == 1 else {"path": listed}

    @property
    def sink(self) -> Any:
        """As a pipeline file has it; None: results are read by whoever runs it."""
        path = self.top.get("export_path")
        if path is None:
            return None
        main: dict[str, Any] = {"path": absolute(path, self.folder, pattern=False)}
        kind = value(self.top, "export_type", "json" if str(path).endswith(".json") else None)
        if kind is not None:
            main["format"] = "jsonl" if kind == "json" else kind
        size = self.top.get("export_shard_size")
        if size is not None:
            main["shard_size"] = f"{size}B" if isinstance(size, int) else size
        if not self._exports_stats:
            return main
        return {"stages": {RESULTS: main, STATS_OUT: {"path": self.beside("_stats.jsonl")}}}

    def beside(self, ending: str) -> str:
        """A file beside the results: out/clean.jsonl.gz -> out/clean_stats.jsonl."""
        from dovetail.data.sources import PACKED, SUFFIXES

        path = absolute(self.top["export_path"], self.folder, pattern=False)
        for suffix in (*PACKED, *SUFFIXES):
            path = path.removesuffix(suffix)
        return path + ending

    @property
    def mode(self) -> str:
        return str(value(self.top, "mode", "auto"))

    @property
    def ordered(self) -> bool:
        return bool(value(self.top, "ordered", True))

    @property
    def max_errors(self) -> int | None:
        limit: int = value(self.top, "max_errors", MOST_ERRORS)
        return limit

    @property
    def engine(self) -> str:
        """Where the file says that it is to run."""
        if not str(value(self.top, "executor_type", "default")).startswith("ray"):
            return "local"
        address = self.top.get("ray_address")
        return "ray" if address is None else f"ray:{address}"

    @property
    def work_dir(self) -> Path:
        """Where monitor/ and trace/ go."""
        given = self.top.get("work_dir")
        if given is not None:
            return Path(absolute(given, self.folder, pattern=False))
        export = self.top.get("export_path")
        if export is None or "://" in export:
            return self.folder
        return Path(absolute(export, self.folder, pattern=False)).parent

    @property
    def traced(self) -> tuple[tuple[str, ...], int]:
        """The stages of which samples are kept, and how many of each."""
        if not value(self.top, "open_tracer", False):
            return (), 0
        only = self.top.get("op_list_to_trace")
        names = tuple(step.name for step in self.steps if only is None or step.op in only or step.name in only)
        return names, value(self.top, "trace_num", TRACED)

    @property
    def _exports_stats(self) -> bool:
        wanted = value(self.top, "export_stats", False) and self.top.get("export_path") is not None
        return bool(wanted) and any(step.kind == "filter" for step in self.steps)

    # --- what it becomes

    def how(self, cluster: Cluster | None = None) -> How:
        texts = value(self.top, "text_keys", "text")
        return How(
            auto=value(self.top, "auto_op_parallelism", True),
            np=self.top.get("np"),
            gpus=cluster is None or any(node.gpus for node in cluster.nodes),
            keep_stats=value(self.top, "keep_stats_in_res_ds", False),
            export_stats=self._exports_stats,
            text_lines=_is_text(self.source),
            text_key=texts[0] if isinstance(texts, list) else texts,
        )

    def pipeline(self, cluster: Cluster | None = None) -> Pipeline:
        """On a cluster without GPUs, operators that would like one, and whose file does not insist, run on CPUs."""
        return Pipeline(stages_of(self.steps, self.how(cluster), self._wrap), self.name)

    def _wrap(self, run: Callable[..., Any], name: str) -> Callable[..., Any]:
        names, limit = self.traced
        if name not in names:
            return run
        from dovetail.recipes.tracing import Traced

        return Traced(run, name, str(self.work_dir / "trace"), limit)

    def digest(self) -> str:
        """Whether it is still the same recipe, with what the command line changed."""
        return hashlib.sha256(json.dumps(self.document.data, sort_keys=True, default=str).encode()).hexdigest()[:20]

    def unready(self) -> list[Problem]:
        """Why it cannot run here, although it can be planned: with the lines."""
        return [
            replace(step.unready, place=self.document.place(("process", step.number, step.op)))
            for step in self.steps
            if step.unready is not None
        ]

    def plan(self, cluster: Cluster | str = "auto", mode: str | None = None, **how: Any) -> Plan:
        """As `dt.plan`; what does not fit is told with the lines of the file, and with changes that were tried."""
        from dovetail.recipes.planning import plan

        return plan(self, cluster, mode, **how)

    def run(self, **how: Any) -> Summary:
        """Runs it to its end; `how` is as for `dt.run`. Traces and the monitor are written where the file asks."""
        from dovetail.recipes.running import run

        return run(self, **how)


def _ends(source: str | None, sink: str | None, folder: Path) -> Any:
    for key, text in (("source", source), ("sink", sink)):
        if text == "":
            raise ConfigError(Problem("DT360", f"--{key} names nothing", fixes=(f"--{key} data.jsonl",)))
        if text is None:
            continue
        found: Any = absolute(text, folder, pattern=key == "source")
        if text == STANDARD:
            found = STDIN if key == "source" else None
        if key == "source":
            yield Change(("dataset",), None, f"--source {text}")
        yield Change((ENDS[key],), found, f"--{key} {text}")


def _folder(top: Mapping[str, Any], beside: Path, typed: Path) -> tuple[Path, tuple[str, ...]]:
    """Paths start at the file's folder; Data-Juicer's start where it is called. If the input is only there, all do."""
    paths = value(top, "dataset_path", dataset_paths(top.get("dataset")))
    first = paths[0] if isinstance(paths, list) and paths else paths
    if not isinstance(first, str) or beside == typed:
        return beside, ()
    here, there = (next(iter(_matches(absolute(first, folder, pattern=True))), None) for folder in (beside, typed))
    if here is None and there is not None:
        return typed, (f"paths start at {typed}, as Data-Juicer has it: {first} is not beside the recipe",)
    return beside, ()


def _matches(path: str) -> list[str]:
    from glob import glob

    return [path] if Path(path).exists() or "://" in path else glob(path, recursive=True)  # noqa: PTH207


def _is_text(source: Any) -> bool:
    from dovetail.data.sources import suffix_format

    path = source.get("path") if isinstance(source, Mapping) else source
    first = path[0] if isinstance(path, list) and path else path
    if not isinstance(first, str) or "://" in first:
        return isinstance(first, str) and suffix_format(first) == "text"
    forms = (suffix_format(str(file)) for found in _matches(first) for file in _files(Path(found)))
    return next(filter(None, forms), None) == "text"


def _files(path: Path) -> Iterable[Path]:
    return (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
