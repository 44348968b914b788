"""Run the tests on Ray on a busy machine: `python tests/ray_under_load.py [TIMES] [PER_CORE] [TEST...]`.

The output of each round is kept in a file, whose path is printed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ray_aids import spinning

TIMES, PER_CORE = 5, 5


def main(times: int = TIMES, per_core: int = PER_CORE, *tests: str) -> int:
    """Print a line per round; returns the number of failed rounds."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "ray", "--durations=30", *(tests or ("tests",))]
    failed = 0
    with spinning(per_core):
        for number in range(1, times + 1):
            began = time.monotonic()
            ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
            failed += ended.returncode != 0
            output_lines = ended.stdout.strip().splitlines()
            lines = [line for line in output_lines if line.startswith(("FAILED", "ERROR"))] + output_lines[-1:]
            kept = Path(tempfile.gettempdir(), f"ray_under_load-{number}.txt")
            kept.write_text(ended.stdout + ended.stderr)
            lines.append(str(kept))
            print(f"{number} of {times}: {time.monotonic() - began:.0f} s", *lines, sep="\n  ", flush=True)  # noqa: T201
    return failed


if __name__ == "__main__":
    counts = [int(text) for text in sys.argv[1:3]] + [TIMES, PER_CORE][len(sys.argv[1:3]) :]
    sys.exit(main(counts[0], counts[1], *sys.argv[3:]))
