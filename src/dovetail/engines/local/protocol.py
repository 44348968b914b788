"""Protocol between driver, fork server and workers: frames with file descriptors over Unix sockets, payload kinds and
flags.

A frame is a small marshalled head (texts, numbers, tuples), a body that is not opened on the way, and descriptors. Both
ends run the same interpreter, and the unnamed socket is not reachable from other processes.
"""

from __future__ import annotations

import errno
import marshal
import os
import pickle
import resource
import socket
import time
from array import array
from collections import deque
from contextlib import suppress
from enum import Enum
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.engines.local.buffer_pool import MappedPayload
from dovetail.engines.local.standard_descriptors import move_from_standard_descriptors
from dovetail.errors import EngineError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    Chunk = bytes | memoryview

FRAME_HEADER = Struct("<II")
MAX_DESCRIPTORS_PER_SEND = 250
"""Descriptors per sendmsg; the kernel accepts 253."""
MAX_CHUNKS_PER_SEND = 512
"""Buffers per sendmsg; the kernel accepts 1024."""
READ_BYTES, LARGE_READ_BYTES = 1 << 16, 1 << 18
"""Bytes per read, and after a read that was full. Allocating the larger buffer takes 25 us."""
MAX_JOINED_BYTES = 1 << 18
"""Frames up to this size are joined into one buffer."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS_PER_SEND * 4)
# plain numbers: enums would cost half as much as the system call
DONT_WAIT = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC, _ANCILLARY_TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_SOCKET, _RIGHTS = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)
TRANSIENT_ERRNOS = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
RETRY_PAUSE_S = 0.005
EXTRA_DESCRIPTORS_HEAD = ("+",)
"""Head of a frame that only carries descriptors for the next one."""


class Frame(NamedTuple):
    head: tuple[Any, ...]
    body: memoryview
    descriptors: tuple[int, ...]


def encode_frame(head: tuple[Any, ...], body: Sequence[Chunk] = (), count: int = 0) -> list[Chunk]:
    """The buffers of a frame with this number of descriptors."""
    marshalled = marshal.dumps((count, head))
    size = sum(map(len, body))
    if size + len(marshalled) >= 1 << 32:
        raise OverflowError(f"a message of {size} bytes is more than a frame holds")
    first = FRAME_HEADER.pack(len(marshalled), size) + marshalled
    if size < MAX_JOINED_BYTES:
        return [b"".join((first, *body))]
    return [first, *body]


def send_frame(
    sock: socket.socket, head: tuple[Any, ...], body: Sequence[Chunk] = (), descriptors: Sequence[int] = ()
) -> None:
    """Blocks until everything is sent: for workers and the fork server, whose driver always reads."""
    pieces: deque[tuple[Chunk, Sequence[int]]] = deque(_attach_descriptors(head, body, descriptors))
    while pieces:
        _send_some(sock, pieces)


def _attach_descriptors(
    head: tuple[Any, ...], body: Sequence[Chunk], descriptors: Sequence[int]
) -> list[tuple[Chunk, Sequence[int]]]:
    found: list[tuple[Chunk, Sequence[int]]] = []
    count = len(descriptors)
    while len(descriptors) > MAX_DESCRIPTORS_PER_SEND:
        found.append((encode_frame(EXTRA_DESCRIPTORS_HEAD)[0], descriptors[:MAX_DESCRIPTORS_PER_SEND]))
        descriptors = descriptors[MAX_DESCRIPTORS_PER_SEND:]
    pieces = encode_frame(head, body, count)
    found.append((pieces[0], descriptors))
    found += [(piece, ()) for piece in pieces[1:]]
    return found


def _send_some(sock: socket.socket, pieces: deque[tuple[Chunk, Sequence[int]]]) -> None:
    """One sendmsg; removes what was sent. Raises BlockingIOError if a non-blocking socket is full."""
    first, descriptors = pieces[0]
    if descriptors:
        ancillary = [(_SOCKET, _RIGHTS, array("i", descriptors))]
        sent = sock.sendmsg([first], ancillary)
        pieces[0] = (first, ())
    elif len(pieces) == 1:
        sent = sock.send(first)
    else:
        together: list[Chunk] = []
        for piece, fds in pieces:
            if fds or len(together) == MAX_CHUNKS_PER_SEND:
                break
            together.append(piece)
        sent = sock.sendmsg(together)
    while sent:
        piece, fds = pieces[0]
        if sent < len(piece):
            pieces[0] = (memoryview(piece)[sent:], fds)
            return
        sent -= len(piece)
        pieces.popleft()


class Channel:
    """One end of a socket: parses received frames and queues outgoing ones."""

    __slots__ = ("_buffer", "_descriptors", "_read_bytes", "_unsent", "is_broken", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._read_bytes = READ_BYTES
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[Chunk, Sequence[int]]] = deque()
        self.is_broken = False
        """Whether frames could not be sent because the peer does not read any more."""

    def fileno(self) -> int:
        return self.sock.fileno()

    # --- sending

    def put(self, head: tuple[Any, ...], body: Sequence[Chunk] = (), descriptors: Sequence[int] = ()) -> None:
        """Queue a frame; see `flush`."""
        if descriptors:
            self._unsent += _attach_descriptors(head, body, descriptors)
        else:
            self._unsent += [(piece, ()) for piece in encode_frame(head, body)]

    def flush(self) -> bool:
        """Send as much as possible without blocking. True: everything was sent, or the peer has exited."""
        waiting = self._unsent
        try:
            while waiting:
                _send_some(self.sock, waiting)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in TRANSIENT_ERRNOS:
                time.sleep(RETRY_PAUSE_S)  # the kernel is short of memory or descriptors: temporary
                return False
            waiting.clear()
            self.is_broken = True
        return True

    def close(self) -> None:
        """Shut the socket down for all holders: a forked process may have a duplicate."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    # --- receiving

    def receive(self, flags: int = 0) -> tuple[list[Frame], bool]:
        """Read once: the complete frames, and whether the peer is still connected.

        Raises BlockingIOError if there is no data and the socket (or MSG_DONTWAIT) does not block.
        """
        size = self._read_bytes
        try:
            data, ancillary, message_flags, _ = self.sock.recvmsg(size, _ANCILLARY_BYTES, _CLOSE_ON_EXEC | flags)
        except (ConnectionError, InterruptedError):
            return [], False
        if message_flags & _ANCILLARY_TRUNCATED:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            message = f"too many open files: each payload needs a descriptor, and the limit is {limit}"
            raise EngineError(Problem("DT334", message, fixes=("ulimit -n 65536",)))
        for level, kind, fds in ancillary:
            if level == _SOCKET and kind == _RIGHTS:
                numbers = array("i")
                numbers.frombytes(fds[: len(fds) - len(fds) % 4])
                self._descriptors += numbers if min(numbers, default=3) > 2 else move_from_standard_descriptors(numbers)
        if not data:
            return [], False
        self._read_bytes = LARGE_READ_BYTES if len(data) == size else READ_BYTES
        if self._buffer:
            self._buffer += data
            return self._parse_buffer(), True
        frames, used = self._parse_frames(data)
        if used < len(data):
            self._buffer += memoryview(data)[used:]
        return frames, True

    def _parse_buffer(self) -> list[Frame]:
        buffer = self._buffer
        if len(buffer) >= FRAME_HEADER.size:
            head, body = FRAME_HEADER.unpack_from(buffer)
            if len(buffer) < FRAME_HEADER.size + head + body:
                return []  # without copying an incomplete frame
        data = bytes(buffer)
        frames, used = self._parse_frames(data)
        if used:
            del buffer[:used]
        return frames

    def _parse_frames(self, data: bytes) -> tuple[list[Frame], int]:
        """The complete frames at the start of the data, and their length in bytes."""
        frames: list[Frame] = []
        at, end = 0, len(data)
        view = memoryview(data)
        while end - at >= FRAME_HEADER.size:
            head_size, body_size = FRAME_HEADER.unpack_from(data, at)
            body_at = at + FRAME_HEADER.size + head_size
            if body_at + body_size > end:
                break
            count, head = marshal.loads(view[at + FRAME_HEADER.size : body_at])  # noqa: S302 - from our own processes only
            at = body_at + body_size
            if head != EXTRA_DESCRIPTORS_HEAD:
                taken = tuple(self._descriptors.popleft() for _ in range(count)) if count else ()
                frames.append(Frame(head, view[body_at:at], taken))
        return frames, at


