"""The files of Kubernetes: Redis, metrics, workers, scaling, and pipelines on Ray. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.documents.yaml_writer import Commented, yaml_document, yaml_documents
from dovetail.export.autoscaling import adapter_rules, scaling_objects
from dovetail.export.containers import (
    PASSWORD_VARIABLE,
    REDIS_CLI_VARIABLE,
    REDIS_PORT,
    STATUS_PORT,
    TOKEN_VARIABLE,
    metrics_arguments,
    queue_url,
    redis_check,
    redis_command,
    worker_arguments,
    worker_variables,
)
from dovetail.export.deployment import HPA, NO_AUTOSCALER
from dovetail.export.dockerfiles import USER_ID, dockerfile, gpu_dockerfile, ray_dockerfile
from dovetail.export.kubernetes_objects import (
    container_resources,
    env_list,
    labelled,
    quantity,
    secret_variable,
    shared_mounts,
    shared_volumes,
)
from dovetail.export.ray_objects import RAY_HEADER, ray_objects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.export.deployment import Deployment, WorkerPool

REDIS_STOP_S = 60
REDIS_CPUS = 1
REDIS_STARTS_PROBED = 360
REDIS_USER_ID = 999
SHARED_MEMORY_BYTES = 2 << 30
METRICS_CPUS, METRICS_MEMORY_BYTES = 0.25, 512 << 20
PROBE_S, STARTS_PROBED = 5, 120
"""A worker that imports large modules may take ten minutes to start."""
SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def kubernetes_files(deployment: Deployment) -> dict[str, str]:
    """Texts by name."""
    objects = {
        "redis.yaml": yaml_documents(redis_objects(deployment), "The queue. Back up its volume: it has all jobs."),
        "metrics.yaml": yaml_documents(metrics_objects(deployment), _METRICS_HEADER),
        "workers.yaml": yaml_documents(
            [one for name, pool in deployment.pools.items() for one in worker_objects(deployment, name, pool)],
            "A Deployment and a PodDisruptionBudget per pool.",
        ),
    }
    scaling = scaling_objects(deployment)
    if scaling:
        objects["autoscaling.yaml"] = yaml_documents(scaling, _SCALING_HEADER)
    applied = list(objects)
    if deployment.ray is not None:
        objects["ray.yaml"] = yaml_documents(ray_objects(deployment, deployment.ray), RAY_HEADER)
    files = {"kustomization.yaml": yaml_document(_kustomization(deployment, applied), _header(deployment)), **objects}
    if scaling and deployment.autoscaler == HPA:
        files["prometheus-adapter.yaml"] = yaml_document(adapter_rules(), _ADAPTER_HEADER)
    files["Dockerfile"] = dockerfile(deployment)
    if deployment.uses_gpus:
        files["Dockerfile.gpu"] = gpu_dockerfile(deployment)
    if deployment.ray is not None and deployment.ray.image is None:
        files["Dockerfile.ray"] = ray_dockerfile(deployment)
    return files


_METRICS_HEADER = """\
One process that serves the metrics of the whole queue, also while there are no workers.
Prometheus scrapes port 8000, path /metrics, with `Authorization: Bearer TOKEN`."""
_SCALING_HEADER = """\
Workers by the jobs that wait or run, never by CPU: a GPU worker that trains uses little of it."""
_ADAPTER_HEADER = """\
Values for the Helm chart prometheus-adapter, which makes the metric of the HorizontalPodAutoscalers:
  helm upgrade --install prometheus-adapter prometheus-community/prometheus-adapter -f prometheus-adapter.yaml"""


def _header(deployment: Deployment) -> str:
    name = deployment.name
    space = f" -n {deployment.namespace}" if deployment.namespace else ""
    builds = [f"  docker build -f DIR/Dockerfile -t {deployment.image_of(0)} . && docker push {deployment.image_of(0)}"]
    if deployment.uses_gpus:
        image = deployment.image_of(1)
        builds.append(f"  docker build -f DIR/Dockerfile.gpu -t {image} . && docker push {image}")
    return "\n".join(
        [
            "DIR is this folder. First the images, from the folder of the code, and the secret:",
            *builds,
            f"  kubectl create secret generic {name}-secrets{space} \\",
            "    --from-literal=token=$(openssl rand -hex 16) --from-literal=redis-password=$(openssl rand -hex 16)",
            "Then:",
            "  kubectl apply -k DIR",
        ]
    )


def _kustomization(deployment: Deployment, files: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    if deployment.namespace is not None:
        found["namespace"] = deployment.namespace
    note = "ray.yaml is not among them: every `kubectl create -f DIR/ray.yaml` is a run"
    return {**found, "resources": Commented(files, note) if deployment.ray is not None else files}


# --- Redis


def redis_objects(deployment: Deployment) -> list[dict[str, Any]]:
    redis, name = deployment.redis, f"{deployment.name}-redis"
    probe = {"exec": {"command": redis_check()}, "periodSeconds": PROBE_S, "timeoutSeconds": 5}
    password = secret_variable(deployment, PASSWORD_VARIABLE, "redis-password")
    container = {
        "name": "redis",
        "image": redis.image,
        "args": redis_command(redis, f"$({PASSWORD_VARIABLE})"),
        "env": [password, secret_variable(deployment, REDIS_CLI_VARIABLE, "redis-password")],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "startupProbe": Commented(
            {**probe, "failureThreshold": REDIS_STARTS_PROBED},
            "half an hour to load its file; no liveness probe: a restart would only begin the loading again",
        ),
        "readinessProbe": probe,
        "resources": container_resources(REDIS_CPUS, redis.memory_bytes),
        "securityContext": SECURITY,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": REDIS_STOP_S,
        "securityContext": _user(REDIS_USER_ID),
        "containers": [container],
    }
    claim = {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": quantity(redis.disk_bytes)}},
        },
    }
    labels = labelled(deployment, "redis")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": labels, "ports": [{"name": "redis", "port": REDIS_PORT, "targetPort": "redis"}]},
    }
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "serviceName": name,
            "replicas": Commented(1, "one: it is the queue, not a cache; workers wait while it restarts"),
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
            "volumeClaimTemplates": [claim],
        },
    }
    return [service, stateful_set]


# --- workers and metrics


def worker_objects(deployment: Deployment, name: str, pool: WorkerPool) -> list[dict[str, Any]]:
    called = f"{deployment.name}-worker-{name}"
    labels = labelled(deployment, f"worker-{name}")
    resources = container_resources(pool.cpus, pool.memory_bytes, pool.gpus)
    mounts, volumes = shared_mounts(deployment), shared_volumes(deployment)
    if pool.gpus:
        mounts = [{"name": "memory", "mountPath": "/dev/shm"}, *mounts]  # noqa: S108 - in the container
        limit = quantity(min(SHARED_MEMORY_BYTES, pool.memory_bytes // 4))
        volumes = [{"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}, *volumes]
    container = {
        **_dovetail_container(deployment, "worker", pool.gpus, worker_arguments(deployment, pool)),
        "env": [
            *_queue_variables(deployment),
            *env_list(worker_variables(deployment, pool)),
        ],
        "startupProbe": {**_probe("/healthz"), "failureThreshold": STARTS_PROBED},
        "resources": Commented(
            resources, "requests equal limits: the worker offers its jobs what the limits of its container allow"
        ),
        **({"volumeMounts": mounts} if mounts else {}),
    }
    drain = f"as long as the drain: {pool.grace_s} s of --grace, then 30 s to stop what is left"
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": Commented(pool.stop_s, drain),
        "securityContext": _user(USER_ID),
        **({"nodeSelector": dict(pool.node_labels)} if pool.node_labels else {}),
        **({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]} if pool.gpus else {}),
        "containers": [container],
        **({"volumes": volumes} if volumes else {}),
    }
    spec: dict[str, Any] = {"selector": {"matchLabels": labels}, "template": _template(labels, pod)}
    if not pool.scales or deployment.autoscaler == NO_AUTOSCALER:
        spec = {"replicas": pool.least, **spec}  # else each `kubectl apply` would undo what the autoscaler has done
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": called, "labels": labels}, "spec": spec},
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": called, "labels": labels},
            "spec": {
                "maxUnavailable": Commented(1, "nodes are drained one worker at a time"),
                "selector": {"matchLabels": labels},
            },
        },
    ]


def metrics_objects(deployment: Deployment) -> list[dict[str, Any]]:
    name, labels = f"{deployment.name}-metrics", labelled(deployment, "metrics")
    container = {
        **_dovetail_container(deployment, "metrics", 0, metrics_arguments()),
        "env": _queue_variables(deployment),
        "resources": container_resources(METRICS_CPUS, METRICS_MEMORY_BYTES),
    }
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": _user(USER_ID),
        "containers": [container],
    }
    port = {"name": "status", "port": STATUS_PORT, "targetPort": "status"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {"selector": labels, "ports": [port]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": _template(labels, pod)},
        },
    ]


def _template(labels: Mapping[str, str], pod: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"labels": labels}, "spec": pod}


def _dovetail_container(deployment: Deployment, name: str, gpus: int, arguments: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "image": deployment.image_of(gpus),
        "args": arguments,
        "ports": [{"name": "status", "containerPort": STATUS_PORT}],
        "livenessProbe": {**_probe("/healthz"), "failureThreshold": 6},
        "readinessProbe": _probe("/readyz"),
        "securityContext": SECURITY,
    }


def _queue_variables(deployment: Deployment) -> list[dict[str, Any]]:
    """The password comes first: $(...) refers to variables above."""
    url = queue_url(f"{deployment.name}-redis", f"$({PASSWORD_VARIABLE})")
    return [
        secret_variable(deployment, PASSWORD_VARIABLE, "redis-password"),
        {"name": "DOVETAIL_QUEUE", "value": url},
        secret_variable(deployment, TOKEN_VARIABLE, "token"),
    ]


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "status"}, "periodSeconds": PROBE_S, "timeoutSeconds": 5}


def _user(number: int) -> dict[str, Any]:
    return {"runAsNonRoot": True, "runAsUser": number, "runAsGroup": number, "fsGroup": number}
