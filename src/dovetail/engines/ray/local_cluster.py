"""Private Ray of this process: its size, start with retries, diagnosis of a failed start.

`attachment` calls `start_local_ray` for engine `ray`; `expected_cluster` is for plans made without starting it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray import ray_private
from dovetail.engines.ray.ray_import import LOG_LEVEL, import_ray, keep_signal_handlers, suppress_warnings
from dovetail.errors import EngineError, Problem
from dovetail.resources.cluster import Cluster, Node
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MAX_ATTEMPTS = 3
STORE_MEMORY_FRACTION = 0.3
MAX_STORE_BYTES = 4 << 30
MIN_STORE_BYTES = 80 << 20
"""Ray rejects less than 75 MiB."""
SHM = Path("/dev/shm")  # noqa: S108 - where Ray keeps objects
SHM_FRACTION = 0.9
BUSY_MARKER = "WaitForDashboardAgentPorts"
"""Text in the stack trace of a raylet whose helper processes did not start within 15 s."""
KILL_TIMEOUT_S = 5.0
SERVER_NAMES = ("gcs_server", "raylet")
LOG_NAMES = ("raylet.err", "gcs_server.err", "raylet.out", "gcs_server.out")
_ERROR_LINE = re.compile(r"^\[[^\]]* [FCE] \d+ \d+\]|Check failed|^\w*(Error|Exception):")


@dataclass(frozen=True, slots=True)
class RaySize:
    """Resources of a private Ray."""

    cpus: int
    memory_bytes: int
    store_bytes: int | None
    """None: Ray chooses."""


def ray_size(machine: Cluster, shm_free: int | None) -> RaySize:
    """What this process may use of its machine; the object store gets a part of the memory, limited by /dev/shm."""
    node = machine.nodes[0]
    store = min(int(node.memory_bytes * STORE_MEMORY_FRACTION), MAX_STORE_BYTES)
    if shm_free is not None:
        store = min(store, int(shm_free * SHM_FRACTION))
    known = store if store >= MIN_STORE_BYTES else None  # Ray then keeps objects on disk
    return RaySize(max(1, node.cpu_milli // 1000), max(0, node.memory_bytes - (known or 0)), known)


def expected_cluster(machine: Cluster) -> Cluster:
    """Cluster that a private Ray would have, without starting it."""
    size = ray_size(machine, _free_bytes(SHM))
    node = Node(machine.nodes[0].name, size.cpus * 1000, size.memory_bytes, machine.nodes[0].gpus)
    return Cluster((node,), machine.notes)


def start_local_ray(ray: Any, say: Callable[[str], None], init: Callable[[Any, RaySize], None] | None = None) -> None:
    """Start a private Ray; an EngineError quotes Ray's own log. `init`: replaces ray.init in tests."""
    size = ray_size(Cluster.local(), _free_bytes(SHM))
    causes: list[StartFailure] = []
    for attempt in range(1, MAX_ATTEMPTS + 1):
        began, before = time.time(), _children()
        try:
            (init or _init)(ray, size)
        except Exception as error:  # Ray has no common base class for its errors
            causes.append(_read_start_failure(error, began))
            clean_up(ray, before)
            if attempt < MAX_ATTEMPTS:
                say(f"Ray did not start ({causes[-1].message}); attempt {attempt + 1} of {MAX_ATTEMPTS}")
        except BaseException:  # Ctrl-C: leave no process behind
            clean_up(ray, before)
            raise
        else:
            return
    raise EngineError(_start_problem(causes, size))


def _init(ray: Any, size: RaySize) -> None:
    with suppress_warnings(), keep_signal_handlers(), _environment(ray_private.LOCAL_START_ENVIRONMENT):
        ray.init(
            address="local",  # whatever RAY_ADDRESS is
            num_cpus=size.cpus,
            _memory=size.memory_bytes or None,
            object_store_memory=size.store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=LOG_LEVEL,
        )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables that are not set yet, for the processes started meanwhile."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def clean_up(ray: Any, before: Iterable[int]) -> None:
    """Kill the processes that a failed start left: Ray does not keep track of them after it raises."""
    import psutil

    with suppress_warnings(), keep_signal_handlers(), contextlib.suppress(Exception):  # it may be half initialized
        ray.shutdown()
    old, folder = set(before), str(Path(import_ray().__file__).parent)
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
    """Whether this command line is of a Ray process; `folder`: Ray's package. "ray" in a path proves nothing: in Ray's
    own images every file is below /home/ray. Pure."""
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


# --- diagnosis


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why a start failed."""

    message: str
    line: str = ""
    """Quoted from Ray."""
    log: str = ""
    is_busy: bool = False


def diagnose_start(logs: Sequence[tuple[str, str]], error: str) -> StartFailure:
    """Cause from log files as (name, text), the raylet's first, and from the error of ray.init. Pure."""
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
    top = ray_private.temp_dir()
    sessions = sorted(top.glob(f"session_*_{os.getpid()}")) if top is not None else []
    logs = []
    for session in sessions[-1:]:
        for path in (session / "logs" / name for name in LOG_NAMES):
            try:
                if path.stat().st_mtime >= began - 1:
                    logs.append((str(path), path.read_text(errors="replace")[-100_000:]))
            except OSError:
                continue
    return diagnose_start(logs, f"{type(error).__name__}: {error}")


def _start_problem(causes: list[StartFailure], size: RaySize) -> Problem:
    last = causes[-1]
    store = format_size(size.store_bytes) if size.store_bytes else "of Ray's default size"
    evidence = (
        f"{last.log or 'ray.init'}: {last.line}",
        f"requested {size.cpus} CPUs, object store {store}; {len(causes)} attempts",
    )
    fixes = ["run without Ray, on the same machine: engine local"]
    if last.is_busy:
        fixes.insert(
            0, "reduce the load of this machine and try again: Ray allows 15 s for the start of its helper processes"
        )
    elif last.log:
        fixes.insert(0, f"read Ray's logs: {Path(last.log).parent}")
    else:
        fixes.insert(0, 'try Ray by itself: python -c "import ray; ray.init()"')
    return Problem("DT392", f"Ray does not start: {last.message}", evidence, tuple(fixes))
