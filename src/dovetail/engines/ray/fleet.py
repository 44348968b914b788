"""Which agents are there, and what does each have to know before it can start a worker?"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from dovetail.engines.local.memory_watch import FULL
from dovetail.engines.local.shipping import shipped
from dovetail.engines.ray.idle import IDLE
from dovetail.engines.ray.links import Again, Link
from dovetail.engines.ray.starting import start_agent
from dovetail.engines.ray.wire import ABOUT, Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from dovetail.control.commands import Hosted
    from dovetail.engines.local.shipping import Shipped
    from dovetail.engines.local.spec import Home
    from dovetail.engines.ray.crews import Crew
    from dovetail.engines.ray.holding import Holdings
    from dovetail.engines.ray.links import Listener
    from dovetail.engines.ray.logs import Piece
    from dovetail.resources.cluster import Node

FIRST_S = 10.0
"""The first worker waits no longer until all agents have told what they see."""


PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
STEADY_S = 30.0
"""An agent that lived longer died of something new."""


def pause_s(failed: int) -> float:
    """Before the next agent, after so many have died: a node may be gone that Ray believes in."""
    return float(min(PAUSE_S * 2 ** min(failed - 1, 10), LONGEST_PAUSE_S))


@dataclass
class Surroundings:
    """What a run on Ray is given."""

    run: str
    nodes: dict[str, Node]
    ids: dict[str, str]
    """Node -> what Ray calls it. Only those that are there."""
    home: Home
    token: str = ""
    """Lies in the run's folder, so that agents can tell whether they see it."""
    memory_bytes: int = 0
    """What payloads may fill on each node; 0: a share of its memory."""
    pin_cpus: bool = False
    memory_full: float = FULL
    """The share of a node's memory at which a worker must go."""
    asks: tuple[str, ...] = ()
    """Paths that all agents must see."""
    writes: tuple[tuple[str, str], ...] = ()
    """Folders into which workers write results, with what lies in each as in the run's folder."""
    stores: dict[str, int] = field(default_factory=dict)
    """Node -> bytes of Ray's object store there, as far as known."""
    holdings: Holdings | None = None
    look: Callable[[], Any] | None = None
    """Finds out which nodes are there (discovery.Seen); called once per second, in a thread of its own."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Of the driver, to tell who misses a variable of it."""


