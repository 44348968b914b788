"""Feasibility of worker requests and pipelines on a cluster: InfeasibleError with counted evidence and tried fixes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dovetail.errors import UNSET, AddNodes, Change, InfeasibleError, Problem, Subject, Text
from dovetail.resources.amounts import total_free
from dovetail.resources.cluster import Cluster
from dovetail.resources.fit import Fit
from dovetail.resources.gpu_models import models_with_memory
from dovetail.resources.ledger import Ledger
from dovetail.resources.shape import ShapeKind
from dovetail.resources.sizes import format_milli, format_size, from_milli
from dovetail.scheduling.diagnose.misfit import (
    find_request_changes,
    fits_on_some_node,
    misfit_reasons,
    smallest_fitting_node,
)
from dovetail.scheduling.fragmentation import Workload
from dovetail.scheduling.packing import NodeFiller, group_nodes
from dovetail.scheduling.placement import FragmentationScore, Placer
from dovetail.scheduling.sizing import eligible_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.errors import Fix
    from dovetail.resources.cluster import Node
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.packing import NodeGroups
    from dovetail.scheduling.plan import UnitPlan

MAX_PIECES_SHOWN = 6
MAX_GANGS_COUNTED = 10_000
MAX_ADDED_NODES = 64


class WorkerRequest(NamedTuple):
    """A number of workers of one shape, with the name that messages use: "stage 'caption'"."""

    name: str
    shape: Shape
    workers: int = 1
    subject: Subject | None = None


def require_fit(requests: Sequence[WorkerRequest], ledger: Ledger) -> None:
    """Raise InfeasibleError with all problems if these workers do not fit now; nothing is taken."""
    problems = find_fit_problems(requests, ledger)
    if problems:
        raise InfeasibleError(problems)


def find_fit_problems(requests: Sequence[WorkerRequest], ledger: Ledger) -> list[Problem]:
    """Reasons why these workers do not fit together on the free capacity."""
    problems = [problem for request in requests if (problem := find_misfit(request, ledger)) is not None]
    able = [request for request in requests if count_that_fit(request.shape, ledger)]
    together = _totals_exceeded_problem(able, ledger)
    if together is None and not problems:
        together = _not_together_problem(requests, ledger)
    return problems if together is None else [*problems, together]


def find_misfit(request: WorkerRequest, ledger: Ledger) -> Problem | None:
    """Reason why these workers alone do not fit on the free capacity; None if they do."""
    largest = count_that_fit(request.shape, ledger)
    if largest >= request.workers:
        return None
    if largest:
        return _too_many_workers_problem(request, largest, ledger)
    if fits_on_some_node(request.shape, ledger):
        return _gang_too_large_problem(request, ledger)
    return _fits_nowhere_problem(request, ledger)


def count_that_fit(shape: Shape, ledger: Ledger) -> int:
    """Number of such workers that fit on the free capacity alone."""
    if shape.ranks > 1:
        return len(Placer(ledger.copy(), FragmentationScore(Workload({shape: 1}))).fill(shape, MAX_GANGS_COUNTED))
    fit = Fit(shape)
    return sum(fit.capacity(free) * nodes for free, nodes in Counter(ledger.free).items())


def _fits_nowhere_problem(request: WorkerRequest, ledger: Ledger) -> Problem:
    """One worker fits on no node."""
    shape = request.shape.rank
    fit = Fit(shape)
    states = Counter(ledger.free)
    nodes = len(ledger.free)
    counted: Counter[str] = Counter()
    for free, count in states.items():
        counted["; ".join(misfit_reasons(fit, free))] += count
    evidence = [
        f"{count} of {nodes} nodes: {why}" for why, count in sorted(counted.items(), key=lambda x: (-x[1], x[0]))
    ]
    evidence += _split_capacity_lines(shape, ledger)
    empty = Ledger(ledger.cluster)
    code, hint = _code_and_hint(shape, empty)
    if code == "DT110":
        hint = "stop other workers: it fits on an empty node"
    fixes: list[Fix] = [*find_request_changes(shape, ledger)]
    fixes += [hint] if hint else []
    node = smallest_fitting_node(shape)
    fixes += [AddNodes(1, node)] if node else []
    message = Text(_label(request), f" ({shape.describe()}) fits on 0 of {nodes} nodes")
    return Problem(code, message, tuple(evidence), tuple(fixes or ["request less per worker"]), subject=request.subject)


def _code_and_hint(shape: Shape, empty: Ledger) -> tuple[str, str]:
    """Error code and hint; DT110: the worker would fit on an empty cluster."""
    if fits_on_some_node(shape, empty):
        return "DT110", ""
    gpus = {gpu for node in empty.cluster.nodes for gpu in node.gpus}
    labels = dict(shape.labels)
    if any(
        not any(dict(node.labels).get(name) in values for node in empty.cluster.nodes)
        for name, values in labels.items()
    ):
        return "DT114", ""
    if shape.cards and gpus:
        keys = {gpu.key for gpu in gpus}
        if shape.accelerators and not keys & set(shape.accelerators):
            return "DT113", ""
        if shape.gpu_memory_bytes > max(gpu.memory_bytes for gpu in gpus):
            return "DT111", ""
        if any(need > max(getattr(gpu, f"nv{which}s") for gpu in gpus) * shape.cards for which, need in _codecs(shape)):
            having = models_with_memory(nvdecs=min(1, shape.nvdecs), nvencs=min(1, shape.nvencs))
            names = " and ".join(f"NV{which.upper()}" for which, _ in _codecs(shape))
            return "DT112", f"use a card that has {names}: {', '.join(having[:8])}"
    return "DT115", ""


def _codecs(shape: Shape) -> list[tuple[str, int]]:
    return [(which, need) for which, need in (("dec", shape.nvdecs), ("enc", shape.nvencs)) if need]


def _split_capacity_lines(shape: Shape, ledger: Ledger) -> list[str]:
    """Enough in total, but split: '1.2 GPUs are free, but as 0.6 + 0.6'."""
    lines = []
    milli_needed = shape.cards * shape.gpu_milli if shape.computes_on_gpu else 0
    cards = [card for free in ledger.free for card in free.cards.free]
    pieces = [
        ("GPUs", milli_needed, [card.milli for card in cards], format_milli, "cards"),
        (
            "of GPU memory",
            shape.cards * shape.gpu_memory_bytes,
            [card.memory_bytes for card in cards],
            format_size,
            "cards",
        ),
        ("CPUs", shape.cpu_milli, [free.cpu_milli for free in ledger.free], format_milli, "nodes"),
        ("of memory", shape.memory_bytes, [free.memory_bytes for free in ledger.free], format_size, "nodes"),
    ]
    for what, needed, amounts, text, where in pieces:
        each = needed // max(1, shape.cards) if where == "cards" else needed
        able = sum(amount >= each for amount in amounts)
        if needed and sum(amounts) >= needed and able < (shape.cards if where == "cards" else 1):
            largest = sorted(filter(None, amounts), reverse=True)
            shown = " + ".join(text(amount) for amount in largest[:MAX_PIECES_SHOWN])
            more = f" + ... ({len(largest)} {where})" if len(largest) > MAX_PIECES_SHOWN else ""
            lines.append(f"{text(sum(amounts))} {what} are free, but as {shown}{more}")
    return lines


def _too_many_workers_problem(request: WorkerRequest, largest: int, ledger: Ledger) -> Problem:
    amounts = f": {request.workers} workers ({request.shape.describe()}) are requested, {largest} fit"
    message = Text(_label(request), amounts)
    fixes: tuple[Fix, ...] = (
        Change({"workers": largest}),
        *_smaller_share_fix(request, ledger),
        *_add_nodes_fix_for_requests([request], ledger),
    )
    evidence = (f"{largest} of {request.workers} fit on what is free now",)
    return Problem("DT103", message, evidence, fixes, subject=request.subject)


def _gang_too_large_problem(request: WorkerRequest, ledger: Ledger) -> Problem:
    shape = request.shape
    fit = Fit(shape.rank)
    on_one = max(fit.capacity(free) for free in ledger.free)
    message = Text(_label(request), f" ({shape.describe()}) fits on no node and on no set of whole nodes")
    whole = "no GPU is in use" if shape.computes_on_gpu else "nothing is in use"
    evidence = (f"{on_one} of {shape.ranks} ranks fit on one node", f"else it needs whole nodes, where {whole}")
    fixes: tuple[Fix, ...] = (Change({"ranks": on_one}), *_add_nodes_fix_for_requests([request], ledger))
    return Problem("DT116", message, evidence, fixes, subject=request.subject)


def _totals_exceeded_problem(requests: Sequence[WorkerRequest], ledger: Ledger) -> Problem | None:
    """The total request exceeds the free capacity."""
    asked, free = _requested_totals(requests), total_free(Counter(ledger.free))
    short = [name for name, amount in asked.items() if amount > free.get(name, 0)]
    if not short or len(requests) < 2:
        return None
    text = {name: format_size if name == "memory" else format_milli for name in asked}
    needs = " and ".join(f"{text[name](asked[name])} {name}" for name in short)
    has = " and ".join(text[name](free.get(name, 0)) for name in short)
    message = f"{len(requests)} kinds of workers need {needs} at once; {has} {'is' if len(short) == 1 else 'are'} free"
    evidence = [f"{request.name}: {request.workers} x ({request.shape.describe()})" for request in requests]
    fixes: tuple[Fix, ...] = (
        "request fewer workers, or less per worker",
        *_add_nodes_fix_for_requests(requests, ledger),
    )
    return Problem("DT101", message, tuple(evidence), fixes)


def _requested_totals(requests: Sequence[WorkerRequest]) -> dict[str, int]:
    """Total request; a GPU share sized by memory alone depends on the card and is left out."""
    totals: Counter[str] = Counter()
    for request in requests:
        shape, processes = request.shape, request.workers * request.shape.ranks
        totals["GPUs"] += processes * shape.cards * shape.gpu_milli
        totals["CPUs"] += processes * shape.cpu_milli
        totals["memory"] += processes * shape.memory_bytes
        for name, amount in shape.custom:
            totals[name] += processes * amount
    return {name: amount for name, amount in totals.items() if amount}


def _not_together_problem(requests: Sequence[WorkerRequest], ledger: Ledger) -> Problem | None:
    """The totals suffice and each request fits alone, but not all of them together."""
    trial = ledger.copy()
    left = _unplaced_requests(requests, trial)
    if not left:
        return None
    message = f"{len(requests)} kinds of workers fit one by one, but not together"
    evidence = [
        f"{request.name}: {request.workers} of {request.workers + placed} workers do not fit"
        for request, placed in left
    ]
    evidence += [f"beside the others, {line}" for line in _split_capacity_lines(left[0][0].shape, trial)]
    kept = [
        Change({"workers": placed}, (request.subject or Subject("request", request.name),))
        for request, placed in left
        if placed
    ]
    fixes: tuple[Fix, ...] = (*kept, *_add_nodes_fix_for_requests(requests, ledger))
    return Problem("DT102", message, tuple(evidence), fixes)


def _unplaced_requests(requests: Sequence[WorkerRequest], ledger: Ledger) -> list[tuple[WorkerRequest, int]]:
    """Requests that do not fit when all are placed on the ledger, large ones first: (rest of it, workers placed)."""
    trial = Placer(ledger, FragmentationScore(Workload((request.shape, request.workers) for request in requests)))
    left = []
    for request in sorted(requests, key=_difficulty, reverse=True):
        placed = len(trial.fill(request.shape, request.workers))
        if placed < request.workers:
            left.append((request._replace(workers=request.workers - placed), placed))
    return left


def _difficulty(request: WorkerRequest) -> tuple[bool, int, int, int, int]:
    shape = request.shape
    exclusive = shape.kind in (ShapeKind.ENTIRE_GPU, ShapeKind.WHOLE_NUMBERED_GPU)
    return exclusive, shape.ranks * shape.cards, shape.gpu_milli, shape.gpu_memory_bytes, shape.cpu_milli


def _smaller_share_fix(request: WorkerRequest, ledger: Ledger) -> list[Change]:
    """The largest share of a card at which all the workers would fit."""
    shape = request.shape
    if shape.kind is not ShapeKind.FRACTIONAL_GPU or not shape.gpu_milli:
        return []

    def too_large(share_milli: int) -> bool:
        return count_that_fit(replace(shape, gpu_milli=share_milli), ledger) < request.workers

    largest = bisect_left(range(1, shape.gpu_milli), True, key=too_large)
    return [Change({"gpus": from_milli(largest)})] if largest else []


def _add_nodes_fix_for_requests(requests: Sequence[WorkerRequest], ledger: Ledger) -> list[AddNodes]:
    """The smallest sufficient number of nodes like the largest one; tried."""
    largest = max(ledger.cluster.nodes, key=lambda node: (len(node.gpus), node.usable_cpu_milli, node.memory_bytes))

    def enough(more: int) -> bool:
        extra = tuple(replace(largest, name=f"one more: {number}") for number in range(more))
        return not _unplaced_requests(requests, Ledger(Cluster((*ledger.cluster.nodes, *extra)), ledger.seats()))

    return add_nodes_fix(largest, enough)


def add_nodes_fix(node: Node, enough: Callable[[int], bool]) -> list[AddNodes]:
    """The smallest sufficient number of nodes; empty if `MAX_ADDED_NODES` are not sufficient."""
    more = next((2**power for power in range(MAX_ADDED_NODES.bit_length()) if enough(2**power)), 0)
    if not more:
        return []
    fewest = more // 2 + 1 + bisect_left(range(more // 2 + 1, more), True, key=enough)
    return [AddNodes(fewest, node.spec())]


GPU_SHARES_TRIED_MILLI = (500, 333, 250, 200, 125, 100, 50, 20, 10)


class FeasibilityCheck(Protocol):
    """Test whether every unit gets its minimum number of workers in a mode."""

    def __call__(self, units: list[UnitPlan], ledger: Ledger, mode: str) -> bool: ...


def infeasible_error(
    short: list[list[UnitPlan]], units: list[UnitPlan], ledger: Ledger, feasible: FeasibilityCheck
) -> InfeasibleError:
    """Error with the reasons why groups of units cannot run at once; `units` are all units of the pipeline."""
    problems = []
    for group in short:
        problems += _unit_problems(group, ledger)
    if any(len(group) > 1 for group in short):
        fixes = _find_unit_fixes(units, ledger, feasible)
        problems = [replace(p, fixes=fixes) if fixes and p.code in ("DT101", "DT102") else p for p in problems]
    return InfeasibleError(problems)


def _unit_problems(units: list[UnitPlan], ledger: Ledger) -> list[Problem]:
    groups = group_nodes(ledger)
    requests = [
        WorkerRequest(_stage_text(unit), unit.shape, _min_workers(unit, groups), _unit_subject(unit)) for unit in units
    ]
    problems = _per_node_problems(units, ledger)
    reported = {problem.subject for problem in problems}
    problems += find_fit_problems([request for request in requests if request.subject not in reported], ledger)
    if problems:
        return problems
    message = f"{len(units)} units fit one by one, but no layout was found in which all of them fit"
    return [Problem("DT102", message, tuple(f"{w.name}: {w.workers} x ({w.shape.describe()})" for w in requests))]


def _min_workers(unit: UnitPlan, groups: NodeGroups) -> int:
    """Minimum number of workers of a unit."""
    if unit.per_node is None:
        return unit.low
    return unit.per_node * sum(len(groups[free]) for free in eligible_nodes(unit, groups))


def _stage_text(unit: UnitPlan) -> str:
    return f"stage {unit.name!r}"


def _label(request: WorkerRequest) -> str | Subject:
    """The name of a request in messages; each renderer spells the subject if it is a stage."""
    subject = request.subject
    return subject if subject is not None and subject.kind == "stage" else request.name


def _unit_subject(unit: UnitPlan) -> Subject:
    return Subject("stage", unit.name, unit.stages)


def _per_node_problems(units: list[UnitPlan], ledger: Ledger) -> list[Problem]:
    problems = []
    groups = group_nodes(ledger)
    for unit in units:
        if unit.per_node is None:
            continue
        filler = NodeFiller(unit.shape)
        able = eligible_nodes(unit, groups)
        capacity_of = {free: filler.capacity(free) // unit.shape.ranks for free in able}
        short = [free for free in able if capacity_of[free] < unit.per_node]
        if able and not short:
            continue
        reason = f": workers_per_node={unit.per_node} does not fit on every eligible node"
        message = Text(_unit_subject(unit), reason)
        capacities = {
            capacity_of[free]: sum(len(groups[f]) for f in short if capacity_of[f] == capacity_of[free])
            for free in short
        }
        evidence = [f"{nodes} nodes can run {workers}" for workers, nodes in sorted(capacities.items())]
        evidence = evidence or [f"one worker fits on no node ({unit.shape.describe()})"]
        least = min(capacities, default=0)
        values: dict[str, object] = {"workers_per_node": least} if least else {"workers_per_node": UNSET}
        problems.append(Problem("DT104", message, tuple(evidence), (Change(values),), subject=_unit_subject(unit)))
    return problems


def _find_unit_fixes(units: list[UnitPlan], ledger: Ledger, feasible: FeasibilityCheck) -> tuple[Fix, ...]:
    """Automatic worker counts, shares instead of whole GPUs, other modes, more nodes: those that were tried and fit."""
    found: list[Fix] = []
    pinned = [unit for unit in units if unit.has_set_counts]
    if pinned and feasible([unit.without_set_counts() for unit in units], ledger, "streaming"):
        found.append(Change(_auto_workers(pinned), tuple(map(_unit_subject, pinned))))
    found += _gpu_share_fix(units, pinned, ledger, feasible)
    found += [Change({"mode": mode}) for mode in ("sequential", "waves") if feasible(units, ledger, mode)]
    found += _add_nodes_fix_for_units(units, ledger, feasible)
    return tuple(found)


def _auto_workers(units: list[UnitPlan]) -> dict[str, object]:
    """Settings that leave the number of workers of these units to the planner."""
    per_node = any(unit.per_node is not None for unit in units)
    return {"workers": "auto", **({"workers_per_node": UNSET} if per_node else {})}


def _gpu_share_fix(
    units: list[UnitPlan], pinned: list[UnitPlan], ledger: Ledger, feasible: FeasibilityCheck
) -> list[Change]:
    """The largest share of a card that is enough for the units that request one whole card, without their counts."""
    whole = [unit for unit in units if unit.shape.kind is ShapeKind.WHOLE_NUMBERED_GPU and unit.shape.cards == 1]
    if not whole:
        return []
    counted = [unit for unit in whole if unit in pinned]
    counts = _auto_workers(counted) if counted else {}
    for share in GPU_SHARES_TRIED_MILLI:
        changed = [
            replace(
                unit.without_set_counts(), shape=replace(unit.shape, kind=ShapeKind.FRACTIONAL_GPU, gpu_milli=share)
            )
            if unit in whole
            else unit
            for unit in units
        ]
        if feasible(changed, ledger, "streaming"):
            return [Change({**counts, "gpus": from_milli(share)}, tuple(map(_unit_subject, whole)))]
    return []


def _add_nodes_fix_for_units(units: list[UnitPlan], ledger: Ledger, feasible: FeasibilityCheck) -> list[AddNodes]:
    """Number of nodes like the largest one that is sufficient; tried."""
    if any(unit.per_node is not None for unit in units):
        return []
    largest = max(ledger.cluster.nodes, key=lambda node: (len(node.gpus), node.usable_cpu_milli, node.memory_bytes))

    def enough(more: int) -> bool:
        extra = tuple(replace(largest, name=f"one more: {number}") for number in range(more))
        return feasible(units, Ledger(Cluster((*ledger.cluster.nodes, *extra)), ledger.seats()), "streaming")

    return add_nodes_fix(largest, enough)
