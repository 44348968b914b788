"""How does a worker come to be? Its code is packed once, its seat becomes variables, and the nursery forks it."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.engines.local.children import Child, Rank
from dovetail.engines.local.frames import Channel
from dovetail.engines.local.seating import PATHS_OF_RAY, environment, inherited_in, local_rank, rendezvous, starts_fresh
from dovetail.engines.local.shipping import Shipped, environment_of, ship
from dovetail.engines.local.spec import Guest, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.control.commands import Hosted, StartWorker
    from dovetail.engines.local.crumbs import Crumbs
    from dovetail.engines.local.nursing import NurseryLink
    from dovetail.engines.local.spec import Home
    from dovetail.resources.cluster import Cluster

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS, TRIES = 20_000, 12_000, 20
"""Below those that the kernel gives to whoever connects to somewhere, and above those of Ray's workers: what is free
now is likely to be free when it is used."""
POOL_BYTES = 256 << 20
"""Shared memory that one worker keeps warm while nobody reads it."""


class Starter:
    """Remembers what does not change between two workers of a unit."""

    def __init__(
        self,
        folder: Path | None,
        spill: Path,
        cluster: Cluster | None,
        crumbs: Crumbs,
        *,
        pin_cpus: bool,
        home: Home | None = None,
    ) -> None:
        """`home`: where the driver is, if that is not this process."""
        self._logs = folder / "logs" if folder is not None else None
        self._spill = str(spill)
        self._crumbs = crumbs
        self._pin = pin_cpus
        self._pinned = 0
        self._works: dict[int, tuple[object, bytes]] = {}
        self._passing: list[Any] = []
        """What must stay open until the nursery has it."""
        nodes = cluster.nodes if cluster is not None else ()
        self.devices: dict[str, Mapping[int, str]] = {
            node.name: dict(enumerate(card.uuid for card in node.gpus if card.uuid)) for node in nodes
        }
        """Node -> position of a card -> the name under which CUDA knows it."""
        self._home = home
        self.inherited = None if home is None else inherited_in(os.environ, _environment_at_start(), home)
        """What all workers have of their environment; None: what this process has, whenever one is started."""

    def start(
        self,
        command: StartWorker,
        nursery: NurseryLink,
        numbers: Iterator[int],
        ranks: Sequence[int] | None = None,
        meeting: tuple[str, int] | None = None,
    ) -> Child:
        """`ranks`: only these of a gang. `meeting`: where they all meet, an address and a port of the first's node."""
        names = frozenset(hosted.name for hosted in command.hosted)
        here = range(len(command.seats)) if ranks is None else sorted(ranks)
        child = Child(command.worker, command.seats[here[0]].node, names, gang=len(command.seats) > 1)
        guests = tuple(
            Guest(hosted.name, self.packed(hosted), hosted.slots, _writer_of(hosted)) for hosted in command.hosted
        )
        own = _environment_of(command.hosted)
        inherited = os.environ if self.inherited is None else self.inherited
        address, port = meeting or (LOOPBACK, free_port(LOOPBACK) if child.gang else 0)
        path, folder = self._place()
        for rank in here:
            seat = command.seats[rank]
            variables = environment(inherited, seat, own, self.devices.get(seat.node))
            if child.gang:
                variables |= rendezvous(command.seats, rank, port, address)
            spec = Spec(
                command.worker,
                guests,
                seat,
                rank,
                len(command.seats),
                local_rank(command.seats, rank),
                path,
                folder,
                self._spill,
                POOL_BYTES,
                self._cpus(seat.cpu_milli),
            )
            child.ranks.append(self._process(child, rank, spec, variables, nursery, next(numbers), starts_fresh(own)))
        return child

    def _place(self) -> tuple[tuple[str, ...], str]:
        """Where modules are looked for, and the working folder: the driver's, as far as they are here."""
        own = tuple(map(str, sys.path))
        if self._home is None:
            return own, _folder()
        folder = Path(self._home.folder)
        there = self._home.folder if self._home.folder and folder.is_dir() else _folder()
        # an empty entry is the working folder, and others may be relative to it
        path = [entry for entry in self._home.path if not entry or (folder / entry).exists()]
        return tuple(entry for entry in dict.fromkeys((*path, *own)) if not entry.endswith(PATHS_OF_RAY)), there

    def _process(
        self,
        child: Child,
        rank: int,
        spec: Spec,
        variables: dict[str, str],
        nursery: NurseryLink,
        number: int,
        fresh: bool,
    ) -> Rank:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        cells = self._crumbs.take(sum(guest.slots for guest in spec.guests))
        log = self._log(child.number, rank)
        nursery.spawn(number, pickle.dumps(spec, 5), (theirs.fileno(), log), cells, variables, fresh=fresh)
        self._passing += [theirs, os.fdopen(log, "ab", buffering=0)]
        return Rank(number, rank, child, Channel(ours), cells)

    def handed_over(self) -> None:
        for one in self._passing:
            one.close()
        self._passing.clear()

    def _log(self, worker: int, rank: int) -> int:
        if self._logs is None:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._logs.mkdir(parents=True, exist_ok=True)
        name = f"{worker}.log" if not rank else f"{worker}.{rank}.log"
        return os.open(self._logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def packed(self, hosted: Hosted) -> bytes:
        """Its code, by cloudpickle; once for all workers."""
        if isinstance(hosted.work, Shipped):
            return hosted.work.code
        found = self._works.get(id(hosted.work))
        if found is None:
            found = self._works[id(hosted.work)] = hosted.work, ship(hosted.name, hosted.work)
        return found[1]

    def _cpus(self, milli: int) -> tuple[int, ...]:
        """Of those that we may use ourselves, one after another."""
        if not self._pin:
            return ()
        all_of_them = sorted(os.sched_getaffinity(0))
        count = min(len(all_of_them), max(1, -(-milli // 1000)))
        found = tuple(all_of_them[(self._pinned + i) % len(all_of_them)] for i in range(count))
        self._pinned += count
        return found


def _writer_of(hosted: Hosted) -> bytes:
    if isinstance(hosted.writer, bytes):
        return hosted.writer  # by the driver
    return b"" if hosted.writer is None else pickle.dumps(hosted.writer, 5)


def _environment_of(hosted: tuple[Hosted, ...]) -> dict[str, str]:
    """What the stages ask for; those of a unit agree on it."""
    found: dict[str, str] = {}
    for one in hosted:
        found |= environment_of(one.work)
    return found


def _folder() -> str:
    """Where the driver is; nowhere, if that was removed."""
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return ""


def _environment_at_start() -> Mapping[str, str]:
    """What this process began with; what it has now, where nobody says."""
    try:
        found = os.fsdecode(Path("/proc/self/environ").read_bytes())
    except OSError:
        return os.environ
    return dict(entry.partition("=")[::2] for entry in found.split("\0") if "=" in entry)


def free_port(address: str = "") -> int:
    """For the ranks of a gang to meet at; somebody may take it before they do, then they are started again."""
    for _ in range(TRIES):
        port = FIRST_PORT + int.from_bytes(os.urandom(4), "big") % PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind((address, port))
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        given: int = probe.getsockname()[1]
        return given
