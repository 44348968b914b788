"""Helpers for tests of recipes: files, rows, runs, results."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.recipes.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from dovetail.observe.summary import RunSummary

GPU_CLUSTER = "1x(32cpu, 128GB, 2xgpu:20GB)"
HERE = "1x(2cpu, 4GB)"
GPU_FILTERS = (
    *("image_text_similarity_filter", "image_maniqa_filter", "image_aesthetics_filter", "image_nsfw_filter"),
    *("image_watermark_filter", "image_text_matching_filter", "video_aesthetics_filter"),
)
"""Seven filters that run on GPUs."""


def seven(parameters: str, *more: str, head: str = "mode: streaming") -> str:
    lines = [f"  - {name}: {{{parameters}}}" for name in GPU_FILTERS] + [f"  - {line}" for line in more]
    return "\n".join([*([head] if head else []), "process:", *lines, ""])


FAILING = seven("num_proc: 2, num_gpus: 1, num_cpus: 6", "text_length_filter: {num_proc: 8}")
"""Seven GPU filters that do not fit together."""
MANUAL = seven("memory: '1500MB', num_gpus: 0.25, num_proc: 8, num_cpus: 2")
OPTIMIZED = seven("memory: '1500MB'", head="")


def write(folder: Path, text: str | bytes, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def load(folder: Path, text: str, sets: Sequence[str] = (), **typed: Any) -> Recipe:
    return Recipe.load(write(folder, text), sets, **typed)


def wrong(folder: Path, text: str | bytes, sets: Sequence[str] = (), name: str = "recipe.yaml") -> list[dt.Problem]:
    """All problems of a recipe; each must have a place and a fix."""
    path = write(folder, text, name)
    with pytest.raises(dt.ConfigError) as raised:
        Recipe.load(path, sets)
    assert raised.value.exit_code == 2
    for problem in raised.value.problems:
        assert problem.place, problem
        assert problem.fix_texts, problem
    return [replaced(problem, folder) for problem in raised.value.problems]


def replaced(problem: dt.Problem, folder: Path) -> dt.Problem:
    """The problem with the name of the file instead of its path."""
    return problem.at(problem.place.replace(f"{folder}{os.sep}", ""))


def typed(fix: str) -> tuple[list[str], str | None]:
    """(--set, --mode) of a fix, parsed as by a shell; it must have no other options."""
    words = shlex.split(fix.removeprefix("or "))
    sets = [value for option, value in zip(words[::2], words[1::2], strict=True) if option == "--set"]
    modes = [value for option, value in zip(words[::2], words[1::2], strict=True) if option == "--mode"]
    assert 2 * (len(sets) + len(modes)) == len(words), fix
    return sets, modes[0] if modes else None


def fix_works(folder: Path, text: str, cluster: str, fix: str, mode: str | None = None) -> dt.Plan:
    sets, other = typed(fix)
    return load(folder, text, sets).plan(cluster, other or mode)


# --- rows


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def some_rows(count: int = 200) -> list[dict[str, Any]]:
    """Rows with short and long texts."""
    return [{"text": f"Row {n}: " + "some words here " * (n % 7), "n": n} for n in range(count)]


def run(folder: Path, process: str, head: str = "", rows: Iterable[Any] | None = None, **how: Any) -> RunSummary:
    """Run a recipe from in.jsonl to out.jsonl, unless `head` names other files."""
    if rows is not None:
        write_rows(folder / "in.jsonl", rows)
    if "dataset_path" not in head:
        head += "\ndataset_path: in.jsonl"
    if "export_path" not in head:
        head += "\nexport_path: out.jsonl"
    settings = {"cluster": HERE, "probe": False, "run_dir": str(folder / "run")} | how
    return load(folder, f"{head}\nprocess: {process}\n").run(**settings)


def errors(folder: Path) -> list[dict[str, Any]]:
    """Records of failed rows."""
    path = folder / "run" / "errors" / "errors.jsonl"
    return read_rows(path) if path.exists() else []


def own_operator(folder: Path, name: str, code: str) -> str:
    """Write a module with custom operators beside the recipe; returns its name."""
    (folder / f"{name}.py").write_text(code)
    return name
