"""Actors files: the same as in Python, every mistake with its line and column, JSON Schema, and the commands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from command import run_command
from dovetail.cli.schema import SCHEMAS

if TYPE_CHECKING:
    from pathlib import Path

FILE = """\
name: rl
pools:
  gpu: {labels: {pool: gpu}}
roles:
  - {name: rollout, cls: "m:Rollout", profile: rollout, workers: [4, 64], scale: {target: 4, cooldown: 1m}}
  - name: trainer
    cls: m:Trainer
    profile: trainer
    workers: 2
    together: {group: train, share: max}
    pool: gpu
    after: [rollout]
    restart: {policy: always, limit: 3}
    affinity: {labels: {zone: a}}
  - {name: sync, cls: "m:Sync", workers: 2, together: {group: train, share: max}, pool: gpu, args: [1], kwargs: {a: b}}
"""
CLUSTER = "2x(16cpu, 64GB, 2xA100){pool=gpu, zone=a} + 2x(16cpu, 32GB)"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "actors.yaml"
    path.write_text(FILE)
    return path


def test_a_file_says_the_same_as_python(file: Path) -> None:
    train = dt.Together("train", share="max")
    expected = dt.ActorSystem(
        [
            dt.Role(
                "rollout", "m:Rollout", profile="rollout", workers=(4, 64), scale=dt.Scale(target=4, cooldown="1m")
            ),
            dt.Role(
                "trainer",
                "m:Trainer",
                profile="trainer",
                workers=2,
                together=train,
                pool="gpu",
                after=["rollout"],
                restart=dt.Restart("always", limit=3),
                affinity=dt.Affinity({"zone": "a"}),
            ),
            dt.Role("sync", "m:Sync", workers=2, together=train, pool="gpu", args=[1], kwargs={"a": "b"}),
        ],
        {"gpu": dt.Pool({"pool": "gpu"})},
        name="rl",
    )
    loaded = dt.ActorSystem.load(file)
    assert (loaded.name, loaded.pools, loaded.roles) == (expected.name, expected.pools, expected.roles)
    assert loaded.plan(CLUSTER).to_dict() == expected.plan(CLUSTER).to_dict()


WRONG = """\
name: rl
pools: {gpu: {labels: {pool: gpu}, cpu: 4}}
roles:
  - {name: rollout, cls: "m:R", profile: rolout, workers: [4, 2]}
  - name: trainer
    cls: m.R
    scale: {target: -1, signl: x}
    resources: {gpu: 1, cpus: -1}
  - cls: m:X
    together: 4
    slots: 0
