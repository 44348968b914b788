"""Specification of a worker process: hosted objects, paths, and environment variables derived from its seat."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.resources.seat import Seat


class DriverContext(NamedTuple):
    """The driver's place, as an engine on another machine is told of it."""

    path: tuple[str, ...]
    """Its sys.path."""
    folder: str
    """Its working folder."""
    variables: dict[str, str]
    """What workers get of its environment."""


class HostedSpec(NamedTuple):
    """An object that the worker hosts."""

    name: str
    work: bytes
    """By cloudpickle: what the user's script defines, and a tuple of stages, a class or a function."""
    slots: int
    writer: bytes = b""
    """By pickle: who writes its results where they belong; empty: they are sent on."""


class WorkerSpec(NamedTuple):
    """Plain data, pickled once per process."""

    worker: int
    hosted: tuple[HostedSpec, ...]
    seat: Seat
    rank: int
    ranks: int
    local_rank: int
    path: tuple[str, ...]
    """sys.path of the driver."""
    folder: str
    """The working folder of the driver."""
    spool_folder: str
    """Where payloads go that must not lie in memory."""
    pool_bytes: int
    """Shared memory that a worker keeps warm, at most."""
    cpus: tuple[int, ...] = ()
    """The CPUs it is bound to; none: it is not."""

    def part_name(self) -> str:
        """For a file that no other process ever had: not of a run that was killed and goes on, either."""
        return f"{self.worker}-{self.rank}-{os.getpid()}-{time.time_ns():x}"


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
"""Says that a process is a worker of a run: what it starts uses the run's seats, not others."""
EXEC_ONLY_PREFIXES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "ASAN_", "LC_", "LANG", "TZ")
"""Variables that count only when a process begins: whoever sets one gets an interpreter of its own."""

RAY_PROCESS_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_LD_PRELOAD_ON_WORKERS", "SPT_NOENV")
"""What Ray tells a process of its own: a child that has these would take itself for one, too."""
RAY_PATH_SUFFIXES = ("/ray/thirdparty_files", "/ray/_private/workers")
"""Folders that Ray puts before all others where it is imported: what is in them is for Ray only."""
RAY_SET_VARIABLES = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")
"""What Ray sets in a process of its own after it began, where the user did not."""


def agent_environment(agent: Mapping[str, str], at_start: Mapping[str, str], home: DriverContext) -> dict[str, str]:
    """What workers of an agent, a process of Ray on another machine, have in common: what its machine says, and the
    driver's variables before that. `at_start` is what the agent had when it began."""
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
    """For a process on this seat. `own` is what its stage asks for, and wins; `devices` are the names under which CUDA
    knows the node's cards, by position (without them: their numbers)."""
    names = devices or {}
    found = {name: value for name, value in inherited.items() if name not in DROPPED_VARIABLES}
    threads = str(max(1, math.ceil(seat.cpu_milli / 1000)))
    for name in THREAD_VARIABLES:
        found.setdefault(name, threads)
    found["CUDA_VISIBLE_DEVICES"] = ",".join(names.get(card, str(card)) for card in seat.gpus)
    found[INSIDE_WORKER_VARIABLE] = "1"
    return found | dict(own or {})


def rendezvous_variables(seats: Sequence[Seat], rank: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """How the ranks of a gang find each other, in the words of torchrun."""
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
    """Its number among the ranks of its node."""
    return sum(seat.node == seats[rank].node for seat in seats[:rank])


def needs_fresh_interpreter(own: Mapping[str, str] | None) -> bool:
    """Whether a forked process would not heed these variables."""
    return any(name.startswith(EXEC_ONLY_PREFIXES) for name in own or ())
