"""Where a run executes if its caller does not say: engine and cluster of the environment or the project file."""

from __future__ import annotations

from dovetail.documents.configuration import ConfiguredText, at_origin, configured
from dovetail.engines.ray.address import is_ray_engine
from dovetail.errors import ConfigError
from dovetail.resources.cluster import Cluster

LOCAL_ENGINE = "local"
THIS_MACHINE = "auto"


def configured_engine(engine: str | None, cluster: Cluster | str | None) -> tuple[str, Cluster | str]:
    """Engine and cluster as given, else as configured. On Ray, the cluster is that of Ray: a configured cluster does
    not apply there, and a cluster that was given wins over a configured Ray engine."""
    engine = engine or configured("engine") or LOCAL_ENGINE
    cluster = (configured("cluster") or THIS_MACHINE) if cluster is None else cluster
    if is_ray_engine(engine) and cluster != THIS_MACHINE:
        if isinstance(cluster, ConfiguredText):
            return engine, THIS_MACHINE
        if isinstance(engine, ConfiguredText):
            return LOCAL_ENGINE, cluster
    return engine, cluster


def described_cluster(cluster: Cluster | str) -> Cluster:
    """The cluster of a spec or file; the errors of a configured one name its origin."""
    try:
        return Cluster.of(cluster)
    except ConfigError as error:
        raise at_origin(error, cluster) from None
