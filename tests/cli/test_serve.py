"""`dovetail serve`: a pipeline over HTTP."""

from __future__ import annotations

import http.client
import json
import signal
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from cli.jobs import CLUSTER, CommandFolder
from dovetail.cli.http_server import ServiceServer
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@dt.each
def answer(item: Any) -> Any:
    match item:
        case {"fail": text}:
            raise ValueError(text)
        case {"hold": path}:
            until(Path(path).exists, "the test continues")
        case {"drop": _}:
            return None
        case {"give": "nan"}:
            return float("nan")
        case {"give": "date"}:
            return date(2026, 1, 2)
        case {"give": "object"}:
            return object()
    return {"got": item}


@dt.each
def twice(item: Any) -> Iterator[Any]:
    yield item
    yield item


class Client:
    """Sends requests to a server."""

    def __init__(self, server: ServiceServer) -> None:
        self.port = int(server.server_address[1])

    def send(self, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def post(self, item: Any, path: str = "/", **headers: str) -> tuple[int, Any]:
        return self.send("POST", path, json.dumps(item), **headers)


@contextmanager
def serving(
    *stages: dt.Stage, token: str = "", max_body_bytes: int = 1000, **settings: Any
) -> Iterator[tuple[Client, ServiceServer]]:
    pipeline = dt.Pipeline(list(stages) or [dt.Stage("answer", answer, retries=0)])
    with (
        dt.serve(pipeline, cluster="1x(2cpu, 2GB)", max_wait="1ms", **settings) as service,
        ServiceServer("127.0.0.1", 0, token=token, max_body_bytes=max_body_bytes) as server,
    ):
        server.service = service
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Client(server), server
        finally:
            server.shutdown()
            thread.join()


def test_items_and_lists_are_answered() -> None:
    with serving() as (client, _):
        assert client.post({"n": 1}) == (200, {"result": {"got": {"n": 1}}})
        assert client.post("text") == (200, {"result": {"got": "text"}})
        assert client.post({"drop": 1}) == (200, {"result": None})
        assert client.post({"give": "date"}) == (200, {"result": "2026-01-02"})
        assert client.post([1, [2], None]) == (
            200,
            {"results": [{"got": 1}, {"got": [2]}, {"got": None}], "errors": []},
        )
        assert client.post([]) == (200, {"results": [], "errors": []})
        assert client.post({"n": 1}, "/?many=1") == (200, {"results": [{"got": {"n": 1}}]})


def test_an_item_that_fails_is_an_error_of_its_own() -> None:
    with serving() as (client, _):
        status, reply = client.post({"fail": "too bad"})
        assert (status, reply["error"]["code"], reply["error"]["stage"]) == (422, "DT378", "answer")
        assert "ValueError: too bad" in reply["error"]["message"]
        status, reply = client.post([1, {"fail": "too bad"}, 2])
        assert (status, reply["results"]) == (422, [{"got": 1}, None, {"got": 2}])
        assert [(error["index"], error["code"]) for error in reply["errors"]] == [(1, "DT378")]
        for item in ({"give": "nan"}, {"give": "object"}):
            status, reply = client.post(item)
            assert status == 500
            assert "the result cannot be written as JSON" in reply["error"]["message"]


def test_several_results_of_an_item_need_many() -> None:
    with serving(dt.Stage("twice", twice)) as (client, _):
        status, reply = client.post(1)
        assert (status, reply["error"]["code"]) == (422, "DT379")
        assert client.post(1, "/?many") == (200, {"results": [1, 1]})
        assert client.post([1, 2], "/?many=true") == (200, {"results": [[1, 1], [2, 2]], "errors": []})


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/", "not JSON", {}, 400),
        ("POST", "/", "[" * 900, {}, 400),
        ("POST", "/", "", {}, 400),
        ("POST", "/", '"' + "x" * 1000 + '"', {}, 413),
        ("POST", "/", None, {"Content-Length": "-1"}, 411),
        ("POST", "/", None, {"Transfer-Encoding": "chunked"}, 411),
        ("POST", "/", "1", {"Origin": "https://example.org"}, 403),
        ("POST", "/items", "1", {}, 404),
        ("POST", "/health", "1", {}, 405),
        ("GET", "/", None, {}, 405),
        ("DELETE", "/", None, {}, 501),
    ],
)
def test_a_bad_request_is_an_error_with_a_code(
    method: str, path: str, body: str | None, headers: dict[str, str], status: int
) -> None:
    with serving() as (client, _):
        found, reply = client.send(method, path, body, **headers)
        assert (found, reply["error"]["code"]) == (status, "DT308")
        assert reply["error"]["message"]
        assert client.post(1)[0] == 200


