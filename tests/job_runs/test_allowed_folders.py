"""Which files and paths a worker lets jobs use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dovetail.job_runs.allowed_folders import AllowedFolders, file_problems, module_file
from dovetail.jobs.run_submission import FOLDERS_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "allowed"
    (found / "data").mkdir(parents=True)
    (found / "data" / "a.jsonl").touch()
    (found / "p.yaml").write_text("stages: []")
    (tmp_path / "secret.yaml").write_text("stages: []")
    return found


def allowed(*places: object) -> AllowedFolders:
    return AllowedFolders.of_worker({FOLDERS_VARIABLE: json.dumps([str(place) for place in places])})


@pytest.mark.parametrize("path", ["p.yaml", "data/a.jsonl", "data/*.jsonl", "data/*/x.jsonl", "new/out.jsonl", ""])
def test_paths_in_a_folder_are_allowed(folder: Path, path: str) -> None:
    assert allowed(folder).has(f"{folder}/{path}")


@pytest.mark.parametrize(
    "path", ["../secret.yaml", "data/../../secret.yaml", "*/../../secret.yaml", "link/secret.yaml"]
)
def test_paths_that_leave_the_folder_are_not(folder: Path, path: str) -> None:
    (folder / "link").symlink_to(folder.parent)
    assert not allowed(folder).has(f"{folder}/{path}")


@pytest.mark.parametrize("path", ["/etc/passwd", "p.yaml", "-", "/*", "s3://bucket/x.jsonl"])
def test_other_paths_are_not(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(folder)
    assert not allowed(folder).has(path)


def test_a_folder_whose_name_begins_alike_is_another_one(folder: Path) -> None:
    assert not allowed(folder).has(f"{folder}-too/p.yaml")


def test_urls_are_allowed_by_their_prefix() -> None:
    places = allowed("s3://bucket/tables")
    assert places.has("s3://bucket/tables/clips.lance")
    assert not places.has("s3://bucket/tables-of-others/clips.lance")
    assert not places.has("s3://bucket/tables/../x.lance")
    assert not places.has("/bucket/tables/x")


def test_a_worker_without_folders_allows_nothing(folder: Path) -> None:
    assert not AllowedFolders.of_worker({}).has(str(folder))
    [problem] = file_problems(AllowedFolders.of_worker({}), str(folder / "p.yaml"))
    assert "without --runs" in problem.evidence[0]


def test_only_yaml_files_run_because_results_may_lie_beside_them(folder: Path) -> None:
    assert list(file_problems(allowed(folder), str(folder / "p.yaml"))) == []
    [problem] = file_problems(allowed(folder), str(folder / "data" / "a.jsonl"))
    assert "not a .yaml file" in str(problem.message)
    [problem] = file_problems(allowed(folder), str(folder / "missing.yaml"))
    assert "does not exist" in str(problem.message)
    [problem] = file_problems(allowed(folder), str(folder.parent / "secret.yaml"))
    assert "is not in a folder" in str(problem.message)


def test_a_function_of_a_backfill_is_looked_for_in_its_folder_only(folder: Path) -> None:
    (folder / "functions.py").touch()
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    assert module_file(allowed(folder), str(folder), "functions:length") == (folder / "functions.py", [])
    assert module_file(allowed(folder), str(folder), "package:length")[0] == folder / "package" / "__init__.py"
    for reference in ("os:system", "../secret:x", "functions.py:length", ":x"):
        found, [problem] = module_file(allowed(folder), str(folder), reference)
        assert found is None
        assert "there is no such module" in str(problem.message)
    found, [problem] = module_file(allowed(folder / "data"), str(folder), "functions:length")
    assert found is None
    assert "is not in a folder" in str(problem.message)
