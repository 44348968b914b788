"""Catalogue of Data-Juicer operators: kinds, parameters, defaults, and which of them run natively here.

`operators/known.json` has every operator of Data-Juicer 1.6.1, one per line. A parameter there is its type word and its
default, or the type word alone if it is required. Type words end with "?" if null is allowed:

    flag  text  texts  mapping  list  any      int  ints  float   with a range: int>0  int>=0  float 0..1
    'avg'|'max'|'min'                          alternatives; quoted words are literal values
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
"""Packages that the adapter needs. The catalogue is of this version, which imports the other two without requiring
them."""


class Required:
    """Default of a required parameter."""

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
    """REQUIRED if there is none. A folder with default null is a folder of Data-Juicer's own assets."""
    nullable: bool


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """One operator."""

    name: str
    kind: str
    """mapper, filter, deduplicator, selector, grouper, aggregator or pipeline."""
    parameters: Mapping[str, Parameter]
    """Its own parameters; `accepted` has all."""
    cuda: bool
    """Whether it runs on a GPU by default."""
    batched: bool
    note: str
    """A remark for users; usually empty."""
    adapter: bool = True
    """Whether the adapter can run it if Data-Juicer is installed."""

    @property
    def accepted(self) -> Mapping[str, Parameter]:
        """All parameters: those of every operator, of every filter, and its own, which take precedence."""
        return {**BASE_PARAMETERS, **(FILTER_PARAMETERS if self.kind == "filter" else {}), **self.parameters}


def _parameter_table(words: Mapping[str, list[Any]]) -> Mapping[str, Parameter]:
    return MappingProxyType({name: _parameter(name, *entry) for name, entry in words.items()})


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
"""Parameters of every operator."""
FILTER_PARAMETERS: Final = _parameter_table(
    {
        "stats_export_path": ["text?", None],
        "min_closed_interval": ["flag", True],
        "max_closed_interval": ["flag", True],
        "reversed_range": ["flag", False],
    }
)
"""Additional parameters of every filter."""


class _Catalogue(Mapping[str, OperatorSpec]):
    """Entries are created on demand: a recipe has about ten operators, the catalogue 229."""

    def __init__(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self._entries = entries
        self._specs: dict[str, OperatorSpec] = {}

    def __getitem__(self, name: str) -> OperatorSpec:
        found = self._specs.get(name)
        if found is None:
            entry = self._entries[name]
            found = self._specs[name] = OperatorSpec(
                name,
                entry["kind"],
                _parameter_table(entry["parameters"]),
                cuda=entry.get("cuda", False),
                batched=entry.get("batched", False),
                note=entry.get("note", ""),
                adapter=entry.get("adapter", True),
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@cache
def known_operators() -> Mapping[str, OperatorSpec]:
    """Every operator by its name, in alphabetical order."""
    return _Catalogue(json.loads(resources.files(OPERATORS_PACKAGE).joinpath("known.json").read_bytes()))


def native_class(name: str) -> type[Operator] | None:
    """Dovetail's class of an operator; None if there is none. Imports only the module of that operator."""
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
    """The problem of an operator that Dovetail does not implement."""
    message = f"{entry.name} is an operator of Data-Juicer that Dovetail does not implement"
    evidence = (f"{entry.name}: {entry.note}",) if entry.note else ()
    if not entry.adapter:
        return Problem("DT414", message, evidence, (f"remove {entry.name} from process",))
    return Problem("DT414", message, evidence, ("adapter: data_juicer", f"pip install {DATA_JUICER_REQUIREMENTS}"))


def is_installed(module: str) -> bool:
    """Whether a module can be found. Imports nothing but its parent package."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
