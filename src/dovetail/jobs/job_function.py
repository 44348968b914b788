"""Functions that can be jobs: `@dt.job`, and their references.

A reference is "pkg.module:name", or "/path/script.py:name" for a function of a script. Which of them a worker runs is
decided in `application`.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from dovetail.errors import UNSET, Change, ConfigError, Problem, did_you_mean, nearest_word, short_repr
from dovetail.jobs.submit_options import BAD_OPTION, JobOptions, checked_job_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.jobs.batch import Batch
    from dovetail.jobs.job import Retries
    from dovetail.jobs.job_handle import Job
    from dovetail.resources.resources import Resources

NOT_A_FUNCTION = "DT603"
RUN_MODULE = "dovetail.job_runs.functions"
"""The job functions of runs (`run_submission.py`)."""
SCRIPT_MODULE_PREFIX = "dovetail_script_"
REFERENCE_PATTERN = r"^(/.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*$"
REFERENCE_LIMIT_CHARS = 1_000
SUBMIT_ELSEWHERE = frozenset(
    {"delay", "apply_async", "send", "send_with_options", "enqueue", "schedule", "kiq", "s", "si"}
)
"""Methods by which tasks of Celery, dramatiq, huey, RQ and taskiq are submitted."""


@dataclass(frozen=True, eq=False)
class JobFunction:
    """A function that can run as a job, with its default options. Calling it calls the function."""

    function: Callable[..., Any]
    reference: str
    """"pkg.module:name" or "/path/script.py:name"; "" if a worker could not find it."""
    defaults: JobOptions = field(default_factory=JobOptions)

    def __post_init__(self) -> None:
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(self.function, name):
                object.__setattr__(self, name, getattr(self.function, name))
        object.__setattr__(self, "__wrapped__", self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    if not TYPE_CHECKING:  # else every attribute would exist for type checkers

        def __getattr__(self, name: str) -> Any:
            """Explain names of other queues; called only for names that do not exist."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in SUBMIT_ELSEWHERE:
                own = self.function.__name__
                message += f": submit a job by {own}.submit(...) or queue.submit({own}, ...)"
            raise AttributeError(message, name=name, obj=self)

    def submit(self, *args: Any, **kwargs: Any) -> Job:
        """Submit a job to the current queue: that of `with dt.Queue(url):`, or of the variable DOVETAIL_QUEUE.

        Takes the options of `Queue.submit`.
        """
        from dovetail.jobs.queue import current_queue

        job: Job = current_queue().submit(self, *args, **kwargs)
        return job

    @property
    def model_parameter(self) -> str | None:
        """Name of the parameter whose value names the model that a job uses."""
        return self.defaults.model

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by parameter, defaults included. TypeError: it cannot be called with them."""
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def __repr__(self) -> str:
        return f"<job function {self.reference or self.function.__qualname__}>"

    def __reduce__(self) -> str:
        """Pickle by its name in its module."""
        return self.function.__qualname__


@overload
def job(function: Callable[..., Any], /) -> JobFunction: ...
@overload
def job(
    *,
    resources: Resources | Mapping[str, Any] | None = ...,
    timeout: str | float | None = ...,
    retries: int | Retries | Mapping[str, Any] | None = ...,
    queue: str | None = ...,
    priority: str | int | None = ...,
    isolation: str | None = ...,
    preemptible: bool | None = ...,
    preemption_grace: str | float | None = ...,
    model: str | None = ...,
    ranks: int | None = ...,
    batch: Batch | None = ...,
) -> Callable[[Callable[..., Any]], JobFunction]: ...


def job(
    function: Any = UNSET,
    /,
    *,
    resources: Any = None,
    timeout: Any = None,
    retries: Any = None,
    queue: Any = None,
    priority: Any = None,
    isolation: Any = None,
    preemptible: Any = None,
    preemption_grace: Any = None,
    model: Any = None,
    ranks: Any = None,
    batch: Any = None,
) -> Any:
    """Declare a function that workers may run: `@dt.job`, `@dt.job(resources=dt.Resources(gpus=1), timeout="1h")`.

    The options are defaults for its jobs; `submit` overrides them.

    - `isolation`: "process", "warm_process", "thread" or "async".
    - `preemptible`: allow ending a job for one of higher priority, after `preemption_grace` to save its state.
    - `model`: the parameter whose value names the model that a job uses; the job then runs in a warm process that
      holds this model, if one is idle.
    - `ranks`: number of processes of a gang, which run at once.
    - `batch`: one call for many jobs (`dt.Batch`).
    """
    options = checked_job_options(
        JobOptions(
            *(
                resources,
                queue,
                priority,
                timeout,
                retries,
                isolation,
                preemptible,
                preemption_grace,
                model,
                ranks,
                batch,
            )
        )
    )
    if function is UNSET:
        return functools.partial(_declared, options)
    return _declared(options, function)


def _declared(options: JobOptions, function: Any) -> JobFunction:
    if isinstance(function, JobFunction):
        raise ConfigError(
            Problem(NOT_A_FUNCTION, f"{function!r} is declared twice", fixes=("remove one @dt.job above it",))
        )
    if not inspect.isfunction(function):
        message = f"@dt.job: {short_repr(function)} is not a function"
        raise ConfigError(Problem(NOT_A_FUNCTION, message, fixes=("write @dt.job above a def",)))
    _check_parameter(function, "model", options.model)
    if options.batch is not None:
        _check_parameter(function, "key", options.batch.key)
        _check_batched(function, options)
    found = _reference(function)
    return JobFunction(function, "" if isinstance(found, Problem) else found, options)


def _check_parameter(function: Any, option: str, name: str | None) -> None:
    """ConfigError if an option names a parameter that the function does not have."""
    known = list(inspect.signature(function).parameters)
    if name is None or name in known:
        return
    message = f"@dt.job: {option}={name!r} is not a parameter of {function.__name__}{did_you_mean(name, known)}"
    fixes = (Change({option: nearest_word(name, known) or (known[0] if known else None)}),)
    raise ConfigError(Problem(BAD_OPTION, message, (f"{function.__name__}{inspect.signature(function)}"[:200],), fixes))


def _check_batched(function: Any, options: JobOptions) -> None:
    """ConfigError if the function cannot be called for several jobs."""
    for name, is_given in (("ranks", (options.ranks or 1) > 1), ("preemptible", options.preemptible)):
        if is_given:
            message = f"@dt.job: {name} and batch exclude each other: the jobs of a call begin and end together"
            raise ConfigError(Problem(BAD_OPTION, message, fixes=(Change({name: UNSET}), Change({"batch": UNSET}))))
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in named:
            message = (
                f"@dt.job: batch: {function.__name__} has the parameter {parameter}, which cannot be a list per job"
            )
            fixes = (f"name the parameters of {function.__name__}",)
            raise ConfigError(Problem(BAD_OPTION, message, fixes=fixes))


# --- references


def reference_of(function: object) -> str:
    """The reference of a function; ConfigError with the fix if a worker could not find it by its name."""
    if isinstance(function, JobFunction):
        if function.reference:
            return function.reference
        alias = _alias(function)
        found: str | Problem = alias or _reference(function.function)
    else:
        found = _reference(function)
    if isinstance(found, Problem):
        raise ConfigError(found)
    return found


def _reference(function: Any) -> str | Problem:
    if not inspect.isfunction(function):
        return _not_a_function(function)
    name = function.__qualname__
    if function.__name__ == "<lambda>":
        fixes = ("write a def with @dt.job at the top level of a module, and submit its name",)
        return Problem(NOT_A_FUNCTION, "a lambda has no name by which a worker could find it", fixes=fixes)
    if "<locals>" in name:
        message = f"{name.rpartition('.')[2]} is defined inside of {name.partition('.')[0]}: a worker cannot find it"
        fixes = (f"move def {function.__name__} to the top level of its module, with @dt.job above it",)
        return Problem(NOT_A_FUNCTION, message, fixes=fixes)
    if "." in name:
        message = f"{name} is a method: a worker has no object to call it on"
        fixes = ("write a function with @dt.job that makes the object and calls its method",)
        return Problem(NOT_A_FUNCTION, message, fixes=fixes)
    place = module_reference(function.__module__)
    if place is None:
        message = f"{name} is defined in an interactive session: a worker cannot find it"
        fixes = (f"put def {name} into a file such as tasks.py, and submit tasks.{name}",)
        return Problem(NOT_A_FUNCTION, message, fixes=fixes)
    return f"{place}:{name}"


def _not_a_function(function: object) -> Problem:
    what = f"{short_repr(function)} is not a function"
    if inspect.isbuiltin(function) or inspect.ismethoddescriptor(function):
        what = f"{short_repr(function)} is written in C: a worker runs functions that are declared with @dt.job"
    elif inspect.ismethod(function):
        what = f"{function.__qualname__} is a method: a worker has no object to call it on"
    elif isinstance(function, functools.partial):
        what = "a functools.partial has no name by which a worker could find it"
        return Problem(NOT_A_FUNCTION, what, fixes=("submit the function, and its arguments as arguments of submit",))
    elif isinstance(function, type):
        what = f"{function.__qualname__} is a class: a worker runs functions"
    fixes = ("write a function with @dt.job at the top level of a module that calls it, and submit that",)
    return Problem(NOT_A_FUNCTION, what, fixes=fixes)


def module_reference(module_name: str) -> str | None:
    """The part of a reference before the colon; None for a module without a file."""
    module = sys.modules.get(module_name)
    if module_name != "__main__" and not module_name.startswith(SCRIPT_MODULE_PREFIX):
        return module_name
    spec = getattr(module, "__spec__", None)
    if module_name == "__main__" and spec is not None and spec.name:
        return str(spec.name)  # python -m pkg.module
    path = getattr(module, "__file__", None)
    return script_path(path) if path and os.path.isfile(path) else None  # noqa: PTH113


def script_path(path: str | os.PathLike[str]) -> str:
    """The path of a script as it is in references."""
    return os.path.realpath(path)


def _alias(function: JobFunction) -> str:
    """Reference of an object that its module has under another name than the function's own."""
    module = sys.modules.get(function.function.__module__)
    names = [name for name, value in list(vars(module).items()) if value is function] if module else []
    place = module_reference(function.function.__module__)
    return f"{place}:{names[0]}" if names and place else ""


def declared_function(reference: str) -> JobFunction | None:
    """The function with this reference if its module is imported already; a reference imports nothing."""
    place, _, name = reference.rpartition(":")
    module = sys.modules.get(place)
    if module is None and place.endswith(".py"):
        main = sys.modules.get("__main__")
        module = main if main is not None and module_reference("__main__") == place else None
    found = getattr(module, name, None)
    return found if isinstance(found, JobFunction) else None


# --- the application of a worker
