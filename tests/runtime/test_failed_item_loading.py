"""Failed items are recorded without opening a payload for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.engines.local.payload_table import PayloadTable
from runtime.aids import CLUSTER
from waiting import time_limit

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.control.payload import Segment


def no_number(_number: int) -> int:
    raise ValueError("no")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("durable", [True, False])
def test_a_payload_is_opened_once_for_all_its_failed_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    opened: list[int] = []
    real = PayloadTable.load

    def load(table: PayloadTable, segment: Segment) -> Any:
        opened.append(segment.id)
        return real(table, segment)

    monkeypatch.setattr(PayloadTable, "load", load)
    sink = str(tmp_path / "out.jsonl") if durable else None
    stage = dt.Stage("fails", dt.each(no_number), batch_size=100, on_error="skip", retries=0)
    run = dt.run([stage], range(3000), sink=sink, cluster=CLUSTER, profiles=False)
    with time_limit():
        run.wait()
    assert len(run.errors) == 3000
    assert run.stats.units[0].started <= 10, "workers whose items all fail are not replaced endlessly"
    assert len(set(opened)) < 300, "payloads have many items"
    assert len(opened) <= 3 * len(set(opened)), "for the journal, for the commit log and for `run.errors`"
