"""StageCode: what a worker executes of a stage. Workers import this module, so it imports little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.pipeline.error_policy import ErrorPolicy
    from dovetail.pipeline.failure_rules import FailureRules


@dataclass(frozen=True, slots=True)
class StageCode:
    """The part of a stage that is sent to its workers."""

    name: str
    run: Any
    """A function, a class, or "package.module:name" of one."""
    batch_size: int = 1
    barrier: bool = False
    retry: ErrorPolicy | None = None
    """Retries inside the worker; None: calls are not repeated."""
    timeout_s: float | None = None
    failure_rules: FailureRules = ()
    """What exceptions mean for the worker, besides those that always mean that it is broken."""
    env: Mapping[str, str] | None = None
    runtime_env: Mapping[str, Any] | None = None
    args: tuple[Any, ...] = ()
    """Arguments of the class, for a hosted object that is not a stage of a pipeline."""
    kwargs: Mapping[str, Any] | None = None
