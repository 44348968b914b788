"""Settings of failures: on_death, on_failure and max_setup_failures, in Python, in files and on the command line."""

from __future__ import annotations

from typing import Any

import pytest

import dovetail as dt
from dovetail.control.lifecycle import RunState
from dovetail.engines.exception_summary import is_worker_broken
from dovetail.engines.simulated.world import Behaviour, Gives, Kills, Raises
from dovetail.pipeline.pipeline_file import parse_pipeline_data
from dovetail.streaming.settings import StreamOptions, unit_specs
from stage_functions import same
from streaming.harness import simulate_stages, stage

FILE = {
    "name": "settings",
    "stages": [
        {
            "name": "a",
            "run": "stage_functions:same",
            "on_death": {"times": 1, "backoff": "10s", "then": "skip"},
            "on_failure": {"MyEngineError": "restart", "lost the device": "restart", "DistBackendError": "retry"},
            "max_setup_failures": 2,
        }
    ],
}


class AcceleratorError(RuntimeError):
    """Stands in for torch.AcceleratorError."""


class DistBackendError(RuntimeError):
    """Stands in for torch.distributed.DistBackendError."""


def test_a_file_and_python_specify_the_same_policies() -> None:
    parsed = parse_pipeline_data(FILE)
    assert parsed.problems == ()
    (in_file,) = parsed.stages
    rules: Any = {"MyEngineError": "restart", "lost the device": "restart", DistBackendError: "retry"}
    retry = dt.Retry(times=1, backoff="10s", then="skip")
    in_python = dt.Stage("a", same, on_death=retry, on_failure=rules, max_setup_failures=2)
    for found in (in_file, in_python):
        pipeline = dt.Pipeline([found])
        (spec,) = unit_specs(pipeline, dt.plan(pipeline, "1x(2cpu, 8GB)"))
        assert (spec.skip_failed, spec.skip_deaths, spec.death_retries) == (False, True, 1)
        assert (spec.death_backoff_s, spec.max_setup_failures, spec.retries) == (10.0, 2, 3)
        assert found.failure_rules == in_python.failure_rules


def test_by_default_deaths_are_treated_as_exceptions() -> None:
    pipeline = dt.Pipeline([dt.Stage("a", same, on_error="skip", retries=1)])
    (spec,) = unit_specs(pipeline, dt.plan(pipeline, "1x(2cpu, 8GB)"))
    assert (spec.skip_deaths, spec.death_retries, spec.death_backoff_s) == (True, 1, 0.0)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("on_death", "ignore", 'on_death=\'ignore\' is not "fail", "skip" or Retry(...)'),
        ("on_death", dt.Retry(ConnectionError), "a worker that dies raises no exception"),
        ("on_failure", "kill", "on_failure='kill' is not retry, restart, or a mapping"),
        ("on_failure", {"ValueError": "kill"}, "'kill' is not one of retry, restart"),
        ("max_setup_failures", -1, "max_setup_failures=-1 is not a whole number"),
    ],
)
def test_invalid_settings_are_reported_with_what_is_valid(setting: str, value: object, message: str) -> None:
    with pytest.raises(dt.PipelineError) as caught:
        dt.Pipeline([dt.Stage("a", same, **{setting: value})])  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("error", "rules", "broken"),
    [
        (ValueError("no"), (), False),
        (AcceleratorError("unspecified launch failure"), (), True),
        (RuntimeError("CUDA error: device-side assert triggered"), (), True),
        (RuntimeError("CUDA error: out of memory"), (), False),
        (AcceleratorError("x"), (("RuntimeError", "retry"),), False),
        (AcceleratorError("x"), (("*", "retry"),), False),
        (ValueError("no"), (("*", "restart"),), True),
        (ValueError("lost the device 3"), (("lost the device", "restart"),), True),
        (DistBackendError("x"), (("torch.distributed.DistBackendError", "retry"), ("*", "restart")), False),
    ],
)
def test_exceptions_that_mean_a_broken_process(
    error: Exception, rules: tuple[tuple[str, str], ...], broken: bool
) -> None:
    assert is_worker_broken(error, rules) is broken  # type: ignore[arg-type]
    wrapped = ExceptionGroup("several", [error])
    assert is_worker_broken(wrapped, rules) is broken  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "settings", "state"),
    [
        (Kills(), {"on_error": "fail", "on_death": "skip"}, RunState.FINISHED),
        (Raises(), {"on_error": "fail", "on_death": "skip"}, RunState.FAILED),
        (Kills(), {"on_error": "skip", "on_death": "fail"}, RunState.FAILED),
        (Raises(), {"on_error": "skip", "on_death": "fail"}, RunState.FINISHED),
    ],
)
def test_exceptions_and_deaths_have_policies_of_their_own(
    outcome: Raises | Kills, settings: dict[str, object], state: RunState
) -> None:
    behaviour = Behaviour(0.1, item=lambda key, _: outcome if key == (5,) else Gives())
    rig = simulate_stages([stage("a", **settings)], {"a": behaviour}, 20)
    assert rig.run_state is state, rig.error


def test_on_death_limits_retries_and_waits_before_them() -> None:
    behaviour = Behaviour(0.1, item=lambda key, _: Kills() if key == (5,) else Gives())
    retry = dt.Retry(times=2, backoff="100s", then="skip")
    rig = simulate_stages([stage("a", workers=1, on_death=retry)], {"a": behaviour}, 20)
    assert rig.run_state is RunState.FINISHED, rig.error
    (failed,) = rig.data.failed_items
    assert failed.attempts == 3
    assert rig.seconds >= 300, "100 s and 200 s"


def test_more_failed_setups_than_allowed_fail_the_run() -> None:
    for limit in (0, 4):
        rig = simulate_stages(
            [stage("a", workers=1, max_setup_failures=limit)],
            {"a": Behaviour(0.1, setup_failures=1.0)},
            20,
            options=StreamOptions(replan=False, follow_plan=True),
        )
        assert rig.run_state is RunState.FAILED
        assert f"{limit + 1} setups failed in a row, more than max_setup_failures={limit} allows" in rig.error
        assert len(rig.starts("a")) == limit + 1
