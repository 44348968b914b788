"""One run of the text benchmark, in a process of its own that imports no more than it needs.

    python text_one.py plain|fused|unfused|ordered ENGINE SOURCE SINK

Prints how many rows were kept, and what it took since it began to work; the driver's CPU is that of this process since
it was started, imports included.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time

from text_operators import OPERATORS

CLUSTER = "1x(2cpu, 8GB)"
"""Two workers of one CPU, or five of 0.4."""


def plain(source: str, sink: str) -> int:
    """Reads, calls, writes; nothing else."""
    kept = 0
    with open(source, encoding="utf-8") as lines, open(sink, "w", encoding="utf-8") as out:  # noqa: PTH123
        for line in lines:
            row = json.loads(line)
            for operator in OPERATORS:
                row = operator(row)
                if row is None:
                    break
            else:
                kept += 1
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
    return kept


def dovetail(kind: str, engine: str, source: str, sink: str, run_dir: str) -> int:
    import dovetail as dt  # not in the plain loop's process

    unfused = kind == "unfused"
    needs = dt.Resources(cpus=0.4 if unfused else 1)
    stages = [dt.Stage(operator.__name__, dt.each(operator), needs, fuse=not unfused) for operator in OPERATORS]
    pipe = dt.Pipeline(stages, name="text")
    ordered = kind == "ordered"
    run = dt.run(pipe, source, engine, CLUSTER, sink=sink, ordered=ordered, run_dir=run_dir, progress=False)
    return run.wait().delivered


def spent_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    kind, engine, source, sink = sys.argv[1:]
    began, before_s = time.perf_counter(), spent_s(resource.RUSAGE_SELF)
    with tempfile.TemporaryDirectory() as folder:
        kept = plain(source, sink) if kind == "plain" else dovetail(kind, engine, source, sink, f"{folder}/run")
    wall_s = time.perf_counter() - began
    driver_s, workers_s = spent_s(resource.RUSAGE_SELF), spent_s(resource.RUSAGE_CHILDREN)
    found = {"kept": kept, "run_wall_s": wall_s, "run_cpu_s": driver_s - before_s + workers_s, "driver_cpu_s": driver_s}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
