"""Dovetail plans, places, runs, rescales and diagnoses heterogeneous ML work. `import dovetail as dt`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.backfill.failures import RowError, RowFailed
    from dovetail.backfill.filled import Filled
    from dovetail.backfill.on_error import Retry
    from dovetail.backfill.table import Table, table
    from dovetail.backfill.udf import Udf, udf
    from dovetail.data.sinks import SinkSpec, sink
    from dovetail.data.sources import SourceSpec, source
    from dovetail.data.tickets import ItemFailed, ServiceClosed, Ticket, TooManyRequests
    from dovetail.errors import (
        ClusterError,
        ConfigError,
        DovetailError,
        EngineError,
        InfeasibleError,
        LedgerError,
        PipelineError,
        Problem,
        ResourceError,
        RunError,
    )
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.pipeline.stage import Each, Stage, each
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.cluster import Cluster, Gpu, Node
    from dovetail.resources.ledger import Ledger
    from dovetail.resources.resources import Resources
    from dovetail.resources.seat import CardShare, Seat
    from dovetail.resources.shape import Shape, ShapeKind
    from dovetail.running.handle import Run
    from dovetail.running.running import run
    from dovetail.running.serving import Service, serve
    from dovetail.running.simulating import Simulation, simulate
    from dovetail.scheduling.fragmentation import Workload
    from dovetail.scheduling.placement import Placer
    from dovetail.scheduling.plan import Plan
    from dovetail.scheduling.planner import plan
    from dovetail.scheduling.rates import Profile
    from dovetail.scheduling.scores import BestFit, FragmentationScore, Spread

__version__ = "0.1.0"

_HOMES = {
    "BestFit": "scheduling.scores",
    "CardShare": "resources.seat",
    "Cluster": "resources.cluster",
    "ClusterError": "errors",
    "ConfigError": "errors",
    "DovetailError": "errors",
    "Each": "pipeline.stage",
    "EngineError": "errors",
    "Filled": "backfill.filled",
    "FragmentationScore": "scheduling.scores",
    "Gpu": "resources.cluster",
    "InfeasibleError": "errors",
    "ItemFailed": "data.tickets",
    "Ledger": "resources.ledger",
    "LedgerError": "errors",
    "Node": "resources.cluster",
    "Pipeline": "pipeline.pipeline",
    "PipelineError": "errors",
    "Placer": "scheduling.placement",
    "Plan": "scheduling.plan",
    "Problem": "errors",
    "Profile": "scheduling.rates",
    "Recipe": "recipes.recipe",
    "ResourceError": "errors",
    "Resources": "resources.resources",
    "Retry": "backfill.on_error",
    "RowError": "backfill.failures",
    "RowFailed": "backfill.failures",
    "Run": "running.handle",
    "RunError": "errors",
    "Seat": "resources.seat",
    "Service": "running.serving",
    "ServiceClosed": "data.tickets",
    "Shape": "resources.shape",
    "ShapeKind": "resources.shape",
    "Simulation": "running.simulating",
    "SinkSpec": "data.sinks",
    "SourceSpec": "data.sources",
    "Spread": "scheduling.scores",
    "Stage": "pipeline.stage",
    "Table": "backfill.table",
    "Ticket": "data.tickets",
    "TooManyRequests": "data.tickets",
    "Udf": "backfill.udf",
    "Workload": "scheduling.fragmentation",
    "each": "pipeline.stage",
    "plan": "scheduling.planner",
    "run": "running.running",
    "serve": "running.serving",
    "simulate": "running.simulating",
    "sink": "data.sinks",
    "source": "data.sources",
    "table": "backfill.table",
    "udf": "backfill.udf",
}

__all__ = [
    "BestFit",
    "CardShare",
    "Cluster",
    "ClusterError",
    "ConfigError",
    "DovetailError",
    "Each",
    "EngineError",
    "Filled",
    "FragmentationScore",
    "Gpu",
    "InfeasibleError",
    "ItemFailed",
    "Ledger",
    "LedgerError",
    "Node",
    "Pipeline",
    "PipelineError",
    "Placer",
    "Plan",
    "Problem",
    "Profile",
    "Recipe",
    "ResourceError",
    "Resources",
    "Retry",
    "RowError",
    "RowFailed",
    "Run",
    "RunError",
    "Seat",
    "Service",
    "ServiceClosed",
    "Shape",
    "ShapeKind",
    "Simulation",
    "SinkSpec",
    "SourceSpec",
    "Spread",
    "Stage",
    "Table",
    "Ticket",
    "TooManyRequests",
    "Udf",
    "Workload",
    "each",
    "plan",
    "run",
    "serve",
    "simulate",
    "sink",
    "source",
    "table",
    "udf",
]


def __getattr__(name: str) -> object:
    """Names are imported when they are first used, so that `import dovetail` costs next to nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"dovetail.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
