"""The driver's side of its agents: what is told to each, and one thread that listens to all of them.

An agent answers at least every half second. One that is silent for longer than the deadline is lost, whatever Ray
thinks of its node: Ray takes 14 to 66 seconds for that.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from dovetail.engines.ray.discovery import NoNodes, same_nodes
from dovetail.engines.ray.gone import SILENT_HEAD, Gone, Head, gone_by
from dovetail.engines.ray.wire import ABOUT, BEAT_S, Told, frames, opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from queue import SimpleQueue

    from dovetail.engines.ray.discovery import Seen
    from dovetail.engines.ray.wire import Hello, Op, Setup

SILENT_S = 5.0
"""Longer than this without a word is a loss."""
START_S = 60.0
"""The same for an agent that was just started."""
MAKE_S = 600.0
"""More for one whose runtime_env must be made first: Ray has a limit of its own for that."""
STALL_S = 1.0
"""If the driver itself did not run for so long, silence says nothing."""
MANY_FREED = 64
LOOK_S = 1.0


class Link:
    """One agent. For the thread of the loop, or who holds the engine's lock; `freed` is for everybody."""

    def __init__(self, node: str, kind: str, handle: Any, setup: Setup, *, used: bool = False) -> None:
        """`used`: it served an earlier run."""
        self.node = node
        self._session = setup.session
        self.used = used
        self.kind = kind
        """Which runtime_env it has; empty: none."""
        self.handle = handle
        self.hello: Hello | None = None
        self.dead = ""
        """Why it is lost; empty: it is not."""
        self.heard_at = self.began_at = time.monotonic()
        self.units: dict[str, tuple[Any, ...]] = {}
        """What it was told of each that it hosts."""
        self.devices: dict[int, str] = {}
        self.freed: deque[int] = deque()
        self.pieces: dict[int, list[bytes]] = {}
        """Of payloads that come in several answers, by their number there."""
        self._out: list[Told] = []
        self._beside: list[Any] = []
        self._number = 0
        handle.begin.remote(setup)

    @property
    def up(self) -> bool:
        return self.hello is not None and not self.dead

    def tell(self, op: Op, size: int = ABOUT) -> None:
        """With the next flush."""
        self._out.append(Told(op, size))

    def beside(self, what: Any) -> int:
        """Something that only Ray can carry; its number in the next frame."""
        self._beside.append(what)
        return len(self._beside) - 1

    def flush(self, *, frees: bool = False) -> None:
        """Frees go with the rest; alone only when they are many, or it is time."""
        if self.dead:
            self._out.clear()
            self._beside.clear()
            self.freed.clear()
            return
        if self.freed and (self._out or frees or len(self.freed) >= MANY_FREED):
            self.tell(("free", [self.freed.popleft() for _ in range(len(self.freed))]))
        if not self._out:
            return
        out, self._out = self._out, []
        beside, self._beside = self._beside, []
        cut = [pickle.dumps([told.op for told in out], 5)] if beside else frames(out)
        for frame in cut:
            self.handle.do.remote(self._session, self._number, frame, *([beside] if beside else []))
            self._number += 1

    # --- by Ray, each a reference to the answer

    def listen(self) -> Any:
        return self.handle.listen.remote(self._session)

    def give(self, keys: list[int]) -> Any:
        return self.handle.give.remote(self._session, keys)

    def running(self, worker: int) -> Any:
        return self.handle.running.remote(self._session, worker)

    def close(self) -> Any:
        return self.handle.close.remote(self._session)

    @property
    def peer(self) -> tuple[Any, str]:
        """For another agent that wants to call a worker there."""
        return self.handle, self._session

    def silent_s(self, now: float) -> float:
        """How much too long it has been silent; 0: not."""
        if self.hello is not None:
            return now - self.heard_at if now - self.heard_at > SILENT_S else 0.0
        limit = START_S + (MAKE_S if self.kind else 0.0)
        return now - self.began_at if now - self.began_at > limit else 0.0


@dataclass(frozen=True, slots=True)
class Again:
    """It is time for another agent on this node."""

    node: str


