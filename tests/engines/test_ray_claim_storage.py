"""Claims in the key-value store of a Ray cluster: serialized changes, locks of dead drivers."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ray_aids import driver, patiently
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.engines.ray.claim_storage import KvClaimRows
    from ray_aids import FakeCluster

pytestmark = [pytest.mark.ray, pytest.mark.own_attachment]


@pytest.fixture(scope="module", autouse=True)
def _attached(ray_cluster: FakeCluster) -> Iterator[None]:
    import ray

    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> Iterator[KvClaimRows]:
    """A claim store of its own."""
    from dovetail.engines.ray.claim_storage import KvClaimRows

    found = KvClaimRows(request.node.name, lock_s=0.3)
    yield found
    for row in found.read():
        found.delete(row[0])


def row(name: str, since: float, *more: Any) -> tuple[Any, ...]:
    return (name, "", name, 1, "", "", since, *more)


def key(request: pytest.FixtureRequest, name: str) -> str:
    """Key of the store that the test's `rows` use."""
    from dovetail.engines.ray.claim_storage import SCHEMA_VERSION

    return f"{request.node.name}/{SCHEMA_VERSION}/{name}"


def test_rows_are_written_read_and_removed_in_order_of_arrival(rows: KvClaimRows) -> None:
    assert rows.read() == []
    rows.transact(lambda _: ([], row("late", 2.0, None, 1), None))
    assert rows.transact(lambda found: ([], row("early", 1.5, "x"), len(found))) == 1
    assert rows.read() == [row("early", 1.5, "x"), row("late", 2.0, None, 1)]
    rows.transact(lambda _: (["early"], None, None))
    rows.delete("late")
    rows.delete("late")
    assert rows.read() == []


def test_a_change_is_reported_to_others_once(rows: KvClaimRows, request: pytest.FixtureRequest) -> None:
    from dovetail.engines.ray.claim_storage import KvClaimRows

    other = KvClaimRows(request.node.name)
    other.has_changed()
    assert not other.has_changed()
    rows.transact(lambda _: ([], None, None))
    assert not other.has_changed(), "nothing was written"
    rows.transact(lambda _: ([], row("a", 1.0), None))
    assert other.has_changed()
    assert not other.has_changed()
    rows.delete("a")
    assert other.has_changed()


def test_changes_are_serialized(rows: KvClaimRows, request: pytest.FixtureRequest) -> None:
    from dovetail.engines.ray.claim_storage import KvClaimRows

    def count() -> None:
        mine = KvClaimRows(request.node.name, lock_s=30.0)
        for _ in range(10):
            mine.transact(lambda found: ([], row("sum", 1.0, found[0][7] + 1 if found else 1), None))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert rows.read() == [row("sum", 1.0, 40)]


def test_the_lock_of_a_dead_driver_is_broken(rows: KvClaimRows, request: pytest.FixtureRequest) -> None:
    from ray.experimental import internal_kv

    lock = key(request, "lock").encode()
    internal_kv._internal_kv_put(lock, b"somebody", namespace=b"dovetail")
    began = time.monotonic()
    rows.transact(lambda _: ([], row("a", 1.0), None))
    assert 0.3 <= time.monotonic() - began < 20.0
    assert internal_kv._internal_kv_get(lock, namespace=b"dovetail") is None
    assert len(rows.read()) == 1


def test_a_change_is_repeated_if_the_lock_was_lost(rows: KvClaimRows, request: pytest.FixtureRequest) -> None:
    from ray.experimental import internal_kv

    lock = key(request, "lock").encode()
    decided: list[int] = []

    def decide(found: list[tuple[Any, ...]]) -> tuple[list[str], tuple[Any, ...], int]:
        decided.append(len(found))
        if len(decided) == 1:  # another driver breaks the lock, writes and releases it
            internal_kv._internal_kv_del(lock, namespace=b"dovetail")
            other = json.dumps(row("other", 1.0)).encode()
            internal_kv._internal_kv_put(key(request, "row/other"), other, namespace=b"dovetail")
        return [], row("me", 2.0), len(decided)

    assert rows.transact(decide) == 2
    assert decided == [0, 1]
    assert [each[0] for each in rows.read()] == ["other", "me"]


def test_data_in_an_unknown_format_is_one_clear_error(rows: KvClaimRows, request: pytest.FixtureRequest) -> None:
    from ray.experimental import internal_kv

    from dovetail.errors import EngineError

    bad = key(request, "row/bad")
    internal_kv._internal_kv_put(bad, b"{", namespace=b"dovetail")
    try:
        with pytest.raises(EngineError, match="DT397"):
            rows.read()
    finally:
        internal_kv._internal_kv_del(bad, namespace=b"dovetail")


DRIVES = """
import os, time, ray
ray.init(address=os.environ["DOVETAIL_TEST_RAY"], log_to_driver=False, logging_level="ERROR")
from dovetail.engines.ray.claim_storage import DriverLiveness
print("JOB", DriverLiveness.current_job(), "END", flush=True)
time.sleep(600)
"""


def test_a_killed_driver_is_detected_soon(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    from dovetail.engines.ray.claim_storage import DriverLiveness

    drivers = DriverLiveness(again_s=0.0)
    assert drivers.is_alive(drivers.current_job())
    assert drivers.is_alive("ffff0000") is None
    with driver(ray_cluster, tmp_path, DRIVES) as script:
        script.says("END")
        job = script.output.partition("JOB ")[2].split()[0]
        assert drivers.is_alive(job)
        os.kill(script.process.pid, signal.SIGKILL)
        assert until(lambda: drivers.is_alive(job) is False, "Ray knows that it is gone") < patiently(10.0)
