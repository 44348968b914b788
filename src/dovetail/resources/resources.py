"""Resources: what one worker needs, as the user writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, Self, TypeGuard

from dovetail.documents.fields import (
    FLAG,
    Field,
    Mistake,
    Noted,
    Type,
    WrongValue,
    mapping_of,
    predicate,
    record_of,
    setting_problem,
    unknown_argument_problem,
)
from dovetail.errors import UNSET, Change, Problem, ResourceError, Subject, short_repr
from dovetail.resources.gpu_models import look_alike_model, model_key
from dovetail.resources.shape import Shape, ShapeKind
from dovetail.resources.sizes import SizeError, parse_milli, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CPUS_LIMIT = 65_536
GPUS_LIMIT = 1_024
CODECS_LIMIT = 1_024
RANKS_LIMIT = 65_536
CUSTOM_LIMIT = 10**9


@dataclass(frozen=True)
class Resources:
    """Resources of one worker; for a gang, of each of its ranks. Validated on construction.

    `gpus=0.25` takes a quarter of one card, memory included. `gpu_memory="4GB"` alone takes 4 GB of one card of any
    size; together they take exactly both. `gpus=2` takes two cards that no other worker computes on (`gpu_memory` is
    then the minimum of each card); `entire_gpu=True` takes their codecs too. `nvdecs` and `nvencs` come from the
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

    def __new__(cls, *_: Any, **named: Any) -> Self:
        names = {item.name for item in fields(cls)}
        if not named.keys() <= names:
            unknown = sorted(named.keys() - names)
            raise ResourceError([unknown_argument_problem(word, names, named[word]) for word in unknown])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        problems = resource_problems(self)
        if problems:
            raise ResourceError(problems)
        object.__setattr__(self, "labels", dict(self.labels))
        object.__setattr__(self, "custom", dict(self.custom))

    def __hash__(self) -> int:
        return hash(self.shape())

    def shape(self, ranks: int = 1) -> Shape:
        """The same in integers; a gang has `ranks` processes."""
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
    """'A100|H100' -> the accepted values, sorted, without duplicates."""
    return tuple(sorted({normal(part.strip()) for part in (text or "").split("|") if part.strip()}))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: object) -> TypeGuard[int]:
    return _is_number(value) and math.isfinite(_as_float(value)) and value == int(value)


