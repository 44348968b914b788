"""Rules for every test: pure packages are tested without processes, sleep or sockets, and hypothesis repeats little
in `make test` and much in `make test-long`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

PURE = ("resources", "pipeline", "scheduling", "control", "streaming")

# the same examples every time, so that a change is judged by what it changed; `make test-long` looks for new ones
common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", common, max_examples=60, derandomize=True)
settings.register_profile("long", common, max_examples=500)
settings.load_profile("long" if os.environ.get("DOVETAIL_TEST_LONG") else "short")

# a suite that was started in the background, or by nohup, ignores these, and so would every program that it starts
for ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored is signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `long` run only in `make test-long`."""
    if os.environ.get("DOVETAIL_TEST_LONG"):
        return
    skip = pytest.mark.skip(reason="long: runs in `make test-long`")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _no_run_goes_to_the_users_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["DOVETAIL_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def _pure_tests_touch_nothing_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(str(request.node.fspath)).parent.name
    if folder not in PURE or "outside" in request.keywords:
        return

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise AssertionError(f"a test of the pure package {folder!r} reaches outside")

    for owner, name in ((time, "sleep"), (socket, "socket"), (subprocess, "Popen"), (os, "fork")):
        monkeypatch.setattr(owner, name, refuse)
