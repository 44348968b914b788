"""Fixtures: a bucket of a local S3 server, the records of computed rows, and the end of staged workers."""

from __future__ import annotations

import threading
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from backfill_aids import WARM_BOOTSTRAP_CODE, Bucket, Calls
from fill_functions import LOG
from staged_backfill import WORKERS
from warm_process import SINGLE_THREADED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moto.s3.responses import S3Response

ONE_AT_A_TIME = threading.Lock()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Bucket of a server that, as S3 itself, checks and writes in one step if it may write only a missing object."""
    from moto.s3.responses import S3Response

    put = S3Response.put_object

    def in_one_step(self: S3Response) -> Any:
        with ONE_AT_A_TIME:
            return put(self)

    monkeypatch.setattr(S3Response, "put_object", in_one_step)
    name = f"bucket-{uuid.uuid4().hex}"
    with urllib.request.urlopen(urllib.request.Request(f"{s3_server}/{name}", method="PUT")) as answer:
        assert answer.status == 200
    storage = {
        "aws_endpoint": s3_server,
        "allow_http": "true",
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "aws_region": "us-east-1",
    }
    return Bucket(f"s3://{name}", storage)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls that the functions of the test recorded."""
    folder = tmp_path / "calls"
    folder.mkdir()
    monkeypatch.setenv(LOG, str(folder))
    return Calls(folder)


@pytest.fixture(autouse=True)
def _worker_processes_start_warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server of tests with the mark `processes` has imported Lance: they kill many workers."""
    if request.node.get_closest_marker("processes") is not None:
        monkeypatch.setattr("dovetail.engines.local.forkserver_client.BOOTSTRAP_CODE", WARM_BOOTSTRAP_CODE)
        for name, value in SINGLE_THREADED.items():
            monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _workers_of_staged_backfills_end() -> Iterator[None]:
    """Tear down the workers of `staged_backfill.Staged`: their watchdogs are threads of this process, which other tests
    would find."""
    yield
    while WORKERS:
        WORKERS.pop().teardown()
