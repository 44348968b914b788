"""Environment variables of a worker process, derived from its seat: visible GPUs, threads, ranks of a gang."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import TYPE_CHECKING

from dovetail.machine.job_seat import SEAT_VARIABLE
from dovetail.pipeline.stage import GANG_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.resources.seat import Seat

DROPPED_VARIABLES = (*GANG_VARIABLES, "CUDA_VISIBLE_DEVICES", SEAT_VARIABLE)
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


def agent_environment(
    agent: Mapping[str, str], at_start: Mapping[str, str], driver_context: DriverContext
) -> dict[str, str]:
    """Environment common to all workers of an agent (a Ray process on another machine): that of its machine, overridden
    by the driver's variables. `at_start` is the agent's environment at its start."""
    found = {name: value for name, value in agent.items() if name not in RAY_PROCESS_VARIABLES}
    for name in RAY_SET_VARIABLES:
        if name not in at_start:
            found.pop(name, None)
    return found | driver_context.variables


def seat_environment(
    inherited: Mapping[str, str],
    seats: Sequence[Seat],
    rank: int = 0,
    own: Mapping[str, str] | None = None,
    devices: Mapping[int, str] | None = None,
) -> dict[str, str]:
    """Environment of the process of a rank. `own` are the variables of its stage, which take precedence; `devices` are
    the CUDA names of the node's cards by position (without them: their indices)."""
    names = devices or {}
    found = {name: value for name, value in inherited.items() if name not in DROPPED_VARIABLES}
    threads = str(max(1, math.ceil(seats[rank].cpu_milli / 1000)))
    for name in THREAD_VARIABLES:
        found.setdefault(name, threads)
    found["CUDA_VISIBLE_DEVICES"] = ",".join(names.get(card, str(card)) for card in visible_cards(seats, rank))
    found[INSIDE_WORKER_VARIABLE] = "1"
    return found | dict(own or {})


def visible_cards(seats: Sequence[Seat], rank: int) -> tuple[int, ...]:
    """Positions of the cards that the process of a rank sees, in the order of CUDA_VISIBLE_DEVICES.

    As under torchrun, all ranks of a node see all cards of their gang on that node in the same order: the first card of
    every rank by local rank, then the second cards, and so on. So LOCAL_RANK is the index of a card of its own rank,
    unless ranks share cards. A card is listed once: CUDA shows no device at all if a name occurs twice.
    """
    here = [seat.gpus for seat in seats if seat.node == seats[rank].node]
    return tuple(dict.fromkeys(card for cards in zip_longest(*here) for card in cards if card is not None))


def gpu_indices(seats: Sequence[Seat], rank: int) -> tuple[int, ...]:
    """Indices of a rank's own cards among those that its process sees."""
    visible = visible_cards(seats, rank)
    return tuple(visible.index(card) for card in seats[rank].gpus)


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