class Listener:
    """Puts (link, operations) or (link, an error) into the queue of the loop."""

    def __init__(self, heard: SimpleQueue[Any], head: Head | None = None) -> None:
        """`head`: somebody asks it all the time, and here is noticed that it does not answer."""
        self._heard = heard
        self._head = head
        self._new: deque[Link] = deque()
        self._later: deque[tuple[float, Again]] = deque()
        self._pending: dict[Any, Link] = {}
        self._links: list[Link] = []
        self._broken = False
        self._closing = Event()
        self._woken = Event()
        self._thread = Thread(target=self._run, name="dovetail-ray", daemon=True)

    def add(self, link: Link) -> None:
        if self._broken:
            return  # the run is told already
        self._new.append(link)
        self._woken.set()
        if not self._thread.ident:
            self._thread.start()

    def later(self, delay_s: float, what: Again) -> None:
        """Puts (None, what) into the queue then."""
        self._later.append((time.monotonic() + delay_s, what))

    def close(self) -> None:
        self._closing.set()
        self._woken.set()
        if self._thread.ident:
            self._thread.join(BEAT_S * 4)

    def _run(self) -> None:
        came = time.monotonic()
        while not self._closing.is_set():
            try:
                self._take_new()
                self._wait()
            except BaseException as error:  # Ray itself is gone, and with it everybody; it may say so by SystemExit
                self._broken = True
                self._heard.put((None, gone_by(error)))
                return
            now = time.monotonic()
            self._check(now, now - came)
            if self._head is not None and self._head.is_gone(min(now - came, STALL_S)):
                self._heard.put((None, Gone(SILENT_HEAD, deaf=False)))
            self._tell_what_is_due(now)
            came = now

    def _take_new(self) -> None:
        while self._new:
            link = self._new.popleft()
            link.heard_at = time.monotonic()
            self._links.append(link)
            self._pending[link.listen()] = link

    def _wait(self) -> None:
        if not self._pending:
            self._woken.wait(BEAT_S)
            self._woken.clear()
            return
        refs = list(self._pending)
        ready, rest = ray.wait(refs, num_returns=1, timeout=BEAT_S / 2)
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        for ref in ready:
            self._take(self._pending.pop(ref), ref)

    def _take(self, link: Link, ref: Any) -> None:
        try:
            data: bytes = ray.get(ref)
        except RayError as error:
            self._heard.put((link, error))
            return
        if link.dead:
            return
        self._pending[link.listen()] = link
        link.heard_at = time.monotonic()
        self._heard.put((link, opened(data)))

    def _check(self, now: float, gap: float) -> None:
        links = [link for link in self._links if not link.dead]
        for ref in [ref for ref, link in self._pending.items() if link.dead]:
            del self._pending[ref]
        self._links = links
        if gap > STALL_S:
            for link in links:
                link.heard_at += gap
                link.began_at += gap
            return
        for link in links:
            silent_s = link.silent_s(now)
            if silent_s:
                self._heard.put((link, TimeoutError(f"nothing was heard of it for {silent_s:.0f} s")))

    def _tell_what_is_due(self, now: float) -> None:
        for _ in range(len(self._later)):
            due, what = self._later.popleft()
            if due <= now:
                self._heard.put((None, what))
            else:
                self._later.append((due, what))


class Lookout:
    """Looks at the cluster once per second, in a thread of its own, and puts (None, what it saw) into the queue; that
    there is nothing left to run on is a `NoNodes`. `look` costs more than `nodes`: only if some have come or gone."""

    def __init__(
        self,
        heard: SimpleQueue[Any],
        look: Callable[[], Seen],
        nodes: Callable[[], list[Any]] = ray.nodes,
        head: Head | None = None,
    ) -> None:
        self._heard = heard
        self._look = look
        self._nodes = nodes
        self._head = head or Head()
        self._seen: Seen | None = None
        self._closing = Event()
        self._thread = Thread(target=self._run, name="dovetail-nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(LOOK_S)

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            with suppress(Exception):  # for a moment nobody knows; the next look may
                self._heard.put((None, self._now()))

    def _now(self) -> Seen | NoNodes:
        with self._head.asked():
            rows = self._nodes()  # where the head is gone, this waits for ever
        if self._seen is None or not same_nodes(self._seen, rows):
            self._seen = None
            try:
                self._seen = self._look()
            except NoNodes as error:
                return error
        return self._seen
