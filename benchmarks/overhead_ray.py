"""CPU cost of the Ray engine per item, against Ray actors called once per item in the same Ray.

    python overhead_ray.py SMALL LARGE REPEAT     prints start and end of each run; overhead.py measures the CPU

One process with a private Ray: first a small run that starts it, then small and large runs of each kind in turn. The
CPU is that of all descendants of the process, including Ray's servers, sampled from outside.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dovetail as dt
from process_cost import as_installed, run_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

STAGES = ("first", "second", "third")
KINDS = {"unfused": (False, 1), "fused": (True, 1), "unfused_64": (False, 64), "fused_64": (True, 64)}
"""Whether fused, and items per call of the stages."""
ACTORS = "ray_actors"
ACTORS_ITEMS = (300, 2300)
SHARE = 0.3
"""CPUs of each of three stages: together they fit into one."""

Mark = tuple[str, str, float, float]
"""Kind, size, start and end."""


def _same(items: list[int]) -> list[int]:
    return items


def pipeline(kind: str) -> dt.Pipeline:
    """Each unit has one worker, for any number of CPUs."""
    fused, batch = KINDS[kind]
    if not fused:
        needs = dt.Resources(cpus=SHARE)
        return dt.Pipeline([dt.Stage(name, _same, needs, workers=1, fuse=False, batch_size=batch) for name in STAGES])
    all_of_it = dt.Resources(cpus=dt.Cluster.local().nodes[0].cpu_milli // 1000)
    return dt.Pipeline([dt.Stage(name, _same, all_of_it, batch_size=batch) for name in STAGES])


def ours(kind: str) -> Callable[[int], int]:
    pipe = pipeline(kind)

    def run(items: int) -> int:
        with tempfile.TemporaryDirectory() as folder:
            return sum(dt.run(pipe, range(items), "ray", run_dir=f"{folder}/run", progress=False))

    return run


def timed(kind: str, size: str, run: Callable[[int], int], items: int) -> Mark:
    began = time.monotonic()
    total = run(items)
    assert total == items * (items - 1) // 2, total
    return kind, size, began, time.monotonic()


def turns(kind: str, run: Callable[[int], int], sizes: Sequence[int], repeat: int) -> list[Mark]:
    """A small run that is not counted, then small and large ones in turn."""
    run(sizes[0])
    both = tuple(zip(("small", "large"), sizes, strict=True))
    return [timed(kind, size, run, items) for _ in range(repeat) for size, items in both]


def actors(repeat: int) -> list[Mark]:
    from peers.ray_actors import Actors  # when Ray is up

    peer = Actors()
    found = turns(ACTORS, peer.run, ACTORS_ITEMS, repeat)
    peer.end()
    return found


def marks(small: int, large: int, repeat: int) -> list[Mark]:
    """Dovetail runs first, so that the actors of the peer do not idle beside it."""
    found = [timed("start", "small", ours("unfused"), small)]
    for kind in KINDS:
        found += turns(kind, ours(kind), (small, large), repeat)
    return found + actors(repeat)


def measured(small: int, large: int, repeat: int) -> dict[str, Any]:
    """Items of both sizes and CPU seconds of each run, per kind; and CPU seconds of the first run, which starts Ray."""
    arguments = [str(Path(__file__)), str(small), str(large), str(repeat)]
    with tempfile.TemporaryDirectory() as folder:
        environment = as_installed() | {"DOVETAIL_HOME": f"{folder}/home"}
        cost = run_process(arguments, environment, orphans=True)
    assert cost.tally is not None
    found: dict[str, Any] = {"start_cpu_s": 0.0, "runs": {}}
    for kind, size, began, ended in cost.output:
        seconds = cost.tally.between(began, ended)
        if kind == "start":
            found["start_cpu_s"] = cost.tally.between(0.0, ended)
            continue
        items = ACTORS_ITEMS if kind == ACTORS else (small, large)
        run = found["runs"].setdefault(kind, {"items": items, "small": [], "large": []})
        run[size].append(seconds)
    return found


def main(asked: Iterable[str]) -> None:
    print(json.dumps(marks(*map(int, asked))))


if __name__ == "__main__":
    main(sys.argv[1:])
