"""What if Ray itself is gone, or its head does not answer? The run fails, and nothing more is asked of Ray."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from dovetail.control.events import FailRun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.engines.ray.engine import RayEngine

LEFT = "this program has left Ray (ray.shutdown) while a run used it"
STAY = "leave Ray when the run is over: run.wait()"
LOOK = "ray status: is the cluster still there?"
HEAD_S = 30.0
"""A head that has not answered for so long is gone: after 60 s Ray itself ends the driver's process."""
SILENT_HEAD = f"Ray's head has not answered for {HEAD_S:g} s"


@dataclass(frozen=True, slots=True)
class Gone:
    """Told once to the loop."""

    why: str
    fix: str = LOOK
    deaf: bool = True
    """Whether not even agents can be heard any more."""


def gone_by(error: BaseException) -> Gone:
    """What an error of a call into Ray means that should never fail."""
    if isinstance(error, SystemExit) or not ray.is_initialized():
        return Gone(LEFT, STAY)
    text = str(error).strip().splitlines()
    return Gone(f"Ray is gone: {type(error).__name__}: {text[0] if text else 'no reason given'}")


class Head:
    """How long has Ray's head not answered? One thread asks it, which may wait for ever; another counts."""

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._asked = False

    @contextmanager
    def asked(self) -> Iterator[None]:
        """While it is: what else its thread does may take long, and says nothing of the head."""
        self._silent_s, self._asked = 0.0, True
        try:
            yield
        finally:
            self._asked = False

    def is_gone(self, more_s: float) -> bool:
        """After so much more time in which this process ran; told once."""
        before, self._silent_s = self._silent_s, self._silent_s + more_s if self._asked else 0.0
        return before < HEAD_S <= self._silent_s


@contextmanager
def while_ray_is_there(engine: RayEngine) -> Iterator[None]:
    """Whatever is raised because this process has no Ray any more fails the run, in one way."""
    try:
        yield
    except (Exception, SystemExit) as error:  # the latter is how Ray says it where it is just leaving
        if ray.is_initialized() and not isinstance(error, SystemExit):
            raise
        give_up(engine, gone_by(error))


def give_up(engine: RayEngine, gone: Gone) -> None:
    """The run fails. Agents that are still there end its workers; where nobody can be heard, they are lost."""
    if not engine.given_up:
        engine.given_up = True
        engine.events.append(FailRun(f"DT397 {gone.why}", gone.fix))
        if engine.holdings is not None:
            engine.holdings.abandon()
            engine.holdings = None
        engine.agents.around.ids.clear()
    if gone.deaf:
        for node in sorted({*engine.agents.around.nodes, *(link.node for link in engine.agents.links())}):
            engine.lose_node(node, gone.why)
