"""Processes that start warm: a template process imports Dovetail, PyArrow and Lance once and forks a process for each
script.

The process is a real one: it has its own pid, session, memory and exit code, and a signal can kill it at any moment. It
differs from a new interpreter in three ways: `PRELOADED` and the public names of Dovetail are imported already,
variables that the interpreter reads at its start have no effect (PYTHONWARNINGS, PYTHONHASHSEED; PYTHONPATH has),
and /proc/PID/environ is that of the template. Tests of imports, environment variables or the command line of a process
start an interpreter instead.

The template has a single thread, otherwise it refuses to fork.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PRELOADED = (
    "dovetail",
    "in_process",
    "dovetail.data.commit_log",
    "dovetail.data.commit_sink",
    "dovetail.data.writers.encoders",
    "dovetail.data.writers.lance_dataset",
    "dovetail.data.writers.line_files",
    "dovetail.data.writers.parquet",
    "dovetail.observe.telemetry",
    "dovetail.runtime.resume",
    "encodings.ascii",
    "numpy",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "lance",
)
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables of the template, so that imports start no thread."""
MAX_REQUEST_BYTES = 1 << 17


class WarmProcess:
    """The part of `subprocess.Popen` that tests use, for a script that a fork of the template runs as `__main__`."""

    def __init__(self, script: Path, output: int, *, env: Mapping[str, str], cwd: Path) -> None:
        """`output`: descriptor that stdout and stderr go to; stdin is empty."""
        self._status, theirs = os.pipe()
        try:
            self.pid = _template().fork({"script": str(script), "env": dict(env), "cwd": str(cwd)}, output, theirs)
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(theirs)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready = select.poll()  # not select.select, which is limited to descriptors below 1024
            ready.register(self._status, select.POLLIN)
            if not ready.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            found = os.read(self._status, 100)
            assert found, "the template process has died"
            os.close(self._status)
            self.returncode = os.waitstatus_to_exitcode(int(found))
        return self.returncode

    def send_signal(self, how: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, how)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The template process of this session, seen from the tests."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **SINGLE_THREADED, "PYTHONUNBUFFERED": "1"},
        )
        theirs.close()
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], output: int, status: int) -> int:
        """Pid of a new process; `status` receives its wait status."""
        data = json.dumps(request).encode()
        assert len(data) <= MAX_REQUEST_BYTES
        socket.send_fds(self._control, [data], [output, status])
        answer = self._control.recv(100)
        assert answer, "the template process has died"
        return int(answer)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


_templates: list[Template] = []


def _template() -> Template:
    if not _templates:
        _templates.append(Template())
    return _templates[0]


# --- in the template process


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork a child for every request until the tests end. Returns in the children only, with the request."""
    children: dict[int, tuple[int, int]] = {}
    ready = select.poll()
    ready.register(control, select.POLLIN)
    while True:
        for fd, _ in ready.poll():
            if fd in children:
                pid, status = children.pop(fd)
                ready.unregister(fd)
                os.close(fd)
                with suppress(BrokenPipeError):  # the test did not wait for it
                    os.write(status, str(os.waitpid(pid, 0)[1]).encode())
                os.close(status)
                continue
            data, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 2)
            if not data:
                sys.exit()  # the tests have ended
            output, status = descriptors
            threads = list(Path("/proc/self/task").iterdir())
            assert len(threads) == 1, f"the template has {len(threads)} threads"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Lance is not fork-safe once it has started threads
                pid = os.fork()
            if not pid:
                control.close()
                for other, (_, its_status) in children.items():
                    os.close(other)
                    os.close(its_status)
                os.close(status)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                request: dict[str, Any] = json.loads(data)
                return request
            os.close(output)
            watch = os.pidfd_open(pid)
            children[watch] = pid, status
            ready.register(watch, select.POLLIN)
            control.send(str(pid).encode())


def _adopt(request: dict[str, Any]) -> ModuleType:
    """Make this process look like an interpreter that runs the script, and return its `__main__`."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup
    os.chdir(request["cwd"])
    fixed = [folder for folder in sys.path[1:] if folder not in _python_path()]
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    script = Path(request["script"])
    sys.argv = [str(script)]
    sys.path[:] = [str(script.parent), *_python_path(), *fixed]
    main = ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = main
    return main


def _python_path() -> list[str]:
    return [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _run(main: ModuleType) -> None:
    """Run the script. What it raises is printed by the interpreter, which then calls exit handlers as usual."""
    script = Path(main.__file__ or "")
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), main.__dict__)
    except SystemExit as end:
        _exit_codes.append((end.code or 0) & 0xFF if isinstance(end.code, int | None) else 1)
        raise
    except Exception:
        _exit_codes.append(1)
        raise
    _exit_codes.append(0)


_exit_codes: list[int] = []


def _exit_at_once() -> None:
    """The last exit handler: to clear all modules would copy all memory of the template."""
    if _exit_codes:  # else a signal ends this process, or it is the template
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_exit_codes[0])


if __name__ == "__main__":
    atexit.register(_exit_at_once)  # before imports register others: it is called last
    for _name in PRELOADED:
        importlib.import_module(_name)
    _dovetail = sys.modules["dovetail"]
    for _name in _dovetail.__all__:
        getattr(_dovetail, _name)
    gc.collect()
    gc.freeze()
    _run(_adopt(_serve(socket.socket(fileno=int(sys.argv[1])))))
