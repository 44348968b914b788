"""Environment variables of a worker process, derived from its seat: visible GPUs, threads, ranks of a gang."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.resources.seat import Seat

DROPPED_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
)
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
    "POLARS_MAX_THREADS",
)
INSIDE_WORKER_VARIABLE = "DOVETAIL_INSIDE"
"""Marks a process as a worker of a run: processes that it starts use the run's seats."""
EXEC_ONLY_PREFIXES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "ASAN_", "LC_", "LANG", "TZ")
"""Variables that are read only at interpreter start: a stage that sets one gets its own interpreter."""

RAY_PROCESS_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_LD_PRELOAD_ON_WORKERS", "SPT_NOENV")
"""Variables that Ray sets for its own processes; a child process with them would take itself for one."""
RAY_PATH_SUFFIXES = ("/ray/thirdparty_files", "/ray/_private/workers")
"""Folders that Ray prepends to sys.path; for Ray only."""
RAY_SET_VARIABLES = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")
"""Variables that Ray sets after the start of its process, unless the user did."""


def agent_environment(agent: Mapping[str, str], at_start: Mapping[str, str], home: DriverContext) -> dict[str, str]:
    """Environment common to all workers of an agent (a Ray process on another machine): that of its machine, overridden
    by the driver's variables. `at_start` is the agent's environment at its start."""
    found = {name: value for name, value in agent.items() if name not in RAY_PROCESS_VARIABLES}
    for name in RAY_SET_VARIABLES:
        if name not in at_start:
            found.pop(name, None)
    return found | home.variables


def seat_environment(
    inherited: Mapping[str, str],
    seat: Seat,
    own: Mapping[str, str] | None = None,
    devices: Mapping[int, str] | None = None,
) -> dict[str, str]:
    """Environment of a process on this seat. `own` are the variables of its stage, which take precedence; `devices` are
    the CUDA names of the node's cards by position (without them: their indices)."""
    names = devices or {}
    found = {name: value for name, value in inherited.items() if name not in DROPPED_VARIABLES}
    threads = str(max(1, math.ceil(seat.cpu_milli / 1000)))
    for name in THREAD_VARIABLES:
        found.setdefault(name, threads)
    found["CUDA_VISIBLE_DEVICES"] = ",".join(names.get(card, str(card)) for card in seat.gpus)
    found[INSIDE_WORKER_VARIABLE] = "1"
    return found | dict(own or {})


def rendezvous_variables(seats: Sequence[Seat], rank: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """Rendezvous variables of a gang, named as by torchrun."""
    nodes = list(dict.fromkeys(seat.node for seat in seats))
    group = str(nodes.index(seats[rank].node))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(seats)),
        "LOCAL_RANK": str(local_rank(seats, rank)),
        "LOCAL_WORLD_SIZE": str(sum(seat.node == seats[rank].node for seat in seats)),
        "GROUP_RANK": group,
        "NODE_RANK": group,
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def local_rank(seats: Sequence[Seat], rank: int) -> int:
    """Its rank among the ranks of its node."""
    return sum(seat.node == seats[rank].node for seat in seats[:rank])


def needs_fresh_interpreter(own: Mapping[str, str] | None) -> bool:
    """Whether a forked process would ignore these variables."""
    return any(name.startswith(EXEC_ONLY_PREFIXES) for name in own or ())
