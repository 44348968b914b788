"""Parser of cluster specs such as '4x(32cpu, 128GB, 2xA100:40GB){pool=gpu}' or '4xp5.48xlarge', and of their parts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.documents.fields import (
    is_finite,
)
from dovetail.errors import ClusterError, Problem, did_you_mean, short_repr
from dovetail.resources.gpu_models import card_model, look_alike_model, similar_model
from dovetail.resources.instance_types import InstanceType, instance_type, is_instance_name, similar_instance
from dovetail.resources.sizes import SizeError, format_milli, parse_milli, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

NODES_LIMIT = 100_000
CARDS_LIMIT = 256
CPUS_LIMIT = 1_000_000
CODECS_LIMIT = 1_024
CUSTOM_LIMIT = 10**9
GENERIC_CARD = "gpu"
"""A card of which neither model nor memory is known."""
MAX_ITEM_WORDS = 4
"""Longest item with spaces, in words: keep 2 cpu, 1 x RTX 4090."""
SHOWN_SPEC_CHARS = 200
"""Longest spec that a fix repeats as a whole."""

EXAMPLE = "4x(32cpu, 128GB, 2xA100:40GB) + 16x(32cpu, 64GB){pool=cpu}"


@dataclass(frozen=True, slots=True)
class CardSpec:
    """`count` cards as written; None: the values of the model."""

    count: int
    model: str
    memory: str | None = None
    nvdecs: int | None = None
    nvencs: int | None = None


@dataclass(slots=True)
class NodeSpec:
    """`count` equal nodes as written."""

    count: int = 1
    name: str | None = None
    cpu_milli: int = 0
    kept_back_milli: int = 0
    memory_bytes: int = 0
    cards: list[CardSpec] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    custom: dict[str, int] = field(default_factory=dict)
    instance: str = ""
    """The instance type that CPUs, memory and cards are those of."""


class SpecError(ValueError):
    """A value is invalid: the reason, a fix, and texts to write `instead` of the invalid one."""

    def __init__(self, message: str, fix: str = "", instead: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fix = fix
        self.instead = instead


_COUNT = r"[-+]?[0-9]*\.?[0-9]+"
_GROUP = re.compile(
    rf"\s*(?:(?P<count>{_COUNT})\s*[x*]\s*)?\((?P<inside>[^()]*)\)\s*(?:\{{(?P<labels>[^{{}}]*)\}})?\s*"
)
_WITHOUT_BRACKETS = re.compile(
    r"\s*(?P<count>[1-9][0-9]*)\s*[x*]\s*(?P<inside>[0-9][^(){}]*?)\s*(?P<labels>\{[^{}]*\})?\s*"
)
"""'4x8cpu, 32GB': several nodes that lack the brackets."""
_INSTANCES = re.compile(
    rf"\s*(?:(?P<count>{_COUNT})\s*[x*]\s*)?(?P<inside>[A-Za-z][\w.-]*)\s*(?:\{{(?P<labels>[^{{}}]*)\}})?\s*"
)
_CPUS = re.compile(r"(?P<number>[-+.\w]*?)\s*cpus?", re.IGNORECASE)
_KEEP = re.compile(r"keep\s+(?P<number>[-+.\w]*?)\s*cpus?", re.IGNORECASE)
_CUSTOM = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)\s*=\s*(?P<number>.+)")
_CARDS = re.compile(rf"(?:(?P<count>{_COUNT})\s*[x*]\s*)?(?P<model>[A-Za-z][\w.+\- ]*)(?P<rest>(?:\s*:.*)?)")
_CARDS_WITHOUT_MODEL = re.compile(r"(?P<count>[1-9][0-9]{0,2})\s*(?:gpu|card)s?", re.IGNORECASE)
_COUNTED = re.compile(rf"{_COUNT}\s*[x*]\s*[A-Za-z]")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_LABEL = re.compile(r"[^\s,={}()|+][^,={}()|+]*")


def parse_cluster_spec(spec: object) -> list[NodeSpec]:
    """Groups of equal nodes in a spec; all mistakes are reported at once, with their columns."""
    if not isinstance(spec, str) or not spec.strip():
        message = f"a cluster spec is a text such as '{EXAMPLE}', not {spec!r}"
        raise ClusterError(Problem("DT023", message, fixes=("'1x(4cpu, 16GB)'",)))
    unbalanced = _bracket_problem(spec)
    if unbalanced is not None:
        raise ClusterError(unbalanced)
    groups: list[NodeSpec] = []
    problems: list[Problem] = []
    for text, column in _split(spec, "+"):
        if bare := _WITHOUT_BRACKETS.fullmatch(text):
            message = f"the brackets around {bare['inside']!r} are missing"
            instead = f"{bare['count']}x({bare['inside']}){bare['labels'] or ''}"
            start, end = column + len(text) - len(text.lstrip()), column + len(text.rstrip())
            problems.append(_spec_problem(SpecError(message, instead=(instead,)), spec, start, end))
            continue
        match, shift = _match_group(text)
        if match is None:
            problems.append(_group_problem(spec, text, column))
            continue
        group, found = _parse_group(match, column - shift)
        groups.append(group)
        problems += [_spec_problem(error, spec, start, end) for error, start, end in found]
    if problems:
        raise ClusterError(problems)
    return groups


def _match_group(text: str) -> tuple[re.Match[str] | None, int]:
    """The parts of a group, and the number of characters that were added before it."""
    instances = _INSTANCES.fullmatch(text)
    if instances and (is_instance_name(instances["inside"]) or similar_instance(instances["inside"])):
        return instances, 0
    if instances and instances["count"] is None and not instances["labels"] and card_model(instances["inside"]) is None:
        return None, 0
    return (match, 0) if (match := _GROUP.fullmatch(text)) else (_GROUP.fullmatch(f"({text})"), 1)


def _group_problem(spec: str, text: str, column: int) -> Problem:
    message = f"{text.strip()!r} is not a group of nodes"
    if _NAME.fullmatch(text.strip()):
        hint = did_you_mean(text.strip(), ["auto"])
        message += f", an instance type or a file that ends in .yaml, .yml or .json{hint}"
    return _with_column(Problem("DT023", message, fixes=(f"write it like '{EXAMPLE}'",)), spec, column)


def _bracket_problem(spec: str) -> Problem | None:
    """The first bracket without its other half."""
    pairs = {"(": ")", "{": "}"}
    opened: list[int] = []
    for position, letter in enumerate(spec):
        if letter in pairs:
            opened.append(position)
        elif letter in pairs.values():
            if not opened or pairs[spec[opened[-1]]] != letter:
                message = f"the bracket {letter!r} was not opened"
                fix = _whole_spec(spec, position, position + 1, "") or f"write it like '{EXAMPLE}'"
                return _with_column(Problem("DT023", message, fixes=(fix,)), spec, position)
            opened.pop()
    if not opened:
        return None
    position = opened[-1]
    message = f"the bracket {spec[position]!r} is not closed"
    end = _end_of_group(spec, position)
    fix = _whole_spec(spec, end, end, pairs[spec[position]])
    return _with_column(Problem("DT023", message, fixes=(fix,)), spec, position)


def _end_of_group(spec: str, position: int) -> int:
    """Where a bracket that is opened here should be closed."""
    end = next((at for at in range(position + 1, len(spec)) if spec[at] in "+({"), len(spec))
    return len(spec[:end].rstrip())


def _whole_spec(spec: str, start: int, end: int, text: str) -> str:
    """The spec with a part replaced; only the new part if the spec is long."""
    corrected = f"{spec[:start]}{text}{spec[end:]}".strip()
    return f'"{corrected}"' if len(corrected) <= SHOWN_SPEC_CHARS else f'"{text}"' if text else ""


def parse_cpus(value: object, what: str = "cpus") -> int:
    return _amount(value, what, CPUS_LIMIT, f"{what}: {_positive(value, 4)}")


def check_count(value: object, what: str, limit: int, *, least: int = 0) -> int:
    """A whole number within its limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"{what} {short_value(value)} is not a whole number", f"write a number from {least} to {limit}")
    if not least <= value <= limit:
        raise SpecError(
            f"{what} {short_value(value)} is not from {least} to {limit}", f"write a number from {least} to {limit}"
        )
    return value


