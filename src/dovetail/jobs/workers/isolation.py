"""Isolation of a job: where it runs, and which limits can be kept there.

| limit | process | thread | async |
|---|---|---|---|
| timeout | yes: SIGTERM, grace, SIGKILL of everything it started | no: refused | where it awaits |
| preemption | yes: notice, grace, SIGTERM | if it looks at `dt.current_job().checkpoint_requested` | where it awaits |
| cancellation | yes | if it looks at `dt.current_job().cancelled` | where it awaits |
| memory | yes: ended above what it requests | no | no |
| its own cards (CUDA_VISIBLE_DEVICES), thread variables | yes | no: those of the worker | no |
| a crash (SIGSEGV, `os._exit`) | ends this job | ends all jobs of the worker | ends all jobs of the worker |
| CPU time, peak memory, exit code | recorded | CPU time | no |
| output | a file per attempt | the output of the worker | the output of the worker |

A `warm_process` keeps the limits of a process. It runs jobs one after another and keeps their models, and ends with a
job that is ended by a signal (timeout, memory, most cancellations), leaves a process behind or runs out of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.errors import Change, ConfigError, Problem

if TYPE_CHECKING:
    from dovetail.errors import Fix
    from dovetail.jobs.job import JobSpec
    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.workers.worker_options import WorkerOptions
    from dovetail.resources.shape import Shape

ISOLATION_PROBLEM = "DT624"
PROCESS, WARM_PROCESS = "process", "warm_process"
PROCESS_KINDS = (PROCESS, WARM_PROCESS)
"""Isolations with a process of its own, to which all limits apply."""


def timeout_of(spec: JobSpec, function: JobFunction, job_timeout_s: float | None) -> float | None:
    """Limit of one attempt: that of the job, else of its function, else of the worker."""
    timeout_ms = spec.timeout_ms if spec.timeout_ms is not None else function.defaults.timeout_ms
    return job_timeout_s if timeout_ms is None else timeout_ms / 1000


def isolation_of(spec: JobSpec, shape: Shape, function: JobFunction, options: WorkerOptions) -> str:
    """The isolation that the job sets, else its function. Otherwise a process for what only a process can keep (ranks
    of a gang, GPUs, a limit of memory, a timeout of a function that is not async), the default of the worker for the
    rest, and without that an event loop for coroutine functions and a process for others. ConfigError: it says
    something that it cannot have."""
    isolation = spec.isolation or function.defaults.isolation_name
    if isolation is not None:
        _check(isolation, spec, function)
        return isolation
    has_timeout = timeout_of(spec, function, options.job_timeout_s) is not None
    if shape.ranks > 1:
        return "process"
    if options.isolation == WARM_PROCESS:
        return WARM_PROCESS
    if shape.computes_on_gpu or shape.memory_bytes or (has_timeout and not function.is_async):
        return "process"
    default = options.isolation or "async"
    return "process" if default == "async" and not function.is_async else default


def _check(isolation: str, spec: JobSpec, function: JobFunction) -> None:
    if isolation == "async" and not function.is_async:
        message = f"{spec.function} is not a coroutine function, so it cannot have isolation='async'"
        fixes: tuple[Fix, ...] = (Change({"isolation": "process"}), f"write async def {function.function.__name__}")
        raise ConfigError(Problem(ISOLATION_PROBLEM, message, fixes=fixes))
    if isolation != "process" and spec.shape.ranks > 1:
        message = f"isolation={isolation!r} cannot run a gang: each rank needs environment variables of its own"
        fixes = (Change({"isolation": "process"}),)
        raise ConfigError(Problem(ISOLATION_PROBLEM, message, fixes=fixes))
    timeout_s = timeout_of(spec, function, None)
    if isolation == "thread" and timeout_s is not None:
        message = f"isolation='thread' cannot keep a timeout of {timeout_s:g} s: a thread cannot be interrupted"
        fixes = (Change({"isolation": "process"}), Change({"timeout": None}))
        raise ConfigError(Problem(ISOLATION_PROBLEM, message, fixes=fixes))
