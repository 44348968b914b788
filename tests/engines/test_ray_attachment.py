"""Engine names of Ray, attaching to a cluster, starting a private Ray, and their errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.engines.ray import attachment, gcs_probe, ray_import, ray_private
from dovetail.engines.ray.address import AddressKind, RayAddress, is_ray_engine, parse_address
from dovetail.engines.ray.attachment import AutoInitSwitch
from dovetail.engines.ray.gcs_probe import ProbeStatus, attach_problem, require_head, require_local_node
from dovetail.engines.ray.local_cluster import (
    MAX_ATTEMPTS,
    MAX_STORE_BYTES,
    diagnose_start,
    expected_cluster,
    is_ray_process,
    ray_size,
    start_local_ray,
)
from dovetail.errors import ConfigError, EngineError
from dovetail.resources.cluster import Cluster
from ray_aids import driver
from runtime.aids import Script
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ray_aids import FakeCluster

pytestmark = pytest.mark.own_attachment

# --- engine names


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ray", RayAddress(AddressKind.PRIVATE)),
        ("ray:auto", RayAddress(AddressKind.AUTO)),
        ("ray:head:6379", RayAddress(AddressKind.ADDRESS, "head", 6379)),
        ("ray:10.0.0.7:1", RayAddress(AddressKind.ADDRESS, "10.0.0.7", 1)),
        (
            "ray:my-head.ray.svc.cluster.local:65535",
            RayAddress(AddressKind.ADDRESS, "my-head.ray.svc.cluster.local", 65535),
        ),
        ("ray:[::1]:6379", RayAddress(AddressKind.ADDRESS, "::1", 6379)),
        ("ray:[fe80::1%eth0]:6379", RayAddress(AddressKind.ADDRESS, "fe80::1%eth0", 6379)),
    ],
)
def test_an_engine_name_is_parsed_and_formatted(text: str, wanted: RayAddress) -> None:
    assert RayAddress.parse(text) == wanted
    assert str(wanted) == text


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("ray:", "ray:auto attaches"),
        ("ray:head", "ray:head:6379"),
        ("ray:head:", "ray:head:6379"),
        ("ray:[::1]", "ray:[::1]:6379"),
        ("ray:head:http", "ray:head:6379"),
        ("ray:head:0", "ray:head:6379"),
        ("ray:head:65536", "ray:head:6379"),
        ("ray:head:٣", "ray:head:6379"),
        ("ray:::1:6379", "ray:[::1]:6379"),
        ("ray:a b:6379", "ray:auto attaches"),
        ("ray:local", "ray starts a private Ray"),
        ("ray://head:10001", "ray:head:6379"),
        ("ray:ray://head:10001", "ray:head:6379"),
        ("rayauto", "ray:auto attaches"),
        (7, "ray starts a private Ray"),
        ("", "ray starts a private Ray"),
    ],
)
def test_an_invalid_engine_name_is_an_error_with_a_valid_one(text: object, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RayAddress.parse(text)
    (problem,) = caught.value.problems
    assert problem.code == "DT390"
    assert any(fix in line for line in problem.fix_texts), problem


def test_ray_client_is_rejected_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="Ray Client"):
        RayAddress.parse("ray://head:10001")


def test_engine_names_of_ray_are_recognised() -> None:
    assert [is_ray_engine(text) for text in ("ray", "ray:auto", "ray://x", "ray:", "local", "rays", None)] == (
        [True, True, True, True, False, False, False]
    )
    assert parse_address("10.0.0.7:6379") == RayAddress(AddressKind.ADDRESS, "10.0.0.7", 6379)
    assert parse_address("ray://10.0.0.7:10001") is parse_address("nonsense") is None


# --- probes


@contextmanager
def listening(answer: bytes | None) -> Iterator[RayAddress]:
    """A server that sends `answer` to every connection; nothing if None."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                    kept.append(connection)
                    if answer is not None:
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield RayAddress(AddressKind.ADDRESS, "127.0.0.1", server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            thread.join()
            for connection in kept:
                connection.close()


TOKEN_ERROR = (
    "AuthenticationError: RPC error: InvalidAuthToken: Authentication token is missing or incorrect. Note: "
    "RAY_AUTH_MODE is currently 'disabled' (not 'token')."
)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ('{"nodes": ["ab", "cd"]}', ProbeStatus.OPEN),
        (json.dumps({"error": TOKEN_ERROR}), ProbeStatus.NEEDS_TOKEN),
        ('{"error": "RpcError: another error"}', ProbeStatus.FAILED),
        ("", ProbeStatus.NO_ANSWER),
    ],
)
def test_the_answer_of_a_probe_is_classified(line: str, status: ProbeStatus) -> None:
    found = gcs_probe.parse_probe_answer(line)
    assert found.status is status
    assert found.nodes == (frozenset({"ab", "cd"}) if status is ProbeStatus.OPEN else None)


