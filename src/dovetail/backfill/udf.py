"""What is a function that fills a column: what it reads, what it gives, what one worker needs for it?

`@dt.udf` on a function of values (annotated), of Arrow arrays, of a RecordBatch, on an async function, or on a class
with `__call__` and perhaps `setup`. What it gives can be called as before, in unit tests for example.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

from dovetail.backfill.on_error import OnError, Retry, on_error_of
from dovetail.backfill.options import Asked, Options, checked
from dovetail.backfill.signature import Signature, signature_of
from dovetail.errors import ConfigError, DovetailError, Problem, did_you_mean, shown
from dovetail.pipeline.code import code_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.backfill.signature import Kind
    from dovetail.resources.resources import Resources

__all__ = ["OnError", "Retry", "Udf", "load_udf", "on_error_of", "udf"]

NOT_FOUND = "DT443"
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
NOT_GIVEN = object()
"""`@dt.udf(...)`, whose function comes later; None is none."""


@overload
def udf(fn: Callable[..., Any] | type, **options: Unpack[Asked]) -> Udf: ...
@overload
def udf(**options: Unpack[Asked]) -> Callable[[Callable[..., Any] | type], Udf]: ...


def udf(
    fn: Callable[..., Any] | type | object = NOT_GIVEN,
    *,
    cpus: float | None = None,
    gpus: float | None = None,
    gpu_memory: str | None = None,
    memory: str | None = None,
    nvdecs: int = 0,
    nvencs: int = 0,
    entire_gpu: bool = False,
    accelerator: str | None = None,
    labels: Mapping[str, Any] | None = None,
    custom: Mapping[str, float] | None = None,
    batch_size: int | None = None,
    version: str | None = None,
    on_error: str | OnError | Retry = "fail",
    timeout: float | str | None = None,
    input_columns: Sequence[str] | None = None,
    data_type: Any = None,
    slots: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    **unknown: object,
) -> Udf | Callable[[Callable[..., Any] | type], Udf]:
    """A `Udf` of a function or class, or a decorator that makes one: `@dt.udf`, `@dt.udf(gpus=1, timeout="30s")`.

    Resources (`cpus`, 1 unless given, `gpus`, `memory`, ...) are those of one worker. `batch_size`: rows per call of
    functions of arrays and batches. `version`: what is already filled is computed again if it changes; without it, if
    the code does. `on_error`: "fail", "skip" or a `dt.Retry`. `timeout`: of one row. `input_columns`: the columns, if
    the parameters have other names. `data_type`: what it gives, if the annotation does not say it: a pyarrow type, a
    text such as "list<float32>", for several columns a mapping. `slots`: rows at once, of an async function.
    """
    given: dict[str, object] = {
        "cpus": cpus,
        "gpus": gpus,
        "gpu_memory": gpu_memory,
        "memory": memory,
        "nvdecs": nvdecs,
        "nvencs": nvencs,
        "entire_gpu": entire_gpu,
        "accelerator": accelerator,
        "labels": labels,
        "custom": custom,
        "batch_size": batch_size,
        "version": version,
        "on_error": on_error,
        "timeout": timeout,
        "input_columns": input_columns,
        "data_type": data_type,
        "slots": slots,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
    }
    options, problems = checked(given, unknown)
    problems += _wrong_function(fn) if fn is not NOT_GIVEN else []
    if problems:
        raise ConfigError(problems)
    if fn is NOT_GIVEN:
        return functools.partial(_made, options)
    return Udf(cast("Callable[..., Any]", fn), options)


def _made(options: Options, fn: Callable[..., Any] | type) -> Udf:
    problems = _wrong_function(fn)
    if problems:
        raise ConfigError(problems)
    return Udf(fn, options)


def _wrong_function(fn: object) -> list[Problem]:
    if isinstance(fn, Udf):
        fixes = (f"udf({fn.name}.fn, ...) makes another of its function",)
        return [Problem("DT440", f"{fn.name} is a UDF already", fixes=fixes)]
    if not callable(fn):
        fixes = ("@dt.udf above a def, or udf(function, cpus=2)",)
        return [Problem("DT440", f"udf: {shown(fn)} is not a function or a class", fixes=fixes)]
    return []


class Udf:
    """A function that fills a column, with what one worker of it needs; calling it calls the function."""

    fn: Callable[..., Any] | type

    def __init__(self, fn: Callable[..., Any] | type, options: Options) -> None:
        self._begin(fn, options)

    def _begin(self, fn: Callable[..., Any] | type, options: Options) -> None:
        inner = fn.func if isinstance(fn, functools.partial) else fn
        functools.update_wrapper(self, inner, updated=())
        self.fn = fn
        self.options = options
        self._object: Any = None
        self._lock = threading.Lock()

    # what was asked for

    @property
    def name(self) -> str:
        inner = self.fn.func if isinstance(self.fn, functools.partial) else self.fn
        return str(getattr(inner, "__name__", type(inner).__name__))

    @property
    def resources(self) -> Resources:
        return self.options.resources

    @property
    def batch_size(self) -> int | None:
        return self.options.batch_size

    @property
    def on_error(self) -> OnError:
        return self.options.on_error

    @property
    def timeout_s(self) -> float | None:
        return self.options.timeout_s

    @property
    def slots(self) -> int | None:
        return self.options.slots

    @property
    def explicit_version(self) -> bool:
        return self.options.version is not None

    @property
    def version(self) -> str:
        return self.code if self.options.version is None else self.options.version

    @functools.cached_property
    def code(self) -> str:
        """The hash of its code, whatever the resources and the version of Python."""
        return code_hash(self.fn)

    def hashed_as(self) -> object:
        """What counts where the UDF itself is hashed (`pipeline/code.py`)."""
        return self.fn

    # what the function says

    @functools.cached_property
    def signature(self) -> Signature:
        return signature_of(self.fn, self.name, self.options.input_columns)

    @property
    def kind(self) -> Kind:
        return self.signature.kind

    @property
    def is_async(self) -> bool:
        return self.signature.is_async

    @property
    def is_class(self) -> bool:
        return isinstance(self.fn, type)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns it reads; nothing for a function of a RecordBatch: all of the table, except those it fills."""
        return self.signature.inputs

    def outputs(self) -> tuple[tuple[str, Any], ...]:
        """(name of the field, pyarrow type); one, named "", unless it gives a NamedTuple. ConfigError: nobody said."""
        from dovetail.backfill.checking import outputs_of

        if self.signature.hopeless:
            raise ConfigError(self.signature.problems)
        found, problems = outputs_of(self)
        if problems:
            raise ConfigError(problems)
        return found

    def check(self, schema: Any, columns: Sequence[str]) -> list[Problem]:
        """Everything that hinders it from filling these columns of a table with this schema."""
        from dovetail.backfill.checking import check

        if self.signature.hopeless:
            return list(self.signature.problems)
        return check(self, schema, columns)

    @property
    def reference(self) -> str:
        """ "module:name" that leads to it, or to its function; "" if none does (a script's, a lambda, ...)."""
        found = self._own_reference()
        if found:
            return found
        module, name = getattr(self.fn, "__module__", None), getattr(self.fn, "__qualname__", "")
        leads = module in sys.modules and module != "__main__" and _at(sys.modules[module], name) is self.fn
        return f"{module}:{name}" if leads else ""

    def _own_reference(self) -> str:
        """One that leads to this very object."""
        module = getattr(self.fn, "__module__", None)
        loaded = sys.modules.get(module) if isinstance(module, str) else None
        if loaded is None or module == "__main__":
            return ""
        name = getattr(self.fn, "__qualname__", "")
        if _at(loaded, name) is self:
            return f"{module}:{name}"
        return next((f"{module}:{other}" for other, value in list(vars(loaded).items()) if value is self), "")

    # calls, pickles

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not isinstance(self.fn, type):
            return self.fn(*args, **named)
        with self._lock:
            fresh = self._object is None
            if fresh:
                self._object = self.fn()
            waiting = _set_up(self._object, self.name) if fresh else None
        if inspect.isawaitable(waiting):
            return _after(waiting, self._object, args, named)
        return self._object(*args, **named)

    def __repr__(self) -> str:
        return f"<udf {self.reference or self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name, if that leads to it and whoever pickles has not said otherwise (`engines/local/shipping.py`);
        else its function, which cloudpickle then sends by value: the name leads to this object, not to it. As a state,
        so that functions that name their own UDF do not go round in circles."""
        reference = self._own_reference()
        if reference and not _sent_by_value(reference.partition(":")[0]):
            return _by_reference, (reference,)
        return _blank, (), {"fn": self.fn, "options": self.options, "code": self.code}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["fn"], state["options"])
        self.code = state["code"]  # where it arrives, a script's source may not be


def _blank() -> Udf:
    return Udf.__new__(Udf)


def _by_reference(reference: str) -> Udf:
    return _looked_up(reference)


def _sent_by_value(module: str) -> bool:
    """Whether the module, or a package of it, is one that cloudpickle was told to send by value."""
    cloudpickle = sys.modules.get("cloudpickle")
    registered = cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ()
    return any(module == name or module.startswith(f"{name}.") for name in registered)


def _at(holder: object, qualified: str) -> object:
    for name in qualified.split("."):
        holder = getattr(holder, name, None)
    return holder


def _set_up(target: Any, name: str) -> Any:
    """What the object's setup gives: nothing, or something to wait for."""
    from dovetail.engines.worker import Worker

    setup = getattr(target, "setup", None)
    if not callable(setup):
        return None
    return setup(Worker(0, name)) if takes_worker(setup) else setup()


