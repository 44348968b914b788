"""CPU cost of the Ray engine per item, against Ray actors called once per item in the same Ray.

    python overhead_ray.py SMALL LARGE REPEAT     prints when which run began and ended; overhead.py looks at the CPU

One process with a Ray of its own: first a small run that starts it, then per kind small and large runs in turn. What
counts is the CPU of everything below the process, Ray's servers included, looked at from outside.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dovetail as dt
from fresh import spend
from measured import as_installed

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
"""Kind, size, begin and end."""


def _same(items: list[int]) -> list[int]:
    return items


def pipeline(kind: str) -> dt.Pipeline:
    """Each of its units has one worker, however many CPUs there are."""
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
    """Ours first: the peer's actors must not idle beside them."""
    found = [timed("start", "small", ours("unfused"), small)]
    for kind in KINDS:
        found += turns(kind, ours(kind), (small, large), repeat)
    return found + actors(repeat)


def measured(small: int, large: int, repeat: int) -> dict[str, Any]:
    """Kind -> items of both sizes, and CPU seconds of each run; and of the first one, which starts Ray."""
    arguments = [str(Path(__file__)), str(small), str(large), str(repeat)]
    with tempfile.TemporaryDirectory() as folder:
        environment = as_installed() | {"DOVETAIL_HOME": f"{folder}/home"}
        spent = spend(arguments, environment, everybody=True)
    assert spent.tally is not None
    found: dict[str, Any] = {"start_cpu_s": 0.0, "runs": {}}
    for kind, size, began, ended in spent.said:
        seconds = spent.tally.between(began, ended)
        if kind == "start":
            found["start_cpu_s"] = spent.tally.between(0.0, ended)
            continue
        items = ACTORS_ITEMS if kind == ACTORS else (small, large)
        run = found["runs"].setdefault(kind, {"items": items, "small": [], "large": []})
        run[size].append(seconds)
    return found


def main(asked: Iterable[str]) -> None:
    print(json.dumps(marks(*map(int, asked))))


if __name__ == "__main__":
    main(sys.argv[1:])