def _parse_count(text: str | None, what: str, limit: int) -> int:
    """The number before an `x`; 1 if there is none. Fixes are numbers that can replace it."""
    try:
        return check_count(_int_or_text(text or "1"), what, limit, least=1)
    except SpecError as error:
        instead = tuple(dict.fromkeys(str(min(max(number, 1), limit)) for number in _near_counts(text or "")))
        raise SpecError(str(error), error.fix, instead) from None


def _near_counts(text: str) -> tuple[int, ...]:
    """Whole numbers near a negative or fractional one."""
    try:
        number = abs(float(text))
    except ValueError:
        return ()
    return (math.floor(number), math.ceil(number)) if number < 10**9 else ()


def parse_memory(value: object, what: str = "memory") -> int:
    try:
        return parse_size(value)
    except SizeError as error:
        raise SpecError(f"{what} {short_repr(error.value)} {error.reason}", instead=error.examples) from None


def parse_custom_amount(value: object, what: str) -> int:
    return _amount(value, what, CUSTOM_LIMIT, f"{what}: 1")


def parse_cards(text: str) -> CardSpec:
    """'2xA100:40GB:nvdec=5:nvenc=0'."""
    text = text.strip()
    match = _CARDS.fullmatch(text)
    if match is None:
        raise SpecError(f"{text!r} is not a card", "write it like '2xA100:40GB', '1xL4' or '2xgpu:20GB'")
    model, rest = match["model"].strip(), match["rest"]
    if model.lower() in ("cpu", "cpus"):
        raise SpecError(f"{text!r} is not a card", "write CPUs like '32cpu', and cards like '2xA100:40GB'")
    count = _parse_card_count(match, f"{model}{rest}")
    memory, codecs = _parse_card_properties(text, model, rest)
    _check_model(model, memory, f"{match['count']}x" if match["count"] else "", rest)
    return CardSpec(count, model, memory, codecs.get("nvdec"), codecs.get("nvenc"))


