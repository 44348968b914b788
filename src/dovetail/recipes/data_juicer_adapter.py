"""Adapter that runs operators of an installed Data-Juicer in Dovetail workers.

Data-Juicer is imported, and the operator created, in `setup`: planning a recipe needs neither. Its operators work on
dicts of lists, Dovetail's on rows; their methods are called directly, without a dataset where possible. Installations
during a run are refused (`install_guard.py`); models that an operator downloads are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from dovetail.errors import ConfigError, Problem
from dovetail.recipes.catalogue import DATA_JUICER_REQUIREMENTS, is_installed
from dovetail.recipes.file_keys import DOVETAIL_KEYS, KEY_FIELDS
from dovetail.recipes.install_guard import forbid_installs
from dovetail.recipes.operators.base import (
    STATS_FIELD,
    DatasetOperator,
    Deduplicator,
    Filter,
    Mapper,
    Operator,
    Row,
    Selector,
    rows_to_columns,
)
from dovetail.recipes.parameters import coerce_parameters

if TYPE_CHECKING:
    from dovetail.engines.worker_context import Worker
    from dovetail.recipes.catalogue import OperatorSpec

META_FIELD = "__dj__meta__"
BATCH_META_FIELD = "__dj__batch_meta__"
UID_FIELD = "__dj__uid"
ROW_NUMBER_FIELD = "__dovetail_number__"
"""Field with the number of Dovetail's row in a dataset of Data-Juicer."""
DOVETAIL_PARAMETERS = frozenset({"num_proc", "auto_op_parallelism", "skip_op_error", *DOVETAIL_KEYS})
"""Parameters that Dovetail handles and does not pass on."""
ROW_CHANGING_DEDUPLICATORS = frozenset({"document_line_deduplicator"})
"""Deduplicators that drop parts of rows."""


def adapt_operator(
    entry: OperatorSpec, params: Mapping[str, Any], keys: Mapping[str, str] | None = None
) -> tuple[AdaptedOperator | None, Problem | None]:
    """(operator, problem). Imports nothing. `keys` are names of fields: `{"video_key": "v"}`.

    Without Data-Juicer there is an operator to plan with, and a problem. The operator is None if the adapter does not
    support it.
    """
    if not entry.adapter:
        message = f"the adapter cannot run {entry.name}: {entry.note}"
        return None, Problem("DT414", message, fixes=(f"remove {entry.name} from process",))
    made = (AdaptedDatasetOperator if entry.name in ROW_CHANGING_DEDUPLICATORS else _ADAPTED_CLASSES[entry.kind])(
        entry, params, keys
    )
    if is_installed("data_juicer"):
        return made, None
    message = f"{entry.name} runs through Data-Juicer, which is not installed"
    return made, Problem("DT414", message, fixes=(f"pip install {DATA_JUICER_REQUIREMENTS}",))


