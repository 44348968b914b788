"""Ingestion of foreign JSON from Redis lists into a queue."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.jobs.application import Application
from dovetail.jobs.job import JobSpec, JobState
from dovetail.jobs.job_function import JobFunction
from dovetail.jobs.payload_codec import PayloadCodec
from dovetail.jobs.store import JobFilter, StoreUnavailableError
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.jobs.stores.redis_store import RedisStore
from dovetail.jobs.submit_options import JobOptions
from dovetail.jobs.workers import ingest
from dovetail.jobs.workers.ingest import Ingester, Rejected, Route, job_of_message, parse_routes
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dovetail.jobs.store import Receipt, Store
    from redis_aids import RedisProcess

LIST = "ai:gpu:queue"


def handle(message: Any) -> Any:
    return message


def route(**options: Any) -> Route:
    return Route(LIST, JobFunction(handle, "tasks:handle", JobOptions(**options)))


def convert(message: object, **options: Any) -> JobSpec | Rejected:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return job_of_message(data, route(**options), "key", PayloadCodec())


def spec(message: object, **options: Any) -> JobSpec:
    found = convert(message, **options)
    assert isinstance(found, JobSpec), found
    return found


# --- messages


def test_a_message_is_the_argument_of_the_function() -> None:
    found = spec({"text": "é", "n": 1}, queue="gpu", timeout="90s", priority="low")
    assert (found.function, found.queue, found.priority) == ("tasks:handle", "gpu", -10)
    assert (found.key, found.timeout_ms) == ("key", 90_000)
    assert json.loads(found.payload) == [[{"text": "é", "n": 1}], {}]
    assert json.loads(spec([1, 2]).payload) == [[[1, 2]], {}]


def test_priority_and_requires_gpu_are_honoured() -> None:
    assert [spec({"priority": value}).priority for value in ("high", "normal", "low", 7)] == [10, 0, -10, 7]
    assert spec({"priority": None}, priority="high").priority == 10
    gpu = spec({"requires_gpu": True}).shape
    assert (gpu.computes_on_gpu, gpu.cards) == (True, 1)
    assert not spec({"requires_gpu": False}).shape.computes_on_gpu
    own = spec({"requires_gpu": True}, resources={"gpus": 0.5, "cpus": 2}).shape
    assert (own.gpu_milli, own.cpu_milli) == (500, 2000), "what the function declares counts"
    more = spec({"requires_gpu": True}, resources=dt.Resources(cpus=3)).shape
    assert (more.cards, more.cpu_milli) == (1, 3000)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"{not json", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"x": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "not JSON"),
        ({"priority": "urgent"}, "priority='urgent' is not high, normal, low"),
        ({"priority": 1e300}, "priority=1e+300"),
        ({"requires_gpu": "maybe"}, 'requires_gpu is "maybe"'),
    ],
)
def test_a_message_that_cannot_be_a_job_is_rejected_with_the_reason(message: object, reason: str) -> None:
    found = convert(message)
    assert isinstance(found, Rejected)
    assert reason in found.reason


@given(st.binary(max_size=50))
def test_any_bytes_become_a_job_or_a_rejected_message_that_keeps_them(data: bytes) -> None:
    import base64

    found = convert(data)
    if isinstance(found, Rejected):
        entry = json.loads(found.to_json())
        kept = entry["message"].encode() if "message" in entry else base64.b64decode(entry["message_base64"])
        assert kept == data
    else:
        assert json.loads(found.payload)[0] == [json.loads(data)]


def test_routes_are_checked_together() -> None:
    application = Application(("tasks",), {"tasks:handle": JobFunction(handle, "tasks:handle")})
    [found] = parse_routes(["a=b:c=tasks:handle"], application)
    assert (found.list_name, found.function.reference) == ("a=b:c", "tasks:handle")
    with pytest.raises(dt.DovetailError) as caught:
        parse_routes(["nothing", "l=tasks:hnadle", "l=os:system", "m=tasks:handle", "m=tasks:handle"], application)
    text = str(caught.value)
    for part in ("--ingest nothing", "did you mean 'handle'?", "does not run 'os:system'", "'m' is given twice"):
        assert part in text


# --- lists


class FailingStore(MemoryStore):
    """Fails before or after it has stored jobs, a number of times."""

    def __init__(self, failures: list[str]) -> None:
        super().__init__()
        self.failures = failures

    def submit(self, specs: Any) -> list[Receipt]:
        how = self.failures.pop() if self.failures else ""
        found = [] if how == "before" else super().submit(specs)
        if how:
            raise StoreUnavailableError(dt.Problem("DT660", f"fails {how}"))
        return found


@contextmanager
def ingesting(server: RedisProcess, store: Store, report: Callable[[str], None] = lambda _: None) -> Iterator[Ingester]:
    ingester = Ingester(server.url, route(), store, report=report, is_same_redis=isinstance(store, RedisStore))
    ingester.start()
    try:
        yield ingester
    finally:
        ingester.stop()


@pytest.fixture
def client(redis_server: RedisProcess) -> Iterator[Any]:
    """A client of an empty database."""
    with redis_server.client() as found:
        found.flushdb()
        yield found
        found.flushdb()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, redis_server: RedisProcess, client: Any) -> Iterator[Store]:
    del client
    found: Store = MemoryStore() if request.param == "memory" else RedisStore(redis_server.url, prefix="ingest")
    yield found
    found.close()


def messages_of(store: Store) -> list[Any]:
    records = store.get([record.id for record in store.find(JobFilter(), limit=10_000).jobs])
    return [json.loads(record.spec.payload)[0][0] for record in reversed(records) if record is not None]


def has_submitted(ingester: Ingester, count: int) -> bool:
    return bool(ingester.get_status()["submitted"] == count)


def push(client: Any, *messages: object) -> None:
    client.lpush(LIST, *(one if isinstance(one, bytes) else json.dumps(one) for one in messages))


def nonempty_lists(client: Any) -> list[str]:
    """Keys of lists that are not empty."""
    return sorted(key.decode() for key in client.keys(f"{LIST}*"))


def test_messages_become_jobs_in_their_order(redis_server: RedisProcess, client: Any, store: Store) -> None:
    push(client, *({"n": n} for n in range(250)))
    with ingesting(redis_server, store) as ingester:
        until(lambda: ingester.get_status()["submitted"] == 250, "all are submitted")
        assert messages_of(store) == [{"n": n} for n in range(250)]
        push(client, {"n": 250})
        until(lambda: ingester.get_status()["submitted"] == 251, "a waiting ingester is woken")
    assert nonempty_lists(client) == []
    assert {record.state for record in store.find(JobFilter()).jobs} == {JobState.READY}


def test_a_waiting_ingester_sends_nothing_and_stops_at_once(
    redis_server: RedisProcess, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "BLOCK_S", 3600.0)
    monkeypatch.setattr(ingest, "SOCKET_TIMEOUT_S", 7200.0)
    with ingesting(redis_server, MemoryStore()):
        until(lambda: client.info("clients")["blocked_clients"] == 1, "it waits")
        before = client.info("commandstats").get("cmdstat_eval", {}).get("calls")
        push(client, {"n": 1})
        until(lambda: client.info("commandstats")["cmdstat_eval"]["calls"] > before, "it was woken")
        until(lambda: client.info("clients")["blocked_clients"] == 1, "it waits again")


def test_bad_messages_are_kept_with_the_reason(redis_server: RedisProcess, client: Any, store: Store) -> None:
    lines: list[str] = []
    push(client, {"n": 1}, b"{not json", {"priority": "urgent"}, b"\xff", {"n": 2})
    with ingesting(redis_server, store, lines.append) as ingester:
        until(lambda: ingester.get_status()["rejected"] == 3, "they are rejected")
    assert messages_of(store) == [{"n": 1}, {"n": 2}]
    rejected = [json.loads(entry) for entry in client.lrange(f"{LIST}:rejected", 0, -1)][::-1]
    assert [entry.get("message") for entry in rejected] == ["{not json", '{"priority": "urgent"}', None]
    assert rejected[2]["message_base64"] == "/w=="
    assert "not JSON" in rejected[0]["reason"]
    assert len([line for line in lines if "message rejected" in line]) == 3
    assert nonempty_lists(client) == [f"{LIST}:rejected"]


@pytest.mark.parametrize("failures", [["before"], ["after"], ["after", "before", "after"]])
def test_a_store_that_fails_loses_and_doubles_nothing(
    redis_server: RedisProcess, client: Any, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "RETRY_S", (0.001, 0.001))
    store, lines = FailingStore(failures.copy()), list[str]()
    push(client, *({"n": n} for n in range(3)))
    with ingesting(redis_server, store, lines.append):
        until(lambda: len(messages_of(store)) == 3 and nonempty_lists(client) == [], "all are submitted")
        until(lambda: any("continues" in line for line in lines), "it says that the store is back")
    assert sorted(one["n"] for one in messages_of(store)) == [0, 1, 2]
    assert any("waits: fails" in line for line in lines)


def test_the_batch_of_an_ingester_that_died_is_submitted_by_another_once(
    redis_server: RedisProcess, client: Any, store: Store
) -> None:
    client.rpush(f"{LIST}:ingesting:0123", *(json.dumps({"n": n}) for n in range(3)), b"bad")
    client.rpush("other:ingesting:0123", "1")
    dead = Ingester(redis_server.url, route(), store)
    submitted = [json.dumps({"n": n}).encode() for n in range(3)]
    store.submit([job for job in (dead_job(data, place) for place, data in enumerate(submitted[:2])) if job])
    with ingesting(redis_server, store):
        until(lambda: nonempty_lists(client) == [f"{LIST}:rejected"], "the batch is gone")
    assert messages_of(store) == [{"n": 0}, {"n": 1}, {"n": 2}], "two of them were submitted before its death"
    assert client.llen(f"{LIST}:rejected") == 1
    assert client.llen("other:ingesting:0123") == 1
    del dead


def dead_job(data: bytes, place: int) -> JobSpec | None:
    found = job_of_message(data, route(), f"ingest:{LIST}:0123:{place}", PayloadCodec())
    return found if isinstance(found, JobSpec) else None


def test_a_step_in_the_same_redis_that_is_repeated_loses_and_doubles_nothing(
    redis_server: RedisProcess, client: Any
) -> None:
    """The answer of the first one was lost, and the list has equal messages."""
    store = RedisStore(redis_server.url, prefix="ingest")
    push(client, {"n": 1}, {"n": 1}, b"bad", b"bad")
    bad, good = b"bad", json.dumps({"n": 1}).encode()
    job = job_of_message(good, route(), None, PayloadCodec())
    assert isinstance(job, JobSpec)
    for _ in range(2):
        assert store.ingest(LIST, f"{LIST}:rejected", [good], [], [job])
    assert client.lrange(LIST, 0, -1) == [bad, bad, good]
    assert messages_of(store) == [{"n": 1}]
    assert not store.ingest(LIST, f"{LIST}:rejected", [bad], [b"reason"], []), "another message is at the end"
    assert not store.ingest(LIST, f"{LIST}:rejected", [bad, bad, bad, good], [], [])
    assert client.llen(LIST) == 3
    other = job_of_message(good, route(), None, PayloadCodec())
    assert isinstance(other, JobSpec)
    assert store.ingest(LIST, f"{LIST}:rejected", [bad, bad, good], [b"a", b"b"], [other])
    assert client.lrange(f"{LIST}:rejected", 0, -1) == [b"b", b"a"]
    assert len(messages_of(store)) == 2
    assert client.hlen("{ingest}:keys") == 0, "no idempotency keys are needed"
    store.close()


def test_an_ingester_of_the_same_redis_waits_without_changing_the_list(
    redis_server: RedisProcess, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "BLOCK_S", 3600.0)
    monkeypatch.setattr(ingest, "SOCKET_TIMEOUT_S", 7200.0)
    store = RedisStore(redis_server.url, prefix="ingest")
    with ingesting(redis_server, store) as ingester:
        for count in range(1, 4):
            until(lambda: client.info("clients")["blocked_clients"] == 1, "it waits")
            push(client, {"n": count}, {"n": count})
            until(partial(has_submitted, ingester, 2 * count), "it was woken")
    assert nonempty_lists(client) == []
    assert [one["n"] for one in messages_of(store)] == [1, 1, 2, 2, 3, 3]
    store.close()


def test_several_ingesters_share_a_list(redis_server: RedisProcess, client: Any, store: Store) -> None:
    total = 500

    def produce(start: int) -> None:
        with redis_server.client() as producer:
            for n in range(start, total, 2):
                producer.lpush(LIST, json.dumps({"n": n}))

    producers = [threading.Thread(target=produce, args=(start,)) for start in range(2)]
    with ingesting(redis_server, store), ingesting(redis_server, store), ingesting(redis_server, store):
        for producer in producers:
            producer.start()
        until(lambda: sum(sum(one.counts.values()) for one in store.stats()) == total, "all are submitted")
        until(lambda: nonempty_lists(client) == [], "all batches are finished")
    for producer in producers:
        producer.join()
    assert sorted(one["n"] for one in messages_of(store)) == list(range(total))


def test_a_key_that_is_not_a_list_is_an_error_until_it_is_corrected(
    redis_server: RedisProcess, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "RETRY_S", (0.001, 0.01))
    client.set(LIST, "text")
    store = MemoryStore()
    with ingesting(redis_server, store) as ingester:
        until(lambda: "WRONGTYPE" in ingester.get_status()["error"], "it reports the error")
        client.delete(LIST)
        push(client, {"n": 1})
        until(lambda: messages_of(store) == [{"n": 1}], "it continues")
        until(lambda: ingester.get_status()["error"] == "", "the error is over")
