"""Processes that share one ledger never hold more than the machine has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from claims.test_fair_share import cpu
from dovetail.claims.owner import is_alive, this_process
from dovetail.claims.sqlite_store import ClaimRequest, Grant, MachineClaimStore
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

TOY = Path(__file__).with_name("toy_run.py")
CPUS = 8


class Started:
    """Toy runs in one folder; none of them outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[subprocess.Popen[str]] = []

    def __call__(self, name: str) -> subprocess.Popen[str]:
        arguments = [str(self.folder / "ledger.db"), name, str(self.folder), str(CPUS)]
        run = subprocess.Popen([sys.executable, str(TOY), *arguments], stdout=subprocess.PIPE, text=True)
        self.runs.append(run)
        return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    for run in started.runs:
        run.kill()
        run.communicate()


def book(folder: Path) -> MachineClaimStore:
    return MachineClaimStore(folder / "ledger.db", "here", dt.Cluster.of(f"1x({CPUS}cpu, 64GB)"))


def timeline(folder: Path) -> list[tuple[float, str, int]]:
    found = []
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            note = json.loads(line)
            found.append((note["now"], file.stem, note["cpus"]))
    return sorted(found)


def cpus_held(folder: Path) -> list[int]:
    return [sum(owner.held.values()) // 1000 for owner in book(folder).owners()]


def test_three_processes_share_and_never_exceed_the_machine(tmp_path: Path, start: Started) -> None:
    runs = [start(name) for name in ("a", "b")]
    until(lambda: sorted(cpus_held(tmp_path)) == [4, 4])
    runs.append(start("c"))
    until(lambda: sorted(cpus_held(tmp_path)) == [2, 3, 3])
    (tmp_path / "a.stop").touch()
    (tmp_path / "b.stop").touch()
    until(lambda: cpus_held(tmp_path) == [CPUS])
    (tmp_path / "c.stop").touch()
    outputs = [run.communicate(timeout=30)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], outputs
    now: dict[str, int] = {}
    for _, name, cpus in timeline(tmp_path):
        now[name] = cpus
        assert sum(now.values()) <= CPUS, "no more than there is, at any moment"
    assert book(tmp_path).owners() == []


def test_the_claim_of_a_killed_process_is_void_at_once(tmp_path: Path, start: Started) -> None:
    run = start("a")
    until(lambda: cpus_held(tmp_path) == [CPUS])
    [owner] = book(tmp_path).owners()
    run.send_signal(signal.SIGKILL)
    until(lambda: not is_alive(owner.process))  # dead, and its row still exists
    assert isinstance(book(tmp_path).request(ClaimRequest("next"), (cpu(8),)), Grant)


def test_a_process_that_got_the_number_of_another_is_another() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert is_alive(me)
    assert not is_alive(me._replace(born="1"))
    assert not is_alive(me._replace(pid=2**22 + 1))
    assert not is_alive(me._replace(space="another-boot pid:[1]"))
    boot = me.space.split()[0]
    assert is_alive(me._replace(space=f"{boot} pid:[1]")) is None, "of another container nothing is known"
