"""CPU and memory of a process and everything it started."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAMPLE_S = 0.05


def cpu_s() -> float:
    """Of this process and of all that it has waited for: the workers of runs that are over."""
    return _seconds(resource.RUSAGE_SELF) + _seconds(resource.RUSAGE_CHILDREN)


def _seconds(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def apart(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Any:
    """The JSON that a fresh Python prints last."""
    ran = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=3600, env=environment
    )
    if ran.returncode:
        sys.exit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def spent_by(arguments: Sequence[str], environment: Mapping[str, str]) -> float:
    """CPU seconds of a fresh Python and of all that it waited for."""
    before = _seconds(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=600, env=environment)
    return _seconds(resource.RUSAGE_CHILDREN) - before


def with_bytecode(folder: str) -> dict[str, str]:
    """An environment in which modules are compiled once, as those of an installed package are."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": folder}


def as_installed() -> dict[str, str]:
    """An environment in which modules are compiled where they lie, if they are not yet, as others find them, too."""
    both = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    return {name: value for name, value in os.environ.items() if name not in both}


def without_bytecode() -> dict[str, str]:
    """An environment in which every process compiles what it imports."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"}


def shmem_mb() -> float:
    """Of the whole machine: nameless shared memory lies in no folder where it could be counted."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) / 1024
    return 0.0


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def held_mb() -> float:
    """Memory of this process and all below it without shared memory; what several share counts once."""
    return sum(map(_own_mb, [psutil.Process(), *psutil.Process().children(recursive=True)]))


def _own_mb(process: psutil.Process) -> float:
    with suppress(OSError):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_File:"))) / 1024
    return 0.0


class Peak:
    """Samples memory from a thread while it is entered: of these processes, and what shared memory the machine has more
    than before, mapped by somebody or not."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = 0.0

    def __enter__(self) -> Self:
        self._before = shmem_mb()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.samples.append(held_mb() + shmem_mb() - self._before)
            if self._over.wait(SAMPLE_S):
                return

    @property
    def mb(self) -> float:
        return max(self.samples)

    @property
    def growth(self) -> float:
        """The peak of the last third of the time against that of the second."""
        third = len(self.samples) // 3
        if not third:
            return 1.0
        return max(self.samples[2 * third :]) / max(self.samples[third : 2 * third])
