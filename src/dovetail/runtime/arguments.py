"""Validation of the arguments of `dt.run` and `dt.serve`; every problem is reported at once."""

from __future__ import annotations

import inspect
import json
import os
import re
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from dovetail.data.file_formats import format_from_suffix
from dovetail.documents.configuration import at_origin
from dovetail.engines.ray.address import FORMS, RayAddress, is_ray_engine
from dovetail.errors import (
    UNSET,
    Call,
    Change,
    ConfigError,
    Expression,
    Given,
    PipelineError,
    Problem,
    Text,
    argument_problem,
    did_you_mean,
    short_repr,
)
from dovetail.pipeline.durations import parse_duration
from dovetail.pipeline.error_policy import MAX_ERRORS_TEXT, parse_max_errors
from dovetail.pipeline.pipeline import Pipeline
from dovetail.runtime.missing_code import missing_code_problems
from dovetail.scheduling.plan import Plan
from dovetail.streaming.settings import StreamOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dovetail.errors import Fix

ENGINES = ("local", "ray", "ray:auto")
RUN_ARGUMENT_CODE, SERVICE_ARGUMENT_CODE = "DT338", "DT375"
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_arguments(
    pipeline: object,
    source: object,
    engine: object,
    plan: object,
    options: object,
    max_errors: object,
    limit: object,
    run_dir: object,
    flags: Mapping[str, object],
    share: object = None,
    env_from: object = (),
) -> None:
    problems = [
        *engine_errors(engine),
        *(_list_errors(pipeline) if isinstance(pipeline, list | tuple) else _pipeline_errors(pipeline, plan)),
        *_code_errors(pipeline, engine),
        *_source_errors(source),
        *_other_errors(options, max_errors, limit, run_dir, flags),
        *share_errors(engine, share, env_from),
    ]
    if problems:
        raise ConfigError(problems)


def check_service_arguments(
    pipeline: object,
    engine: object,
    plan: object,
    max_wait: object,
    deadline: object,
    max_pending: object,
    run_dir: object,
    flags: Mapping[str, object],
) -> None:
    problems = [
        *_service_engine_errors(engine),
        *_pipeline_errors(pipeline, plan),
        *_code_errors(pipeline, engine),
        *_service_pipeline_errors(pipeline, plan),
        *_duration_errors("max_wait", max_wait),
        *(_duration_errors("deadline", deadline) if deadline is not None else ()),
        *_folder_and_flag_errors(run_dir, flags, SERVICE_ARGUMENT_CODE),
    ]
    if isinstance(max_pending, bool) or not isinstance(max_pending, int) or max_pending < 1:
        problems.append(
            _argument_error("max_pending", max_pending, "a positive integer", 10_000, SERVICE_ARGUMENT_CODE)
        )
    if problems:
        raise ConfigError(problems)


def _code_errors(pipeline: object, engine: object) -> Iterator[Problem]:
    """Functions that do not exist. Workers on Ray may have other modules than this process."""
    if isinstance(pipeline, Pipeline) and engine == "local":
        yield from missing_code_problems(pipeline.stages)


def _service_engine_errors(engine: object) -> Iterator[Problem]:
    if engine != "local":
        hint = did_you_mean(str(engine), ("local",))
        message = f"engine {short_repr(engine)} is not supported for serving{hint}"
        yield Problem("DT331", message, fixes=('engine="local"',))


def _service_pipeline_errors(pipeline: object, plan: object) -> Iterator[Problem]:
    for stage in pipeline if isinstance(pipeline, Pipeline) else ():
        if stage.barrier:
            message = f"stage {stage.name!r} needs all of its input (barrier=True), and a service has no end of input"
            yield Problem(SERVICE_ARGUMENT_CODE, message, fixes=("remove the stage, or use dt.run",))
    if isinstance(plan, Plan) and len(plan.waves) > 1:
        message = f"the plan has {len(plan.waves)} waves, and a service has no end of input"
        yield Problem(SERVICE_ARGUMENT_CODE, message, fixes=('plan=dt.plan(pipeline, cluster, mode="streaming")',))


def _duration_errors(name: str, value: object) -> Iterator[Problem]:
    try:
        parse_duration(value)
    except ValueError as error:
        message = Text(Given(name, value), f" {error}")
        yield Problem(SERVICE_ARGUMENT_CODE, message, fixes=(Change({name: "20ms"}),))


def check_share(engine: object, share: object, env_from: object) -> None:
    """Checks `share` and `env_from` before a cluster is contacted."""
    problems = list(share_errors(engine, share, env_from))
    if problems:
        raise ConfigError(problems)


