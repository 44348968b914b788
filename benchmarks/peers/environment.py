"""A virtual environment for peers, made on first use beside this file and left out of the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run_in(name: str, packages: list[str], script: str, arguments: list[str], *, limit_s: float | None = None) -> Any:
    """The JSON that a script of this folder prints, run with these packages installed."""
    folder = HERE / f".venv-{name}"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # our own pins are not the peer's
        environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, env=environment)
        (folder / ".ready").touch()
    command = [str(python), str(HERE / script), *arguments]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit_s)
    return json.loads(shown.stdout.splitlines()[-1])
