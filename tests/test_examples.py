"""Every example runs and prints the expected lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

import dovetail as dt

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPES = sorted((Path(__file__).resolve().parents[1] / "examples" / "recipes").glob("*.yaml"))
MACHINE = "1x(32cpu, 128GB, 2xgpu:20GB)"
EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("[0-9]*.py"))
EXPECTED = {
    "01_what_fits.py": ["caption is placed on node-0 card 0", "train is placed on", "error[DT110]", "error[DT111]"],
    "02_plan.py": ["bottleneck:", "what one more would bring", "caption workers are placed on [('node-0',"],
    "03_simulate.py": ["without failures", "bottleneck", "delivered: 10000 of 10000 items"],
    "04_run.py": [
        "words on 1x(4cpu, 4GB)",
        "(2, ('end', 2))",
        "999 results, in order: True",
        "item 500 in stage parse, after 4 attempts: JSONDecodeError",
        "1000 of 1000 items in, 999 out, 1 failed",
    ],
    "05_serve.py": [
        "model: ValueError: 'is it bad?' is a question",
        "[0, 1, 2, 3, 0, 1, 2, 3] 2000 results",
        "[1, -2, 2]",
        "error[DT376] the service is drained",
    ],
    "06_http.py": ['200 {"words": 3}', "400 ", "422 ", '"code": "DT378"', "drained"],
    "07_files.py": [
        "exists: False",
        "finished work is kept in .lengths.",
        "2000 of 2000 items in, 1999 out, 1 failed",
        "failed: BadRow: .../pages-1.jsonl:1001: not JSON",
        "1999 rows, each once and in order: True",
    ],
    "08_ray.py": ["results by node: {'", "last result: hello 3996001", "the same 2000 results: True"],
    "09_recipe.py": [
        "wrong.yaml:2:5  there is no operator 'text_lenght_filter' (did you mean 'text_length_filter'?)",
        "wrong.yaml:3:24  words_num_filter: min_num is 'many'",
        "8 operators at once need 92.0 CPUs and 14.0 GPUs; the cluster has 32.0 CPUs and 2.0 GPUs",
        "sequential: 8 waves, 2 workers of image_maniqa_filter",
        "image_maniqa_filter: 4 workers on card 0, 0 on card 1",
        "120 of 120 rows done, 65 out, 1 failed",
        "row 64, fix_unicode_mapper: BadField: field 'text' is int, not a string",
        "in the order of the input: True",
        "row 0 has 48 words, counted by count_words of own_operators.py",
        "processed_text: ...Write to <EMAIL> or see",
    ],
    "10_backfill.py": [
        "words by words: 10,000 rows in 10 fragments to compute",
        "Total:      4 CPUs of 8 CPUs, 16GB",
        "stage 'too_large' (64 CPUs) fits on 0 of 1 nodes",
        "AttributeError in row 17179869895, fragment 4, offset 711",
        "1 row failed, the others are filled",
        "row 17179869895 (fragment 4, offset 711): AttributeError: 'NoneType' object has no attribute 'split'",
        "computed: 1, errors: 0",
        "words: nothing to do, 10,000 rows are already filled",
        "{'words': 7, 'letters': 30, 'spaces': 6, 'loud': 'CLIP 2 SHOWS A STREET AT NIGHT'}",
        "{'words': 7, 'letters': 30, 'spaces': 6, 'loud': None}",
        "words failed: 0 failed column 'words', row 17179869895",
    ],
    "11_actors.py": [
        "trainer    0.25 CPU in train  node-0           1      1",
        "trainer, pool, sync share one process instead of 3: 0.75 CPUs apart, 0.25 together",
        "iteration   0  training   18.5  validation   16.5  ###",
        "ready, 6 of 6 instances ready",
        "goal of 190 steps reached: True",
    ],
    "12_jobs.py": [
        "4 trainings; the same key gives the same job: True",
        "train() cannot be called with these arguments: missing a required argument: 'rate'",
        "active jobs: 0, available slots: 2",
        "the best: {'hidden': 32, 'rate': ",
        "the urgent job, submitted last, started first: True",
        "output of a training: 21 lines",
        "dead letter without_data: ['error: FileNotFoundError: no data', 'error: FileNotFoundError: no data']",
        "requeued: [<JobState.READY: 'ready'>]",
        "removed: 6 finished jobs",
    ],
}
ON_RAY = ["08_ray.py"]
ON_ONE_CPU = ["10_backfill.py"]
"""Examples whose workers import Lance: a worker per CPU would take most of the time of these tests."""


def test_every_example_has_expected_lines() -> None:
    assert sorted(EXPECTED) == [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name not in ON_RAY], ids=lambda path: path.name)
def test_an_example_prints_the_expected_lines(path: Path, tmp_path: Path) -> None:
    run_example(path, folder=tmp_path)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name in ON_RAY], ids=lambda path: path.name)
def test_an_example_on_ray_prints_the_expected_lines(path: Path, tmp_path: Path, ray_address: str) -> None:
    run_example(path, f"ray:{ray_address}", folder=tmp_path)


@pytest.mark.long
def test_actors_learn_the_same_on_ray_and_draw_their_learning_curve(tmp_path: Path, ray_address: str) -> None:
    path = next(path for path in EXAMPLES if path.name == "11_actors.py")
    run_example(path, "--engine", f"ray:{ray_address}", "--report", "curve.svg", folder=tmp_path)
    picture = ElementTree.parse(tmp_path / "curve.svg").getroot()
    curves = [one.attrib["points"].split() for one in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points) for points in curves] == [30, 30]
    heights = [float(point.split(",")[1]) for point in curves[1]]
    assert heights[-1] < heights[0] - 250, "the curve rises; y grows downwards"


@contextmanager
def one_cpu() -> Iterator[None]:
    """Processes that this thread starts may use one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run_example(path: Path, *arguments: str, folder: Path) -> None:
    words = [sys.executable, str(path), *arguments]
    with one_cpu() if path.name in ON_ONE_CPU else nullcontext():
        shown = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert [line for line in EXPECTED[path.name] if line not in shown.stdout] == []


