"""Runs of benchmarks with small sizes; their figures are not meaningful."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_benchmark(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON result of a benchmark in its own process."""
    result = folder / "result.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments, "--json", str(result)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def run_benchmark_here(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The same in this process, where the fixture `in_process` applies."""
    result = folder / "result.json"
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--json", str(result)])
    importlib.import_module(name).main()
    found: dict[str, Any] = json.loads(result.read_text())
    return found
