"""Import of Ray on demand, with its warnings suppressed and signal handlers kept."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

from dovetail.errors import EngineError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

ENV_DEFAULTS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""The first: a hook that starts workers in another way where `uv run` is used. The last: Ray's workers would give way
to everything else on the machine. All only where nothing else is said."""
INSTALL_COMMAND = "pip install 'dovetail-ml[ray]'"
LOG_LEVEL = logging.ERROR


def import_ray() -> Any:
    """The module ray, or one clear error."""
    for name, value in ENV_DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        with contextlib.nullcontext() if "ray" in sys.modules else suppress_warnings():
            return importlib.import_module("ray")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "ray"
        message = "Ray is not installed" if missing else f"Ray is installed and cannot be imported: {error}"
        raise EngineError(
            Problem("DT391", message, fixes=(INSTALL_COMMAND, "or run without it: engine local"))
        ) from error


def ray_module(name: str) -> Any:
    """A module of ray, after `import_ray`: its inner ones have no types worth checking against."""
    return importlib.import_module(name)


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Ray warns of its own plans (FutureWarning about accelerators) on the user's stderr. What is ignored belongs to
    the process: two threads that put it back at once would leave it changed for ever. Only the main one touches it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"ray(\.|$)")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=ResourceWarning)
        yield


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """ray.init replaces what SIGTERM does, and ray.shutdown makes it the default; afterwards it is what it was."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where ray does not touch it, and nobody may
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:  # None: not Python's to put back
                signal.signal(number, handler)
