"""Keys of a stage's `runtime_env` that an engine does not support; none is ignored silently."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dovetail.errors import UNSET, Change, Problem, Subject, did_you_mean, short_repr

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from dovetail.errors import Fix

UNSUPPORTED_CODE, INVALID_CODE = "DT407", "DT403"
ENV_VARS = "env_vars"
PACKAGES_REASON = "local workers use the packages that are installed for the driver"
LOCAL_REASONS = {
    "py_executable": "local workers run in the interpreter of the driver",
    "pip": PACKAGES_REASON,
    "uv": PACKAGES_REASON,
    "conda": PACKAGES_REASON,
    "working_dir": "local workers run in the working folder of the driver",
    "py_modules": "local workers import from the sys.path of the driver",
}
"""Key -> why the local engine does not support it; it supports `env_vars` only."""
OTHER_LOCAL_REASON = "only Ray supports it"
RAY_REASONS = {
    "worker_process_setup_hook": "Ray would call it in the agent of a node, and not in workers",
    "java_jars": "workers are Python processes",
}
"""Keys that Ray accepts and that have no effect on workers, each with the reason."""


def local_problems(stage: str, runtime_env: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Keys that the local engine does not support."""
    given = runtime_env or {}
    variables = given.get(ENV_VARS, {})
    if not _is_environment(variables):
        message = f"stage {stage!r}: env_vars of runtime_env must map names to strings, not {short_repr(variables)}"
        yield Problem(INVALID_CODE, message, fixes=(_without(given, [ENV_VARS]),), subject=Subject("stage", stage))
    for key in sorted(set(given) - {ENV_VARS}):
        reason = LOCAL_REASONS.get(key, OTHER_LOCAL_REASON)
        message = f"stage {stage!r}: the local engine does not support {key!r} of runtime_env: {reason}"
        other = _local_alternative(key, given[key])
        fixes: tuple[Fix, ...] = (*other, Change({"engine": "ray"}), _without(given, set(given) - {ENV_VARS}))
        yield Problem(UNSUPPORTED_CODE, message, fixes=fixes, subject=Subject("stage", stage))


def ray_problems(stage: str, runtime_env: Mapping[str, Any] | None, known: Collection[str]) -> Iterator[Problem]:
    """Keys that have no effect on Ray; `known` are those that the installed Ray knows."""
    given = runtime_env or {}
    for key in sorted(given):
        if key in RAY_REASONS:
            message = f"stage {stage!r}: {key!r} of runtime_env has no effect: {RAY_REASONS[key]}"
            other = ("do it in setup(worker) of the stage's class",) if key == "worker_process_setup_hook" else ()
        elif key not in known:
            message = f"stage {stage!r}: Ray ignores {key!r} of runtime_env{did_you_mean(key, known)}"
            other = ()
        else:
            continue
        fixes: tuple[Fix, ...] = (*other, _without(given, [key]))
        yield Problem(UNSUPPORTED_CODE, message, fixes=fixes, subject=Subject("stage", stage))


def environment_variables(runtime_env: Mapping[str, Any] | None) -> dict[str, str]:
    """Its environment variables, which every engine supports."""
    return dict((runtime_env or {}).get(ENV_VARS) or {})


def _is_environment(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(part, str) for pair in value.items() for part in pair)


def _without(given: Mapping[str, Any], keys: Iterable[str]) -> Change:
    removed = set(keys)
    rest = {key: value for key, value in given.items() if key not in removed}
    return Change({"runtime_env": rest or UNSET})


def _local_alternative(key: str, value: Any) -> tuple[str, ...]:
    """How to have the same on this machine."""
    listed = [str(one) for one in value] if isinstance(value, list | tuple) else []
    if key == "py_executable":
        return (f"start the driver with it: {value} -m dovetail",)
    if key in ("pip", "uv") and listed:
        return (f"{'uv ' if key == 'uv' else ''}pip install {shlex.join(listed)}",)
    if key == "working_dir":
        return (f"cd {shlex.quote(str(value))}",)
    if key == "py_modules" and listed:
        folders = dict.fromkeys(str(PurePath(one).parent) for one in listed)
        return (f"export PYTHONPATH={shlex.quote(':'.join(folders))}",)
    return ()
