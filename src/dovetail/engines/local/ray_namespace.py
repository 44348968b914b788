"""Default namespace of Ray in the workers of a run on Ray: that of the driver.

A worker is no process of Ray: `ray.init()` in it connects as a new job, and Ray gives every job a namespace of its own,
in which `ray.get_actor` does not find the named actors of the driver. No variable sets the default of `ray.init`, so it
is wrapped when user code imports Ray.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def use_namespace(namespace: str) -> None:
    """Make this the default namespace of `ray.init()` in this process, also if Ray is imported later."""
    if "ray" in sys.modules:
        _wrap_init(sys.modules["ray"], namespace)
    else:
        sys.meta_path.insert(0, _RayFinder(namespace))


class _RayFinder(MetaPathFinder):
    """Finds Ray once, as the other finders do, and wraps its `init` after the import."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - part of the interface
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != "ray":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _WrappingLoader(spec.loader, self._namespace)
        return spec


class _WrappingLoader(Loader):
    def __init__(self, loader: Loader, namespace: str) -> None:
        self._loader = loader
        self._namespace = namespace

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _wrap_init(module, self._namespace)


def _wrap_init(ray: ModuleType, namespace: str) -> None:
    init: Callable[..., Any] = ray.init

    @functools.wraps(init)
    def init_in_namespace(*args: Any, **named: Any) -> Any:
        if named.get("job_config") is None and named.get("namespace") is None:
            named["namespace"] = namespace
        return init(*args, **named)

    ray.init = init_in_namespace  # type: ignore[attr-defined]
