"""CPU, wall time and memory of a new process from start to exit, with all of its children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resource_usage import PeakSampler, children_cpu_s, tree_pss_mb
from tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

SAMPLE_S = 0.1
TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one process and its descendants: those that were waited for, or, with a tally, all."""

    cpu_s: float
    wall_s: float
    peak_mb: float
    """Maximum memory of all of them together, shared pages counted once; 0: not measured."""
    output: Any
    """The JSON value on the last line of stdout."""
    tally: Tally | None = None


def run_process(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    memory: bool = False,
    orphans: bool = False,
) -> Cost:
    """Run a new Python to its end. One at a time only: its CPU is the increase for all children of this process.

    `orphans` includes processes that no parent waits for, such as Ray's servers, with an error of a few hundredths of a
    second.
    """
    before_s, began = children_cpu_s(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        peak = PeakSampler(lambda: tree_pss_mb(process.pid), SAMPLE_S) if memory else None
        tally = Tally(process.pid) if orphans else None
        printed, _ = process.communicate(timeout=TIMEOUT_S)
        wall_s = time.perf_counter() - began
        if peak is not None:
            peak.stop()
        if tally is not None:
            tally.stop()
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(arguments)} ended with {process.returncode}:\n{errors.read()}")
    cpu_s = children_cpu_s() - before_s if tally is None else tally.total_s
    return Cost(cpu_s, wall_s, 0.0 if peak is None else peak.mb, json.loads(printed.splitlines()[-1]), tally)


def take_turns(
    kinds: Sequence[str], repeat: int, run: Callable[[str], Cost], *, warm_up: bool = True
) -> dict[str, list[Cost]]:
    """Run each kind in turn, so that other load on the machine affects all of them. A warm-up round is not counted."""
    costs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
    for number in range(0 if warm_up else 1, repeat + 1):
        for kind in kinds:
            cost = run(kind)
            if number:
                costs[kind].append(cost)
    return costs


def with_bytecode(folder: str | Path) -> dict[str, str]:
    """An environment in which modules are compiled once, like those of an installed package."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder)}


def as_installed() -> dict[str, str]:
    """An environment in which bytecode is read from, and written to, the folders of the modules."""
    both = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    return {name: value for name, value in os.environ.items() if name not in both}


def without_bytecode() -> dict[str, str]:
    """An environment in which every process compiles what it imports."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"}
