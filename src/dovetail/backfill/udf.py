"""The @dt.udf decorator: the Udf class, its options and their validation, and loading by "module:name".

`@dt.udf` decorates a function of values (annotated), of Arrow arrays, of a RecordBatch, an async function, or a class
with `__call__` and optionally `setup`. The result can be called like the function itself, for example in unit tests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast, overload

from dovetail.backfill.signature import Signature, read_signature
from dovetail.errors import (
    UNSET,
    Change,
    ConfigError,
    DovetailError,
    Given,
    Problem,
    ResourceError,
    Text,
    argument_problem,
    did_you_mean,
    nearest_word,
    short_repr,
)
from dovetail.pipeline.code_hash import code_hash
from dovetail.pipeline.durations import parse_duration
from dovetail.pipeline.error_policy import ErrorPolicy, Retry, parse_error_policy
from dovetail.pipeline.failure_rules import FailureAction, FailureRules, exception_name, make_failure_rules
from dovetail.pipeline.stage_fields import ON_FAILURE, ON_FAILURE_TEXT, SLOTS_LIMIT
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.backfill.signature import UdfKind
    from dovetail.errors import Fix

BAD_UDF_OPTION = "DT440"
MAX_BATCH_ROWS = 1 << 20
MAX_SLOTS = SLOTS_LIMIT
MAX_SETUP_FAILURES = 1_000_000
OPTION_ALIASES = {"num_cpus": "cpus", "num_gpus": "gpus"}
MISPLACED_OPTIONS = {
    "workers": "table.backfill(column, workers=4)",
    "concurrency": "table.backfill(column, workers=4)",
    "where": 'table.backfill(column, where="id < 10")',
    "name": "table.add_column(name, udf)",
    "retries": 'on_error=dt.Retry(ConnectionError, times=3, then="skip")',
}


class UdfKwargs(TypedDict, total=False):
    """Keyword arguments of `udf`, for type checkers."""

    cpus: float | None
    gpus: float | None
    gpu_memory: str | None
    memory: str | None
    nvdecs: int
    nvencs: int
    entire_gpu: bool
    accelerator: str | None
    labels: Mapping[str, Any] | None
    custom: Mapping[str, float] | None
    batch_size: int | None
    version: str | None
    on_error: str | ErrorPolicy | Retry
    timeout: float | str | None
    input_columns: Sequence[str] | None
    data_type: Any
    slots: int | None
    on_failure: FailureAction | Mapping[Any, FailureAction] | None
    max_setup_failures: int | None
    num_cpus: float | None
    num_gpus: float | None


@dataclass(frozen=True)
class UdfOptions:
    """Options of a UDF."""

    resources: Resources
    batch_size: int | None = None
    version: str | None = None
    on_error: ErrorPolicy = field(default_factory=ErrorPolicy)
    timeout_s: float | None = None
    input_columns: tuple[str, ...] | None = None
    data_type: Any = None
    slots: int | None = None
    failure_rules: FailureRules = ()
    max_setup_failures: int | None = None


def check_options(given: Mapping[str, object], unknown: Mapping[str, object]) -> tuple[UdfOptions, list[Problem]]:
    """The options and all problems; the options are invalid if there are problems."""
    problems = [_unknown_option(name, [*given]) for name in unknown]
    values = dict(given)
    for spelling, name in OPTION_ALIASES.items():
        given_value = values.pop(spelling)
        if given_value is not None and values[name] is not None:
            message = f"{spelling}={short_repr(given_value)} and {name}={short_repr(values[name])} are the same option"
            problems.append(Problem(BAD_UDF_OPTION, message, fixes=(Change({spelling: UNSET}),)))
        elif given_value is not None:
            values[name] = given_value
    resources = _parse_resources(values, problems)
    found = UdfOptions(
        resources,
        _check_count("batch_size", values["batch_size"], MAX_BATCH_ROWS, 256, problems),
        _check_version(values["version"], problems),
        _parse_policy(parse_error_policy, values["on_error"], ErrorPolicy(), problems),
        parse_timeout(values["timeout"], problems),
        _check_input_columns(values["input_columns"], problems),
        values["data_type"],
        _check_count("slots", values["slots"], MAX_SLOTS, 16, problems),
        _check_failure_rules(values["on_failure"], problems),
        _check_count("max_setup_failures", values["max_setup_failures"], MAX_SETUP_FAILURES, 3, problems, least=0),
    )
    problems += _check_data_type(found.data_type)
    return found, problems


def _unknown_option(name: str, known: list[str]) -> Problem:
    elsewhere = MISPLACED_OPTIONS.get(name)
    near = "" if elsewhere else did_you_mean(name, known)
    fix = elsewhere or f"one of {', '.join(known)}"
    return Problem(BAD_UDF_OPTION, f"udf() has no {name}={near}", fixes=(fix,))


def _parse_resources(values: dict[str, object], problems: list[Problem]) -> Resources:
    names = (
        "cpus",
        "gpus",
        "gpu_memory",
        "memory",
        "nvdecs",
        "nvencs",
        "entire_gpu",
        "accelerator",
        "labels",
        "custom",
    )
    given_value: dict[str, Any] = {name: values[name] for name in names if values[name] is not None}
    try:
        return Resources(**given_value)
    except ResourceError as error:
        problems += error.problems
        return Resources()


def _parse_policy(
    make: Callable[[object], ErrorPolicy], value: object, otherwise: ErrorPolicy, problems: list[Problem]
) -> ErrorPolicy:
    try:
        return make(value)
    except ConfigError as error:
        problems += error.problems
        return otherwise


def _check_count(
    name: str, value: object, limit: int, example: int, problems: list[Problem], *, least: int = 1
) -> int | None:
    if value is None or is_whole_number(value, least, limit):
        return cast("int | None", value)
    kind = f"a whole number from {least} to {limit:,}"
    problems.append(argument_problem(BAD_UDF_OPTION, name, value, kind, example, UNSET))
    return None


def _check_failure_rules(value: object, problems: list[Problem]) -> FailureRules:
    named = {exception_name(kind): action for kind, action in value.items()} if isinstance(value, Mapping) else value
    if value is None or not any(ON_FAILURE.check(named)):
        return make_failure_rules(cast("Any", value))
    example = {"MyEngineError": "restart"}
    problems.append(argument_problem(BAD_UDF_OPTION, "on_failure", value, ON_FAILURE_TEXT, example, UNSET))
    return ()


def is_whole_number(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def parse_timeout(value: object, problems: list[Problem]) -> float | None:
    """Time limit of one row in seconds; None: no limit."""
    if value is None:
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        message = Text(Given("timeout", value), f" {error}")
        problems.append(Problem(BAD_UDF_OPTION, message, fixes=(Change({"timeout": "30s"}),)))
        return None


def _check_version(value: object, problems: list[Problem]) -> str | None:
    if value is None or (isinstance(value, str) and value.strip() and len(value) <= 200):
        return value
    text = isinstance(value, int | float) and not isinstance(value, bool)
    example = str(value) if text else "2"
    problems.append(argument_problem(BAD_UDF_OPTION, "version", value, "a string of 1 to 200 characters", example))
    return None


def _check_input_columns(value: object, problems: list[Problem]) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        names = tuple(value)
        if names and all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names):
            return names
    example = [value if isinstance(value, str) and value else "text"]
    problems.append(
        argument_problem(BAD_UDF_OPTION, "input_columns", value, "a list of different column names", example)
    )
    return None


def _check_data_type(value: object) -> list[Problem]:
    """The text form of a data type; pyarrow types are kept."""
    if value is None:
        return []
    from dovetail.backfill.arrow_types import parse_data_type

    named = value.items() if isinstance(value, Mapping) else [("", value)]
    problems = []
    for name, one in named:
        found = parse_data_type(one)
        if isinstance(found, str):
            written = f"data_type={{{name!r}: {short_repr(one)}}}" if name else f"data_type={short_repr(one)}"
            problems.append(
                Problem(
                    BAD_UDF_OPTION, f"{written} {found}", fixes=('data_type="list<float32>"', "data_type=pa.int32()")
                )
            )
    if isinstance(value, Mapping) and not value:
        problems.append(
            Problem(BAD_UDF_OPTION, "data_type={} names no column", fixes=('data_type={"words": "int32"}',))
        )
    return problems


__all__ = ["ErrorPolicy", "Retry", "Udf", "load_udf", "parse_error_policy", "udf"]

UDF_NOT_FOUND = "DT443"
MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
NOT_GIVEN = object()
"""Default that marks `@dt.udf(...)` without a function; None would be a mistake of the caller."""


@overload
def udf(fn: Callable[..., Any] | type, **options: Unpack[UdfKwargs]) -> Udf: ...
@overload
def udf(**options: Unpack[UdfKwargs]) -> Callable[[Callable[..., Any] | type], Udf]: ...


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
    on_error: str | ErrorPolicy | Retry = "fail",
    timeout: float | str | None = None,
    input_columns: Sequence[str] | None = None,
    data_type: Any = None,
    slots: int | None = None,
    on_failure: FailureAction | Mapping[Any, FailureAction] | None = None,
    max_setup_failures: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    **unknown: object,
) -> Udf | Callable[[Callable[..., Any] | type], Udf]:
    """Make a `Udf` of a function or class; also a decorator: `@dt.udf`, `@dt.udf(gpus=1, timeout="30s")`.

    Resources (`cpus`, default 1, `gpus`, `memory`, ...) apply to one worker. `batch_size`: rows per call of functions
    of arrays and batches. `version`: filled rows are computed again when it changes; without it, when the code changes.
    `on_error`: "fail", "skip" or a `dt.Retry`. `timeout`: time limit of one row. `input_columns`: column names, if they
    differ from the parameter names. `data_type`: return type, if the annotation does not define it: a pyarrow type, a
    string such as "list<float32>", or a mapping for several columns. `slots`: concurrent rows of an async function.
    `on_failure`, `max_setup_failures`: as in a `dt.Stage`.
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
        "on_failure": on_failure,
        "max_setup_failures": max_setup_failures,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
    }
    options, problems = check_options(given, unknown)
    problems += _check_function(fn) if fn is not NOT_GIVEN else []
    if problems:
        raise ConfigError(problems)
    if fn is NOT_GIVEN:
        return functools.partial(_decorate, options)
    return Udf(cast("Callable[..., Any]", fn), options)


