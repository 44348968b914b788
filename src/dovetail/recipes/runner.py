"""Run of a recipe: checkpoint, input checks, probe, start, then traces and monitor.

`prepare_run` and `RecipeStart.start` are the only way to run a recipe: `dovetail run FILE`, `dt.run(recipe)` and
`Recipe.run` all use them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import SourceSinkError
from dovetail.engines.ray.address import AddressKind, RayAddress, is_ray_engine
from dovetail.errors import ConfigError, DovetailError, InfeasibleError, Problem
from dovetail.observe.run_folder import list_runs, read_json_object
from dovetail.observe.run_header import RECIPE_FILE_KEY
from dovetail.observe.run_status import run_status
from dovetail.pipeline.units import fuse_stages
from dovetail.recipes.column_check import missing_columns, sample_rows
from dovetail.recipes.file_keys import STDIN_SOURCE, value_or_default
from dovetail.recipes.recipe import recipe_run_spec
from dovetail.recipes.recipe_plan import explain_infeasible, plan_notes
from dovetail.resources.cluster import Cluster
from dovetail.runtime.configured_engine import LOCAL_ENGINE, configured_engine, described_cluster
from dovetail.text_format import format_duration

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.observe.stage_usage import StageGroup
    from dovetail.recipes.recipe import Recipe
    from dovetail.runtime.run_handle import Run

PROBE_ROWS = 200
INPUT_ERROR_CODE = "DT418"
DIGEST_KEY, FILE_KEY, RESUMABLE_KEY = "recipe", RECIPE_FILE_KEY, "recipe_resumable"
"""Keys of `more` in run.json, by which `use_checkpoint` finds a run of the same recipe."""

Say = Callable[[str], object]


# --- steps of a run


def prepare_run(
    recipe: Recipe,
    *,
    engine: str | None = None,
    resume: str | Path | None = None,
    retry_errors: str | Path | None = None,
    run_dir: str | Path | None = None,
    say: Say = lambda _: None,
) -> RecipeStart:
    """Choose the engine, find the run that `use_checkpoint` resumes, and check operators and input.

    Raises ConfigError with every problem. `say` gets the notes for the user.
    """
    engine = engine or recipe.engine
    if value_or_default(recipe.settings, "use_checkpoint", False) and not (resume or retry_errors or run_dir):
        resume, reason = find_unfinished_run(recipe)
        if resume is not None:
            say(f"use_checkpoint: resuming run {resume}; to start a new run, use --set use_checkpoint=false")
        elif reason:
            say(f"use_checkpoint: starting a new run: {reason}")
    check_recipe(recipe, needs_input=retry_errors is None)
    return RecipeStart(recipe, engine, resume, retry_errors, run_dir, say)


@dataclass(slots=True)
class RecipeStart:
    """A checked recipe, ready to start."""

    recipe: Recipe
    engine: str
    resume: str | Path | None
    retry_errors: str | Path | None
    run_dir: str | Path | None
    say: Say
    report_lines: list[str] = field(default_factory=list)
    """Locations of traces and monitor; complete when the run has ended."""

    @property
    def continues(self) -> bool:
        """Whether the run continues an earlier one: it keeps the earlier traces and is not probed."""
        return self.resume is not None or self.retry_errors is not None

    def start(
        self,
        cluster: Cluster | str = "auto",
        *,
        target: Cluster | None = None,
        mode: str | None = None,
        probe: bool = True,
        more: Mapping[str, object] | None = None,
        **arguments: Any,
    ) -> Run:
        """Start the run. `target` is the cluster to plan for, if the caller knows it; other arguments as in `dt.run`.

        When the run ends, traces and monitor are written before `Run.wait` returns.
        """
        from dovetail.runtime.run_spec import add_import_path

        target = target or _target_cluster(self.engine, cluster)
        add_import_path(self.recipe.file.parent)
        spec = recipe_run_spec(self.recipe, target)
        for note in plan_notes(self.recipe, target):
            self.say(f"note: {note}")
        if self.retry_errors is not None and any(stage.barrier for stage in spec.pipeline):
            self.say("note: operators that need all rows see only the retried rows")
        if not self.continues:
            if probe and arguments.get("plan") is None:
                probe_recipe(self.recipe, target, self.say)
            prepare_traces(self.recipe)
        header = {**(more or {}), DIGEST_KEY: self.recipe.digest(), FILE_KEY: str(self.recipe.file)}
        header |= {RESUMABLE_KEY: spec.sink is not None, "operators": self.recipe.operator_stages()}
        try:
            run = spec.start(
                engine=self.engine,
                cluster="auto" if is_ray_engine(self.engine) else target,
                mode=mode,
                resume=self.resume,
                retry_errors=self.retry_errors,
                run_dir=self.run_dir,
                more=header,
                **arguments,
            )
        except InfeasibleError as error:
            raise explain_infeasible(self.recipe, target, mode, error) from None
        run.call_at_end(self._on_end)
        return run

    def _on_end(self, run: Run) -> None:
        self.report_lines += write_reports(self.recipe, run.folder, resumed=self.continues)


def start_recipe(
    recipe: Recipe,
    *,
    engine: str | None = None,
    cluster: Cluster | str | None = None,
    resume: str | Path | None = None,
    retry_errors: str | Path | None = None,
    run_dir: str | Path | None = None,
    **arguments: Any,
) -> Run:
    """Check and start a recipe; arguments as in `dt.run`. An engine of the recipe wins over a configured one."""
    own = recipe.engine if recipe.engine != LOCAL_ENGINE else None
    engine, cluster = configured_engine(engine or own, cluster)
    prepared = prepare_run(recipe, engine=engine, resume=resume, retry_errors=retry_errors, run_dir=run_dir)
    return prepared.start(cluster, **{"what": "dt.Recipe.run", **arguments})


def _target_cluster(engine: str, cluster: Cluster | str) -> Cluster:
    """The cluster that the run will have. A private Ray is not started for this."""
    if not is_ray_engine(engine):
        return described_cluster(cluster)
    address = RayAddress.parse(engine)
    if address.kind is AddressKind.PRIVATE:
        from dovetail.engines.ray.local_cluster import expected_cluster

        return expected_cluster(Cluster.local())
    from dovetail.engines.ray.attachment import attach
    from dovetail.engines.ray.discovery import discover

    attach(address)
    return discover().cluster


# --- use_checkpoint


def find_unfinished_run(recipe: Recipe) -> tuple[str | None, str]:
    """The latest run of this recipe, if it ended early and can be resumed; else None and the reason, if there is one.

    A recipe is the same if its file and its contents, with the changes of the command line, are the same.
    """
    now, digest = time.time(), recipe.digest()
    reason = ""
    for folder in list_runs():
        header = read_json_object(folder.header)
        more = header.get("more")
        if not isinstance(more, Mapping) or more.get(FILE_KEY) != str(recipe.file):
            continue
        unfinished = run_status(header, now) not in ("finished", "running", "waiting") and more.get(RESUMABLE_KEY)
        if more.get(DIGEST_KEY) == digest:
            return (folder.id, "") if unfinished else (None, "")
        if unfinished and not reason:
            reason = f"the recipe has changed since run {folder.id}"
    return None, reason


# --- checks


def check_recipe(recipe: Recipe, *, needs_input: bool = True) -> None:
    """Raise ConfigError with every reason why the recipe cannot run: missing packages, no input, missing fields."""
    problems = recipe.unready()
    if needs_input and recipe.source is None:
        fixes = ("dataset_path: data.jsonl", "on the command line: --source data.jsonl")
        message = "no dataset_path: add it to the file or pass --source"
        problems.append(Problem(INPUT_ERROR_CODE, message, fixes=fixes, place=str(recipe.file)))
    elif needs_input:
        try:
            problems += missing_columns(recipe, sample_rows(recipe.source))
        except SourceSinkError as error:
            problems.append(Problem(error.code, error.message, fixes=(error.fix,), place=error.place))
    if problems:
        raise ConfigError(problems)


# --- probe


def probe_recipe(recipe: Recipe, cluster: Cluster, say: Say, *, always: bool = False) -> None:
    """Measure operators whose rate is unknown by running a few rows of the input on this machine.

    Without `always`, only if there is more than one unit to balance. The measurements are stored as profiles, where the
    next plan finds them. A probe that fails is a note, not an error.
    """
    from dovetail.runtime.probe import probe as run_probe
    from dovetail.runtime.run_spec import add_import_path, open_source_and_sink
    from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds

    spec = recipe_run_spec(recipe, cluster)
    pipeline = spec.pipeline
    if not always and len(fuse_stages(pipeline)) < 2:
        return
    if recipe.source == STDIN_SOURCE:
        say("not probed: stdin can be read only once")
        return
    add_import_path(recipe.file.parent)
    known = load_profiles(pipeline, cluster, *source_sink_kinds(spec))
    if all(stage.name in known or stage.rate is not None for stage in pipeline):
        return
    if any(stage.resources.gpus or stage.resources.gpu_memory for stage in pipeline):
        local = Cluster.local()
        if not any(node.gpus for node in local.nodes):
            say("not probed: an operator needs a GPU, and this machine has none")
            return
    try:
        probed = run_probe(_untraced_pipeline(recipe, cluster), open_source_and_sink(spec)[0], PROBE_ROWS)
        say(f"probed with {probed.read} rows in {format_duration(probed.seconds)}")
        if probed.note:
            say(probed.note)
    except (ConfigError, InfeasibleError) as error:
        say(f"not probed: {error.problems[0].message}")
    except DovetailError as error:
        say(f"the probe failed: {error.problems[0].message}")


def _untraced_pipeline(recipe: Recipe, cluster: Cluster) -> Any:
    """A probe writes no samples."""
    settings = {key: value for key, value in recipe.settings.items() if key != "open_tracer"}
    return replace(recipe, settings=settings).pipeline(cluster)


# --- traces and monitor


def prepare_traces(recipe: Recipe) -> None:
    """Create the trace folder and remove the samples of an earlier run."""
    if not recipe.traced_stages[0]:
        return
    from dovetail.recipes.tracer import prepare_trace_folder

    try:
        prepare_trace_folder(str(recipe.work_dir / "trace"))
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        fixes = ("work_dir: a folder with write permission", "open_tracer: false")
        raise ConfigError(Problem("DT025", message, fixes=fixes, place=str(recipe.work_dir))) from None


def write_reports(recipe: Recipe, folder: str | Path, *, resumed: bool = False) -> list[str]:
    """Write traces and monitor if the recipe asks for them. Returns lines that name the files, or the error."""
    try:
        return _write_reports(recipe, folder, resumed=resumed)
    except OSError as error:  # the results are complete without them
        return [f"traces and monitor cannot be written: {error}"]


def _write_reports(recipe: Recipe, folder: str | Path, *, resumed: bool) -> list[str]:
    lines: list[str] = []
    names, limit = recipe.traced_stages
    if names:
        from dovetail.recipes.tracer import merge_samples

        into = recipe.work_dir / "trace"
        lines += merge_samples(str(into), names, limit, run_folder=str(folder), add=resumed)
        lines.append(f"traces: {into}")
    if value_or_default(recipe.settings, "open_monitor", False):
        into = recipe.work_dir / "monitor"
        write_monitor(folder, recipe.operator_stages(), into)
        lines.append(f"monitor: {into / 'monitor.html'}")
    return lines


def write_monitor(run_folder: str | Path, groups: Sequence[StageGroup], into: Path) -> None:
    """Write monitor.json, in Data-Juicer's format, and monitor.html. `groups` are operators with their stages.

    Everything is read from the run folder, so this also works during the run, and for runs of other machines.
    """
    from dovetail.observe.history import RunHistory
    from dovetail.observe.html_report import html_report
    from dovetail.observe.run_folder import write_atomically
    from dovetail.observe.stage_usage import stage_usages

    history = RunHistory.load(run_folder)
    entries = ",\n".join(json.dumps(usage.to_dict(), allow_nan=False) for usage in stage_usages(history, groups))
    into.mkdir(parents=True, exist_ok=True)
    write_atomically(into / "monitor.json", f"[\n{entries}\n]\n")
    write_atomically(into / "monitor.html", html_report(history, groups))
