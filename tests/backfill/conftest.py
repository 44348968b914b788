"""A bucket of an S3 server on this machine, for tests of tables in object stores; and what functions were asked for."""

from __future__ import annotations

import urllib.request
import uuid
from typing import TYPE_CHECKING

import pytest

from backfill_aids import Bucket, Calls
from fill_functions import LOG

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of functions that write down what they are asked for."""
    folder = tmp_path / "calls"
    folder.mkdir()
    monkeypatch.setenv(LOG, str(folder))
    return Calls(folder)
