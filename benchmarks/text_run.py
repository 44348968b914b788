"""One run of the text benchmark, in its own process, which imports no more than necessary.

    python text_run.py plain|fused|unfused|ordered ENGINE SOURCE SINK

Prints the number of rows that were kept, the wall time and CPU of the run without start-up (`run_*`), and the CPU of
this process with start-up (`driver_cpu_s`). On Ray it runs twice and prints when the second run began and ended: the
caller measures the CPU of all of Ray's processes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time

from plain_loop import run_plain_loop
from text_operators import OPERATORS

CLUSTER = "1x(2cpu, 8GB)"
"""Two workers of one CPU, or five of 0.4."""
CPUS = 2


def dovetail(kind: str, engine: str, source: str, sink: str, run_dir: str) -> int:
    import dovetail as dt  # not in the process of the plain loop

    unfused = kind == "unfused"
    needs = dt.Resources(cpus=0.4 if unfused else 1)
    stages = [dt.Stage(operator.__name__, dt.each(operator), needs, fuse=not unfused) for operator in OPERATORS]
    pipe = dt.Pipeline(stages, name="text")
    ordered = kind == "ordered"
    cluster = CLUSTER if engine == "local" else "auto"
    run = dt.run(pipe, source, engine, cluster, sink=sink, ordered=ordered, run_dir=run_dir, progress=False)
    return run.wait().delivered


def second_run(kind: str, engine: str, source: str) -> tuple[int, float, float]:
    """Rows kept, start and end of a second run in this process."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kept = dovetail(kind, engine, source, f"{folder}/again.jsonl", f"{folder}/run")
    return kept, began, time.monotonic()


def cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    kind, engine, source, sink = sys.argv[1:]
    on_ray = kind != "plain" and engine != "local"
    if on_ray:  # a private Ray has the CPUs that this process may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CPUS])
    began, before_s = time.perf_counter(), cpu_s(resource.RUSAGE_SELF)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "plain":
            kept = run_plain_loop(OPERATORS, source, sink)
        else:
            kept = dovetail(kind, engine, source, sink, f"{folder}/run")
    wall_s = time.perf_counter() - began
    driver_s, workers_s = cpu_s(resource.RUSAGE_SELF), cpu_s(resource.RUSAGE_CHILDREN)
    result: dict[str, float] = {"kept": kept, "run_wall_s": wall_s, "driver_cpu_s": driver_s}
    if on_ray:
        kept_again, result["second_began"], result["second_ended"] = second_run(kind, engine, source)
        assert kept_again == kept
    else:
        result["run_cpu_s"] = driver_s - before_s + workers_s
    print(json.dumps(result))


if __name__ == "__main__":
    main()
