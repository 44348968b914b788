"""The commands of the containers of exported files, run as processes: Redis, metrics and workers together."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from command import run_command, run_process
from dovetail.export.compose import compose_files
from dovetail.export.kubernetes import kubernetes_files
from dovetail.export.ray_objects import run_command as ray_run_command
from export.deployments import deployment, documents, pod_specs
from redis_aids import server_program
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

SECRETS = {"DOVETAIL_TOKEN": "0123abcd", "REDIS_PASSWORD": "4567ef"}
TASKS = """
import os
import time
from pathlib import Path
import dovetail as dt

@dt.job(isolation="thread")
def prepare(job_data):
    return job_data["row"] + 1

@dt.job(queue="gpu")
def infer(job_data):
    return {"value": job_data["row"] * 2, "cards": os.environ.get("CUDA_VISIBLE_DEVICES")}

@dt.job
def train(name):
    Path(name).touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return name
"""
LISTS = {"ai:cpu:queue": "tasks:prepare", "ai:gpu:queue": "tasks:infer"}
"""The lists of the guide for AI workers, to which its `route_job` pushes."""
CARD = "GPU-5c0ffee5"
WITH_CARD = f"""
import sys
from dovetail.machine import gpus
from scripted_nvml import ScriptedCard, ScriptedNvml
gpus.DRIVER_PATHS = ("proc",)
sys.modules["pynvml"] = ScriptedNvml(ScriptedCard("{CARD}"))
"""
"""sitecustomize.py of a machine with one card."""
POOLS = {
    "cpu": {"cpus": 1, "memory": "1GB", "queues": ["default"], "workers": [1, 4], "slots": 2, "ingest": LISTS},
    "gpu": {"cpus": 1, "memory": "1GB", "queues": ["gpu"], "gpus": 1, "workers": [0, 4], "job_timeout": "1h"},
}


class Composition:
    """Services of an exported composition, as processes of this machine instead of containers."""

    def __init__(self, folder: Path, data: dict[str, Any], entry_point: list[str]) -> None:
        self.folder, self._services, self._entry_point = folder, data["services"], entry_point
        self.socket = folder / "redis.sock"
        (folder / "tasks.py").write_text(TASKS)
        (folder / "gpu").mkdir()
        (folder / "gpu" / "sitecustomize.py").write_text(WITH_CARD)
        self.variables = {**self.environment("metrics"), "PYTHONPATH": ":".join(path for path in sys.path if path)}
        self._stack = ExitStack()

    def _local(self, text: str) -> str:
        """Value in a container, replaced by its equivalent on this machine: secrets, paths and addresses."""
        text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: SECRETS[found[1]], text)
        text = re.sub(r"^redis://:(\w+)@redis:6379/0$", rf"unix://{self.socket}?db=0&password=\1", text)
        places = {"/data": str(self.folder), "/shared/jobs": str(self.folder / "files")}
        return places.get(text, text).replace("0.0.0.0", "127.0.0.1")

    def environment(self, name: str) -> dict[str, str]:
        found = {key: self._local(value) for key, value in self._services[name]["environment"].items()}
        return {**found, "DOVETAIL_HOME": str(self.folder / "home" / name)}  # a container has a home of its own

    def command(self, name: str) -> list[str]:
        words = [self._local(word) for word in self._services[name]["command"]]
        if name == "redis":
            return [*words, "--port", "0", "--unixsocket", str(self.socket)]
        assert words[-2:] == ["--port", "8000"]
        return [sys.executable, "-m", *self._entry_point[-1:], *words[:-1], "0"]

    def health(self, name: str, port: int = 0) -> int:
        """The exit code of the health check."""
        kind, *words = self._services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        if words[0] == "redis-cli":
            words[1:1] = ["-s", str(self.socket)]
        else:
            words = [sys.executable, *(word.replace(":8000/", f":{port}/") for word in words[1:])]
        return subprocess.run(
            words, env=os.environ | self.environment(name), capture_output=True, check=False
        ).returncode

    @contextmanager
    def running(self, name: str, **variables: str) -> Iterator[Service]:
        log = self.folder / f"{name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(name),
                cwd=self.folder,
                env=os.environ | self.variables | self.environment(name) | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield Service(process, log)
        finally:
            process.kill()
            process.wait()

    def path_with_card(self) -> str:
        return f"{self.folder / 'gpu'}:{self.variables['PYTHONPATH']}"

    def client(self) -> AbstractContextManager[Any]:
        """A program that knows only Redis."""
        import redis

        client: AbstractContextManager[Any] = redis.Redis(
            unix_socket_path=str(self.socket), password=SECRETS["REDIS_PASSWORD"], protocol=2
        )
        return client

    def queue(self) -> dt.Queue:
        return dt.Queue(self.variables["DOVETAIL_QUEUE"], if_no_worker="ignore")

    def jobs(self, *words: str) -> str:
        done = run_command("jobs", *words, cwd=self.folder, **self.variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, job: str) -> str:
        return str(json.loads(self.jobs("show", job, "--json"))["state"])


class Service:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def port(self) -> int:
        until(lambda: "http://127.0.0.1:" in self.log or self.process.poll() is not None, "it listens")
        assert self.process.poll() is None, self.log
        return int(self.log.partition("http://127.0.0.1:")[2].partition("/")[0])

    def get(self, path: str, token: str = SECRETS["DOVETAIL_TOKEN"]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def data(self, path: str) -> dict[str, Any]:
        status, text = self.get(path)
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def ends(self, number: int) -> int:
        """Its exit code after this signal."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def composition(tmp_path: Path) -> Composition:
    if server_program() is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    folder = Path(os.path.relpath(tmp_path)) if len(str(tmp_path)) > 80 else tmp_path  # of a socket: 107 characters
    files = compose_files(deployment(pools=POOLS, redis={"fsync": "everysec"}, apps=["tasks"], ray=None))
    for name in ("Dockerfile", "Dockerfile.gpu"):
        assert files[name].endswith('ENTRYPOINT ["tini", "--", "dovetail"]\n')
    [data] = documents(files["compose.yaml"])
    return Composition(folder.absolute(), data, ["tini", "--", "dovetail"])