def _decorate(options: UdfOptions, fn: Callable[..., Any] | type) -> Udf:
    problems = _check_function(fn)
    if problems:
        raise ConfigError(problems)
    return Udf(fn, options)


def _check_function(fn: object) -> list[Problem]:
    if isinstance(fn, Udf):
        fixes = (f"udf({fn.name}.fn, ...) declares another UDF of its function",)
        return [Problem(BAD_UDF_OPTION, f"{fn.name} is already a UDF", fixes=fixes)]
    if not callable(fn):
        fixes = ("@dt.udf above a def, or udf(function, cpus=2)",)
        return [Problem(BAD_UDF_OPTION, f"udf: {short_repr(fn)} is not a function or a class", fixes=fixes)]
    return []


class Udf:
    """A function that fills a column, with its options and resources; calling it calls the function."""

    fn: Callable[..., Any] | type

    def __init__(self, fn: Callable[..., Any] | type, options: UdfOptions) -> None:
        self._initialize(fn, options)

    def _initialize(self, fn: Callable[..., Any] | type, options: UdfOptions) -> None:
        inner = fn.func if isinstance(fn, functools.partial) else fn
        functools.update_wrapper(self, inner, updated=())
        self.fn = fn
        self.options = options
        self._object: Any = None
        self._lock = threading.Lock()

    # options

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
    def on_error(self) -> ErrorPolicy:
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
        """Hash of its code, independent of resources and Python version."""
        return code_hash(self.fn)

    def hashed_as(self) -> object:
        """Input of the hash of code that refers to this UDF (`pipeline/code_hash.py`)."""
        return self.fn

    # signature

    @functools.cached_property
    def signature(self) -> Signature:
        return read_signature(self.fn, self.name, self.options.input_columns)

    @property
    def kind(self) -> UdfKind:
        return self.signature.kind

    @property
    def is_async(self) -> bool:
        return self.signature.is_async

    @property
    def is_class(self) -> bool:
        return isinstance(self.fn, type)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Input columns; empty for a function of a RecordBatch: all columns except those it fills."""
        return self.signature.inputs

    def outputs(self) -> tuple[tuple[str, Any], ...]:
        """(field name, pyarrow type) of each output; one, named "", unless it returns a NamedTuple. ConfigError:
        unknown."""
        from dovetail.backfill.schema_check import output_types

        if self.signature.uncallable:
            raise ConfigError(self.signature.problems)
        found, problems = output_types(self)
        if problems:
            raise ConfigError(problems)
        return found

    def check(self, schema: Any, columns: Sequence[str]) -> list[Problem]:
        """All problems with filling these columns of a table with this schema."""
        from dovetail.backfill.schema_check import check_udf

        if self.signature.uncallable:
            return list(self.signature.problems)
        return check_udf(self, schema, columns)

    @property
    def reference(self) -> str:
        """ "module:name" by which it, or its function, can be imported; "" if it cannot (script, lambda)."""
        found = self._own_reference()
        if found:
            return found
        module, name = getattr(self.fn, "__module__", None), getattr(self.fn, "__qualname__", "")
        leads = (
            module in sys.modules and module != "__main__" and _resolve_attribute(sys.modules[module], name) is self.fn
        )
        return f"{module}:{name}" if leads else ""

    def _own_reference(self) -> str:
        """Reference that imports this object itself."""
        module = getattr(self.fn, "__module__", None)
        loaded = sys.modules.get(module) if isinstance(module, str) else None
        if loaded is None or module == "__main__":
            return ""
        name = getattr(self.fn, "__qualname__", "")
        if _resolve_attribute(loaded, name) is self:
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
            waiting = _run_setup(self._object, self.name) if fresh else None
        if inspect.isawaitable(waiting):
            return _call_after(waiting, self._object, args, named)
        return self._object(*args, **named)

    def __repr__(self) -> str:
        return f"<udf {self.reference or self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by reference if it can be imported, unless its module is pickled by value
        (`engines/local/code_pickle.py`). Otherwise cloudpickle sends the function by value, because its name refers to
        this object. The function is part of the state, so that a function that refers to its own UDF does not
        recurse."""
        reference = self._own_reference()
        if reference and not _is_pickled_by_value(reference.partition(":")[0]):
            return _load_by_reference, (reference,)
        return _empty_udf, (), {"fn": self.fn, "options": self.options, "code": self.code}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._initialize(state["fn"], state["options"])
        self.code = state["code"]  # the source of a script may not exist on the worker


