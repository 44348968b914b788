"""Do the tests on Ray also pass on a machine that is busy? `python tests/ray_under_load.py [TIMES] [PER_CORE]`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ray_aids import spinning

TIMES, PER_CORE = 5, 5


def main(times: int = TIMES, per_core: int = PER_CORE) -> int:
    """How many of the rounds failed; a line for each."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "ray", "tests"]
    failed = 0
    with spinning(per_core):
        for number in range(1, times + 1):
            began = time.monotonic()
            ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
            failed += ended.returncode != 0
            said = ended.stdout.strip().splitlines()
            lines = [line for line in said if line.startswith(("FAILED", "ERROR"))] + said[-1:]
            print(f"{number} of {times}: {time.monotonic() - began:.0f} s", *lines, sep="\n  ", flush=True)  # noqa: T201
    return failed


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
