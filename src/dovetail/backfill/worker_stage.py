"""The pipeline stage and run options of a backfill, and feasibility errors in terms of UDF parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.backfill.range_worker import RangeWorker
from dovetail.engines.ray.address import is_ray_engine
from dovetail.errors import InfeasibleError, Problem
from dovetail.observe.text_format import format_count
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage import Stage
from dovetail.resources.cluster import Cluster
from dovetail.resources.sizes import format_size
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.settings import StreamOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dovetail.backfill.arguments import BackfillArguments
    from dovetail.backfill.task import FillJob
    from dovetail.backfill.udf import Udf
    from dovetail.resources.cluster import Gpu, Node
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.plan import Plan

NEVER_FITS = "DT439"
STAGE_NAME = "fill"
MAX_WORKER_DEATHS = 1000
"""Retries of a task whose worker dies: each retry isolates the fatal row further."""
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


def make_stage(job: FillJob, udf: Udf, asked: BackfillArguments) -> Stage:
    """The stage of a backfill, with the requested number of workers or fewer."""
    return _make_stage(RangeWorker(job, udf), udf, asked)


def _make_stage(run: Any, udf: Udf, asked: BackfillArguments) -> Stage:
    workers = (1, asked.workers) if isinstance(asked.workers, int) else asked.workers
    slots = None if udf.is_async else asked.slots or udf.slots
    return Stage(STAGE_NAME, run, udf.resources, workers=workers, slots=slots, retries=MAX_WORKER_DEATHS)


def run_arguments(asked: BackfillArguments, table: str, column: str) -> dict[str, Any]:
    """Arguments of `dt.run`."""
    return {
        "engine": asked.engine,
        "cluster": asked.cluster,
        "options": STREAM_OPTIONS,
        "progress": False,
        "wait": asked.wait,
        "profiles": False,
        "share": asked.share,
        "env_from": asked.env_from,
        "what": "backfill",
        "more": {"table": table, "column": column},
    }


def check_feasible(udf: Udf, asked: BackfillArguments) -> None:
    """InfeasibleError if the minimum number of workers does not fit. On Ray the run itself checks it."""
    if is_ray_engine(asked.engine):
        return
    try:
        make_plan(Pipeline([_make_stage(_pass_through, udf, asked)], name="backfill"), asked.cluster)
    except InfeasibleError as error:
        raise explain_infeasible(udf, asked, error) from None


def _pass_through(items: list[object]) -> list[object]:
    return items


def clamp_note(udf: Udf, asked: BackfillArguments, plan: Plan) -> str:
    """One line if fewer workers than requested fit."""
    wanted = asked.workers[1] if isinstance(asked.workers, tuple) else asked.workers
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


def explain_infeasible(udf: Udf, asked: BackfillArguments, error: InfeasibleError) -> InfeasibleError:
    """What can never start, in the words of who wrote the function: which parameter is too large."""
    nodes = () if is_ray_engine(asked.engine) else Cluster.of(asked.cluster).nodes
    return InfeasibleError([*_oversized_parameters(udf, nodes), *error.problems])


def _oversized_parameters(udf: Udf, nodes: Sequence[Node]) -> Iterator[Problem]:
    """Each parameter that no node has enough of."""
    if not nodes:
        return
    needs, shape = udf.resources, udf.resources.shape()
    cpus, memory = max(node.usable_cpu_milli for node in nodes), max(node.memory_bytes for node in nodes)
    if shape.cpu_milli > cpus:
        yield _oversized_problem(udf, f"cpus={needs.cpus:g}", f"{cpus / 1000:g} CPUs", f"cpus={cpus / 1000:g}")
    if shape.memory_bytes > memory:
        less = f'memory="{_rounded_down_size(memory)}"' if memory else ""
        yield _oversized_problem(udf, f'memory="{needs.memory}"', f"{format_size(memory)}" if memory else "", less)
    yield from _oversized_gpu_parameters(udf, shape, [node.gpus for node in nodes])


def _oversized_gpu_parameters(udf: Udf, shape: Shape, cards: Sequence[Sequence[Gpu]]) -> Iterator[Problem]:
    """Of the cards of each node."""
    needs = udf.resources
    if not any(cards):
        for name, value in (("gpus", needs.gpus), ("nvdecs", needs.nvdecs), ("nvencs", needs.nvencs)):
            if value:
                yield _no_gpu_problem(udf, f"{name}={value:g}", f"{name}=0")
        if needs.gpu_memory is not None:
            yield _no_gpu_problem(udf, f'gpu_memory="{needs.gpu_memory}"', "leave gpu_memory out")
        return
    most = max(map(len, cards))
    if shape.cards > most:
        yield _oversized_problem(udf, f"gpus={needs.gpus:g}", format_count(most, "GPU"), f"gpus={most}")
    memory = max(card.memory_bytes for here in cards for card in here)
    if shape.gpu_memory_bytes > memory:
        less = f'gpu_memory="{_rounded_down_size(memory)}"' if memory else ""
        yield _oversized_problem(
            udf, f'gpu_memory="{needs.gpu_memory}"', format_size(memory) if memory else "", less, "card"
        )
    for name, wanted in (("nvdecs", shape.nvdecs), ("nvencs", shape.nvencs)):
        there = max(_sum_of_largest((getattr(card, name) for card in here), shape.cards) for here in cards)
        if wanted > there:
            yield _oversized_problem(udf, f"{name}={wanted}", f"{there}", f"{name}={there}", "card")


def _rounded_down_size(size_bytes: int) -> str:
    """Rounded down: as much fits."""
    return f"{size_bytes >> 30}GB" if size_bytes >= 1 << 30 else f"{size_bytes >> 20}MB"


def _sum_of_largest(amounts: Iterable[int], count: int) -> int:
    return sum(sorted(amounts, reverse=True)[:count])


def _oversized_problem(udf: Udf, asked: str, there: str, less: str, what: str = "node") -> Problem:
    known = f"is more than any {what} has: the largest has {there}" if there else f"and nobody knows what a {what} has"
    fix = f"@dt.udf({less}){'' if less.endswith('=0') else '  or less'}"
    fix = fix if less else f"leave {asked.partition('=')[0]} out"
    return Problem(NEVER_FITS, f"{udf.name}: {asked} {known}", fixes=(fix,))


def _no_gpu_problem(udf: Udf, asked: str, less: str) -> Problem:
    fix = f"@dt.udf({less})" if "=" in less else less
    fixes = (fix, 'engine="ray:auto" (--engine ray:auto), where there are such cards')
    return Problem(NEVER_FITS, f"{udf.name}: {asked}, and no node has a GPU", fixes=fixes)