@pytest.mark.processes
@pytest.mark.time_limit(300)
def test_the_composition_runs_jobs_and_keeps_them(composition: Composition) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(composition.running("redis"))
        until(lambda: composition.health("redis") == 0, "Redis is healthy")
        metrics = stack.enter_context(composition.running("metrics"))
        assert composition.health("metrics", metrics.port) == 0
        # the signal that starts the first worker exists before any worker and any job
        assert metrics.data("/work/gpu") == {"queues": ["gpu"], "jobs": 0, "ready": 0, "leased": 0}
        assert metrics.get("/work/gpu", token="")[0] == 401
        inferences = [composition.jobs("submit", "tasks:infer", f"job_data={{row: {row}}}").strip() for row in range(3)]
        until(lambda: metrics.data("/work/gpu,other")["jobs"] == 3, "the work is seen")
        assert metrics.data("/work/default")["jobs"] == 0

        # a GPU worker that has no GPU refuses to start, instead of running its jobs on CPUs
        refused = stack.enter_context(composition.running("worker-gpu", CUDA_VISIBLE_DEVICES=""))
        assert refused.process.wait(PATIENCE_S) == 2
        assert "error[DT622]" in refused.log
        cpu = stack.enter_context(composition.running("worker-cpu"))
        gpu = stack.enter_context(composition.running("worker-gpu", PYTHONPATH=composition.path_with_card()))
        for name, worker in (("worker-cpu", cpu), ("worker-gpu", gpu)):
            until(lambda: worker.get("/readyz", token="")[0] == 200, f"{name} is ready")  # noqa: B023
            assert worker.get("/healthz", token="")[0] == 200
            assert composition.health(name, worker.port) == 0
            assert worker.get("/metrics", token="")[0] == 401
        for job in inferences:
            until(lambda: composition.state(job) == "succeeded", "the inference is done")  # noqa: B023
        assert json.loads(composition.jobs("submit", "tasks:prepare", "job_data={row: 1}", "--wait")) == 2
        with composition.client() as client:
            client.lpush("ai:gpu:queue", json.dumps({"row": 21, "requires_gpu": True, "priority": "high"}))
            client.lpush("ai:cpu:queue", json.dumps({"row": 22}))
        done = 'dovetail_jobs{queue="%s",state="succeeded"} %d\n'
        for queue, count in (("gpu", 4), ("default", 2)):
            until(lambda: done % (queue, count) in metrics.get("/metrics")[1], "what was pushed is done")  # noqa: B023
        with composition.queue() as opened:
            values = [job.result() for job in opened.list(queue="gpu")]
        assert {value["value"] for value in values} == {0, 2, 4, 42}
        assert {value["cards"] for value in values} == {CARD}
        assert gpu.data("/workers/status")["gpu_enabled"]
        # sums over both workers: two slots of --slots, and two of a card with 16 GB or more
        idle = {"workers": 2, "active_jobs": 0, "available_slots": 4}
        until(lambda: idle.items() <= metrics.data("/workers/status").items(), "both workers are seen, and idle")
        scraped = metrics.get("/metrics")[1]
        assert "dovetail_worker_active_jobs" not in scraped, "sums over workers would be counted twice"
        assert 'dovetail_workers{queue="gpu"} 1' in scraped
        assert "dovetail_worker_active_jobs{" in cpu.get("/metrics")[1]

        # SIGTERM drains a worker: it finishes its job and takes no other
        job = composition.jobs("submit", "tasks:train", "name=first").strip()
        until((composition.folder / "first").exists, "the job runs")
        cpu.process.send_signal(signal.SIGTERM)
        until(lambda: cpu.get("/readyz", token="")[0] == 503, "it drains")
        assert cpu.get("/healthz", token="")[0] == 200
        until(lambda: metrics.data("/work/default")["leased"] == 1, "the job counts as work while the worker drains")
        (composition.folder / "go").touch()
        assert cpu.process.wait(PATIENCE_S) == 0, cpu.log
        assert composition.state(job) == "succeeded"

        # a Redis that is killed has every job after its restart, and nothing has to be restarted with it
        waiting = composition.jobs("submit", "tasks:prepare", "job_data={row: 5}").strip()
        redis.process.kill()
        redis.process.wait()
        until(lambda: composition.health("metrics", metrics.port) != 0, "the metrics are not ready")
        stack.enter_context(composition.running("redis"))
        until(lambda: composition.health("redis") == 0, "Redis is healthy again")
        assert (composition.state(job), composition.state(waiting)) == ("succeeded", "ready")
        until(lambda: metrics.get("/readyz", token="")[0] == 200, "the metrics are ready again")
        until(lambda: gpu.get("/readyz", token="")[0] == 200, "the worker is ready again")
        assert gpu.ends(signal.SIGTERM) == 0, gpu.log
        assert metrics.ends(signal.SIGTERM) == 0, metrics.log
        for service in (cpu, gpu, metrics):
            assert "Traceback" not in service.log


