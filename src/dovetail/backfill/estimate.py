"""Dry run of a backfill: work, workers, resources and a time estimate from a sampled rate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.backfill.lance_table import LanceTable
from dovetail.backfill.pending_work import find_pending_work
from dovetail.backfill.result import format_rows
from dovetail.backfill.row_reader import to_single_batch
from dovetail.backfill.target import make_target
from dovetail.backfill.udf_caller import UdfCaller
from dovetail.backfill.worker_stage import clamp_note, known_rate, make_fill_spec, make_stage, plan_workers
from dovetail.engines.ray.address import is_ray_engine
from dovetail.errors import DovetailError
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage import Stage
from dovetail.resources.sizes import format_size
from dovetail.text_format import format_count, format_duration, format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.backfill.arguments import BackfillArguments
    from dovetail.backfill.pending_work import PendingWork
    from dovetail.backfill.records import ColumnRecord
    from dovetail.backfill.store import TableStore
    from dovetail.backfill.target import FillTarget
    from dovetail.backfill.task import FillSpec
    from dovetail.backfill.udf import Udf
    from dovetail.engines.worker_context import Worker
    from dovetail.resources.cluster import Cluster
    from dovetail.scheduling.plan import Plan

SAMPLE_ROWS = 2_000
SAMPLE_S = 1.0
SAMPLE_DEADLINE_S = 10.0
"""Time limit of the sample: a row may hang."""
WORKER_START_S = 0.7
"""Start time of workers, which import pyarrow and Lance."""


@dataclass(slots=True)
class BackfillPlan:
    """Plan of a backfill; printing it shows the work and the estimate. Nothing has started."""

    column: str
    udf: str
    fragments: int
    """Fragments to compute."""
    rows: int
    done_fragments: int
    done_rows: int
    kept: int
    """Rows to compute that are already in checkpoints of an earlier call."""
    workers: int
    slots: int
    cpus: float
    """CPUs of all workers together."""
    memory_bytes: int
    gpus: float
    there_cpus: float
    there_memory_bytes: int
    there_gpus: int
    rate: float | None = None
    """Rows per second of one worker."""
    rate_from: str = ""
    notes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Resources by component."""

    @property
    def rows_left(self) -> int:
        return self.rows - self.kept

    @property
    def seconds(self) -> float | None:
        """Estimated duration; None: the rate is unknown."""
        if not self.rows_left:
            return 0.0
        return WORKER_START_S + self.rows_left / (self.rate * self.workers * self.slots) if self.rate else None

    def to_dict(self) -> dict[str, object]:
        text = {name: getattr(self, name) for name in self.__slots__ if name not in ("notes", "lines")}
        return text | {"rows_left": self.rows_left, "seconds": self.seconds, "notes": list(self.notes)}

    def __str__(self) -> str:
        text = (
            f"{self.column} by {self.udf}: {format_rows(self.rows)} in "
            f"{format_count(self.fragments, 'fragment')} to compute"
        )
        if self.done_rows:
            text += f", {self.done_rows:,} in {format_count(self.done_fragments, 'fragment')} done"
        if self.kept:
            text += f", {self.kept:,} of them in checkpoints of an earlier call"
        return "\n".join([text, "", *self.lines, "", self._estimate(), *(f"note: {note}" for note in self.notes)])

    def _estimate(self) -> str:
        if not self.rows_left:
            return "Nothing to compute."
        if self.seconds is None or self.rate is None:
            return "Duration unknown: no rows were sampled."
        speed = format_number(self.rate * self.workers * self.slots)
        return (
            f"About {format_duration(self.seconds)}: {speed} rows/s, {format_number(self.rate)} "
            f"rows/s per worker ({self.rate_from})."
        )


def estimate_backfill(
    table: LanceTable, store: TableStore, udf: Udf, record: ColumnRecord, arguments: BackfillArguments, *, sample: bool
) -> BackfillPlan:
    """Plan a backfill; InfeasibleError if it cannot run."""
    target = make_target(table, udf, record, arguments)
    work = _find_work(table, store, target)
    spec = make_fill_spec(table, udf, target, arguments, columns=record.columns, reads=record.inputs, run="")
    cluster = _cluster(arguments)
    plan = plan_workers(udf, arguments, cluster)
    pipeline = Pipeline([make_stage(spec, udf, arguments)], name="backfill")
    made = _build_plan(udf, record, plan, work, pipeline.stages[0].slots or 1)
    note = clamp_note(udf, arguments, plan)
    made.notes += [note] if note else []
    rate = known_rate(pipeline, cluster)
    if rate is not None:
        made.rate, made.rate_from = rate, "measured in earlier runs"
    elif sample and work.tasks:
        _measure_rate(made, udf, spec, work)
    return made


def _cluster(arguments: BackfillArguments) -> Cluster | str:
    if not is_ray_engine(arguments.engine):
        return arguments.cluster
    from dovetail.runtime.sites import open_site

    return open_site(arguments.engine, share=arguments.share, env_from=arguments.env_from).cluster(arguments.cluster)


def _find_work(table: LanceTable, store: TableStore, target: FillTarget) -> PendingWork:
    """Pending work; all rows for a column that does not exist yet."""
    work = find_pending_work(table, store, target)
    if target.where is not None:
        _keep_matching_rows(
            work, {task.fragment: len(table.matching_offsets(task.fragment, target.where)) for task in work.tasks}
        )
    return work


