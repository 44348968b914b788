"""A first pipeline as a new user would write it; prints the CPU seconds until its first result.

Run by overhead.py in a new interpreter. It imports no module that dovetail does not import.
"""

from __future__ import annotations

import os
import resource
import sys

import dovetail as dt


def greet(names: list[str]) -> list[str]:
    return [f"hello {name}" for name in names]


def cpu_s() -> float:
    """CPU seconds of this process and of its descendants that are alive."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + sum(map(scheduled_s, descendants(os.getpid())))


def descendants(pid: int) -> list[int]:
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - importing pathlib takes time
            with open(f"/proc/{pid}/task/{task}/children") as file:  # noqa: PTH123
                found += [int(child) for child in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []
    return found + [pid for child in found for pid in descendants(child)]


def scheduled_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/schedstat") as file:  # noqa: PTH123
            return int(file.read().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0.0


if __name__ == "__main__":
    pipeline = dt.Pipeline([dt.Stage("greet", greet)])
    # profiles=False, as in a first run: with measured rates, both items would be processed at the same time
    items, (engine, folder) = ["you", "all"], sys.argv[1:3]
    with dt.run(pipeline, items, engine=engine, run_dir=folder, progress=False, profiles=False) as run:
        assert next(iter(run)) == "hello you"
        seconds = cpu_s()
    print(seconds)
