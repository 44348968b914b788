"""A redis-server for a benchmark: on a free port of this machine, in a temporary folder, ended with its context."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Self

PROGRAMS = ("redis-server", "valkey-server")
START_LIMIT_S = 20.0


class RedisProcess:
    """Without persistence: the cost of a disk is not what is measured."""

    def __init__(self) -> None:
        program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
        if program is None:
            sys.exit("redis-server is not installed: apt-get install redis-server")
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        self.port = _free_port()
        listens = ("--port", str(self.port), "--bind", "127.0.0.1")
        keeps = ("--save", "", "--appendonly", "no", "--dir", self._folder.name)
        self._process = subprocess.Popen([program, *listens, *keeps], stdout=subprocess.DEVNULL)
        import redis

        self.client: Any = redis.Redis(port=self.port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cpu_s(self) -> float:
        used = self.client.info("cpu")
        return float(used["used_cpu_sys"]) + float(used["used_cpu_user"])

    def __enter__(self) -> Self:
        import redis

        until = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self.client.ping()
            except redis.exceptions.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > until:
                    self.__exit__()
                    raise
                time.sleep(0.01)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
