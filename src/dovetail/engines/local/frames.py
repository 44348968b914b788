"""How do driver, nursery and workers speak with each other? Frames over Unix sockets, with descriptors beside them.

A frame is a small head (marshalled: texts, numbers, tuples), a body that nobody on the way opens, and descriptors. Both
ends run the same interpreter, and nobody else can reach the socket, which has no name.
"""

from __future__ import annotations

import errno
import marshal
import resource
import socket
import time
from array import array
from collections import deque
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.errors import EngineError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    Piece = bytes | memoryview

SIZES = Struct("<II")
MOST_DESCRIPTORS = 250
"""Of one sendmsg; the kernel takes 253."""
MOST_PIECES = 512
"""Of one sendmsg; the kernel takes 1024."""
AT_ONCE = 1 << 18
_BESIDE = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
# plain numbers, because enums cost as much as half of the system call
DO_NOT_WAIT = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC, _CUT_SHORT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_SOCKET, _RIGHTS = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)
SHORT = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
A_MOMENT_S = 0.005
MORE_DESCRIPTORS = ("+",)
"""The head of a frame that only brings descriptors for the one behind it."""


class Frame(NamedTuple):
    head: tuple[Any, ...]
    body: memoryview
    descriptors: tuple[int, ...]


def frame(head: tuple[Any, ...], body: Sequence[Piece] = (), count: int = 0) -> list[Piece]:
    """The pieces of a frame with so many descriptors beside it."""
    marshalled = marshal.dumps((count, head))
    size = sum(map(len, body))
    if size + len(marshalled) >= 1 << 32:
        raise OverflowError(f"a message of {size} bytes is more than a frame holds")
    first = SIZES.pack(len(marshalled), size) + marshalled
    if size < AT_ONCE:
        return [b"".join((first, *body))]
    return [first, *body]


def send_all(
    sock: socket.socket, head: tuple[Any, ...], body: Sequence[Piece] = (), descriptors: Sequence[int] = ()
) -> None:
    """Blocks until all of it is on its way: for workers and the nursery, whose driver always reads."""
    pieces: deque[tuple[Piece, Sequence[int]]] = deque(_with_descriptors(head, body, descriptors))
    while pieces:
        _send_some(sock, pieces)


def _with_descriptors(
    head: tuple[Any, ...], body: Sequence[Piece], descriptors: Sequence[int]
) -> list[tuple[Piece, Sequence[int]]]:
    found: list[tuple[Piece, Sequence[int]]] = []
    count = len(descriptors)
    while len(descriptors) > MOST_DESCRIPTORS:
        found.append((frame(MORE_DESCRIPTORS)[0], descriptors[:MOST_DESCRIPTORS]))
        descriptors = descriptors[MOST_DESCRIPTORS:]
    pieces = frame(head, body, count)
    found.append((pieces[0], descriptors))
    found += [(piece, ()) for piece in pieces[1:]]
    return found


def _send_some(sock: socket.socket, pieces: deque[tuple[Piece, Sequence[int]]]) -> None:
    """One sendmsg; what was not taken stays. Raises BlockingIOError if a socket that does not block is full."""
    first, descriptors = pieces[0]
    if descriptors:
        beside = [(_SOCKET, _RIGHTS, array("i", descriptors))]
        sent = sock.sendmsg([first], beside)
        pieces[0] = (first, ())
    elif len(pieces) == 1:
        sent = sock.send(first)
    else:
        together: list[Piece] = []
        for piece, fds in pieces:
            if fds or len(together) == MOST_PIECES:
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
    """One end of a socket: what comes is cut into frames, what goes never blocks if the socket does not."""

    __slots__ = ("_beside", "_buffer", "_waiting", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._beside: deque[int] = deque()
        self._waiting: deque[tuple[Piece, Sequence[int]]] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    # --- out

    def put(self, head: tuple[Any, ...], body: Sequence[Piece] = (), descriptors: Sequence[int] = ()) -> None:
        """Only remembers it: see `flush`."""
        if descriptors:
            self._waiting += _with_descriptors(head, body, descriptors)
        else:
            self._waiting += [(piece, ()) for piece in frame(head, body)]

    def flush(self) -> bool:
        """As much as goes now. Whether all of it went; what is meant for one who is gone counts as gone."""
        waiting = self._waiting
        try:
            while waiting:
                _send_some(self.sock, waiting)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in SHORT:
                time.sleep(A_MOMENT_S)  # of memory or of room for descriptors: it will come back
                return False
            waiting.clear()
        return True

    def close(self) -> None:
        """For everybody: a process that was forked meanwhile may hold the socket, too."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    # --- in

    def receive(self, flags: int = 0) -> tuple[list[Frame], bool]:
        """One read: the frames that are whole now, and whether the other end is still there.

        Raises BlockingIOError if there is nothing and the socket (or MSG_DONTWAIT) does not block.
        """
        try:
            data, beside, told, _ = self.sock.recvmsg(AT_ONCE, _BESIDE, _CLOSE_ON_EXEC | flags)
        except (ConnectionError, InterruptedError):
            return [], False
        if told & _CUT_SHORT:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            message = f"too many open files: payloads are descriptors, and the limit is {limit}"
            raise EngineError(Problem("DT334", message, fixes=("ulimit -n 65536",)))
        for level, kind, fds in beside:
            if level == _SOCKET and kind == _RIGHTS:
                numbers = array("i")
                numbers.frombytes(fds[: len(fds) - len(fds) % 4])
                self._beside += numbers
        if not data:
            return [], False
        if self._buffer:
            self._buffer += data
            return self._cut_buffer(), True
        frames, used = self._cut(data)
        if used < len(data):
            self._buffer += memoryview(data)[used:]
        return frames, True

    def _cut_buffer(self) -> list[Frame]:
        buffer = self._buffer
        if len(buffer) >= SIZES.size:
            head, body = SIZES.unpack_from(buffer)
            if len(buffer) < SIZES.size + head + body:
                return []  # without copying what is not whole yet
        data = bytes(buffer)
        frames, used = self._cut(data)
        if used:
            del buffer[:used]
        return frames

    def _cut(self, data: bytes) -> tuple[list[Frame], int]:
        """The whole frames at the beginning of the data, and how many bytes they are."""
        frames: list[Frame] = []
        at, end = 0, len(data)
        view = memoryview(data)
        while end - at >= SIZES.size:
            head_size, body_size = SIZES.unpack_from(data, at)
            body_at = at + SIZES.size + head_size
            if body_at + body_size > end:
                break
            count, head = marshal.loads(view[at + SIZES.size : body_at])  # noqa: S302 - from our own processes only
            at = body_at + body_size
            if head != MORE_DESCRIPTORS:
                taken = tuple(self._beside.popleft() for _ in range(count)) if count else ()
                frames.append(Frame(head, view[body_at:at], taken))
        return frames, at
