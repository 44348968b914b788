"""How is a part of a payload, or how a run stands now, looked at from outside of the loop?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.splits import BadRow

if TYPE_CHECKING:
    from dovetail.control.segments import Part
    from dovetail.observe.recorder import Recorder
    from dovetail.running.sites import Workers

REFRESH_S = 0.5
"""How long somebody who asks how a run stands waits for the newest figures."""


def item_of(workers: Workers, part: Part) -> object:
    """Of one item; a row that cannot be parsed as it stands in the source."""
    segment, start, _ = part
    item = workers.load(segment)[1][start]
    return item.raw if type(item) is BadRow else item


def key_of(workers: Workers, part: Part) -> tuple[int, ...]:
    segment, start, _ = part
    key = workers.load(segment)[0][start]
    return key if isinstance(key, tuple) else (key,)


def refresh(recorder: Recorder, workers: Workers) -> None:
    """The run folder says how it stands now."""
    written = recorder.look_now()
    workers.nudge()
    written.wait(REFRESH_S)
