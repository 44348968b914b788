"""Resources: what one worker needs, as the user writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, TypeGuard

from dovetail.errors import UNSET, Change, Problem, ResourceError, Subject, short_repr
from dovetail.resources.gpu_models import model_key
from dovetail.resources.shape import Shape, ShapeKind
from dovetail.resources.sizes import SizeError, parse_milli, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.errors import Fix

CPUS_LIMIT = 65_536
GPUS_LIMIT = 1_024
CODECS_LIMIT = 1_024
RANKS_LIMIT = 65_536
CUSTOM_LIMIT = 10**9


@dataclass(frozen=True)
class Resources:
    """What ONE worker needs; for a gang, what each of its ranks needs. Checked when it is made.

    `gpus=0.25` takes a quarter of one card, memory included. `gpu_memory="4GB"` alone takes 4 GB of one card, whatever
    its size; together they take exactly both. `gpus=2` takes two cards that nobody else computes on (`gpu_memory` is
    then the least each must have); `entire_gpu=True` takes their codecs too. `nvdecs` and `nvencs` come from the
    worker's own cards, or, without `gpus`, from one card whose compute stays free for others.
    """

    cpus: float = 1
    gpus: float = 0
    gpu_memory: str | None = None
    memory: str | None = None
    nvdecs: int = 0
    nvencs: int = 0
    entire_gpu: bool = False
    accelerator: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    custom: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = _Checker(self).problems()
        if problems:
            raise ResourceError(problems)
        object.__setattr__(self, "labels", dict(self.labels))
        object.__setattr__(self, "custom", dict(self.custom))

    def __hash__(self) -> int:
        return hash(self.shape())

    def shape(self, ranks: int = 1) -> Shape:
        """The same in integers; `ranks` processes for a gang."""
        if not _is_count(ranks) or not 1 <= ranks <= RANKS_LIMIT:
            raise ResourceError(
                Problem(
                    "DT008",
                    f"ranks={short_repr(ranks)} is not a whole number from 1 to {RANKS_LIMIT}",
                    fixes=(Change({"ranks": 1}),),
                    subject=Subject("setting", "ranks"),
                )
            )
        kind = self._kind()
        gpu_memory_bytes = 0 if self.gpu_memory is None else parse_size(self.gpu_memory)
        cards, gpu_milli = 1, 0
        if kind is ShapeKind.CPU_ONLY:
            cards = 0
        elif kind is ShapeKind.FRACTIONAL_GPU:
            gpu_milli = parse_milli(self.gpus)
        elif kind is not ShapeKind.CODEC:
            cards, gpu_milli = max(1, int(self.gpus)), 1000
        return Shape(
            kind=kind,
            cpu_milli=parse_milli(self.cpus),
            memory_bytes=0 if self.memory is None else parse_size(self.memory),
            cards=cards,
            gpu_milli=gpu_milli,
            gpu_memory_bytes=gpu_memory_bytes,
            nvdecs=int(self.nvdecs),
            nvencs=int(self.nvencs),
            accelerators=_alternatives(self.accelerator, model_key),
            labels=tuple((name, _alternatives(value)) for name, value in sorted(self.labels.items())),
            custom=tuple((name, parse_milli(value)) for name, value in sorted(self.custom.items()) if value),
            ranks=int(ranks),
        )

    def _kind(self) -> ShapeKind:
        if self.entire_gpu:
            return ShapeKind.ENTIRE_GPU
        if self.gpus >= 1:
            return ShapeKind.WHOLE_NUMBERED_GPU
        if self.gpus or self.gpu_memory is not None:
            return ShapeKind.FRACTIONAL_GPU
        return ShapeKind.CODEC if self.nvdecs or self.nvencs else ShapeKind.CPU_ONLY


def _alternatives(text: str | None, normal: Callable[[str], str] = str) -> tuple[str, ...]:
    """'A100|H100' -> the values that will do, each once, in one order."""
    return tuple(sorted({normal(part.strip()) for part in (text or "").split("|") if part.strip()}))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: object) -> TypeGuard[int]:
    return _is_number(value) and math.isfinite(_as_float(value)) and value == int(value)


def _as_float(value: float) -> float:
    """As a float; infinite for whole numbers and fractions that no float holds."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _parse_number(text: str) -> int | float:
    number = float(text)
    return int(number) if number == int(number) else number


