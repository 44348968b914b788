"""Can a bell be rung from anywhere, also in the midst of a ring?"""

from __future__ import annotations

import os
import signal
from threading import Event, Thread
from typing import TYPE_CHECKING

from dovetail.engines.local.engine import Wakeup
from waiting import PATIENCE_S

if TYPE_CHECKING:
    import pytest


def test_a_signal_handler_may_wake_during_a_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bell = Wakeup()
    write = os.eventfd_write
    rung: list[int] = []

    def interrupted(fd: int, value: int) -> None:
        if not rung:
            rung.append(1)
            bell._is_pending = False  # it was heard meanwhile
            signal.raise_signal(signal.SIGUSR1)
        write(fd, value)

    before = signal.signal(signal.SIGUSR1, lambda *_: bell.wake())
    monkeypatch.setattr(os, "eventfd_write", interrupted)
    done = Event()
    watch = Thread(target=lambda: done.wait(PATIENCE_S) or os._exit(1), daemon=True)  # a deadlock of the main thread
    watch.start()
    try:
        bell.wake()
    finally:
        done.set()
        watch.join()
        signal.signal(signal.SIGUSR1, before)
    assert os.eventfd_read(bell.fd) == 2
    bell.close()