def engine_errors(engine: object) -> Iterator[Problem]:
    if is_ray_engine(engine):
        try:
            RayAddress.parse(engine)
        except ConfigError as error:
            yield from at_origin(error, engine).problems
    elif isinstance(engine, str | os.PathLike) and format_from_suffix(str(engine)) is not None:
        message = f"unknown engine {short_repr(engine)}: the file of the results is the argument `sink`"
        yield Problem("DT331", message, fixes=(Change({"sink": str(engine)}),))
    elif engine != "local":
        hint = did_you_mean(str(engine), ENGINES)
        fixes: tuple[Fix, ...] = (
            Change({"engine": "local"}),
            *(Change({"engine": name}) for name in FORMS),
            Call("dt.simulate", (Expression("pipeline"),), {"cluster": Expression("...")}, "on a simulated cluster"),
        )
        yield Problem("DT331", f"unknown engine {short_repr(engine)}{hint}", fixes=fixes)


def _pipeline_errors(pipeline: object, plan: object) -> Iterator[Problem]:
    if not isinstance(pipeline, Pipeline):
        fixes: tuple[str, ...] = ("dt.run([function], source)", 'dt.Pipeline([dt.Stage("name", function)])')
        if isinstance(pipeline, str) and pipeline.endswith((".yaml", ".yml", ".json")):
            file = json.dumps(pipeline)
            fixes = (f"dt.run(dt.Pipeline.load({file}), source)", f"dt.Recipe.load({file}).run()  # if it is a recipe")
        yield Problem("DT337", f"{short_repr(pipeline)} is not a Pipeline", fixes=fixes)
    elif plan is not None and not isinstance(plan, Plan):
        yield Problem("DT338", f"plan={short_repr(plan)} is not a Plan", fixes=("plan=dt.plan(pipeline, cluster)",))
    elif isinstance(plan, Plan):
        planned = sorted(stage for unit in plan.units for stage in unit.stages)
        wanted = sorted(stage.name for stage in pipeline.stages)
        if planned != wanted:
            evidence = (f"planned: {', '.join(planned)}", f"in the pipeline: {', '.join(wanted)}")
            yield Problem("DT338", "the plan is for another pipeline", evidence, ("plan=dt.plan(pipeline, cluster)",))


def _list_errors(stages: Iterable[Any]) -> tuple[Problem, ...]:
    """Problems of a list of stages and functions as a pipeline."""
    try:
        Pipeline(stages)
    except PipelineError as error:
        return error.problems
    return ()


def _source_errors(source: object) -> Iterator[Problem]:
    if isinstance(source, GeneratorType) and inspect.getgeneratorstate(source) == inspect.GEN_CLOSED:
        message = f"source is the generator {source.__name__}, which was already read to its end"
        again = Change({"source": Expression(f"{source.__name__}()")}, note="a new generator for every run")
        yield Problem("DT332", message, fixes=(again,))
    if isinstance(source, str | os.PathLike) or hasattr(source, "__iter__") or hasattr(source, "__getitem__"):
        return  # paths are checked when they are opened
    from dovetail.data.sample import Sample
    from dovetail.data.sources import SourceSpec

    if not isinstance(source, SourceSpec | Sample):
        message = f"source={short_repr(source)} is not iterable"
        fixes = ("pass a list, a generator or an open file", 'a path: "data/*.jsonl"')
        yield Problem("DT332", message, fixes=fixes)


def _other_errors(
    options: object, max_errors: object, limit: object, run_dir: object, flags: Mapping[str, object]
) -> Iterator[Problem]:
    if options is not None and not isinstance(options, StreamOptions):
        yield _argument_error("options", options, "a StreamOptions", None)
    try:
        parse_max_errors(max_errors)
    except ValueError:
        yield _argument_error("max_errors", max_errors, MAX_ERRORS_TEXT, 10)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        yield _argument_error("limit", limit, "a non-negative integer", 10)
    yield from _folder_and_flag_errors(run_dir, flags)


def _folder_and_flag_errors(
    run_dir: object, flags: Mapping[str, object], code: str = RUN_ARGUMENT_CODE
) -> Iterator[Problem]:
    if run_dir is not None and not isinstance(run_dir, str | os.PathLike):
        yield _argument_error("run_dir", run_dir, "a path", "runs/today", code)
    for name, value in flags.items():
        if not isinstance(value, bool):
            yield _argument_error(name, value, "True or False", True, code)


def share_errors(engine: object, share: object, env_from: object) -> Iterator[Problem]:
    fits = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    if share is not None and not fits:
        yield _argument_error("share", share, "a fraction of the cluster (greater than 0, at most 1)", 0.5)
    elif share is not None and engine == "local":
        message = Text(Given("share", share), " applies to Ray clusters only, and this run is local")
        fixes = (Change({"engine": "ray:auto"}), Change({"cluster": "1x(4cpu, 8GB)", "share": UNSET}))
        yield Problem("DT338", message, fixes=fixes)
    if isinstance(env_from, str) or not isinstance(env_from, list | tuple):
        yield _argument_error("env_from", env_from, "a list of variable names", ["HF_TOKEN"])
        return
    for name in env_from:
        if not isinstance(name, str) or not _VARIABLE_NAME.fullmatch(name):
            yield _argument_error("env_from", name, "a variable name", ["HF_TOKEN"])


def _argument_error(name: str, value: object, kind: str, example: object, code: str = RUN_ARGUMENT_CODE) -> Problem:
    return argument_problem(code, name, value, kind, example)
