"""The clock of the SQLite store: steps of the system's clock, later processes, reboots."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from dovetail.jobs.stores import boot_clock
from dovetail.jobs.stores.sqlite_store import SqliteStore
from jobs.store_contract import SECOND, spec

if TYPE_CHECKING:
    from pathlib import Path

STEP_S = 600


class Machine:
    """A machine whose clocks the test sets."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.unix_ms = 1_700_000_000_000
        self.boot_ms = 5_000
        self.boot = "boot-1"
        patch.setattr(boot_clock, "unix_ms", lambda: self.unix_ms)
        patch.setattr(boot_clock, "since_boot_ms", lambda: self.boot_ms)
        patch.setattr(boot_clock, "boot_id", lambda: self.boot)

    def run(self, milliseconds: int) -> None:
        self.unix_ms += milliseconds
        self.boot_ms += milliseconds

    def reboot(self, down_ms: int) -> None:
        self.unix_ms += down_ms
        self.boot_ms = 1_000
        self.boot += "+"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_clock_counts_like_unix_time(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        assert abs(store.now_ms() - time.time_ns() // 1_000_000) < 5 * SECOND


@pytest.mark.parametrize("step_s", [-STEP_S, STEP_S])
def test_a_step_of_the_systems_clock_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """The same holds for a process that starts after the step."""
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        before = store.now_ms()
        real_ns, real_s = time.time_ns, time.time
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + step_s * 10**9)
        monkeypatch.setattr(time, "time", lambda: real_s() + step_s)
        with closing(SqliteStore(tmp_path / "jobs.db")) as later:
            assert before <= store.now_ms() <= later.now_ms() <= before + 60 * SECOND
            later.submit([spec("a")])
            [record] = store.get(["a"])
            assert record is not None
            assert before <= record.submitted_ms <= before + 60 * SECOND


def test_all_processes_agree_on_the_time(tmp_path: Path, machine: Machine) -> None:
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        machine.unix_ms += 10_000
        with closing(SqliteStore(tmp_path / "jobs.db")) as later:
            assert later.now_ms() == store.now_ms() == 1_700_000_000_000
            machine.run(70)
            assert later.now_ms() == store.now_ms() == 1_700_000_000_070


def test_after_a_reboot_the_clock_is_set_by_the_systems_clock(tmp_path: Path, machine: Machine) -> None:
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        store.submit([spec("a")])
        began = store.now_ms()
    machine.reboot(down_ms=60_000)
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        assert store.now_ms() == began + 60_000
        machine.run(5)
        assert store.now_ms() == began + 60_005


def test_after_a_reboot_the_clock_does_not_go_back(tmp_path: Path, machine: Machine) -> None:
    """Even if the machine has lost its time."""
    latest = 0
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        for number in range(50):
            store.submit([spec(f"{number}")])
            latest = store.now_ms()
            machine.run(3_000)
    machine.reboot(down_ms=-(10**12))
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        assert latest <= store.now_ms() <= latest + 20_000


def test_without_an_id_of_the_boot_the_clock_is_unix_time(tmp_path: Path, machine: Machine) -> None:
    machine.boot = ""
    SqliteStore(tmp_path / "jobs.db").close()
    machine.reboot(down_ms=1_000)
    machine.boot = ""
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        assert store.now_ms() == machine.unix_ms
