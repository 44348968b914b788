"""Exchange of values between the ranks of a gang, without the import time of torch."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

CONNECT_TIMEOUT_S = 60.0


class SocketGroup:
    """Ranks connect at MASTER_ADDR and MASTER_PORT, as those of torch.distributed do. A rank whose peer has died waits
    without limit, so that the engine has to end it."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self.rank:
            self._peers = [_connect(address).makefile("rw")]
        else:
            with socket.create_server(address) as server:
                self._peers = [server.accept()[0].makefile("rw") for _ in range(1, self.ranks)]

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in no particular order. All ranks must call it."""
        if self.rank:
            self._send(self._peers[0], value)
            found: list[Any] = self._receive(self._peers[0])
            return found
        values = [value, *map(self._receive, self._peers)]
        for peer in self._peers:
            self._send(peer, values)
        return values

    def _send(self, peer: Any, value: Any) -> None:
        try:
            peer.write(json.dumps(value) + "\n")
            peer.flush()
        except OSError:
            _wait_for_end()

    def _receive(self, peer: Any) -> Any:
        line = peer.readline()
        return json.loads(line) if line else _wait_for_end()


def _connect(address: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection(address, 1)
        except OSError:
            assert time.monotonic() < until, f"rank 0 does not listen at {address}"
            time.sleep(0.01)
            continue
        connection.settimeout(None)
        return connection


def _wait_for_end() -> None:
    while True:
        time.sleep(1)
