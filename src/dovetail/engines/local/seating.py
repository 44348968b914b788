"""What does a seat mean for a process? Its environment variables: which cards it sees, how many threads it may use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.engines.local.spec import Home
    from dovetail.resources.seat import Seat

NOT_INHERITED = (
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
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
    "POLARS_MAX_THREADS",
)
INSIDE = "DOVETAIL_INSIDE"
"""Says that a process is a worker of a run: what it starts uses the run's seats, not others."""
AT_START_ONLY = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "ASAN_", "LC_", "LANG", "TZ")
"""Variables that count only when a process begins: whoever sets one gets an interpreter of its own."""

OF_RAY = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_LD_PRELOAD_ON_WORKERS", "SPT_NOENV")
"""What Ray tells a process of its own: a child that has these would take itself for one, too."""
PATHS_OF_RAY = ("/ray/thirdparty_files", "/ray/_private/workers")
"""Folders that Ray puts before all others where it is imported: what is in them is for Ray only."""
SET_BY_RAY = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")
"""What Ray sets in a process of its own after it began, where the user did not."""


def inherited_in(agent: Mapping[str, str], at_start: Mapping[str, str], home: Home) -> dict[str, str]:
    """What workers of an agent, a process of Ray on another machine, have in common: what its machine says, and the
    driver's variables before that. `at_start` is what the agent had when it began."""
    found = {name: value for name, value in agent.items() if name not in OF_RAY}
    for name in SET_BY_RAY:
        if name not in at_start:
            found.pop(name, None)
    return found | home.variables


def environment(
    inherited: Mapping[str, str],
    seat: Seat,
    own: Mapping[str, str] | None = None,
    devices: Mapping[int, str] | None = None,
) -> dict[str, str]:
    """For a process on this seat. `own` is what its stage asks for, and wins; `devices` are the names under which CUDA
    knows the node's cards, by position (without them: their numbers)."""
    names = devices or {}
    found = {name: value for name, value in inherited.items() if name not in NOT_INHERITED}
    threads = str(max(1, math.ceil(seat.cpu_milli / 1000)))
    for name in THREADS:
        found.setdefault(name, threads)
    found["CUDA_VISIBLE_DEVICES"] = ",".join(names.get(card, str(card)) for card in seat.gpus)
    found[INSIDE] = "1"
    return found | dict(own or {})


def rendezvous(seats: Sequence[Seat], rank: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
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


def starts_fresh(own: Mapping[str, str] | None) -> bool:
    """Whether a forked process would not heed these variables."""
    return any(name.startswith(AT_START_ONLY) for name in own or ())
