"""Control socket of a run, with real sockets and processes on both sides."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.errors import ConfigError
from dovetail.machine.processes import is_stopped, process_start_time
from dovetail.observe import control_socket as control_module
from dovetail.observe.control_socket import SOCKET_NAME, ControlSocket, send_request
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def make_run(folder: Path, status: str = "running", pid: int | None = None, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pid = pid or os.getpid()
    header = {
        "status": status,
        "pid": pid,
        "pid_started": process_start_time(pid) or 1.0,
        "host": socket.gethostname(),
        "heartbeat": time.time(),
        "progress": {"finished": 7},
        "more": {"asked": {"file": "p.yaml"}},
    }
    (folder / "run.json").write_text(json.dumps(header | more))
    (folder / "commit.log").write_text('{"begin":1}\n')
    return folder


@contextmanager
def opened(folder: Path) -> Iterator[list[tuple[str, str]]]:
    handled: list[tuple[str, str]] = []
    server = ControlSocket(folder, lambda do, reason: handled.append((do, reason)))
    server.start()
    try:
        yield handled
    finally:
        server.close()


def raw(folder: Path, data: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours:
        ours.settimeout(30)
        ours.connect(str(folder / SOCKET_NAME))
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        found: dict[str, Any] = json.loads(ours.makefile().readline())
        return found


def test_a_run_is_drained_and_cancelled_through_its_socket(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with opened(folder) as handled:
        assert send_request(folder, "drain", "enough") == {"ok": True, "do": "drain", "run": "run", "pid": os.getpid()}
        assert send_request(folder, "cancel")["ok"]
        assert send_request(folder, "ping")["pid"] == os.getpid()
        assert send_request(folder, "stats")["stats"] == {"finished": 7}
        assert handled == [("drain", "enough"), ("cancel", "asked to cancel")]
    assert not (folder / SOCKET_NAME).exists()
    assert sorted(path.name for path in folder.iterdir()) == ["commit.log", "run.json"]


def test_a_kind_of_run_answers_requests_of_its_own(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    large = "x" * 3_000_000
    requests = {"status": lambda _: {"status": large}, "scale": lambda asked: {"workers": asked["workers"] + 1}}
    server = ControlSocket(folder, lambda *_: None, requests)
    server.start()
    try:
        assert send_request(folder, "status")["status"] == large
        assert send_request(folder, "scale", workers=2)["workers"] == 3
        with pytest.raises(ConfigError, match="refused: 'workers'"):
            send_request(folder, "scale")
        assert "did you mean 'scale'" in raw(folder, b'{"do": "scal"}\n')["error"]
    finally:
        server.close()


def test_it_is_private(tmp_path: Path) -> None:
    with opened(make_run(tmp_path)):
        found = (tmp_path / SOCKET_NAME).stat().st_mode
        assert stat.S_ISSOCK(found)
        assert stat.S_IMODE(found) == 0o600


def test_a_long_and_strange_path_works(tmp_path: Path) -> None:
    folder = make_run(tmp_path / ("länge " * 20) / ("x" * 100) / "run\nof mine")
    assert len(os.fsencode(folder / SOCKET_NAME)) > 107
    with opened(folder) as handled:
        send_request(folder, "drain", "far away")
    assert handled == [("drain", "far away")]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"{torn\n",
        b"[]\n",
        b'"drain"\n',
        b'{"do": "explode"}\n',
        b'{"do": null}\n',
        b'{"do": ["drain"]}\n',
        b'{"do": "drain", "reason": 5}\n',
        b"\xff\xfe\n",
        b"[" * 50_000 + b"\n",
        b"x" * 70_000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_nonsense_is_answered_and_the_socket_stays_open(tmp_path: Path, data: bytes) -> None:
    make_run(tmp_path)
    with opened(tmp_path) as handled:
        answer = raw(tmp_path, data)
        assert answer["ok"] is False
        assert answer["error"]
        assert handled == []
        assert send_request(tmp_path, "ping")["ok"]


def test_a_near_word_is_suggested(tmp_path: Path) -> None:
    make_run(tmp_path)
    with opened(tmp_path):
        assert "did you mean 'drain'?" in raw(tmp_path, b'{"do": "drian"}\n')["error"]
        with pytest.raises(ConfigError, match="refused: unknown command 'nap'"):
            send_request(tmp_path, "nap")


def test_a_silent_or_closed_connection_does_not_block_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "EXCHANGE_TIMEOUT_S", 0.2)
    make_run(tmp_path)
    with opened(tmp_path) as handled:
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        silent.connect(str(tmp_path / SOCKET_NAME))
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hasty:
                hasty.connect(str(tmp_path / SOCKET_NAME))
        assert send_request(tmp_path, "drain")["ok"]
        silent.close()
    assert handled == [("drain", "asked to drain")]


def test_what_the_run_makes_of_it_may_fail(tmp_path: Path) -> None:
    make_run(tmp_path)

    def fail(*_: str) -> None:
        raise RuntimeError("too late")

    server = ControlSocket(tmp_path, fail)
    server.start()
    try:
        with pytest.raises(ConfigError, match="refused: too late"):
            send_request(tmp_path, "drain")
        assert send_request(tmp_path, "ping")["ok"]
    finally:
        server.close()


def test_many_clients_at_once_are_all_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        control_module, "CONNECT_TIMEOUT_S", 60.0
    )  # the backlog is shorter: clients connect again until then
    make_run(tmp_path)
    answers: list[Any] = []
    with opened(tmp_path) as handled:
        threads = [threading.Thread(target=lambda: answers.append(send_request(tmp_path, "drain"))) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(answers), len(handled)) == (40, 40)


def test_what_a_dead_driver_left_is_replaced(tmp_path: Path) -> None:
    make_run(tmp_path)
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(tmp_path / SOCKET_NAME))
    left.close()
    with opened(tmp_path) as handled:
        send_request(tmp_path, "drain")
    assert len(handled) == 1
    (tmp_path / SOCKET_NAME).write_text("not even a socket")
    with opened(tmp_path) as handled:
        send_request(tmp_path, "drain")
    assert len(handled) == 1


def test_a_socket_that_another_living_driver_holds_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "EXCHANGE_TIMEOUT_S", 60.0)  # time to answer on a busy machine
    make_run(tmp_path)
    script = (
        "import sys; from pathlib import Path; from dovetail.observe.control_socket import ControlSocket\n"
        "server = ControlSocket(Path(sys.argv[1]), lambda *_: None); server.start()\n"
        "print('open', flush=True); sys.stdin.read()\n"
        "server.close()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        server = ControlSocket(tmp_path, lambda *_: None)
        with pytest.raises(ConfigError, match=f"process {other.pid} is executing this run") as found:
            server.start()
        assert found.value.codes == ("DT362",)
        server.close()
        assert (tmp_path / SOCKET_NAME).exists()
        assert send_request(tmp_path, "ping")["pid"] == other.pid
        other.communicate()
    assert other.returncode == 0
    assert not (tmp_path / SOCKET_NAME).exists()


def test_a_folder_without_sockets_is_no_reason_to_fail(tmp_path: Path) -> None:
    server = ControlSocket(tmp_path / "gone", lambda *_: None)
    server.start()
    assert "No such file" in server.unavailable_reason
    server.close()
    server.close()


@pytest.mark.parametrize("status", ["finished", "failed", "drained", "cancelled"])
def test_a_command_to_an_ended_run_reports_that_it_has_ended(tmp_path: Path, status: str) -> None:
    folder = make_run(tmp_path / "my run", status)
    with pytest.raises(ConfigError, match=f"run my run is not running: it is {status}") as found:
        send_request(folder, "drain")
    (problem,) = found.value.problems
    assert problem.code == "DT361"
    assert (f"dovetail run --resume '{folder}'" in problem.fix_texts) is (status != "finished")
    assert f"dovetail status '{folder}'" in problem.fix_texts


def test_a_run_whose_process_is_gone_is_lost(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    make_run(tmp_path, pid=int(gone.stdout))
    with pytest.raises(ConfigError, match="lost: its process exited") as found:
        send_request(tmp_path, "cancel")
    assert "dovetail run --resume" in str(found.value)


def test_a_run_elsewhere_is_named_with_its_machine(tmp_path: Path) -> None:
    make_run(tmp_path, host="far-away")
    with pytest.raises(ConfigError, match="runs on far-away") as found:
        send_request(tmp_path, "drain")
    assert found.value.codes == ("DT362",)


def test_a_run_without_a_socket_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "CONNECT_TIMEOUT_S", 0.05)
    make_run(tmp_path)
    with pytest.raises(ConfigError, match="does not answer: No such file") as found:
        send_request(tmp_path, "drain")
    assert f"kill -INT {os.getpid()}" in found.value.problems[0].fix_texts[0]


def test_a_request_whose_client_gave_up_is_not_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    with opened(tmp_path) as handled:
        expired = {"do": "drain", "expires": time.monotonic() - 1}
        assert raw(tmp_path, json.dumps(expired).encode() + b"\n") == {
            "ok": False,
            "error": "the request has expired",
            "code": "DT362",
        }
        assert handled == []
        send_request(tmp_path, "drain", "why")
        assert handled == [("drain", "why")]
    monkeypatch.setattr(control_module, "ANSWER_TIMEOUT_S", 0.05)  # it has expired when it is sent
    with opened(tmp_path) as handled, pytest.raises(ConfigError, match="expired"):
        send_request(tmp_path, "drain")
    assert handled == []


def test_a_stopped_driver_is_reported_and_drains_only_when_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "CONNECT_TIMEOUT_S", 0.0)
    with subprocess.Popen(["sleep", "60"]) as driver:
        try:
            make_run(tmp_path, pid=driver.pid)
            driver.send_signal(signal.SIGSTOP)
            until(lambda: is_stopped(driver.pid), "it is stopped")
            with pytest.raises(
                ConfigError, match=f"was not asked to drain: its process {driver.pid} is stopped"
            ) as found:
                send_request(tmp_path, "drain")
            assert found.value.problems[0].fix_texts == (f"kill -CONT {driver.pid}; dovetail drain {tmp_path}",)
        finally:
            driver.kill()
