"""The pipeline stage and run options of a backfill, and feasibility errors in terms of UDF parameters."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from dovetail.backfill.range_worker import RangeWorker, WorkerBrokenError
from dovetail.backfill.task import FillSpec, OutputColumn
from dovetail.backfill.udf_caller import DEFAULT_ASYNC_SLOTS
from dovetail.errors import UNSET, Call, Change, InfeasibleError, Subject
from dovetail.observe.profile_store import StageMeasurement, write_profiles
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_fields import NAME, similar_name
from dovetail.resources.resources import Resources
from dovetail.resources.sizes import format_size
from dovetail.runtime.stage_profiles import load_profiles, storage_keys
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.settings import StreamOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.backfill.arguments import BackfillArguments
    from dovetail.backfill.lance_table import LanceTable
    from dovetail.backfill.target import FillTarget
    from dovetail.backfill.task_queue import MeasuredRate
    from dovetail.backfill.udf import Udf
    from dovetail.errors import Fix
    from dovetail.resources.cluster import Cluster
    from dovetail.scheduling.plan import Plan

RESOURCE_NAMES = frozenset(item.name for item in fields(Resources))
MAX_WORKER_DEATHS = 1000
"""Retries of a task whose worker dies: each retry isolates the fatal row further."""
MIN_RATE_SECONDS, MIN_RATE_ROWS = 1.0, 1_000
"""Minimum of a run whose rate is stored."""
STREAM_OPTIONS = StreamOptions(
    eager=True,
    serving=True,  # the source waits for results, so an epoch must not wait for the source
    target_epoch_s=0.05,
    target_epoch_batches=1,
    max_epoch_s=0.05,
    target_message_s=0.0001,
    max_message_items=1,
    min_queued_messages=1,
    hop_s=0.0002,
    first_replan_s=1.0,
    follow_plan=True,
)
"""Every task is a message of its own, and its result is delivered at once."""


def make_fill_spec(
    table: LanceTable,
    udf: Udf,
    target: FillTarget,
    arguments: BackfillArguments,
    *,
    columns: Sequence[str],
    reads: Sequence[str],
    run: str,
) -> FillSpec:
    """What workers need. A column that the table lacks has the return type of the function; it is only sampled."""
    ids, names = table.field_ids(), table.schema.names
    returned = dict(zip(columns, (kind for _, kind in udf.outputs()), strict=False))
    types = {name: table.schema.field(name).type if name in names else kind for name, kind in returned.items()}
    slots = arguments.slots or udf.slots or DEFAULT_ASYNC_SLOTS
    return FillSpec(
        uri=table.uri,
        storage=table.storage,
        version=table.version,
        folder=target.folder,
        inputs=tuple(reads),
        outputs=tuple(OutputColumn(name, ids.get(name, -1), kind) for name, kind in types.items()),
        identity=target.identity,
        parts=target.parts,
        run=run,
        on_error=arguments.on_error or udf.on_error,
        batch_size=arguments.batch_size or udf.batch_size,
        timeout_s=arguments.timeout_s or udf.timeout_s,
        slots=slots if udf.is_async else 1,
        where=target.where,
        masked=target.masked,
        dependencies=target.dependencies(table),
    )


def make_stage(spec: FillSpec, udf: Udf, arguments: BackfillArguments) -> Stage:
    """The stage of a backfill, with the requested number of workers or fewer."""
    return _make_stage(RangeWorker(spec, udf), udf, arguments)


def _make_stage(run: Any, udf: Udf, arguments: BackfillArguments) -> Stage:
    workers = (1, arguments.workers) if isinstance(arguments.workers, int) else arguments.workers
    slots = None if udf.is_async else arguments.slots or udf.slots
    return Stage(
        _stage_name(udf),
        run,
        udf.resources,
        workers=workers,
        slots=slots,
        retries=MAX_WORKER_DEATHS,
        max_setup_failures=udf.options.max_setup_failures,
        on_failure={WorkerBrokenError: "restart"},
    )


def known_rate(pipeline: Pipeline, cluster: Cluster | str) -> float | None:
    """Rows per second of one slot in earlier runs on this machine, from its profile."""
    (stage,) = pipeline.stages
    profile = load_profiles(pipeline, cluster).get(stage.name)
    return None if profile is None else profile.rate


def save_rate(pipeline: Pipeline, plan: Plan, measured: MeasuredRate) -> None:
    """Store the measured rate as the profile of the stage, in rows."""
    enough = measured.seconds >= MIN_RATE_SECONDS or measured.rows >= MIN_RATE_ROWS
    if not measured.rows or not enough:  # mostly the time of the first call
        return
    per_row_s = measured.seconds / measured.rows
    ((stage, keys),) = storage_keys(pipeline, plan).items()
    measurement = StageMeasurement(per_row_s, returns=1.0, items=measured.rows, seconds=measured.seconds, stage=stage)
    write_profiles(dict.fromkeys(keys, measurement))


def _stage_name(udf: Udf) -> str:
    """The name of the function, or a valid name like it (for a lambda)."""
    return _valid_name(udf.name)


def run_name(table: str, column: str) -> str:
    """Name of the run: "clips.length" for a column of clips.lance."""
    return _valid_name(f"{table.rpartition('/')[2].removesuffix('.lance')}.{column}")


def _valid_name(name: str) -> str:
    return name if NAME.accepts(name) else similar_name(name)


def run_arguments(arguments: BackfillArguments, table: str, column: str, udf: str) -> dict[str, Any]:
    """Arguments of `dt.run`."""
    return {
        "engine": arguments.engine,
        "cluster": arguments.cluster,
        "options": STREAM_OPTIONS,
        "progress": arguments.progress,
        "wait": arguments.wait,
        "profiles": False,
        "share": arguments.share,
        "env_from": arguments.env_from,
        "what": "backfill",
        "more": {"table": table, "column": column, "udf": udf},
    }


def plan_workers(udf: Udf, arguments: BackfillArguments, cluster: Cluster | str | None = None) -> Plan:
    """The plan of a backfill on `cluster` (default: that of the arguments); InfeasibleError if the minimum number of
    workers does not fit."""
    pipeline = Pipeline([_make_stage(_pass_through, udf, arguments)], name="backfill")
    try:
        return make_plan(pipeline, arguments.cluster if cluster is None else cluster)
    except InfeasibleError as error:
        raise explain_infeasible(udf, error) from None


def _pass_through(items: list[object]) -> list[object]:
    return items


def clamp_note(udf: Udf, arguments: BackfillArguments, plan: Plan) -> str:
    """One line if fewer workers than requested fit."""
    wanted = arguments.workers[1] if isinstance(arguments.workers, tuple) else arguments.workers
    there = plan.units[0].workers
    if wanted == "auto" or there >= wanted:
        return ""
    short = _shortage_text(udf, wanted, plan.cluster)
    return f"running {there} of {wanted} workers: {short or 'no more fit on the nodes'}"


def _shortage_text(udf: Udf, wanted: int, cluster: Cluster) -> str:
    """'8 need 8.0 CPUs, 2.0 available', for the resource that is short."""
    needs = udf.resources
    shape = needs.shape()
    cpus = sum(node.cpu_milli for node in cluster.nodes)
    memory = sum(node.memory_bytes for node in cluster.nodes)
    gpus = sum(len(node.gpus) for node in cluster.nodes)
    if wanted * shape.cpu_milli > cpus:
        return f"{wanted} need {wanted * shape.cpu_milli / 1000:.1f} CPUs, {cpus / 1000:.1f} available"
    if wanted * needs.gpus > gpus:
        return f"{wanted} need {wanted * needs.gpus:.1f} GPUs, {gpus:.1f} available"
    if wanted * shape.memory_bytes > memory:
        return f"{wanted} need {format_size(wanted * shape.memory_bytes)} of memory, {format_size(memory)} available"
    return ""


def explain_infeasible(udf: Udf, error: InfeasibleError) -> InfeasibleError:
    """The planner's error with resources of the stage as parameters of the function: `@dt.udf(cpus=2)`."""
    subject = Subject("udf", udf.name)
    return InfeasibleError(
        replace(problem, subject=subject, fixes=tuple(map(_udf_fix, problem.fixes))) for problem in error.problems
    )


def _udf_fix(fix: Fix) -> Fix:
    if not isinstance(fix, Change):
        return fix
    if not RESOURCE_NAMES.issuperset(fix.values):
        return replace(fix, subjects=())
    values = {name: None if value is UNSET else value for name, value in fix.values.items()}
    return Call("@dt.udf", (), values, fix.note)
