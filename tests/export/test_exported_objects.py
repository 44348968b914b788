"""Exported files: they follow the schemas, are the same every time, and say what a deployment needs."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dovetail.export.autoscaling import adapter_rules, work_query
from dovetail.export.compose import compose_files
from dovetail.export.deploy_file import make_deployment
from dovetail.export.exported_files import marked
from dovetail.export.kubernetes import kubernetes_files
from export.deployments import check_composition, check_object, deployment, documents, pod_specs

if TYPE_CHECKING:
    from pathlib import Path

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"autoscaler": "hpa", "pools": {"cpu": {"workers": [1, 4]}}},
    {"autoscaler": "none", "ray": None, "pools": {"cpu": {"workers": [1, 4]}, "gpu": {"gpus": 2}}},
    {"prometheus": "http://prometheus:9090"},
    {"ray": {"keep_cluster": True, "pipelines": {"a": {"file": "a.yaml"}, "b": {"file": "b c.yaml"}}}},
    {"shared_folder": None, "ray": None, "files": "s3://bucket/jobs", "namespace": None},
)


def objects(**changes: object) -> list[dict[str, Any]]:
    files = kubernetes_files(deployment(**changes))
    return [
        one
        for name, text in files.items()
        if name.endswith(".yaml") and name != "prometheus-adapter.yaml"
        for one in documents(text)
    ]


def find_object(kind: str, name: str, **changes: object) -> dict[str, Any]:
    [one] = [one for one in objects(**changes) if (one["kind"], one.get("metadata", {}).get("name")) == (kind, name)]
    return one


def composition(**changes: object) -> dict[str, Any]:
    [data] = documents(compose_files(deployment(**changes))["compose.yaml"])
    return data


@pytest.mark.parametrize("changes", VARIANTS)
def test_all_files_follow_their_schemas(changes: dict[str, Any]) -> None:
    check_composition(composition(**changes))
    for one in objects(**changes):
        check_object(one)


def test_the_schemas_find_mistakes() -> None:
    wrong = composition()
    wrong["services"]["redis"]["comand"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        check_composition(wrong)
    for kind, name, path in (
        ("ScaledObject", "train-worker-gpu", ("spec", "minReplicas")),
        ("RayJob", "train-pages", ("spec", "entryPoint")),
        ("Deployment", "train-worker-gpu", ("spec", "replica")),
    ):
        one = find_object(kind, name)
        one[path[0]][path[1]] = 1
        with pytest.raises(Exception, match=path[1]):
            check_object(one)
    job = find_object("RayJob", "train-pages")
    next(pod_specs(job))["containers"][0]["imag"] = "x"
    with pytest.raises(Exception, match="imag"):
        check_object(job)


POOLS = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9]{0,7}", fullmatch=True),
    st.fixed_dictionaries(
        {},
        optional={
            "cpus": st.sampled_from([0.5, 1, 2.25, 96]),
            "memory": st.sampled_from(["512MB", "7GB", "1.5GB", "1TB"]),
            "gpus": st.integers(0, 8),
            "slots": st.sampled_from(["auto", 1, 64]),
            "workers": st.sampled_from([1, 5, [0, 1], [3, 9], [2, 2]]),
            "job_timeout": st.sampled_from([90, "1h30m"]),
            "grace": st.sampled_from([0.5, "10m"]),
            "node_labels": st.dictionaries(st.sampled_from(["card", "zone"]), st.sampled_from(["a", "1", "yes"])),
        },
    ),
    min_size=1,
    max_size=3,
)


@given(POOLS, st.sampled_from(["keda", "none"]), st.booleans())
def test_any_pools_make_valid_files_that_are_the_same_every_time(
    pools: dict[str, Any], autoscaler: str, has_prometheus: bool
) -> None:
    for name, pool in pools.items():
        pool["queues"] = [f"queue-{name}"]
        if autoscaler == "none" and isinstance(pool.get("workers"), list):
            pool["workers"] = [1, 3]
    data = {"apps": ["tasks"], "pools": pools, "autoscaler": autoscaler}
    if has_prometheus:
        data["prometheus"] = "https://prometheus.example.org/x?y=1"
    first, second = make_deployment(data), make_deployment(data)
    assert kubernetes_files(first) == kubernetes_files(second)
    assert compose_files(first) == compose_files(second)
    [composed] = documents(compose_files(first)["compose.yaml"])
    check_composition(composed)
    for name, text in kubernetes_files(first).items():
        for one in documents(text) if name.endswith(".yaml") else ():
            check_object(one)


def test_no_autoscaler_reads_cpu_or_memory() -> None:
    for changes in VARIANTS:
        files = kubernetes_files(deployment(**changes))
        text = files.get("autoscaling.yaml", "")
        assert not re.search(r"type: (Resource|cpu|memory)|averageUtilization", text)


def test_pools_scale_by_the_work_in_their_own_queues() -> None:
    trigger = find_object("ScaledObject", "train-worker-gpu")["spec"]["triggers"][0]
    assert trigger["metadata"]["url"] == "http://train-metrics.ml.svc:8000/work/gpu"
    assert (trigger["metadata"]["targetValue"], trigger["authenticationRef"]) == ("2", {"name": "train-metrics"})
    both = {"cpu": {"queues": ["a", "b.c"], "workers": [1, 2]}, "gpu": {"queues": ["b.c"], "workers": 1}}
    spec = find_object("ScaledObject", "train-worker-cpu", prometheus="http://p:9090", pools=both)["spec"]
    assert spec["triggers"][0]["metadata"]["query"] == work_query(("a",))
    assert 'queue=~"b[.]c"' in work_query(("b.c",))
    scaler = find_object("HorizontalPodAutoscaler", "train-worker-cpu", **VARIANTS[1])
    metric = scaler["spec"]["metrics"][0]["external"]["metric"]
    assert metric["selector"]["matchExpressions"][0]["values"] == ["default"]
    assert adapter_rules()["rules"]["external"][0]["name"]["as"] == metric["name"]


def test_a_deployment_that_is_scaled_has_no_replicas() -> None:
    assert "replicas" not in find_object("Deployment", "train-worker-cpu")["spec"]
    assert (
        find_object("Deployment", "train-worker-cpu", autoscaler="none", pools={"cpu": {"workers": 3}})["spec"][
            "replicas"
        ]
        == 3
    )


def test_a_container_is_given_as_long_as_its_drain_takes() -> None:
    pod = find_object("Deployment", "train-worker-gpu")["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    grace = int(arguments[arguments.index("--grace") + 1].removesuffix("s"))
    assert (grace, pod["terminationGracePeriodSeconds"]) == (3600, 3630)
    assert composition()["services"]["worker-gpu"]["stop_grace_period"] == "3630s"


def test_probes_and_budgets_are_there() -> None:
    for name in ("cpu", "gpu"):
        worker = find_object("Deployment", f"train-worker-{name}")
        [container] = worker["spec"]["template"]["spec"]["containers"]
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        budget = find_object("PodDisruptionBudget", f"train-worker-{name}")["spec"]
        assert budget == {"maxUnavailable": 1, "selector": worker["spec"]["selector"]}


def test_requests_are_the_capacity_of_the_pool() -> None:
    [container] = find_object("Deployment", "train-worker-gpu")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "8", "memory": "32Gi"}
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"}
    resources = composition()["services"]["worker-gpu"]["deploy"]["resources"]
    assert resources["limits"] == {"cpus": "8", "memory": "32768m"}
    assert resources["reservations"]["devices"] == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_secrets_are_only_referred_to() -> None:
    for one in objects():
        for spec in pod_specs(one):
            for container in spec["containers"]:
                for variable in container.get("env", ()):
                    if "TOKEN" in variable["name"] or "PASS" in variable["name"] or "AUTH" in variable["name"]:
                        assert variable["valueFrom"]["secretKeyRef"]["name"] == "train-secrets"
    for service in composition()["services"].values():
        for name, value in service["environment"].items():
            if name in ("DOVETAIL_TOKEN", "REDISCLI_AUTH"):
                assert value.startswith("${")


def test_replicas_share_neither_an_id_nor_a_card_nor_a_port() -> None:
    services = composition()["services"]
    for name, service in services.items():
        assert "container_name" not in service
        assert not {"WORKER_ID", "GPU_DEVICE"} & set(service["environment"])
        assert ("ports" in service) == (name == "metrics")
    assert services["worker-gpu"]["deploy"]["replicas"] == 1
    assert services["metrics"]["ports"] == ["127.0.0.1:8000:8000"]


def test_redis_keeps_every_job() -> None:
    for command in (
        composition()["services"]["redis"]["command"],
        find_object("StatefulSet", "train-redis")["spec"]["template"]["spec"]["containers"][0]["args"],
    ):
        words = dict(zip(command[1::2], command[2::2], strict=True))
        assert (words["--appendonly"], words["--appendfsync"], words["--maxmemory-policy"]) == (
            "yes",
            "always",
            "noeviction",
        )
        assert words["--maxmemory"] == "1536mb"
    [claim] = find_object("StatefulSet", "train-redis")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"


def test_pipelines_on_ray_are_jobs_with_a_cluster_of_their_own_or_one_for_all() -> None:
    spec = find_object("RayJob", "train-pages")["spec"]
    assert spec["entrypoint"] == "dovetail run /app/pipeline.yaml --engine ray:auto --run-dir /shared/runs/pages"
    assert spec["shutdownAfterJobFinishes"]
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    kept = VARIANTS[4]
    assert find_object("RayJob", "train-b", **kept)["spec"] == {
        "entrypoint": "dovetail run '/app/b c.yaml' --engine ray:auto --run-dir /shared/runs/b",
        "clusterSelector": {"ray.io/cluster": "train-ray"},
    }
    assert find_object("RayCluster", "train-ray", **kept)["spec"]["headGroupSpec"]["rayStartParams"] == {
        "num-cpus": "0"
    }


def test_kustomize_builds_all_objects_in_the_namespace(tmp_path: Path) -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    for name, text in kubernetes_files(deployment()).items():
        (tmp_path / name).write_text(marked("kubernetes", text), encoding="utf-8")
    done = subprocess.run([program, "kustomize", str(tmp_path)], capture_output=True, text=True, check=True)
    built = documents(done.stdout)
    assert len(built) == 11
    assert {one["metadata"]["namespace"] for one in built} == {"ml"}


def test_each_image_that_is_not_given_has_a_dockerfile() -> None:
    assert {"Dockerfile", "Dockerfile.gpu", "Dockerfile.ray"} <= set(kubernetes_files(deployment()))
    files = compose_files(deployment(), context="..", folder="deploy")
    assert "COPY requirements.txt" in files["Dockerfile"]
    build = yaml.safe_load(files["compose.yaml"])["services"]["worker-gpu"]["build"]
    assert build == {"context": "..", "dockerfile": "deploy/Dockerfile.gpu"}
    assert "Dockerfile.gpu" not in compose_files(make_deployment({"apps": ["tasks"]}))
