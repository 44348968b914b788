"""The thread that reads the sockets of a worker while its main thread is busy."""

from __future__ import annotations

from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import NoReturn

from dovetail.engines.local.standby_reader import StandbyReader
from waiting import until


class Sockets:
    """Frames are texts. "work" is queued for the main thread; others are handled by the thread that reads."""

    def __init__(self) -> None:
        self.frames: SimpleQueue[str] = SimpleQueue()
        self.queued: list[str] = []
        self.readers: list[str] = []
        self.is_over = False
        self.standby = StandbyReader(self.receive, lambda: bool(self.queued) or self.is_over, self.exit)

    def receive(self) -> None:
        frame = self.frames.get()
        self.readers.append(current_thread().name)
        if frame == "end":
            self.is_over = True
        elif frame == "exit":
            raise SystemExit
        elif frame == "keep":
            self.standby.keep_reading()
        elif frame == "work":
            self.queued.append(frame)

    def exit(self, code: int) -> NoReturn:
        raise SystemExit(code)


class MainThread:
    """Works until `let_go`, once for each "work"."""

    def __init__(self, sockets: Sockets) -> None:
        self.sockets = sockets
        self.works = Event()
        self.let_go: SimpleQueue[None] = SimpleQueue()
        self.done = 0
        self.thread = Thread(target=self._run, name="main", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with suppress(SystemExit):  # pytest reports it if it leaves a thread
            self._work()

    def _work(self) -> None:
        while not self.sockets.is_over:
            self.sockets.standby.receive()
            while self.sockets.queued:
                self.sockets.queued.pop()
                self.works.set()
                self.let_go.get()
                self.works.clear()
                self.done += 1


def end(sockets: Sockets, main: MainThread) -> None:
    sockets.frames.put("end")
    main.thread.join(10)
    assert not main.thread.is_alive()
    sockets.standby.close()


def test_the_standby_thread_reads_while_the_main_thread_works_and_returns_the_reading() -> None:
    sockets = Sockets()
    main = MainThread(sockets)
    for done in (1, 2, 3):
        sockets.frames.put("work")
        assert main.works.wait(10)
        sockets.frames.put("control")
        until(lambda: bool(sockets.readers) and sockets.readers[-1] == "standby-reader")
        main.let_go.put(None)
        until(lambda: main.done == done)  # noqa: B023 - called at once
    end(sockets, main)
    assert main.done == 3


def test_work_that_arrives_during_work_is_done_after_it() -> None:
    sockets = Sockets()
    main = MainThread(sockets)
    sockets.frames.put("work")
    assert main.works.wait(10)
    for _ in range(3):
        sockets.frames.put("work")
        main.let_go.put(None)
    main.let_go.put(None)
    until(lambda: main.done == 4)
    end(sockets, main)


def test_a_main_thread_that_waits_for_the_standby_thread_ends_with_it() -> None:
    sockets = Sockets()
    main = MainThread(sockets)
    sockets.frames.put("work")
    assert main.works.wait(10)
    sockets.frames.put("control")
    until(lambda: "standby-reader" in sockets.readers)
    main.let_go.put(None)
    sockets.frames.put("exit")
    main.thread.join(10)
    assert not main.thread.is_alive()


def test_a_reading_that_is_kept_is_not_returned() -> None:
    sockets = Sockets()
    main = MainThread(sockets)
    sockets.frames.put("work")
    assert main.works.wait(10)
    sockets.frames.put("keep")
    until(lambda: len(sockets.readers) == 2)
    main.let_go.put(None)
    for expected in (2, 3):
        sockets.frames.put("work")
        main.let_go.put(None)
        until(lambda: main.done == expected)  # noqa: B023 - called at once
    assert set(sockets.readers[1:]) == {"standby-reader"}
    end(sockets, main)
