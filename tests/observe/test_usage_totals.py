"""Samples of workers add up to the totals of units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.observe import telemetry
from dovetail.observe.telemetry import UnitUse, UsageTotals, WorkerProcesses, WorkerSample

MB = 1 << 20


def sample_of(cpu_s: float = 0.0, uss: int = 0, read: int = 0, **more: int | None) -> WorkerSample:
    return WorkerSample(cpu_s, uss, read, 2 * read, **more)  # type: ignore[arg-type]


def ready(unit: str = "a") -> WorkerProcesses:
    return WorkerProcesses((1,), unit)


def test_a_workers_cpus_are_those_since_the_last_sample_and_its_peak_is_the_largest_memory() -> None:
    accounts = UsageTotals()
    first, _ = accounts.add_samples(10.0, {1: (ready(), sample_of(5.0, 100 * MB))})
    second, _ = accounts.add_samples(12.0, {1: (ready(), sample_of(8.0, 40 * MB, 7))})
    assert (first[1].cpus, first[1].cpu_s_total, first[1].peak_bytes) == (None, 5.0, 100 * MB)
    assert (second[1].cpus, second[1].cpu_s_total) == (1.5, 8.0)
    assert (second[1].uss_bytes, second[1].peak_bytes) == (40 * MB, 100 * MB)
    assert (second[1].read_bytes_total, second[1].write_bytes_total) == (7, 14)


def test_totals_of_a_unit_include_ended_workers() -> None:
    accounts = UsageTotals()
    accounts.add_samples(0.0, {1: (ready(), sample_of(1.0, 30 * MB, 5)), 2: (ready("b"), sample_of(9.0))})
    accounts.add_samples(1.0, {1: (ready(), sample_of(2.0, 50 * MB, 6))})
    _, units = accounts.add_samples(2.0, {3: (ready(), sample_of(4.0, 20 * MB, 3, gpu_bytes=8))})
    a, b = units["a"], units["b"]
    assert (a.cpu_s_total, a.peak_bytes, a.uss_bytes, a.workers) == (6.0, 50 * MB, 20 * MB, 1)
    assert (a.read_bytes_total, a.write_bytes_total) == (9, 18)
    assert a.gpu_peak_bytes == 8
    assert (b.cpu_s_total, b.workers, b.gpu_peak_bytes) == (9.0, 0, None)
    assert (accounts.peak(1), accounts.peak(3), accounts.peak(7)) == (50 * MB, 20 * MB, 0)


def test_the_cpus_of_a_unit_are_those_of_ready_workers_only() -> None:
    accounts = UsageTotals()
    setting_up = WorkerProcesses((2,), "a", ready=False)
    accounts.add_samples(0.0, {1: (ready(), sample_of(0.0)), 2: (setting_up, sample_of(0.0))})
    _, units = accounts.add_samples(1.0, {1: (ready(), sample_of(0.5)), 2: (setting_up, sample_of(8.0))})
    assert (units["a"].cpus, units["a"].cpus_now, units["a"].cpu_s_total) == (0.5, 8.5, 8.5)
    _, units = accounts.add_samples(2.0, {1: (ready(), sample_of(1.0)), 2: (ready(), sample_of(16.0))})
    assert units["a"].cpus == 0.5  # it became ready somewhere in between
    _, units = accounts.add_samples(4.0, {1: (ready(), sample_of(2.0)), 2: (ready(), sample_of(19.0))})
    assert units["a"].cpus == pytest.approx((0.5 + 0.5 + 1.0 + 3.0) / (1 + 1 + 2 * 2))


def used(*cpus: float, every_s: float = 1.0) -> UnitUse:
    """A unit of one worker with these CPUs, sample by sample."""
    accounts, total = UsageTotals(), 0.0
    _, units = accounts.add_samples(0.0, {1: (ready(), sample_of(0.0))})
    for number, each in enumerate(cpus, 1):
        total += each * every_s
        _, units = accounts.add_samples(number * every_s, {1: (ready(), sample_of(total))})
    return units["a"]


def test_what_is_recent_takes_five_samples_or_ten_seconds() -> None:
    assert used(2, 2, 2, 2).cpus_recent is None
    assert used(9, 2, 2, 2, 2, 4).cpus_recent == pytest.approx(2.4)
    assert used(9, 2, 2, 2, 1.5, 4).cpus_least == pytest.approx(1.5)
    assert used(2, every_s=9.0).cpus_recent is None
    assert used(2, 4, every_s=5.0).cpus_recent == pytest.approx(3.0)


def test_while_no_worker_is_ready_nothing_is_recent() -> None:
    accounts = UsageTotals()
    for second in range(6):
        accounts.add_samples(float(second), {1: (ready(), sample_of(float(second)))})
    _, units = accounts.add_samples(6.0, {1: (ready(), sample_of(6.0))})
    assert units["a"].cpus_recent == pytest.approx(1.0)
    _, units = accounts.add_samples(7.0, {})
    assert units["a"].cpus_recent is None
    assert units["a"].cpus == pytest.approx(1.0)


def test_peaks_of_workers_that_went_long_ago_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MIN_PEAKS_KEPT", 10)
    accounts = UsageTotals()
    for number in range(1000):
        accounts.add_samples(float(number), {0: (ready(), sample_of(0, 5)), number: (ready(), sample_of(0, number))})
        assert len(accounts._peaks) <= 22
    assert (accounts.peak(0), accounts.peak(1), accounts.peak(990), accounts.peak(999)) == (5, 0, 990, 999)


@given(st.lists(st.dictionaries(st.integers(1, 4), st.integers(0, 9)), max_size=10))
def test_totals_of_units_never_decrease(story: list[dict[int, int]]) -> None:
    accounts, spent, last = UsageTotals(), dict.fromkeys(range(1, 5), 0), 0.0
    for second, burnt in enumerate(story):
        for worker, more in burnt.items():
            spent[worker] += more
        _, units = accounts.add_samples(float(second), {it: (ready(), sample_of(float(spent[it]))) for it in burnt})
        total = units["a"].cpu_s_total if units else 0.0
        assert total >= last
        last = total
