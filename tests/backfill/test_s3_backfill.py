"""Backfills of tables in an object store, with storage options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import pytest

import dovetail as dt
from backfill_aids import rows_from, twice

if TYPE_CHECKING:
    from pathlib import Path

    from backfill_aids import Bucket

ROWS, EACH = 1_200, 300


@pytest.fixture
def uri(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)  # what workers know they have from the options
    uri = f"{bucket.uri}/t.lance"
    lance.write_dataset(rows_from(0, ROWS), uri, max_rows_per_file=EACH, storage_options=bucket.storage)
    return uri


def values(uri: str, bucket: Bucket, name: str) -> dict[int, Any]:
    rows = lance.dataset(uri, storage_options=bucket.storage).to_table(columns=["id", name])
    return dict(zip(rows["id"].to_pylist(), rows[name].to_pylist(), strict=True))


@dt.udf(version="1")
def doubled(id: int) -> int:  # noqa: A002 - the column's name
    if id == 700:
        raise ValueError("seven hundred")
    return 2 * id


@dt.udf(version="1")
def mended(id: int) -> int:  # noqa: A002
    return 2 * id


def test_a_table_in_s3_is_filled_and_its_failed_rows_are_retried(uri: str, bucket: Bucket) -> None:
    table = dt.table(uri, storage_options=bucket.storage)
    with pytest.raises(ValueError, match="row 8589934692"):
        table.backfill("n", doubled)
    filled = table.backfill("n", doubled, on_error="skip")
    assert (filled.status, filled.errors) == ("finished", 1)
    assert values(uri, bucket, "n") == twice(range(ROWS), [700])
    assert [(error.offset, error.error) for error in table.errors("n")] == [(100, "ValueError")]
    assert table.retry_errors("n", mended).rows == 1
    assert values(uri, bucket, "n") == twice(range(ROWS))
    assert table.errors("n") == []
    again = table.backfill("n", doubled)
    assert (again.rows, again.done_before) == (0, ROWS)
    assert [record.status for record in table.history("n")] == ["failed", "finished", "finished", "finished"]


def test_storage_options_are_not_stored_beside_the_table(uri: str, bucket: Bucket, tmp_path: Path) -> None:
    secret = "a-key-that-nobody-should-see"
    storage = bucket.storage | {"aws_secret_access_key": secret}
    table = dt.table(uri, storage_options=storage)
    table.backfill("n", mended)
    assert secret not in repr(table)
    runs = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert runs, "the run has left its folder"
    assert not [path for path in runs if secret.encode() in path.read_bytes()]


def test_an_address_that_cannot_be_opened_is_one_error_with_a_fix(bucket: Bucket) -> None:
    with pytest.raises(dt.ConfigError) as caught:
        dt.table(f"{bucket.uri}/nothing.lance", storage_options=bucket.storage)
    assert caught.value.codes == ("DT430",)
    assert caught.value.problems[0].fix_texts
