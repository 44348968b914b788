"""The job functions of runs: pipelines, recipes and actor systems from files, and backfills.

A run of a file has the run folder that its job id names, so that an attempt resumes what an earlier one has finished,
on every machine that has the same home. Without that folder it starts from the beginning. A backfill resumes from its
table, wherever it runs.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.actors import is_actors_file
from dovetail.documents.configuration import VERBOSE, variable_of
from dovetail.documents.parser import read_document
from dovetail.errors import ConfigError, InfeasibleError, Problem
from dovetail.job_runs.allowed_folders import AllowedFolders, file_problems, module_file
from dovetail.job_runs.run_monitor import RunMonitor
from dovetail.jobs.job_function import job
from dovetail.jobs.job_id import time_ms_of
from dovetail.jobs.run_submission import DEFAULT_RESOURCES, backfill_call_problems, run_call_problems
from dovetail.jobs.workers.current_job import current_job
from dovetail.jobs.workers.job_call import FinalError
from dovetail.observe.run_folder import RunFolder, new_run_id, read_json_object, runs_folder
from dovetail.recipes import is_recipe
from dovetail.runtime.admission import print_stderr
from dovetail.runtime.configured_engine import configured_engine
from dovetail.runtime.resume import AlreadyFinished
from dovetail.runtime.run_lock import RunLock
from dovetail.runtime.run_spec import add_import_path, load_pipeline_spec, missing_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dovetail.actors.live_system import LiveSystem
    from dovetail.jobs.workers.current_job import CurrentJob
    from dovetail.runtime.run_handle import Run

STOPPED_EARLY = "DT637"
LOCK_WAIT_S = 30.0
"""How long an attempt waits for the end of the earlier one, which a worker without a connection may still run."""
POLL_S = 0.05
FINISHED = "finished"
MORE_RESOURCES = "submit the job with more: dovetail jobs submit run FILE --resources=..."


@job(isolation="process", resources=DEFAULT_RESOURCES)
def run(
    file: str,
    source: str | list[str] | None = None,
    sink: str | None = None,
    limit: int | None = None,
    engine: str | None = None,
) -> dict[str, Any]:
    """Run a pipeline or recipe to its end, or an actor system until the job is cancelled."""
    this = current_job()
    with RunMonitor(this) as monitor:
        with _final_errors():
            _check_run(file, source, sink, limit, engine)
            data = read_document(file).data
        folder = RunFolder(runs_folder() / run_id_of_job(this.id, file))
        _enter(Path(file).parent)
        if is_actors_file(data):
            return _serve_actors(file, engine, monitor)
        _wait_for_lock(folder)
        if this.attempt > 1 and not folder.header.exists():
            print_stderr(f"no folder of an earlier attempt in {runs_folder()}: the run starts from the beginning")
        with _final_errors():
            try:
                started = _start(file, source, sink, limit, engine, folder, this, is_a_recipe=is_recipe(data))
            except AlreadyFinished:  # the worker was lost before it could complete the job
                return _result(folder)
            print_stderr(f"run {folder.id}, attempt {this.attempt}; {started.plan.worker_text()}")
        started.wait()
        result = _result(folder)
        if result["status"] != FINISHED:
            monitor.raise_if_stopping()
            raise _stopped_early(result["status"], this.id)
        this.progress(*started.progress)
        return result


@job(isolation="process", resources=DEFAULT_RESOURCES)
def backfill(
    table: str,
    columns: list[str],
    udf: str,
    folder: str,
    engine: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fill the missing rows of a column of a Lance table."""
    this = current_job()
    os.environ[variable_of("verbosity")] = VERBOSE
    with RunMonitor(this) as monitor:
        from dovetail.backfill.table import Table  # late: Lance starts threads, which a fork would lose
        from dovetail.backfill.udf import load_udf

        given = dict(options or {})
        with _final_errors():
            problems = list(backfill_call_problems(table, columns, udf, folder, engine, given))
            if problems:
                raise ConfigError(problems)
            allowed = AllowedFolders.of_worker(os.environ)
            module, problems = module_file(allowed, folder, udf)
            problems += allowed.problems(table=table)
            if problems or module is None:
                raise ConfigError(problems)
            _enter(Path(folder))
            function = load_udf(udf)
            _check_loaded_from(udf, module)
            found = Table(table)
            place, _ = configured_engine(engine, None)
            given |= {"timeout": given.pop("row_timeout")} if "row_timeout" in given else {}
        result = found.backfill(columns, function, engine=place, cluster="auto", **given)
        if result.status != FINISHED:
            monitor.raise_if_stopping()
            raise _stopped_early(result.status, this.id)
        print(result)  # noqa: T201 - the output of the job
        about = {name: getattr(result, name) for name in ("status", "rows", "errors", "fragments", "version")}
        where = {} if result.folder is None else {"run": result.folder.name, "folder": str(result.folder)}
        return {**where, **about, "seconds": round(result.seconds, 3)}


# --- checks


def _check_run(file: str, source: object, sink: object, limit: object, engine: object) -> None:
    """ConfigError if the worker does not run this file, or does not read or write these paths."""
    problems = list(run_call_problems(file, source, sink, limit, engine))
    if not problems:
        allowed = AllowedFolders.of_worker(os.environ)
        problems = [*file_problems(allowed, file), *allowed.problems(source=source, sink=sink)]  # type: ignore[arg-type]
    if problems:
        raise ConfigError(problems)


def _check_loaded_from(udf: str, expected: Path) -> None:
    """ConfigError if another module has the name of the one that may be imported."""
    module = sys.modules.get(udf.partition(":")[0])
    path = getattr(module, "__file__", None)
    if path is None or Path(path).resolve() != expected.resolve():
        message = f"udf {udf!r}: {path} is imported under the name of {expected}"
        raise ConfigError(Problem("DT635", message, fixes=(f"rename {expected.name}",)))


