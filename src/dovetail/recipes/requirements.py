"""Worker requirements of an operator (num_proc, num_cpus, num_gpus, memory) as Resources, workers and stage settings.

`memory` is GPU memory for an operator on a GPU, else host memory. `num_proc` is the number of workers: -1 (auto), n, or
[minimum, maximum].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import WrongValue, file_problem, setting_problem, unknown_key_problem
from dovetail.documents.yaml_writer import YAML, YamlRenderer
from dovetail.errors import ConfigError, Problem, ResourceError, short_repr
from dovetail.pipeline.error_policy import RETRY_FILE_EXAMPLE, retry_from_data
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_fields import stage_problems
from dovetail.recipes.file_keys import DEPRECATED_NAMES, FAILURE_KEYS, OPERATOR, STAGE_FIELDS
from dovetail.resources.resources import RESOURCES, Resources

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.pipeline.stage import Workers

AMOUNT_KEYS = ("num_cpus", "num_gpus", "memory")
STAGE_SETTINGS = ("rate", "returns", *FAILURE_KEYS, "env", "runtime_env")
"""Settings of a stage, as in a pipeline file."""
RECIPE_RESOURCE_NAMES = {"cpus": "num_cpus", "gpus": "num_gpus", "gpu_memory": "memory", "memory": "memory"}
"""Keys of a recipe for settings of Resources."""
RESOURCE_RENDERER = YamlRenderer(RECIPE_RESOURCE_NAMES)


@dataclass(frozen=True, slots=True)
class OperatorRequirements:
    """Requirements as written in the recipe. The planner decides the rest."""

    cuda: bool = False
    cuda_required: bool = False
    """Whether the file requests a GPU. Otherwise the GPU is the operator's preference: without GPUs it runs on CPUs."""
    resources: Resources = field(default_factory=Resources)
    workers: Workers | None = None
    """None: not given."""
    batch_size: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the stage, by their names there."""

    def without_gpu(self) -> OperatorRequirements:
        """The requirements on a machine without GPUs: GPU memory becomes host memory."""
        asked = self.resources
        host = Resources(cpus=asked.cpus, memory=asked.gpu_memory)
        return replace(self, cuda=False, resources=host)


def parse_requirements(
    given: Mapping[str, Any],
    *,
    cuda_by_default: bool,
    report: Callable[[str, Problem], None],
    defaults: Mapping[str, Any] | None = None,
) -> OperatorRequirements:
    """Requirements from the parameters of an operator; problems are reported with their key. `defaults`: settings that
    the recipe has for all operators."""
    valid = _valid_values(given, report)
    amounts = _amounts(given, valid, report)
    given = valid
    accelerator = given.get("accelerator")
    wants = accelerator == "cuda" or bool(amounts.get("num_gpus"))
    cuda = wants or (accelerator is None and cuda_by_default and amounts.get("num_gpus") != 0)
    if accelerator == "cpu" and amounts.get("num_gpus"):
        message = f"num_gpus: {short_repr(amounts['num_gpus'])} with accelerator: cpu would reserve an unused GPU"
        report("num_gpus", Problem("DT412", message, fixes=("accelerator: cuda", "num_gpus: 0")))
    if accelerator == "cuda" and amounts.get("num_gpus") == 0 and amounts.get("memory") is None:
        message = "num_gpus: 0 with accelerator: cuda: it would have no GPU to run on"
        report("num_gpus", Problem("DT412", message, fixes=("num_gpus: 1", "accelerator: cpu")))
    resources = _resources(amounts, cuda, report)
    if given.get("resources") is not None:
        resources = _explicit_resources(given, report) or resources
        cuda = bool(resources.gpus or resources.gpu_memory)
        wants = cuda
    settings = dict(defaults or {})
    if given.get("skip_op_error") is not None:
        settings.pop("on_error", None)
    settings |= stage_settings(given, report)
    return OperatorRequirements(cuda, wants, resources, _workers(given, report), given.get("batch_size"), settings)


def _valid_values(given: Mapping[str, Any], report: Callable[[str, Problem], None]) -> dict[str, Any]:
    """The values without those that do not have the type of their key, which are reported."""
    found = dict(given)
    for key, mistake in OPERATOR.value_mistakes(given):
        if isinstance(mistake, WrongValue) and mistake.reason:
            problem = YAML.problem(setting_problem(key, mistake, "DT412"))
        else:
            problem = replace(file_problem(replace(mistake, path=(key,))), code="DT412")
        report(key, problem)
        found.pop(key, None)
    return found


def _amounts(
    given: Mapping[str, Any], valid: Mapping[str, Any], report: Callable[[str, Problem], None]
) -> dict[str, Any]:
    """num_cpus, num_gpus and memory, also under their deprecated names; invalid values are left out."""
    found: dict[str, Any] = {}
    key_of: dict[str, str] = {}
    for key, value in given.items():
        name = DEPRECATED_NAMES.get(key, key)
        if name not in AMOUNT_KEYS or value is None:
            continue
        before = key_of.setdefault(name, key)
        if before != key:
            message = f"{before} and {key} set the same value"
            report(key, Problem("DT412", message, fixes=(f"remove {before if key == name else key}",)))
        elif key in valid:
            found[name] = value
    return found


def _resources(amounts: Mapping[str, Any], cuda: bool, report: Callable[[str, Problem], None]) -> Resources:
    cpus = amounts.get("num_cpus", 1)
    memory = amounts.get("memory")
    gpus = amounts.get("num_gpus")
    try:
        if not cuda:
            return Resources(cpus=cpus, memory=memory)
        if gpus is None and memory is None:
            gpus = 1  # a whole card by default; the plan's notes explain how to share it
        return Resources(cpus=cpus, gpus=gpus or 0, gpu_memory=memory)
    except ResourceError as error:
        for problem in error.problems:
            setting = problem.subject.name if problem.subject is not None else ""
            report(RECIPE_RESOURCE_NAMES.get(setting, "num_gpus"), RESOURCE_RENDERER.problem(problem))
        return Resources()


def _explicit_resources(given: Mapping[str, Any], report: Callable[[str, Problem], None]) -> Resources | None:
    """`resources: {cpus: 2, gpu_memory: 4GB}`, as in a pipeline file."""
    value = given["resources"]
    both = [key for key in given if DEPRECATED_NAMES.get(key, key) in AMOUNT_KEYS and given[key] is not None]
    if both:
        message = f"resources and {', '.join(both)} set the same value"
        report("resources", Problem("DT412", message, fixes=(f"remove {both[0]}", "remove resources")))
    unknown = [key for key in value if key not in RESOURCES.by_name]
    for key in unknown:
        report("resources", unknown_key_problem(str(key), RESOURCES.names))
    try:
        return Resources(**{key: value[key] for key in value if key not in unknown})
    except ResourceError as error:
        for problem in error.problems:
            report("resources", problem)
        return None


def _workers(given: Mapping[str, Any], report: Callable[[str, Problem], None]) -> Workers | None:
    keys = [key for key in ("num_proc", "workers") if given.get(key) is not None]
    if len(keys) == 2:
        report("workers", Problem("DT412", "num_proc and workers set the same value", fixes=("remove num_proc",)))
    for key in keys:
        match given[key]:
            case "auto" | -1:
                return "auto"
            case [low, high]:
                return (low, high)
            case count:
                return int(count)
    return None


def stage_settings(given: Mapping[str, Any], report: Callable[[str, Problem], None]) -> dict[str, Any]:
    """Other settings of the stage by their names there, checked as those of a pipeline file."""
    found = {STAGE_FIELDS.get(key, key): given[key] for key in STAGE_SETTINGS if given.get(key) is not None}
    if given.get("on_error") is not None and given.get("skip_op_error") is not None:
        fixes = ("remove skip_op_error", "remove on_error")
        report("on_error", Problem("DT412", "skip_op_error and on_error set the same value", fixes=fixes))
    for key in ("on_error", "on_death"):
        if isinstance(found.get(key), Mapping):
            try:
                found[key] = retry_from_data(found[key])
            except ConfigError as error:
                del found[key]
                for problem in error.problems:
                    report(key, replace(problem, fixes=(RETRY_FILE_EXAMPLE,)))
    recipe_keys = {field: key for key, field in STAGE_FIELDS.items()}
    renderer = YamlRenderer(recipe_keys)
    for field_name, problem in stage_problems(Stage("operator", print, **found)) if found else ():
        key = recipe_keys.get(field_name, field_name)
        report(key, renderer.problem(problem))
        found.pop(field_name, None)
    return found