def _parse_card_count(match: re.Match[str], card: str) -> int:
    try:
        return _parse_count(match["count"], "the number of cards", CARDS_LIMIT)
    except SpecError as error:
        shared = "." in (match["count"] or "")
        hint = ": nodes have whole cards, and workers can share one (gpus: 0.5)" if shared else ""
        raise SpecError(f"{error}{hint}", error.fix, tuple(f"{count}x{card}" for count in error.instead)) from None


def _parse_card_properties(text: str, model: str, rest: str) -> tuple[str | None, dict[str, int]]:
    """Memory and codecs of ':40GB:nvdec=5:nvenc=0'."""
    memory: str | None = None
    codecs: dict[str, int] = {}
    for part in rest.split(":")[1:]:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.lower().removesuffix("s")
        if not equals:
            if memory is not None:
                raise SpecError(f"memory is given twice in {text!r}", "remove one of the two")
            memory = part.strip()
            _check_card_memory(memory, model)
        elif name in codecs:
            raise SpecError(f"{name} is given twice in {text!r}", "remove one of the two")
        elif name in ("nvdec", "nvenc"):
            codecs[name] = check_count(_int_or_text(value), name, CODECS_LIMIT)
        else:
            raise SpecError(f"{part.strip()!r} is not a property of a card", "write ':40GB', ':nvdec=5' or ':nvenc=0'")
    return memory, codecs


