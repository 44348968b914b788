"""From the arguments of `Queue.submit` to job specifications: checks everything, and reports all problems at once."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import is_int
from dovetail.errors import UNSET, Change, ConfigError, Problem, Subject, nearest_word, short_repr
from dovetail.jobs.batch import mark_of, marked_shape
from dovetail.jobs.job import DEFAULT_PREEMPTION_GRACE_MS, DEFAULT_QUEUE, DependencyPolicy, JobSpec
from dovetail.jobs.job_function import (
    NOT_A_FUNCTION,
    REFERENCE_LIMIT_CHARS,
    REFERENCE_PATTERN,
    JobFunction,
    declared_function,
    reference_of,
    script_path,
)
from dovetail.jobs.job_id import new_job_id
from dovetail.jobs.payload_codec import FILE, PayloadCodec, call_problems, encode_call
from dovetail.jobs.submit_options import (
    BAD_OPTION,
    ISOLATIONS,
    SUBMIT_OPTIONS,
    after_ids,
    at_ms,
    option_problems,
    to_ms,
    to_priority,
    to_retries,
    to_shape,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.jobs.batch import Batch

BAD_CALL = "DT604"
CRON_ONLY = ("after", "at", "delay", "if_dependency_fails")
"""Options that a schedule cannot have, because they concern one job."""
EXCLUSIVE = ("kwargs", "keys", *SUBMIT_OPTIONS.names)
"""Keywords of `submit` and `submit_many` that are not arguments of the function."""


@dataclass(frozen=True)
class Submission:
    """A function and its options, from which the jobs of several calls are made."""

    template: JobSpec
    """The specification without id and payload."""
    signature: inspect.Signature | None = None
    """Signature of the function, if it is known here."""
    cron: str | None = None
    timezone: str = "UTC"
    batch: Batch | None = None
    """Of the function: which of its jobs share calls."""

    def checked_spec(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], codec: PayloadCodec, key: str | None = None
    ) -> JobSpec:
        """The job of one call. Raises ConfigError if the arguments do not fit the function or are not JSON."""
        problem = self.call_problem(args, kwargs)
        if problem is not None:
            raise ConfigError(problem)
        return self.spec(args, kwargs, codec, key)

    def spec(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], codec: PayloadCodec, key: str | None = None
    ) -> JobSpec:
        """The job of a call that fits the function. Raises ConfigError if the arguments are not JSON."""
        job_id = new_job_id()
        payload, encoding = encode_call(args, kwargs, codec.of_job(job_id))
        template = self.template
        shape = template.shape
        if self.batch is not None:
            shape = marked_shape(shape, mark_of(template.function, self.batch.key, self._key_arguments(args, kwargs)))
        if key is None and shape is template.shape:
            return JobSpec(job_id, template.function, payload, encoding, *self._unchanged)
        return replace(template, id=job_id, payload=payload, encoding=encoding, key=key or template.key, shape=shape)

    @cached_property
    def _unchanged(self) -> tuple[Any, ...]:
        """What follows the payload and its encoding in the specification of each job."""
        return tuple(getattr(self.template, name) for name in JobSpec.__slots__[4:])

    def _key_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by parameter, if the jobs of a call have one in common."""
        if self.batch is None or self.batch.key is None or self.signature is None:
            return {}
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:  # a message of a foreign program: the job fails with that
            return {}
        bound.apply_defaults()
        return bound.arguments

    def call_problem(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Problem | None:
        """Whether the function can be called with these arguments."""
        if self.signature is None:
            return None
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            return _bind_problem(self.template.function, self.signature, str(error), args, kwargs)
        return None


@dataclass
class _Draft:
    """A submission while it is checked."""

    problems: list[Problem] = field(default_factory=list)
    reference: str = ""
    declared: JobFunction | None = None


def prepare(
    function: object,
    options: Mapping[str, Any],
    named: Mapping[str, Any],
    default_queue: str = DEFAULT_QUEUE,
    call: tuple[Sequence[Any], Mapping[str, Any] | None] | None = None,
    codec: PayloadCodec | None = None,
) -> tuple[Submission, dict[str, Any]]:
    """The submission, and the keyword arguments of the function.

    `options`: the options of `submit` that were given, None if only by name; `named`: other keywords, which are
    arguments of the function.
    `call`: the positional arguments and `kwargs=`, which are checked as well; `codec`: how they are encoded.
    ConfigError with all problems.
    """
    draft = _Draft()
    _find_function(function, draft)
    explicit = call[1] if call is not None else None
    if call is not None and explicit is None and not options and not draft.problems:
        without = _without_options(draft.reference, draft.declared, default_queue)
        if without is not None and without.call_problem(call[0], named) is None:
            return without, dict(named)
    signature = _signature(draft.declared)
    kwargs = _keywords(named, explicit, draft)
    if explicit is None and call is not None:
        draft.problems += _ambiguous(options, signature, draft.reference)
    declared = draft.declared.defaults.of_jobs if draft.declared is not None else {}
    given = {**declared, **{name: value for name, value in options.items() if value is not None}}
    cron, zone = given.get("cron"), given.get("timezone")
    draft.problems += option_problems(SUBMIT_OPTIONS, given)
    draft.problems += _combination_problems(given, cron, zone)
    if draft.declared is not None and draft.declared.defaults.batch is not None:
        draft.problems += _batch_problems(given)
    template = JobSpec("", draft.reference) if draft.problems else _template(draft.reference, given, default_queue)
    batch = draft.declared.defaults.batch if draft.declared is not None else None
    found = Submission(template, signature, cron, zone or "UTC", batch)
    if call is not None and draft.reference:
        problem = found.call_problem(call[0], kwargs)
        draft.problems += [problem] if problem is not None else []
    if draft.problems and call is not None and codec is not None and not codec.allow_pickle:
        draft.problems += call_problems(call[0], kwargs)
    if draft.problems:
        raise ConfigError(draft.problems)
    return found, kwargs


@lru_cache(1024)
def _without_options(reference: str, declared: JobFunction | None, default_queue: str) -> Submission | None:
    """The submission with the options of the declaration; None if these are wrong."""
    try:
        return prepare(declared or reference, {}, {}, default_queue)[0]
    except ConfigError:
        return None


def _template(reference: str, given: Mapping[str, Any], default_queue: str) -> JobSpec:
    return JobSpec(
        id="",
        function=reference,
        queue=given.get("queue", default_queue),
        priority=to_priority(given.get("priority", 0)),
        shape=to_shape(given.get("resources"), given.get("ranks", 1)),
        retries=to_retries(given.get("retries")),
        key=given.get("key"),
        after=tuple(after_ids(given.get("after", ())) or ()),
        if_dependency_fails=DependencyPolicy(given.get("if_dependency_fails", "cancel")),
        at_ms=at_ms(given["at"]) if "at" in given else None,
        delay_ms=(to_ms(given["delay"]) or 0) if given.get("delay") else 0,
        timeout_ms=to_ms(given.get("timeout")),
        isolation=given.get("isolation"),
        preemptible=given.get("preemptible", False),
        preemption_grace_ms=to_ms(given.get("preemption_grace")) or DEFAULT_PREEMPTION_GRACE_MS,
    )


# --- the function


def _find_function(function: object, draft: _Draft) -> None:
    """Set the reference and the declaration of a function, an object of `@dt.job` or a reference."""
    try:
        if isinstance(function, str):
            draft.reference = checked_reference(function)
            draft.declared = declared_function(draft.reference)
            if draft.declared is None:
                _check_declared(draft.reference)
        elif isinstance(function, JobFunction):
            draft.reference, draft.declared = reference_of(function), function
        else:
            reference = reference_of(function)
            draft.declared = declared_function(reference)
            draft.reference = reference
            if draft.declared is None:
                draft.problems.append(_undeclared(reference))
    except ConfigError as error:
        draft.problems += error.problems


def checked_reference(text: str) -> str:
    """A reference with an absolute path; ConfigError if it is not one."""
    if len(text) <= REFERENCE_LIMIT_CHARS:
        place, colon, name = text.rpartition(":")
        if colon and place.endswith(".py") and name.isidentifier() and place.isprintable():
            path = os.path.expanduser(place)  # noqa: PTH111
            if os.path.isfile(path):  # noqa: PTH113
                return f"{script_path(path)}:{name}"
            if os.path.isabs(path):  # noqa: PTH117 - it may exist on the workers
                return f"{path}:{name}"
            message = f"{short_repr(text)}: there is no file {place} in this folder"
            raise ConfigError(Problem(NOT_A_FUNCTION, message, fixes=('submit "/path/script.py:name"',)))
        if _is_reference(text):
            return text
    place, dot, name = text.rpartition(".")
    dotted = dot and len(text) <= 100 and re.match(REFERENCE_PATTERN, f"{place}:{name}")
    message = f"{short_repr(text)} is not a reference to a function"
    raise ConfigError(
        Problem(NOT_A_FUNCTION, message, fixes=(f'submit "{place}:{name}"' if dotted else 'submit "pkg.module:name"',))
    )


@lru_cache(1024)
def _is_reference(text: str) -> bool:
    return re.match(REFERENCE_PATTERN, text) is not None and text.isprintable()


def _check_declared(reference: str) -> None:
    """Report a name that its module, which is imported here, does not declare."""
    place, _, name = reference.rpartition(":")
    module = sys.modules.get(place)
    if module is None:
        return
    declared = [one for one, value in list(vars(module).items()) if isinstance(value, JobFunction)]
    if hasattr(module, name):
        raise ConfigError(_undeclared(reference))
    near = nearest_word(name, declared)
    hint = f" (did you mean {near!r}?)" if near else ""
    fixes = (f'submit "{place}:{near}"',) if near else (f"write def {name} in {place}, with @dt.job above it",)
    raise ConfigError(Problem(NOT_A_FUNCTION, f"{place} has no {name!r}{hint}", fixes=fixes))


def _undeclared(reference: str) -> Problem:
    place, _, name = reference.rpartition(":")
    message = f"{reference} is not declared as a job: workers run only functions with @dt.job"
    return Problem(NOT_A_FUNCTION, message, fixes=(f"write @dt.job above def {name} in {place}",))


@lru_cache(1024)
def _signature(declared: JobFunction | None) -> inspect.Signature | None:
    return None if declared is None else inspect.signature(declared.function)


# --- arguments


def _keywords(named: Mapping[str, Any], explicit: object, draft: _Draft) -> dict[str, Any]:
    if explicit is None:
        return dict(named)
    if not isinstance(explicit, Mapping) or not all(isinstance(name, str) for name in explicit):
        message = f"kwargs={short_repr(explicit)} is not a mapping of names to arguments"
        draft.problems.append(Problem(BAD_OPTION, message, fixes=(Change({"kwargs": {"timeout": 30}}),)))
        return dict(named)
    twice = sorted(set(explicit) & set(named))
    if twice:
        message = f"the argument {twice[0]!r} is given twice: by name and in kwargs"
        draft.problems.append(Problem(BAD_CALL, message, fixes=(f"omit {twice[0]} in one of them",)))
    return {**named, **explicit}


def _ambiguous(options: Mapping[str, Any], signature: inspect.Signature | None, reference: str) -> list[Problem]:
    """Options of submit that are parameters of the function, too."""
    if signature is None:
        return []
    name = reference.rpartition(":")[2]
    problems = []
    for option in options:
        if option in signature.parameters:
            value = options[option]
            message = f"{option}={short_repr(value)} is ambiguous: {name}() and submit() both have {option!r}"
            argument = Change({"kwargs": {option: value}}, note=f"the argument of {name}()")
            own = Change({option: value, "kwargs": {}}, note="the option of submit()")
            problems.append(Problem(BAD_CALL, message, fixes=(argument, own), subject=Subject("setting", option)))
    return problems


def _bind_problem(
    reference: str, signature: inspect.Signature, reason: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Problem:
    """All arguments that are missing or unknown: Python names only the first."""
    name = reference.rpartition(":")[2]
    shown = f"{name}{signature}"
    evidence = (shown if len(shown) <= 200 else f"{shown[:197]}...",)
    unknown = [word for word in kwargs if word not in signature.parameters]
    reasons = [f"got an unexpected keyword argument {word!r}" for word in unknown]
    known = {word: value for word, value in kwargs.items() if word not in unknown}
    missing: list[str] = []
    try:
        bound = signature.bind_partial(*args, **known).arguments
    except TypeError as error:
        reasons = [str(error), *reasons]
    else:
        missing = [word for word, parameter in signature.parameters.items() if _is_required(parameter, bound)]
        start = "missing a required argument" if len(missing) == 1 else "missing required arguments"
        reasons = [*([f"{start}: {', '.join(map(repr, missing))}"] if missing else []), *reasons]
        missing = [word for word in missing if signature.parameters[word].kind is not inspect.Parameter.POSITIONAL_ONLY]
    fixes = []
    for word in unknown:
        near = nearest_word(word, [*EXCLUSIVE, *signature.parameters])
        fixes.append(f"omit {word}" if near is None else f"{near}={short_repr(kwargs[word])}")
        missing = [other for other in missing if other != near]
    fixes += [f"{word}=VALUE" for word in missing]
    message = f"{name}() cannot be called with these arguments: {', and '.join(reasons or [reason])}"
    return Problem(BAD_CALL, message, evidence, tuple(fixes) or (f"call it as {name}{signature}"[:200],))


def _is_required(parameter: inspect.Parameter, bound: Mapping[str, Any]) -> bool:
    """Whether a call that binds these arguments lacks this one."""
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.name not in bound and parameter.default is parameter.empty and not is_variadic


# --- combinations


def _combination_problems(given: Mapping[str, Any], cron: object, zone: object) -> Iterable[Problem]:
    if cron is not None:
        for name in CRON_ONLY:
            if name in given:
                message = f"{name} and cron exclude each other: a schedule submits its jobs at its fire times"
                yield Problem(BAD_OPTION, message, fixes=(Change({name: UNSET}), Change({"cron": UNSET})))
    elif zone is not None:
        message = f"timezone={short_repr(zone)} requires cron"
        yield Problem(
            BAD_OPTION, message, fixes=(Change({"cron": "0 3 * * *", "timezone": "UTC"}), Change({"timezone": UNSET}))
        )
    if given.get("isolation", "process") in ISOLATIONS[1:] and is_int(given.get("ranks")) and given["ranks"] > 1:
        message = (
            f"isolation={given['isolation']!r} cannot run a gang: each rank needs environment variables of its own"
        )
        yield Problem(BAD_OPTION, message, fixes=(Change({"isolation": "process"}), Change({"ranks": UNSET})))
    if "at" in given and "delay" in given:
        message = "at and delay exclude each other"
        yield Problem(BAD_OPTION, message, fixes=(Change({"delay": UNSET}), Change({"at": UNSET})))


def _batch_problems(given: Mapping[str, Any]) -> Iterable[Problem]:
    """Options that a function with batches cannot have."""
    for name, is_given in (("ranks", given.get("ranks", 1) != 1), ("preemptible", given.get("preemptible") is True)):
        if is_given:
            message = f"{name} is not for functions with batches: the jobs of a call begin and end together"
            yield Problem(BAD_OPTION, message, fixes=(Change({name: UNSET}),))


def too_large_for_schedule(spec: JobSpec) -> ConfigError | None:
    """Schedules keep their arguments for as long as they exist, so they cannot be in a file of one job."""
    if not spec.encoding.endswith(FILE):
        return None
    fixes = ("pass the path of a file that has the data",)
    return ConfigError(
        Problem("DT618", "the arguments of a schedule are too large to be kept in the queue", fixes=fixes)
    )
