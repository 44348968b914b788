"""How do payloads reach the agent that needs them? From the driver in its frames, from other agents through Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from dovetail.control.segments import Segment
from dovetail.control.writing import Piece
from dovetail.engines.local import limits
from dovetail.engines.local.payloads import Payloads
from dovetail.engines.local.refs import InFile
from dovetail.engines.ray.flights import Flights
from dovetail.engines.ray.refs import Away, InBlock
from dovetail.engines.ray.wire import ABOUT, HELD, HOME, IN_FILE, IN_PIECES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dovetail.control.segments import Part
    from dovetail.control.splits import Split
    from dovetail.engines.keys import Keys
    from dovetail.engines.ray.links import Link

LOAD_S = 30.0
"""Somebody who looks at a payload that an agent holds waits no longer for it."""
About = tuple[int, int, tuple[int, ...]]
"""Key, items and sizes of a payload that is on its way."""


class Stock:
    """The payloads of a run as the driver knows them."""

    def __init__(self, spill: Path, memory_bytes: int, numbers: Iterator[int], stores: Mapping[str, int]) -> None:
        """`stores`: node -> bytes of its object store, as far as known."""
        there = limits.memory_there() // limits.SHARE_OF_MEMORY
        self._payloads = Payloads(spill, min(memory_bytes or there, there), numbers)
        self._numbers = numbers
        self.flights = Flights(stores)
        self.let_go, self.close = self._payloads.let_go, self._payloads.close

    @property
    def unreadable(self) -> bool:
        return self._payloads.unreadable

    # --- the driver's own

    def store(self, keys: Keys, items: list[Any]) -> Segment:
        """Items from the driver as a payload. One thread at a time."""
        return _own(self._payloads.store(keys, items))

    def store_split(self, keys: range, split: Split) -> Segment:
        """A piece of the source that workers read by themselves. One thread at a time."""
        block: Any = getattr(split, "block", None)
        if block is not None:
            number = next(self._numbers)
            inner = InBlock(block, range(keys.start, keys.stop), split)
            return Segment(number, split.items, inner.size, "", Away(number, (), inner=inner), (keys.start,))
        return _own(self._payloads.store_split(keys, split))

    def load(self, segment: Segment) -> tuple[Keys, list[Any]]:
        """The keys and items of a payload; those that cannot be read are Unreadable. From any thread."""
        ref: Any = segment.ref
        if type(ref.inner) is InBlock:
            return ref.inner.keys, ref.inner.rows(ray.get(ref.inner.block, timeout=LOAD_S))
        if ref.link is None:
            return self._payloads.load(_local(segment))
        if ref.link.dead:
            raise LookupError(f"node {ref.link.node} is lost, and what lay there")
        data = ray.get(ref.link.give([ref.key]), timeout=LOAD_S)
        return self._payloads.load(self._payloads.adopt(segment.items, ref.sizes, data))

    # --- what outlives the driver

    def keepsake(self, segment: Segment) -> list[Any] | None:
        """A payload of the spool as plain data; None: it is gone with this driver."""
        return self._payloads.keepsake(_local(segment))

    def from_keepsake(self, kept: list[Any]) -> Segment | None:
        """The inverse; None: the bytes are not there any more."""
        found = self._payloads.from_keepsake(kept)
        return None if found is None else _own(found)

    # --- to agents

    def send(self, link: Link, parts: list[Part]) -> list[tuple[int, int, int]] | None:
        """Under which keys that agent knows them, or will; None: one of them is lost."""
        found = []
        refs = [segment.ref for segment, _, _ in parts]
        if any(ref.link is not None and ref.link.dead and link not in ref.copies for ref in refs):  # type: ignore[attr-defined]
            return None
        fetched: dict[Link, list[tuple[Away, About]]] = {}
        for segment, start, stop in parts:
            ref: Any = segment.ref
            if ref.link is link:
                found.append((ref.key, start, stop))
                continue
            found.append((ref.copy_key, start, stop))
            if link in ref.copies:
                continue
            if ref.link is None:
                self._put(link, segment)
            else:
                about = (ref.copy_key, segment.items, ref.sizes)
                fetched.setdefault(ref.link, []).append((ref, about))
            ref.copies.append(link)
        for source, payloads in fetched.items():
            self.flights.ask(source, link, payloads)
        return found

    def _put(self, link: Link, segment: Segment) -> None:
        ref: Any = segment.ref
        inner = ref.inner
        if type(inner) is InBlock:
            rows = (inner.keys, inner.cut, inner.start, inner.stop)
            link.tell(("block", ref.copy_key, segment.items, rows, link.beside(inner.block)), ABOUT * 2)
            return
        if type(inner) is InFile and link.hello is not None and link.hello.shared:
            place = (inner.path, inner.offset, inner.sizes)
            link.tell(("file", ref.copy_key, segment.items, segment.size_bytes, place))
            return
        data = self._payloads.raw(_local(segment))
        link.tell(("put", ref.copy_key, segment.items, ref.sizes, data), ABOUT + len(data))

    # --- from agents

    def received(self, link: Link, told: tuple[Any, ...]) -> Segment:
        kind, items, size, first, place = told
        number = next(self._numbers)
        if kind == HELD:
            key, sizes = place
            return Segment(number, items, size, link.node, Away(number, sizes, link, key), first)
        if kind in (HOME, IN_PIECES):
            sizes, data = place
            if kind == IN_PIECES:
                data = b"".join(link.pieces.pop(data))
            found = _own(self._payloads.adopt(items, sizes, data))
            found.first = first
            return found
        if kind == IN_FILE:
            path, offset, sizes = place
            return Segment(number, items, size, "", Away(number, sizes, inner=InFile(path, offset, sizes)), first)
        return Segment(number, items, size, "", Piece(*place))


def _own(segment: Segment) -> Segment:
    inner: Any = segment.ref
    segment.ref = Away(segment.id, inner.sizes, inner=inner)
    return segment


def _local(segment: Segment) -> Segment:
    """As the local engine's payloads know it."""
    ref: Any = segment.ref
    return Segment(segment.id, segment.items, segment.size_bytes, "", ref.inner, segment.first)
