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
}


def test_every_example_is_listed_here() -> None:
    assert sorted(PROMISED) == [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_keeps_its_promise(path: Path) -> None:
    shown = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert [line for line in PROMISED[path.name] if line not in shown.stdout] == []
