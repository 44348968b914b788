"""Ray joins or starts one by itself when it is asked for something and has none. Not while a run of ours uses it."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOOK = "ray._private.auto_init_hook"


class AutoInit:
    """One per process. Ray's own setting is put back when nobody wants it to be off any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    def off(self) -> None:
        """Until `back` is called as often."""
        with self._lock:
            hook = sys.modules.get(HOOK)
            if hook is not None and not self._users:
                self._before = bool(hook.enable_auto_connect)
                hook.enable_auto_connect = False  # type: ignore[attr-defined]
            self._users += hook is not None

    def back(self) -> None:
        with self._lock:
            self._users = max(0, self._users - 1)
            hook = sys.modules.get(HOOK)
            if hook is not None and not self._users:
                hook.enable_auto_connect = self._before  # type: ignore[attr-defined]

    @contextmanager
    def kept_off(self) -> Iterator[None]:
        self.off()
        try:
            yield
        finally:
            self.back()


AUTO_INIT = AutoInit()
