"""Wake-ups through FIFOs."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from dovetail.jobs.stores.file_wakeup import WakeupFolder
from runtime.aids import Script
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from pathlib import Path


def test_a_waiter_is_woken_by_its_address(tmp_path: Path) -> None:
    folder, other = WakeupFolder(tmp_path / "wakeup"), WakeupFolder(tmp_path / "wakeup")
    waiter, another = folder.open_waiter(), folder.open_waiter()
    assert not waiter.wait(0.0)
    assert other.notify([waiter.address]) == []
    assert waiter.wait(PATIENCE_S)
    assert not waiter.wait(0.01)
    assert not another.wait(0.0)


def test_wake_ups_before_the_wait_count_once(tmp_path: Path) -> None:
    folder = WakeupFolder(tmp_path / "wakeup")
    waiter = folder.open_waiter()
    for _ in range(100_000):  # more than a FIFO can hold
        waiter.wake()
    folder.notify([waiter.address])
    while waiter.wait(0.0):
        pass
    waiter.wake()
    assert waiter.wait(0.0)


def test_a_closed_waiter_leaves_nothing_and_ends_its_wait(tmp_path: Path) -> None:
    folder, other = WakeupFolder(tmp_path / "wakeup"), WakeupFolder(tmp_path / "wakeup")
    waiter = folder.open_waiter()
    assert other.notify([waiter.address]) == []
    thread = threading.Thread(target=waiter.wait, args=(PATIENCE_S,))
    thread.start()
    waiter.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert other.notify([waiter.address]) == [waiter.address]
    waiter.wake()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_fifo_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    folder = WakeupFolder(tmp_path / "wakeup")
    mine = folder.open_waiter()
    script = f"""
from pathlib import Path
from dovetail.jobs.stores.file_wakeup import WakeupFolder
waiters = [WakeupFolder(Path({str(folder.path)!r})).open_waiter() for _ in range(2)]
print("open", flush=True)
waiters[0].wait(1000)
"""
    with Script(tmp_path, script, warm=True) as process:
        process.says("open")
        first, second = sorted(path.name for path in folder.path.iterdir() if path.name != mine.address)
        assert folder.remove_stale() == []
        assert folder.notify([first]) == []
        process.kill()
        process.ended()
    until(lambda: folder.notify([first, mine.address]) == [first], "the FIFO has no reader")
    assert not (folder.path / first).exists()
    assert folder.remove_stale() == [second]
    assert [path.name for path in folder.path.iterdir()] == [mine.address]


def test_concurrent_processes_share_the_folder(tmp_path: Path) -> None:
    """They share it even while the last one to leave removes it."""
    path = tmp_path / "wakeup"
    errors: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(50):
                folder = WakeupFolder(path)
                waiter = folder.open_waiter()
                assert waiter.address not in folder.remove_stale()
                assert folder.notify([waiter.address]) == []
                assert waiter.wait(PATIENCE_S)
                waiter.close()
                folder.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert errors == []
    with suppress(FileNotFoundError):
        assert list(path.iterdir()) == []
