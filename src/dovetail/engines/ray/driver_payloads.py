"""Payloads as the driver knows them: references to data at agents, loading, and sending them to the agent that needs
them. Driver side.

`engine` calls `send` for the input of a message, `message_handlers` calls `receive` for its output. Data that is at an
agent goes directly to another agent (`transfers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from dovetail.control.payload import PartFileRange, Segment
from dovetail.engines import payload_memory
from dovetail.engines.local.payload_table import PayloadTable, SpoolRef
from dovetail.engines.ray.protocol import AT_AGENT, IN_ANSWER, IN_FILE, IN_PIECES, MESSAGE_OVERHEAD_BYTES
from dovetail.engines.ray.transfers import TransferQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dovetail.control.payload import SegmentSlice, Split
    from dovetail.engines.item_keys import Keys
    from dovetail.engines.ray.agent_link import AgentLink

BLOCK_REF_BYTES = 200
"""Approximate size of a reference to rows of a block."""


class BlockRef:
    """Rows of a block of a Ray Dataset; the agent that needs them fetches the block."""

    __slots__ = ("block", "cut", "keys", "size", "start", "stop")

    def __init__(self, block: Any, keys: range, split: Any) -> None:
        self.block = block
        self.keys = keys
        self.cut, self.start, self.stop = split.cut, split.start, split.stop
        self.size = BLOCK_REF_BYTES

    def rows(self, block: Any) -> list[Any]:
        found = self.cut(block, self.start, self.stop)
        return found if type(found) is list else list(found.read())


class PayloadRef:
    """Reference to a payload. When it is garbage-collected, every agent that has a copy frees it."""

    __slots__ = ("copies", "copy_key", "inner", "key", "link", "sizes")

    def __init__(
        self, number: int, sizes: tuple[int, ...], link: AgentLink | None = None, key: int = 0, inner: Any = None
    ) -> None:
        """`number`: id of its segment."""
        self.copy_key = -number
        """Key of copies, at agents that did not create the payload."""
        self.key = key
        """Key at the agent that created it."""
        self.sizes = sizes
        self.link = link
        """Agent that created it; None: the driver has it, as `inner`."""
        self.inner = inner
        self.copies: list[AgentLink] = []

    def __del__(self) -> None:
        if self.link is not None:
            self.link.freed.append(self.key)
        for link in self.copies:
            link.freed.append(self.copy_key)


LOAD_TIMEOUT_S = 30.0
"""Limit for loading a payload from an agent."""
PayloadInfo = tuple[int, int, tuple[int, ...]]
"""Key, number of items and part sizes of a payload."""


class DriverPayloads:
    """The payloads of a run as the driver knows them."""

    def __init__(self, spill: Path, memory_bytes: int, numbers: Iterator[int], stores: Mapping[str, int]) -> None:
        """`stores`: node -> size of its object store in bytes, where known."""
        limit = payload_memory.total_memory_bytes() // payload_memory.PAYLOAD_MEMORY_DIVISOR
        self._payloads = PayloadTable(spill, min(memory_bytes or limit, limit), numbers)
        self._numbers = numbers
        self.transfers = TransferQueue(stores)
        self.release_mappings, self.close = self._payloads.release_mappings, self._payloads.close

    @property
    def unreadable(self) -> bool:
        return self._payloads.unreadable

    # --- payloads of the driver

    def store(self, keys: Keys, items: list[Any]) -> Segment:
        """Store items of the driver as a payload. One thread at a time."""
        return _wrap_segment(self._payloads.store(keys, items))

    def store_split(self, keys: range, split: Split) -> Segment:
        """Store a split of the source, which workers read by themselves. One thread at a time."""
        block: Any = getattr(split, "block", None)
        if block is not None:
            number = next(self._numbers)
            inner = BlockRef(block, range(keys.start, keys.stop), split)
            return Segment(number, split.items, inner.size, "", PayloadRef(number, (), inner=inner), (keys.start,))
        return _wrap_segment(self._payloads.store_split(keys, split))

    def load(self, segment: Segment) -> tuple[Keys, list[Any]]:
        """The keys and items of a payload; items that cannot be unpickled are `Unreadable`. From any thread."""
        ref: Any = segment.ref
        if type(ref.inner) is BlockRef:
            return ref.inner.keys, ref.inner.rows(ray.get(ref.inner.block, timeout=LOAD_TIMEOUT_S))
        if ref.link is None:
            return self._payloads.load(_unwrap_segment(segment))
        if ref.link.lost_reason:
            raise LookupError(f"node {ref.link.node} is lost, and its payloads with it")
        data = ray.get(ref.link.read_payloads([ref.key]), timeout=LOAD_TIMEOUT_S)
        return self._payloads.load(self._payloads.adopt(segment.items, ref.sizes, data))

    # --- spool, which outlives the driver

    def spool_record(self, segment: Segment) -> list[Any] | None:
        """A payload of the spool as plain data; None if it is not in the spool."""
        return self._payloads.spool_record(_unwrap_segment(segment))

    def from_spool_record(self, kept: list[Any]) -> Segment | None:
        """The inverse; None if the file is gone."""
        found = self._payloads.from_spool_record(kept)
        return None if found is None else _wrap_segment(found)

    # --- to agents

    def send(self, link: AgentLink, parts: list[SegmentSlice]) -> list[tuple[int, int, int]] | None:
        """Keys of the payloads at that agent, sending those that it does not have; None: one of them is lost."""
        found = []
        refs = [segment.ref for segment, _, _ in parts]
        if any(ref.link is not None and ref.link.lost_reason and link not in ref.copies for ref in refs):  # type: ignore[attr-defined]
            return None
        fetched: dict[AgentLink, list[tuple[PayloadRef, PayloadInfo]]] = {}
        for segment, start, stop in parts:
            ref: Any = segment.ref
            if ref.link is link:
                found.append((ref.key, start, stop))
                continue
            found.append((ref.copy_key, start, stop))
            if link in ref.copies:
                continue
            if ref.link is None:
                self._send_payload(link, segment)
            else:
                about = (ref.copy_key, segment.items, ref.sizes)
                fetched.setdefault(ref.link, []).append((ref, about))
            ref.copies.append(link)
        for source, payloads in fetched.items():
            self.transfers.request(source, link, payloads)
        return found

    def _send_payload(self, link: AgentLink, segment: Segment) -> None:
        ref: Any = segment.ref
        inner = ref.inner
        if type(inner) is BlockRef:
            rows = (inner.keys, inner.cut, inner.start, inner.stop)
            link.send(
                ("block", ref.copy_key, segment.items, rows, link.attach_object(inner.block)),
                MESSAGE_OVERHEAD_BYTES * 2,
            )
            return
        if type(inner) is SpoolRef and link.hello is not None and link.hello.sees_run_folder:
            place = (inner.path, inner.offset, inner.sizes)
            link.send(("file", ref.copy_key, segment.items, segment.size_bytes, place))
            return
        data = self._payloads.read_raw(_unwrap_segment(segment))
        link.send(("put", ref.copy_key, segment.items, ref.sizes, data), MESSAGE_OVERHEAD_BYTES + len(data))

    # --- from agents

    def receive(self, link: AgentLink, encoded: tuple[Any, ...]) -> Segment:
        """Segment from the tuple of `protocol.EventEncoder`."""
        kind, items, size, first, place = encoded
        number = next(self._numbers)
        if kind == AT_AGENT:
            key, sizes = place
            return Segment(number, items, size, link.node, PayloadRef(number, sizes, link, key), first)
        if kind in (IN_ANSWER, IN_PIECES):
            sizes, data = place
            if kind == IN_PIECES:
                data = b"".join(link.partial_payloads.pop(data))
            found = _wrap_segment(self._payloads.adopt(items, sizes, data))
            found.first = first
            return found
        if kind == IN_FILE:
            path, offset, sizes = place
            return Segment(
                number, items, size, "", PayloadRef(number, sizes, inner=SpoolRef(path, offset, sizes)), first
            )
        return Segment(number, items, size, "", PartFileRange(*place))


def _wrap_segment(segment: Segment) -> Segment:
    inner: Any = segment.ref
    segment.ref = PayloadRef(segment.id, inner.sizes, inner=inner)
    return segment


def _unwrap_segment(segment: Segment) -> Segment:
    """The segment as `PayloadTable` knows it."""
    ref: Any = segment.ref
    return Segment(segment.id, segment.items, segment.size_bytes, "", ref.inner, segment.first)