def refused(where: RayAddress) -> str:
    with pytest.raises(EngineError) as caught:
        require_head(where)
    assert caught.value.codes == ("DT393",)
    assert caught.value.exit_code == 5
    assert all(problem.fix_texts for problem in caught.value.problems)
    return str(caught.value)


def test_an_address_where_nothing_listens_is_an_error_with_the_reason() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nothing listens
        assert "refused" in refused(RayAddress(AddressKind.ADDRESS, "127.0.0.1", closed.getsockname()[1]))
    assert "unknown host" in refused(RayAddress(AddressKind.ADDRESS, "no-such-host.invalid", 6379))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\n\r\n", None], ids=["http", "silence"])
def test_a_server_that_is_not_a_head_is_an_error_within_the_time_limit(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(gcs_probe, "PROBE_TIMEOUT_S", 0.5)
    with listening(answer) as where:
        assert "did not answer as the head of a Ray cluster within 0.5 s" in refused(where)


def test_a_ray_without_a_client_skips_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_private, "PROBE_SCRIPT", "raise SystemExit(1)")
    with listening(None) as where:
        assert require_head(where) is None
        require_local_node(where, None)


def answers(monkeypatch: pytest.MonkeyPatch, *, needs_token: bool) -> list[str]:
    """Replace the probe by a cluster with or without tokens; returns the auth modes of the probes."""
    asked: list[str] = []

    def probe(_address: str, auth_mode: str = gcs_probe.WITHOUT_TOKEN) -> gcs_probe.HeadProbe:
        asked.append(auth_mode)
        if needs_token and auth_mode != "token":
            return gcs_probe.HeadProbe(ProbeStatus.NEEDS_TOKEN, error=TOKEN_ERROR)
        return gcs_probe.HeadProbe(ProbeStatus.OPEN, frozenset({"ab"}))

    monkeypatch.setattr(gcs_probe, "probe", probe)
    return asked


def test_tokens_and_clusters_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(None) as where:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        assert answers(monkeypatch, needs_token=True) == []
        assert require_head(where) == frozenset({"ab"})
        answers(monkeypatch, needs_token=False)
        assert "unset RAY_AUTH_MODE" in refused(where)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert require_head(where) == frozenset({"ab"})
        asked = answers(monkeypatch, needs_token=True)
        assert "requires a token" in refused(where)
        assert asked == ["disabled"], "no token is sent before it is known that the cluster needs one"


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.40.0
    Python: 3.10.4
This process on node 10.0.0.7 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


def test_a_version_mismatch_is_reported_with_both_versions() -> None:
    problem = attach_problem(RayAddress(AddressKind.ADDRESS, "head", 6379), RuntimeError(MISMATCH))
    assert problem.code == "DT391"
    assert problem.evidence == ("cluster: Ray 2.40.0, Python 3.10.4", "here: Ray 2.60.0, Python 3.11.7")
    assert problem.fix_texts == ("pip install 'ray==2.40.0'", "use Python 3.10.4 here")


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265", "nonsense"])
def test_ray_address_must_name_a_head(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EngineError, match="RAY_ADDRESS") as caught:
        gcs_probe.find_running_cluster()
    assert caught.value.codes == ("DT393",)


def test_ray_address_gives_the_running_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert gcs_probe.find_running_cluster() == RayAddress(AddressKind.ADDRESS, "head", 6379)


# --- private Ray


