"""Catalogue of Data-Juicer operators: kinds, parameters, defaults, and which of them run natively here.

`operators/known.json` has every operator of Data-Juicer 1.6.1, one per line. A parameter there is its type word and its
default, or the type word alone if it must be given. Type words, with "?" behind them if null will do:

    flag  text  texts  mapping  list  any      int  ints  float   with a range: int>0  int>=0  float 0..1
    'avg'|'max'|'min'                          several that will do, quoted if they stand for themselves
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from dovetail.errors import Problem

if TYPE_CHECKING:
    from dovetail.recipes.operators.base import Operator

OPERATORS_PACKAGE = "dovetail.recipes.operators"
DATA_JUICER_REQUIREMENTS = "py-data-juicer==1.6.1 aiohttp ray"
"""What the adapter needs. The table was made from this version; it imports the other two, but does not bring them."""


class Required:
    """The default of a parameter that must be given."""

    def __repr__(self) -> str:
        return "REQUIRED"

    def __reduce__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = Required()


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: str
    """A type word, without the "?"."""
    default: Any
    """REQUIRED if there is none. A folder whose default is null is one of Data-Juicer's own."""
    nullable: bool


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """One operator."""

    name: str
    kind: str
    """mapper, filter, deduplicator, selector, grouper, aggregator or pipeline."""
    parameters: Mapping[str, Parameter]
    """Its own; `accepted` has the others."""
    cuda: bool
    """Whether it runs on a GPU unless told otherwise."""
    batched: bool
    note: str
    """What else must be known about it; often nothing."""
    adapter: bool = True
    """Whether the adapter can run it where a Data-Juicer that has it is installed."""

    @property
    def accepted(self) -> Mapping[str, Parameter]:
        """All that may be said to it: what every operator, and every filter, accepts, and its own, which go first."""
        return {**BASE_PARAMETERS, **(FILTER_PARAMETERS if self.kind == "filter" else {}), **self.parameters}


def _parameter_table(words: Mapping[str, list[Any]]) -> Mapping[str, Parameter]:
    return MappingProxyType({name: _parameter(name, *said) for name, said in words.items()})


def _parameter(name: str, word: str, default: Any = REQUIRED) -> Parameter:
    return Parameter(name, word.removesuffix("?"), default, word.endswith("?"))


_FIELD_KEYS = {
    "text_key": "text",
    "image_key": "images",
    "audio_key": "audios",
    "video_key": "videos",
    "image_bytes_key": "image_bytes",
    "system_key": "system",
    "instruction_key": "instruction",
    "prompt_key": "prompt",
    "query_key": "query",
    "response_key": "response",
    "history_key": "history",
}
BASE_PARAMETERS: Final = _parameter_table(
    {
        **{key: ["text", field] for key, field in _FIELD_KEYS.items()},
        "index_key": ["text?", None],
        "work_dir": ["text?", None],
        "input_columns": ["text|texts?", None],
        "output_columns": ["text|texts?", None],
        "skip_op_error": ["flag", False],
        "adaptive_batching": ["flag?", None],
        "auto_op_parallelism": ["flag", True],
        "batch_mode": ["flag?", None],
        "turbo": ["flag", False],
        "batch_size": ["int>0?", None],
        "accelerator": ["'cpu'|'cuda'?", None],
        "num_proc": ["int|ints?", None],
        "num_cpus": ["float>=0?", None],
        "num_gpus": ["float>=0?", None],
        "memory": ["text?", None],
        "cpu_required": ["float>=0?", None],
        "gpu_required": ["float>=0?", None],
        "mem_required": ["text?", None],
        "runtime_env": ["mapping?", None],
        "ray_execution_mode": ["'actor'|'task'?", None],
    }
)
"""What every operator accepts."""
FILTER_PARAMETERS: Final = _parameter_table(
    {
        "stats_export_path": ["text?", None],
        "min_closed_interval": ["flag", True],
        "max_closed_interval": ["flag", True],
        "reversed_range": ["flag", False],
    }
)
"""What every filter accepts besides."""


class _Catalogue(Mapping[str, OperatorSpec]):
    """Entries are made when they are asked for: a recipe has ten operators, the table 229."""

    def __init__(self, said: Mapping[str, Mapping[str, Any]]) -> None:
        self._said = said
        self._made: dict[str, OperatorSpec] = {}

    def __getitem__(self, name: str) -> OperatorSpec:
        found = self._made.get(name)
        if found is None:
            said = self._said[name]
            found = self._made[name] = OperatorSpec(
                name,
                said["kind"],
                _parameter_table(said["parameters"]),
                cuda=said.get("cuda", False),
                batched=said.get("batched", False),
                note=said.get("note", ""),
                adapter=said.get("adapter", True),
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._said

    def __iter__(self) -> Iterator[str]:
        return iter(self._said)

    def __len__(self) -> int:
        return len(self._said)


@cache
def known_operators() -> Mapping[str, OperatorSpec]:
    """Every operator by its name, in alphabetical order."""
    return _Catalogue(json.loads(resources.files(OPERATORS_PACKAGE).joinpath("known.json").read_bytes()))


def native_class(name: str) -> type[Operator] | None:
    """Our class of this name, if there is one; only its own module is imported."""
    if name not in known_operators() or importlib.util.find_spec(f"{OPERATORS_PACKAGE}.{name}") is None:
        return None
    module = importlib.import_module(f"{OPERATORS_PACKAGE}.{name}")
    made: type[Operator] = getattr(module, class_name(name))
    return made


def class_name(name: str) -> str:
    """'clean_links_mapper' -> 'CleanLinksMapper'."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def availability_problem(name: str) -> Problem | None:
    """Why a known operator cannot run in this environment; None if it can."""
    entry = known_operators()[name]
    made = native_class(name)
    if made is None:
        return _not_native_problem(entry)
    missing = [module for module in made.needs if not is_installed(module)]
    if not missing:
        return None
    return Problem(
        "DT413",
        f"{name} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
        fixes=(f"pip install 'dovetail-ml[{made.extra or 'recipes'}]'",),
    )


def _not_native_problem(entry: OperatorSpec) -> Problem:
    """There is none of ours."""
    message = f"{entry.name} is known, but Dovetail has no {entry.kind} of this name of its own"
    evidence = (f"{entry.name}: {entry.note}",) if entry.note else ()
    if not entry.adapter:
        return Problem("DT414", message, evidence, (f"leave {entry.name} out of process",))
    return Problem("DT414", message, evidence, ("adapter: data_juicer", f"pip install {DATA_JUICER_REQUIREMENTS}"))


def is_installed(module: str) -> bool:
    """Whether it can be found; nothing is imported, except the package that it is in."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
