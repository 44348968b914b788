"""What does a run see of its Ray cluster? All who look for it give a node the same name, and no name twice."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dovetail.engines.ray.discovery import discover

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.ray.discovery import Seen


class Looks:
    """Called for a new look, by any thread."""

    def __init__(self, seen: Seen, look: Callable[..., Seen] = discover) -> None:
        """`seen`: the first look; `look` is given the names and ids of all nodes that there ever were."""
        self.seen = seen
        self._known = dict(seen.ids)
        self._look = look
        self._lock = threading.Lock()

    def __call__(self) -> Seen:
        with self._lock:
            self.seen = self._look(known=dict(self._known))
            self._known |= self.seen.ids
            return self.seen