def _check_card_memory(memory: str, model: str) -> None:
    try:
        parse_memory(memory, f"memory of a {model}")
    except SpecError as error:
        raise SpecError(str(error), f"write {' or '.join(map(repr, error.instead))}") from None


def _check_model(model: str, memory: str | None, count: str, rest: str) -> None:
    """Check the name of a model: a model that is not in the table is valid with its memory, unless it differs from a
    known name only in characters that look alike."""
    if card_model(model) is not None or model.lower() == GENERIC_CARD:
        return
    near = similar_model(model) if memory is None else look_alike_model(model)
    if near is not None:
        instead = [f"{count}{near}{rest}"]
        if look_alike_model(model) is None:
            instead.append(f"{count}{model}:24GB{rest}")
        raise SpecError(f"unknown GPU model {model!r} (did you mean {near!r}?)", instead=tuple(instead))
    if memory is None:
        message = f"unknown GPU model {model!r}: write its memory as well"
        raise SpecError(message, instead=(f"{count}{model}:24GB{rest}",))


def parse_instance(text: str) -> InstanceType:
    """The instance type of this name."""
    found = instance_type(text)
    if found is not None:
        return found
    near = similar_instance(text)
    hint = f" (did you mean {near!r}?)" if near is not None else ""
    raise SpecError(
        f"unknown instance type {text.strip()!r}{hint}",
        "describe the node itself, such as '(32cpu, 128GB, 1xL4)'; docs/clusters.md lists all known instance types",
        (near,) if near is not None else (),
    )


def check_group(group: NodeSpec, *, cpus: str, keep: str) -> None:
    """Check values of an entry together; `cpus` and `keep` are their spellings in a spec or file, for fixes."""
    if not group.cpu_milli:
        raise SpecError("a node has no CPUs", f"add '{cpus}'")
    if group.kept_back_milli >= group.cpu_milli:
        raise SpecError("a node keeps back all of its CPUs", f"keep back fewer, such as '{keep}'")


def check_custom_name(name: str) -> None:
    if name.lower().removesuffix("s") in ("cpu", "gpu", "memory", "gpu_memory", "nvdec", "nvenc"):
        raise SpecError(f"{name!r} is not a custom resource", "write CPUs, memory and cards like '32cpu, 64GB, 2xA100'")
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is not a name for a custom resource", "use a letter first, then letters, digits, _ . -"
        )


def check_label(name: str, value: str) -> None:
    """Check a label; only labels that a spec can express are valid, so that every cluster has a spec."""
    for text in (name, value):
        if not _LABEL.fullmatch(text) or text != text.strip():
            raise SpecError(
                f"label {name!r}: {value!r} is not a name and a value",
                "use no spaces around it and none of , = { } ( ) | +",
            )


def _int_or_text(text: str) -> object:
    """The number, or the string itself if it is not a number of a sensible size."""
    return int(text) if re.fullmatch(r"[-+]?[0-9]{1,12}", text) else text


FoundErrors = list[tuple[SpecError, int, int]]
"""Errors, each with the start and end of the text that it is about."""


def _parse_group(match: re.Match[str], column: int) -> tuple[NodeSpec, FoundErrors]:
    group = NodeSpec()
    found: FoundErrors = []

    def attempt(at: int, text: str, read: Callable[[str], None]) -> None:
        try:
            read(text)
        except SpecError as mistake:
            found.append((mistake, at + len(text) - len(text.lstrip()), at + len(text.rstrip())))

    def count(text: str) -> None:
        group.count = _parse_count(text, "the number of nodes", NODES_LIMIT)

    if match["count"] is not None:
        attempt(column + match.start("count"), match["count"], count)
    for text, offset in _split(match["inside"], ","):
        attempt(column + match.start("inside") + offset, text, lambda text: _parse_item(group, text))
    if match["labels"] is not None:
        for text, offset in _split(match["labels"], ","):
            attempt(column + match.start("labels") + offset, text, lambda text: _parse_label(group, text))
    if not found:
        attempt(column + match.start("inside"), match["inside"], lambda text: _check_spec_group(group, text))
    return group, found