@contextmanager
def _final_errors() -> Iterator[None]:
    """Errors after which another attempt would end in the same way."""
    try:
        yield
    except ConfigError as error:
        print_stderr(str(error))
        raise FinalError(error.problems) from None
    except InfeasibleError as error:
        print_stderr(str(error))
        raise FinalError([replace(one, fixes=(*one.fixes, MORE_RESOURCES)) for one in error.problems]) from None


def _stopped_early(status: str, job_id: str) -> FinalError:
    message = f"the run was {status} before its end"
    fixes = (f"dovetail jobs requeue {job_id}",)
    return FinalError([Problem(STOPPED_EARLY, message, fixes=fixes)])


# --- pipelines and recipes


def run_id_of_job(job_id: str, file: str) -> str:
    """Id of the run of a job: that of a run which started when the job was submitted."""
    salt = blake2b(job_id.encode(), digest_size=5).hexdigest()
    return new_run_id(Path(file).stem, time_ms_of(job_id) / 1000, salt)


def _enter(folder: Path) -> None:
    """As if the command was typed in the folder."""
    os.chdir(folder)
    add_import_path(folder)


def _start(
    file: str,
    source: str | list[str] | None,
    sink: str | None,
    limit: int | None,
    engine: str | None,
    folder: RunFolder,
    this: CurrentJob,
    *,
    is_a_recipe: bool,
) -> Run:
    paths = [source] if isinstance(source, str) else source or []
    one = paths[0] if len(paths) == 1 else None
    is_resumed = folder.header.exists()
    place: dict[str, Any] = {
        "resume": str(folder.path) if is_resumed else None,
        "run_dir": None if is_resumed else folder.path,
    }
    about: dict[str, Any] = {"what": f"job {this.id}", "more": {"job": this.id, "attempt": this.attempt}}
    about |= {"limit": limit, "progress": False, "verbose": True}
    if is_a_recipe:
        from dovetail.recipes.recipe import Recipe
        from dovetail.recipes.runner import prepare_run

        if len(paths) > 1:
            fixes = ("dataset_path: a list of paths, in the file",)
            raise ConfigError(Problem("DT636", "a recipe takes one source", fixes=fixes, place=file))
        recipe = Recipe.load(file, source=one, sink=sink)
        own = recipe.engine if recipe.engine != "local" else None
        where, _ = configured_engine(engine or own, None)
        _require_ends(file, recipe.source, recipe.sink)
        return prepare_run(recipe, engine=where, say=print_stderr, **place).start("auto", **about)
    spec = load_pipeline_spec(file, source=one, sink=sink)
    spec = replace(spec, source={"path": paths}) if len(paths) > 1 else spec
    _require_ends(file, spec.source, spec.sink)
    problems = missing_code(spec)
    if problems:
        raise ConfigError(problems)
    where, _ = configured_engine(engine, None)
    return spec.start(engine=where, cluster="auto", **place, **about)


def _require_ends(file: str, source: object, sink: object) -> None:
    """ConfigError if the results of a run would be lost, or it has no input."""
    problems = []
    if source is None:
        message = "no source: add `source:` to the file, or submit the job with source=..."
        problems.append(Problem("DT364", message, fixes=("source: data/*.jsonl",), place=file))
    if sink is None:
        message = "no sink: a job keeps no results of a run; add `sink:` to the file, or submit it with sink=..."
        problems.append(Problem("DT364", message, fixes=("sink: out.jsonl",), place=file))
    if problems:
        raise ConfigError(problems)


def _wait_for_lock(folder: RunFolder) -> None:
    """Wait for the driver of an earlier attempt, which its worker may be ending; ConfigError if it does not end."""
    end = time.monotonic() + LOCK_WAIT_S
    while folder.path.is_dir():
        try:
            RunLock(folder).release()
        except ConfigError:
            if time.monotonic() >= end:
                raise
            time.sleep(POLL_S)
        else:
            return


def _result(folder: RunFolder) -> dict[str, Any]:
    """The result of the job: figures of its run."""
    from dovetail.observe.history import RunHistory
    from dovetail.observe.summary import summarize_run

    found = summarize_run(RunHistory.load(folder.path))
    status = str(read_json_object(folder.header).get("status", found.status))
    if status == FINISHED:
        print(found)  # noqa: T201 - the output of the job
    return {
        "run": folder.id,
        "folder": str(folder.path),
        "status": status,
        found.noun: found.finished,
        "delivered": found.delivered,
        "failed": found.failed,
        "seconds": round(found.seconds, 3),
        "outputs": list(found.outputs),
    }


# --- actor systems


def _serve_actors(file: str, engine: str | None, monitor: RunMonitor) -> dict[str, Any]:
    """Launch an actor system, and run it until the job is stopped or the system ends."""
    from dovetail.actors.actor_system import ActorSystem

    with _final_errors():
        system = ActorSystem.load(file)
        where, _ = configured_engine(engine, None)
    live = system.launch(where, "auto")
    current_job().progress(None, f"run {live.folder.name} is ready")
    try:
        while not live.done and not monitor.is_stopping:
            time.sleep(POLL_S)
        _stop(live, monitor)
    except BaseException:
        live.cancel("its job has failed")
        raise
    live.wait()
    monitor.raise_if_stopping()
    return {"run": live.folder.name, "folder": str(live.folder), "status": "stopped"}


def _stop(live: LiveSystem, monitor: RunMonitor) -> None:
    if not live.done:
        live.stop(drain=not monitor.is_urgent)


__all__ = ["backfill", "run", "run_id_of_job"]
