"""The lease of a column: one backfill at a time, and takeover from dead processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest

from dovetail.backfill import lease as module
from dovetail.backfill.lease import Lease, read_holder
from dovetail.backfill.store import TableStore, column_folder
from dovetail.claims.owner import this_process
from dovetail.errors import RunError
from rivals import take_leases
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("lance")

FOLDER = f"{column_folder('u')}/lease"


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TableStore:
    if request.param == "disk":
        return request.getfixturevalue("local")  # type: ignore[no-any-return]
    bucket = request.getfixturevalue("bucket")
    return TableStore(f"{bucket.uri}/t.lance", bucket.storage)


@pytest.fixture
def local(tmp_path: Path) -> TableStore:
    (tmp_path / "t.lance").mkdir()
    return TableStore(str(tmp_path / "t.lance"))


def fail_on_message(text: str) -> None:
    raise AssertionError(f"unexpected message: {text}")


def take(store: TableStore, run: str, *, wait: bool = False, say: Callable[[str], None] = fail_on_message) -> Lease:
    return Lease.acquire(store, "u", run, wait=wait, say=say)


def test_it_is_taken_shown_and_given_back(store: TableStore) -> None:
    assert read_holder(store, "u") is None
    with take(store, "run-1") as lease:
        found = read_holder(store, "u")
        assert found is not None
        assert (found.run, found.host, found.pid, found.alive) == ("run-1", socket.gethostname(), os.getpid(), True)
        assert found.owner == f"run-1 on {socket.gethostname()}, pid {os.getpid()}"
        assert abs(found.began - time.time()) < 60
        assert not lease.is_lost()
        assert read_holder(store, "other") is None
        with Lease.acquire(store, "other", "run-2", wait=False, say=fail_on_message):
            pass
    assert read_holder(store, "u") is None
    assert store.names(FOLDER) == []


def test_a_held_lease_is_refused_with_the_name_of_the_owner(store: TableStore) -> None:
    with take(store, "run-1"):
        with pytest.raises(RunError) as caught:
            take(store, "run-2")
        assert caught.value.codes == ("DT434",)
        assert f"column 'u' is being filled by run-1 on {socket.gethostname()}, pid {os.getpid()}" in str(caught.value)
        assert "wait=True" in str(caught.value)
        found = read_holder(store, "u")
        assert found is not None
        assert found.run == "run-1"
    take(store, "run-3").release()


def test_a_waiting_process_gets_a_released_lease(store: TableStore) -> None:
    first = take(store, "run-1")
    messages: list[str] = []
    got: list[Lease] = []
    waiting = threading.Thread(target=lambda: got.append(take(store, "run-2", wait=True, say=messages.append)))
    waiting.start()
    until(lambda: bool(messages))
    assert not got
    first.release()
    waiting.join(60)
    assert len(messages) == 1
    assert "run-1 on" in messages[0]
    found = read_holder(store, "u")
    assert found is not None
    assert found.run == "run-2"
    got[0].release()
    assert store.names(FOLDER) == []


def test_of_several_processes_at_the_same_moment_exactly_one_gets_it(local: TableStore) -> None:
    rounds, processes = 25, 3
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    children = [
        context.Process(target=take_leases, args=(local.uri, rounds, barrier, results)) for _ in range(processes)
    ]
    for child in children:
        child.start()
    found = [results.get(timeout=120) for _ in range(rounds * processes)]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    for at in range(rounds):
        texts = [text for which, text in found if which == at]
        assert texts.count(None) == 1
        assert all("DT434" in text and "is being filled by run-" in text for text in texts if text)
    assert local.names(FOLDER) == []


class Turns:
    """Scheduler of threads: one at a time, chosen at random, runs until its next access to the store."""

    def __init__(self, seed: int, count: int) -> None:
        self._random = Random(seed)
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._going = ""
        self._count = count

    def next(self) -> None:
        me = threading.current_thread().name
        if not me.startswith("run-"):
            return  # the heartbeat is in no race
        with self._changed:
            self._waiting.append(me)
            self._going = ""
            self._choose()
            assert self._changed.wait_for(lambda: self._going == me, 60), "no thread was chosen"

    def end(self) -> None:
        with self._changed:
            self._going = ""
            self._count -= 1
            self._choose()

    def _choose(self) -> None:
        if not self._going and self._waiting and len(self._waiting) == self._count:
            self._waiting.sort()
            self._going = self._waiting.pop(self._random.randrange(len(self._waiting)))
            self._changed.notify_all()


class Stepped(TableStore):
    """A store of which every access is a step of its own among those of others."""

    turns: Turns

    def names(self, folder: str) -> list[str]:
        self.turns.next()
        return super().names(folder)

    def get(self, path: str) -> bytes | None:
        self.turns.next()
        return super().get(path)

    def put(self, path: str, data: bytes) -> None:
        self.turns.next()
        super().put(path, data)

    def delete(self, *paths: str) -> None:
        for path in paths:
            self.turns.next()
            super().delete(path)


@pytest.mark.parametrize("seed", range(60))
def test_in_every_interleaving_exactly_one_claimant_gets_the_lease(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_POLL_S", 0.0)
    store = Stepped(str(tmp_path))
    store.turns = Turns(seed, 3)
    got: list[Lease] = []
    refused: list[str] = []

    def ask() -> None:
        try:
            got.append(take(store, threading.current_thread().name))
        except RunError as error:
            refused.append(str(error))
        finally:
            store.turns.end()

    threads = [threading.Thread(target=ask, name=f"run-{at}") for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (len(got), len(refused)) == (1, 2)
    assert all("is being filled by run-" in text for text in refused)
    got[0].release()
    assert store.names(FOLDER) == []


def test_of_several_that_wait_one_after_another_gets_it(store: TableStore) -> None:
    inside = 0
    most = 0
    done: list[int] = []

    def work(at: int) -> None:
        nonlocal inside, most
        for _ in range(3):
            with take(store, f"run-{at}", wait=True, say=lambda _: None):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1
        done.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(done) == [0, 1, 2]
    assert most == 1


HOLDS = """
import sys, time
from dovetail.backfill.lease import Lease
from dovetail.backfill.store import TableStore
lease = Lease.acquire(TableStore(sys.argv[1]), "u", "run-killed", wait=False, say=print)
print("has it", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(local: TableStore) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", HOLDS, local.uri], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"has it\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_killed_owner_on_this_machine_is_taken_over_at_once(
    local: TableStore, other: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(RunError, match=f"run-killed on .*, pid {other.pid}"):
        take(local, "run-2")
    other.send_signal(signal.SIGKILL)
    other.wait()
    found = read_holder(local, "u")
    assert found is not None
    assert (found.run, found.alive) == ("run-killed", False)
    assert time.time() - found.beat < module.LEASE_TIMEOUT_S, "its last heartbeat is new: only its process can tell"
    messages: list[str] = []
    with take(local, "run-2", say=messages.append):
        (text,) = messages
        assert "run-killed" in text
        assert "its process is dead" in text
    assert local.names(FOLDER) == []


def test_a_waiting_process_gets_the_lease_of_a_killed_owner(local: TableStore, other: subprocess.Popen[bytes]) -> None:
    messages: list[str] = []
    got: list[Lease] = []
    waiting = threading.Thread(target=lambda: got.append(take(local, "run-2", wait=True, say=messages.append)))
    waiting.start()
    until(lambda: bool(messages))
    other.send_signal(signal.SIGKILL)
    other.wait()
    waiting.join(60)
    assert len(messages) == 2
    assert "taking over" in messages[1]
    got[0].release()


def write_remote_lease(
    store: TableStore, beat_ago: float, *, space: str = "another-boot pid:[1]", holds: bool = True, born: str = ""
) -> str:
    """Write the files of a lease as an owner on another machine does."""
    began = time.time() - 1000
    process = [os.getpid(), born or this_process().born, space]
    record = {"owner": "run-far on far, pid 7", "run": "run-far", "host": "far", "process": process, "began": began}
    id_ = f"{int(began * 1e9):020d}-far"
    store.put(f"{FOLDER}/{id_}.asks", json.dumps(record).encode())
    if holds:
        store.put(f"{FOLDER}/{id_}.tries", b"")
        store.put(f"{FOLDER}/{id_}.holds", b"")
    store.put(f"{FOLDER}/{id_}.beat", repr(time.time() - beat_ago).encode())
    return f"{FOLDER}/{id_}.beat"


@contextmanager
def beating(store: TableStore, path: str, ago: float) -> Iterator[None]:
    """A live owner on another machine: every read finds a new heartbeat, from a clock `ago` seconds behind ours."""
    names = store.names

    def looked(folder: str) -> list[str]:
        store.put(path, repr(time.time() - ago).encode())
        return names(folder)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "names", looked)
        yield


@pytest.mark.parametrize("wait", [True, False])
def test_a_remote_owner_without_a_heartbeat_for_too_long_is_dead(
    store: TableStore, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    write_remote_lease(store, 2 * module.LEASE_TIMEOUT_S)
    found = read_holder(store, "u")
    assert found is not None
    assert (found.run, found.alive) == ("run-far", False), "for display the time that it wrote is good enough"
    monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.5)
    messages: list[str] = []
    began = time.monotonic()
    with take(store, "run-2", wait=wait, say=messages.append):
        assert time.monotonic() - began > 0.5
        assert "was being filled by run-far on far, pid 7: checking for 0.5 s whether it is alive" in messages[0]
        assert "taking over column 'u' from run-far on far, pid 7: no heartbeat for 0.5 s" in messages[1]
        assert len(messages) == 2
    assert store.names(FOLDER) == []


@pytest.mark.parametrize("ago", [25.0, 4000.0, -4000.0])
def test_a_remote_owner_with_a_heartbeat_is_alive_whatever_its_clock_shows(local: TableStore, ago: float) -> None:
    path = write_remote_lease(local, ago)
    with beating(local, path, ago), pytest.raises(RunError, match="is being filled by run-far on far, pid 7"):
        take(local, "run-2", say=lambda _: None)
    assert len(local.names(FOLDER)) == 4


def test_a_remote_owner_with_a_heartbeat_is_not_taken_over(local: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(module, "MAX_POLL_S", 0.05)
    path = write_remote_lease(local, 4000.0)
    messages: list[str] = []
    got: list[Lease] = []
    waiting = threading.Thread(target=lambda: got.append(take(local, "run-2", wait=True, say=messages.append)))
    with beating(local, path, 4000.0):
        waiting.start()
        until(lambda: bool(messages) and "waiting" in messages[-1])
        began, first = time.monotonic(), local.get(path)
        until(lambda: time.monotonic() - began > 3 * module.LEASE_TIMEOUT_S and local.get(path) != first)
        assert waiting.is_alive()
        assert not got
        assert "waiting" in messages[-1]
    waiting.join(60)
    assert "no heartbeat for 0.5 s" in messages[-1]
    got[0].release()


def test_a_remote_owner_whose_clock_was_ahead_expires_like_others(
    local: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.3)
    write_remote_lease(local, -3600.0)
    take(local, "run-2", wait=True, say=lambda _: None).release()
    assert local.names(FOLDER) == []


@pytest.mark.parametrize("space", ["another-boot pid:[1]", f"{this_process().space.split()[0]} pid:[1]"])
def test_a_lease_of_a_remote_owner_with_a_new_heartbeat_is_refused_at_once(local: TableStore, space: str) -> None:
    """On another machine, or in another container of this one: its pid means nothing here."""
    write_remote_lease(local, 1, space=space)
    with pytest.raises(RunError, match="run-far on far, pid 7"):
        take(local, "run-2")
    assert len(local.names(FOLDER)) == 4


def test_an_owner_on_this_machine_is_alive_as_long_as_its_process_is(
    local: TableStore, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was set, or it was stopped: its heartbeat says nothing."""
    (beat,) = [f"{FOLDER}/{name.partition('.')[0]}.beat" for name in local.names(FOLDER) if name.endswith(".holds")]
    other.send_signal(signal.SIGSTOP)
    local.put(beat, repr(time.time() - 4000).encode())
    found = read_holder(local, "u")
    assert found is not None
    assert found.alive
    monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.0)
    with pytest.raises(RunError, match="run-killed"):
        take(local, "run-2")


def test_a_process_whose_start_time_changed_is_judged_by_its_heartbeat(
    local: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start times of all processes change when the clock is set; or another process got its number."""
    monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.3)
    write_remote_lease(local, 1, space=this_process().space, born="1.00")
    with (
        beating(local, write_remote_lease(local, 1, space=this_process().space, born="1.00"), 0.0),
        pytest.raises(RunError),
    ):
        take(local, "run-2", say=lambda _: None)
    take(local, "run-2", wait=True, say=lambda _: None).release()


def test_a_lease_that_could_not_be_released_does_not_block_this_process(
    local: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take(local, "run-1")

    def fails(*_: str) -> None:
        raise OSError("the store does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(local, "delete", fails)
        with pytest.raises(OSError, match="does not answer"):
            lease.release()
    messages: list[str] = []
    take(local, "run-2", say=messages.append).release()
    assert "taking over column 'u' from run-1" in messages[0]


def test_a_claim_of_a_dead_process_does_not_block_others(local: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.2)
    write_remote_lease(local, 2 * module.LEASE_TIMEOUT_S, holds=False)
    assert read_holder(local, "u") is None
    take(local, "run-2").release()
    assert local.names(FOLDER) == []


def test_a_record_that_cannot_be_read_goes_by_its_heartbeat(local: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be one of a version to come."""
    monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.5)
    local.put(f"{FOLDER}/00000000000000000001-x.asks", b"{")
    local.put(f"{FOLDER}/00000000000000000001-x.holds", b"")
    local.put(f"{FOLDER}/00000000000000000002-y.beat", b"1.0")
    with (
        beating(local, f"{FOLDER}/00000000000000000001-x.beat", 0.0),
        pytest.raises(RunError, match="cannot be read") as caught,
    ):
        take(local, "run-2", say=lambda _: None)
    assert "kill" not in str(caught.value), "the process to kill is unknown"
    messages: list[str] = []
    take(local, "run-2", wait=True, say=messages.append).release()
    assert "cannot be read" in messages[-1]
    assert local.names(FOLDER) == []


def test_an_owner_beats_and_notices_that_it_was_taken_over(store: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(module, "_is_process_alive", lambda *_: None)  # as seen from another machine
    with take(store, "run-1") as lease:
        found = read_holder(store, "u")
        assert found is not None
        first = found.beat
        until(lambda: (now := read_holder(store, "u")) is not None and now.beat > first)
        assert not lease.is_lost()
        assert lease.check_still_held()
        monkeypatch.setattr(lease, "_send_heartbeat", lambda: None)  # it sleeps
        monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.5)
        messages: list[str] = []
        other = take(store, "run-2", wait=True, say=messages.append)
        monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 20.0)
        assert "taking over" in messages[-1]
        monkeypatch.undo()
        assert not lease.check_still_held()
        assert lease.is_lost()
        assert other.check_still_held()
        assert not other.is_lost()
    found = read_holder(store, "u")
    assert found is not None, "what we gave back was not ours any more"
    assert found.run == "run-2"
    other.release()
    assert store.names(FOLDER) == []


def test_the_thread_of_an_owner_notices_that_it_was_taken_over(
    local: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    with take(local, "run-1") as lease:
        local.delete(*(f"{FOLDER}/{name}" for name in local.names(FOLDER)))
        until(lease.is_lost)
    assert local.names(FOLDER) == []


def test_a_lease_that_was_given_back_is_ours_no_more(local: TableStore) -> None:
    lease = take(local, "run-1")
    assert lease.check_still_held()
    lease.release()
    assert not lease.check_still_held()
    assert local.names(FOLDER) == []


def test_one_process_has_the_leases_of_several_columns(local: TableStore) -> None:
    leases = [Lease.acquire(local, column, "run-1", wait=False, say=fail_on_message) for column in ("a", "b", "c")]
    assert all(lease.check_still_held() for lease in leases)
    with pytest.raises(RunError, match="column 'b' is being filled by run-1"):
        Lease.acquire(local, "b", "run-2", wait=False, say=fail_on_message)
    local.delete_folder(f"{column_folder('b')}/lease")
    assert [lease.check_still_held() for lease in leases] == [True, False, True]
    for lease in leases:
        lease.release()
    assert [read_holder(local, column) for column in ("a", "b", "c")] == [None, None, None]


def test_an_owner_whose_store_is_unreachable_loses_the_lease_after_the_timeout(
    local: TableStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take(local, "run-1") as lease:
        folder = tmp_path / "t.lance" / "_dovetail"
        folder.rename(tmp_path / "away")
        folder.symlink_to(folder)  # whatever is asked of it fails: too many levels of links
        with pytest.raises(OSError, match="levels"):
            local.names(FOLDER)
        assert not lease.is_lost()
        assert lease.check_still_held(), "no other owner can have taken it yet"
        monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.0)
        assert not lease.check_still_held()
        assert lease.is_lost()
        folder.unlink()
        (tmp_path / "away").rename(folder)


def test_an_owner_that_slept_and_was_not_taken_over_keeps_the_lease(
    local: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take(local, "run-1") as lease:
        monkeypatch.setattr(module, "LEASE_TIMEOUT_S", 0.0)  # its last heartbeat is older than that
        assert not lease.is_lost(), "it checks, and finds its claim"
        local.delete_folder(FOLDER)
        assert lease.is_lost()


def test_temporary_files_of_killed_processes_are_removed_with_the_next_lease(tmp_path: Path) -> None:
    store = TableStore(str(tmp_path))
    folder = tmp_path / "_dovetail" / column_folder("n") / "lease"
    folder.mkdir(parents=True)
    old, new = folder / ".tmp-old", folder / ".tmp-new"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    with Lease.acquire(store, "n", "run", wait=False, say=lambda _: None):
        assert not old.exists()
        assert new.exists()  # its process may be about to rename it


def test_temporary_files_of_a_process_of_this_machine_are_removed_as_soon_as_it_has_ended(tmp_path: Path) -> None:
    """It was killed before it could rename the file."""
    writes = (
        "import os, pathlib, sys\n"
        "from dovetail.backfill.store import TableStore\n"
        "pathlib.Path.replace = lambda *_: (print(flush=True), sys.stdin.read())\n"
        f"TableStore(sys.argv[1]).put('{column_folder('n')}/lease/claim', b'data')\n"
    )
    store = TableStore(str(tmp_path))
    folder = tmp_path / "_dovetail" / column_folder("n") / "lease"
    command = [sys.executable, "-c", writes, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        (left,) = folder.glob(".tmp-*")
        with Lease.acquire(store, "n", "run", wait=False, say=lambda _: None):
            assert left.exists(), "its process may rename it yet"
        writer.kill()
        writer.wait()
        with Lease.acquire(store, "n", "run", wait=False, say=lambda _: None):
            assert not left.exists()
