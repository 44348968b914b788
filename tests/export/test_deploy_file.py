"""Deploy files: values, mistakes with their places, and the JSON Schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import dovetail as dt
from dovetail.export.deploy_file import make_deployment, read_deploy_file, schema
from export.deployments import FULL, deployment

if TYPE_CHECKING:
    from pathlib import Path

MISTAKES = """\
apps: []
nmae: train
pools:
  cpu: {cpu: 4, workers: [3, 1]}
  gpu: {gpus: 65, queues: [a b], slots: 0, grace: soon}
redis: {fsync: never, disk: 5}
ray: {groups: {}, version: latest, pipelines: {pages: {}}}
prometheus: prometheus:9090
"""


def mistakes(data: dict[str, Any]) -> str:
    with pytest.raises(dt.ConfigError) as caught:
        make_deployment({"apps": ["tasks"], **data})
    assert all(problem.fixes for problem in caught.value.problems)
    return str(caught.value)


def test_a_file_of_one_line_has_defaults_for_the_rest() -> None:
    found = make_deployment({"apps": ["tasks"]})
    assert (found.name, list(found.pools), found.ray, found.uses_gpus) == ("jobs", ["cpu"], None, False)
    assert (found.image_of(0), found.image_of(1), found.job_files) == ("jobs:latest", "jobs-gpu:latest", None)


def test_all_mistakes_are_one_error_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(MISTAKES)
    with pytest.raises(dt.ConfigError) as caught:
        read_deploy_file(path, {}, ["pools.cpu.memory=many"])
    places = [problem.place.removeprefix(f"{path}:") for problem in caught.value.problems]
    assert places == [
        "--set pools.cpu.memory=many", "1:1", "2:1", "4:9", "4:17", "5:9", "5:28", "5:34", "5:44",
        "6:9", "6:23", "7:7", "7:19", "7:48", "8:1",
    ]  # fmt: skip
    assert "did you mean 'name'?" in str(caught.value)
    assert all(problem.fixes for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        ({"pools": {"cpu": {"workers": [1, 4]}, "gpu": {"workers": 2}}}, ("no queue of its own", "workers: 4")),
        ({"autoscaler": "hpa", "pools": {"cpu": {"workers": [0, 4]}}}, ("autoscaler: keda", "workers: [1, 4]")),
        ({"autoscaler": "none", "pools": {"cpu": {"workers": [0, 4]}}}, ("cannot start the first one",)),
        ({"files": "/data/jobs"}, ("not in a shared folder", "shared_folder: /data/jobs")),
        ({"files": "/data/jobs", "shared_folder": "/dat"}, ("not in a shared folder",)),
        ({"ray": {"pipelines": {"a": {"file": "p.yaml"}}}}, ("shared_folder: /shared",)),
        ({"ray": {}, "shared_folder": "/shared"}, ("ray has no pipelines", "keep_cluster: true")),
        (
            {"ray": {"pipelines": {"a": {"file": "p.yaml", "run_dir": "/tmp/x"}}}, "shared_folder": "/s"},
            ("run_dir: /s/runs/a",),
        ),
        ({"image": "my image"}, ("image should be the name of an image", 'image: "registry.example.org/jobs:1"')),
        ({"gpu_image": "Train"}, ("gpu_image should be the name of an image",)),
        ({"redis": {"image": "redis:"}}, ("redis.image should be",)),
        ({"pools": {"Big_One": {}}}, ("'Big_One' is not the name of a pool", "fix  big-one: ...")),
        (
            {"pools": {"gpu": {"workers": [0, 4], "ingest": {"l": "t:f"}}}},
            ("nothing reads the lists", "workers: [1, 4]"),
        ),
        ({"pools": {"gpu": {"ingest": {"l": "f"}}}}, ("should be `package.module:function`",)),
        ({"pools": {"cpu": {"queues": []}}}, ("serves no queue",)),
        ({"pools": {"cpu": 4}}, ("pools.cpu should be a mapping",)),
        ({"pools": []}, ("pools should be pools by name",)),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(data: dict[str, Any], texts: tuple[str, ...]) -> None:
    error = mistakes(data)
    assert [text for text in texts if text not in error] == [], error


@pytest.mark.parametrize(
    "image",
    ["jobs", "redis:7.4", "localhost:5000/a/b_c:V1.2-x", "GHCR.io/org/app", "nvcr.io/a/b@sha256:" + 64 * "0"],
)
def test_names_of_images_are_accepted(image: str) -> None:
    assert make_deployment({"apps": ["tasks"], "image": image}).image == image


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text("- apps\n")
    with pytest.raises(dt.ConfigError, match="DT01"):
        read_deploy_file(path, {"apps": ["tasks"]})


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deploy.json"
    path.write_text(json.dumps(FULL))
    found = read_deploy_file(path, {"image": "other:2"}, ["pools.gpu.workers=[1, 8]", "redis.fsync=everysec"])
    assert (found.image, found.pools["gpu"].most, found.redis.fsync) == ("other:2", 8, "everysec")


def test_the_autoscaler_aims_at_the_jobs_that_a_worker_runs_at_once() -> None:
    sizes = {"a": {"cpus": 2}, "b": {"cpus": 4}, "c": {"cpus": 16}, "d": {"gpus": 4}, "e": {"slots": 7}}
    found = make_deployment({"apps": ["t"], "pools": {**sizes, "f": {"slots": 7, "jobs_per_worker": 3}}})
    assert [pool.target_jobs for pool in found.pools.values()] == [1, 2, 4, 4, 7, 3]


def test_the_schema_accepts_a_complete_file_and_refuses_mistakes() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    validator.validate(FULL)
    assert deployment().ray is not None
    for wrong in ({}, {"apps": ["t"], "nmae": "x"}, {"apps": ["t"], "pools": {"cpu": {"cpus": "4"}}}):
        assert not validator.is_valid(wrong)