def test_kubernetes_runs_the_same_commands_with_the_same_variables() -> None:
    changes = {"pools": POOLS, "apps": ["tasks"], "ray": None}
    [composed] = documents(compose_files(deployment(**changes))["compose.yaml"])
    services = composed["services"]
    found = {}
    for name, text in kubernetes_files(deployment(**changes)).items():
        for one in documents(text) if name.endswith(".yaml") else ():
            for spec in pod_specs(one):
                [container] = spec["containers"]
                component = one["metadata"]["labels"]["app.kubernetes.io/component"]
                found[component] = container
    assert set(found) == set(services)
    for name, container in found.items():
        service = services[name]
        words = [re.sub(r"\$\{(\w+):\?[^}]*\}", r"$(\1)", word) for word in service["command"]]
        assert container["args"] == words
        plain = {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
        given = {key: value for key, value in service["environment"].items() if not value.startswith("${")}
        queue = plain.pop("DOVETAIL_QUEUE", ""), given.pop("DOVETAIL_QUEUE", "")
        assert queue == ("", "") or queue[0] == "redis://:$(REDIS_PASSWORD)@train-redis:6379/0"
        assert plain == given
    assert found["redis"]["readinessProbe"]["exec"]["command"] == services["redis"]["healthcheck"]["test"][1:]


def test_the_command_of_a_ray_job_runs_the_pipeline(ray_address: str, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        "import dovetail as dt\n\n@dt.each\ndef double(row):\n    return {'x': 2 * row['x']}\n"
    )
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    (tmp_path / "pipeline.yaml").write_text(
        f"source: {tmp_path}/in.jsonl\nsink: {tmp_path}/out.jsonl\nstages:\n  - {{name: double, run: 'steps:double'}}\n"
    )
    words = ray_run_command(deployment(), "pages")
    places = {"/app/pipeline.yaml": f"{tmp_path}/pipeline.yaml", "/shared/runs/pages": f"{tmp_path}/run"}
    done = run_process(*(places.get(word, word) for word in words[1:]), cwd=tmp_path, RAY_ADDRESS=ray_address)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["x"] for row in rows) == [2, 4]
    assert (tmp_path / "run" / "run.json").exists()
