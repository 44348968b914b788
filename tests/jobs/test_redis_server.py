"""The Redis store and its server: restarts, crashes, errors, wake-ups, and what is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail.jobs.job import JobState, Outcome, Retries
from dovetail.jobs.store import (
    Claim,
    Exchange,
    JobFilter,
    Receipt,
    StoreUnavailableError,
    StoreVersionError,
    WorkerInfo,
)
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.jobs.stores.redis_store import RedisStore
from dovetail.resources.resources import Resources
from jobs.claim_scenes import random_free, random_shape
from jobs.store_contract import CPU_NODE, completion, free_of, spec
from jobs.store_traces import StoreTrace, TraceClock, random_trace
from redis_aids import RedisProcess, run_server
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.errors import DovetailError

TESTS = Path(__file__).parent.parent


@pytest.fixture
def store(redis_server: RedisProcess, request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    """A store with a prefix of its own."""
    store = RedisStore(redis_server.url, prefix=request.node.name.replace("[", "(").replace("]", ")"))
    yield store
    store.close()


@pytest.fixture(scope="module")
def own_server() -> Iterator[RedisProcess]:
    """A server that tests configure, kill and start again; its data is on the disk after each operation."""
    yield from run_server("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def own_store(own_server: RedisProcess) -> Iterator[RedisStore]:
    with own_server.client() as client:
        client.flushall()
    store = RedisStore(own_server.url)
    yield store
    store.close()


def codes(error: DovetailError) -> list[str]:
    return [problem.code for problem in error.problems]


def claim(store: RedisStore, slots: int = 100, lease_ms: int = 15_000, worker: str = "w1") -> list[str]:
    reply = store.exchange(Exchange(worker, (), (), Claim(slots, free_of(CPU_NODE)), lease_ms))
    return [job.spec.id for job in reply.claimed]


# --- claims


@given(seed=st.integers(0, 2**32))
def test_claims_take_what_the_memory_store_takes_for_all_kinds_of_shapes(redis_server: RedisProcess, seed: int) -> None:
    random, clock = Random(seed), TraceClock()
    stores = MemoryStore(clock), RedisStore(redis_server.url, prefix=f"fit{seed}", clock_ms=clock)
    specs = [
        spec(f"{n:02}", shape=random_shape(random), priority=random.randint(-1, 1), queue=random.choice("xy"))
        for n in range(40)
    ]
    for store in stores:
        store.submit(specs)
    for _ in range(4):
        wanted = Claim(random.randint(1, 20), random_free(random), random.choice([("x",), ("x", "y")]))
        expected, found = (store.exchange(Exchange("w", (), (), wanted)) for store in stores)
        assert found.claimed == expected.claimed
    for store in stores:
        store.close()


@pytest.mark.bar
def test_the_cost_of_a_claim_does_not_grow_with_the_number_of_queued_jobs(
    own_store: RedisStore, own_server: RedisProcess
) -> None:
    shapes = [Resources(cpus=1 + n / 1000).shape() for n in range(200)]

    def cost_us() -> float:
        with own_server.client() as client:
            costs = []
            for _ in range(10):
                client.config_resetstat()
                assert len(claim(own_store, 2)) == 2
                costs.append(client.info("commandstats")["cmdstat_fcall"]["usec_per_call"])
        return float(min(costs))

    def submit(first: int, count: int) -> None:
        own_store.submit([spec(f"{n:06}", shape=shapes[n % 200]) for n in range(first, first + count)])

    submit(0, 400)
    few = cost_us()
    for first in range(400, 20_400, 1000):
        submit(first, 1000)
    assert cost_us() < 2.5 * few


# --- wake-ups


def test_wake_ends_a_wait_that_has_begun(store: RedisStore) -> None:
    store.register_worker(WorkerInfo("w1"))
    woken: list[bool] = []
    for _ in range(20):
        thread = threading.Thread(target=lambda: woken.append(store.wait("w1", PATIENCE_S)))
        thread.start()
        store.wake("w1")
        thread.join(PATIENCE_S)
    assert woken == [True] * 20


def test_a_wake_up_from_the_server_that_came_between_two_waits_is_kept(store: RedisStore) -> None:
    store.register_worker(WorkerInfo("w1"))
    assert not store.wait("w1", 0.001)  # leaves its request at the server
    store.wake("w1")
    assert store.wait("w1", PATIENCE_S)
    store.submit([spec("a")])
    assert store.wait("w1", PATIENCE_S)
    assert not store.wait("w1", 0.0)


def exchange_behind_a_wait(store: RedisStore, timeout_s: float = PATIENCE_S) -> list[str] | None:
    """Claimed jobs; None if it only waited."""
    reply = store.wait_and_exchange(Exchange("w1", (), (), Claim(1, free_of(CPU_NODE))), timeout_s)
    return None if reply is None else [job.spec.id for job in reply.claimed]


@pytest.mark.parametrize("has_request", [False, True])
def test_the_server_makes_the_exchange_that_was_sent_behind_a_wait(store: RedisStore, *, has_request: bool) -> None:
    store.register_worker(WorkerInfo("w1"))
    if has_request:
        assert not store.wait("w1", 0.001)  # leaves its request at the server
    assert exchange_behind_a_wait(store, 0.02) == []
    store.submit([spec("a"), spec("b")])
    assert exchange_behind_a_wait(store) == ["a"]
    assert not store.wait("w1", 0.0)  # the wake-up has been used
    store.submit([spec("c")])
    assert exchange_behind_a_wait(store) == ["b"]
    found: list[list[str] | None] = []
    thread = threading.Thread(target=lambda: found.append(exchange_behind_a_wait(store)))
    thread.start()
    store.wake("w1")
    thread.join(PATIENCE_S)
    assert found in ([None], [["c"]])  # woken before the request was sent, or after
    while store.wait("w1", 0.0):
        pass
    assert exchange_behind_a_wait(store, 0.001) == ([] if found == [["c"]] else ["c"])


def test_an_exchange_behind_a_wait_only_waits_without_the_functions_or_the_server(
    own_store: RedisStore, own_server: RedisProcess
) -> None:
    own_store.register_worker(WorkerInfo("w1"))
    own_store.submit([spec("a")])
    with own_server.client() as client:
        client.function_flush()
    assert exchange_behind_a_wait(own_store, 0.001) is None
    assert claim(own_store) == ["a"]
    assert exchange_behind_a_wait(own_store, 0.001) == []
    own_server.kill()
    assert exchange_behind_a_wait(own_store) is None
    with pytest.raises(StoreUnavailableError):
        exchange_behind_a_wait(own_store)
    own_server.start()
    assert exchange_behind_a_wait(own_store, 0.001) == []


def test_closing_the_store_ends_its_waits(redis_server: RedisProcess) -> None:
    store = RedisStore(redis_server.url, prefix="closing")
    store.submit([spec("a")])
    ended: list[object] = []
    idle = Exchange("w2", (), (), Claim(0, free_of(CPU_NODE)))
    threads = [
        threading.Thread(target=lambda: ended.append(store.wait("w1", PATIENCE_S))),
        threading.Thread(target=lambda: ended.append(store.wait_and_exchange(idle, PATIENCE_S))),
        threading.Thread(target=lambda: ended.append(store.wait_finished(["a"], PATIENCE_S))),
    ]
    for thread in threads:
        thread.start()
    with redis_server.client() as client:
        until(
            lambda: client.info("clients")["blocked_clients"] >= 2 and client.pubsub_channels("{closing}*"), "both wait"
        )
    store.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ended) == 3


# --- what is left behind


@pytest.mark.parametrize("seed", range(20 if LONG else 3))
def test_nothing_is_left_when_all_jobs_are_purged(redis_server: RedisProcess, seed: int) -> None:
    clock, prefix = TraceClock(), f"left{seed}"
    store = RedisStore(redis_server.url, prefix=prefix, clock_ms=clock)
    trace = StoreTrace(store, clock)
    for operation in random_trace(seed, 100):
        trace.apply(operation)
    for queue in ("default", "x"):
        store.set_paused(queue, False)
        store.set_limits(queue, None, None)
    for schedule in store.schedules():
        store.remove_schedule(schedule.name)
    ids = [record.id for record in store.find(JobFilter(), 1000).jobs]
    store.cancel(ids)
    clock.now_ms += 10**8
    claim(store)
    store.purge(JobFilter())
    for worker in ("w1", "w2", "w3"):
        store.remove_worker(worker)
    assert store.find(JobFilter()).jobs == []
    with redis_server.client() as client:
        assert client.keys(f"{{{prefix}}}*") == [f"{{{prefix}}}:meta".encode()]
        assert client.hkeys(f"{{{prefix}}}:meta") == [b"version"]
    store.close()


# --- restarts


def test_functions_are_loaded_again_when_the_server_has_lost_them(
    own_store: RedisStore, own_server: RedisProcess
) -> None:
    own_store.submit([spec("a")])
    with own_server.client() as client:
        client.function_flush()
        assert claim(own_store) == ["a"]
        client.flushall()
        client.function_flush()
    own_store.submit([spec("b")])
    assert claim(own_store) == ["b"]


def test_a_store_reconnects_to_a_server_that_was_away(own_store: RedisStore, own_server: RedisProcess) -> None:
    own_store.register_worker(WorkerInfo("w1"))
    own_store.submit([spec("a"), spec("b")])
    assert not own_store.wait_finished(["a"], 0.001)
    while own_store.wait("w1", 0.001):
        pass
    own_server.kill()
    assert own_store.wait("w1", PATIENCE_S)  # a wake-up may be lost with the connection
    for operation in (
        lambda: claim(own_store),
        lambda: own_store.wait("w1", 1),
        lambda: own_store.wait_finished(["a"], 1),
    ):
        with pytest.raises(StoreUnavailableError) as raised:
            operation()
        assert codes(raised.value) == ["DT660"]
        assert str(own_server.socket) in str(raised.value)
    own_server.start()
    assert claim(own_store) == ["a", "b"]
    assert own_store.wait_finished(["a"], 0.001) == []


@pytest.mark.time_limit(3 * PATIENCE_S)
def test_nothing_is_lost_when_the_server_is_killed_in_the_middle(
    own_store: RedisStore, own_server: RedisProcess
) -> None:
    count, kills = (2_000, 20) if LONG else (300, 3)
    ids = [f"{n:05}" for n in range(count)]
    own_store.submit([spec(job_id, retries=Retries(lost=100)) for job_id in ids])
    workers = [start_worker(own_server.url, name) for name in ("w1", "w2")]

    def finished() -> int:
        counts = own_store.stats()[0].counts
        return counts.get(JobState.SUCCEEDED, 0)

    for kill in range(kills):
        until(lambda kill=kill: finished() >= kill * count // (kills + 1), "the workers have continued")  # type: ignore[misc]
        own_server.kill()
        own_server.start()
    for worker in workers:
        assert worker.wait(PATIENCE_S) == 0
    records = own_store.get(ids)
    assert all(record is not None and record.state is JobState.SUCCEEDED for record in records)
    for record in records:
        assert record is not None
        outcomes = [attempt.outcome for attempt in record.attempts]
        assert outcomes[-1] is Outcome.SUCCEEDED
        assert set(outcomes[:-1]) <= {Outcome.LOST}
        assert record.result == record.attempts[-1].worker.encode()


def start_worker(
    url: str, name: str, *before: str, lease_ms: int = 1_000, prefix: str = "dovetail"
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [*before, sys.executable, "-m", "jobs.redis_worker", url, prefix, name, str(lease_ms)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})


def test_clocks_of_workers_that_differ_by_ten_minutes_change_nothing(redis_server: RedisProcess) -> None:
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed: apt-get install faketime")
    count = 300 if LONG else 60
    store = RedisStore(redis_server.url, prefix="clocks")
    store.submit([spec(f"{n:05}") for n in range(count)])
    began = store.now_ms()
    workers = [
        start_worker(redis_server.url, name, "faketime", "-f", shift, lease_ms=120_000, prefix="clocks")
        for name, shift in (("w1", "+10m"), ("w2", "-10m"))
    ]
    for worker in workers:
        assert worker.wait(PATIENCE_S) == 0
    now = store.now_ms()
    assert now - began < 1000 * PATIENCE_S
    for record in store.find(JobFilter(), count).jobs:
        assert [attempt.outcome for attempt in record.attempts] == [Outcome.SUCCEEDED]
        assert began <= record.attempts[0].started_ms <= (record.finished_ms or 0) <= now
    store.close()


# --- servers that cannot be used


def test_an_unreachable_server_is_named_with_its_address_and_without_the_password(tmp_path: Path) -> None:
    for url, address in (
        (f"unix://:secret@{tmp_path}/none.sock?db=3", f"unix://{tmp_path}/none.sock?db=3"),
        ("redis://me:secret@127.0.0.1:1/2", "redis://127.0.0.1:1/2"),
    ):
        with pytest.raises(StoreUnavailableError) as raised:
            RedisStore(url).stats()
        assert codes(raised.value) == ["DT660"]
        assert address in str(raised.value)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379/jobs", "http://127.0.0.1", "unix://", "redis://h:port/0"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RedisStore(url)
    assert codes(raised.value) == ["DT666"]


def test_a_prefix_with_braces_is_refused(redis_server: RedisProcess) -> None:
    for prefix in ("", "{a}"):
        with pytest.raises(ConfigError):
            RedisStore(redis_server.url, prefix=prefix)


def test_a_wrong_password_is_an_error_of_the_url(own_server: RedisProcess) -> None:
    with own_server.client() as client:
        client.config_set("requirepass", "right")
        try:
            for userinfo in ("", ":wrong@"):
                with pytest.raises(ConfigError) as raised:
                    RedisStore(f"unix://{userinfo}{own_server.socket}").stats()
                assert codes(raised.value) == ["DT666"]
            store = RedisStore(f"unix://:right@{own_server.socket}")
            assert isinstance(store.stats(), list)
            store.close()
        finally:
            client.config_set("requirepass", "")


def test_a_store_that_has_worked_is_away_while_its_password_is_changed(
    own_store: RedisStore, own_server: RedisProcess
) -> None:
    store = own_store
    store.submit([spec("a")])
    assert not store.wait("w1", 0.001)
    with own_server.client() as client:
        client.config_set("requirepass", "new")
        try:
            client.client_kill_filter(_type="normal", skipme=True)
            assert store.wait("w1", PATIENCE_S)  # a wake-up may be lost with the connection
            for operation in (lambda: claim(store), lambda: store.wait("w1", PATIENCE_S)):
                with pytest.raises(StoreUnavailableError) as raised:
                    operation()
                assert codes(raised.value) == ["DT666"]
        finally:
            client.config_set("requirepass", "")
    assert claim(store) == ["a"]


def test_a_user_without_permissions_is_an_error_whose_fix_works(
    own_store: RedisStore, own_server: RedisProcess
) -> None:
    url = f"unix://worker:pass@{own_server.socket}"
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">pass", "+info")
        try:
            refused = RedisStore(url)
            with pytest.raises(ConfigError) as raised:
                refused.submit([spec("a")])
            refused.close()
            assert codes(raised.value) == ["DT666"]
            [fix] = raised.value.problems[0].fix_texts
            client.execute_command(*fix.removeprefix("redis-cli ").replace("NAME", "worker").split())
            store = RedisStore(url)
            store.register_worker(WorkerInfo("w1"))
            store.submit([spec("a")])
            assert store.wait("w1", PATIENCE_S)
            assert store.wait_finished(["a"], 0.001) == []
            assert claim(store) == ["a"]
            store.close()
        finally:
            client.execute_command("ACL", "DELUSER", "worker")


def test_a_waiting_worker_is_woken_when_its_server_becomes_a_replica(
    own_store: RedisStore, own_server: RedisProcess
) -> None:
    own_store.register_worker(WorkerInfo("w1"))
    assert not own_store.wait("w1", 0.001)
    with own_server.client() as client:
        client.replicaof("127.0.0.1", "1")
        try:
            assert own_store.wait("w1", PATIENCE_S)
            with pytest.raises(StoreUnavailableError, match="replica"):
                own_store.wait("w1", PATIENCE_S)
        finally:
            client.replicaof("NO", "ONE")


def test_full_memory_is_an_error_with_a_fix_and_purge_still_works(
    own_store: RedisStore, own_server: RedisProcess
) -> None:
    own_store.submit([spec("a"), spec("b")])
    own_store.cancel(["a"])
    with own_server.client() as client:
        client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(StoreUnavailableError, match="maxmemory") as raised:
                own_store.submit([spec("c")])
            assert codes(raised.value) == ["DT660"]
            assert own_store.stats()[0].counts == {JobState.READY: 1, JobState.CANCELLED: 1}
            assert own_store.purge(JobFilter()).jobs == 1
        finally:
            client.config_set("maxmemory", "0")
    assert own_store.submit([spec("c")]) == [Receipt("c", created=True)]


def test_a_server_that_deletes_keys_when_its_memory_is_full_is_refused(own_server: RedisProcess) -> None:
    with own_server.client() as client:
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(ConfigError, match="noeviction") as raised:
                RedisStore(own_server.url).stats()
            assert codes(raised.value) == ["DT665"]
        finally:
            client.config_set("maxmemory", "0")
            client.config_set("maxmemory-policy", "noeviction")


def test_a_read_only_replica_is_an_error(own_store: RedisStore, own_server: RedisProcess) -> None:
    own_store.submit([spec("a")])
    with own_server.client() as client:
        client.replicaof("127.0.0.1", "1")
        try:
            with pytest.raises(StoreUnavailableError, match="replica"):
                own_store.submit([spec("b")])
        finally:
            client.replicaof("NO", "ONE")
    assert own_store.submit([spec("b")]) == [Receipt("b", created=True)]


def test_jobs_of_a_newer_version_are_refused(own_store: RedisStore, own_server: RedisProcess) -> None:
    own_store.submit([spec("a")])
    with own_server.client() as client:
        client.hset("{dovetail}:meta", "version", 2)
    for operation in (own_store.stats, lambda: own_store.submit([spec("b")])):
        with pytest.raises(StoreVersionError) as raised:
            operation()
        assert codes(raised.value) == ["DT661"]


def test_keys_of_another_program_are_refused(own_store: RedisStore, own_server: RedisProcess) -> None:
    with own_server.client() as client:
        client.set("{dovetail}:meta", "text")
    with pytest.raises(StoreVersionError):
        own_store.submit([spec("b")])


@pytest.mark.parametrize(
    ("info", "words"),
    [("redis_version:6.2.7", "Redis 6.2.7"), ("redis_version:7.2.0\r\nredis_mode:cluster", "cluster")],
)
def test_old_servers_and_clusters_are_refused(tmp_path: Path, info: str, words: str) -> None:
    with FakeServer(tmp_path / "sock", info), pytest.raises(ConfigError, match=words) as raised:
        RedisStore(f"unix://{tmp_path}/sock").stats()
    assert codes(raised.value) == ["DT665"]


class FakeServer:
    """Answers INFO with a text, and everything else with OK."""

    def __init__(self, path: Path, info: str) -> None:
        import socket

        self._info = info.encode()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE_S)
        self._socket.close()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            while data := connection.recv(65_536):
                for command in data.split(b"*")[1:]:
                    reply = (
                        b"$%d\r\n%s\r\n" % (len(self._info), self._info) if b"INFO" in command.split() else b"+OK\r\n"
                    )
                    connection.sendall(reply)


def test_an_operation_that_fails_leaves_nothing_behind(store: RedisStore) -> None:
    store.submit([spec("a"), spec("b", after=("a",))])
    unreadable = Resources(cpus=1, labels={"zone": "\udcff"}).shape()  # not JSON for the server
    with pytest.raises(AssertionError):
        store.submit([spec("c"), spec("d", shape=unreadable)])
    assert store.get(["c", "d"]) == [None, None]
    assert [record.id for record in store.find(JobFilter()).jobs] == ["b", "a"]


def test_strings_with_lone_surrogates_come_back(store: RedisStore) -> None:
    store.submit([spec("a")])
    reply = store.exchange(Exchange("w1", (), (), Claim(1, free_of(CPU_NODE))))
    error = "OSError: no file \udcff"
    store.exchange(Exchange("w1", [completion(reply.claimed[0], Outcome.ERROR, error=error, final=True)]))
    [record] = store.get(["a"])
    assert record is not None
    assert record.error == record.attempts[0].error == error


def test_a_forked_child_has_connections_of_its_own(store: RedisStore) -> None:
    store.submit([spec("a")])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if claim(store) == ["a"] and store.wait("w1", 0.0) is False else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert claim(store) == []
