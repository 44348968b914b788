"""Runs in the peers' environment: CPU seconds of three trivial stages over integers, small and large runs in turn.

    python streams_overhead.py ray_actors|xenna|ray_data SMALL LARGE REPEAT

One warm process each: what it takes to start is said apart. All processes below this one count, those that have ended
too where they were waited for.
"""

import ctypes
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("XENNA_RAY_METRICS_PORT", "0")

import psutil
import ray

STAGES = 3
CPUS = 4
BATCH = 64


PR_SET_CHILD_SUBREAPER = 36


def spent() -> float:
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue
        total += used.user + used.system + used.children_user + used.children_system
    return total


def ray_actors() -> Callable[[int], None]:
    """An actor per stage, called once per item; results pass from actor to actor unopened."""
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)

    class Same:
        def call(self, items: list[int]) -> list[int]:
            return items

    actors = [ray.remote(Same).remote() for _ in range(STAGES)]

    def run(items: int) -> None:
        ahead: list[Any] = []
        for number in range(items):
            made: Any = [number]
            for actor in actors:
                made = actor.call.remote(made)
            ahead.append(made)
            if len(ahead) == 1000:
                ray.get(ahead)
                ahead.clear()
        ray.get(ahead)

    return run


def xenna() -> Callable[[int], None]:
    """Streaming, one worker per stage, batches of 64."""
    from cosmos_xenna.pipelines import v1

    class Same(v1.Stage):  # type: ignore[misc]
        @property
        def stage_batch_size(self) -> int:
            return BATCH

        @property
        def required_resources(self) -> Any:
            return v1.Resources(cpus=0.25, gpus=0)

        def process_data(self, in_data: list[int]) -> list[int]:
            return in_data

    def run(items: int) -> None:
        config = v1.PipelineConfig(
            execution_mode=v1.ExecutionMode.STREAMING,
            return_last_stage_outputs=True,
            actor_pool_verbosity_level=v1.VerbosityLevel.NONE,
            monitoring_verbosity_level=v1.VerbosityLevel.NONE,
            mode_specific=v1.StreamingSpecificSpec(executor_verbosity_level=v1.VerbosityLevel.NONE),
        )
        stages = [v1.StageSpec(Same(), num_workers=1) for _ in range(STAGES)]
        out = v1.run_pipeline(v1.PipelineSpec(input_data=list(range(items)), stages=stages, config=config))
        assert out is not None
        assert len(out) == items

    return run


def ray_data() -> Callable[[int], None]:
    """Three maps, which it fuses."""
    import ray.data

    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    def same(row: dict[str, Any]) -> dict[str, Any]:
        return row

    def run(items: int) -> None:
        made = ray.data.range(items)
        for _ in range(STAGES):
            made = made.map(same)
        assert sum(1 for _ in made.iter_rows()) == items

    return run


def main() -> None:
    name, small, large, repeat = sys.argv[1], *map(int, sys.argv[2:])
    run = {"ray_actors": ray_actors, "xenna": xenna, "ray_data": ray_data}[name]()
    run(small)
    found: dict[str, Any] = {"start": spent(), "small": [], "large": []}
    for _ in range(repeat):
        for size, items in (("small", small), ("large", large)):
            before = spent()
            run(items)
            found[size].append(spent() - before)
    print(json.dumps(found), flush=True)


def end() -> None:
    """Also of those whom Ray leaves behind: as orphans they come to us."""
    ray.shutdown()
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)


ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
try:
    main()
finally:
    end()
