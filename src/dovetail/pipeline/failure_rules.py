"""What an exception means for the worker that raised it. Workers import this module, so it imports little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

FailureAction = Literal["retry", "restart"]
FAILURE_ACTIONS: tuple[FailureAction, ...] = ("retry", "restart")
"""`on_failure`: keep the worker and retry the items, or replace the worker first."""
FailureRules = tuple[tuple[str, FailureAction], ...]
ANY_EXCEPTION = "*"
BROKEN_WORKER_TYPES = (
    "AcceleratorError",
    "AsyncEngineDeadError",
    "BrokenExecutor",
    "CUDADriverError",
    "CUDARuntimeError",
    "DistBackendError",
    "EngineDeadError",
    "MQEngineDeadError",
)
"""Exception types after which a worker is replaced: its GPU context, engine or process pool does not recover."""
BROKEN_WORKER_PHRASES = (
    "CUDA error",
    "HIP error",
    "NCCL error",
    "device-side assert",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_EXECUTION_FAILED",
)
"""The same for texts in the message of an exception."""


def exception_name(kind: object) -> object:
    """The name of an exception type; anything else is returned as it is."""
    return kind.__name__ if isinstance(kind, type) and issubclass(kind, BaseException) else kind


def make_failure_rules(on_failure: FailureAction | Mapping[Any, FailureAction] | None) -> FailureRules:
    """Names of exception types and what they mean for the worker; "*": all others."""
    if on_failure is None:
        return ()
    if not isinstance(on_failure, Mapping):
        return ((ANY_EXCEPTION, on_failure),)
    return tuple((str(exception_name(kind)), action) for kind, action in on_failure.items())


def type_names(error: BaseException) -> set[str]:
    """Names of the type of an exception and of its base classes."""
    return {name for kind in type(error).__mro__ for name in (kind.__name__, kind.__qualname__)}


def action_for(rules: FailureRules, names: set[str], text: str) -> FailureAction | None:
    """The action of the first rule that names one of these types, or, if it contains a space, a part of the message."""
    for rule, action in rules:
        if rule.rpartition(".")[2] in names or (" " in rule and rule in text):
            return action
    return None


def is_known_to_break_workers(names: set[str], text: str) -> bool:
    """Whether an exception with these type names and this message leaves a process that fails from then on."""
    return not names.isdisjoint(BROKEN_WORKER_TYPES) or any(phrase in text for phrase in BROKEN_WORKER_PHRASES)
