"""Rules for every test: pure packages are tested without processes, sleep or sockets, hypothesis repeats little
in `make test` and much in `make test-long`, and the tests that need Ray run in one group, with one Ray."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ray_aids import FakeCluster
    from redis_aids import RedisProcess

PURE = ("resources", "pipeline", "scheduling", "control", "streaming")

THREADS = ("backfill", "cli", "job_runs", "recipes", "runtime")
"""Folders whose tests run workers as threads, except those marked `processes` or `ray`."""

RAY_FIXTURES = {"ray_cluster", "ray_address"}

# the same examples every time, so that a change is judged by what it changed; `make test-long` looks for new ones
common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", common, max_examples=15, derandomize=True)
settings.register_profile("quick", common, max_examples=5, derandomize=True)
settings.register_profile("long", common, max_examples=500)
QUICK, LONG = "DOVETAIL_TEST_QUICK" in os.environ, "DOVETAIL_TEST_LONG" in os.environ
settings.load_profile("long" if LONG else "quick" if QUICK else "short")


def _refuse_groups(signal_process: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """A signal to process 0 ends the whole suite and the program that has started it, without a word. 0 is what a
    search for a process finds if there is none."""

    def checked(pid: int, number: int, /) -> None:
        assert pid > 0, f"a signal to process {pid}, that is, to the process group of the tests"
        signal_process(pid, number)

    return checked


os.kill, os.killpg = _refuse_groups(os.kill), _refuse_groups(os.killpg)

# a suite started in the background or by nohup ignores these signals, and all programs that it starts would, too
for ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored is signal.SIGINT else signal.SIG_DFL)


def _append_group(item: Any, group: str) -> None:
    """Append the group to the id of the test for the scheduler of xdist, which sets an attribute that pytest 9.2 does
    not read any more (pytest-dev/pytest-xdist#1386). Appended twice it is still one group."""
    if os.environ.get("PYTEST_XDIST_WORKER") and hasattr(item, "_id"):
        item._id = type(item._id).parse(f"{item.nodeid}@{group}")


def _place(item: pytest.Item) -> int:
    """Tests that share an attachment to Ray follow each other."""
    if item.get_closest_marker("ray") is None:
        return 2
    return 1 if item.get_closest_marker("own_attachment") else 0


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups and -m at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on Ray run in one process, and first, because they are the longest chain: two Rays on two cores take longer
    than one. Tests marked `long` or `bar` run only in `make test-long`."""
    for item in items:
        if item.get_closest_marker("ray") or RAY_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.xdist_group("ray"))
        group = item.get_closest_marker("xdist_group")
        if group is not None:
            _append_group(item, group.args[0])
    items.sort(key=_place)
    if os.environ.get("DOVETAIL_TEST_LONG"):
        return
    skip = pytest.mark.skip(reason="long: runs in `make test-long`")
    for item in items:
        if {"long", "bar"} & set(item.keywords):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exclude all that exists now from garbage collection: half a million objects, mostly of libraries and tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_run_goes_to_the_users_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["DOVETAIL_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True, scope="session")
def _no_ray_is_found_by_accident() -> Iterator[None]:
    """Unset the address of a Ray and use a temporary folder for Ray, which is removed (see `ray_aids.short_folder`)."""
    from ray_aids import QUIET, short_folder

    os.environ.pop("RAY_ADDRESS", None)
    folder = short_folder()
    os.environ.update(QUIET, RAY_TMPDIR=str(folder))
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[FakeCluster]:
    """Cluster of the four nodes a to d of `ray_aids.NODES` for all tests; a test that kills a node adds one."""
    import ray_aids

    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'dovetail-ml[ray]'")
    try:
        cluster = ray_aids.start()
    except ray_aids.RayWouldNotStart as failure:
        pytest.fail(f"Ray does not start on this machine: {failure}", pytrace=False)
    yield cluster
    _leave_ray()
    cluster.close()


_attached = pytest.StashKey[str]()
"""Attachment to Ray of the test that ran last: "shared", or the test's file if it does not share one."""


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Detach before a test that needs another attachment than the one before: a process has one Ray at a time. A new
    attachment costs new agents, so all tests on Ray share one, except those marked `own_attachment`."""
    is_shared = item.get_closest_marker("ray") and not item.get_closest_marker("own_attachment")
    wanted = "shared" if is_shared else str(item.path)
    if item.config.stash.get(_attached, "") != wanted:
        item.config.stash[_attached] = wanted
        _leave_ray()


def _is_attached() -> bool:
    return bool(getattr(sys.modules.get("ray"), "is_initialized", bool)())


def _leave_ray() -> None:
    if not _is_attached():
        return
    import ray

    from dovetail.engines.ray.attachment import detach

    detach()
    if ray.is_initialized():
        ray.shutdown()


@pytest.fixture(autouse=True)
def _ray_is_used_by_its_tests_only(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restore the SIGTERM handler, which `ray.init` replaces. Fail other tests that attach, as many functions of Ray do
    by themselves: a Ray of one's own takes several CPU-seconds."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if request.node.get_closest_marker("ray"):
        signal.signal(signal.SIGTERM, before)
    elif _is_attached():
        _leave_ray()
        pytest.fail("a test without the mark `ray` has started a Ray or attached to one", pytrace=False)


@pytest.fixture(autouse=True)
def _time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """The time limit of a test with the mark `time_limit`."""
    mark = request.node.get_closest_marker("time_limit")
    if mark is None:
        yield
        return
    from waiting import time_limit

    with time_limit(*mark.args):
        yield


@pytest.fixture
def ray_address(ray_cluster: FakeCluster) -> str:
    """`host:port`, as in `--engine ray:HOST:PORT`."""
    return ray_cluster.address


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local runs of this test use threads instead of worker processes; see `in_process.py`."""
    from in_process import InProcessEngine

    monkeypatch.setattr("dovetail.engines.local.engine.LocalEngine", InProcessEngine)


@pytest.fixture
def by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Functions and classes of this test module, and of the modules in its `BY_VALUE`, travel to workers by value. A
    worker that imports them imports pytest and NumPy with the module, which costs twice as much as the rest of a small
    run."""
    import cloudpickle

    modules = (request.module, *getattr(request.module, "BY_VALUE", ()))
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(autouse=True)
def _threads_unless_processes_are_tested(request: pytest.FixtureRequest) -> None:
    """Workers that are threads start ten times faster."""
    folder = Path(str(request.node.fspath)).parent.name
    if folder in THREADS and not {"processes", "ray"} & set(request.node.keywords):
        request.getfixturevalue("in_process")
    elif folder == "runtime":
        request.getfixturevalue("by_value")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of an S3 server on this machine; tests create their buckets."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moto.server import ThreadedMotoServer

        running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisProcess]:
    """A redis-server of this test process, in memory only; each test uses a prefix of its own."""
    from redis_aids import run_server

    yield from run_server()


@pytest.fixture(autouse=True)
def _pure_tests_touch_nothing_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(str(request.node.fspath)).parent.name
    if folder not in PURE or "outside" in request.keywords:
        return

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise AssertionError(f"a test of the pure package {folder!r} reaches outside")

    for owner, name in ((time, "sleep"), (socket, "socket"), (subprocess, "Popen"), (os, "fork")):
        monkeypatch.setattr(owner, name, refuse)
