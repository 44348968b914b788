"""Arguments and results of calls: pickled into the frame, in shared memory, or for another machine in pieces."""

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
    from collections.abc import Iterable, Sequence

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

PIECE_BYTES = 4 << 20
"""Maximum size of a piece. Between machines, a large value travels in pieces, and is never copied as a whole by an
agent of Ray: a copy holds the GIL, and an agent that holds it for seconds counts as lost."""
_LAYOUT_MARK = b"L"
"""First byte of a large value; a pickle begins with another one."""
_LAYOUT_HEADER = Struct("<cI")


def pack_portable(value: object) -> list[bytes]:
    """A value in pieces, which `load_portable` accepts."""
    data = pickle_if_small(value)
    if data is not None:
        return [data]
    packed = pack_items(None, [value])
    return [_layout_header(marshal.dumps(part_lengths(packed))), *_cut(layout_chunks(packed))]


def _layout_header(lengths: bytes) -> bytes:
    return _LAYOUT_HEADER.pack(_LAYOUT_MARK, len(lengths)) + lengths


def _cut(chunks: Iterable[ReadableBuffer]) -> list[bytes]:
    pieces: list[bytes] = []
    together: list[memoryview] = []
    size = 0
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            part = rest[: PIECE_BYTES - size]
            rest = rest[len(part) :]
            together.append(part)
            size += len(part)
            if size == PIECE_BYTES:
                pieces.append(b"".join(together))
                together, size = [], 0
    if together or not pieces:
        pieces.append(b"".join(together))
    return pieces


def _is_layout(pieces: Sequence[Chunk]) -> bool:
    return pieces[0][:1] == _LAYOUT_MARK


def _lengths(header: Chunk) -> bytes:
    """The marshalled lengths of the parts; the layout begins with the next piece."""
    return bytes(header[_LAYOUT_HEADER.size :])


def load_portable(pieces: Sequence[Chunk]) -> Any:
    if not _is_layout(pieces):
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return pickle.loads(data)  # noqa: S301 - from our driver or a worker of the same run
    # a copy: aligned, and arrays are writable
    layout = memoryview(bytearray().join(pieces[1:]))
    stream, buffers = split_layout(layout, marshal.loads(_lengths(pieces[0])))  # noqa: S302 - from our own processes
    _, (value,) = unpack_payload(stream, buffers)
    return value


def to_shared_memory(pieces: Sequence[Chunk]) -> CallBody:
    """A portable value for a worker of this machine; the sender closes the descriptors. Raises OSError if no memory or
    no descriptor is left."""
    if not _is_layout(pieces):
        return CallBody(b"".join(pieces))
    return CallBody(_lengths(pieces[0]), (_write_shared_memory(list(pieces[1:])),))


def to_portable(data: Chunk, descriptors: Sequence[int]) -> list[bytes]:
    """The body of a frame in pieces; closes the descriptors."""
    if not descriptors:
        return _cut([data])
    try:
        size = os.fstat(descriptors[0]).st_size
        pieces = [_layout_header(bytes(data))]
        done = 0
        while done < size:
            pieces.append(os.pread(descriptors[0], PIECE_BYTES, done))
            done += len(pieces[-1])
    finally:
        close_descriptors(descriptors)
    return pieces
