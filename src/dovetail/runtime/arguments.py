"""Validation of the arguments of `dt.run`; every problem is reported at once."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from dovetail.engines.ray.address import RayAddress, is_ray_engine
from dovetail.errors import ConfigError, Problem, did_you_mean, short_repr
from dovetail.pipeline.pipeline import Pipeline
from dovetail.scheduling.plan import Plan
from dovetail.streaming.settings import StreamOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENGINES = ("local", "ray", "ray:auto")
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
    booleans: Mapping[str, object],
    share: object = None,
    env_from: object = (),
) -> None:
    problems = [
        *engine_errors(engine),
        *_pipeline_errors(pipeline, plan),
        *_source_errors(source),
        *_other_errors(options, max_errors, limit, run_dir, booleans),
        *share_errors(engine, share, env_from),
    ]
    if problems:
        raise ConfigError(problems)


def check_share(engine: object, share: object, env_from: object) -> None:
    """What is given to a cluster, before it is asked for anything."""
    problems = list(share_errors(engine, share, env_from))
    if problems:
        raise ConfigError(problems)


def engine_errors(engine: object) -> Iterator[Problem]:
    if is_ray_engine(engine):
        try:
            RayAddress.parse(engine)
        except ConfigError as error:
            yield from error.problems
    elif engine != "local":
        hint = did_you_mean(str(engine), ENGINES)
        fixes = (
            'engine="local"',
            'engine="ray", "ray:auto" or "ray:HOST:PORT"',
            "dt.simulate(pipeline, cluster=...) for a simulated cluster",
        )
        yield Problem("DT331", f"there is no engine {short_repr(engine)}{hint}", fixes=fixes)


def _pipeline_errors(pipeline: object, plan: object) -> Iterator[Problem]:
    if not isinstance(pipeline, Pipeline):
        fixes = ('dt.Pipeline([dt.Stage("name", function)])',)
        yield Problem("DT337", f"{short_repr(pipeline)} is not a Pipeline", fixes=fixes)
    elif plan is not None and not isinstance(plan, Plan):
        yield Problem("DT338", f"plan={short_repr(plan)} is not a Plan", fixes=("plan=dt.plan(pipeline, cluster)",))
    elif isinstance(plan, Plan):
        planned = sorted(stage for unit in plan.units for stage in unit.stages)
        wanted = sorted(stage.name for stage in pipeline.stages)
        if planned != wanted:
            evidence = (f"planned: {', '.join(planned)}", f"in the pipeline: {', '.join(wanted)}")
            yield Problem("DT338", "the plan is for another pipeline", evidence, ("plan=dt.plan(pipeline, cluster)",))


def _source_errors(source: object) -> Iterator[Problem]:
    if isinstance(source, str | os.PathLike) or hasattr(source, "__iter__") or hasattr(source, "__getitem__"):
        return  # paths are looked at when they are opened
    from dovetail.data.sources import SourceSpec

    if not isinstance(source, SourceSpec):
        message = f"the source is {short_repr(source)}, which is no iterable of items"
        fixes = ("a list, a generator, an open file: anything to iterate over", 'or a path: "data/*.jsonl"')
        yield Problem("DT332", message, fixes=fixes)


def _other_errors(
    options: object, max_errors: object, limit: object, run_dir: object, booleans: Mapping[str, object]
) -> Iterator[Problem]:
    if options is not None and not isinstance(options, StreamOptions):
        yield _argument_error("options", options, "an Options", "options=None")
    for name, count in (("max_errors", max_errors), ("limit", limit)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            yield _argument_error(name, count, "a whole number from 0 on", f"{name}=10")
    if run_dir is not None and not isinstance(run_dir, str | os.PathLike):
        yield _argument_error("run_dir", run_dir, "a path", 'run_dir="runs/today"')
    for name, value in booleans.items():
        if not isinstance(value, bool):
            yield _argument_error(name, value, "True or False", f"{name}=True")


def share_errors(engine: object, share: object, env_from: object) -> Iterator[Problem]:
    fits = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    if share is not None and not fits:
        yield _argument_error("share", share, "a part of the cluster, above 0 and up to 1", "share=0.5")
    elif share is not None and engine == "local":
        message = f"share={share:g} is a part of a Ray cluster, and this run is on this machine alone"
        fixes = (
            'engine="ray:auto" (--engine ray:auto)',
            'or leave share out, and say what may be used here: cluster="1x(4cpu, 8GB)" (--cluster)',
        )
        yield Problem("DT338", message, fixes=fixes)
    if isinstance(env_from, str) or not isinstance(env_from, list | tuple):
        yield _argument_error("env_from", env_from, "a list of names of variables", 'env_from=["HF_TOKEN"]')
        return
    for name in env_from:
        if not isinstance(name, str) or not _VARIABLE_NAME.fullmatch(name):
            yield _argument_error("env_from", name, "the name of a variable", 'env_from=["HF_TOKEN"]')


def _argument_error(name: str, value: object, kind: str, fix: str) -> Problem:
    return Problem("DT338", f"{name}={short_repr(value)} is not {kind}", fixes=(fix,))
