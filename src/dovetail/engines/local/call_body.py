"""Arguments and results of calls between workers: pickled into the frame, or in shared memory."""

from __future__ import annotations

import marshal
import os
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.engines.local.buffer_pool import MappedPayload, write_all
from dovetail.engines.local.payload_codec import (
    MAX_INLINE_BYTES,
    layout_chunks,
    pack_items,
    part_lengths,
    unpack_payload,
)
from dovetail.engines.local.protocol import close_descriptors, pickle_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.engines.local.protocol import Chunk


class CallBody(NamedTuple):
    """Body and descriptors of a frame. With a descriptor, the body has the lengths of the parts in shared memory."""

    data: bytes
    descriptors: tuple[int, ...] = ()


def pack_value(value: object) -> CallBody:
    """Pickle a value; the sender closes the descriptors."""
    has_buffers: list[object] = []
    try:
        data = pickle.dumps(value, 5, buffer_callback=has_buffers.append)
    except Exception:
        data = pickle_value(value)  # by cloudpickle
        has_buffers.clear()
    if has_buffers and len(data) <= MAX_INLINE_BYTES and sum(_nbytes(one) for one in has_buffers) <= MAX_INLINE_BYTES:
        return CallBody(pickle.dumps(value, 5))
    if not has_buffers and len(data) <= MAX_INLINE_BYTES:
        return CallBody(data)
    try:
        return _pack_into_shared_memory(value)
    except OSError:  # no memory or no descriptor is left
        return CallBody(pickle_value(value) if has_buffers else data)


def _nbytes(buffer: Any) -> int:
    with memoryview(buffer) as view:
        return view.nbytes


def _pack_into_shared_memory(value: object) -> CallBody:
    packed = pack_items(None, [value])
    fd = os.memfd_create("call", os.MFD_CLOEXEC)
    try:
        write_all(fd, layout_chunks(packed))
    except BaseException:
        os.close(fd)
        raise
    return CallBody(marshal.dumps(part_lengths(packed)), (fd,))


def load_value(data: Chunk, descriptors: Sequence[int] = ()) -> Any:
    """The value; closes the descriptors. Arrays in shared memory are mapped copy-on-write: writes are private."""
    if not descriptors:
        return pickle.loads(data)  # noqa: S301 - from our driver or a worker of the same run
    try:
        mapped = MappedPayload(descriptors[0], marshal.loads(data))  # noqa: S302 - from a worker of the same run
    finally:
        close_descriptors(descriptors)
    _, (value,) = unpack_payload(mapped.stream, mapped.buffers)
    return value
