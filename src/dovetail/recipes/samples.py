"""How does a worker leave samples of rows behind, so that those of all workers can be put together?"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from dovetail.engines.worker import Worker

PARTS = ".parts"
NODE = "node-"
ARRAY_LIMIT = 1000
"""Of larger arrays only the beginning is shown."""

Key = tuple[int, ...]


class Samples:
    """What one worker writes of one operator."""

    def __init__(self, name: str, folder: str, limit: int, host: str) -> None:
        self.limit = limit
        self.enough = limit <= 0
        self._name, self._folder, self._host = name, Path(folder) / PARTS, host
        self._file: int | None = None
        self._keys: set[Key] = set()
        self._lock = Lock()
        self._worker = Worker(0, "")
        self._calls = 0

    def key(self, place: int) -> Key:
        """Of a row of the running call; without an engine, a number that grows."""
        keys = self._worker.item_keys
        if place < len(keys):
            return keys[place]
        self._calls += 1
        return (self._calls,)

    def arrived(self, node: str) -> None:
        """Leaves a mark, so that it can be told which nodes do not see the folder."""
        if self._is_seen() and node:
            try:
                (self._folder / f"{NODE}{told(node)}").touch()
            except OSError:
                return

    def add(self, key: Key, sample: Mapping[str, Any]) -> None:
        """Once, however often the row is run here."""
        with self._lock:
            if self.enough or key in self._keys:
                return
            line = as_line({"key": key, "sample": sample})
            if not self._write(line):
                self.enough = True
                return
            self._keys.add(key)
            self.enough = len(self._keys) >= self.limit

    def _write(self, line: bytes) -> bool:
        try:
            if self._file is None:
                if not self._is_seen():
                    return False
                path = self._folder / f"{told(self._name)}.{os.urandom(8).hex()}.part"
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            return os.write(self._file, line) == len(line)  # in one piece, whenever we are killed
        except OSError:
            return False

    def _is_seen(self) -> bool:
        """Whether the folder is there. On another machine a missing one is not made: nobody would find it there."""
        try:
            if socket.gethostname() == self._host:
                self._folder.mkdir(parents=True, exist_ok=True)
            return self._folder.is_dir()
        except OSError:
            return False

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def as_line(data: Mapping[str, Any]) -> bytes:
    """JSON to be read by people. Half of a surrogate pair has no form in UTF-8, but one in JSON."""
    text = json.dumps(_plain(data), ensure_ascii=False, separators=(", ", ": "))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    """What JSON can hold of it; of bytes how many they are."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist") and getattr(value, "size", ARRAY_LIMIT + 1) <= ARRAY_LIMIT:
        return _plain(value.tolist())
    return str(value)[:ARRAY_LIMIT]


def told(name: str) -> str:
    """As a part of a file's name; no two names are told alike."""
    return quote(name, safe="")