def takes_worker(setup: Callable[..., Any]) -> bool:
    """Whether it is `setup(self, worker)`, or `setup(self)`."""
    try:
        parameters = inspect.signature(setup).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL) for one in parameters)


async def _after(waiting: Any, target: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    await waiting
    found = target(*args, **named)
    return await found if inspect.isawaitable(found) else found


# --- by name


def load_udf(reference: str) -> Udf:
    """The UDF at "package.module:name"; functions and classes that are none are made one. The current folder can be
    imported from. ConfigError: there is nothing, or it cannot be imported."""
    module, _, path = str(reference).partition(":")
    if not path or not MODULE.fullmatch(module) or module.endswith(".py"):
        message = f"{shown(reference)} is not the module and name of a function"
        raise ConfigError(Problem(NOT_FOUND, message, fixes=(_meant(str(reference)),)))
    _from_here()
    return _looked_up(reference)


def _meant(reference: str) -> str:
    """What somebody means who writes the path of a file, or a dot for the colon."""
    place, _, name = reference.partition(":")
    file = place.endswith(".py") or "/" in place
    if file:
        path = Path(place)
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        parts = path.with_suffix("").parts if path.suffix == ".py" else path.parts
        place = parts[-1] if path.is_absolute() else ".".join(part for part in parts if part != "..")
    if not name and not file:
        place, _, name = place.rpartition(".")
    return f"{place}:{name or 'name'}" if MODULE.fullmatch(place) else "package.module:name"


def _looked_up(reference: str) -> Udf:
    module_name, _, path = reference.partition(":")
    found: Any = _imported(module_name, reference)
    for name in path.split("."):
        if not hasattr(found, name):
            near = did_you_mean(name, [one for one in dir(found) if not one.startswith("_")])
            message = f"{reference}: {getattr(found, '__name__', module_name)} has no {name!r}{near}"
            raise ConfigError(Problem(NOT_FOUND, message, fixes=(f"define it in {module_name}, or name another",)))
        found = getattr(found, name)
    if isinstance(found, Udf):
        return found
    if not callable(found):
        message = f"{reference} is of type {type(found).__name__}, not a function or class"
        raise ConfigError(Problem(NOT_FOUND, message, fixes=("name a function or a class",)))
    made: Udf = udf(found)
    return made


def _from_here() -> None:
    """Modules of the current folder can be imported, as beside a script."""
    from dovetail.running.job import importable

    folder = Path.cwd()
    if not {"", str(folder)} & set(sys.path):
        importable(folder)


def _imported(module: str, reference: str) -> Any:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # which may be piped into something that reads JSON
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module or module.startswith(f"{missing}."):
            evidence = (f"searched in {Path.cwd()} and where Python looks",)
            fixes = (f"write {missing.partition('.')[0]}.py in this folder, or pip install what has it",)
            message = f"{reference}: there is no module {missing!r}"
            raise ConfigError(Problem(NOT_FOUND, message, evidence, fixes)) from None
        raise _raised(reference, error) from error
    except DovetailError as error:
        raise ConfigError(replace(one, place=one.place or reference) for one in error.problems) from error
    except (Exception, SystemExit) as error:
        raise _raised(reference, error) from error


def _raised(reference: str, error: BaseException) -> ConfigError:
    module = reference.partition(":")[0]
    message = f"{reference}: its module cannot be imported: {type(error).__name__}: {error}"
    return ConfigError(Problem(NOT_FOUND, message, fixes=(f'python -c "import {module}" shows where',)))