class Agents:
    """For the thread of the loop."""

    def __init__(self, folder: Path, around: Surroundings, listener: Listener) -> None:
        self.folder = folder
        self.around = around
        self._listener = listener
        self._links: dict[tuple[str, str], Link] = {}
        self.returning: set[str] = set()
        """Nodes whose agent was lost, and that count as gone until another one answers from there."""
        self.begun = self.refused = False
        """Whether workers may be started; whether they never will, because a node does not see what it should."""
        self._shipped: dict[int, tuple[object, Shipped]] = {}
        self._failed: dict[str, int] = {}
        """How many agents of a node have died, one soon after the other."""
        self._pausing: dict[str, set[str]] = {}
        """Node -> the kinds of agents that were there, and will be again."""

    def links(self) -> list[Link]:
        return list(self._links.values())

    def link(self, node: str, kind: str) -> Link | None:
        """That agent, perhaps not up yet; None: there is no such node, or it `pauses`."""
        found = self._links.get((node, kind))
        if found is None and node in self.around.ids and not self.pauses(node):
            found = self._begun(node, kind)
        return found

    def _begun(self, node: str, kind: str) -> Link:
        around = self.around
        setup = Setup(
            f"{around.run} {secrets.token_hex(4)}",
            node,
            kind,
            str(self.folder),
            around.token,
            around.home,
            around.memory_bytes,
            around.pin_cpus,
            around.memory_full,
            around.asks,
            around.writes,
        )
        idle = IDLE.take(around.ids[node], kind) if node not in self.returning else None
        handle = start_agent(around.ids[node], kind) if idle is None else idle
        link = Link(node, kind, handle, setup, used=idle is not None)
        self._links[node, kind] = link
        self._listener.add(link)
        return link

    def may_begin(self, crews: Collection[Crew]) -> bool:
        """Whether workers may be started. The first waits until all agents have told what they see: if one does not
        see the source or the sink, nothing shall have happened."""
        if not self.begun and not self.refused:
            links = [self.link(node, crew.kind) for crew in crews for node in crew.nodes]
            late = time.monotonic() - FIRST_S
            asked = bool(self.around.asks or self.around.writes)
            self.begun = not asked or all(link is None or link.up or link.began_at < late for link in links)
        return self.begun

    def shipped(self, hosted: Hosted) -> Shipped:
        """Its code; packed once for all workers."""
        found = self._shipped.get(id(hosted.work))
        if found is None:
            found = self._shipped[id(hosted.work)] = hosted.work, shipped(hosted)
        return found[1]

    def start(self, link: Link, crew: Crew, devices: dict[int, str]) -> None:
        if devices != link.devices:
            link.devices = dict(devices)
            link.tell(("devices", devices))
        for hosted in crew.command.hosted:
            code = self.shipped(hosted)
            told = (code, hosted.slots, hosted.writer)
            if link.units.get(hosted.name) != told:
                link.units[hosted.name] = told
                writer = None if hosted.writer is None else pickle.dumps(hosted.writer, 5)
                link.tell(("unit", hosted.name, code, hosted.slots, writer), ABOUT + len(code.code))
        link.tell(("start", crew.number, crew.command.seats, crew.names, crew.places[link], crew.meeting))

    def lost(self, node: str) -> bool:
        """Its agents are dead. Whether the node may come back: then another agent follows in a while."""
        gone = [self._links.pop(key) for key in [key for key in self._links if key[0] == node]]
        if node not in self.around.ids:
            self.returning.discard(node)
            self._pausing.pop(node, None)
            return False
        self.returning.add(node)
        if not self.pauses(node):
            lived_s = time.monotonic() - max((link.began_at for link in gone), default=0.0)
            self._failed[node] = failed = 1 if lived_s > STEADY_S else self._failed.get(node, 0) + 1
            self._pausing[node] = {link.kind for link in gone} or {""}
            self._listener.later(pause_s(failed), Again(node))
        return True

    def pauses(self, node: str) -> bool:
        """Whether its agent is dead, and the next one not started yet."""
        return node in self._pausing

    def again(self, node: str) -> None:
        """The pause is over."""
        for kind in sorted(self._pausing.pop(node, ())):
            self._begun(node, kind)

    def _keep(self, link: Link) -> None:
        """For the next run of this process."""
        if link.node in self.around.ids and not link.kind:  # a runtime_env may name a file that changes
            link.dead = "closed"
            IDLE.put(self.around.ids[link.node], link.kind, link.handle)

    def replace(self, link: Link) -> None:
        """By a new agent; nobody was started there yet."""
        link.dead = "it died while it was idle"
        del self._links[link.node, link.kind]
        self._begun(link.node, link.kind)

    def flush(self, *, frees: bool = False) -> None:
        for link in self._links.values():
            link.flush(frees=frees)

    def close(self, wait_s: float) -> list[Piece]:
        """What workers printed last. Agents leave by themselves if they can, so that what they wrote is tidied up; then
        they are killed."""
        links = [link for link in self._links.values() if not link.dead]
        printed: list[Piece] = []
        with contextlib.suppress(Exception):
            leaving = {link.close(): link for link in links if link.up}
            ready = ray.wait(list(leaving), num_returns=len(leaving), timeout=wait_s)[0] if leaving else []
            for ref in ready:
                with contextlib.suppress(Exception):
                    printed += ray.get(ref)
                    self._keep(leaving[ref])
        for link in links:
            if not link.dead:
                link.dead = "closed"
                with contextlib.suppress(Exception):
                    ray.kill(link.handle)
        return printed
