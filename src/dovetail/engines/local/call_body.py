"""Arguments and results of calls: pickled into the frame, in shared memory, or for another machine as one buffer."""

from __future__ import annotations

import marshal
import os
import pickle
from struct import Struct
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

    from dovetail.engines.local.protocol import Chunk


class CallBody(NamedTuple):
    """Body and descriptors of a frame. With a descriptor, the body has the lengths of the parts in shared memory."""

    data: bytes
    descriptors: tuple[int, ...] = ()


def pack_value(value: object) -> CallBody:
    """Pickle a value; the sender closes the descriptors."""
    data = _pickle_if_small(value)
    if data is not None:
        return CallBody(data)
    try:
        return _pack_into_shared_memory(value)
    except OSError:  # no memory or no descriptor is left
        return CallBody(pickle_value(value))


def _pickle_if_small(value: object) -> bytes | None:
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


def _pack_into_shared_memory(value: object) -> CallBody:
    packed = pack_items(None, [value])
    return CallBody(marshal.dumps(part_lengths(packed)), (_write_shared_memory(layout_chunks(packed)),))


def _write_shared_memory(chunks: list[ReadableBuffer]) -> int:
    fd = os.memfd_create("call", os.MFD_CLOEXEC)
    try:
        write_all(fd, chunks)
    except BaseException:
        os.close(fd)
        raise
    return fd


def load_value(data: Chunk, descriptors: Sequence[int] = ()) -> Any:
    """The value; closes the descriptors. Arrays in shared memory are mapped copy-on-write: writes are private."""
    if not descriptors:
        if data[:1] == _LAYOUT_MARK:
            return _load_layout(data)
        return pickle.loads(data)  # noqa: S301 - from our driver or a worker of the same run
    try:
        mapped = MappedPayload(descriptors[0], marshal.loads(data))  # noqa: S302 - from a worker of the same run
    finally:
        close_descriptors(descriptors)
    _, (value,) = unpack_payload(mapped.stream, mapped.buffers)
    return value


# ---------------------------------------------------------------------------------------------- for another machine

_LAYOUT_MARK = b"L"
"""First byte of a large value as one buffer; a pickle begins with another one."""
_LAYOUT_HEADER = Struct("<cI")


def pack_portable(value: object) -> bytes:
    """A value as one buffer, which `load_value` accepts."""
    data = _pickle_if_small(value)
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
