"""`--engine ray:...` on a real cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cli.jobs import CommandFolder
from ray_aids import foreign_actor

if TYPE_CHECKING:
    from pathlib import Path

    from ray_aids import FakeCluster


@pytest.fixture
def place(tmp_path: Path) -> CommandFolder:
    return CommandFolder(tmp_path / "jobs")


def test_cluster_show_lists_usage_and_holders(ray_cluster: FakeCluster, place: CommandFolder, tmp_path: Path) -> None:
    engine = ("--engine", f"ray:{ray_cluster.address}")
    with foreign_actor(ray_cluster, tmp_path, node="b", num_gpus=1, num_cpus=1):
        done = place.run("cluster", "show", *engine)
        assert done.returncode == 0, done.stderr
        assert "4 nodes, 16 CPUs" in done.stdout
        assert "used:     1 of 16 CPUs, 1 of 4 GPUs" in done.stdout
        assert f"{ray_cluster.nodes['b'].dovetail_name}: actor Holder" in done.stdout
        assert "[..........][aaaaaaaaaa]" in done.stdout
        data = json.loads(place.run("cluster", "show", *engine, "--json").stdout)
        assert data["totals"]["gpus"] == 4
        (holder,) = data["ray"]["holders"]
        assert (holder["resources"], holder["gpus"]) == ({"CPU": 1.0, "GPU": 1.0}, ["0"])
        done = place.run("cluster", "show", *engine, "--fit", "gpus=1")
        assert "3 workers fit" in done.stdout


def test_a_plan_uses_what_others_leave_and_names_them(
    ray_cluster: FakeCluster, place: CommandFolder, tmp_path: Path
) -> None:
    engine = ("--engine", f"ray:{ray_cluster.address}")
    with foreign_actor(ray_cluster, tmp_path, node="d", num_cpus=4):
        done = place.run("plan", "p.yaml", *engine)
        assert done.returncode == 0, done.stderr
        assert "a part of the Ray cluster is in use" in done.stdout
        assert "in use:" in done.stdout
        assert "actor Holder" in done.stdout
        dry = place.run("run", "p.yaml", *engine, "--dry-run")
        assert dry.returncode == 0, dry.stderr
        assert "actor Holder" in dry.stdout
    assert "in use:" not in place.run("plan", "p.yaml", *engine).stdout


def test_a_request_that_no_node_can_meet_is_reported_in_the_words_of_the_file(
    ray_cluster: FakeCluster, place: CommandFolder
) -> None:
    place.file("source: in.jsonl", "double")
    sets = ("--set", "stages.0.resources.cpus=99")
    done = place.run("run", "p.yaml", "--engine", f"ray:{ray_cluster.address}", *sets)
    assert done.returncode == 3, done.stderr
    assert "fits on 0 of 4 nodes" in done.stderr
    assert "--cluster" not in done.stderr


def test_a_run_on_ray_is_asked_for_by_name(ray_cluster: FakeCluster, place: CommandFolder) -> None:
    words = ("--engine", f"ray:{ray_cluster.address}", "--share", "0.5", "--env-from", "HOME")
    done = place.run_process("run", "p.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert len(place.result()) == 20
    asked = json.loads((place.runs()[0] / "run.json").read_text())["more"]["asked"]
    assert (asked["engine"], asked["share"]) == (f"ray:{ray_cluster.address}", 0.5)
    assert asked["env_from"] == ["HOME"]
