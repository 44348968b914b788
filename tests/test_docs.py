"""Is what the documents say true? Links lead somewhere, settings are all there, and what is to be copied runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from dovetail.data import sinks, sources
from dovetail.data.writing.spec import KINDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            wrong.append(target)
    assert wrong == []


def test_the_page_on_files_names_every_kind_and_setting() -> None:
    text = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    reading, writing = text.split("\n## Sinks\n")
    assert [name for name in (*sources.KEYS, *sources.FORMATS) if f"`{name}`" not in reading] == []
    settings = [field.name for field in fields(sinks.SinkSpec)]
    assert [name for name in (*settings, *KINDS) if f"`{name}`" not in writing] == []
    assert [end for end in sources.SUFFIXES if end not in reading] == []


def test_what_is_to_be_copied_for_clusters_can_be_read() -> None:
    page = ROOT / "docs" / "ray.md"
    (job,) = (yaml.safe_load(text) for text in blocks(page, "yaml"))
    assert job["kind"] == "RayJob"
    groups = [job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    assert [pod["containers"][0]["volumeMounts"][0]["name"] for pod in pods] == ["shared"] * len(pods)
    assert [pod["volumes"][0]["name"] for pod in pods] == ["shared"] * len(pods)
    (script,) = blocks(page, "bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


def test_every_code_of_ray_says_what_to_do() -> None:
    told = re.findall(r"^\| (DT\d{3}) \| \d", (ROOT / "docs" / "ray.md").read_text(encoding="utf-8"), re.MULTILINE)
    codes = re.findall(r"^\| (DT\d{3}) \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(told) == {code for code in codes if "DT390" <= code <= "DT409"} | {"DT120"}


def test_the_files_of_the_first_ten_minutes_run(tmp_path: Path) -> None:
    page = ROOT / "docs" / "getting-started.md"
    make, steps, same = blocks(page, "python")
    (pipeline,) = blocks(page, "yaml")
    texts = {"make.py": make, "steps.py": steps, "same.py": same, "pipeline.yaml": pipeline}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "make.py"], cwd=tmp_path, check=True)
    dovetail = [sys.executable, "-m", "dovetail"]
    done = subprocess.run(
        [*dovetail, "run", "pipeline.yaml", "--limit", "100"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows] == list(range(100))
    assert all(0 <= row["score"] <= 1 for row in rows)
    reviews = tmp_path / "reviews.jsonl"
    reviews.write_text("".join(reviews.read_text(encoding="utf-8").splitlines(keepends=True)[:50]), encoding="utf-8")
    done = subprocess.run([sys.executable, "same.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "50 of 50 items in, 50 out" in done.stdout
    assert len((tmp_path / "scored.csv").read_text(encoding="utf-8").splitlines()) == 51
