"""Claim store of a machine: contents of ledger.db, and damaged or foreign files."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from claims.test_fair_share import cards_of, cpu, cpus_of, gpu
from dovetail.claims.owner import Owner
from dovetail.claims.serialization import APPLICATION_ID, SCHEMA_VERSION, owner_from_row, owner_to_row
from dovetail.claims.sqlite_store import STALE_HEARTBEAT_S, ClaimRequest, Grant, MachineClaimStore, Wait
from dovetail.claims.wait import wait_for_claim
from dovetail.errors import ConfigError, InfeasibleError
from dovetail.resources.amounts import add_amounts, fits_within, subtract_amounts, sum_seats

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.claims.owner import ProcessId

MACHINE = dt.Cluster.of("1x(8cpu, 64GB, 2xL40S:48GB)")


def a_book(path: Path, machine: str = "here") -> MachineClaimStore:
    return MachineClaimStore(path / "sub" / "ledger.db", machine, MACHINE)


def granted(answer: Grant | Wait) -> Grant:
    assert isinstance(answer, Grant)
    return answer


def test_the_first_gets_everything_and_a_second_waits_for_it_to_give_back(tmp_path: Path) -> None:
    book = a_book(tmp_path)
    first = granted(book.request(ClaimRequest("first"), (gpu(250),)))
    assert first.reserved == ()
    second = ClaimRequest("second")
    wait = book.request(second, (gpu(250),))
    assert isinstance(wait, Wait)
    assert (wait.can_begin, wait.will_fit, [other.name for other in wait.others]) == (False, True, ["first"])
    row = book.update(first.owner, {}, first.owner.limit)
    assert row.granted == first.owner.granted, "it has not read the new limit yet"
    assert cpus_of(row.limit) == 4000
    row = book.update(row, {}, row.limit)
    assert row.granted == row.limit
    grant = granted(book.request(second, (gpu(250),)))
    assert cpus_of(grant.owner.granted) == 4000
    assert cards_of(grant.owner.limit) != cards_of(row.limit)
    assert sum_seats(grant.reserved) == subtract_amounts(book.capacity, grant.owner.limit)
    book.release(first.owner.id)
    assert [other.name for other in book.others("")] == ["second"]
    assert book.update(grant.owner, {}, grant.owner.limit).limit == book.capacity


def test_what_is_still_held_is_not_given_to_others(tmp_path: Path) -> None:
    book = a_book(tmp_path)
    first = granted(book.request(ClaimRequest("first"), (cpu(1),))).owner
    second = ClaimRequest("second")
    book.request(second, (cpu(2),))
    held = sum_seats([cpu(7)])
    row = book.update(first, held, add_amounts(held, {}))
    assert cpus_of(row.granted) == 7000
    wait = book.request(second, (cpu(2),))
    assert isinstance(wait, Wait)
    assert not wait.can_begin
    assert cpus_of(wait.owner.granted) == 1000
    book.update(row, sum_seats([cpu(6)]), sum_seats([cpu(6)]))
    assert isinstance(book.request(second, (cpu(2),)), Wait)
    assert isinstance(book.request(second, (cpu(2),), accept_minimum=True), Grant)


def test_only_those_of_the_same_machine_share(tmp_path: Path) -> None:
    granted(a_book(tmp_path, "one").request(ClaimRequest("a"), (cpu(8),)))
    granted(a_book(tmp_path, "other").request(ClaimRequest("b"), (cpu(8),)))


def test_a_row_reads_back_the_same(tmp_path: Path) -> None:
    book = a_book(tmp_path)
    row = granted(book.request(ClaimRequest("a"), (gpu(250), cpu(1)), (gpu(500),))).owner
    assert book.owners() == [row]
    assert owner_from_row(owner_to_row(row, "here", {}), {}) == row


def test_of_those_in_other_containers_the_heartbeat_tells(tmp_path: Path) -> None:
    now = [1000.0]

    def always_unknown(process: ProcessId) -> bool | None:
        return None

    book = MachineClaimStore(tmp_path / "ledger.db", "here", MACHINE, wall=lambda: now[0], alive=always_unknown)
    book.request(ClaimRequest("a"), (cpu(1),))
    now[0] += STALE_HEARTBEAT_S - 1
    assert len(book.owners()) == 1
    now[0] += 2
    assert book.owners() == []


def test_a_heartbeat_alone_is_written_rarely(tmp_path: Path) -> None:
    now = [1000.0]
    book = MachineClaimStore(tmp_path / "ledger.db", "here", MACHINE, wall=lambda: now[0])
    row = granted(book.request(ClaimRequest("a"), (cpu(1),))).owner
    assert book.has_changed()
    assert not book.has_changed()
    now[0] += 1.0
    book.update(row, {}, row.limit)
    assert not book.has_changed()
    now[0] += 5.0
    book.update(row, {}, row.limit)
    assert book.has_changed()
    (tmp_path / "ledger.db").unlink()
    assert book.has_changed()
    assert book.update(row, {}, row.limit) == replace(row, heartbeat=now[0]), "it is written again"
    assert len(book.owners()) == 1


@pytest.mark.parametrize("content", [b"not a database at all " * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        MachineClaimStore(path, "here", MACHINE).request(ClaimRequest("a"), (cpu(1),))
    assert caught.value.codes == ("DT320",)
    assert f"rm {path}" in str(caught.value)


def test_a_database_of_an_earlier_version_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE claims (id TEXT PRIMARY KEY, machine)")
        db.execute("INSERT INTO claims VALUES ('old', 'here')")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION - 1}")
        db.commit()
    store = MachineClaimStore(path, "here", MACHINE)
    assert store.owners() == []
    assert isinstance(store.request(ClaimRequest("a"), (cpu(1),)), Grant)
    assert [owner.name for owner in store.owners()] == ["a"]


def test_a_database_of_another_program_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    with pytest.raises(ConfigError, match="another program"):
        MachineClaimStore(path, "here", MACHINE).owners()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    db.close()


def test_an_invalid_row_is_one_clear_error(tmp_path: Path) -> None:
    book = a_book(tmp_path)
    book.request(ClaimRequest("a"), (cpu(1),))
    with sqlite3.connect(book.path) as db:
        db.execute("UPDATE claims SET granted = '[{}]'")
    db.close()
    with pytest.raises(ConfigError, match="invalid row"):
        book.owners()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        MachineClaimStore(tmp_path / "file" / "ledger.db", "here", MACHINE).owners()
    assert caught.value.codes == ("DT321",)
    assert "DOVETAIL_HOME" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_leave_to_write_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="DT321"):
            MachineClaimStore(tmp_path / "ledger.db", "here", MACHINE).owners()
    finally:
        tmp_path.chmod(0o700)


def seeing(path: Path, *uuids: str) -> MachineClaimStore:
    cards = tuple(dt.Gpu.of("L40S", uuid=uuid) for uuid in uuids)
    return MachineClaimStore(path / "ledger.db", "here", dt.Cluster((dt.Node("node-0", 8000, 64 << 30, cards),)))


def test_runs_that_see_different_cards_do_not_share_them(tmp_path: Path) -> None:
    one, other = seeing(tmp_path, "u0"), seeing(tmp_path, "u1")
    first = granted(one.request(ClaimRequest("a"), (gpu(1000),))).owner
    second = ClaimRequest("b")
    assert isinstance(other.request(second, (gpu(1000),)), Wait), "for CPUs"
    row = one.update(first, {}, {})
    assert cards_of(row.limit) == [0]
    assert cpus_of(row.limit) == 4000
    grant = granted(other.request(second, (gpu(1000),)))
    assert cards_of(grant.owner.limit) == [0]


def test_a_card_is_the_same_card_at_whichever_position(tmp_path: Path) -> None:
    whole, part = seeing(tmp_path, "u0", "u1"), seeing(tmp_path, "u1")
    granted(part.request(ClaimRequest("a"), (gpu(1000),)))
    [seen] = whole.owners()
    assert cards_of(seen.granted) == [1]
    assert [seat.gpus for seat in seen.need] == [(1,)]
    [seen] = seeing(tmp_path, "", "").owners()
    assert cards_of(seen.granted) == [0], "what has no uuid is known by its position"
    [seen] = seeing(tmp_path).owners()
    assert cards_of(seen.granted) == []


# --- waiting


def asked_at_once(since: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting run sees no time pass, however busy the machine is."""
    clock = SimpleNamespace(time=lambda: since, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr("dovetail.claims.wait.time", clock)


def test_a_waiting_run_prints_the_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = a_book(tmp_path)
    first = granted(book.request(ClaimRequest("fill-20261116"), (cpu(1),))).owner
    asked_at_once(first.since, monkeypatch)
    messages: list[str] = []
    stop = threading.Event()

    def say(text: str) -> None:
        messages.append(text)
        stop.set()

    assert wait_for_claim(book, ClaimRequest("next"), (cpu(4),), say=say, stop=stop) is None
    assert messages == [
        f"waiting for 4 CPUs: run fill-20261116 (pid {os.getpid()}) has held 8 of 8 CPUs for 0 s; "
        "it will release them at its next replan"
    ]
    assert [owner.id for owner in book.owners()] == [first.id], "a run that gives up leaves no claim"


def test_a_run_that_can_never_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = a_book(tmp_path)
    asked_at_once(granted(book.request(ClaimRequest("a"), (cpu(5),))).owner.since, monkeypatch)
    messages: list[str] = []
    stop = threading.Event()

    def say(text: str) -> None:
        messages.append(text)
        stop.set()

    wait_for_claim(book, ClaimRequest("b"), (cpu(4),), say=say, stop=stop)
    assert "has held 8 of 8 CPUs for 0 s" in messages[0]
    assert "it is a run of this program" in messages[0]  # so the caller that should read its results must not wait


def test_a_run_that_waits_for_another_program_prints_that_it_starts_when_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = a_book(tmp_path)
    granted(book.request(ClaimRequest("a"), (cpu(5),)))
    monkeypatch.setattr("dovetail.claims.wait.os.getpid", lambda: -1)
    messages: list[str] = []
    stop = threading.Event()

    def say(text: str) -> None:
        messages.append(text)
        stop.set()

    wait_for_claim(book, ClaimRequest("b"), (cpu(4),), say=say, stop=stop)
    assert messages[0].endswith("this run begins when that one ends")


def test_a_run_that_must_not_wait_is_refused_with_evidence(tmp_path: Path) -> None:
    book = a_book(tmp_path)
    granted(book.request(ClaimRequest("first"), (gpu(1000), cpu(2))))
    with pytest.raises(InfeasibleError) as caught:
        wait_for_claim(book, ClaimRequest("next"), (gpu(500, cpus=2000),), say=print, no_wait=True)
    assert caught.value.codes == ("DT120",)
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "the run needs 2 CPUs, 0.5 GPUs, 24GB GPU memory to begin" in text
    assert f"run first (pid {os.getpid()}) holds 8 of 8 CPUs, 2 of 2 GPUs, 96GB of 96GB GPU memory" in text
    assert "dovetail drain first" in text
    assert len(book.owners()) == 1


def test_a_run_that_need_not_wait_prints_nothing(tmp_path: Path) -> None:
    book = a_book(tmp_path)
    grant = wait_for_claim(book, ClaimRequest("a"), (cpu(1),), say=pytest.fail, no_wait=True)
    assert grant is not None
    assert not grant.owner.waiting


def test_a_run_starts_with_its_minimum_after_a_limited_wait(tmp_path: Path) -> None:
    book = a_book(tmp_path)
    first = granted(book.request(ClaimRequest("first"), (cpu(1),))).owner
    book.request(ClaimRequest("second", "2"), (cpu(1),))
    held = sum_seats([cpu(6)])
    book.update(first, held, held)
    grant = wait_for_claim(book, ClaimRequest("second", "2"), (cpu(1),), say=pytest.fail, settle_s=0.2)
    assert grant is not None
    assert cpus_of(grant.owner.limit) == 2000


def test_all_grants_together_fit_the_machine(tmp_path: Path) -> None:
    book = a_book(tmp_path)
    for number in range(5):
        book.request(ClaimRequest(f"run-{number}"), (cpu(1),))
    total: dict[tuple[str, int, str], int] = {}
    for owner in book.owners():
        assert isinstance(owner, Owner)
        total = add_amounts(total, owner.granted)
    assert fits_within(total, book.capacity)
