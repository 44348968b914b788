"""`dovetail export`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from command import run_command
from dovetail.export.exported_files import is_unedited

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


def export(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = run_command("export", *words, cwd=folder)
    assert "Traceback" not in done.stderr
    return done


def test_options_alone_describe_a_deployment(tmp_path: Path) -> None:
    done = export(tmp_path, "compose", "--app", "tasks", "--gpus", "2", "--name", "train")
    assert (done.returncode, done.stdout.split()) == (
        0,
        ["deploy/compose.yaml", "deploy/Dockerfile", "deploy/Dockerfile.gpu"],
    )
    data = yaml.safe_load((tmp_path / "deploy" / "compose.yaml").read_text())
    assert (data["name"], list(data["services"])) == ("train", ["redis", "metrics", "worker-cpu", "worker-gpu"])
    build = data["services"]["worker-cpu"]["build"]
    context = (tmp_path / "deploy" / build["context"]).resolve()
    assert context == tmp_path
    assert (context / build["dockerfile"]).exists(), "a Dockerfile is named from the folder of the code"
    assert all(is_unedited(path.read_text()) for path in (tmp_path / "deploy").iterdir())


def test_a_file_and_options_are_written_for_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "deploy.yaml").write_text(
        "apps: [tasks]\npools: {cpu: {workers: [1, 4], job_timeout: 1h, grace: 1m}}\n"
    )
    done = export(
        tmp_path, "kubernetes", "deploy.yaml", "-o", "k8s", "--image", "r/x:1", "--set", "pools.cpu.workers=[1, 9]"
    )
    assert done.returncode == 0, done.stderr
    assert "note: pool cpu: jobs may take 1 h 00 min" in done.stderr
    scaled = list(yaml.safe_load_all((tmp_path / "k8s" / "autoscaling.yaml").read_text()))
    assert scaled[1]["spec"]["maxReplicaCount"] == 9
    listed = yaml.safe_load((tmp_path / "k8s" / "kustomization.yaml").read_text())["resources"]
    assert all((tmp_path / "k8s" / name).exists() for name in listed)
    assert "r/x:1" in (tmp_path / "k8s" / "workers.yaml").read_text()


def test_modules_that_an_image_would_not_contain_are_noted(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "jobs.py").touch()
    words = ("--app", "tasks", "--app", "tasks.py", "--app", "pkg.jobs", "--app", "pkg", "--app", "tsaks")
    noted = export(tmp_path, "compose", *words).stderr
    assert noted.count("note:") == 1
    assert "note: there is no tsaks in this folder" in noted
    assert "note:" not in export(tmp_path, "compose", *words, "--image", "r/jobs:1").stderr


def test_files_are_printed(tmp_path: Path) -> None:
    done = export(tmp_path, "kubernetes", "--app", "tasks", "-o", "-")
    assert "# --- workers.yaml\n" in done.stdout
    texts = json.loads(export(tmp_path, "kubernetes", "--app", "tasks", "-o", "-", "--json").stdout)
    assert list(tmp_path.iterdir()) == []
    assert yaml.safe_load(texts["kustomization.yaml"])["kind"] == "Kustomization"
    data = json.loads(export(tmp_path, "compose", "--app", "tasks", "--json").stdout)
    assert data == {"folder": "deploy", "files": ["compose.yaml", "Dockerfile"], "written": data["files"]}


def test_edited_files_are_overwritten_only_by_force(tmp_path: Path) -> None:
    words = ("compose", "--app", "tasks")
    export(tmp_path, *words)
    edited = tmp_path / "deploy" / "Dockerfile"
    edited.write_text(f"{edited.read_text()}RUN apt-get install ffmpeg\n")
    assert export(tmp_path, *words, "--name", "x").returncode == 2
    assert "ffmpeg" in edited.read_text()
    assert "name: jobs" in (tmp_path / "deploy" / "compose.yaml").read_text(), "all files, or none"
    done = export(tmp_path, *words, "--force")
    assert (done.returncode, "ffmpeg" in edited.read_text()) == (0, False)
    assert "wrote 1 file, 1 unchanged" in done.stderr


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("compose",), ("error[DT646]", "fix  --app tasks")),
        (("kubernetes", "none.yaml"), ("no such file",)),
        (("kubernetes", "--app", "t", "--set", "pools.cpu.worker=3"), ("did you mean 'workers'?",)),
        (("compose", "--app", "t", "--name", "My Jobs"), ("name should be at most 20 lower-case letters",)),
        (("compose", "--app", "t", "-o", "there/deploy"), ("error[DT025]", "there")),
    ],
)
def test_what_is_wrong_is_one_clear_error(tmp_path: Path, words: tuple[str, ...], texts: tuple[str, ...]) -> None:
    (tmp_path / "there").touch()
    done = export(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert [text for text in texts if text not in done.stderr] == [], done.stderr
    assert "fix  " in done.stderr


def test_a_deploy_file_with_pools_refuses_gpus(tmp_path: Path) -> None:
    (tmp_path / "deploy.yaml").write_text("apps: [tasks]\n")
    done = export(tmp_path, "compose", "deploy.yaml", "--gpus", "1")
    assert "fix  --set pools.gpu.gpus=1" in done.stderr
    assert export(tmp_path, "compose", "deploy.yaml", "--set", "pools.gpu.gpus=1").returncode == 0