"""


def test_every_mistake_of_a_file_is_reported_with_its_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "actors.yaml"
    path.write_text(WRONG)
    with pytest.raises(dt.ConfigError) as caught:
        dt.ActorSystem.load(path)
    places = {problem.place.removeprefix(f"{path}:"): str(problem.message) for problem in caught.value.problems}
    assert list(places) == ["2:36", "4:33", "4:50", "6:5", "7:13", "7:25", "8:17", "8:25", "9:5", "10:5", "11:5"]
    assert places["2:36"] == "unknown key 'cpu' (did you mean 'cpus'?)"
    assert places["9:5"] == "roles[2].name is missing"
    assert places["11:5"] == "role 3: slots=0 is not a whole number from 1 to 10000"
    assert all(problem.fixes for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("roles:\n  - {name: a, cls: 'm:A', after: [b]}\n", "2:35", "after names 'b', which is not a role"),
        ("roles:\n  - {name: a, cls: 'm:A', affinity: {near: [b]}}\n", "2:45", "near names 'b'"),
        (
            "roles:\n  - {name: a, cls: 'm:A', together: x}\n  - {name: b, cls: 'm:B', together: x, ranks: 2}\n",
            "2:27",
            "needs several processes (ranks)",
        ),
        ("roles: {}\n", "1:1", "roles should be a list"),
        ("roles: []\n", "1:1", "an actor system without roles"),
        ("roles: [5]\n", "1:9", "roles[0] should be a mapping, not 5"),
    ],
)
def test_a_mistake_is_reported_where_it_is(text: str, place: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "actors.yaml"
    path.write_text(text)
    with pytest.raises(dt.ConfigError) as caught:
        dt.ActorSystem.load(path)
    (problem,) = caught.value.problems
    assert problem.place == f"{path}:{place}"
    assert message in str(problem.message)
    assert problem.fixes


@pytest.mark.parametrize(
    ("role", "valid"),
    [
        ({"workers": [1, 4], "scale": {"target": 1}, "spread": "strict", "together": "x"}, True),
        ({"restart": {"policy": "never"}, "env_from": ["HOME"], "affinity": {"labels": {"a": "b"}}}, True),
        ({"workers": "auto"}, False),
        ({"restart": "sometimes"}, False),
        ({"affinity": {"far": ["a"]}}, False),
        ({"resources": {"cpus": -1}}, False),
    ],
)
def test_the_schema_accepts_what_a_file_may_say(role: dict[str, Any], valid: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    data = {"roles": [{"name": "a", "cls": "m:A", **role}]}
    assert jsonschema.Draft202012Validator(SCHEMAS["actors"]()).is_valid(data) == valid
    if valid:
        dt.ActorSystem.from_dict(data)
    else:
        with pytest.raises(dt.ConfigError):
            dt.ActorSystem.from_dict(data)


def test_the_plan_of_a_file_is_printed_as_text_and_as_json(file: Path) -> None:
    done = run_command("plan", str(file), "--cluster", CLUSTER)
    assert done.returncode == 0, done.stderr
    assert "rl on 2x(16cpu, 64GB, 2xA100)" in done.stdout
    assert "warning: 2 of 4 GPUs stay idle" in done.stdout
    data = json.loads(run_command("plan", str(file), "--cluster", CLUSTER, "--json").stdout)
    assert data["workers"] == {"rollout": 4, "trainer": 2, "sync": 2}


def test_a_role_is_explained(file: Path) -> None:
    done = run_command("explain", str(file), "trainer", "--cluster", CLUSTER)
    assert done.stdout.splitlines()[0] == "trainer: 2 instances of m:Trainer"
    for words in (
        "shared by trainer, sync; it needs 1 GPU, 4 CPUs",
        "gpu: nodes with pool=gpu",
        "after rollout",
        "at most 3 times in 10m",
        "nodes with zone=a",
    ):
        assert words in done.stdout
    wrong = run_command("explain", str(file), "trian", "--cluster", CLUSTER)
    assert wrong.returncode == 2
    assert "there is no role 'trian' (did you mean 'trainer'?)" in wrong.stderr
    assert wrong.stderr.count("fix  ") == 1
    assert f"fix  dovetail explain {file} trainer\n" in wrong.stderr


def test_what_does_not_fit_is_reported_with_the_line_of_the_role(file: Path) -> None:
    done = run_command("plan", str(file), "--cluster", "2x(16cpu, 64GB){pool=gpu, zone=a}")
    assert done.returncode == 3
    assert f"{file}:6:5  group 'train' (1 GPU, 4 CPUs" in done.stderr
    assert "no GPU" in done.stderr


def test_values_of_the_command_line_replace_those_of_the_file(file: Path) -> None:
    done = run_command("plan", str(file), "--cluster", CLUSTER, "--set", "roles.rollout.workers=[5, 6]", "--json")
    assert json.loads(done.stdout)["workers"]["rollout"] == 5
    words = ("--set", "roles.rolout.workers=3", "--set", "roles.x*.slots=2")
    refused = run_command("plan", str(file), "--cluster", CLUSTER, *words)
    assert refused.returncode == 2
    assert "there is no role 'rolout' (did you mean 'rollout'?)" in refused.stderr
    assert "fix  --set roles.rollout.workers=3" in refused.stderr
    assert "no role matches 'x*'" in refused.stderr
    wrong = run_command("explain", str(file), "--cluster", CLUSTER, "--set", "roles.rollout.slots=0")
    assert wrong.returncode == 2
    assert "fix  --set roles.rollout.slots=1" in wrong.stderr
    unknown = run_command("plan", str(file), "--cluster", CLUSTER, "--set", "roles.rollout.slotz=2")
    assert "fix  --set roles.rollout.slots=2" in unknown.stderr


def test_options_and_commands_of_pipelines_are_refused_for_actors(file: Path) -> None:
    refused = run_command("plan", str(file), "--mode", "waves")
    assert (refused.returncode, "--mode cannot be used with an actors file" in refused.stderr) == (2, True)
    run = run_command("run", str(file))
    assert (run.returncode, "is an actors file, not a pipeline" in run.stderr) == (2, True)
    assert f"fix  dovetail actors up {file}\n" in run.stderr
