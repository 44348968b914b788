"""Rules of replanning, each with a snapshot in which it decides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.scheduling.replan.cost_benefit import ReplanRules, rules_above_noise
from dovetail.scheduling.replan.snapshot import Snapshot, UnitSnapshot, WorkerPhase, WorkerSnapshot
from dovetail.scheduling.replan.steps import replan
from scheduling.replans import apply_replan, plan_from_empty, shape, worker_counts

if TYPE_CHECKING:
    from dovetail.resources.seat import CardShare

CPU = shape(cpus=1)


def cpu_workers(**counts: int) -> tuple[WorkerSnapshot, ...]:
    """Workers with one CPU each, on one node."""
    names = [name for name, count in counts.items() for _ in range(count)]
    return tuple(WorkerSnapshot(number, name, (dt.Seat("node-0", 1000),)) for number, name in enumerate(names))


def on_card(number: int, unit: str, share: CardShare, cpu_milli: int = 1000) -> WorkerSnapshot:
    return WorkerSnapshot(number, unit, (dt.Seat("node-0", cpu_milli, 0, (share,)),))


def test_a_starved_unit_gets_no_workers_while_one_before_it_is_backlogged() -> None:
    early = UnitSnapshot("early", CPU, rate=2.0, backlogged=True, queued=100)
    late = UnitSnapshot("late", CPU, rate=1.0, starved_s=50.0)
    snapshot = Snapshot(dt.Cluster.parse("1x(12cpu)"), (early, late), cpu_workers(early=4, late=4))
    assert replan(snapshot).counts == {"early": 8, "late": 4}
    without_queues = replace(snapshot, units=(replace(early, backlogged=False), replace(late, starved_s=0.0)))
    assert replan(without_queues).counts == {"early": 4, "late": 8}


def test_a_starved_unit_on_another_branch_than_the_backlogged_one_still_limits_the_rate() -> None:
    first = UnitSnapshot("a", CPU, rate=2.0, backlogged=True, queued=100, ancestors=frozenset())
    other = UnitSnapshot("b", CPU, rate=1.0, starved_s=50.0, ancestors=frozenset())
    snapshot = Snapshot(dt.Cluster.parse("1x(12cpu)"), (first, other), cpu_workers(a=4, b=4))
    assert replan(snapshot).counts == {"a": 6, "b": 6}, "the queue says a, the rates say b"
    behind = replace(snapshot, units=(first, replace(other, ancestors=frozenset({"a"}))))
    assert replan(behind).counts == {"a": 8, "b": 4}


def test_of_two_backlogged_branches_the_slower_is_the_bottleneck() -> None:
    read = UnitSnapshot("read", CPU, rate=1.0, queued=1, ancestors=frozenset())
    slow = UnitSnapshot("slow", CPU, rate=1.4, backlogged=True, queued=100, ancestors=frozenset({"read"}))
    fast = UnitSnapshot("fast", CPU, rate=2.8, backlogged=True, queued=100, ancestors=frozenset({"read"}))
    snapshot = Snapshot(dt.Cluster.parse("1x(14cpu)"), (read, slow, fast), cpu_workers(read=4, slow=4, fast=4))
    counts = replan(snapshot).counts
    assert counts["slow"] > 4
    assert counts["slow"] > counts["fast"]


def test_a_backlogged_unit_is_preferred_to_one_with_a_lower_rate_and_no_backlog() -> None:
    early = UnitSnapshot("early", CPU, rate=1.0, queued=1)
    late = UnitSnapshot("late", CPU, rate=1.4, backlogged=True, queued=100)
    snapshot = Snapshot(dt.Cluster.parse("1x(10cpu)"), (early, late), cpu_workers(early=4, late=4))
    assert replan(snapshot).counts == {"early": 5, "late": 5}
    assert replan(replace(snapshot, units=(early, replace(late, backlogged=False)))).counts["late"] == 4


def test_of_several_backlogged_units_the_last_is_the_bottleneck() -> None:
    early = UnitSnapshot("early", CPU, rate=2.0, backlogged=True, queued=100)
    late = UnitSnapshot("late", CPU, rate=1.0, backlogged=True, queued=100)
    snapshot = Snapshot(dt.Cluster.parse("1x(12cpu)"), (early, late), cpu_workers(early=4, late=4))
    assert replan(snapshot).counts == {"early": 4, "late": 8}


def test_a_short_lull_does_not_shrink_a_unit() -> None:
    busy = UnitSnapshot("busy", CPU, rate=1.0)
    idle = UnitSnapshot("idle", CPU, rate=3.0, starved_s=20.0, setup_s=60.0, drain_s=5.0)
    snapshot = Snapshot(dt.Cluster.parse("1x(8cpu)"), (busy, idle), cpu_workers(busy=4, idle=4))
    assert not replan(snapshot).changes
    quick = replace(snapshot, units=(busy, replace(idle, setup_s=0.0)))
    assert replan(quick).counts == {"busy": 6, "idle": 2}
    waited = replace(snapshot, units=(busy, replace(idle, starved_s=66.0)))
    assert replan(waited).counts == {"busy": 6, "idle": 2}


def test_an_unmeasured_unit_begins_with_one_worker_and_grows_by_one_when_all_are_ready() -> None:
    new = UnitSnapshot("new", CPU, rate=None, backlogged=True, queued=100)
    snapshot = Snapshot(dt.Cluster.parse("1x(8cpu)"), (UnitSnapshot("old", CPU, rate=5.0), new), cpu_workers(old=2))
    first = replan(snapshot)
    assert first.counts["new"] == 1
    measured = replace(snapshot, units=(snapshot.units[0], replace(new, rate=1.0)))
    assert replan(measured).counts["new"] > 1
    starting = apply_replan(snapshot, first, WorkerPhase.STARTING)
    assert replan(starting).counts["new"] == 1
    ready = apply_replan(snapshot, first)
    assert replan(ready).counts["new"] == 2
    calm = replace(ready, units=(ready.units[0], replace(new, backlogged=False)))
    assert replan(calm).counts["new"] == 1


def test_a_unit_with_an_unsure_rate_at_most_doubles() -> None:
    guessed = UnitSnapshot("guessed", CPU, rate=0.1, confidence=0.2)
    other = UnitSnapshot("other", CPU, rate=5.0)
    snapshot = Snapshot(dt.Cluster.parse("1x(16cpu)"), (guessed, other), cpu_workers(guessed=2, other=2))
    assert replan(snapshot).counts["guessed"] == 4
    assert replan(replace(snapshot, units=(replace(guessed, confidence=0.9), other))).counts["guessed"] > 4


def test_a_ramping_share_leaves_the_last_whole_card_to_a_unit_that_needs_whole_cards() -> None:
    cluster = dt.Cluster.parse("1x(16cpu, 3xgpu)")
    share = UnitSnapshot("share", shape(cpus=1, gpus=0.5), rate=None, backlogged=True)
    whole = UnitSnapshot("whole", shape(cpus=1, gpus=1), rate=None)
    workers = (
        on_card(0, "whole", dt.CardShare(0, 1000)),
        on_card(1, "share", dt.CardShare(1, 500)),
        on_card(2, "share", dt.CardShare(1, 500)),
    )
    snapshot = Snapshot(cluster, (share, whole), workers)
    kept = replan(snapshot)
    assert not kept.changes
    assert any("the last free whole card stays for whole" in reason for reason in kept.reasons)
    assert replan(replace(snapshot, units=(share,), workers=workers[1:])).counts["share"] == 3
    on_split = replace(snapshot, workers=workers[:2])
    assert [start.seats[0].gpus for start in replan(on_split).starts] == [(1,)]


def test_the_units_that_are_hardest_to_place_are_placed_first() -> None:
    cluster = dt.Cluster.parse("2x(16cpu, 1xgpu)")
    share = UnitSnapshot("share", shape(cpus=1, gpus=0.25), rate=1.0, low=2, high=4)
    whole = UnitSnapshot("whole", shape(cpus=1, gpus=1), rate=9.0)
    counts = replan(Snapshot(cluster, (share, whole), ())).counts
    assert counts == {"share": 4, "whole": 1}


def test_noise_vetoes_small_gains_only_if_a_unit_near_the_slowest_is_unsure() -> None:
    """12 busy workers and a free CPU: one worker more gains 8 %."""
    slow = UnitSnapshot("slow", CPU, rate=1.0, backlogged=True)
    idle = UnitSnapshot("idle", CPU, rate=100.0)
    snapshot = Snapshot(dt.Cluster.parse("1x(14cpu)"), (slow, idle), cpu_workers(slow=12, idle=1))

    def counts(slow_sure: float, idle_sure: float, idle_rate: float = 100.0) -> dict[str, int]:
        units = (replace(slow, confidence=slow_sure), replace(idle, confidence=idle_sure, rate=idle_rate))
        seen = replace(snapshot, units=units)
        return dict(replan(seen, rules_above_noise(ReplanRules(), seen)).counts)

    assert counts(1.0, 1.0) == {"slow": 13, "idle": 1}
    assert counts(1.0, 0.1) == {"slow": 13, "idle": 1}, "an idle unit may be unsure"
    assert counts(0.9, 1.0) == {"slow": 12, "idle": 1}, "the gain may be noise"
    assert counts(1.0, 0.9, idle_rate=20.0) == {"slow": 12, "idle": 1}, "it is less than twice as fast"


@pytest.mark.parametrize(
    ("sure", "min_gain"), [(1.0, 0.03), (0.99, 0.03), (0.97, 0.06), (0.95, 0.1), (0.5, 0.1), (0.0, 0.1)]
)
def test_the_minimum_gain_grows_with_the_uncertainty_up_to_ten_percent(sure: float, min_gain: float) -> None:
    unit = UnitSnapshot("unit", CPU, rate=1.0, confidence=sure)
    seen = Snapshot(dt.Cluster.parse("1x(8cpu)"), (unit,), cpu_workers(unit=2))
    assert rules_above_noise(ReplanRules(), seen).min_gain == pytest.approx(min_gain)


def test_units_without_workers_or_a_rate_do_not_raise_the_minimum_gain() -> None:
    unit = UnitSnapshot("unit", CPU, rate=1.0)
    waiting = UnitSnapshot("waiting", CPU, rate=0.1, confidence=0.0)
    unknown = UnitSnapshot("unknown", CPU, rate=None, confidence=0.0)
    seen = Snapshot(dt.Cluster.parse("1x(8cpu)"), (unit, waiting, unknown), cpu_workers(unit=2, unknown=1))
    assert rules_above_noise(ReplanRules(), seen) == ReplanRules()
    assert rules_above_noise(ReplanRules(min_gain=0.2), replace(seen, units=(waiting,))).min_gain == 0.2


def test_a_change_that_does_not_pay_within_the_horizon_is_not_made() -> None:
    slow = UnitSnapshot("slow", CPU, rate=1.0, setup_s=90.0)
    fast = UnitSnapshot("fast", CPU, rate=4.0)
    snapshot = Snapshot(dt.Cluster.parse("1x(6cpu)"), (slow, fast), cpu_workers(slow=3, fast=3), horizon_s=80.0)
    assert not replan(snapshot).changes
    assert replan(replace(snapshot, horizon_s=6000.0)).counts == {"slow": 4, "fast": 2}
    free = replace(snapshot, units=(replace(slow, setup_s=0.0), fast))
    assert replan(free).counts == {"slow": 4, "fast": 2}


def test_a_unit_without_workers_is_started_however_long_its_setup_takes() -> None:
    new = UnitSnapshot("new", CPU, rate=1.0, setup_s=1000.0)
    old = UnitSnapshot("old", CPU, rate=1.0)
    snapshot = Snapshot(dt.Cluster.parse("1x(3cpu)"), (old, new), cpu_workers(old=3), horizon_s=10.0)
    assert replan(snapshot).counts["new"] >= 1


def test_a_worker_that_is_not_needed_stays_while_its_seat_stays_free() -> None:
    one = UnitSnapshot("one", CPU, rate=1.0, high=2)
    other = UnitSnapshot("other", CPU, rate=1.0)
    snapshot = Snapshot(dt.Cluster.parse("1x(8cpu)"), (one, other), cpu_workers(one=2, other=6))
    assert not replan(snapshot).changes


def test_a_draining_worker_whose_unit_needs_one_more_is_kept() -> None:
    unit = UnitSnapshot("unit", CPU, rate=1.0, low=3, high=3)
    workers = cpu_workers(unit=3)
    draining = (replace(workers[0], phase=WorkerPhase.DRAINING), *workers[1:])
    snapshot = Snapshot(dt.Cluster.parse("1x(8cpu)"), (unit,), draining)
    kept = replan(snapshot)
    assert (kept.cancelled_drains, kept.changes, kept.counts["unit"]) == ((0,), 0, 3)
    without = replan(replace(snapshot, workers=draining[1:]))
    assert (without.cancelled_drains, len(without.starts)) == ((), 1)


def test_a_draining_worker_whose_seat_is_assigned_to_another_is_not_kept() -> None:
    unit = UnitSnapshot("unit", CPU, rate=1.0, low=2)
    other = UnitSnapshot("other", CPU, rate=1.0, low=1)
    drains = WorkerSnapshot(0, "unit", (dt.Seat("node-0", 1000),), WorkerPhase.DRAINING)
    comes = WorkerSnapshot(1, "other", (dt.Seat("node-0", 1000),), WorkerPhase.STARTING)
    stays = WorkerSnapshot(2, "unit", (dt.Seat("node-0", 1000),))
    result = replan(Snapshot(dt.Cluster.parse("1x(2cpu)"), (unit, other), (drains, comes, stays)))
    assert not result.cancelled_drains
    assert result.counts == {"unit": 1, "other": 1}


def test_a_worker_moves_if_the_freed_space_pays() -> None:
    cluster = dt.Cluster.parse("1x(16cpu, 2xgpu)")
    half = UnitSnapshot("half", shape(cpus=1, gpus=0.5), rate=1.0, low=2, high=2)
    whole = UnitSnapshot("whole", shape(cpus=1, gpus=1), rate=1.0)
    workers = (on_card(0, "half", dt.CardShare(0, 500)), on_card(1, "half", dt.CardShare(1, 500)))
    result = replan(Snapshot(cluster, (half, whole), workers))
    assert result.counts == {"half": 2, "whole": 1}
    assert sorted(start.unit for start in result.starts) == ["half", "whole"]
    assert len(result.stops) == 1
    assert "moves away from node-0" in result.stops[0].reason


@pytest.mark.parametrize("low", [1, 3])
def test_workers_above_the_maximum_of_a_unit_are_stopped(low: int) -> None:
    unit = UnitSnapshot("unit", CPU, rate=1.0, low=low, high=3)
    result = replan(Snapshot(dt.Cluster.parse("1x(8cpu)"), (unit,), cpu_workers(unit=6)))
    assert (len(result.starts), len(result.stops), result.counts["unit"]) == (0, 3, 3)


def test_a_unit_with_workers_per_node_has_them_on_every_node_including_new_ones() -> None:
    unit = UnitSnapshot("watch", CPU, rate=9.0, per_node=1)
    other = UnitSnapshot("other", CPU, rate=1.0)
    full = plan_from_empty(dt.Cluster.parse("2x(4cpu)"), (unit, other))
    assert worker_counts(full) == {"watch": 2, "other": 6}
    more = replace(full, cluster=dt.Cluster.parse("3x(4cpu)"))
    result = replan(more)
    assert worker_counts(apply_replan(more, result)) == {"watch": 3, "other": 9}
    assert not result.stops


def test_no_worker_is_started_beyond_the_rate_of_the_slowest_unit() -> None:
    unit = UnitSnapshot("unit", CPU, rate=1.0)
    pinned = UnitSnapshot("pinned", CPU, rate=1.0, low=2, high=2)
    empty = Snapshot(dt.Cluster.parse("1x(8cpu)"), (unit, pinned), ())
    assert replan(empty).counts == {"unit": 2, "pinned": 2}


def test_the_reasons_name_the_bottleneck_the_rates_and_the_number_of_layouts() -> None:
    slow, fast = UnitSnapshot("slow", CPU, rate=1.0), UnitSnapshot("fast", CPU, rate=4.0)
    result = replan(Snapshot(dt.Cluster.parse("1x(6cpu)"), (slow, fast), cpu_workers(slow=3, fast=3)))
    assert result.bottleneck == "slow"
    assert result.reasons[0] == "slow limits the pipeline: 3 -> 4 items/s"
    assert "layouts were compared" in result.reasons[1]
    assert "from 3 to 4 workers" in result.starts[0].reason
    assert "its seat on node-0 goes to slow" in result.stops[0].reason
