"""Patches that start a local Ray without dashboard, monitor and prestarted workers. (To be deleted.)
that are switched off, workers in advance: each is a Python process of 50 MB and most of a CPU-second to start."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.ray_import import ray_module

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEM = {"prestart_worker_first_driver": False}
"""For `_system_config`. Else Ray starts a worker per CPU, and an agent needs one."""


DASHBOARD = "ray.dashboard.optional_deps"


@contextlib.contextmanager
def without_helpers() -> Iterator[None]:
    """While Ray is started. Nothing public says this; where Ray has changed, it starts with all of its helpers."""
    try:
        parameters, node = ray_module("ray._private.parameter").RayParams, ray_module("ray._private.node").Node
        fill, dashboard = parameters.update_if_absent, node.start_api_server
    except (AttributeError, ImportError):
        yield
        return

    def update_if_absent(self: Any, **given: Any) -> None:
        self.include_log_monitor, self.no_monitor = False, True
        fill(self, **given)

    parameters.update_if_absent, node.start_api_server = update_if_absent, _no_dashboard
    try:
        with _not_imported(DASHBOARD):
            yield
    finally:
        parameters.update_if_absent, node.start_api_server = fill, dashboard


@contextlib.contextmanager
def _not_imported(name: str) -> Iterator[None]:
    """As if it were not installed: what it needs takes long to import."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _no_dashboard(self: Any, **_: Any) -> None:
    self._webui_url = None
