"""One run of the text benchmark, in a process of its own that imports no more than it needs.

    python text_one.py plain|fused|unfused|ordered ENGINE SOURCE SINK

Prints how many rows were kept, and what it took since it began to work; the driver's CPU is that of this process since
it was started, imports included. On Ray it runs twice, and prints when the second run began and ended: what it took is
for those to see who look at all of Ray's processes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time

from text_operators import OPERATORS

CLUSTER = "1x(2cpu, 8GB)"
"""Two workers of one CPU, or five of 0.4."""
CPUS = 2


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
    cluster = CLUSTER if engine == "local" else "auto"
    run = dt.run(pipe, source, engine, cluster, sink=sink, ordered=ordered, run_dir=run_dir, progress=False)
    return run.wait().delivered


def again(kind: str, engine: str, source: str) -> tuple[int, float, float]:
    """A second run of this process: what it kept, its begin and its end."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kept = dovetail(kind, engine, source, f"{folder}/again.jsonl", f"{folder}/run")
    return kept, began, time.monotonic()


def spent_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    kind, engine, source, sink = sys.argv[1:]
    on_ray = kind != "plain" and engine != "local"
    if on_ray:  # a Ray of our own has the CPUs that its process may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CPUS])
    began, before_s = time.perf_counter(), spent_s(resource.RUSAGE_SELF)
    with tempfile.TemporaryDirectory() as folder:
        kept = plain(source, sink) if kind == "plain" else dovetail(kind, engine, source, sink, f"{folder}/run")
    wall_s = time.perf_counter() - began
    driver_s, workers_s = spent_s(resource.RUSAGE_SELF), spent_s(resource.RUSAGE_CHILDREN)
    found: dict[str, float] = {"kept": kept, "run_wall_s": wall_s, "driver_cpu_s": driver_s}
    if on_ray:
        kept_again, found["again_began"], found["again_ended"] = again(kind, engine, source)
        assert kept_again == kept
    else:
        found["run_cpu_s"] = driver_s - before_s + workers_s
    print(json.dumps(found))


if __name__ == "__main__":
    main()