def test_a_private_ray_gets_the_resources_of_this_process() -> None:
    machine = Cluster.parse("1x(7cpu, 100GB)")
    size = ray_size(machine, None)
    assert (size.cpus, size.store_bytes) == (7, MAX_STORE_BYTES)
    assert size.memory_bytes + MAX_STORE_BYTES == machine.nodes[0].memory_bytes
    small = Cluster.parse("1x(0.5cpu, 1GB)")
    assert ray_size(small, None).cpus == 1
    assert ray_size(small, None).store_bytes == int(0.3 * 2**30)
    assert ray_size(machine, 1 << 30).store_bytes == int(0.9 * 2**30)
    assert ray_size(machine, 64 << 20).store_bytes is None
    assert expected_cluster(machine).nodes[0].cpu_milli == 7000


BUSY = """[2026-11-16 12:18:05,302 C 1 1] (raylet) node_manager.cc:100: Check failed
*** StackTrace Information ***
/x/raylet(_ZN3ray6raylet11NodeManager26WaitForDashboardAgentPortsEv+0x9) [0x55]
"""
DIED = """[2026-11-16 12:18:05,302 I 1 1] (raylet) main.cc:1: fine
[2026-11-16 12:18:06,302 E 1 1] (raylet) store.cc:9: No space left on device
[2026-11-16 12:18:06,303 I 1 1] (raylet) main.cc:2: also fine
"""


def test_the_reason_of_a_dead_raylet_is_reported() -> None:
    busy = diagnose_start([("raylet.err", BUSY)], "Exception: timed out")
    assert (busy.is_busy, busy.message, busy.log) == (True, "the machine is too busy", "raylet.err")
    assert "WaitForDashboardAgentPorts" in busy.line
    died = diagnose_start([("raylet.err", ""), ("raylet.out", DIED)], "Exception: x")
    assert died.line.endswith("No space left on device")
    assert died.log == "raylet.out"
    assert diagnose_start([], "PermissionError: /tmp/ray\nmore").message == "PermissionError: /tmp/ray"
    assert diagnose_start([], "Exception: The current node timed out during startup.").is_busy


class NeverStarts:
    """Stand-in for Ray that fails to start."""

    def shutdown(self) -> None:
        return None


def test_a_failed_start_is_retried_and_then_reported() -> None:
    tried: list[int] = []
    messages: list[str] = []

    def fail(_ray: Any, size: Any) -> None:
        tried.append(size.cpus)
        raise RuntimeError("The current node timed out during startup.")

    with pytest.raises(EngineError, match="too busy") as caught:
        start_local_ray(NeverStarts(), messages.append, fail)
    assert caught.value.codes == ("DT392",)
    assert len(tried) == MAX_ATTEMPTS
    assert len(messages) == MAX_ATTEMPTS - 1


def test_only_processes_of_ray_are_ended_after_a_failed_start() -> None:
    folder = "/home/ray/anaconda3/lib/python3.11/site-packages/ray"  # as in the container images of Ray
    ours = ["/home/ray/anaconda3/bin/python", "/home/ray/work/train.py", "--data", "/mnt/ray/x"]
    assert not is_ray_process(ours, folder)
    assert not is_ray_process([], folder)
    assert is_ray_process([f"{folder}/core/src/ray/raylet/raylet", "--x"], folder)
    assert is_ray_process([ours[0], "-u", f"{folder}/_private/workers/default_worker.py"], folder)
    assert is_ray_process(["/elsewhere/gcs_server"], folder)
    assert is_ray_process(["ray::IDLE"], folder)


class Interrupted:
    """Stand-in for Ray that gets Ctrl-C while attaching."""

    def __init__(self) -> None:
        self.left = 0

    def init(self, **_: Any) -> None:
        raise KeyboardInterrupt

    def shutdown(self) -> None:
        self.left += 1


def test_ctrl_c_while_attaching_leaves_no_partial_attachment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "require_head", lambda _: None)
    ray = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        attachment._join(ray, RayAddress(AddressKind.ADDRESS, "head", 6379))
    assert ray.left == 1


