"""Every example runs, and shows what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("[0-9]*.py"))
PROMISED = {
    "01_what_fits.py": ["caption sits on node-0 card 0", "train sits on", "error[DT110]", "error[DT111]"],
    "02_plan.py": ["bottleneck:", "what one more would bring", "caption workers sit on [('node-0',"],
    "03_simulate.py": ["a quiet day", "bottleneck", "every item came out: 40000 of 40000"],
    "04_run.py": [
        "words on 1x(4cpu, 4GB)",
        "(2, ('end', 2))",
        "999 results, in order: True",
        "item 500 in stage parse, after 3 attempts: JSONDecodeError",
        "1000 of 1000 items in, 999 out, 1 set aside",
    ],
    "05_serve.py": [
        "model says ValueError: 'is it bad?' is a question",
        "[0, 1, 2, 3, 0, 1, 2, 3] 2000 results",
        "[1, -2, 2]",
        "error[DT376] the service is drained",
    ],
    "06_http.py": ['200 {"words": 3}', "400 ", "422 ", '"code": "DT378"', "drained"],
    "07_files.py": [
        "is there: False",
        "what was done is kept in .lengths.",
        "2000 of 2000 items in, 1999 out, 1 set aside",
        "set aside: BadRow: .../pages-1.jsonl:1001: not JSON",
        "1999 rows, each once and in order: True",
    ],
    "08_ray.py": ["results by node: {'", "the last one: hello 3996001", "the same 2000 results: True"],
}
ON_RAY = ["08_ray.py"]


def test_every_example_is_listed_here() -> None:
    assert sorted(PROMISED) == [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name not in ON_RAY], ids=lambda path: path.name)
def test_an_example_runs_and_keeps_its_promise(path: Path) -> None:
    keeps_its_promise(path)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name in ON_RAY], ids=lambda path: path.name)
def test_an_example_on_ray_keeps_its_promise(path: Path, ray_address: str) -> None:
    keeps_its_promise(path, f"ray:{ray_address}")


def keeps_its_promise(path: Path, *arguments: str) -> None:
    shown = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert [line for line in PROMISED[path.name] if line not in shown.stdout] == []
