"""Partial batches of an ordered run: the units that may get them, and the warning of a plan about them.

If results keep the order of the source, a batch ends with its epoch (`UnitQueue.fills_batches`). Epochs are whole
batches of the units that get each input item of their wave once (`epoch_size`): these have full batches all the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.pipeline.stage_function import Each
from dovetail.scheduling.stage_rates import MEASURED
from dovetail.streaming.epoch_size import (
    DURABLE_EPOCH_S,
    MAX_OPEN_EPOCHS,
    MAX_RELEVANT_SPEED_FACTOR,
    MIN_BATCHES_PER_EPOCH,
)
from dovetail.streaming.settings import StreamOptions, unit_specs
from dovetail.text_format import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import UnitSpec

MAX_STAGES_NAMED = 4


def warn_of_partial_batches(plan: Plan, pipeline: Pipeline, order_settings: Sequence[str], *, durable: bool) -> Plan:
    """The plan, with a warning if the order of results may cost full batches.

    `order_settings` are the settings that keep the order; none: it is free. `durable`: the run can be resumed.
    """
    units = unit_specs(pipeline, plan)
    partial = units_with_partial_batches(units) if order_settings else []
    # functions of `dt.each` are called with items
    stages = [name for unit in partial for name in unit.stages if not isinstance(pipeline.stage(name).run, Each)]
    if not stages:
        return plan
    names = ", ".join(stages[:MAX_STAGES_NAMED])
    names += f" and {len(stages) - MAX_STAGES_NAMED} more" if len(stages) > MAX_STAGES_NAMED else ""
    cost = f" ({_epoch_length(units, partial)}, which a resume repeats)" if durable else ""
    fix = " ".join(f"--set {setting}=false" for setting in order_settings)
    warning = (
        f"results are ordered, so the last batch of each epoch{cost} may be smaller than batch_size in {names}; "
        f"for full batches: {fix}"
    )
    return plan if warning in plan.warnings else replace(plan, warnings=(*plan.warnings, warning))


def units_with_partial_batches(units: Sequence[UnitSpec]) -> list[UnitSpec]:
    """Units of an ordered run whose batches may be partial before the end of the input, parents before children."""
    found = []
    for wave in range(1 + max(unit.wave for unit in units)):
        members = [unit for unit in units if unit.wave == wave]
        if any(unit.barrier for unit in members):
            continue  # its whole input is one epoch
        once = _units_with_each_item_once(members)
        for unit in members:
            sizes = [other.batch_size for other in members if other.batch_size >= unit.batch_size]
            if unit.name not in once or any(size % unit.batch_size for size in sizes):
                found.append(unit)
    return [unit for unit in found if unit.batch_size > 1 and not unit.partial_in_epoch]


def _units_with_each_item_once(members: Sequence[UnitSpec]) -> set[str]:
    """The units of a wave that are known to get one item per input item of the wave."""
    names = {unit.name for unit in members}
    entries = [unit for unit in members if not names.issuperset(unit.parents) or not unit.parents]
    if members[0].wave and len(entries) > 1:
        return set()  # they share the epochs of one spool
    found = {unit.name for unit in entries}
    counted = {unit.name for unit in members if _is_count_known(unit)}
    for unit in members:
        keeps_count = math.isclose(unit.plan.per_source, entries[0].plan.per_source)
        if keeps_count and unit.parents and found & counted >= set(unit.parents):
            found.add(unit.name)
    return found


def _is_count_known(unit: UnitSpec) -> bool:
    """Whether the number of items that it returns per item is configured or measured, not assumed."""
    return unit.returns is not None or unit.plan.rate_source == MEASURED


def _epoch_length(units: Sequence[UnitSpec], partial: Sequence[UnitSpec]) -> str:
    """Input of an epoch of a durable run as time, at the planned rates if they are known (`EpochSize.target_items`)."""
    waves = {unit.wave for unit in partial}
    senders = {name for unit in units for name in unit.parents}
    members = [unit for unit in units if unit.wave in waves]
    if not all(unit.plan.has_known_rate and (unit.name not in senders or _is_count_known(unit)) for unit in members):
        return f"about {format_duration(DURABLE_EPOCH_S)} of input, or some batches if those take longer"
    seconds = DURABLE_EPOCH_S
    for unit in partial:
        rate = min(other.plan.throughput for other in members if other.wave == unit.wave)
        if unit.plan.throughput <= MAX_RELEVANT_SPEED_FACTOR * rate:
            slots = unit.plan.workers * unit.slots
            queued = StreamOptions().queued_messages_per_slot * slots / MAX_OPEN_EPOCHS
            batch_s = unit.batch_size / (unit.plan.workers * unit.plan.rate) * (unit.plan.throughput / rate)
            seconds = max(seconds, max(MIN_BATCHES_PER_EPOCH, queued) * batch_s)
    return f"about {format_duration(seconds)} of input"
