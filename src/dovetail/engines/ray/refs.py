"""Where does a payload lie? What `Segment.ref` is on Ray: at an agent, or with the driver; its lifetime is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.engines.ray.links import Link

SMALL = 200
"""Bytes of what is told about rows that lie elsewhere."""


class InBlock:
    """Rows of a block of a Ray Dataset; the agent that needs them fetches it."""

    __slots__ = ("block", "cut", "keys", "size", "start", "stop")

    def __init__(self, block: Any, keys: range, split: Any) -> None:
        self.block = block
        self.keys = keys
        self.cut, self.start, self.stop = split.cut, split.start, split.stop
        self.size = SMALL

    def rows(self, block: Any) -> list[Any]:
        found = self.cut(block, self.start, self.stop)
        return found if type(found) is list else list(found.read())


class Away:
    """Tells its end to every agent that holds it."""

    __slots__ = ("copies", "copy_key", "inner", "key", "link", "sizes")

    def __init__(
        self, number: int, sizes: tuple[int, ...], link: Link | None = None, key: int = 0, inner: Any = None
    ) -> None:
        """`number` is that of its segment."""
        self.copy_key = -number
        """Under which agents know it that did not make it."""
        self.key = key
        """Under which the one that made it does."""
        self.sizes = sizes
        self.link = link
        """Whose agent holds it; None: the driver, as `inner`."""
        self.inner = inner
        self.copies: list[Link] = []

    def __del__(self) -> None:
        if self.link is not None:
            self.link.freed.append(self.key)
        for link in self.copies:
            link.freed.append(self.copy_key)