def _check_spec_group(group: NodeSpec, text: str) -> None:
    try:
        check_group(group, cpus="4cpu", keep="keep 1cpu")
    except SpecError as error:
        raise SpecError(str(error), error.fix, () if group.cpu_milli else (f"4cpu, {text.strip()}",)) from None


def _spec_problem(error: SpecError, spec: str, start: int, end: int) -> Problem:
    fixes = tuple(_whole_spec(spec, start, end, text) for text in error.instead) or (error.fix,)
    return _with_column(Problem("DT023", str(error), fixes=fixes), spec, start)


def _parse_item(group: NodeSpec, text: str) -> None:
    text = text.strip()
    if not text:
        raise SpecError("there is nothing between two commas", "remove a comma, or write '4cpu, 16GB'")
    try:
        _parse_one_item(group, text)
    except SpecError:
        parts = _items_without_commas(text)
        if len(parts) < 2:
            raise
        raise SpecError(f"a comma is missing in {text!r}", instead=(", ".join(parts),)) from None


def _items_without_commas(text: str) -> list[str]:
    """The items that a text with a missing comma consists of; no items if it is something else."""
    words = text.split()
    parts: list[str] = []
    while words:
        for length in range(min(len(words), MAX_ITEM_WORDS), 0, -1):
            part = " ".join(words[:length])
            if _is_item(part):
                parts.append(part)
                words = words[length:]
                break
        else:
            return []
    return parts


def _is_item(text: str) -> bool:
    try:
        _parse_one_item(NodeSpec(), text)
    except SpecError:
        return False
    return True


def _parse_one_item(group: NodeSpec, text: str) -> None:
    if match := _KEEP.fullmatch(text):
        if group.kept_back_milli:
            raise SpecError(f"CPUs to keep are given twice, the second time as {text!r}", "remove one of the two")
        group.kept_back_milli = _spec_cpus(match["number"], text, "keep {}cpu", "CPUs kept back")
    elif match := _CPUS.fullmatch(text):
        if group.cpu_milli:
            raise SpecError(f"CPUs are given twice, the second time as {text!r}", _twice_fix(group))
        group.cpu_milli = _spec_cpus(match["number"], text, "{}cpu", "CPUs")
    elif match := _CARDS_WITHOUT_MODEL.fullmatch(text):
        message = f"{text!r} has no GPU model: cards are written as a number, an x and the model"
        raise SpecError(message, instead=(f"{match['count']}xL40S", f"{match['count']}xgpu:48GB"))
    elif (text[0].isdigit() or text[0] in "+-.") and not _COUNTED.match(text):
        _add_memory(group, text)
    elif ":" not in text and (match := _CUSTOM.fullmatch(text)):
        _add_custom(group, match["name"], _number(match["number"], text))
    elif is_instance_name(text) or _is_misspelt_instance(text):
        _add_instance(group, text)
    else:
        _add_cards(group, text)


def _spec_cpus(number: str, text: str, spelling: str, what: str) -> int:
    example = spelling.format(_positive(number, 4 if what == "CPUs" else 1))
    try:
        amount = parse_cpus(_number(number, text), what)
    except SpecError as error:
        raise SpecError(str(error), instead=(example,)) from None
    if not amount and what == "CPUs":
        raise SpecError("a node has no CPUs", instead=(example,))
    return amount


def _positive(value: object, otherwise: int) -> str:
    """A valid number of CPUs like this one."""
    try:
        number = abs(float(value)) if isinstance(value, str | int | float) else 0.0
    except (ValueError, OverflowError):
        number = 0.0
    return format_milli(parse_milli(number)) if 0.001 <= number <= CPUS_LIMIT else str(otherwise)