class _Checker:
    """Collects every problem of a `Resources`, so that all of them can be fixed at once."""

    def __init__(self, asked: Resources) -> None:
        self.asked = asked
        self.found: list[Problem] = []

    def problems(self) -> list[Problem]:
        asked = self.asked
        self._number("cpus", asked.cpus, CPUS_LIMIT)
        if self._number("gpus", asked.gpus, GPUS_LIMIT):
            self._gpu_count(asked.gpus)
        entire: object = asked.entire_gpu
        if not isinstance(entire, bool):
            message = f"entire_gpu={short_repr(entire)} is not True or False"
            self._add("DT001", "entire_gpu", message, Change({"entire_gpu": True}))
        self._size("memory", asked.memory, may_be_zero=True)
        self._size("gpu_memory", asked.gpu_memory, may_be_zero=False)
        self._codecs("nvdecs", asked.nvdecs)
        self._codecs("nvencs", asked.nvencs)
        self._accelerator()
        self._labels()
        self._custom()
        if not self.found:
            self._something_is_asked()
        return self.found

    def _add(self, code: str, setting: str, message: str, *fixes: Fix) -> None:
        self.found.append(Problem(code, message, fixes=fixes, subject=Subject("setting", setting)))

    def _number(self, name: str, value: object, limit: float) -> bool:
        example = Change({name: 1})
        before = len(self.found)
        asked = f"{name}={short_repr(value)}"
        if not _is_number(value):
            quoted = isinstance(value, str) and self._would_do(name, value, limit)
            fix = Change({name: _parse_number(value)}) if quoted and isinstance(value, str) else example
            self._add("DT001", name, f"{asked} is not a number", fix)
            return False
        number = _as_float(value)
        if math.isnan(number) or (math.isinf(number) and isinstance(value, float)):
            self._add("DT002", name, f"{asked} is not a finite number", example)
        elif number < 0:
            self._add("DT003", name, f"{asked} is negative", example, Change({name: UNSET}))
        elif number > limit:
            self._add("DT004", name, f"{asked} is more than one worker can have; the limit is {limit}", example)
        elif 0 < number < 0.001:
            self._add("DT005", name, f"{asked} is below the smallest share, 0.001", Change({name: 0.001}))
        return len(self.found) == before

    @staticmethod
    def _would_do(name: str, text: str, limit: float) -> bool:
        """Whether the text is what should have been written, without its quotes."""
        try:
            number = float(text)
        except ValueError:
            return False
        whole_only = name in ("nvdecs", "nvencs") or (name == "gpus" and number > 1)
        return 0.001 <= number <= limit and "_" not in text and not (whole_only and number != int(number))

    def _gpu_count(self, gpus: float) -> None:
        if self.asked.entire_gpu is True and 0 < gpus < 1:
            message = f"entire_gpu=True with gpus={gpus!r}: a fraction of a card is not the entire card"
            whole, share = Change({"entire_gpu": True, "gpus": UNSET}), Change({"gpus": gpus, "entire_gpu": UNSET})
            self._add("DT006", "gpus", message, whole, share)
        elif gpus > 1 and gpus != int(gpus):
            lower, upper = math.floor(gpus), math.ceil(gpus)
            message = f"gpus={gpus!r}: above one card only whole cards can be asked for"
            changes = (Change({"gpus": upper}), Change({"gpus": lower}), Change({"gpus": 0.5}, note="half of one card"))
            self._add("DT006", "gpus", message, *changes)

    def _size(self, name: str, value: object, *, may_be_zero: bool) -> None:
        if value is None:
            return
        try:
            size = parse_size(value)
        except SizeError as error:
            self._add("DT007", name, f"{name}={error.reason}", *(Change({name: text}) for text in error.examples))
            return
        if not size and not may_be_zero:
            message = f"{name}={short_repr(value)} is no memory at all"
            self._add("DT007", name, message, Change({name: "4GB"}), Change({name: UNSET}))

    def _codecs(self, name: str, value: object) -> None:
        if self._number(name, value, CODECS_LIMIT) and not _is_count(value):
            message = f"{name}={short_repr(value)}: codecs cannot be shared, request whole ones"
            self._add("DT006", name, message, Change({name: 1}))

    def _accelerator(self) -> None:
        value: object = self.asked.accelerator
        if value is None:
            return
        if not isinstance(value, str) or not all(part.strip() for part in value.split("|")):
            message = f"accelerator={short_repr(value)} is not the name of a card, or several with | between them"
            self._add("DT001", "accelerator", message, Change({"accelerator": "A100|H100"}))
        elif not self.found and not self._uses_cards():
            message = f"accelerator={value!r} without anything of a card"
            self._add("DT009", "accelerator", message, Change({"gpus": 1}), Change({"accelerator": UNSET}))

    def _uses_cards(self) -> bool:
        asked = self.asked
        return bool(asked.entire_gpu or asked.gpus or asked.gpu_memory is not None or asked.nvdecs or asked.nvencs)

    def _labels(self) -> None:
        labels: object = self.asked.labels
        example = Change({"labels": {"pool": "gpu"}})
        if not isinstance(labels, Mapping):
            self._add("DT001", "labels", f"labels={short_repr(labels)} is not a mapping of names to values", example)
            return
        for name, value in labels.items():
            alternatives = value.split("|") if isinstance(value, str) else [""]
            if not isinstance(name, str) or not name.strip() or not all(part.strip() for part in alternatives):
                message = f"labels: {short_repr(name)}: {short_repr(value)} is not a name and a text"
                self._add("DT001", "labels", message, example)

    def _custom(self) -> None:
        custom: object = self.asked.custom
        if not isinstance(custom, Mapping):
            message = f"custom={short_repr(custom)} is not a mapping of names to amounts"
            self._add("DT001", "custom", message, Change({"custom": {"licence": 1}}))
            return
        for name, amount in custom.items():
            if not isinstance(name, str) or not name.strip():
                message = f"custom: {short_repr(name)} is not a name"
                self._add("DT001", "custom", message, Change({"custom": {"licence": 1}}))
            else:
                self._custom_amount(name, amount)

    def _custom_amount(self, name: str, amount: object) -> None:
        before = len(self.found)
        self._number(f"custom[{name!r}]", amount, CUSTOM_LIMIT)
        for number in range(before, len(self.found)):
            fixes = (Change({"custom": {name: 1}}),)
            self.found[number] = replace(self.found[number], fixes=fixes, subject=Subject("setting", "custom"))

    def _something_is_asked(self) -> None:
        asked = self.asked
        has_memory = asked.memory is not None and parse_size(asked.memory) > 0
        if not (asked.cpus or has_memory or self._uses_cards() or any(asked.custom.values())):
            message = "a worker that needs nothing cannot be counted: everything asked for is zero"
            self._add("DT009", "cpus", message, Change({"cpus": 1}), Change({"cpus": 0.1}, note="a small share"))