def test_detach_restores_the_auth_mode_also_after_ray_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Left:
        def is_initialized(self) -> bool:
            return False

    put_back: list[object] = []
    monkeypatch.setitem(sys.modules, "ray", Left())
    monkeypatch.setattr(attachment, "restore_auth_mode", put_back.append)
    state = attachment._AttachState()
    state.pid, state.auth_mode = os.getpid(), "disabled"
    state.current = attachment.Attachment("head:6379", is_private=False, node_id="", session="s")
    monkeypatch.setattr(attachment, "_STATE", state)
    attachment.detach()
    attachment.detach()
    assert put_back == ["disabled"]


def test_ray_does_not_start_automatically_while_dovetail_uses_it() -> None:
    hook = pytest.importorskip("ray._private.auto_init_hook")
    before, auto_init = hook.enable_auto_connect, AutoInitSwitch()
    auto_init.disable()
    with auto_init.disabled():
        assert not hook.enable_auto_connect
    assert not hook.enable_auto_connect
    auto_init.restore()
    assert hook.enable_auto_connect == before


def test_warning_filters_are_changed_by_the_main_thread_only() -> None:
    began, go_on = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with ray_import.suppress_warnings():
            began.set()
            go_on.wait(PATIENCE_S)

    thread = threading.Thread(target=elsewhere)
    with warnings.catch_warnings():
        thread.start()
        assert began.wait(PATIENCE_S)
        warnings.simplefilter("ignore", UserWarning)  # which must not be undone when the thread leaves
        mine = list(warnings.filters)
        go_on.set()
        thread.join()
        assert list(warnings.filters) == mine


def test_ray_that_is_not_installed_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("dovetail.engines.ray.ray_import.importlib.import_module", missing)
    with pytest.raises(EngineError, match=r"pip install 'dovetail-ml\[ray\]'") as caught:
        ray_import.import_ray()
    assert caught.value.codes == ("DT391",)


OWN = """
import os, signal, sys, time
os.environ["RAY_ADDRESS"] = "127.0.0.1:1"  # must not matter
from dovetail.engines.ray.attachment import RayAddress, attach, current_attachment, detach
from dovetail.errors import EngineError

heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("ours"))
mode = os.environ.pop("RAY_AUTH_MODE", None)
own = attach(RayAddress.parse("ray"))
assert own.is_private and own == attach(RayAddress.parse("ray")) == current_attachment(), own
assert attach(RayAddress.parse("ray:" + own.address)) == own
import ray
assert ray.cluster_resources()["CPU"] >= 1
os.kill(os.getpid(), signal.SIGTERM)
try:
    attach(RayAddress.parse("ray:auto"))
except EngineError as error:
    print(error.codes, error)
detach()
assert current_attachment() is None and not ray.is_initialized()
assert "RAY_AUTH_MODE" not in os.environ
os.kill(os.getpid(), signal.SIGTERM)
assert heard == ["ours", "ours"], heard
attach(RayAddress.parse("ray"))
print("second", flush=True)
"""


@pytest.mark.ray
def test_a_private_ray_is_reused_and_ends_with_its_process(tmp_path: Path) -> None:
    with Script(tmp_path, OWN, PYTHONWARNINGS="error") as script:
        script.says("DT394")
        script.says("second")
        output = script.finish()
        assert 'engine="ray"' in output
        assert "Warning" not in output
        assert "WARNING" not in output
        script.all_gone()


JOINS = """
import os, signal
from dovetail.engines.ray.attachment import RayAddress, attach, current_attachment, detach

before = signal.getsignal(signal.SIGTERM)
address = os.environ["DOVETAIL_TEST_RAY"]
named = attach(RayAddress.parse("ray:" + address))
assert not named.is_private and named.is_ours and named.address == address, named
assert attach(RayAddress.parse("ray:localhost:" + address.rpartition(":")[2])) == named
assert signal.getsignal(signal.SIGTERM) == before
detach()
assert current_attachment() is None
os.environ["RAY_ADDRESS"] = address
again = attach(RayAddress.parse("ray:auto"))
assert (again.address, again.session) == (named.address, named.session)
detach()

import ray
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
theirs = attach(RayAddress.parse("ray:auto"))
assert not theirs.is_ours and attach(RayAddress.parse("ray:" + address)) == theirs == current_attachment()
for other in ("ray", "ray:127.0.0.1:1"):
    try:
        attach(RayAddress.parse(other))
    except Exception as error:
        print(error.codes, error)
detach()
assert ray.is_initialized()
print("done", flush=True)
"""


