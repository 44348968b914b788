"""Probe run: measures every stage with a few real items before planning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any

from dovetail.data.sample import PIECES, Sample
from dovetail.errors import ConfigError, InfeasibleError, Problem, RunError
from dovetail.observe.failed_items import MAX_SHOWN_CHARACTERS
from dovetail.pipeline.pipeline import Pipeline
from dovetail.runtime.assembly import PROBE_RUN
from dovetail.runtime.probe_end import MIN_PROBE_ITEMS
from dovetail.runtime.run_handle import MAX_TRACEBACK_LINES
from dovetail.runtime.sites import HOP_S
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.settings import StreamOptions
from dovetail.text_format import cut_text, printable

if TYPE_CHECKING:
    from dovetail.observe.summary import RunSummary
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.run_handle import ItemError, Run
    from dovetail.scheduling.plan import Plan, UnitPlan

MAX_CALL_S = 20.0
"""A probe is cancelled if no call returns for this time."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe took, and the items that failed in it."""

    read: int
    seconds: float
    errors: tuple[ItemError, ...]

    @property
    def note(self) -> str:
        """One line about the items that failed; empty: none did."""
        if not self.errors:
            return ""
        first = self.errors[0]
        place = f"{first.place}  " if first.place else ""
        error = cut_text(printable(first.error), MAX_SHOWN_CHARACTERS)
        return f"note: {len(self.errors)} of {self.read} items failed in the probe; {place}{first.stage}: {error}"


def probe(
    pipeline: Pipeline, source: Any, items: int, cluster: Cluster | str = "auto", *, wait: bool = True
) -> ProbeResult:
    """Runs items of the source through every stage, with one worker each on this machine, and discards the results.

    At most `items` are taken, from places all over the source if it can seek; fewer if the speeds are known precisely
    before. Measurements replace those of earlier runs, and `load_profiles` prefers them. Side effects of stages happen.
    Items that fail are skipped, also where they end a run; RunError if all items of a stage fail.
    `cluster`: what this machine is taken to have, as for a local run.
    """
    from dovetail.runtime.run import run  # late: imports much, and may load profiles itself

    pipeline = _skipping_failures(pipeline)
    batch = max(stage.batch_size for stage in pipeline)
    sample = Sample(source, items, batch * -(-MIN_PROBE_ITEMS // (PIECES * batch)))
    options = StreamOptions(hop_s=HOP_S, eager=True, follow_plan=True, replan=False)
    with TemporaryDirectory(prefix="dovetail-probe-") as folder:
        running = run(
            pipeline,
            sample,
            plan=_with_min_workers(_local_plan(pipeline, cluster)),
            options=options,
            run_dir=folder,
            progress=False,
            wait=wait,
            what=PROBE_RUN,
        )
        summary = _wait_for_end(running)
        errors = tuple(running.errors)  # the folder has the items
    if not summary.read:
        raise ConfigError(Problem("DT372", "cannot probe: the source is empty", fixes=("--source FILE",)))
    untouched = [unit.name for unit in summary.units if not unit.taken]
    if summary.status not in ("finished", "drained"):
        if summary.status == "cancelled":
            raise RunError(_silent_problem(summary))
        raise RunError(Problem("DT373", f"the probe did not finish: it is {summary.status}", fixes=("try again",)))
    if failed := [unit.name for unit in summary.units if unit.failed and unit.failed == unit.taken]:
        raise RunError(_all_failed_problem(failed[0], errors))
    if untouched:
        message = f"no item reached {', '.join(untouched)}: earlier stages dropped all of the {summary.read} items"
        raise ConfigError(Problem("DT374", message, fixes=(f"--probe {20 * items}", "remove --probe")))
    return ProbeResult(summary.read, summary.seconds, errors)


def _skipping_failures(pipeline: Pipeline) -> Pipeline:
    """The same pipeline, whose failing items are skipped: one row must not prevent the measurement."""
    return Pipeline([replace(stage, on_error="skip", on_death=None) for stage in pipeline], pipeline.name)


def _all_failed_problem(unit: str, errors: tuple[ItemError, ...]) -> Problem:
    of_unit = [error for error in errors if error.stage == unit]
    if not of_unit:
        return Problem("DT330", f"all items of {unit} failed in the probe", fixes=("correct its code",))
    first = of_unit[0]
    lines = [line for line in first.traceback.splitlines() if line.strip()]
    message = f"{unit}: all {len(of_unit)} items of the probe failed: {first.error}"
    fixes = (f"correct the code of {unit}: no item passed it",)
    return Problem("DT330", message, tuple(lines[-MAX_TRACEBACK_LINES:]), fixes, first.place)


def _wait_for_end(running: Run) -> RunSummary:
    """The summary of the probe, which is cancelled if its calls do not return; the time of setups is not limited."""
    progress: object = None
    changed_at = monotonic()
    while True:
        try:
            return running.wait(MAX_CALL_S / 4)
        except TimeoutError:
            units = running.stats.units
            is_set_up = all(unit.started - unit.stopped - unit.lost <= unit.ready for unit in units)
            before, progress = progress, [(unit.name, unit.taken, unit.ready) for unit in units]
            if progress != before or not is_set_up or not any(unit.ready for unit in units):
                changed_at = monotonic()
            elif monotonic() - changed_at >= MAX_CALL_S:
                running.cancel("its calls do not return")


def _silent_problem(summary: RunSummary) -> Problem:
    done = ", ".join(f"{unit.name}: {unit.taken}" for unit in summary.units)
    return Problem(
        "DT373",
        f"the probe was stopped: no call returned for {MAX_CALL_S:g} s",
        (f"items that were processed: {done}",),
        ("remove --probe: a run measures the stages too", "set a timeout for stages that can hang: timeout: 60s"),
    )


def _local_plan(pipeline: Pipeline, cluster: Cluster | str) -> Plan:
    try:
        return make_plan(pipeline, cluster)
    except InfeasibleError as error:
        evidence = tuple(line for problem in error.problems for line in (problem.message, *problem.evidence))
        message = "the probe needs one worker of every stage on this machine, and they do not fit"
        fixes = (
            "remove --probe: a plan alone starts nothing",
            '--cluster "1x(4cpu, 8GB, 1xL40S:48GB)"  # assumed hardware of this machine',
        )
        raise InfeasibleError(Problem("DT370", message, evidence, fixes)) from None


def _with_min_workers(plan: Plan) -> Plan:
    """The same plan with the minimum number of workers."""
    units = tuple(replace(unit, workers=_min_workers(unit)) for unit in plan.units)
    seats = {stage: plan.seats[stage][: unit.workers * unit.shape.ranks] for unit in units for stage in unit.stages}
    return replace(plan, units=units, seats=seats)


def _min_workers(unit: UnitPlan) -> int:
    return unit.workers if unit.per_node is not None else min(unit.workers, unit.low)
