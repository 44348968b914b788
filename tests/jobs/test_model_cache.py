"""Cached models of one process: single flight, pins, evictions, memory for jobs."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dovetail.errors import ConfigError, DovetailError, InfeasibleError
from dovetail.jobs.workers.model_cache import JobModels, NoModels
from dovetail.jobs.workers.model_ledger import LocalPort, ModelLedger
from dovetail.jobs.workers.worker_capacity import WorkerCapacity, node_amounts
from dovetail.resources.cluster import Cluster
from dovetail.resources.resources import Resources
from waiting import PATIENCE_S, until

GB = 1 << 30


class Model:
    """Counts how often it was loaded and closed."""

    loads = 0
    closed: list[str] = []  # noqa: RUF012 - reset by each test

    def __init__(self, name: str) -> None:
        self.name = name
        type(self).loads += 1

    def close(self) -> None:
        self.closed.append(self.name)


class Fixture:
    def __init__(self, spec: str = "4cpu, 10GB") -> None:
        Model.loads = 0
        Model.closed = []
        node = Cluster.parse(spec).nodes[0]
        self.capacity = WorkerCapacity(node, 4)
        self.capacity.set_limit(node_amounts(node))
        self.woken = threading.Event()
        self.ledger = self.capacity.models = ModelLedger(self.capacity, self.woken.set)
        self.cache = LocalPort(self.ledger).cache

    def job(self) -> JobModels:
        return JobModels(self.cache)

    def used(self) -> int:
        held, _ = self.capacity.usage()
        return sum(amount for (_, _, what), amount in held.items() if what == "memory_bytes")

    def get(self, job: JobModels, name: str, size: str | int, device: object = None) -> Model:
        return job.get(name, lambda: Model(name), bytes=size, device=device)

    def counts(self) -> dict[str, Any]:
        return self.ledger.status()

    def keys(self) -> set[str]:
        return {model["key"] for model in self.counts()["models"]}


@pytest.fixture
def models() -> Fixture:
    return Fixture()


def test_a_model_is_loaded_once_and_kept_for_later_jobs(models: Fixture) -> None:
    first, second = models.job(), models.job()
    found = models.get(first, "a", "4GB")
    first.release_all()
    assert models.get(second, "a", "4GB") is found
    assert (Model.loads, models.used()) == (1, 4 * GB)
    assert {name: models.counts()[name] for name in ("hits", "misses", "loads")} == {"hits": 1, "misses": 1, "loads": 1}


def test_fifty_concurrent_requests_make_one_load(models: Fixture) -> None:
    all_ask = threading.Barrier(50)
    go = threading.Event()

    def load() -> Model:
        assert go.wait(PATIENCE_S)
        return Model("a")

    def ask() -> Model:
        all_ask.wait(PATIENCE_S)
        return models.job().get("a", load, bytes="1GB")

    with ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(ask) for _ in range(50)]
        until(lambda: models.counts()["misses"] == 1)
        go.set()
        assert len({id(one.result(PATIENCE_S)) for one in asked}) == 1
    assert (Model.loads, models.used()) == (1, GB)
    assert models.counts()["hits"] == 49


def test_the_bytes_are_reserved_before_the_load(models: Fixture) -> None:
    used: list[int] = []
    models.job().get("a", lambda: used.append(models.used()), bytes="3GB")
    assert used == [3 * GB]


def test_a_model_in_use_is_never_evicted_and_an_idle_one_is_closed_first(models: Fixture) -> None:
    busy, done = models.job(), models.job()
    models.get(busy, "busy", "4GB")
    models.get(done, "idle", "4GB")
    done.release_all()
    models.get(models.job(), "new", "4GB")
    assert (models.keys(), Model.closed, models.used()) == ({"busy", "new"}, ["idle"], 8 * GB)
    assert models.counts()["evictions"] == 1


def test_a_job_waits_for_memory_until_another_one_has_ended(models: Fixture) -> None:
    busy = models.job()
    models.get(busy, "busy", "8GB")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(models.get, models.job(), "new", "8GB")
        until(lambda: models.counts()["waiting"] == 1)
        assert not asked.done()
        busy.release_all()
        assert asked.result(PATIENCE_S).name == "new"
    assert (Model.closed, models.used()) == (["busy"], 8 * GB)


def test_a_job_that_holds_models_does_not_wait_for_others(models: Fixture) -> None:
    one, other = models.job(), models.job()
    models.get(one, "a", "5GB")
    models.get(other, "b", "5GB")
    with pytest.raises(InfeasibleError, match="no memory for the model 'c'"):
        models.get(one, "c", "5GB")
    one.release("a")
    assert models.get(one, "c", "5GB").name == "c"


def test_using_releases_at_the_end_of_the_block(models: Fixture) -> None:
    job = models.job()
    for name in ("a", "b", "c"):
        with job.using(name, lambda name=name: Model(name), bytes="8GB") as model:  # type: ignore[misc]
            assert model.name == name
    assert Model.closed == ["a", "b"]


def test_a_model_that_is_too_large_is_refused_at_once(models: Fixture) -> None:
    with pytest.raises(InfeasibleError, match="it needs 20GB of memory, and the worker may use 10GB"):
        models.get(models.job(), "a", "20GB")
    assert (models.used(), models.counts()["waiting"]) == (0, 0)


def test_a_failed_load_is_not_kept_and_fails_only_the_jobs_that_asked(models: Fixture) -> None:
    began, go = threading.Event(), threading.Event()

    def fail() -> Model:
        began.set()
        assert go.wait(PATIENCE_S)
        raise OSError("no weights")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(models.job().get, "a", fail, bytes="4GB")
        assert began.wait(PATIENCE_S)
        second = pool.submit(models.job().get, "a", fail, bytes="4GB")
        go.set()
        for one in (first, second):
            with pytest.raises(OSError, match="no weights"):
                one.result(PATIENCE_S)
    assert models.used() == 0
    assert models.get(models.job(), "a", "4GB").name == "a"


def test_memory_of_idle_models_counts_as_free_and_a_job_gets_it(models: Fixture) -> None:
    job = models.job()
    models.get(job, "a", "8GB")
    shape = Resources(cpus=1, memory="6GB").shape()
    assert models.capacity.claimable().memory_bytes == 2 * GB
    job.release_all()
    assert models.capacity.claimable().memory_bytes == 10 * GB
    assert models.capacity.try_take(shape) == (False, None)
    models.capacity.make_room(shape)
    assert models.woken.wait(PATIENCE_S)
    fits, seat = models.capacity.try_take(shape)
    assert fits
    assert seat is not None
    assert (Model.closed, models.used()) == (["a"], 6 * GB)


def test_memory_that_jobs_hold_is_not_for_models(models: Fixture) -> None:
    fits, seat = models.capacity.try_take(Resources(cpus=1, memory="6GB").shape())
    assert fits
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(models.get, models.job(), "a", "8GB")
        until(lambda: models.counts()["waiting"] == 1)
        models.capacity.release(seat)
        models.ledger.on_job_ended()
        asked.result(PATIENCE_S)
    assert models.used() == 8 * GB


def test_models_of_a_card_use_its_memory() -> None:
    models = Fixture("4cpu, 10GB, 2xT4")
    job = models.job()
    models.get(job, "a", "12GB", "cuda:1")
    models.get(job, "a", "9GB", "cpu")
    assert models.counts()["bytes"] == {"gpu1": 12 * GB, "host": 9 * GB}
    free = models.capacity.free()
    assert [card.memory_bytes for card in free.cards.free] == [16 * GB, 4 * GB]


def test_models_above_a_limit_that_became_smaller_are_evicted(models: Fixture) -> None:
    job = models.job()
    models.get(job, "a", "8GB")
    job.release_all()
    models.capacity.set_limit(node_amounts(Cluster.parse("4cpu, 4GB").nodes[0]))
    models.ledger.trim()
    until(lambda: Model.closed == ["a"])
    until(lambda: models.used() == 0)


def test_a_close_that_fails_does_not_keep_the_model(models: Fixture, capfd: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def teardown(self) -> None:
            raise RuntimeError("cannot close")

    job = models.job()
    job.get("a", Broken, bytes="8GB")
    job.release_all()
    models.get(models.job(), "b", "8GB")
    assert models.keys() == {"b"}
    assert "cannot close" in capfd.readouterr().err


def test_coroutines_load_in_a_thread(models: Fixture) -> None:
    async def use() -> list[Model]:
        jobs = [models.job() for _ in range(5)]
        return list(await asyncio.gather(*[job.get_async("a", lambda: Model("a"), bytes=GB) for job in jobs]))

    assert len(set(map(id, asyncio.run(use())))) == 1

    async def block() -> None:
        models.get(models.job(), "a", GB)

    with pytest.raises(ConfigError, match="would block the event loop"):
        asyncio.run(block())


@pytest.mark.parametrize(
    ("key", "size", "device", "text"),
    [
        ("", GB, None, "key="),
        ("a", "much", None, "bytes="),
        ("a", 0, None, "bytes="),
        ("a", GB, "tpu", "device="),
        ("a", GB, -2, "device="),
    ],
)
def test_bad_arguments_are_refused(models: Fixture, key: str, size: str | int, device: object, text: str) -> None:
    with pytest.raises(DovetailError, match=text):
        models.get(models.job(), key, size, device)
    assert models.used() == 0


def test_a_process_of_its_own_has_no_cache() -> None:
    with pytest.raises(ConfigError, match="process of its own") as caught:
        NoModels().get("a", Model, bytes=GB)  # type: ignore[arg-type]
    assert caught.value.problems[0].fix_texts[0] == 'isolation="warm_process"'