def test_a_token_is_required_for_requests_and_not_for_the_health() -> None:
    with serving(token="secret") as (client, _):
        assert client.post(1)[0] == 401
        assert client.post(1, Authorization="Bearer wrong")[0] == 401
        assert client.post(1, Authorization="Bearer secret", Origin="https://example.org")[0] == 200
        until(lambda: client.send("GET", "/health")[0] == 200, "it is ready")


def test_too_many_requests_and_late_ones_are_refused(tmp_path: Path) -> None:
    with serving(max_pending=1, deadline="100ms") as (client, server):
        service = server.service
        assert service is not None
        late = service.submit({"hold": str(tmp_path / "one")}, deadline="60s")
        status, reply = client.post(1)
        assert (status, reply["error"]["code"]) == (503, "DT377")
        (tmp_path / "one").touch()
        late.result(PATIENCE_S)
        status, reply = client.post({"hold": str(tmp_path / "two")})
        (tmp_path / "two").touch()
        assert status == 504
        assert "no result within 0.1 s" in reply["error"]["message"]


def test_a_service_that_has_not_started_or_is_closed_is_unavailable() -> None:
    with serving() as (client, server):
        service, server.service = server.service, None
        assert client.post(1)[0] == 503
        assert client.send("GET", "/health") == (503, {"status": "starting"})
        server.service = service
        assert service is not None
        service.drain()
        status, reply = client.post(1)
        assert (status, reply["error"]["code"]) == (503, "DT376")


def test_one_connection_carries_several_requests() -> None:
    with serving() as (client, _):
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=PATIENCE_S)
        for number in range(3):
            connection.request("POST", "/", str(number))
            assert json.loads(connection.getresponse().read()) == {"result": {"got": number}}
        connection.close()


# --- the command


STEPS = """
import time
from pathlib import Path
import dovetail as dt

@dt.each
def echo(item):
    Path("called").touch()
    while item == "hold" and not Path("go").exists():
        time.sleep(0.01)
    return {"got": item}
"""


def test_a_process_serves_until_it_receives_a_signal(tmp_path: Path) -> None:
    place = CommandFolder(tmp_path / "jobs")
    (place.folder / "served.py").write_text(STEPS)
    (place.folder / "s.yaml").write_text("name: echo\nstages:\n  - {name: echo, run: 'served:echo'}\n")
    with place.started("serve", "s.yaml", "--port", "0", *CLUSTER) as started:
        until(lambda: "serving http://127.0.0.1:" in started.err or started.process.poll() is not None, "it serves")
        assert started.process.poll() is None, started.err
        port = int(started.err.partition("http://127.0.0.1:")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("POST", "/", '["a", "b"]')
        assert json.loads(connection.getresponse().read())["results"] == [{"got": "a"}, {"got": "b"}]
        (place.folder / "called").unlink()
        connection.request("POST", "/", '"hold"')
        until((place.folder / "called").exists, "the request is in a worker")
        started.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping after 1 pending request" in started.err, "it stops")
        (place.folder / "go").touch()
        assert json.loads(connection.getresponse().read()) == {"result": {"got": "hold"}}
        connection.close()
        assert started.ended() == 0, started.err
        assert started.err.endswith("stopped\n")
        assert started.out == ""
        assert "Traceback" not in started.err
    (listed,) = json.loads(place.run("ls", "--kind", "service", "--json").stdout)
    assert (listed["name"], listed["status"], listed["items"]) == ("echo", "finished", 3)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("p.yaml", "--host", "0.0.0.0"), 2, "fix  export DOVETAIL_TOKEN="),
        (("p.yaml", "--max-body", "10"), 2, "DT375"),
        (("p.yaml", "--max-wait", "soon"), 2, "--max-wait"),
        (("p.yaml", "--token", "a b"), 2, "the token has spaces"),
        (("p.yaml", "--port", "70000"), 2, "--port"),
        (("p.yaml", "--host", "192.0.2.1", "--token", "x"), 2, "cannot listen on 192.0.2.1 port 8000"),
        (("p.yaml", "--set", "stages.double.resources.cpus=64"), 3, "DT115"),
        (("p.yaml", "--set", "stages.double.run=steps:duoble"), 2, "did you mean 'double'?"),
        (("r.yaml",), 2, "only pipelines can be served"),
        (("nothing.yaml",), 2, "DT010"),
    ],
)
def test_what_cannot_be_served_is_one_clear_error(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    place = CommandFolder(tmp_path / "jobs")
    (place.folder / "r.yaml").write_text("process: [text_length_filter]\n")
    done = place.run("serve", *arguments, *CLUSTER)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert place.runs() == []
