"""A bucket of an S3 server on this machine, for tests of tables in object stores."""

from __future__ import annotations

import urllib.request
import uuid
import warnings
from typing import TYPE_CHECKING

import pytest

from backfill_aids import Bucket

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moto.server import ThreadedMotoServer

        running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(s3_server: str) -> Bucket:
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
