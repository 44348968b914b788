"""Validation of the values of a stage; every problem at once."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from dovetail.errors import UNSET, Change, Problem, Subject, did_you_mean, short_repr
from dovetail.pipeline.durations import parse_duration
from dovetail.pipeline.error_policy import Retry
from dovetail.pipeline.stage import Each
from dovetail.resources.resources import RANKS_LIMIT, Resources

if TYPE_CHECKING:
    from dovetail.errors import Fix
    from dovetail.pipeline.stage import Stage

NAME_LIMIT = 100
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
RUN_PATTERN = r"^(?!.*\.py:)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$"
WORKERS_LIMIT = 1_000_000
RECYCLE_LIMIT = 10**9
COUNTS = {
    "batch_size": (1, 10_000_000),
    "workers_per_node": (1, 10_000),
    "slots": (1, 10_000),
    "ranks": (1, RANKS_LIMIT),
    "retries": (0, 1_000),
}
NUMBERS = {"rate": (1e-9, 1e12), "returns": (0.0, 1e9)}
DURATIONS = ("timeout", "setup_timeout")
FLAGS = {"fuse": True, "barrier": False}
OPTIONAL = ("workers_per_node", "slots", "rate", "returns", *DURATIONS)
ON_ERROR = ("fail", "skip")
RUN_EXAMPLE = Change({"run": "my_package.my_module:my_function"})
AFTER_NOTHING = Change({"after": []}, note="for a source")


def stage_problems(stage: Stage, called: str | None = None) -> list[tuple[str, Problem]]:
    """(field, problem) for every value that makes no sense; `called` is how messages name the stage."""
    return _StageChecker(stage, called or f"stage {short_repr(stage.name)}").problems()


def check_name(name: object) -> tuple[str, str] | None:
    """(what is wrong with it, a name that would do), or None."""
    if not isinstance(name, str):
        usable = isinstance(name, int) and not isinstance(name, bool) and 0 <= name < 10**NAME_LIMIT
        return "is not a text", str(name) if usable else "caption"
    near = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.-")[:NAME_LIMIT] or "caption"
    if not name:
        return "is empty", near
    if len(name) > NAME_LIMIT:
        return f"has {len(name)} letters, more than {NAME_LIMIT}", near
    if not re.fullmatch(NAME_PATTERN, name):
        return "has other characters than letters, digits, _ - . or begins with - or .", near
    return None


def quote_value(value: object) -> str:
    """As it is written in Python and in YAML alike."""
    return json.dumps(value, ensure_ascii=False)


def is_quotable(value: object) -> bool:
    """Whether a fix can repeat it."""
    if isinstance(value, str):
        return value.isprintable() and len(value) <= NAME_LIMIT
    return isinstance(value, int | float) and abs(value) < 10**NAME_LIMIT


class _StageChecker:
    def __init__(self, stage: Stage, called: str) -> None:
        self.stage = stage
        self.called = called
        self.found: list[tuple[str, Problem]] = []

    def problems(self) -> list[tuple[str, Problem]]:
        values = {name: getattr(self.stage, name) for name in (*COUNTS, *NUMBERS, *DURATIONS, *FLAGS)}
        self._name()
        self._run(self.stage.run)
        self._resources(self.stage.resources)
        self._workers(self.stage.workers)
        for name, value in values.items():
            if value is None and name in OPTIONAL:
                continue
            if name in COUNTS:
                self._count(name, value, *COUNTS[name])
            elif name in NUMBERS:
                self._number(name, value, *NUMBERS[name])
            elif name in DURATIONS:
                self._duration(name, value)
            elif not isinstance(value, bool):
                self._add(name, f"{name}={short_repr(value)} is not True or False", Change({name: FLAGS[name]}))
        self._on_error(self.stage.on_error)
        self._env(self.stage.env)
        self._runtime_env(self.stage.runtime_env)
        self._after(self.stage.after)
        self._recycle(self.stage.recycle)
        return self.found

    def _add(self, field: str, message: str, *fixes: Fix) -> None:
        subject = Subject("setting", field)
        self.found.append((field, Problem("DT034", f"{self.called}: {message}", fixes=fixes, subject=subject)))

    def _name(self) -> None:
        mistake = check_name(self.stage.name)
        if mistake:
            self._add("name", f"name={short_repr(self.stage.name)} {mistake[0]}", Change({"name": mistake[1]}))

    def _run(self, run: object) -> None:
        if isinstance(run, str):
            if not re.fullmatch(RUN_PATTERN, run):
                self._add(
                    "run", f"run={short_repr(run)} is not the module and name of a function or class", _similar_run(run)
                )
            return
        inner = run.fn if isinstance(run, Each) else run
        if not callable(inner):
            self._add("run", f"run={short_repr(run)} is not a function, a class or a text", RUN_EXAMPLE)
        elif isinstance(inner, type) and not any("__call__" in vars(base) for base in inner.__mro__):
            message = f"run={short_repr(inner)} is a class whose objects cannot be called"
            self._add("run", message, "give it a method: def __call__(self, items): return items")

    def _resources(self, resources: object) -> None:
        if not isinstance(resources, Resources):
            self._add("resources", f"resources={short_repr(resources)} is not a dt.Resources", "dt.Resources(cpus=1)")

    def _workers(self, workers: object) -> None:
        written = f"workers={short_repr(workers)}"
        if isinstance(workers, tuple) and len(workers) == 2 and all(map(_is_int, workers)):
            low, high = (min(max(1, count), WORKERS_LIMIT) for count in sorted(workers))
            if workers != (low, high):
                message = f"{written} is not (least, most) with 1 <= least <= most <= {WORKERS_LIMIT}"
                self._add("workers", message, Change({"workers": (low, high)}))
        elif _is_int(workers) or (isinstance(workers, str) and _number_in(workers) is not None):
            self._count("workers", workers, 1, WORKERS_LIMIT)
        elif not (isinstance(workers, str) and workers == "auto"):
            near = did_you_mean(workers, ["auto"]) if isinstance(workers, str) else ""
            message = f'{written} is not "auto", a whole number, or (least, most){near}'
            self._add("workers", message, *(Change({"workers": count}) for count in ("auto", 4, (1, 4))))
        per_node = self.stage.workers_per_node
        if per_node is not None and not (isinstance(workers, str) and workers == "auto"):
            message = f"{written} together with workers_per_node={short_repr(per_node)}: only one can say how many"
            self._add("workers", message, Change({"workers": UNSET}), Change({"workers_per_node": UNSET}))

    def _count(self, name: str, value: object, low: int, high: int) -> None:
        if not _is_int(value) or not low <= value <= high:
            message = f"{name}={short_repr(value)} is not a whole number from {low} to {high}"
            self._add(name, message, Change({name: int(_nearest(value, low, high))}))

    def _number(self, name: str, value: object, low: float, high: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            message = f"{name}={short_repr(value)} is not a number from {low:g} to {high:g}"
            nearest = _nearest(value, low, high, otherwise=1)
            self._add(name, message, Change({name: _rounded(nearest)}), Change({name: UNSET}, note="it is measured"))

    def _duration(self, name: str, value: object) -> None:
        try:
            parse_duration(value)
        except ValueError as error:
            number = _number_in(value) if isinstance(value, str) else None
            seconds = _nearest(number, 0.001, 86_400, otherwise=90)
            self._add(
                name, f"{name}={short_repr(value)} {error}", Change({name: f"{seconds:g}s"}), Change({name: UNSET})
            )

    def _on_error(self, value: object) -> None:
        if isinstance(value, Retry):
            if self.stage.barrier is True:
                message = "on_error=Retry(...) together with barrier=True: a barrier is retried as a whole"
                self._add("on_error", message, Change({"on_error": "fail", "retries": 3}))
        elif not isinstance(value, str) or value not in ON_ERROR:
            near = did_you_mean(value, ON_ERROR) if isinstance(value, str) else ""
            message = f'on_error={short_repr(value)} is not "fail", "skip" or Retry(...){near}'
            first, second = reversed(ON_ERROR) if "skip" in near else ON_ERROR
            self._add("on_error", message, Change({"on_error": first}), Change({"on_error": second}))

    def _env(self, env: object) -> None:
        example = Change({"env": {"OMP_NUM_THREADS": "1"}})
        if env is None:
            return
        if not isinstance(env, Mapping):
            self._add("env", f"env={short_repr(env)} is not a mapping of names to texts", example)
            return
        for name, value in env.items():
            if not isinstance(name, str) or not name or "=" in name or "\0" in name:
                self._add("env", f"env: {short_repr(name)} is not the name of a variable", example)
            elif not isinstance(value, str) or "\0" in value:
                writable = all(map(is_quotable, (*env, *env.values())))
                fix = Change({"env": {key: str(text) for key, text in env.items()}}) if writable else example
                self._add("env", f"env: {short_repr(name)} is {short_repr(value)}, not a text", fix)

    def _runtime_env(self, value: object) -> None:
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)):
            message = f"runtime_env={short_repr(value)} is not a mapping with texts for keys"
            self._add("runtime_env", message, Change({"runtime_env": {"pip": ["torch"]}}))

    def _after(self, after: object) -> None:
        if isinstance(after, str):
            self._add("after", f"after={short_repr(after)} is not a list of names", Change({"after": [after]}))
        elif after is not None and not (isinstance(after, tuple) and all(isinstance(name, str) for name in after)):
            names = [name for name in after if isinstance(name, str)] if isinstance(after, tuple) else []
            fixes = (Change({"after": names}),) if names else (AFTER_NOTHING, Change({"after": UNSET}))
            self._add("after", f"after={short_repr(after)} is not a list of names", *fixes)

    def _recycle(self, value: object) -> None:
        if value is None:
            return
        if isinstance(value, str) and _number_in(value) is None:
            self._duration("recycle", value)
        elif isinstance(value, int | str) and not isinstance(value, bool):
            self._count("recycle", value, 1, RECYCLE_LIMIT)
        else:
            message = f'recycle={short_repr(value)} is not a whole number of batches, or an age such as "1h"'
            self._add("recycle", message, Change({"recycle": 1000}), Change({"recycle": "1h"}))


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number_in(text: str) -> float | None:
    """The number that was put in quotes, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _nearest(value: object, low: float, high: float, otherwise: float | None = None) -> float:
    """What was meant, or the nearest that would do; `otherwise` where the least would make no sense."""
    number = _number_in(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not number >= low:
        return low if otherwise is None else otherwise
    return min(number, high)


def _rounded(number: float) -> int | float:
    """With at most six significant digits, which is enough for a suggestion."""
    short = float(f"{number:.6g}")
    return int(short) if short == int(short) else short


def _similar_run(text: str) -> Change:
    module, _, name = text.strip().removesuffix("()").replace(".py:", ":").rpartition(":" if ":" in text else ".")
    near = f"{module.replace('/', '.')}:{name}"
    return Change({"run": near}) if re.fullmatch(RUN_PATTERN, near) else RUN_EXAMPLE
