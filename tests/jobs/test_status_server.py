"""The status of a worker over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.jobs.job import JobSpec
from dovetail.jobs.store import StoreUnavailableError, WorkerInfo
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.jobs.workers.status_server import MAX_CONNECTIONS, StatusServer
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

PATHS = ("/workers/status", "/workers", "/queues", "/jobs/a", "/metrics")


class ScriptedWorker:
    """A worker with this status."""

    def __init__(self, **status: object) -> None:
        self.status: dict[str, Any] = {"worker_id": "w", "state": "running", "last_exchange_s": 0.1, "lease_s": 15.0}
        self.status |= {"active_jobs": 1, "available_slots": 3, "gpu_enabled": False} | status

    def get_status(self) -> dict[str, Any]:
        return self.status


class StoreAway(MemoryStore):
    def stats(self) -> Any:
        raise StoreUnavailableError(dt.Problem("DT660", "no connection"))

    def get(self, ids: Any) -> Any:
        return self.stats()


class Client:
    def __init__(self, server: StatusServer) -> None:
        self.port = server.port

    def send(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        status, body = self.send(path, **headers)
        return status, json.loads(body)


@contextmanager
def serving(
    worker: ScriptedWorker | None = None, store: MemoryStore | None = None, token: str = ""
) -> Iterator[Client]:
    with StatusServer(worker or ScriptedWorker(), store or store_with_jobs(), port=0, token=token) as server:
        yield Client(server)


def store_with_jobs() -> MemoryStore:
    store = MemoryStore()
    store.submit([JobSpec("a", "app:train"), JobSpec("b", "app:train", queue="gpu", after=("a",))])
    store.register_worker(WorkerInfo("w", slots=4))
    return store


def test_the_status_has_the_fields_of_the_guide() -> None:
    with serving() as client:
        status, found = client.get("/workers/status")
        assert status == 200
        assert (found["active_jobs"], found["available_slots"], found["gpu_enabled"]) == (1, 3, False)
        assert client.get("/workers/status/?pretty=1")[0] == 200


def test_queues_workers_and_jobs_are_shown() -> None:
    with serving() as client:
        queues = client.get("/queues")[1]["queues"]
        assert [(one["queue"], one["ready"], one["blocked"]) for one in queues] == [("default", 1, 0), ("gpu", 0, 1)]
        assert queues[0]["ready_by_needs"] == {"one slot": 1}
        (worker,) = client.get("/workers")[1]["workers"]
        assert (worker["worker"], worker["slots"], worker["available_slots"]) == ("w", 4, 4)
        job = client.get("/jobs/b")[1]
        assert (job["state"], job["queue"], job["waits_for"]) == ("blocked", "gpu", ["a"])
        assert "payload" not in job
        status, found = client.get("/jobs/none")
        assert (status, found["error"]["code"]) == (404, "DT640")
        assert b'dovetail_jobs{queue="default",state="ready"} 1' in client.send("/metrics")[1]


def test_the_work_of_queues_is_one_number_for_autoscalers() -> None:
    store = store_with_jobs()
    store.submit([JobSpec("c", "app:train", queue="slow"), JobSpec("d", "app:train", queue="slow")])
    store.set_paused("slow", True)
    with serving(store=store) as client:
        assert client.get("/work/default") == (200, {"queues": ["default"], "jobs": 1, "ready": 1, "leased": 0})
        assert client.get("/work/default,gpu,slow")[1]["jobs"] == 1, "neither blocked nor paused jobs need a worker"
        assert client.get("/work/none")[1]["jobs"] == 0
    with serving(store=StoreAway()) as client:
        assert client.get("/work/default")[0] == 503


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"state": "draining"}, "draining"),
        ({"last_exchange_s": None}, "has not reached the store"),
        ({"last_exchange_s": 15.1}, "has not asked for jobs for 15 s"),
        ({"store_available": False}, "cannot be reached"),
    ],
)
def test_a_worker_that_takes_no_jobs_is_alive_and_not_ready(status: dict[str, object], reason: str) -> None:
    with serving(ScriptedWorker(**status)) as client:
        assert client.get("/healthz")[0] == 200
        code, found = client.get("/readyz")
        assert code == 503
        assert reason in found["reason"]


def test_a_store_that_is_away_is_an_error_of_the_pages_that_need_it() -> None:
    with serving(store=StoreAway()) as client:
        assert client.get("/readyz") == (200, {"status": "ready"})
        for path in ("/queues", "/workers", "/jobs/a"):
            status, found = client.get(path)
            assert (status, found["error"]["code"]) == (503, "DT660")
        status, body = client.send("/metrics")
        assert status == 200
        assert b"dovetail_store_reachable 0" in body
        assert client.get("/workers/status")[0] == 200


def test_a_token_is_asked_for_by_all_pages_but_those_of_health() -> None:
    with serving(token="secret") as client:
        assert [client.send(path)[0] for path in PATHS] == [401] * len(PATHS)
        assert client.send("/queues", Authorization="Bearer sECRET")[0] == 401
        assert client.send("/queues", Authorization="Bearer sécret")[0] == 401
        assert [client.send(path, Authorization="Bearer secret")[0] for path in PATHS] == [200] * len(PATHS)
        assert [client.send(path)[0] for path in ("/healthz", "/readyz")] == [200, 200]
        assert client.send("/queues", Authorization="Bearer secret", Host="jobs.example.org")[0] == 200


def test_without_a_token_only_names_of_this_machine_are_answered() -> None:
    with serving() as client:
        for name, status in (("evil.example.org", 403), ("[", 403), ("localhost:8000", 200), ("[::1]:8000", 200)):
            assert client.send("/queues", Host=name)[0] == status
        assert client.send("/healthz", Host="10.0.0.1:8000")[0] == 200, "probes use the address of the pod"


def test_an_address_for_other_machines_needs_a_token() -> None:
    wrong: tuple[dict[str, Any], ...] = ({"host": "0.0.0.0"}, {"host": "0.0.0.0", "token": "a b"})
    for settings in wrong:
        with pytest.raises(dt.ConfigError, match="DT641") as caught:
            StatusServer(ScriptedWorker(), MemoryStore(), port=0, **settings)
        assert caught.value.problems[0].fixes


def test_a_port_that_is_taken_is_replaced_by_the_next_free_one() -> None:
    with serving() as first, StatusServer(ScriptedWorker(), MemoryStore(), port=first.port) as second:
        assert first.port < second.port <= first.port + 99
        assert Client(second).get("/healthz")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/queues", "{}", {}, 405),
        ("DELETE", "/jobs/a", None, {}, 405),
        ("OPTIONS", "/metrics", None, {}, 405),
        ("BREW", "/queues", None, {}, 501),
        ("GET", "/", None, {}, 404),
        ("GET", "/jobs", None, {}, 404),
        ("GET", "/jobs/" + "x" * 5_000, None, {}, 404),
        ("GET", "/jobs/%00%ff", None, {}, 404),
        ("GET", "/" + "x" * 70_000, None, {}, 414),
        ("GET", "/queues", None, {"X-Large": "x" * 70_000}, 431),
        ("GET", "/queues", None, {f"X-{number}": "1" for number in range(200)}, 431),
    ],
)
def test_other_requests_are_refused_as_json_and_the_server_lives(
    method: str, path: str, body: str | None, headers: dict[str, str], status: int
) -> None:
    with serving() as client:
        found, text = client.send(path, method, body, **headers)
        assert found == status
        assert json.loads(text)["error"]["code"] == "DT640"
        assert client.get("/healthz")[0] == 200


def test_head_has_the_headers_of_get_without_the_body() -> None:
    with serving() as client:
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=PATIENCE_S)
        connection.request("HEAD", "/queues")
        head = connection.getresponse()
        assert head.read() == b""
        connection.request("GET", "/queues")
        got = connection.getresponse()
        assert (head.status, head.headers["Content-Type"]) == (200, "application/json")
        assert len(got.read()) == int(got.headers["Content-Length"])
        connection.close()


def test_a_body_is_not_read_as_the_next_request() -> None:
    with serving() as client, socket.create_connection(("127.0.0.1", client.port), PATIENCE_S) as raw:
        raw.sendall(
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\nGET /queues HTTP/1.1\r\nHost:\r\n\r\n"
        )
        answer = b""
        while part := raw.recv(65536):
            answer += part
        assert answer.count(b"HTTP/1.1") == 1
        assert b"Connection: close" in answer


def test_slow_clients_do_not_keep_others_from_an_answer() -> None:
    with serving() as client:
        slow = []
        try:
            for _ in range(MAX_CONNECTIONS + 5):
                connection = socket.create_connection(("127.0.0.1", client.port), PATIENCE_S)
                connection.sendall(b"GET /healthz HT")
                slow.append(connection)
            assert client.get("/healthz")[0] == 200
            assert slow[0].recv(100) == b"", "the oldest connections are closed"
        finally:
            for connection in slow:
                connection.close()
