"""Wake-up descriptor of the polling thread."""

from __future__ import annotations

import os
import signal
from threading import Event, Thread
from typing import TYPE_CHECKING

from dovetail.engines.local.wakeup import Wakeup
from waiting import PATIENCE_S

if TYPE_CHECKING:
    import pytest


def test_a_signal_handler_may_wake_during_a_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    wakeup = Wakeup()
    write = os.eventfd_write
    rung: list[int] = []

    def interrupted(fd: int, value: int) -> None:
        if not rung:
            rung.append(1)
            wakeup._is_pending = False  # the polling thread cleared it meanwhile
            signal.raise_signal(signal.SIGUSR1)
        write(fd, value)

    before = signal.signal(signal.SIGUSR1, lambda *_: wakeup.wake())
    monkeypatch.setattr(os, "eventfd_write", interrupted)
    done = Event()
    watch = Thread(target=lambda: done.wait(PATIENCE_S) or os._exit(1), daemon=True)  # the main thread is deadlocked
    watch.start()
    try:
        wakeup.wake()
    finally:
        done.set()
        watch.join()
        signal.signal(signal.SIGUSR1, before)
    assert os.eventfd_read(wakeup.fd) == 2
    wakeup.close()
