"""Public API of Dovetail, imported lazily: `import dovetail as dt`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.actors.actor_plan import ActorPlan
    from dovetail.actors.actor_system import ActorSystem
    from dovetail.actors.call_router import CallFuture, CallFutures
    from dovetail.actors.instance_directory import idempotent
    from dovetail.actors.live_system import LiveSystem
    from dovetail.actors.role import Affinity, Health, Pool, Restart, Role, Scale, Together
    from dovetail.backfill.failed_rows import RowError, RowFailed
    from dovetail.backfill.result import BackfillResult
    from dovetail.backfill.table import Table, table
    from dovetail.backfill.udf import Udf, udf
    from dovetail.data.request_queue import ItemFailed, RequestFuture, ServiceClosed, TooManyRequests
    from dovetail.data.sinks import SinkSpec, sink
    from dovetail.data.sources import SourceSpec, source
    from dovetail.engines.simulated.world import (
        Lognormal,
        LoseNode,
        ScriptedEvent,
        SlowDown,
        World,
        world_from_pipeline,
    )
    from dovetail.errors import (
        ActorLostError,
        CallCycleError,
        CallTimeoutError,
        ClusterError,
        ConfigError,
        DovetailError,
        EngineError,
        InfeasibleError,
        JobError,
        JobRefusedError,
        JobTimeoutError,
        LedgerError,
        PipelineError,
        Problem,
        ResourceError,
        RunError,
    )
    from dovetail.jobs.batch import Batch
    from dovetail.jobs.job import JobState, Retries
    from dovetail.jobs.job_function import JobFunction, job
    from dovetail.jobs.job_handle import Job, JobPage, JobSchedule
    from dovetail.jobs.queue import NoWorkerWarning, Queue
    from dovetail.jobs.simulated.simulation import simulate_jobs
    from dovetail.jobs.simulated.simulation_report import JobSimulation
    from dovetail.jobs.workers.current_job import CurrentJob, JobPreempted, current_job
    from dovetail.jobs.workers.worker import Worker
    from dovetail.pipeline.error_policy import Retry
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.pipeline.stage import Stage
    from dovetail.pipeline.stage_function import Each, each
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.cluster import Cluster, Gpu, Node
    from dovetail.resources.ledger import Ledger
    from dovetail.resources.resources import Resources
    from dovetail.resources.seat import CardShare, Seat
    from dovetail.resources.shape import Shape, ShapeKind
    from dovetail.runtime.run import run
    from dovetail.runtime.run_handle import Run
    from dovetail.runtime.service import Service, serve
    from dovetail.runtime.simulation import Simulation, simulate
    from dovetail.runtime.stage_profiles import load_profiles
    from dovetail.scheduling.diagnose.feasibility import WorkerRequest, find_fit_problems
    from dovetail.scheduling.fragmentation import Workload
    from dovetail.scheduling.improvements import Improvement, find_improvements
    from dovetail.scheduling.placement import FragmentationScore, Placer
    from dovetail.scheduling.plan import Plan
    from dovetail.scheduling.planner import plan
    from dovetail.scheduling.stage_rates import Profile

__version__ = "0.1.0"

_MODULE_BY_NAME = {
    "ActorLostError": "errors",
    "ActorPlan": "actors.actor_plan",
    "ActorSystem": "actors.actor_system",
    "Affinity": "actors.role",
    "BackfillResult": "backfill.result",
    "Batch": "jobs.batch",
    "CallCycleError": "errors",
    "CallFuture": "actors.call_router",
    "CallFutures": "actors.call_router",
    "CallTimeoutError": "errors",
    "CardShare": "resources.seat",
    "Cluster": "resources.cluster",
    "ClusterError": "errors",
    "ConfigError": "errors",
    "CurrentJob": "jobs.workers.current_job",
    "DovetailError": "errors",
    "Each": "pipeline.stage_function",
    "EngineError": "errors",
    "FragmentationScore": "scheduling.placement",
    "Gpu": "resources.cluster",
    "Health": "actors.role",
    "Improvement": "scheduling.improvements",
    "InfeasibleError": "errors",
    "ItemFailed": "data.request_queue",
    "Job": "jobs.job_handle",
    "JobError": "errors",
    "JobFunction": "jobs.job_function",
    "JobPage": "jobs.job_handle",
    "JobPreempted": "jobs.workers.current_job",
    "JobRefusedError": "errors",
    "JobSchedule": "jobs.job_handle",
    "JobSimulation": "jobs.simulated.simulation_report",
    "JobState": "jobs.job",
    "JobTimeoutError": "errors",
    "Ledger": "resources.ledger",
    "LedgerError": "errors",
    "LiveSystem": "actors.live_system",
    "Lognormal": "engines.simulated.world",
    "LoseNode": "engines.simulated.world",
    "NoWorkerWarning": "jobs.queue",
    "Node": "resources.cluster",
    "Pipeline": "pipeline.pipeline",
    "PipelineError": "errors",
    "Placer": "scheduling.placement",
    "Plan": "scheduling.plan",
    "Pool": "actors.role",
    "Problem": "errors",
    "Profile": "scheduling.stage_rates",
    "Queue": "jobs.queue",
    "Recipe": "recipes.recipe",
    "RequestFuture": "data.request_queue",
    "ResourceError": "errors",
    "Resources": "resources.resources",
    "Restart": "actors.role",
    "Retries": "jobs.job",
    "Retry": "pipeline.error_policy",
    "Role": "actors.role",
    "RowError": "backfill.failed_rows",
    "RowFailed": "backfill.failed_rows",
    "Run": "runtime.run_handle",
    "RunError": "errors",
    "Scale": "actors.role",
    "ScriptedEvent": "engines.simulated.world",
    "Seat": "resources.seat",
    "Service": "runtime.service",
    "ServiceClosed": "data.request_queue",
    "Shape": "resources.shape",
    "ShapeKind": "resources.shape",
    "Simulation": "runtime.simulation",
    "SinkSpec": "data.sinks",
    "SlowDown": "engines.simulated.world",
    "SourceSpec": "data.sources",
    "Stage": "pipeline.stage",
    "Table": "backfill.table",
    "Together": "actors.role",
    "TooManyRequests": "data.request_queue",
    "Udf": "backfill.udf",
    "Worker": "jobs.workers.worker",
    "WorkerRequest": "scheduling.diagnose.feasibility",
    "Workload": "scheduling.fragmentation",
    "World": "engines.simulated.world",
    "current_job": "jobs.workers.current_job",
    "each": "pipeline.stage_function",
    "find_fit_problems": "scheduling.diagnose.feasibility",
    "find_improvements": "scheduling.improvements",
    "idempotent": "actors.instance_directory",
    "job": "jobs.job_function",
    "load_profiles": "runtime.stage_profiles",
    "plan": "scheduling.planner",
    "run": "runtime.run",
    "serve": "runtime.service",
    "simulate": "runtime.simulation",
    "simulate_jobs": "jobs.simulated.simulation",
    "sink": "data.sinks",
    "source": "data.sources",
    "table": "backfill.table",
    "udf": "backfill.udf",
    "world_from_pipeline": "engines.simulated.world",
}

__all__ = [
    "ActorLostError",
    "ActorPlan",
    "ActorSystem",
    "Affinity",
    "BackfillResult",
    "Batch",
    "CallCycleError",
    "CallFuture",
    "CallFutures",
    "CallTimeoutError",
    "CardShare",
    "Cluster",
    "ClusterError",
    "ConfigError",
    "CurrentJob",
    "DovetailError",
    "Each",
    "EngineError",
    "FragmentationScore",
    "Gpu",
    "Health",
    "Improvement",
    "InfeasibleError",
    "ItemFailed",
    "Job",
    "JobError",
    "JobFunction",
    "JobPage",
    "JobPreempted",
    "JobRefusedError",
    "JobSchedule",
    "JobSimulation",
    "JobState",
    "JobTimeoutError",
    "Ledger",
    "LedgerError",
    "LiveSystem",
    "Lognormal",
    "LoseNode",
    "NoWorkerWarning",
    "Node",
    "Pipeline",
    "PipelineError",
    "Placer",
    "Plan",
    "Pool",
    "Problem",
    "Profile",
    "Queue",
    "Recipe",
    "RequestFuture",
    "ResourceError",
    "Resources",
    "Restart",
    "Retries",
    "Retry",
    "Role",
    "RowError",
    "RowFailed",
    "Run",
    "RunError",
    "Scale",
    "ScriptedEvent",
    "Seat",
    "Service",
    "ServiceClosed",
    "Shape",
    "ShapeKind",
    "Simulation",
    "SinkSpec",
    "SlowDown",
    "SourceSpec",
    "Stage",
    "Table",
    "Together",
    "TooManyRequests",
    "Udf",
    "Worker",
    "WorkerRequest",
    "Workload",
    "World",
    "current_job",
    "each",
    "find_fit_problems",
    "find_improvements",
    "idempotent",
    "job",
    "load_profiles",
    "plan",
    "run",
    "serve",
    "simulate",
    "simulate_jobs",
    "sink",
    "source",
    "table",
    "udf",
    "world_from_pipeline",
]


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that `import dovetail` is fast."""
    home = _MODULE_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"dovetail.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
