"""A redis-server for tests: its own process on a Unix socket, in a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

PROGRAMS = ("redis-server", "valkey-server")


def server_program() -> str | None:
    return next((found for program in PROGRAMS if (found := shutil.which(program))), None)


class RedisProcess:
    """A redis-server that a test can kill and start again in the same folder."""

    def __init__(self, *options: str) -> None:
        program = server_program()
        if program is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        # the path of a Unix socket has at most 107 characters
        self.folder = Path(tempfile.mkdtemp(prefix="dt-redis-", dir="/tmp"))
        self._command = [
            *(program, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)),
            *("--save", "", "--daemonize", "no", "--logfile", str(self.folder / "log"), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}?db=0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        until(self._answers, f"redis-server answers; its log: {self.folder / 'log'}")

    def kill(self) -> None:
        """SIGKILL: nothing that is not on the disk survives."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        import redis

        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        try:
            with self.client() as client:
                return bool(client.ping())
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):  # not listening yet, or loading
            return False

    def client(self) -> AbstractContextManager[Any]:
        import redis

        client: AbstractContextManager[Any] = redis.Redis(unix_socket_path=str(self.socket), protocol=2)
        return client


def run_server(*options: str) -> Iterator[RedisProcess]:
    """Body of a fixture."""
    process = RedisProcess(*options)
    try:
        process.start()
        yield process
    finally:
        process.close()