def _empty_udf() -> Udf:
    return Udf.__new__(Udf)


def _load_by_reference(reference: str) -> Udf:
    return _resolve_udf(reference)


def _is_pickled_by_value(module: str) -> bool:
    """Whether the module or its package is registered with cloudpickle to be pickled by value."""
    cloudpickle = sys.modules.get("cloudpickle")
    registered = cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ()
    return any(module == name or module.startswith(f"{name}.") for name in registered)


def _resolve_attribute(holder: object, qualified: str) -> object:
    for name in qualified.split("."):
        holder = getattr(holder, name, None)
    return holder


def _run_setup(target: Any, name: str) -> Any:
    """Result of the object's setup: None or an awaitable."""
    from dovetail.engines.worker_context import Worker

    setup = getattr(target, "setup", None)
    if not callable(setup):
        return None
    return setup(Worker(0, name)) if takes_worker(setup) else setup()


def takes_worker(setup: Callable[..., Any]) -> bool:
    """Whether it is `setup(self, worker)` rather than `setup(self)`."""
    try:
        parameters = inspect.signature(setup).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL) for one in parameters)


async def _call_after(waiting: Any, target: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    await waiting
    found = target(*args, **named)
    return await found if inspect.isawaitable(found) else found


# --- by name


def load_udf(reference: str) -> Udf:
    """Load the UDF at "package.module:name"; plain functions and classes are wrapped. Modules in the current folder can
    be imported. ConfigError: not found or not importable."""
    module, _, path = str(reference).partition(":")
    if not path or not MODULE_NAME.fullmatch(module) or module.endswith(".py"):
        message = f"{short_repr(reference)} is not of the form module:name"
        fix = Change({"udf": _suggested_reference(str(reference))})
        raise ConfigError(Problem(UDF_NOT_FOUND, message, fixes=(fix,)))
    _add_working_folder()
    return _resolve_udf(reference)


def _suggested_reference(reference: str) -> str:
    """Suggested reference for a file path, or for a dot instead of the colon."""
    place, _, name = reference.partition(":")
    file = place.endswith(".py") or "/" in place
    if file:
        path = Path(place)
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        parts = path.with_suffix("").parts if path.suffix == ".py" else path.parts
        place = parts[-1] if path.is_absolute() else ".".join(part for part in parts if part != "..")
    if not name and not file:
        place, _, name = place.rpartition(".")
    return f"{place}:{name or 'name'}" if MODULE_NAME.fullmatch(place) else "package.module:name"


def _resolve_udf(reference: str) -> Udf:
    module_name, _, path = reference.partition(":")
    found: Any = _import_module(module_name, reference)
    for name in path.split("."):
        if not hasattr(found, name):
            names = [one for one in dir(found) if not one.startswith("_")]
            near = nearest_word(name, names)
            message = (
                f"{reference}: {getattr(found, '__name__', module_name)} has no {name!r}{did_you_mean(name, names)}"
            )
            fix: Fix = f"define it in {module_name}, or name another"
            if near is not None and path == name:
                fix = Change({"udf": f"{module_name}:{near}"})
            raise ConfigError(Problem(UDF_NOT_FOUND, message, fixes=(fix,)))
        found = getattr(found, name)
    if isinstance(found, Udf):
        return found
    if not callable(found):
        message = f"{reference} is of type {type(found).__name__}, not a function or class"
        raise ConfigError(Problem(UDF_NOT_FOUND, message, fixes=("name a function or a class",)))
    made: Udf = udf(found)
    return made


def _add_working_folder() -> None:
    """Make modules in the current folder importable, as for a script."""
    from dovetail.runtime.run_spec import add_import_path

    folder = Path.cwd()
    if not {"", str(folder)} & set(sys.path):
        add_import_path(folder)


def _import_module(module: str, reference: str) -> Any:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout may be piped into a JSON reader
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module or module.startswith(f"{missing}."):
            evidence = (f"searched in {Path.cwd()} and on sys.path",)
            fixes = (f"create {missing.partition('.')[0]}.py in this folder, or install the package that has it",)
            message = f"{reference}: no module named {missing!r}"
            raise ConfigError(Problem(UDF_NOT_FOUND, message, evidence, fixes)) from None
        raise _import_failed(reference, error) from error
    except DovetailError as error:
        raise ConfigError(replace(one, place=one.place or reference) for one in error.problems) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(reference, error) from error


def _import_failed(reference: str, error: BaseException) -> ConfigError:
    module = reference.partition(":")[0]
    message = f"{reference}: cannot import its module: {type(error).__name__}: {error}"
    return ConfigError(Problem(UDF_NOT_FOUND, message, fixes=(f'python -c "import {module}" shows where',)))
