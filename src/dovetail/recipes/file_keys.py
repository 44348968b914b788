"""Keys of a recipe file, at the top level and per operator, with their value checks.

Data-Juicer's keys with Data-Juicer's meaning, and a few of Dovetail. Keys of Data-Juicer without effect in Dovetail are
accepted with a note; any other key is an error with a suggestion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.pipeline.source_sink import (
    COUNT,
    ERROR_LIMIT,
    FLAG,
    MODES,
    PATH,
    PATHS,
    SIZE,
    TEXT,
    TEXTS,
    Keys,
    ValueType,
    choice,
)

POSITIVE_INT = ValueType(
    "a whole number from 1 on",
    "4",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1_000_000,
    {"type": "integer", "minimum": 1, "maximum": 1_000_000},
)
NAME_OR_NAMES = ValueType(
    "a name, or a list of names",
    "text",
    lambda value: TEXT.fits(value) or TEXTS.fits(value),
    {"anyOf": [TEXT.schema, TEXTS.schema]},
)
BYTE_SIZE = ValueType(
    "a size, or a number of bytes",
    "256MB",
    lambda value: SIZE.fits(value) or (COUNT.fits(value) and value != 0),
    {"anyOf": [SIZE.schema, {"type": "integer", "minimum": 0}]},
)
DATASET_CONFIG = ValueType(
    "a mapping with 'configs'",
    "{configs: [{type: local, path: data.jsonl}]}",
    lambda value: dataset_paths(value) is not None,
    {"type": "object", "required": ["configs"]},
)
STDIN_SOURCE = {"run": "dovetail.runtime.run_spec:stdin_rows"}
"""Value of dataset_path for `--source -`."""
INPUT_PATHS = ValueType(
    PATHS.words, PATHS.example, lambda value: PATHS.fits(value) or value == STDIN_SOURCE, PATHS.schema
)
EXECUTOR_TYPES = ("default", "local", "ray", "ray_partitioned")
EXPORT_TYPES = ("jsonl", "json", "parquet", "csv", "lance")
DEFAULT_TRACE_NUM = 10
DEFAULT_MAX_ERRORS = 1000

TOP_LEVEL_KEYS: Keys = {
    "project_name": (TEXT, True, "Name of the recipe."),
    "dataset_path": (INPUT_PATHS, True, "Files, folders or globs; relative paths start at the folder of this file."),
    "dataset": (DATASET_CONFIG, True, "Input in Data-Juicer's other form: {configs: [{type: local, path: ...}]}."),
    "export_path": (
        PATH,
        True,
        "Output file; the extension sets the format: .jsonl, .parquet, .csv, .lance (.gz, .zst).",
    ),
    "export_type": (choice(EXPORT_TYPES), True, "Output format, if the extension does not set it."),
    "export_shard_size": (BYTE_SIZE, True, "Write several files of about this size instead of one."),
    "export_stats": (FLAG, True, "Also write the stats of the remaining rows to <export>_stats.jsonl."),
    "process": (
        ValueType("a list of operators", "[text_length_filter]", bool, {"type": "array"}),
        False,
        "The operators.",
    ),
    "np": (POSITIVE_INT, True, "Workers per operator without num_proc, if auto_op_parallelism is false."),
    "executor_type": (choice(EXECUTOR_TYPES), True, "default: run on this machine; ray: run on a Ray cluster."),
    "ray_address": (TEXT, True, "With executor_type: ray: auto, or HOST:PORT."),
    "auto_op_parallelism": (FLAG, True, "true: Dovetail sets the number of workers; false: only num_proc and np do."),
    "mode": (choice(MODES), True, "How operators share the machine: auto, streaming, sequential or waves."),
    "ordered": (FLAG, True, "Write results in the order of the input; default true."),
    "max_errors": (
        ERROR_LIMIT,
        True,
        f"Fail the run when more rows than this, a number or a percentage, have failed; default {DEFAULT_MAX_ERRORS}.",
    ),
    "text_keys": (NAME_OR_NAMES, True, "Field with the text; the first of a list is used."),
    "image_key": (TEXT, True, "Field with the paths of images."),
    "image_bytes_key": (TEXT, True, "Field with the bytes of images."),
    "open_monitor": (FLAG, True, "Write the resource use of each operator to monitor/."),
    "open_tracer": (FLAG, True, "Write samples of changed and dropped rows per operator to trace/."),
    "trace_num": (POSITIVE_INT, True, f"Samples per operator; default {DEFAULT_TRACE_NUM}."),
    "op_list_to_trace": (TEXTS, True, "Trace only these operators."),
    "skip_op_error": (
        FLAG,
        True,
        "true: record failed rows and continue; false: fail the run at the first failed row.",
    ),
    "keep_stats_in_res_ds": (FLAG, True, "Keep the field __dj__stats__ in the results."),
    "op_fusion": (FLAG, True, "No effect: operators that can share workers always do."),
    "use_checkpoint": (FLAG, True, "Resume an unfinished run automatically."),
    "work_dir": (PATH, True, "Folder for monitor/ and trace/; default: the folder of the results."),
    "custom_operator_paths": (PATHS, True, "Python files or folders with your own operators."),
}
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
    "retries",
    "call_timeout",
    "setup_timeout",
    "env",
)
"""Stage settings that Data-Juicer does not have. `call_timeout` is a stage's `timeout`: operators of Data-Juicer have a
parameter of that name."""
STAGE_FIELDS = {"call_timeout": "timeout"}
"""Key in a recipe -> field of Stage, where they differ."""
OPERATOR_KEYS = frozenset(
    {
        *("num_proc", "num_cpus", "num_gpus", "memory", "batch_size", "accelerator", "runtime_env", "skip_op_error"),
        *DEPRECATED_NAMES,
        *KEY_FIELDS,
        *DOVETAIL_KEYS,
    }
)
ACCELERATORS = ("cpu", "cuda")
ADAPTERS = ("data_juicer",)


def value_or_default(top: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key; the default if it is missing or null."""
    given = top.get(key)
    return default if given is None else given
