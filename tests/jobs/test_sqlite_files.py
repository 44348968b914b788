"""Files of the SQLite store: what is created, what is refused, full disks."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import tempfile
import threading
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dovetail.errors import ConfigError, DovetailError
from dovetail.jobs.job import JobState
from dovetail.jobs.store import JobFilter, StoreUnavailableError, StoreVersionError, WorkerInfo
from dovetail.jobs.stores import sqlite_database
from dovetail.jobs.stores.sqlite_store import SqliteStore
from jobs.store_contract import spec
from runtime.aids import Script
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


def count(store: SqliteStore) -> int:
    return sum(sum(stats.counts.values()) for stats in store.stats())


def refusal(path: Path) -> DovetailError:
    with pytest.raises(DovetailError) as refused:
        SqliteStore(path)
    assert len(refused.value.problems) == 1
    [problem] = refused.value.problems
    assert problem.place == str(path)
    assert problem.fix_texts
    return refused.value


# --- files


def test_only_this_user_can_read_the_files(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        store.register_worker(WorkerInfo("w1"))
        store.submit([spec("a")])
        found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
        assert {found[f"jobs.db{end}"] for end in ("", "-wal", "-shm")} == {0o600}
        assert found["jobs.db-wakeup"] == 0o700
        assert len(found) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.db"]


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "jobs.db")
    store.close()
    store.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        store.submit([spec("a")])
    with pytest.raises(StoreUnavailableError, match="closed"):
        store.get(["a"])


def test_close_ends_waits(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "jobs.db")
    store.register_worker(WorkerInfo("w1"))
    store.submit([spec("a")])
    while store.wait("w1", 0.0):
        pass
    waits = [
        threading.Thread(target=store.wait, args=("w1", PATIENCE_S)),
        threading.Thread(target=store.wait_finished, args=(["a"], PATIENCE_S)),
    ]
    for wait in waits:
        wait.start()
    store.close()
    for wait in waits:
        wait.join(PATIENCE_S)
        assert not wait.is_alive()


def test_two_paths_of_one_file_are_one_store(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "jobs.db")
    with closing(SqliteStore(tmp_path / "jobs.db")) as one, closing(SqliteStore(tmp_path / "link.db")) as two:
        one.register_worker(WorkerInfo("w1"))
        while one.wait("w1", 0.0):
            pass
        two.submit([spec("a")])
        assert one.wait("w1", PATIENCE_S)


def test_a_removed_file_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with closing(SqliteStore(path)) as store:
        store.submit([spec("a")])
        for file in tmp_path.glob("jobs.db*"):
            if file.is_file():
                file.unlink()
        store.submit([spec("b")])
        assert [record.id for record in store.find(JobFilter()).jobs] == ["b"]
        with closing(SqliteStore(path)) as other:
            assert other.get(["a", "b"])[0] is None
            other.submit([spec("c")])
        assert count(store) == 2


def test_stores_opened_at_once_create_one_database(tmp_path: Path) -> None:
    threads = 8
    barrier = threading.Barrier(threads)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            barrier.wait(PATIENCE_S)
            with closing(SqliteStore(tmp_path / "jobs.db")) as store:
                store.submit([spec(f"{number}")])
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(2 * PATIENCE_S)
    assert errors == []
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        assert count(store) == threads


def test_processes_started_at_once_create_one_database(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
from dovetail.jobs.job import JobSpec
from dovetail.jobs.stores.sqlite_store import SqliteStore
print("started", flush=True)
while not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.001)
store = SqliteStore({str(tmp_path / "jobs.db")!r})
store.submit([JobSpec(str(os.getpid()), "jobs_app:work")])
store.close()
"""
    processes = [Script(tmp_path, script, warm=True) for _ in range(4)]
    try:
        for process in processes:
            process.says("started")
        (tmp_path / "go").touch()
        for process in processes:
            process.finish()
    finally:
        for process in processes:
            process.__exit__()
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        assert count(store) == 4


# --- refusals


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    error = refusal(path)
    assert isinstance(error, StoreVersionError)
    assert error.codes == ("DT661",)
    assert "99" in str(error)
    assert "pip install --upgrade" in str(error)


