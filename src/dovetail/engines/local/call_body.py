"""Arguments and results of calls: pickled into the frame, in shared memory, or for another machine as one buffer."""

from __future__ import annotations

import marshal
import os
import pickle
from struct import Struct
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.engines.local.buffer_pool import MappedPayload, write_all
from dovetail.engines.local.payload_codec import (
    MAX_INLINE_BYTES,
    layout_chunks,
    pack_items,
    part_lengths,
    split_layout,
    unpack_payload,
)
from dovetail.engines.local.protocol import close_descriptors, pickle_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer

    from dovetail.engines.local.buffer_pool import BufferPool
    from dovetail.engines.local.protocol import Chunk


class CallBody(NamedTuple):
    """Body and descriptors of a frame. With a descriptor, the body has the lengths of the parts in shared memory."""

    data: bytes
    descriptors: tuple[int, ...] = ()


def pack_value(value: object) -> CallBody:
    """Pickle a value; the sender closes the descriptors."""
    data = pickle_if_small(value)
    if data is not None:
        return CallBody(data)
    try:
        packed = pack_items(None, [value])
        return CallBody(marshal.dumps(part_lengths(packed)), (_write_shared_memory(layout_chunks(packed)),))
    except OSError:  # no memory or no descriptor is left
        return CallBody(pickle_value(value))


class CallBuffers:
    """Shared memory for large arguments, reused when the called process is done with it. Thread: any."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lock = Lock()

    def pack(self, value: object) -> tuple[CallBody, int]:
        """The body, and the number of its buffer (0: none), which `release` takes. The sender closes the
        descriptors."""
        packed = pack_items(None, [value])
        try:
            with self._lock:
                placed = self._pool.put(packed)
                fd = placed.fd if placed.spilled else os.dup(placed.fd)
        except OSError:  # no memory or no descriptor is left
            return CallBody(pickle_value(value)), 0
        return CallBody(marshal.dumps(placed.lengths), (fd,)), 0 if placed.spilled else placed.buffer

    def release(self, buffer: int, *, is_unused: bool) -> None:
        """`is_unused`: no process has a view of it."""
        with self._lock:
            if is_unused:
                self._pool.free(buffer)
            else:
                self._pool.discard(buffer)
            self._pool.take_closed()  # descriptors are sent with every call

    def close(self) -> None:
        with self._lock:
            self._pool.close()


def pickle_if_small(value: object) -> bytes | None:
    """The pickled value; None: it is large."""
    buffers: list[object] = []
    try:
        data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    except Exception:
        data = pickle_value(value)  # by cloudpickle
        buffers.clear()
    if len(data) > MAX_INLINE_BYTES:
        return None
    if not buffers:
        return data
    return pickle.dumps(value, 5) if len(data) + sum(map(_nbytes, buffers)) <= MAX_INLINE_BYTES else None


def _nbytes(buffer: Any) -> int:
    with memoryview(buffer) as view:
        return view.nbytes


def _write_shared_memory(chunks: list[ReadableBuffer]) -> int:
    fd = os.memfd_create("call", os.MFD_CLOEXEC)
    try:
        write_all(fd, chunks)
    except BaseException:
        os.close(fd)
        raise
    return fd


class OpenedValue:
    """A received value, and the shared memory that it may be in."""

    __slots__ = ("_mapped", "value")

    def __init__(self, value: Any, mapped: MappedPayload | None = None) -> None:
        self.value = value
        self._mapped = mapped

    def close(self) -> bool:
        """Drop the value. False: a view of the shared memory is kept elsewhere."""
        self.value = None
        return self._mapped is None or self._mapped.close()


def open_value(data: Chunk, descriptors: Sequence[int] = ()) -> OpenedValue:
    """Load a value; closes the descriptors. Arrays in shared memory are mapped copy-on-write: writes are private."""
    if not descriptors:
        if data[:1] == _LAYOUT_MARK:
            return OpenedValue(_load_layout(data))
        return OpenedValue(pickle.loads(data))  # noqa: S301 - from our driver or a worker of the same run
    try:
        mapped = MappedPayload(descriptors[0], marshal.loads(data))  # noqa: S302 - from a worker of the same run
    finally:
        close_descriptors(descriptors)
    _, (value,) = unpack_payload(mapped.stream, mapped.buffers)
    return OpenedValue(value, mapped)


def load_value(data: Chunk, descriptors: Sequence[int] = ()) -> Any:
    """See `open_value`."""
    return open_value(data, descriptors).value


# ---------------------------------------------------------------------------------------------- for another machine

_LAYOUT_MARK = b"L"
"""First byte of a large value as one buffer; a pickle begins with another one."""
_LAYOUT_HEADER = Struct("<cI")


def pack_portable(value: object) -> bytes:
    """A value as one buffer, which `load_value` accepts."""
    data = pickle_if_small(value)
    if data is not None:
        return data
    packed = pack_items(None, [value])
    return b"".join([_layout_header(marshal.dumps(part_lengths(packed))), *layout_chunks(packed)])


def _layout_header(lengths: bytes) -> bytes:
    return _LAYOUT_HEADER.pack(_LAYOUT_MARK, len(lengths)) + lengths


def _split_portable(data: Chunk) -> tuple[bytes, memoryview]:
    """The marshalled lengths, and the layout."""
    view = memoryview(data)
    _, size = _LAYOUT_HEADER.unpack_from(view)
    start = _LAYOUT_HEADER.size + size
    return bytes(view[_LAYOUT_HEADER.size : start]), view[start:]


def _load_layout(data: Chunk) -> Any:
    lengths, layout = _split_portable(data)
    # a copy: aligned, and arrays are writable
    stream, buffers = split_layout(memoryview(bytearray(layout)), marshal.loads(lengths))  # noqa: S302 - from our own processes
    _, (value,) = unpack_payload(stream, buffers)
    return value


def to_shared_memory(data: Chunk) -> CallBody:
    """A portable value for a worker of this machine; the sender closes the descriptors."""
    if data[:1] != _LAYOUT_MARK:
        return CallBody(bytes(data))
    lengths, layout = _split_portable(data)
    try:
        return CallBody(lengths, (_write_shared_memory([layout]),))
    except OSError:  # no memory or no descriptor is left
        return CallBody(bytes(data))


def to_portable(data: Chunk, descriptors: Sequence[int]) -> bytes:
    """The body of a frame as one buffer; closes the descriptors."""
    if not descriptors:
        return bytes(data)
    try:
        size = os.fstat(descriptors[0]).st_size
        layout = bytearray(size)
        view = memoryview(layout)
        done = 0
        while done < size:
            done += os.preadv(descriptors[0], [view[done:]], done)
    finally:
        close_descriptors(descriptors)
    return b"".join((_layout_header(bytes(data)), layout))