KIND_INLINE, KIND_SHARED, KIND_FILE, KIND_WRITTEN = 0, 1, 2, 3
"""How a payload travels: in the body, as a descriptor of shared memory, as an offset in a file; or not at all, because
it was written to its destination."""
FLAG_SPILL, FLAG_NO_MEMFD, FLAG_SPOOL, FLAG_NO_OUTPUT = 1, 2, 4, 8
"""Flags of a message: shared memory is full; descriptors are scarce; spool the output for a later wave; another rank
sends the output."""


class LinkState(Enum):
    """State of a socket over which a process calls another one. Frames have its value."""

    REQUESTED = "requested"
    """The driver, or the agent of the worker, has not answered yet; calls wait."""
    OPEN = "open"
    RELAYED = "relayed"
    """The worker is not on this machine, or its agent did not accept the request: calls go another way."""
    REFUSED = "refused"
    """The called process is gone or stopping."""


DRIVER_PROCESS = (-1, 0)
"""Worker and rank by which a process knows the calls that the driver of a Ray engine sends over a link."""
BREADCRUMB_WORDS = 8
"""Words per breadcrumb: 64 bytes, so that two workers never share a cache line."""
BEGUN_WORD = 4
"""The word of a cell with the number of the last prefetched message that has started."""


def close_descriptors(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def map_file(path: str, offset: int, sizes: Sequence[int]) -> MappedPayload:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return MappedPayload(fd, sizes, offset)
    finally:
        os.close(fd)


def pickle_value(value: object) -> bytes:
    """Pickle a value; falls back to cloudpickle."""
    try:
        return pickle.dumps(value, 5)
    except Exception:
        import cloudpickle

        found: bytes = cloudpickle.dumps(value, 5)
        return found
