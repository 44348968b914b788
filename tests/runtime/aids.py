"""Helpers for tests of whole runs: scripts that can be killed, the processes of a run, and what remains of them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Self

import dovetail as dt
from waiting import PATIENCE_S, until
from warm_process import WarmProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.engines.local.engine import LocalEngine

CLUSTER = "1x(2cpu, 8GB)"
PLACE: dict[str, Any] = {}
"""Arguments that `run_of` adds, to run elsewhere than on this machine; for suites that are run over several engines."""
MARK = "DOVETAIL_TEST_MARK"
"""A variable that all processes of a script inherit."""


class GatedSource:
    """A source that yields `before` items, blocks until it is released, and then yields `after` more."""

    def __init__(self, before: int, after: int = 0) -> None:
        self._before, self._after = before, after
        self.blocks = threading.Event()
        self.released = threading.Event()
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(self._before)
            self.blocks.set()
            self.released.wait()
            yield from range(self._before, self._before + self._after)
        finally:
            self.closed.set()


def run_of(*stages: dt.Stage, source: Any, **settings: Any) -> dt.Run:
    return dt.run(dt.Pipeline(list(stages)), source, **({"cluster": CLUSTER} | settings | PLACE))


def rows_in(path: Path, count: int = 3000, pad: int = 2000) -> Path:
    """Write a file with rows of about `pad` bytes."""
    path.write_text("".join(json.dumps({"i": number, "pad": "x" * pad}) + "\n" for number in range(count)))
    return path


def numbers_in(path: Path) -> list[int]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return [row["i"] for row in pq.read_table(path).to_pylist()]
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line)["i"] for line in data.splitlines()]


def engine_of(run: dt.Run) -> LocalEngine:
    engine: Any = run._engine
    found: LocalEngine = engine
    return found


def pids_of(run: dt.Run, stage: str | None = None) -> list[int]:
    """Process ids of the present workers."""
    found = engine_of(run).processes().values()
    return [pid for name, pids in found for pid in pids if stage is None or stage in name.split("+")]


def ready_pids_of(run: dt.Run, stage: str | None = None) -> list[int]:
    """Processes of workers whose setup is done: the loss of a worker during setup counts as a bad setup."""
    engine = engine_of(run)
    ready = {pid for worker, (_, pids) in engine.processes().items() if engine.is_ready(worker) for pid in pids}
    return [pid for pid in pids_of(run, stage) if pid in ready and is_there(pid)]


def kill_one(run: dt.Run, stage: str | None = None, dice: Random | None = None) -> int:
    """kill -9 of a worker, once there is one."""
    dice = dice or Random(0)
    while True:
        until(lambda: ready_pids_of(run, stage), "there is a worker")
        for pid in dice.sample(found := ready_pids_of(run, stage), len(found)):
            os.kill(pid, signal.SIGKILL)
            _dead(pid)
            return pid


def _dead(pid: int) -> None:
    until(lambda: not is_there(pid), "it is dead")


def forkserver_of(driver_pid: int) -> tuple[int, int, int] | None:
    """Pids of guard, supervisor and fork server of the only local engine of a process (a driver, an agent of Ray), once
    there are all three."""
    for guard in child_pids(driver_pid):
        if "dovetail.engines.local.supervisor" in command_of(guard) and is_there(guard):
            for supervisor in child_pids(guard):
                for pid in child_pids(supervisor):
                    return guard, supervisor, pid
    return None


def child_pids(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has just ended
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def losses(run: dt.Run) -> int:
    return sum(unit.lost for unit in run.stats.units)


def is_there(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def workers_of(folder: Path) -> list[int]:
    """Worker processes of a run or an engine: those that print into the logs of its folder."""
    logs = f"{folder}/logs/"
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and str((process / "fd" / "1").readlink()).startswith(logs):
                found.append(int(process.name))
    return found


def no_worker_is_left(run: dt.Run) -> None:
    until(lambda: not workers_of(run.folder), "all workers are gone")


def marked_pids(mark: str) -> list[int]:
    """All processes that have the mark in their environment."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if needle in (folder / "environ").read_bytes().split(b"\0") and is_there(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def descriptors(pid: int | str = "self") -> list[str]:
    """Targets of the open file descriptors."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except OSError:
            continue
    return found


def memory_files(pid: int | str = "self") -> int:
    return sum("memfd:" in link for link in descriptors(pid))


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")[:200]
    except OSError:
        return "gone"


SAYS_WHEN_CTRL_C_IS_OURS = """
import signal, threading, time

def tell():
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(0.001)
    print("TEXT", flush=True)

threading.Thread(target=tell, daemon=True).start()
"""


def say_when_waiting(text: str) -> str:
    """Lines of a script that print `text` once its main thread is in `run.wait()` or a loop over the run: a Ctrl-C
    before that is Python's own."""
    return SAYS_WHEN_CTRL_C_IS_OURS.replace("TEXT", text)


class Script:
    """A program in a process of its own, that is gone with everything it started at the end of a `with` block."""

    process: subprocess.Popen[bytes] | WarmProcess

    def __init__(self, folder: Path, text: str, *, stdin: bool = False, warm: bool = False, **env: str) -> None:
        """`stdin`: the text is piped into the interpreter instead of being a file.
        `warm`: a fork of the template of `warm_process.py` runs it instead of a new interpreter."""
        self.mark = uuid.uuid4().hex
        self.folder = folder
        path = folder / f"script_{self.mark[:6]}.py"
        path.write_text(text)
        variables = {**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1", **env}
        self._output = (folder / f"{self.mark[:6]}.out").open("w+b")
        if warm:
            assert not stdin
            self.process = WarmProcess(path, self._output.fileno(), env=variables, cwd=folder)
            return
        with path.open("rb") as source:
            self.process = subprocess.Popen(
                [sys.executable, "-" if stdin else str(path)],
                stdin=source if stdin else subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=folder,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also under nohup
            )

    @property
    def output(self) -> str:
        return Path(self._output.name).read_text(errors="replace")

    def finish(self) -> str:
        """Its output, if it ended well."""
        code = self.ended()
        assert code == 0, f"exit code {code}:\n{self.output}"
        return self.output

    def ended(self) -> int:
        try:
            return self.process.wait(3 * PATIENCE_S)  # some scripts have several runs on Ray
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it is still running:\n{self.output}") from None

    def says(self, text: str) -> None:
        def is_printed() -> bool:
            assert self.process.poll() is None or text in self.output, f"it ended without {text!r}:\n{self.output}"
            return text in self.output

        until(is_printed, f"the script says {text!r}")

    def kill(self, how: int = signal.SIGKILL) -> None:
        self.process.send_signal(how)

    def all_gone(self, patience_s: float = PATIENCE_S) -> float:
        """Wait until no process of the script is left, including children; returns the seconds."""
        try:
            return until(lambda: not self._processes(), "all processes of the script are gone", patience_s)
        except AssertionError:
            left = [command_of(pid) for pid in self._processes()]
            raise AssertionError(f"still there: {left}\n{self.output}") from None

    def _processes(self) -> list[int]:
        own = [self.process.pid] if self.process.poll() is None else []  # /proc shows the environment of the template
        return list({*own, *marked_pids(self.mark)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._output.close()
        for pid in marked_pids(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
