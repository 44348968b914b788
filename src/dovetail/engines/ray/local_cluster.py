"""Local Ray cluster for this process alone: its size, start with retries, diagnosis of a failed start."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.lean import SYSTEM, without_helpers
from dovetail.engines.ray.ray_import import LOG_LEVEL, keep_signal_handlers, ray_module, suppress_warnings
from dovetail.errors import EngineError, Problem
from dovetail.resources.cluster import Cluster, Node
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_ATTEMPTS = 3
STORE_MEMORY_FRACTION = 0.3
MAX_STORE_BYTES = 4 << 30
MIN_STORE_BYTES = 80 << 20
"""Ray refuses less than 75 MiB."""
SHM = Path("/dev/shm")  # noqa: S108 - where Ray keeps objects
SHM_FRACTION = 0.9
BUSY_MARKER = "WaitForDashboardAgentPorts"
"""In the stack of a raylet whose helpers did not start in 15 s."""
KILL_TIMEOUT_S = 5.0
SERVER_NAMES = ("gcs_server", "raylet")
LOG_NAMES = ("raylet.err", "gcs_server.err", "raylet.out", "gcs_server.out")
_ERROR_LINE = re.compile(r"^\[[^\]]* [FCE] \d+ \d+\]|Check failed|^\w*(Error|Exception):")


@dataclass(frozen=True, slots=True)
class RaySize:
    """What a Ray of our own may use."""

    cpus: int
    memory_bytes: int
    store_bytes: int | None
    """None: as Ray thinks."""


def ray_size(machine: Cluster, shm_free: int | None) -> RaySize:
    """What this process may use of its machine; objects get a part of the memory, within /dev/shm."""
    node = machine.nodes[0]
    store = min(int(node.memory_bytes * STORE_MEMORY_FRACTION), MAX_STORE_BYTES)
    if shm_free is not None:
        store = min(store, int(shm_free * SHM_FRACTION))
    known = store if store >= MIN_STORE_BYTES else None  # Ray then puts them on disk
    return RaySize(max(1, node.cpu_milli // 1000), max(0, node.memory_bytes - (known or 0)), known)


def expected_cluster(machine: Cluster) -> Cluster:
    """What a Ray of our own would have, without starting it."""
    size = ray_size(machine, _free_bytes(SHM))
    node = Node(machine.nodes[0].name, size.cpus * 1000, size.memory_bytes, machine.nodes[0].gpus)
    return Cluster((node,), machine.notes)


def start_local_ray(ray: Any, say: Callable[[str], None], init: Callable[[Any, RaySize], None] | None = None) -> None:
    """ray.init of a new local Ray, or an EngineError with the raylet's own words."""
    size = ray_size(Cluster.local(), _free_bytes(SHM))
    causes: list[StartFailure] = []
    for attempt in range(1, MAX_ATTEMPTS + 1):
        began, before = time.time(), _children()
        try:
            if init is not None:
                init(ray, size)
            else:
                _init(ray, size, lean=attempt < MAX_ATTEMPTS)
        except Exception as error:  # whatever Ray raises: it has many ways
            causes.append(_read_start_failure(error, began))
            clean_up(ray, before)
            if attempt < MAX_ATTEMPTS:
                say(f"Ray did not start ({causes[-1].message}); trying again, {attempt + 1} of {MAX_ATTEMPTS}")
        except BaseException:  # Ctrl-C: nothing is left behind
            clean_up(ray, before)
            raise
        else:
            return
    raise EngineError(_start_problem(causes, size))


def _init(ray: Any, size: RaySize, *, lean: bool) -> None:
    """`lean`: without helpers that nobody needs; the last attempt is Ray as it comes."""
    with suppress_warnings(), keep_signal_handlers(), without_helpers() if lean else nullcontext():
        ray.init(
            address="local",  # whatever RAY_ADDRESS says
            num_cpus=size.cpus,
            _memory=size.memory_bytes or None,
            object_store_memory=size.store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=LOG_LEVEL,
            _system_config=dict(SYSTEM) if lean else None,
        )


def clean_up(ray: Any, before: Iterable[int]) -> None:
    """Ends what a failed start has left: Ray forgets its processes when it raises."""
    import psutil

    with suppress_warnings(), keep_signal_handlers(), contextlib.suppress(Exception):  # it was never whole
        ray.shutdown()
    old, folder = set(before), str(Path(ray_module("ray").__file__).parent)
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in old]
    left = [child for child in children if is_ray_process(_command_line(child), folder)]
    for child in left:
        try:
            child.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(left, timeout=KILL_TIMEOUT_S)


def _children() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def _command_line(process: Any) -> list[str]:
    import psutil

    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def is_ray_process(words: Sequence[str], folder: str) -> bool:
    """Whether a process with this command line is one of Ray's, whose package is in that folder. In Ray's own images
    everything lies below /home/ray. Pure."""
    if not words:
        return False
    return os.path.basename(words[0]) in SERVER_NAMES or any(  # noqa: PTH119
        word.startswith(("ray::", f"{folder}/")) for word in words
    )


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


# --- why it failed


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why a start failed."""

    message: str
    line: str = ""
    """Ray's own."""
    log: str = ""
    is_busy: bool = False


def diagnose_start(logs: Sequence[tuple[str, str]], error: str) -> StartFailure:
    """From (name, text) of log files, the raylet's first, and what ray.init raised. Pure."""
    for name, text in logs:
        if BUSY_MARKER in text:
            line = next(line.strip() for line in text.splitlines() if BUSY_MARKER in line)
            return StartFailure("the machine is too busy", line[:300], name, is_busy=True)
    for name, text in logs:
        lines = [line.strip() for line in text.splitlines() if _ERROR_LINE.search(line.strip())]
        if lines:
            return StartFailure("a process of Ray ended", lines[-1][:300], name)
    words = (error.strip().splitlines() or ["no reason given"])[0][:300]
    busy = "timed out" in error.lower()
    return StartFailure("the machine is too busy" if busy else words, words, is_busy=busy)


def _read_start_failure(error: Exception, began: float) -> StartFailure:
    top = Path(ray_module("ray._common.utils").get_default_ray_temp_dir())
    logs = []
    for session in sorted(top.glob(f"session_*_{os.getpid()}"))[-1:]:
        for path in (session / "logs" / name for name in LOG_NAMES):
            try:
                if path.stat().st_mtime >= began - 1:
                    logs.append((str(path), path.read_text(errors="replace")[-100_000:]))
            except OSError:
                continue
    return diagnose_start(logs, f"{type(error).__name__}: {error}")


def _start_problem(causes: list[StartFailure], size: RaySize) -> Problem:
    last = causes[-1]
    store = format_size(size.store_bytes) if size.store_bytes else "as Ray chose"
    evidence = (
        f"{last.log or 'ray.init'}: {last.line}",
        f"asked for {size.cpus} CPUs, {store} of objects; tried {len(causes)} times",
    )
    fixes = ["run without Ray, on the same machine: engine local"]
    if last.is_busy:
        fixes.insert(0, "end what else computes here, or wait, and start again: Ray gives its helpers 15 s to start")
    elif last.log:
        fixes.insert(0, f"read what Ray wrote: {Path(last.log).parent}")
    else:
        fixes.insert(0, 'try Ray alone: python -c "import ray; ray.init()"')
    return Problem("DT392", f"Ray does not start: {last.message}", evidence, tuple(fixes))
