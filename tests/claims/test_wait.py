"""Messages of a waiting run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from claims.test_fair_share import L40S, cpu, gpu, owner
from dovetail.claims import wait
from dovetail.claims.sqlite_store import ClaimRequest, MachineClaimStore, Wait
from dovetail.claims.wait import WaitReport, wait_for_claim
from dovetail.resources.amounts import cluster_capacity, sum_seats
from dovetail.resources.seat import CardShare, Seat

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = dt.Cluster.of("1x(8cpu, 64GB, 2xL40S:48GB, licence=2)")
CAPACITY = cluster_capacity(MACHINE)


def test_only_missing_resources_and_their_holders_are_named() -> None:
    others = (owner("a", granted=sum_seats([gpu(1000), cpu(2)])), owner("b", granted=sum_seats([cpu(1)])))
    mine = owner("me", granted=sum_seats([cpu(4)]))
    need = sum_seats([Seat("node-0", 4000, 0, (CardShare(0, 500, L40S // 2, 1),), (("licence", 1000),))])
    report = WaitReport(Wait(mine, others, can_begin=False, will_fit=True), need, CAPACITY)
    assert report.needs == "1 licence, 0.5 GPUs, 24GB GPU memory, 1 NVDEC"
    assert report.holders == (
        "run a (pid 1) holds 0 of 2 licence, 1 of 2 GPUs, 48GB of 96GB GPU memory, 0 of 6 NVDECs",
    )
    assert report.text(12.4).endswith(" for 12 s; it will release them at its next replan")


def test_of_many_the_first_are_named() -> None:
    others = tuple(owner(f"run-{number}", granted=sum_seats([cpu(1)])) for number in range(5))
    report = WaitReport(Wait(owner("me"), others, can_begin=False, will_fit=False), sum_seats([cpu(1)]), CAPACITY)
    assert report.text(0.0) == (
        "waiting for 1 CPU: run run-0 (pid 1) has held 1 of 8 CPUs for 0 s, run run-1 (pid 1) has held 1 of 8 CPUs for "
        "0 s, run run-2 (pid 1) has held 1 of 8 CPUs for 0 s, and 2 more; "
        "this run begins when enough of them have ended"
    )


def test_a_message_is_repeated_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "MESSAGE_INTERVAL_S", 0.0)
    monkeypatch.setattr(wait, "RETRY_S", 0.0)
    monkeypatch.setattr(wait, "POLL_S", 0.001)
    asked: list[int] = []

    class Book(MachineClaimStore):
        def request(self, about: ClaimRequest, *args: object, **named: object) -> Wait:
            asked.append(1)
            held = 8 if len(asked) < 4 else 7
            others = (owner("a", granted=sum_seats([cpu(held)])),)
            if len(asked) > 6:
                raise KeyboardInterrupt
            return Wait(owner("me"), others, can_begin=False, will_fit=True)

    messages: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        wait_for_claim(
            Book(tmp_path / "ledger.db", "here", MACHINE), ClaimRequest("me"), (cpu(4),), say=messages.append
        )
    assert [line.split("has held ")[1].split(" for ")[0] for line in messages] == ["8 of 8 CPUs", "7 of 8 CPUs"]