def test_a_cluster_is_attached_by_address_or_because_it_runs(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    with driver(ray_cluster, tmp_path, JOINS) as script:
        output = script.finish()
        assert output.count("DT394") == 4
        assert 'engine="ray:auto" uses that one' in output
        assert "done" in output


FORKS = """
import os, threading
from dovetail.engines.ray import attachment
from dovetail.engines.ray.attachment import RayAddress, attach, current_attachment, detach

where = RayAddress.parse("ray:" + os.environ["DOVETAIL_TEST_RAY"])
held, go_on = threading.Event(), threading.Event()

def hold():
    with attachment._STATE.lock:
        held.set()
        go_on.wait()

def child(what):
    process = os.fork()
    if process == 0:
        try:
            print(what, current_attachment(), attach(where), flush=True)
        except Exception as error:
            print(what, error.codes, error, flush=True)
        os._exit(0)
    os.waitpid(process, 0)

named = attach(where)
threading.Thread(target=hold, daemon=True).start()
held.wait()
child("ours")
go_on.set()
detach()
import ray
ray.init(address=where.address, log_to_driver=False, logging_level="ERROR")
child("theirs")
assert attach(where) == current_attachment()  # that of the parent still works
print("done", flush=True)
"""


def test_a_forked_child_does_not_use_the_connection_of_its_parent(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    with driver(ray_cluster, tmp_path, FORKS) as script:
        output = script.finish()
        assert "ours ('DT394',)" in output
        assert "theirs ('DT394',)" in output
        assert 'multiprocessing.get_context("spawn")' in output
        assert "done" in output


FINDS_NONE = """
from dovetail.engines.ray.attachment import RayAddress, attach
from dovetail.errors import EngineError
import time, ray
began = time.monotonic()
try:
    attach(RayAddress.parse("ray:auto"))
except EngineError as error:
    print(error, round(time.monotonic() - began, 1))
assert not ray.is_initialized()
"""


def test_a_ray_of_another_program_is_not_attached(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    """`auto` of Ray itself would attach to any Ray on this machine."""
    assert ray_cluster.address
    with Script(tmp_path, FINDS_NONE, RAY_TMPDIR=str(tmp_path)) as script:
        assert "no Ray runs on this machine" in script.finish()


LEAVES = """
import os, ray
import dovetail as dt
from ray._private import auto_init_hook

def same(items):
    return items

def source():
    while True:
        yield 1

ray.init(address=os.environ["DOVETAIL_TEST_RAY"], log_to_driver=False, logging_level="ERROR")
run = dt.run(dt.Pipeline([dt.Stage("same", same, workers=1)]), source(), engine="ray:auto")
next(iter(run))
assert not auto_init_hook.enable_auto_connect
ray.shutdown()
try:
    run.wait()
except dt.EngineError as error:
    print(error, error.exit_code)
assert not ray.is_initialized()
assert auto_init_hook.enable_auto_connect
print("done")
"""


def test_a_run_whose_program_shuts_ray_down_fails_and_attaches_to_no_other(
    ray_cluster: FakeCluster, tmp_path: Path
) -> None:
    with driver(ray_cluster, tmp_path, LEAVES, RAY_ADDRESS=ray_cluster.address) as script:
        output = script.finish()
    assert output.count("error[") == output.count("error[DT397]") == 1
    assert output.endswith("ray.shutdown() 5\ndone\n")


def test_the_head_of_a_real_cluster_is_probed(ray_cluster: FakeCluster) -> None:
    found = gcs_probe.probe(ray_cluster.address)
    assert found.status is ProbeStatus.OPEN
    assert found.nodes is not None
    assert found.nodes >= set(ray_cluster.alive())


def test_sigint_and_sigterm_handlers_are_restored() -> None:
    def mine(*_: object) -> None:
        return None

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with ray_import.keep_signal_handlers():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