class AdaptedOperator(Operator):
    """Base of adapted operators: the operator of Data-Juicer is created in the worker."""

    def __init__(self, entry: OperatorSpec, params: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> None:
        self.name = entry.name
        self.kind = entry.kind
        self.recipe_parameters = coerce_parameters(entry, params)
        self.keys = dict(keys or {})
        self._accelerator: dict[str, str] = {}
        self._made: Any = None

    def setup(self, worker: Worker) -> None:
        # without this, Data-Juicer uses any card of the machine
        self._accelerator = {"accelerator": "cuda" if worker.gpus else "cpu"}
        self.data_juicer_operator()

    def data_juicer_operator(self) -> Any:
        """Data-Juicer's object."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> Any:
        forbid_installs()
        modules = importlib.import_module("data_juicer.ops").OPERATORS.modules
        if self.name not in modules:
            version = importlib.import_module("data_juicer").__version__
            message = f"the installed Data-Juicer {version} has no operator {self.name}"
            raise ConfigError(Problem("DT414", message, fixes=(f"remove {self.name} from process",)))
        given = {key: value for key, value in self.recipe_parameters.items() if key not in DOVETAIL_PARAMETERS}
        return modules[self.name](**{**self.keys, **self._settings(), **self._accelerator, **given})

    def _settings(self) -> dict[str, Any]:
        """Arguments of Data-Juicer's constructor that Dovetail sets after construction."""
        return {key: getattr(self, key) for key in KEY_FIELDS}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def columns(self) -> tuple[str, ...]:
        """Unknown: Data-Juicer does not declare them."""
        return ()

    def code_key(self) -> str:
        return f"{self.name} {sorted(self.keys.items())!r} {super().code_key()}"

    def _is_in(self, registry: str) -> bool:
        """Whether it is in a registry of Data-Juicer, such as that of tagging operators."""
        return self.name in getattr(importlib.import_module("data_juicer.ops"), registry).modules

    def _nested(self, batch: Any) -> Any:
        """The batch in Data-Juicer's form for dotted keys, in which `sample["meta.text"]` works."""
        fields = [
            value
            for key, value in vars(self.data_juicer_operator()).items()
            if key.endswith("_key") and isinstance(value, str)
        ]
        if not any("." in field for field in fields):
            return batch
        return importlib.import_module("data_juicer.core.data.dj_dataset").nested_obj_factory(batch)


class AdaptedMapper(AdaptedOperator, Mapper):
    """Mappers, and aggregators, which make one row from each group."""

    batch_size = 16

    @overload
    def __call__(self, row: Row) -> Iterator[Row]: ...
    @overload
    def __call__(self, row: list[Row]) -> list[Row]: ...
    def __call__(self, row: Row | list[Row]) -> Iterator[Row] | list[Row]:
        return self._mapped(row) if isinstance(row, list) else iter(self._mapped([row]))

    def _mapped(self, rows: list[Row]) -> list[Row]:
        made = self.data_juicer_operator()
        if self.kind == "aggregator":
            _ensure_mapping(rows, BATCH_META_FIELD)
        if self._is_in("TAGGING_OPS"):
            _ensure_mapping(rows, META_FIELD)
        if made.is_batched_op():
            found = batch_to_rows(made.process_batched(self._nested(rows_to_columns(rows))))
        else:
            found = [made.process_single(self._nested(row)) for row in rows]
        return [to_plain_types(row) for row in found]


class AdaptedFilter(AdaptedOperator, Filter):
    """Filters: stats first, then the decision."""

    batch_size = 16

    def _settings(self) -> dict[str, Any]:
        bounds = ("min_closed_interval", "max_closed_interval", "reversed_range")
        return {**super()._settings(), **{key: getattr(self, key) for key in bounds}}

    @overload
    def __call__(self, row: Row) -> Row | None: ...
    @overload
    def __call__(self, row: list[Row]) -> list[Row]: ...
    def __call__(self, row: Row | list[Row]) -> Row | list[Row] | None:
        return self._kept(row) if isinstance(row, list) else next(iter(self._kept([row])), None)

    def _kept(self, rows: list[Row]) -> list[Row]:
        made = self.data_juicer_operator()
        if not self._is_in("NON_STATS_FILTERS"):
            _ensure_mapping(rows, STATS_FIELD)
        if self._is_in("TAGGING_OPS"):
            _ensure_mapping(rows, META_FIELD)
        if made.is_batched_op():
            batch = made.compute_stats_batched(self._nested(rows_to_columns(rows)))
            kept = list(made.process_batched(batch))
            measured = batch_to_rows(batch)
        else:
            measured = [made.compute_stats_single(self._nested(row)) for row in rows]
            kept = [made.process_single(row) for row in measured]
        return [to_plain_types(row) for row, keep in zip(measured, kept, strict=True) if keep]


class AdaptedDeduplicator(AdaptedOperator, Deduplicator):
    """Deduplicators: Data-Juicer gets a dataset of hashes only."""

    def compute_hash(self, row: Row) -> dict[str, Any]:
        hashes = _hash_fields()
        given = {field: value for field, value in row.items() if field == UID_FIELD or field not in hashes}
        found = _compute_hash(self.data_juicer_operator(), self._nested(given))
        return {field: found[field] for field in hashes if field in found}

    def originals(self, hashes: Iterable[Any]) -> Sequence[int]:
        rows = [{**found, ROW_NUMBER_FIELD: number} for number, found in enumerate(hashes)]
        if not rows:
            return []
        kept, pairs = self.data_juicer_operator().process(_make_dataset(rows), show_num=len(rows))
        originals = [-1] * len(rows)
        for number in kept[ROW_NUMBER_FIELD]:
            originals[number] = number
        _fill_originals(rows, originals, pairs.values())
        return originals


def _fill_originals(rows: Sequence[Row], originals: list[int], clusters: Iterable[Sequence[Row]]) -> None:
    """Set the original of each dropped row: the kept row of its cluster, or a row with the same hash; -1 if unknown."""
    for cluster in clusters:
        numbers = [row[ROW_NUMBER_FIELD] for row in cluster]
        first = next((number for number in numbers if originals[number] == number), -1)
        for number in numbers:
            if originals[number] == -1:
                originals[number] = first
    same: dict[str, int] = {}
    for number, row in enumerate(rows):
        key = repr([value for field, value in row.items() if field not in (ROW_NUMBER_FIELD, UID_FIELD)])
        if originals[number] == number:
            same.setdefault(key, number)
        elif originals[number] == -1:
            originals[number] = same.get(key, -1)


class AdaptedSelector(AdaptedOperator, Selector):
    """Selectors: Data-Juicer gets all rows, in memory."""

    def select_rows(self, rows: Iterable[Row]) -> Sequence[int]:
        found = [{**row, ROW_NUMBER_FIELD: number} for number, row in enumerate(rows)]
        return list(self.data_juicer_operator().process(_make_dataset(found))[ROW_NUMBER_FIELD]) if found else []


class AdaptedDatasetOperator(AdaptedOperator, DatasetOperator):
    """Groupers, and other operators over all rows, which Data-Juicer holds in memory."""

    def process_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        found, made = list(rows), self.data_juicer_operator()
        if not found:
            return
        if self.kind == "deduplicator":
            result, _ = made.process(_make_dataset([_compute_hash(made, self._nested(row)) for row in found]))
        else:
            result = made.process(_make_dataset(found))
        hashes = _hash_fields()
        for row in result:
            yield {
                field: to_plain_types(value)
                for field, value in row.items()
                if field == UID_FIELD or field not in hashes
            }


def _compute_hash(made: Any, row: Any) -> Row:
    """Calls the method of the class: that of the object treats a row of lists as a batch."""
    found: Row = type(made).compute_hash(made, row)
    return found


def _hash_fields() -> frozenset[str]:
    """Fields that deduplicators write, and the unique id of rows."""
    keys = vars(importlib.import_module("data_juicer.utils.constant").HashKeys)
    return frozenset(value for name, value in keys.items() if not name.startswith("_"))


def _make_dataset(rows: list[Row]) -> Any:
    """A dataset of Data-Juicer in memory; missing fields are null."""
    importlib.import_module("datasets").disable_progress_bars()
    data = importlib.import_module("data_juicer.core.data")
    return data.NestedDataset(data.NestedDataset.from_dict(rows_to_columns(rows)))


def _ensure_mapping(rows: Iterable[Row], field: str) -> None:
    """Operators of Data-Juicer expect a mapping that its datasets add."""
    for row in rows:
        if row.get(field) is None:
            row[field] = {}


def batch_to_rows(batch: Mapping[str, Sequence[Any]]) -> list[Row]:
    """A batch of Data-Juicer as rows; their number may have changed."""
    lengths = {field: len(values) for field, values in batch.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the operator made columns of different lengths: {lengths}")
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def to_plain_types(value: Any) -> Any:
    """The value without types of Data-Juicer and NumPy, which the next operator may not support."""
    if isinstance(value, Mapping):
        return {key: to_plain_types(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [to_plain_types(inside) for inside in value]
    return value.tolist() if type(value).__module__ == "numpy" else value


_ADAPTED_CLASSES: dict[str, type[AdaptedOperator]] = {
    "mapper": AdaptedMapper,
    "aggregator": AdaptedMapper,
    "filter": AdaptedFilter,
    "deduplicator": AdaptedDeduplicator,
    "selector": AdaptedSelector,
    "grouper": AdaptedDatasetOperator,
}
