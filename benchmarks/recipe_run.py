"""One run of the recipe benchmark, in its own process.

    python recipe_run.py plain|dovetail ENGINE RECIPE SOURCE SINK

`plain` calls the operators of the recipe in one loop (`plain_loop.py`), `dovetail` runs `dovetail run RECIPE`. Prints
the number of rows that were kept.
"""

from __future__ import annotations

import json
import os
import sys

CPUS = 2


def plain(recipe: str, source: str, sink: str) -> int:
    from dovetail.documents.parser import read_document
    from dovetail.recipes.catalogue import native_class
    from dovetail.recipes.operators.base import STATS_FIELD
    from plain_loop import run_plain_loop

    operators = []
    for entry in read_document(recipe).data["process"]:
        ((name, given),) = entry.items()
        cls = native_class(name)
        assert cls is not None, name
        operators.append(cls(**(given or {})))
    return run_plain_loop(operators, source, sink, remove=[STATS_FIELD])


def dovetail(engine: str, recipe: str, source: str, sink: str) -> int:
    from dovetail.cli import main

    if engine == "ray":  # a private Ray has the CPUs that this process may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CPUS])
    sys.argv = ["dovetail", "run", recipe, "--engine", engine, "--source", source, "--sink", sink]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    with open(sink, "rb") as lines:  # noqa: PTH123
        return sum(1 for _ in lines)


def main() -> None:
    kind, engine, recipe, source, sink = sys.argv[1:]
    kept = plain(recipe, source, sink) if kind == "plain" else dovetail(engine, recipe, source, sink)
    print(json.dumps({"kept": kept}))


if __name__ == "__main__":
    main()
