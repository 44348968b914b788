"""Autoscalers of worker pools: ScaledObjects of KEDA, or HorizontalPodAutoscalers. Pure.

The signal is the number of jobs that are ready or run in the queues that only this pool serves. It is that of the whole
store, so it is read once, and not added up over workers. It exists while there are no workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.documents.yaml_writer import Commented
from dovetail.export.containers import STATUS_PORT
from dovetail.export.deployment import HPA, KEDA
from dovetail.export.kubernetes_objects import labelled

if TYPE_CHECKING:
    from dovetail.export.deployment import Deployment, WorkerPool

POLLING_S = 15
IDLE_S = 300
"""Time without work before the last worker is removed, and before a pool shrinks."""
FAILURES = 3
METRIC = "dovetail_queue_work"
WORK_STATES = 'state=~"ready|leased"'


def scaling_objects(deployment: Deployment) -> list[dict[str, Any]]:
    pools = {name: pool for name, pool in deployment.pools.items() if pool.scales}
    if deployment.autoscaler == HPA:
        return [_autoscaler(deployment, name, pool) for name, pool in pools.items()]
    if deployment.autoscaler != KEDA or not pools:
        return []
    secret = [] if deployment.prometheus else [_authentication(deployment)]
    return [*secret, *(_scaled_object(deployment, name, pool) for name, pool in pools.items())]


def work_query(queues: tuple[str, ...]) -> str:
    """Jobs that are ready or run in these queues; all workers report the same counts, so the largest one is taken."""
    one_of = "|".join(queue.replace(".", "[.]") for queue in queues)
    return f'sum(max by (queue, state) (dovetail_jobs{{queue=~"{one_of}", {WORK_STATES}}})) or vector(0)'


def _scaled_object(deployment: Deployment, name: str, pool: WorkerPool) -> dict[str, Any]:
    called, queues = f"{deployment.name}-worker-{name}", deployment.own_queues(name)
    target = str(pool.target_jobs)
    if deployment.prometheus is not None:
        metadata = {"serverAddress": deployment.prometheus, "query": work_query(queues), "threshold": target}
        trigger: dict[str, Any] = {"type": "prometheus", "metadata": metadata}
    else:
        url = f"http://{_metrics_host(deployment)}:{STATUS_PORT}/work/{','.join(queues)}"
        metadata = {"url": url, "valueLocation": "jobs", "targetValue": target, "authMode": "bearer"}
        reference = {"name": f"{deployment.name}-metrics"}
        trigger = {"type": "metrics-api", "metadata": metadata, "authenticationRef": reference}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": called, "labels": labelled(deployment, f"worker-{name}")},
        "spec": {
            "scaleTargetRef": {"name": called},
            "pollingInterval": POLLING_S,
            "cooldownPeriod": IDLE_S,
            "minReplicaCount": pool.least,
            "maxReplicaCount": pool.most,
            "fallback": Commented(
                {"failureThreshold": FAILURES, "replicas": max(1, pool.least)}, "while the metrics cannot be read"
            ),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behaviour()}},
            "triggers": [Commented(trigger, f"{target} jobs that wait or run per worker, of {', '.join(queues)}")],
        },
    }


def _metrics_host(deployment: Deployment) -> str:
    """KEDA runs in a namespace of its own."""
    space = deployment.namespace or "default"
    return f"{deployment.name}-metrics.{space}.svc"


def _authentication(deployment: Deployment) -> dict[str, Any]:
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "TriggerAuthentication",
        "metadata": {"name": f"{deployment.name}-metrics", "labels": labelled(deployment, "metrics")},
        "spec": {"secretTargetRef": [{"parameter": "token", "name": f"{deployment.name}-secrets", "key": "token"}]},
    }


def _autoscaler(deployment: Deployment, name: str, pool: WorkerPool) -> dict[str, Any]:
    called, queues = f"{deployment.name}-worker-{name}", deployment.own_queues(name)
    selector = {"matchExpressions": [{"key": "queue", "operator": "In", "values": list(queues)}]}
    target = {"type": "AverageValue", "averageValue": str(pool.target_jobs)}
    external = {"metric": {"name": METRIC, "selector": selector}, "target": target}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": called, "labels": labelled(deployment, f"worker-{name}")},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": called},
            "minReplicas": pool.least,
            "maxReplicas": pool.most,
            "metrics": [
                Commented(
                    {"type": "External", "external": external}, f"{pool.target_jobs} jobs that wait or run per worker"
                )
            ],
            "behavior": _behaviour(),
        },
    }


def _behaviour() -> dict[str, Any]:
    """Workers are added at once, and removed slowly: each one that is removed has to drain."""
    return {
        "scaleUp": {"stabilizationWindowSeconds": 0},
        "scaleDown": {
            "stabilizationWindowSeconds": IDLE_S,
            "policies": [{"type": "Percent", "value": 25, "periodSeconds": 60}],
        },
    }


def adapter_rules() -> dict[str, Any]:
    """Values of the chart prometheus-adapter: the signal per queue as an external metric."""
    query = f"max by (queue, state) (<<.Series>>{{<<.LabelMatchers>>,{WORK_STATES}}})"
    rule = {
        "seriesQuery": "dovetail_jobs",
        "resources": {"namespaced": False},
        "name": {"as": METRIC},
        "metricsQuery": f"sum by (queue) ({query})",
    }
    return {"rules": {"external": [rule]}}