@pytest.mark.parametrize("statement", ["CREATE TABLE t (a)", "PRAGMA application_id = 7", "PRAGMA user_version = 7"])
def test_a_database_of_another_program_is_refused_and_not_changed(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
    before = path.read_bytes()
    error = refusal(path)
    assert isinstance(error, StoreVersionError)
    assert error.codes == ("DT661",)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["other.db"]


def test_a_file_that_is_no_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("jobs to do\n" * 1000)
    assert refusal(path).codes == ("DT661",)
    assert path.read_text() == "jobs to do\n" * 1000


def test_a_missing_folder_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "not there" / "deep" / "jobs.db"
    error = refusal(path)
    assert (type(error), error.codes) == (ConfigError, ("DT662",))
    [fix] = error.problems[0].fix_texts
    subprocess.run(fix, shell=True, check=True)
    SqliteStore(path).close()


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path)
    assert (type(error), error.codes) == (ConfigError, ("DT662",))
    assert "it is a folder" in str(error)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file" / "jobs.db").codes == ("DT662",)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Runs as a user other than root, so that permissions are checked."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_cannot_be_written_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "jobs.db"
        SqliteStore(path).close()
        path.chmod(0o444)
        folder.chmod(0o777)
        with without_privileges():
            error = refusal(path)
        assert (type(error), error.codes) == (ConfigError, ("DT662",))
        assert "cannot write the file" in str(error)
        path.unlink()
        folder.chmod(0o755 if os.geteuid() == 0 else 0o555)
        with without_privileges():
            error = refusal(path)
        assert (type(error), error.codes) == (ConfigError, ("DT662",))
        assert "cannot create files" in str(error)
        folder.chmod(0o755)


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with closing(SqliteStore(path)) as store:
        store.submit([spec(f"{n:04}") for n in range(500)])
    content = bytearray(path.read_bytes())
    content[4096:] = b"\x5a" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as found:  # noqa: SIM117 - closing must not hide the error
        with closing(SqliteStore(path)) as store:
            store.submit([spec("new")])
    assert found.value.codes == ("DT663",)
    fix = found.value.problems[0].fix_texts[-1]
    subprocess.run(fix, shell=True, check=True)
    with closing(SqliteStore(path)) as store:
        assert count(store) == 0


def test_a_lock_that_is_not_released_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_database, "BUSY_TIMEOUT_S", 0.05)
    with closing(SqliteStore(tmp_path / "jobs.db")) as store:
        with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailableError, match="locked") as refused:
                store.submit([spec("a")])
            assert refused.value.codes == ("DT660",)
            assert store.get(["a"]) == [None]
        assert store.submit([spec("a")])[0].created


# --- full disks


def fill(store: SqliteStore) -> tuple[list[str], StoreUnavailableError]:
    """Submit until the disk is full; the jobs that were accepted, and the error."""
    accepted: list[str] = []
    for n in range(10_000):
        batch = [spec(f"{n:05}-{i}", payload=bytes(2000)) for i in range(5)]
        try:
            store.submit(batch)
        except StoreUnavailableError as error:
            return accepted, error
        accepted += [job.id for job in batch]
    raise AssertionError("the disk did not become full")


def test_on_a_full_disk_nothing_is_lost_and_work_continues_when_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(500_000))
        store = SqliteStore(disk / "jobs.db")
        accepted, error = fill(store)
        assert error.codes == ("DT660",)
        assert "the disk is full" in str(error)
        assert str(disk) in error.problems[0].fix_texts[0]
        assert count(store) == len(accepted) > 5
        ballast.unlink()
        assert store.submit([spec("later")])[0].created
        assert store.cancel(accepted[:2]) == [JobState.CANCELLED] * 2
        store.close()
        with closing(SqliteStore(disk / "jobs.db")) as again:
            assert count(again) == len(accepted) + 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_write_that_fails_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    """A limit for the size of files stands for a disk, where none can be mounted."""
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from dovetail.jobs.stores.sqlite_store import SqliteStore
from jobs.test_sqlite_files import count, fill, spec
store = SqliteStore({str(tmp_path / "jobs.db")!r})
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
accepted, error = fill(store)
print(error)
assert error.codes == ("DT660",)
assert count(store) == len(accepted) > 5
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert store.submit([spec("later")])[0].created
assert count(store) == len(accepted) + 1
store.close()
"""
    with Script(tmp_path, script, warm=True) as process:
        assert "DT660" in process.finish()
