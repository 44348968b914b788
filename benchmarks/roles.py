"""Time and CPU of calls between actors, against bare Ray actors and pickling through pipes.

    python benchmarks/roles.py --json result.json
    python benchmarks/roles.py --engines local --calls 2000

One warm process calls a method that returns its argument, waits for the result, and calls again: an instance in another
process, two objects of one process, an instance from another instance, and on Ray an instance and a bare Ray actor in
turn. Wall time is the median of all calls, CPU that of all processes. Then 1,000 calls are kept in flight over 8
instances, and arrays are passed as arguments.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import dovetail as dt
import report
from hello import cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    Array = np.ndarray[Any, np.dtype[np.float64]]

SMALL = dt.Resources(cpus=0.1)
CLUSTER = "1x(4cpu, 8GB)"
INSTANCES = 8
IN_FLIGHT = 1000
WARM_UP = 200
ROUNDS = 5
"""Rounds in which kinds take turns, so that other load on the machine affects all of them."""


class Times(NamedTuple):
    wall_us: float
    cpu_us: float


class Echo:
    """Returns its argument."""

    def same(self, value: Any) -> Any:
        return value

    def first(self, values: Array) -> float:
        return float(values[0])


class Caller:
    """Calls other roles and measures it."""

    worker: Any

    def measure(self, role: str, calls: int) -> Times:
        target = self.worker.actors[role].one
        return timed(lambda: target.same(1).result(), calls)


def timed(call: Callable[[], object], calls: int) -> Times:
    """Median wall time of a call, and mean CPU of this process and its descendants."""
    for _ in range(min(WARM_UP, calls)):
        call()
    walls = []
    began_s = cpu_s()
    for _ in range(calls):
        began = time.perf_counter()
        call()
        walls.append(time.perf_counter() - began)
    return Times(statistics.median(walls) * 1e6, (cpu_s() - began_s) / calls * 1e6)


def in_turn(kinds: dict[str, Callable[[], object]], calls: int) -> dict[str, Times]:
    rounds = [{kind: timed(call, max(1, calls // ROUNDS)) for kind, call in kinds.items()} for _ in range(ROUNDS)]
    return {
        kind: Times(*(statistics.median(one[kind][figure] for one in rounds) for figure in (0, 1))) for kind in kinds
    }


def system() -> dt.ActorSystem:
    return dt.ActorSystem(
        [
            dt.Role("echo", Echo, resources=SMALL),
            dt.Role("near", Echo, resources=SMALL, together="one"),
            dt.Role("caller", Caller, resources=SMALL, together="one"),
            dt.Role("many", Echo, workers=INSTANCES, resources=SMALL),
        ],
        name="roles",
    )


# ------------------------------------------------------------------------------------------------------------- local


def measure_local(calls: int, arrays: int, mb: float, folder: Path) -> dict[str, Any]:
    with system().launch(engine="local", cluster=CLUSTER, run_dir=folder / "local") as live:
        echo = live.echo[0]
        local = timed(lambda: echo.same(1).result(), calls)
        colocated = Times(*live.caller[0].measure("near", calls).result())
        between = Times(*live.caller[0].measure("echo", calls).result())
        return {
            "local_call_us": local.wall_us,
            "local_call_cpu_us": local.cpu_us,
            "colocated_call_us": colocated.wall_us,
            "colocated_call_cpu_us": colocated.cpu_us,
            "worker_call_us": between.wall_us,
            **calls_in_flight(live, max(calls, IN_FLIGHT)),
            **pass_arrays(live, arrays, mb),
        }


def calls_in_flight(live: dt.LiveSystem, calls: int) -> dict[str, float]:
    def run(count: int) -> None:
        assert sum(live.many.map("same", range(count), window=IN_FLIGHT)) == count * (count - 1) // 2

    run(IN_FLIGHT)
    began, began_s = time.perf_counter(), cpu_s()
    run(calls)
    return {"calls_s": calls / (time.perf_counter() - began), "calls_cpu_us": (cpu_s() - began_s) / calls * 1e6}


def pass_arrays(live: dt.LiveSystem, count: int, mb: float) -> dict[str, float]:
    """Large arguments, against a process that unpickles them from a pipe."""
    array = np.arange(int(mb * 1e6) // 8, dtype=np.float64)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=answer_pipe, args=(theirs,), daemon=True)
    process.start()
    theirs.close()

    def through_pipe() -> None:
        ours.send(array)
        assert ours.recv() == 0.0

    def as_argument() -> None:
        assert live.echo[0].first(array).result() == 0.0

    found = in_turn({"array": as_argument, "pipe": through_pipe}, count * ROUNDS)
    ours.close()
    process.join()
    array_ms, pipe_ms = found["array"].wall_us / 1e3, found["pipe"].wall_us / 1e3
    return {"array_ms": array_ms, "pipe_array_ms": pipe_ms, "array_ratio": pipe_ms / array_ms}


def answer_pipe(connection: Connection) -> None:
    while True:
        try:
            connection.send(float(connection.recv()[0]))
        except EOFError:
            return


# --------------------------------------------------------------------------------------------------------------- Ray


def measure_ray(calls: int, folder: Path) -> dict[str, Any]:
    with system().launch(engine="ray", run_dir=folder / "ray") as live:
        import ray  # when it is up

        actor: Any = ray.remote(num_cpus=0)(Echo).remote()
        echo = live.echo[0]
        kinds: dict[str, Callable[[], object]] = {
            "ray_call": lambda: echo.same(1).result(),
            "bare_ray_call": lambda: ray.get(actor.same.remote(1)),
        }
        found = in_turn(kinds, calls)
        ray.kill(actor)
    result: dict[str, Any] = {f"{kind}_us": times.wall_us for kind, times in found.items()}
    result |= {f"{kind}_cpu_us": times.cpu_us for kind, times in found.items()}
    return result


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--engines", default="local,ray", help="engines to measure, default %(default)s")
    arguments.add_argument("--calls", type=int, default=5000, help="calls of each kind, default %(default)s")
    arguments.add_argument("--arrays", type=int, default=10, help="arrays per round, default %(default)s")
    arguments.add_argument("--mb", type=float, default=10.0, help="size of an array, default %(default)s")
    chosen = arguments.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "local" in chosen.engines:
            result |= measure_local(chosen.calls, chosen.arrays, chosen.mb, folder)
        if "ray" in chosen.engines:
            result |= measure_ray(chosen.calls, folder)
    if "bare_ray_call_us" in result:
        result["ray_ratio"] = result["ray_call_us"] / result["bare_ray_call_us"]
        if "local_call_us" in result:
            result["local_ratio"] = result["local_call_us"] / result["bare_ray_call_us"]
    report.table(("figure", "value"), list(result.items()))
    report.write(chosen.json, result)


if __name__ == "__main__":
    main()