def _keep_matching_rows(work: PendingWork, rows: dict[int, int]) -> None:
    """Remove fragments in which the condition matches no row."""
    work.tasks = [task for task in work.tasks if rows[task.fragment]]
    work.fragments = len(work.files) + len({task.fragment for task in work.tasks})
    work.rows = sum(rows.values()) + work.kept * bool(work.files)
    work.kept = min(work.kept, work.rows)


def _build_plan(udf: Udf, record: ColumnRecord, plan: Plan, work: PendingWork, slots: int) -> BackfillPlan:
    shape, needs = udf.resources.shape(), udf.resources
    nodes = plan.cluster.nodes
    workers = plan.units[0].workers
    made = BackfillPlan(
        column=", ".join(record.columns),
        udf=udf.reference or udf.name,
        fragments=work.fragments,
        rows=work.rows,
        done_fragments=work.done_fragments,
        done_rows=work.done_rows,
        kept=work.kept,
        workers=workers,
        slots=slots,
        cpus=workers * shape.cpu_milli / 1000,
        memory_bytes=workers * shape.memory_bytes,
        gpus=workers * needs.gpus,
        there_cpus=sum(node.cpu_milli for node in nodes) / 1000,
        there_memory_bytes=sum(node.memory_bytes for node in nodes),
        there_gpus=sum(len(node.gpus) for node in nodes),
    )
    made.lines += _resource_lines(made, shape.cpu_milli / 1000, shape.memory_bytes, needs.gpus)
    return made


def _resource_lines(plan: BackfillPlan, cpus: float, memory: int, gpus: float) -> list[str]:
    """Resources by component, in the order of Geneva's guide; components that Dovetail does not have are "none"."""
    count = plan.workers
    each = [f"{cpus:g} CPU"] + [f"{gpus:g} GPU"] * bool(gpus) + [format_size(memory)] * bool(memory)
    total = [f"{plan.cpus:g} CPUs"] + [f"{plan.gpus:g} GPUs"] * bool(gpus)
    total += [format_size(plan.memory_bytes)] * bool(memory)
    return [
        f"Workers:    {count} x {', '.join(each)} = {', '.join(total)}",
        "Driver:     this program; not part of the plan",
        "Tracker:    none; progress is stored in the table's own files",
        "Writers:    none; the worker that completes a fragment writes its file",
        "Queues:     none; workers read the table themselves",
        f"Total:      {', '.join(total)} of {plan.there_cpus:g} CPUs"
        + f", {format_size(plan.there_memory_bytes)}" * bool(plan.there_memory_bytes)
        + f", {plan.there_gpus} GPUs" * bool(plan.there_gpus),
    ]


# --- the sample


class SampleWorker:
    """Stage function: row ranges in, (rows, seconds, error) out."""

    def __init__(self, spec: FillSpec, udf: Udf) -> None:
        self.spec, self.udf = spec, udf

    def setup(self, worker: Worker) -> None:
        spec = self.spec
        self.table = LanceTable(spec.uri, spec.storage, spec.version)
        types = [output.type for output in spec.outputs]
        self.caller = UdfCaller(self.udf, types, spec.on_error, spec.batch_size, spec.timeout_s, spec.slots)
        self.caller.setup(worker)

    def teardown(self) -> None:
        self.caller.teardown()

    def __call__(self, ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, float, str]]:
        return [self._time_range(*one) for one in ranges]

    def _time_range(self, fragment: int, start: int, stop: int) -> tuple[int, float, str]:
        """Rows, seconds, and the error if a row failed."""
        import pyarrow as pa

        began = time.perf_counter()
        table, alive = self.table.read(fragment, self.spec.inputs, start, stop)
        table = table.filter(pa.array(alive))
        if not table.num_rows:
            return 0, 0.0, ""
        called = self.caller.run(to_single_batch(table), time.monotonic() + SAMPLE_S, lambda _: None)
        failed = called.failures[-1] if called.failures else None
        why = "" if failed is None else f"{failed.error_type}: {failed.message}"
        return called.rows, time.perf_counter() - began, why


def _measure_rate(made: BackfillPlan, udf: Udf, spec: FillSpec, work: PendingWork) -> None:
    """Measure the rate in a worker process on this machine, because the function may crash."""
    from tempfile import TemporaryDirectory

    from dovetail.runtime.run import run

    task = work.tasks[0]
    stop = min(task.stop, task.start + SAMPLE_ROWS)
    ranges = [(task.fragment, task.start, min(stop, task.start + 64)), (task.fragment, task.start, stop)]
    stage = Stage("sample", SampleWorker(spec, udf), udf.resources, workers=1, retries=0, timeout=SAMPLE_DEADLINE_S)
    how: dict[str, Any] = {"progress": False, "profiles": False, "ordered": True, "what": "sample", "wait": False}
    try:
        with TemporaryDirectory(prefix="dovetail-sample-") as folder:
            tried = list(run(Pipeline([stage], name="sample"), ranges, run_dir=folder, **how))
    except DovetailError as error:
        made.notes.append(f"no rows were sampled: {error.problems[0].message}")
        return
    rows, seconds, failed = tried[-1]  # the first range warms up the worker
    if rows and seconds > 0:
        made.rate, made.rate_from = rows / seconds, f"from a sample of {rows:,} rows"
    else:
        made.notes.append(f"no rows were sampled: {failed or 'the first rows are deleted'}")
