"""One run of the recipe benchmark, in a process of its own.

    python recipe_one.py plain|ours ENGINE RECIPE SOURCE SINK

`plain`: the operators of the recipe, called one after another for each row in one loop that reads, calls and writes.
`ours`: what `dovetail run RECIPE` does. Both print how many rows were kept.
"""

from __future__ import annotations

import json
import os
import sys

CPUS = 2


def plain(recipe: str, source: str, sink: str) -> int:
    """The same operators with the same parameters, and nothing around them."""
    from dovetail.documents.parser import read_document
    from dovetail.recipes.catalogue import native_class

    operators = []
    for entry in read_document(recipe).data["process"]:
        ((name, given),) = entry.items()
        cls = native_class(name)
        assert cls is not None, name
        operators.append(cls(**(given or {})))
    kept = 0
    with open(source, encoding="utf-8") as lines, open(sink, "w", encoding="utf-8") as out:  # noqa: PTH123
        for line in lines:
            row = json.loads(line)
            for operator in operators:
                row = operator(row)
                if row is None:
                    break
            else:
                kept += 1
                row.pop("__dj__stats__", None)
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
    return kept


def ours(engine: str, recipe: str, source: str, sink: str) -> int:
    from dovetail.cli import main

    if engine == "ray":  # a Ray of our own has the CPUs that its process may use
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
    kept = plain(recipe, source, sink) if kind == "plain" else ours(engine, recipe, source, sink)
    print(json.dumps({"kept": kept}))


if __name__ == "__main__":
    main()
