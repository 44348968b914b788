"""Keys of a recipe file, at the top level and per operator, with their value checks.

Data-Juicer's keys with Data-Juicer's meaning, and a few of Dovetail. Keys of Data-Juicer without effect in Dovetail are
accepted with a note; any other key is an error with a suggestion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import (
    FLAG,
    PATH,
    PATHS,
    TEXT,
    TEXTS,
    Field,
    Mistake,
    Record,
    Type,
    WrongValue,
    choice,
    is_finite,
    is_int,
    is_number,
    one_of,
    predicate,
    whole,
)
from dovetail.errors import UNSET
from dovetail.pipeline.source_sink import COUNT_LIMIT, ERROR_LIMIT, MODES, SIZE
from dovetail.pipeline.stage_fields import STAGE
from dovetail.resources.sizes import SizeError, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

POSITIVE_INT = whole(1, 1_000_000, "a whole number from 1 on", example=4)
NAME_OR_NAMES = one_of("a name, or a list of names", replace(TEXT, example="text"), TEXTS)
BYTE_SIZE = one_of("a size, or a number of bytes", SIZE, whole(1, COUNT_LIMIT))
DATASET_CONFIG = predicate(
    "a mapping with 'configs'",
    {"configs": [{"type": "local", "path": "data.jsonl"}]},
    {"type": "object", "required": ["configs"]},
    lambda value: dataset_paths(value) is not None,
)
STDIN_SOURCE = {"run": "dovetail.runtime.run_spec:stdin_rows"}
"""Value of dataset_path for `--source -`."""
INPUT_PATHS = predicate(
    PATHS.text, PATHS.example, PATHS.schema, lambda value: PATHS.accepts(value) or value == STDIN_SOURCE
)
OPERATORS = predicate(
    "a list of operators",
    [{"text_length_filter": {"min_len": 50}}],
    {"type": "array", "minItems": 1},
    lambda value: isinstance(value, list) and bool(value),
)
EXECUTOR_TYPES = ("default", "local", "ray", "ray_partitioned")
EXPORT_TYPES = ("jsonl", "json", "parquet", "csv", "lance")
DEFAULT_TRACE_NUM = 10
DEFAULT_MAX_ERRORS = 1000
STAGE_FIELDS = {"call_timeout": "timeout"}
"""Key in a recipe -> field of Stage, where they differ: operators of Data-Juicer have a parameter of that name."""
FAILURE_KEYS = (
    "retries",
    "on_error",
    "on_death",
    "on_failure",
    "call_timeout",
    "setup_timeout",
    "max_setup_failures",
)
"""Settings of a stage that a recipe can have for all operators, and for one."""
OPERATOR_DEFAULTS = Record(
    "Operator defaults",
    "Values of all operators that do not have their own, as in a [stage](#stage).",
    tuple(replace(STAGE.by_name[STAGE_FIELDS.get(key, key)], name=key, default=UNSET) for key in FAILURE_KEYS),
)

RECIPE_FILE = Record(
    "Recipe file",
    "A list of operators over a dataset, in Data-Juicer's format.",
    (
        Field("project_name", TEXT, "Name of the recipe.", nullable=True),
        Field(
            "dataset_path",
            INPUT_PATHS,
            "Files, folders or globs; relative paths start at the folder of this file.",
            nullable=True,
        ),
        Field(
            "dataset",
            DATASET_CONFIG,
            "Input in Data-Juicer's other form: {configs: [{type: local, path: ...}]}.",
            nullable=True,
        ),
        Field(
            "export_path",
            PATH,
            "Output file; the extension sets the format: .jsonl, .parquet, .csv, .lance (.gz, .zst).",
            nullable=True,
        ),
        Field("export_type", choice(EXPORT_TYPES), "Output format, if the extension does not set it.", nullable=True),
        Field("export_shard_size", BYTE_SIZE, "Write several files of about this size instead of one.", nullable=True),
        Field(
            "export_stats", FLAG, "Also write the stats of the remaining rows to <export>_stats.jsonl.", nullable=True
        ),
        Field("process", OPERATORS, "The operators.", required=True),
        Field(
            "defaults",
            replace(
                predicate(
                    "a mapping", {"retries": 1}, OPERATOR_DEFAULTS.schema(), lambda value: isinstance(value, Mapping)
                ),
                text="[defaults](#operator-defaults) of operators",
            ),
            "Settings of all operators that do not have their own.",
            nullable=True,
        ),
        Field(
            "np", POSITIVE_INT, "Workers per operator without num_proc, if auto_op_parallelism is false.", nullable=True
        ),
        Field(
            "executor_type",
            choice(EXECUTOR_TYPES),
            "default: run on this machine; ray: run on a Ray cluster.",
            nullable=True,
        ),
        Field("ray_address", TEXT, "With executor_type: ray: auto, or HOST:PORT.", nullable=True),
        Field(
            "auto_op_parallelism",
            FLAG,
            "true: Dovetail sets the number of workers; false: only num_proc and np do.",
            nullable=True,
        ),
        Field(
            "mode",
            choice(MODES),
            "How operators share the machine: auto, streaming, sequential or waves.",
            nullable=True,
        ),
        Field("ordered", FLAG, "Write results in the order of the input; default true.", nullable=True),
        Field(
            "max_errors",
            ERROR_LIMIT,
            "Fail the run when more rows than this, a number or a percentage, have failed; default "
            f"{DEFAULT_MAX_ERRORS}.",
            nullable=True,
        ),
        Field("text_keys", NAME_OR_NAMES, "Field with the text; the first of a list is used.", nullable=True),
        Field("image_key", TEXT, "Field with the paths of images.", nullable=True),
        Field("image_bytes_key", TEXT, "Field with the bytes of images.", nullable=True),
        Field("open_monitor", FLAG, "Write the resource use of each operator to monitor/.", nullable=True),
        Field("open_tracer", FLAG, "Write samples of changed and dropped rows per operator to trace/.", nullable=True),
        Field("trace_num", POSITIVE_INT, f"Samples per operator; default {DEFAULT_TRACE_NUM}.", nullable=True),
        Field("op_list_to_trace", TEXTS, "Trace only these operators.", nullable=True),
        Field(
            "skip_op_error",
            FLAG,
            "true: record failed rows and continue; false: fail the run at the first failed row.",
            nullable=True,
        ),
        Field("keep_stats_in_res_ds", FLAG, "Keep the field __dj__stats__ in the results.", nullable=True),
        Field("op_fusion", FLAG, "No effect: operators that can share workers always do.", nullable=True),
        Field("use_checkpoint", FLAG, "Resume an unfinished run automatically.", nullable=True),
        Field("work_dir", PATH, "Folder for monitor/ and trace/; default: the folder of the results.", nullable=True),
        Field("custom_operator_paths", PATHS, "Python files or folders with your own operators.", nullable=True),
    ),
)
IGNORED_KEYS = frozenset(
    {
        *("adaptive_batch_size", "audio_key", "audio_special_token", "auto", "auto_num", "backup_count"),
        *("cache_compress", "checkpoint", "config", "conflict_resolve_strategy", "data_probe_algo"),
        *("data_probe_ratio", "debug", "ds_cache_dir", "eoc_special_token", "event_logging"),
        *("export_aws_credentials", "export_extra_args", "export_in_parallel", "export_original_dataset"),
        *("fusion_strategy", "generated_dataset_config", "hpo_config", "image_special_token"),
        *("intermediate_storage", "job_id", "keep_hashes_in_res_ds", "load_dataset_kwargs", "max_log_size_mb"),
        *("min_common_dep_num_to_combine", "model_infer_config", "op_list_to_mine", "open_insight_mining"),
        *("partition", "partition_dir", "path_3sigma_recipe", "percentiles", "preserve_intermediate_data"),
        *("resource_optimization", "save_stats_in_one_file", "suffixes", "temp_dir", "turbo", "use_cache"),
        *("user_specified", "validators", "video_key", "video_special_token"),
    }
)
"""Keys of Data-Juicer without effect in Dovetail."""


def dataset_paths(value: object) -> list[str] | None:
    """The paths of `dataset:`; None unless all of its configs are local files."""
    configs = value.get("configs") if isinstance(value, Mapping) else None
    if not isinstance(configs, list) or not configs:
        return None
    paths = [one.get("path") if isinstance(one, Mapping) and one.get("type") == "local" else None for one in configs]
    return [path for path in paths if path] if all(isinstance(path, str) and path for path in paths) else None


# --- keys of an operator

DEPRECATED_NAMES = {"cpu_required": "num_cpus", "gpu_required": "num_gpus", "mem_required": "memory"}
KEY_FIELDS = ("text_key", "image_key", "image_bytes_key")
DOVETAIL_KEYS = (
    "workers",
    "resources",
    "adapter",
    "rate",
    "returns",
    *FAILURE_KEYS,
    "env",
)
"""Stage settings that Data-Juicer does not have."""
OPERATOR_KEYS = frozenset(
    {
        *("num_proc", "num_cpus", "num_gpus", "memory", "batch_size", "accelerator", "runtime_env", "skip_op_error"),
        *DEPRECATED_NAMES,
        *KEY_FIELDS,
        *DOVETAIL_KEYS,
    }
)
MAX_WORKERS = 1_000_000


def _is_amount(value: object) -> bool:
    return is_number(value) and is_finite(value) and value >= 0


def _memory_mistakes(value: object) -> Iterator[Mistake]:
    try:
        parse_size(value)
    except SizeError as error:
        yield WrongValue(value, "a size", error.reason, (_similar_size(value),))


def _similar_size(value: object) -> str:
    """The size that was probably meant."""
    found = re.search(r"(\d+(?:[.,]\d+)?)\s*([kKmMgGtT]?)", str(value))
    number, unit = (found[1].replace(",", "."), found[2].upper() or "M") if found else ("2", "M")
    size = f"{number if float(number) else 2}{unit}B"
    try:
        parse_size(size)
    except SizeError:
        return "2GB"
    return size


def _is_workers(value: object) -> bool:
    match value:
        case "auto" | -1:
            return True
        case [low, high]:
            return is_int(low) and is_int(high) and 1 <= low <= high <= MAX_WORKERS
    return is_int(value) and 1 <= value <= MAX_WORKERS


_COUNT_SCHEMA = {"type": "integer", "minimum": 1}
WORKERS = predicate(
    "-1 (auto), a number of workers, or [minimum, maximum]",
    4,
    {
        "anyOf": [
            {"enum": ["auto", -1]},
            _COUNT_SCHEMA,
            {"type": "array", "items": _COUNT_SCHEMA, "minItems": 2, "maxItems": 2},
        ]
    },
    _is_workers,
)
CPUS = predicate("a number from 0 on", 1, {"type": "number", "minimum": 0}, _is_amount)
GPUS = predicate(CPUS.text, 0.25, CPUS.schema, _is_amount)
MEMORY = Type("a size", "2GB", SIZE.schema, _memory_mistakes)
ACCELERATOR = predicate("cpu or cuda", "cpu", {"enum": ["cpu", "cuda"]}, lambda value: value in ("cpu", "cuda"))
ADAPTER = predicate("data_juicer", "data_juicer", {"enum": ["data_juicer"]}, lambda value: value == "data_juicer")

RESOURCES_MAPPING = replace(
    predicate("a mapping", {"cpus": 1}, {"$ref": "#/$defs/resources"}, lambda value: isinstance(value, Mapping)),
    text="[resources](#resources)",
)

OPERATOR = Record(
    "Operator",
    "Keys of every operator. `rate`, `returns`, `retries`, `on_error`, `on_death`, `on_failure`, `setup_timeout`,"
    " `max_setup_failures` and `env` are as in a [stage](#stage); `call_timeout` is its `timeout`.",
    (
        Field("num_proc", WORKERS, "Number of workers: -1 or auto, n, or [minimum, maximum].", nullable=True),
        Field("num_cpus", CPUS, "CPUs of one worker.", nullable=True),
        Field("num_gpus", GPUS, "GPUs of one worker: a share of one (0.25), or several (2).", nullable=True),
        Field(
            "memory",
            MEMORY,
            "Memory of one worker, such as 1500MB: GPU memory if it runs on a GPU, else host memory.",
            nullable=True,
        ),
        Field("cpu_required", CPUS, "Deprecated name of num_cpus.", nullable=True),
        Field("gpu_required", GPUS, "Deprecated name of num_gpus.", nullable=True),
        Field("mem_required", MEMORY, "Deprecated name of memory.", nullable=True),
        Field(
            "batch_size",
            whole(1, 10_000_000, "a whole number from 1 on", example=16),
            "Rows per call.",
            nullable=True,
        ),
        Field("accelerator", ACCELERATOR, "Whether it runs on a GPU.", nullable=True),
        Field("workers", WORKERS, "Number of workers, as in a pipeline file.", nullable=True),
        Field(
            "resources",
            RESOURCES_MAPPING,
            "Resources of one worker, as in a pipeline file.",
            nullable=True,
        ),
        Field("adapter", ADAPTER, "Library that runs the operator instead of Dovetail.", nullable=True),
    ),
)


def value_or_default(top: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key; the default if it is missing or null."""
    given = top.get(key)
    return default if given is None else given
