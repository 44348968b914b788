"""Launch of workers: log, environment, rendezvous and CPU pinning of each rank process."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.engines.local.code_pickle import PickledWorks, work_environment
from dovetail.engines.local.protocol import Channel
from dovetail.engines.local.worker_environment import (
    RAY_PATH_SUFFIXES,
    agent_environment,
    gpu_indices,
    local_rank,
    needs_fresh_interpreter,
    rendezvous_variables,
    seat_environment,
)
from dovetail.engines.local.worker_spec import HostedSpec, WorkerSpec
from dovetail.engines.local.worker_state import LocalWorker, RankProcess
from dovetail.machine.private_files import make_private_folder, open_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.control.commands import HostedObject, StartWorker
    from dovetail.engines.local.breadcrumbs import BreadcrumbTable
    from dovetail.engines.local.forkserver_client import ProcessServer
    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.resources.cluster import Cluster

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORT_COUNT, PORT_ATTEMPTS = 20_000, 12_000, 20
"""Ports for the rendezvous of gangs: below the kernel's ephemeral range and above the ports of Ray's workers, so that a
port that is free now is likely to stay free."""
WORKER_POOL_BYTES = 256 << 20
"""Maximum shared memory that one worker keeps for reuse."""


class WorkerLauncher:
    """Starts worker processes and caches what is the same for all workers of a unit."""

    def __init__(
        self,
        folder: Path | None,
        spool: Path,
        cluster: Cluster | None,
        breadcrumbs: BreadcrumbTable,
        *,
        pin_cpus: bool,
        driver_context: DriverContext | None = None,
    ) -> None:
        """`driver_context`: given if the driver is another process."""
        self._log_folder = folder / "logs" if folder is not None else None
        self._spill = str(spool)
        self._breadcrumbs = breadcrumbs
        self._pin_cpus = pin_cpus
        self._pinned = 0
        self._pickled_works = PickledWorks()
        self._passed: list[Any] = []
        """Files that must stay open until the fork server has received them."""
        nodes = cluster.nodes if cluster is not None else ()
        self.devices: dict[str, Mapping[int, str]] = {
            node.name: dict(enumerate(card.uuid for card in node.gpus if card.uuid)) for node in nodes
        }
        """Node -> position of a card -> its CUDA name."""
        self._driver_context = driver_context
        self.inherited = (
            None if driver_context is None else agent_environment(os.environ, _environment_at_start(), driver_context)
        )
        """Environment common to all workers; None: that of this process at the time of the start."""

    def start(
        self,
        command: StartWorker,
        server: ProcessServer,
        numbers: Iterator[int],
        ranks: Sequence[int] | None = None,
        meeting: tuple[str, int] | None = None,
    ) -> LocalWorker:
        """`ranks`: start only these ranks of a gang. `meeting`: rendezvous address and port on rank 0's node."""
        names = frozenset(hosted.name for hosted in command.hosted)
        here = range(len(command.seats)) if ranks is None else sorted(ranks)
        child = LocalWorker(command.worker, command.seats[here[0]].node, names, gang=len(command.seats) > 1)
        child.memory_bytes = sum(command.seats[rank].memory_bytes for rank in here)
        hosted_objects = tuple(
            HostedSpec(hosted.name, self.pickled_work(hosted), hosted.slots, _pickled_writer(hosted))
            for hosted in command.hosted
        )
        own = _hosted_environment(command.hosted)
        inherited = os.environ if self.inherited is None else self.inherited
        address, port = meeting or (LOOPBACK, find_free_port(LOOPBACK, command.rendezvous_seed) if child.is_gang else 0)
        path, folder = self._driver_paths()
        for rank in here:
            seat = command.seats[rank]
            variables = seat_environment(inherited, command.seats, rank, own, self.devices.get(seat.node))
            if child.is_gang:
                variables |= rendezvous_variables(command.seats, rank, port, address)
            spec = WorkerSpec(
                command.worker,
                hosted_objects,
                seat,
                rank,
                len(command.seats),
                local_rank(command.seats, rank),
                gpu_indices(command.seats, rank),
                path,
                folder,
                self._spill,
                WORKER_POOL_BYTES,
                self._next_cpus(seat.cpu_milli),
                command.context,
            )
            child.ranks.append(
                self._launch_process(child, rank, spec, variables, server, next(numbers), needs_fresh_interpreter(own))
            )
        return child

    def _driver_paths(self) -> tuple[tuple[str, ...], str]:
        """Module search path and working folder of the driver, as far as they exist here."""
        own = tuple(map(str, sys.path))
        if self._driver_context is None:
            return own, _working_folder()
        folder = Path(self._driver_context.folder)
        there = self._driver_context.folder if self._driver_context.folder and folder.is_dir() else _working_folder()
        # an empty entry is the working folder, and other entries may be relative to it
        path = [entry for entry in self._driver_context.path if not entry or (folder / entry).exists()]
        return tuple(entry for entry in dict.fromkeys((*path, *own)) if not entry.endswith(RAY_PATH_SUFFIXES)), there

    def _launch_process(
        self,
        child: LocalWorker,
        rank: int,
        spec: WorkerSpec,
        variables: dict[str, str],
        server: ProcessServer,
        number: int,
        fresh: bool,
    ) -> RankProcess:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        cells = self._breadcrumbs.allocate(sum(hosted.slots for hosted in spec.hosted))
        log = self._log(child.number, rank)
        server.spawn(number, pickle.dumps(spec, 5), (theirs.fileno(), log), cells, variables, fresh=fresh)
        self._passed += [theirs, os.fdopen(log, "ab", buffering=0)]
        return RankProcess(number, rank, child, Channel(ours), cells)

    def close_passed(self) -> None:
        for one in self._passed:
            one.close()
        self._passed.clear()

    def _log(self, worker: int, rank: int) -> int:
        if self._log_folder is None:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        make_private_folder(self._log_folder)
        name = f"{worker}.log" if not rank else f"{worker}.{rank}.log"
        return open_private(self._log_folder / name, os.O_WRONLY | os.O_APPEND)

    def pickled_work(self, hosted: HostedObject) -> bytes:
        """The pickled definition; pickled once for all workers."""
        return self._pickled_works.get(hosted).code

    def _next_cpus(self, milli: int) -> tuple[int, ...]:
        """CPUs for the next worker, round robin over those that this process may use."""
        if not self._pin_cpus:
            return ()
        all_of_them = sorted(os.sched_getaffinity(0))
        count = min(len(all_of_them), max(1, -(-milli // 1000)))
        found = tuple(all_of_them[(self._pinned + i) % len(all_of_them)] for i in range(count))
        self._pinned += count
        return found


def _pickled_writer(hosted: HostedObject) -> bytes:
    if isinstance(hosted.writer, bytes):
        return hosted.writer  # pickled by the driver
    return b"" if hosted.writer is None else pickle.dumps(hosted.writer, 5)


def _hosted_environment(hosted: tuple[HostedObject, ...]) -> dict[str, str]:
    """Environment variables of the stages; fused stages agree on them."""
    found: dict[str, str] = {}
    for one in hosted:
        found |= work_environment(one.definition)
    return found


def _working_folder() -> str:
    """The working folder; empty if it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return ""


def _environment_at_start() -> Mapping[str, str]:
    """Environment at the start of this process; the current one if /proc is not readable."""
    try:
        found = os.fsdecode(Path("/proc/self/environ").read_bytes())
    except OSError:
        return os.environ
    return dict(entry.partition("=")[::2] for entry in found.split("\0") if "=" in entry)


def find_free_port(address: str = "", seed: int = 0) -> int:
    """A free port for the rendezvous of a gang, if possible the one that follows from `seed`. If another process takes
    it first, the gang is started again."""
    if seed:
        port = FIRST_PORT + seed % PORT_COUNT
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a killed gang do not matter
            probe.bind((address, port))
            return port
    for _ in range(PORT_ATTEMPTS):
        port = FIRST_PORT + int.from_bytes(os.urandom(4), "big") % PORT_COUNT
        with socket.socket() as probe, suppress(OSError):
            probe.bind((address, port))
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        given: int = probe.getsockname()[1]
        return given
