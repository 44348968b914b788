"""What do the driver and its agents say to each other? Lists of small tuples, many to a call of Ray.

A call costs half a millisecond however little it says, and three times that beyond 100 KB, where Ray moves it through
its object store: so frames are filled, but not beyond that, unless one thing alone is larger.

Driver to agent: unit, devices, start, port, run, cancel, stop, put, file, block, comes, fetch, lost, free, call, found,
gone. Agent to driver: hello, ready, lost, stopped, piece, done, returned, over, lack, unusable, pids, port, answer,
seek, sick, use, log, broken. Who acts on them: `hosting.Host` there, `hearing.Hearing` here.
"""

from __future__ import annotations

import pickle
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dovetail.engines.local.spec import Home

FULL = 90_000
"""Bytes of a frame that stays out of the object store."""
ABOUT = 200
"""Bytes of a tuple beside its payload, about."""
BEAT_S = 0.5
"""An agent that has nothing to say says so this often."""
SPOOL, GOES_HOME = 1, 2
"""What is to become of the output of a message."""
HELD, HOME, IN_FILE, WRITTEN, IN_PIECES = 0, 1, 2, 3, 4
"""Where a segment of an answer is: at the agent, in the answer, in a file, in a sink's part file, in answers before."""

Op = tuple[Any, ...]


class Setup(NamedTuple):
    """What an agent gets to know when it starts."""

    session: str
    """One run's use of an agent."""
    node: str
    kind: str
    """The runtime_env of the agent, as text; empty: none."""
    folder: str
    """The run's folder where the driver is; empty: it has none."""
    token: str
    """What lies in it, so that an agent can tell whether it sees the same one."""
    home: Home
    memory_bytes: int
    """What payloads may fill on its node; 0: a share of what is there."""
    pin_cpus: bool
    memory_full: float
    """The share of a node's memory at which a worker must go."""
    asks: tuple[str, ...] = ()
    """Paths of the source, of which it says whether it sees them."""
    writes: tuple[tuple[str, str], ...] = ()
    """Folders into which its workers write results, and what lies in each, as above."""


class Hello(NamedTuple):
    """What an agent says of itself."""

    pid: int
    address: str
    shared: bool
    """Whether it sees the run's folder."""
    missing: tuple[str, ...]
    unwritable: tuple[str, ...]
    """Folders for results that are not the driver's here."""
    version: str


def our_version() -> str:
    """Empty: it was never installed, as in a checkout on PYTHONPATH."""
    try:
        return version("dovetail-ml")
    except PackageNotFoundError:
        return ""


class Told(NamedTuple):
    """An operation and about how many bytes it is."""

    op: Op
    size: int = ABOUT


def frames(told: Iterable[Told]) -> Iterator[bytes]:
    """In order, each as full as it should be."""
    batch: list[Op] = []
    size = 0
    for op, bytes_of_it in told:
        if batch and size + bytes_of_it > FULL:
            yield pickle.dumps(batch, 5)
            batch, size = [], 0
        batch.append(op)
        size += bytes_of_it
    if batch:
        yield pickle.dumps(batch, 5)


def opened(frame: bytes) -> list[Op]:
    found: list[Op] = pickle.loads(frame)  # noqa: S301 - between processes of one run, by Ray, which does the same
    return found
