"""Port of rank 0 of the next gang: a free one of this machine, which is held until the gang starts.

As under torchrun, another program can take it in the moment between its release and the start of rank 0; then the
attempt fails, and is retried with another port.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from dovetail.jobs.store import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable


class RendezvousPort:
    """Thread: loop."""

    def __init__(self, find_host: Callable[[], str]) -> None:
        """`find_host`: the address of this machine for other workers; called once."""
        self._find_host = find_host
        self._host = ""
        self._socket: socket.socket | None = None
        self._address = ""

    def address(self) -> str:
        """HOST:PORT; "" if no port is free."""
        if self._socket is None:
            try:
                self._host = self._host or self._find_host()
                self._socket = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
                self._socket.bind(("", 0))
            except (OSError, StoreUnavailableError):
                self.release()
                return ""
            self._address = f"{self._host}:{self._socket.getsockname()[1]}"
        return self._address

    def release(self) -> None:
        """Release the port for rank 0; the next gang gets another one."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._address = None, ""
