"""A first pipeline as a new user would write it; prints the CPU seconds until its first result.

Run by overhead.py in a fresh interpreter: nothing is imported here that dovetail does not import by itself.
"""

from __future__ import annotations

import os
import resource
import sys

import dovetail as dt


def greet(names: list[str]) -> list[str]:
    return [f"hello {name}" for name in names]


def spent() -> float:
    """By this process and by all below it, which still live."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + sum(map(on_cpu, below(os.getpid())))


def below(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib costs something to import
        with open(f"/proc/{pid}/task/{task}/children") as file:  # noqa: PTH123
            found += [int(child) for child in file.read().split()]
    return found + [pid for child in found for pid in below(child)]


def on_cpu(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:  # noqa: PTH123
        return int(file.read().split()[0]) / 1e9


if __name__ == "__main__":
    pipeline = dt.Pipeline([dt.Stage("greet", greet)])
    # as somebody's first run: with what earlier ones measured, both greetings would be made at the same time
    items, (engine, folder) = ["you", "all"], sys.argv[1:3]
    with dt.run(pipeline, items, engine=engine, run_dir=folder, progress=False, profiles=False) as run:
        assert next(iter(run)) == "hello you"
        seconds = spent()
    print(seconds)
