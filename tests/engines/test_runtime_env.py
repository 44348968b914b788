"""Settings of stages by engine: each has its effect or is refused with the reason, and none is ignored silently."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.engines.runtime_env import LOCAL_REASONS, RAY_REASONS, local_problems, ray_problems
from dovetail.pipeline.stage_fields import STAGE
from runtime.aids import run_of

if TYPE_CHECKING:
    from collections.abc import Callable

VALUES: dict[str, Any] = {
    "pip": ["torch"],
    "uv": ["torch==2.0"],
    "conda": "train",
    "working_dir": "s3://bucket/code.zip",
    "py_modules": ["/code/mine"],
    "py_executable": "/opt/python3.12",
    "image_uri": "registry/image",
    "container": {"image": "registry/image"},
    "config": {"setup_timeout_seconds": 600},
    "excludes": ["data"],
    "java_jars": ["a.jar"],
    "worker_process_setup_hook": "module.hook",
    "_nsight": "default",
    "_rocprof_sys": "default",
}
"""Keys of runtime_env in Ray 2.60 other than `env_vars`, with a value."""
INTERNAL_KEYS = {"_ray_release", "_ray_commit", "_inject_current_ray"}
"""Keys that Ray itself sets."""


def variables(items: list[str]) -> list[str | None]:
    return [os.environ.get(item) for item in items]


def stage(**runtime_env: Any) -> dt.Stage:
    return dt.Stage("train", variables, runtime_env=runtime_env)


STARTS: dict[str, Callable[[dt.Pipeline], object]] = {
    "dt.run": lambda pipeline: dt.run(pipeline, ["A"], cluster="1x(2cpu, 4GB)"),
    "dt.serve": lambda pipeline: dt.serve(pipeline, cluster="1x(2cpu, 4GB)"),
}


@pytest.mark.parametrize("start", STARTS)
def test_local_runs_and_services_refuse_keys_that_need_ray_before_they_begin(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))
    pipeline = dt.Pipeline([stage(py_executable="/opt/python", pip=["torch"]), dt.Stage("other", variables)])
    with pytest.raises(dt.ConfigError) as caught:
        STARTS[start](pipeline)
    assert caught.value.codes == ("DT407", "DT407")
    assert "local workers run in the interpreter of the driver" in str(caught.value)
    assert "pip install torch" in str(caught.value)
    assert not list(tmp_path.glob("runs/*")), "nothing was started"


def test_local_supports_env_vars_and_refuses_every_other_key() -> None:
    assert not list(local_problems("s", {"env_vars": {"A": "1"}}))
    for key, value in VALUES.items():
        (problem,) = local_problems("s", {"env_vars": {"A": "1"}, key: value})
        assert problem.code == "DT407"
        assert f"{key!r} of runtime_env" in problem.message
        assert 'runtime_env={"env_vars": {"A": "1"}}' in problem.fix_texts
        assert 'engine="ray"' in problem.fix_texts
    assert set(LOCAL_REASONS) <= set(VALUES)


@pytest.mark.parametrize("value", [["A=1"], {"A": 1}, "A=1"])
def test_local_refuses_env_vars_that_are_not_strings(value: Any) -> None:
    (problem,) = local_problems("s", {"env_vars": value})
    assert problem.code == "DT403"


def test_local_workers_get_the_env_vars_of_a_runtime_env_and_env_overrides_them() -> None:
    given = {"env_vars": {"FROM_RUNTIME_ENV": "1", "FROM_BOTH": "1"}}
    stage = dt.Stage("s", variables, runtime_env=given, env={"FROM_BOTH": "2"}, workers=1, batch_size=2)
    assert list(run_of(stage, source=["FROM_RUNTIME_ENV", "FROM_BOTH"])) == ["1", "2"]


def test_a_variable_of_env_from_that_is_not_set_is_an_error_on_local_too() -> None:
    with pytest.raises(dt.ConfigError, match="DT398"):
        run_of(dt.Stage("s", variables), source=["A"], env_from=["NO_SUCH_VARIABLE"])


@pytest.mark.ray
def test_on_ray_every_key_has_an_effect_or_is_refused() -> None:
    from ray.runtime_env import RuntimeEnv

    known = RuntimeEnv.known_fields
    assert known == {*VALUES, *INTERNAL_KEYS, "env_vars"}, "the table of this test has all keys"
    refused = {key for key, value in VALUES.items() if list(ray_problems("s", {key: value}, known))}
    assert refused == set(RAY_REASONS)
    (problem,) = ray_problems("s", {"env_var": {"A": "1"}}, known)
    assert "did you mean 'env_vars'?" in problem.message


# All settings


def documented_settings() -> dict[str, list[str]]:
    """Setting -> its cells in the table of docs/running.md: local, ray, serve, simulate."""
    text = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    table = text.partition("## Settings of a stage by engine")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return {name: [cell.strip() for cell in cells] for first, *cells in rows for name in re.findall(r"`(\w+)`", first)}


def test_the_documentation_lists_the_effect_of_every_setting_on_every_engine() -> None:
    found = documented_settings()
    assert set(found) == set(STAGE.names)
    assert {len(cells) for cells in found.values()} == {4}


def test_settings_that_are_documented_as_refused_are_refused() -> None:
    refused = {
        (name, at) for name, cells in documented_settings().items() for at, cell in enumerate(cells) if "DT" in cell
    }
    assert refused == {("runtime_env", 0), ("runtime_env", 1), ("runtime_env", 2), ("barrier", 2)}
    with pytest.raises(dt.ConfigError, match="DT375"):
        dt.serve(dt.Pipeline([dt.Stage("s", variables, barrier=True)]), cluster="1x(2cpu, 4GB)")


def test_a_simulation_runs_no_code_and_accepts_every_environment(tmp_path: Path) -> None:
    simulated = dt.Stage("s", "no.such.module:function", env={"A": "1"}, runtime_env=VALUES, rate=100.0)
    found = dt.simulate(dt.Pipeline([simulated]), "1x(2cpu, 4GB)", 10, run_dir=tmp_path / "run")
    assert found.status == "finished"
