"""Import of Ray on demand, with its warnings suppressed and the program's signal handlers kept; errors of its calls."""

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
"""The first disables a hook that starts workers through `uv run`. The last keeps Ray's workers at normal priority.
Variables that are already set keep their values."""
INSTALL_COMMAND = "pip install 'dovetail-ml[ray]'"
LOG_LEVEL = logging.ERROR


def import_ray() -> Any:
    """The module `ray`; an EngineError if it cannot be imported."""
    for name, value in ENV_DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        with contextlib.nullcontext() if "ray" in sys.modules else suppress_warnings():
            return importlib.import_module("ray")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "ray"
        message = "Ray is not installed" if missing else f"Ray is installed but cannot be imported: {error}"
        raise EngineError(Problem("DT391", message, fixes=(INSTALL_COMMAND, "run without it: engine local"))) from error


def ray_error(message: str, reason: str) -> EngineError:
    """The error of a cluster that does not answer as it should."""
    fixes = ("check that the cluster is running: ray status", "then resume: dovetail run --resume last")
    return EngineError(Problem("DT397", message, (reason,), fixes))


@contextlib.contextmanager
def ray_errors(message: str) -> Iterator[None]:
    """Turn every exception of a call to Ray into an EngineError with this message."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # Ray has no common base class for these
        raise ray_error(message, f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Keep Ray's warnings about its own plans (FutureWarning about accelerators) off the user's stderr. Warning filters
    belong to the process, and two threads that restore them would leave them changed, so only the main thread sets
    them."""
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
    """Restore the handlers of SIGTERM and SIGINT afterwards: ray.init replaces that of SIGTERM, and ray.shutdown resets
    it to the default."""
    if threading.current_thread() is not threading.main_thread():
        yield  # in other threads Ray does not change them, and Python does not allow it
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:  # None: installed outside of Python, cannot be restored
                signal.signal(number, handler)