def _as_float(value: float) -> float:
    """The value as a float; infinite if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# --- declaration of the fields

SMALLEST_SHARE = 0.001
CARDS_TEXT = "a share of one card, or a number of cards"
SIZE_PATTERN = r"^\s*[0-9.][0-9._]*([eE][+-]?[0-9]+)?\s*([kKmMgGtTpP]([iI]?[bB])?|[bB])\s*$"


def amount(
    limit: int, text: str, *, is_whole: bool = False, fraction: Callable[[float], Iterator[WrongValue]] | None = None
) -> Type:
    """A number of something that workers share; `fraction` finds numbers that should be whole."""

    def check(value: object) -> Iterator[Mistake]:
        if not _is_number(value):
            quoted = _number_in_quotes(value, limit) if isinstance(value, str) else None
            instead = 1 if quoted is None or (fraction is not None and any(fraction(quoted))) else quoted
            yield WrongValue(value, text, "is not a number", (instead,))
            return
        number = _as_float(value)
        if math.isnan(number) or (math.isinf(number) and isinstance(value, float)):
            yield WrongValue(value, text, "is not a finite number", (1,), "DT002")
        elif number < 0:
            yield WrongValue(value, text, "is negative", (1, UNSET), "DT003")
        elif number > limit:
            reason = f"is more than one worker can have; the limit is {limit}"
            yield WrongValue(value, text, reason, (1,), "DT004")
        elif 0 < number < SMALLEST_SHARE and not is_whole:
            reason = f"is below the smallest share, {SMALLEST_SHARE}"
            yield WrongValue(value, text, reason, (SMALLEST_SHARE,), "DT005")
        elif fraction is not None:
            yield from fraction(value)

    return Type(text, 1, {"type": "integer" if is_whole else "number", "minimum": 0, "maximum": limit}, check)


def _number_in_quotes(text: str, limit: float) -> int | float | None:
    """The number in a text if it is in range; else None."""
    try:
        number = float(text)
    except ValueError:
        return None
    if "_" in text or not SMALLEST_SHARE <= number <= limit:
        return None
    return int(number) if number == int(number) else number


def _card_fraction(gpus: float) -> Iterator[WrongValue]:
    if gpus > 1 and gpus != int(gpus):
        reason = "is a fraction: above one card only whole cards can be requested"
        instead = (math.ceil(gpus), math.floor(gpus), Noted(0.5, "half of one card"))
        yield WrongValue(gpus, CARDS_TEXT, reason, instead, "DT006")


def _codec_fraction(codecs: float) -> Iterator[WrongValue]:
    if not _is_count(codecs):
        yield WrongValue(codecs, "a whole number", "is a fraction: codecs cannot be shared", (1,), "DT006")


def size(*, may_be_zero: bool) -> Type:
    """A size in bytes with its unit."""

    def check(value: object) -> Iterator[Mistake]:
        try:
            parsed = parse_size(value)
        except SizeError as error:
            yield WrongValue(value, "a size", error.reason, error.examples, "DT007")
            return
        if not parsed and not may_be_zero:
            yield WrongValue(value, "a size", "is no memory at all", ("4GB", UNSET), "DT007")

    return Type("a size", "4GB", {"type": "string", "pattern": SIZE_PATTERN}, check)


def _is_name(name: str) -> bool:
    return bool(name.strip())


def _is_alternatives(value: object) -> bool:
    return isinstance(value, str) and all(part.strip() for part in value.split("|"))


def _accelerator_mistakes(value: object) -> Iterator[Mistake]:
    if not _is_alternatives(value):
        yield WrongValue(value, ACCELERATOR_TEXT, instead=("A100|H100",))
        return
    parts = [part.strip() for part in str(value).split("|")]
    meant = {part: near for part in parts if (near := look_alike_model(part)) is not None}
    for part, near in meant.items():
        reason = f"names {part!r}, which is not a GPU model (did you mean {near!r}?)"
        yield WrongValue(value, ACCELERATOR_TEXT, reason, ("|".join(meant.get(one, one) for one in parts),))


_TEXT = {"type": "string"}
ACCELERATOR_TEXT = "the name of a card, or several with | between them"
ACCELERATOR = Type(ACCELERATOR_TEXT, "A100|H100", _TEXT, _accelerator_mistakes)
LABEL = predicate("a string", "gpu", _TEXT, _is_alternatives)
CODECS = amount(CODECS_LIMIT, "a whole number", is_whole=True, fraction=_codec_fraction)

RESOURCES = record_of(
    Resources,
    "Resources",
    "What one worker needs.",
    (
        Field("cpus", amount(CPUS_LIMIT, "a number"), "CPUs; a fraction is a share of one."),
        Field(
            "gpus",
            amount(GPUS_LIMIT, CARDS_TEXT, fraction=_card_fraction),
            "A share of one card (0.25), or whole cards (2).",
        ),
        Field(
            "gpu_memory",
            size(may_be_zero=False),
            "GPU memory such as 4GB; alone it sizes the worker's share of any card.",
        ),
        Field("memory", size(may_be_zero=True), "Host memory such as 8GB."),
        Field("nvdecs", CODECS, "Hardware video decoders, of its own cards or of one card."),
        Field("nvencs", CODECS, "Hardware video encoders, of its own cards or of one card."),
        Field("entire_gpu", FLAG, "Take whole cards with their codecs."),
        Field("accelerator", ACCELERATOR, "Accepted models of card: A100|H100."),
        Field(
            "labels",
            mapping_of(LABEL, "a mapping of names to values", {"pool": "gpu"}, key=_is_name),
            "Labels that its node must have.",
        ),
        Field(
            "custom",
            mapping_of(amount(CUSTOM_LIMIT, "a number"), "a mapping of names to amounts", {"licence": 1}, key=_is_name),
            "Custom resources, such as licences.",
        ),
    ),
)


def resource_problems(asked: Resources) -> list[Problem]:
    """All problems of a `Resources`, so that they can be fixed at once."""
    values = {name: getattr(asked, name) for name in RESOURCES.names}
    found = [(name, setting_problem(name, mistake, "DT001")) for name, mistake in RESOURCES.value_mistakes(values)]
    wrong = {name for name, _ in found}
    return [problem for _, problem in found] + [*_combination_problems(asked, wrong)]


def _combination_problems(asked: Resources, wrong: set[str]) -> Iterator[Problem]:
    """Problems of several fields together; `wrong` are the fields that are invalid by themselves."""
    if not wrong & {"gpus", "entire_gpu"} and asked.entire_gpu and 0 < asked.gpus < 1:
        message = f"entire_gpu=True with gpus={asked.gpus!r}: a fraction of a card is not the entire card"
        entire = Change({"entire_gpu": True, "gpus": UNSET})
        share = Change({"gpus": asked.gpus, "entire_gpu": UNSET})
        yield _combination_problem("DT006", "gpus", message, entire, share)
    if wrong:
        return
    uses_cards = bool(asked.entire_gpu or asked.gpus or asked.gpu_memory is not None or asked.nvdecs or asked.nvencs)
    if asked.accelerator is not None and not uses_cards:
        message = f"accelerator={asked.accelerator!r} without a GPU, GPU memory or codecs"
        fixes = (Change({"gpus": 1}), Change({"accelerator": UNSET}))
        yield _combination_problem("DT009", "accelerator", message, *fixes)
    has_memory = asked.memory is not None and parse_size(asked.memory) > 0
    if not (asked.cpus or has_memory or uses_cards or asked.accelerator or any(asked.custom.values())):
        message = "a worker that needs nothing cannot be counted: all resources are zero"
        fixes = (Change({"cpus": 1}), Change({"cpus": 0.1}, note="a small share"))
        yield _combination_problem("DT009", "cpus", message, *fixes)


def _combination_problem(code: str, setting: str, message: str, *fixes: Change) -> Problem:
    return Problem(code, message, fixes=fixes, subject=Subject("setting", setting))