def _add_memory(group: NodeSpec, text: str) -> None:
    size = parse_memory(text)
    if group.memory_bytes:
        raise SpecError(f"memory is given twice, the second time as {text!r}", _twice_fix(group))
    group.memory_bytes = size


def _add_cards(group: NodeSpec, text: str) -> None:
    if group.instance:
        message = f"{group.instance} already has its cards; {text!r} cannot be added"
        raise SpecError(message, _twice_fix(group))
    group.cards.append(parse_cards(text))


def _twice_fix(group: NodeSpec) -> str:
    if not group.instance:
        return "remove one of the two"
    return f"remove it: CPUs, memory and cards are those of {group.instance}"


def _is_misspelt_instance(text: str) -> bool:
    """Whether it resembles an instance type, and no card."""
    return not any(letter in text for letter in " :") and card_model(text) is None and bool(similar_instance(text))


def _add_instance(group: NodeSpec, text: str) -> None:
    counted = _INSTANCES.fullmatch(text)
    if counted is not None and counted["count"] is not None:
        message = f"the number of nodes in {text!r} belongs before the bracket"
        raise SpecError(message, f"write '{counted['count']}x({counted['inside']})'")
    found = parse_instance(text)
    if group.instance or group.cpu_milli or group.memory_bytes or group.cards:
        message = f"CPUs, memory and cards of {found.name} cannot be combined with others"
        raise SpecError(message, "write either an instance type, or CPUs, memory and cards")
    set_instance(group, found)


def set_instance(group: NodeSpec, found: InstanceType) -> None:
    """Give a group the CPUs, memory and cards of an instance type."""
    group.instance = found.name
    group.cpu_milli = found.cpus * 1000
    group.memory_bytes = parse_size(f"{found.memory_gb}GB")
    group.cards = [parse_cards(found.cards)] if found.cards else []


def _add_custom(group: NodeSpec, name: str, value: float) -> None:
    check_custom_name(name)
    if name in group.custom:
        raise SpecError(f"{name!r} is given twice", "remove one of the two")
    group.custom[name] = parse_custom_amount(value, name)


def _parse_label(group: NodeSpec, text: str) -> None:
    name, equals, value = (piece.strip() for piece in text.partition("="))
    if not name and not equals and not value:
        return
    check_label(name, value)
    if name in group.labels:
        raise SpecError(f"label {name!r} is given twice", "remove one of the two")
    group.labels[name] = value


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"{text.strip()!r} in {whole!r} is not a number", "write it like '32cpu'") from None


def _amount(value: object, what: str, limit: int, example: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{what} {value!r} is not a number", f"write it like '{example}'")
    if not is_finite(value) or value < 0 or value > limit:
        shown = f"{value:g}" if is_finite(value) else short_value(value)
        raise SpecError(f"{what} {shown} is not from 0 to {limit}", f"write it like '{example}'")
    if 0 < value < 0.001:
        raise SpecError(f"{what} {value:g} is below the smallest amount, 0.001", f"write it like '{example}'")
    return parse_milli(value)


def short_value(value: object) -> str:
    if isinstance(value, int) and not is_finite(value):
        return "of more than 300 digits"
    text = f"{value:.3g}" if isinstance(value, int) and abs(value) > 10**15 else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _split(text: str, separator: str) -> list[tuple[str, int]]:
    """Parts at the outermost level, each with its start."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if letter == separator and depth <= 0:
            parts.append((text[start:position], start))
            start = position + 1
    parts.append((text[start:], start))
    return parts


def _with_column(problem: Problem, spec: str, column: int) -> Problem:
    shown = spec if len(spec) <= 60 else f"{spec[:57]}..."
    skipped = len(spec[column:]) - len(spec[column:].lstrip())
    return problem.at(f"cluster {shown!r}:{column + skipped + 1}")
