"""Advice about roles that request more than they use."""

from __future__ import annotations

import pytest

import dovetail as dt
from dovetail.actors.system_status import SystemStatus
from dovetail.actors.usage_advice import usage_advice
from dovetail.observe.telemetry import UnitUse


def use(cpus: float | None, gpu_peak_bytes: int | None = None) -> UnitUse:
    return UnitUse("trainer", 1, cpus, cpus, cpus, cpus, 1.0, 0, 0, 0, 0, gpu_peak_bytes)


def advice(found: UnitUse, resources: dt.Resources, ready_s: float = 600.0, ranks: int = 1) -> tuple[str, ...]:
    return usage_advice({"trainer": found}, {"trainer": resources.shape(ranks)}, {"trainer": ready_s})


def test_cpus_that_are_not_used_are_named_with_a_request_that_is_enough() -> None:
    four = dt.Resources(cpus=4)
    assert advice(use(0.6), four) == (
        "trainer uses 0.6 of 4 CPUs on average over 10 min 00 s: Resources(cpus=1.25) would be enough",
    )
    assert advice(use(0.0), four)[0].endswith("Resources(cpus=0.25) would be enough")
    assert advice(use(2.4), dt.Resources(cpus=4), ranks=4)[0].startswith("trainer uses 0.6 of 4 CPUs")


@pytest.mark.parametrize(
    ("used", "requested", "ready_s"), [(2.5, 4, 600.0), (0.1, 0.5, 600.0), (0.1, 4, 30.0), (None, 4, 600.0)]
)
def test_used_small_and_new_requests_are_fine(used: float | None, requested: float, ready_s: float) -> None:
    assert advice(use(used), dt.Resources(cpus=requested), ready_s) == ()


def test_a_gpu_that_was_never_used_is_named_if_gpus_are_measured() -> None:
    one = dt.Resources(cpus=1, gpus=1)
    assert advice(use(0.9, gpu_peak_bytes=0), one) == (
        "trainer has not used its GPU for 10 min 00 s: request none, or move the model there",
    )
    assert advice(use(0.9, gpu_peak_bytes=1 << 20), one) == ()
    assert advice(use(0.9), one) == ()
    assert advice(use(0.9, gpu_peak_bytes=0), dt.Resources(cpus=1)) == ()


def test_the_status_shows_advice() -> None:
    status = SystemStatus("rl", "run", "ready", "", (), ("trainer uses 0.6 of 4 CPUs",))
    assert str(status).splitlines()[-1] == "advice: trainer uses 0.6 of 4 CPUs"
    assert SystemStatus.from_dict(status.to_dict()) == status


def test_the_status_shows_warnings_before_advice() -> None:
    status = SystemStatus("rl", "run", "ready", "", (), ("less",), ("rollout is not scaled",))
    assert str(status).splitlines()[-2:] == ["warning: rollout is not scaled", "advice: less"]
    assert SystemStatus.from_dict(status.to_dict()) == status
