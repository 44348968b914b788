"""The control loop with observers: runs to the end, records a crash, and closes everything on every path."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from dovetail.control.loop import run_loop
from dovetail.control.payload import SourceSinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.control.engine import Controller, DataPort, Engine, Observer
    from dovetail.observe.recorder import Recorder


def run_with_observers(
    controller: Controller,
    engine: Engine,
    data: DataPort | None,
    recorder: Recorder,
    observers: Sequence[Observer],
    *,
    claim_observers: Sequence[Observer] = (),
    beat_s: float | None = None,
    last: Callable[[], None] | None = None,
) -> None:
    """Warns about observers that fail. `claim_observers` are closed after the engine: a claim must not be released
    while workers still use the resources."""
    watching = [*observers, *map(_ClosedLater, claim_observers)]
    try:
        for observer, error in run_loop(controller, engine, data, watching, beat_s=beat_s, last=last):
            warnings.warn(f"{type(observer).__name__} failed and was removed: {error}", RuntimeWarning, stacklevel=3)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        why = str(error) if isinstance(error, SourceSinkError) else repr(error)
        with suppress(OSError):  # the disk may be the cause, which the raised error reports
            recorder.abort(
                engine.now(), "interrupted" if interrupted else why, "cancelled" if interrupted else "failed"
            )
        raise
    finally:
        try:
            _close_observers(observers, engine.now())
        finally:
            try:
                engine.close()
            finally:
                _close_observers(claim_observers, engine.now())


class _ClosedLater:
    """An observer whose `close` is deferred."""

    def __init__(self, observer: Observer) -> None:
        self.on_step = observer.on_step

    def close(self, now: float) -> None:
        """Deferred."""


def _close_observers(observers: Sequence[Observer], now: float) -> None:
    """Closes all observers, also dropped ones, and ignores their errors."""
    for observer in observers:
        with suppress(Exception):
            observer.close(now)