# --- recipes


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if path.stem != "failing_config"], ids=lambda path: path.stem
)
def test_the_plan_of_a_recipe_fits_on_the_machine(path: Path) -> None:
    recipe = dt.Recipe.load(path)
    plan = recipe.plan(MACHINE)
    assert {step.name for step in recipe.steps} <= set(plan.workers)
    for wave in range(len(plan.waves)):
        at_once = [unit for unit in plan.units if unit.wave == wave]
        assert sum(unit.workers * unit.shape.cpu_milli for unit in at_once) <= 32_000
        shares = [share for unit in at_once for seat in plan.seats[unit.stages[0]] for share in seat.cards]
        for card in (0, 1):
            assert sum(share.milli for share in shares if share.card == card) <= 1000
            assert sum(share.memory_bytes for share in shares if share.card == card) <= 20 << 30


def test_the_failing_recipe_reports_the_sum_and_is_planned_sequentially() -> None:
    recipe = dt.Recipe.load(next(path for path in RECIPES if path.stem == "failing_config"))
    with pytest.raises(
        dt.InfeasibleError, match=r"92\.0 CPUs and 14\.0 GPUs; the cluster has 32\.0 CPUs and 2\.0 GPUs"
    ):
        recipe.plan(MACHINE)
    assert len(recipe.plan(MACHINE, mode="sequential").waves) == len(recipe.steps)


def test_the_manual_recipe_does_not_fit_in_streaming_mode() -> None:
    recipe = dt.Recipe.load(next(path for path in RECIPES if path.stem == "manual_resource_config"))
    with pytest.raises(dt.InfeasibleError, match=r"112\.0 CPUs and 14\.0 GPUs"):
        recipe.plan(MACHINE, mode="streaming")


def test_the_gpu_operators_of_the_recipes_use_a_gpu_by_default() -> None:
    from dovetail.recipes.catalogue import known_operators

    for name in ("failing_config", "manual_resource_config", "optimized_config"):
        recipe = dt.Recipe.load(next(path for path in RECIPES if path.stem == name))
        assert sum(known_operators()[step.op].cuda for step in recipe.steps) == 7


@pytest.mark.usefixtures("in_process")
def test_the_text_recipe_cleans_texts(tmp_path: Path) -> None:
    path = next(path for path in RECIPES if path.stem == "clean_text")
    summary = dt.Recipe.load(path, sink=str(tmp_path / "clean.jsonl")).run(run_dir=tmp_path / "run", probe=False)
    rows = [json.loads(line) for line in (tmp_path / "clean.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (summary.read, summary.delivered, summary.failed) == (120, len(rows), 1)
    texts = [row["text"] for row in rows]
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if len(text) < 50 or "https://" in text or "@" in text or "Ã" in text]
    assert all(row["length"] == len(row["text"].split()) for row in rows)
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)


def test_examples_import_only_public_names() -> None:
    imported = [line for path in EXAMPLES for line in path.read_text().splitlines() if line.startswith("from dovetail")]
    assert imported == []
