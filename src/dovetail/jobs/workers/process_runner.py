"""Isolations `process` and `warm_process`: a fresh process per job, forked by a fork server that has imported the
application, or one that runs jobs one after another and keeps their models.

One thread does everything: it asks the fork server for processes, reads what they send, keeps time and memory limits,
and reports their ends. A process is over when the fork server says so: then its process group is dead, and whatever it
had started in other sessions is being killed.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, assert_never

from dovetail.control.events import LossCause
from dovetail.engines.local.exit_cause import OomKillCounter, describe_exit
from dovetail.engines.local.forkserver_client import NO_BREADCRUMBS, ForkServerClient
from dovetail.engines.local.memory_watch import LOCAL_FULL_SHARE, MemoryWatch
from dovetail.engines.local.protocol import DONT_WAIT, Channel
from dovetail.engines.local.worker_environment import THREAD_VARIABLES
from dovetail.jobs.job import Outcome
from dovetail.jobs.store import Completion
from dovetail.jobs.workers.isolation import WARM_PROCESS
from dovetail.jobs.workers.job_process import (
    CANCEL,
    CHECKPOINT,
    CLEAN_EXIT_CODE,
    JobCall,
    ending_from_frame,
    server_environment,
)
from dovetail.jobs.workers.memory_limit import excess_text, used_bytes
from dovetail.jobs.workers.retry_memory import next_shape
from dovetail.jobs.workers.running_attempt import RunningAttempt, StopReason
from dovetail.jobs.workers.warm_pool import WarmPool, is_worn
from dovetail.machine.processes import private_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.engines.local.protocol import Frame
    from dovetail.jobs.job_logs import JobLog, JobLogs
    from dovetail.jobs.payload_codec import PayloadCodec
    from dovetail.jobs.workers.job_ending import Ending
    from dovetail.jobs.workers.job_process import ProcessSetup
    from dovetail.jobs.workers.model_ledger import ModelLedger
    from dovetail.jobs.workers.running_attempt import AttemptKey, CompletionSink, Membership
    from dovetail.jobs.workers.worker_capacity import WorkerCapacity
    from dovetail.resources.seat import Seat

RequestKind = Literal["start", "stop", "send", "close"]
"""Requests of other threads to the one that does everything."""
TimerKind = Literal["timeout", "terminate", "kill"]
PROGRAM = "dovetail.jobs.workers.job_process"
CHECK_INTERVAL_S, IDLE_CHECK_INTERVAL_S = 0.25, 10.0
"""Interval of the checks of memory and of the size of logs while jobs run, and of those of idle warm processes."""
SERVER_RESTART_S = 1.0
"""Pause after the fork server has died, so that one that dies at once does not take the CPU."""
CLOSE_TIMEOUT_S = 20.0
ENVIRONMENTS_CACHED = 256
MAX_THREADS = 10_000


@dataclass(slots=True, eq=False)
class JobProcess:
    """A process that runs one attempt, or one attempt after another."""

    number: int
    attempt: RunningAttempt
    """The running attempt, or the last one of an idle process."""
    server: Server
    channel: Channel
    log: JobLog
    environment: Mapping[str, str]
    host: int | None = None
    """Its number in the ledger of models; None if it runs only one job."""
    runs: int = 1
    """Number of attempts so far; timers of earlier attempts are ignored."""
    is_idle: bool = False
    is_ending: bool = False
    """Whether it was asked to exit while it was idle."""
    idle_since: float = 0.0
    base_bytes: int = 0
    """Memory that does not count for the running attempt."""
    base_model_bytes: int = 0
    """The part of `base_bytes` that holds cached models."""
    cpu_s: float = 0.0
    """CPU time of earlier attempts."""
    used_models: set[str] = field(default_factory=set)
    """Keys of the models that the running attempt has used."""
    is_open: bool = True
    """Whether its socket is polled."""
    ending: Ending | None = None
    pid: int | None = None
    peak_bytes: int = 0
    is_terminated: bool = False
    """Whether it was sent SIGTERM."""
    polls_cancelled: bool = False
    """Whether the job has checked `cancelled`: then it gets time to end by itself."""


@dataclass(slots=True, eq=False)
class Server:
    """A fork server and the processes that it has forked."""

    client: ForkServerClient
    environment: dict[str, str] | None = None
    """Environment of the process that was requested last; the next one inherits it unless another one is sent."""
    processes: dict[int, JobProcess] = field(default_factory=dict)
    count: int = 0
    """Number of processes that were requested."""
    base_bytes: int = 0
    """Memory of the fork server, which its processes share until they write to it."""


class _ProcessHost:
    """The port of the ledger to the models of a warm process."""

    def __init__(self, process: JobProcess, post: Callable[[RequestKind, Any], None]) -> None:
        self._process = process
        self._post = post

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def evict(self, keys: Sequence[str]) -> None:
        self._post("send", (self._process, ("evict", tuple(keys))))


class ProcessRunner:
    """Processes of jobs, by number."""

    def __init__(
        self,
        setup: ProcessSetup,
        logs: JobLogs,
        sink: CompletionSink,
        environment_of: Callable[[Seat | None], dict[str, str]],
        member_environment: Callable[[Membership], dict[str, str]],
        capacity: WorkerCapacity,
        models: ModelLedger,
        codec: PayloadCodec,
        *,
        kill_grace_s: float,
        recycle_jobs: int | None = None,
        recycle_bytes: int | None = None,
        on_start_failed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`environment_of`: variables of a seat; `member_environment`: of a rank of a gang. `recycle_jobs`,
        `recycle_bytes`: end a warm process after this many jobs, or above this memory without its models; the fork
        server is replaced after `recycle_jobs`, too. `on_start_failed`: called with the reason when a process could not
        be started; its attempt is given back."""
        self._setup = setup.pack()
        self._logs = logs
        self._sink = sink
        self._environment_of = environment_of
        self._member_environment = member_environment
        self._capacity = capacity
        self._models = models
        self._environments: dict[Seat | None, dict[str, str]] = {}
        self._kill_grace_s = kill_grace_s
        self._memory_limit_bytes = capacity.node.memory_bytes  # 0 if unknown
        self._recycle_jobs = recycle_jobs
        self._recycle_bytes = recycle_bytes
        self._on_start_failed = on_start_failed
        self._requests: deque[tuple[RequestKind, Any]] = deque()
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_releasing = False
        # thread: runner
        self._epoll = select.epoll()
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self._servers: dict[int, Server] = {}
        """Fork servers by the descriptor of their channel; those before the newest one start no more processes."""
        self._server: Server | None = None
        self._by_fd: dict[int, JobProcess] = {}
        self._by_key: dict[AttemptKey, JobProcess] = {}
        self._numbers = 0
        self._timers: list[tuple[float, int, int, TimerKind]] = []
        """(Time, number of the process, number of its run, kind)."""
        self._warm = WarmPool(models.keys_of, codec)
        self._processes: dict[int, JobProcess] = {}
        self._next_check = 0.0
        self._oom_kills = OomKillCounter()
        self._memory_watch = MemoryWatch(full=LOCAL_FULL_SHARE, only_excess=True)
        self._closing = False

    # --- any thread

    def start(self, attempts: Sequence[RunningAttempt]) -> None:
        self._requests.append(("start", list(attempts)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dovetail-job-processes", daemon=True)
            self._thread.start()
        self._wake()

    def stop(self, attempt: RunningAttempt, reason: StopReason, detail: str = "") -> None:
        self._requests.append(("stop", (attempt, reason, detail)))
        self._wake()

    def release_unbegun(self) -> None:
        self._is_releasing = True
        self._wake()

    def close(self) -> None:
        self._requests.append(("close", None))
        self._wake()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _post(self, kind: RequestKind, value: Any) -> None:
        self._requests.append((kind, value))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full of wake-ups
            os.write(self._wake_write, b"\0")

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
        finally:
            for server in list(self._servers.values()):
                self._on_server_lost(server)
            self._logs.close_unused()

    def _step(self) -> None:
        for fd, events in self._epoll.poll(self._seconds_left()):
            self._on_readable(fd, events)
        for server in list(self._servers.values()):
            if server.client.has_frames:
                self._read_server(server)
        while self._requests:
            self._on_request(*self._requests.popleft())
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, number, run, kind = heapq.heappop(self._timers)
            process = self._processes.get(number)
            if process is not None and process.runs == run and (process.is_ending or not process.is_idle):
                self._on_timer(process, kind)
        if self._processes and now >= self._next_check:
            is_busy = any(not process.is_idle for process in self._processes.values())
            self._next_check = now + (CHECK_INTERVAL_S if is_busy else IDLE_CHECK_INTERVAL_S)
            self._check(now)
        for server in list(self._servers.values()):
            server.client.flush()

    def _on_readable(self, fd: int, events: int) -> None:
        process = self._by_fd.get(fd)
        if process is not None:
            if events & select.EPOLLOUT:
                self._flush(process)
            self._read_process(process)
        elif fd == self._wake_read:
            os.read(fd, 4096)
        elif fd in self._servers:
            self._read_server(self._servers[fd])

    def _seconds_left(self) -> float:
        now = time.monotonic()
        times = [self._timers[0][0]] if self._timers else []
        if self._processes:
            times.append(self._next_check)
        return max(0.0, min(times) - now) if times else -1

    def _on_request(self, kind: RequestKind, value: Any) -> None:
        match kind:
            case "start":
                for attempt in value:
                    self._start(attempt)
            case "stop":
                self._stop(*value)
            case "send":
                self._send(*value)
            case "close":
                self._closing = True
            case _:
                assert_never(kind)

    # --- start

    def _start(self, attempt: RunningAttempt) -> None:
        if self._is_releasing:
            self._sink.finish(attempt, attempt.released())
            return
        if attempt.is_stopping():
            self._sink.finish(attempt, attempt.stopped())
            return
        self._next_check = min(self._next_check, time.monotonic() + CHECK_INTERVAL_S)
        environment = self._environment(attempt)
        if attempt.isolation == WARM_PROCESS:
            process = self._warm.take(attempt, environment)
            if process is not None:
                self._run_again(process, attempt)
                return
        try:
            server = self._current_server()
            ours, theirs = socket.socketpair()
        except Exception as error:
            self._on_start_failed(str(error))
            self._sink.finish(attempt, attempt.released())
            return
        ours.setblocking(False)
        self._numbers += 1
        number = self._numbers
        log = self._logs.open(attempt.log_names)
        process = JobProcess(number, attempt, server, Channel(ours), log, environment)
        if attempt.isolation == WARM_PROCESS:
            process.host = self._models.add_host(_ProcessHost(process, self._post))
        given: Any = None if environment is server.environment else environment
        server.environment = environment
        call = self._call(process)
        server.client.spawn(number, call.pack(), (theirs.fileno(), log.fd), (), given, fresh=False)
        server.client.flush()
        theirs.close()
        server.count += 1
        server.processes[number] = self._processes[number] = process
        self._by_fd[ours.fileno()] = self._by_key[attempt.key] = process
        self._epoll.register(ours.fileno(), select.EPOLLIN)
        attempt.has_begun = True

    def _call(self, process: JobProcess) -> JobCall:
        attempt = process.attempt
        spec = attempt.spec
        return JobCall(
            self._setup,
            spec.function,
            spec.payload,
            spec.encoding,
            spec.id,
            attempt.attempt,
            attempt.key[1],
            spec.queue,
            _thread_count(process.environment),
            attempt.isolation == WARM_PROCESS,
            attempt.key.rank,
            spec.shape.ranks,
        )

    def _run_again(self, process: JobProcess, attempt: RunningAttempt) -> None:
        """Run an attempt in an idle warm process."""
        process.attempt = attempt
        process.log = self._logs.open(attempt.log_names)
        process.runs += 1
        process.is_idle = process.polls_cancelled = False
        process.peak_bytes = 0
        process.used_models = set()
        if attempt.shape.memory_bytes and process.pid is not None:
            process.base_bytes = private_bytes([process.pid]).get(process.pid, 0)
            process.base_model_bytes = self._model_bytes(process)
        attempt.has_begun = True
        attempt.pid = process.pid
        self._by_key[attempt.key] = process
        self._send(process, ("run",), [self._call(process).pack()], (process.log.fd,))
        if attempt.timeout_s is not None:
            self._set_timer(attempt.timeout_s, process, "timeout")

    def _send(
        self, process: JobProcess, head: tuple[Any, ...], body: Sequence[bytes] = (), descriptors: Sequence[int] = ()
    ) -> None:
        if process.is_open:
            process.channel.put(head, body, descriptors)
            self._flush(process)

    def _flush(self, process: JobProcess) -> None:
        """Send as much as the socket accepts, and the rest when it is writable again."""
        is_sent = process.channel.flush()
        self._epoll.modify(process.channel.fileno(), select.EPOLLIN | (0 if is_sent else select.EPOLLOUT))

    def _model_bytes(self, process: JobProcess) -> int:
        return 0 if process.host is None else self._models.host_bytes(process.host)

    def _environment(self, attempt: RunningAttempt) -> dict[str, str]:
        if attempt.membership is not None:
            return self._member_environment(attempt.membership)
        return self._seat_environment(attempt.seat)

    def _seat_environment(self, seat: Seat | None) -> dict[str, str]:
        """One object per seat. The environment of a seat does not change while the worker runs."""
        found = self._environments.get(seat)
        if found is None:
            if len(self._environments) >= ENVIRONMENTS_CACHED:
                self._environments.clear()
            found = self._environments[seat] = self._environment_of(seat)
        return found

    def _current_server(self) -> Server:
        """The newest fork server. One that has forked many processes is replaced."""
        server = self._server
        if server is not None and self._recycle_jobs is not None and server.count >= self._recycle_jobs:
            self._server = None
            self._close_if_unused(server)
            server = None
        if server is None:
            plain = self._seat_environment(None)
            client = ForkServerClient(NO_BREADCRUMBS, server_environment(plain, os.environ), PROGRAM)
            server = self._server = Server(client)
            client.prepare(self._setup)
            self._servers[client.channel.fileno()] = server
            self._epoll.register(client.channel.fileno(), select.EPOLLIN)
        return server

    def _close_if_unused(self, server: Server) -> None:
        if server is not self._server and not server.processes:
            fd = server.client.channel.fileno()
            self._servers.pop(fd, None)
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            server.client.close()

    # --- frames

    def _read_server(self, server: Server) -> None:
        frames, is_alive = server.client.receive()
        for frame in frames:
            self._on_server_frame(server, frame)
        if not is_alive:
            self._on_server_lost(server)

    def _on_server_frame(self, server: Server, frame: Frame) -> None:
        match frame.head:
            case ("forked", number, pid) if number in server.processes:
                process = server.processes[number]
                process.pid = process.attempt.pid = pid
                process.base_bytes = server.base_bytes
                server.client.pids[number] = pid
                if process.attempt.timeout_s is not None:
                    self._set_timer(process.attempt.timeout_s, process, "timeout")
            case ("exited", number, status, error, peak_bytes, cpu_s) if number in server.processes:
                server.client.pids.pop(number, None)
                process = server.processes.pop(number)
                self._on_exit(process, status, error, peak_bytes, cpu_s)
                self._close_if_unused(server)
            case ("prepared", pid, _):  # if it failed, each job reports the error
                server.base_bytes = private_bytes([pid]).get(pid, 0)
                for process in server.processes.values():
                    process.base_bytes = process.base_bytes or server.base_bytes

    def _on_server_lost(self, server: Server) -> None:
        """Complete the attempts of a fork server that has died; all of its processes end with it."""
        fd = next((fd for fd, one in self._servers.items() if one is server), None)
        if fd is None:
            return
        del self._servers[fd]
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        if self._server is server:
            self._server = None
        if self._closing:
            server.client.close()
        else:
            server.client.kill_orphans()
            time.sleep(SERVER_RESTART_S)
        for process in list(server.processes.values()):
            self._on_exit(process, signal.SIGKILL, "", 0, 0.0, cause="the fork server was killed, and with it all jobs")

    def _read_process(self, process: JobProcess) -> None:
        """Read what a job has sent."""
        while process.is_open:
            try:
                frames, is_connected = process.channel.receive(DONT_WAIT)
            except OSError:  # no data yet, or the connection is broken
                return
            for frame in frames:
                match frame.head[0]:
                    case "progress":
                        process.attempt.report(frame.head[1], frame.head[2])
                    case "polls":
                        if frame.head[1] == CANCEL:
                            process.polls_cancelled = True
                        else:
                            process.attempt.polls_checkpoint = True
                    case "ended":
                        process.ending = ending_from_frame(frame.head, frame.body)
                    case "next":
                        self._on_next(process, frame.head[1])
                    case "model":
                        self._on_model_frame(process, frame.head[1], frame.head[2:])
                    case kind:
                        raise AssertionError(f"a job process sent a frame of kind {kind!r}")
            if not is_connected:
                self._close_socket(process)

    def _on_model_frame(self, process: JobProcess, what: str, details: tuple[Any, ...]) -> None:
        """Handle a frame of a warm process about its models."""
        models, host = self._models, process.host
        assert host is not None, what
        match what, details:
            case "reserve", (key, device, size, can_wait, number):
                process.used_models.add(key)
                answer = self._answer(process, number)
                seat = process.attempt.seat
                position = self._capacity.device_of(seat, device)
                if position is None:
                    answer(f"the job sees {len(self._capacity.cards_of(seat))} cards, and no card {device}")
                else:
                    models.reserve(host, key, position, size, can_wait=can_wait, answer=answer)
            case "used", (key,):
                process.used_models.add(key)
                models.on_used(host, key)
            case "loaded", (key, load_s):
                models.on_loaded(host, key, load_s)
            case "failed", (key,):
                models.on_failed(host, key)
            case "unpinned", (keys,):
                models.on_unpinned(host, keys)
            case "evicted", (key,):
                models.on_evicted(host, key)
            case "kept", (key,):
                models.on_kept(host, key)
            case _:
                raise AssertionError(f"a job process sent a frame of models: {what!r} {details!r}")

    def _answer(self, process: JobProcess, number: int) -> Callable[[str], None]:
        return lambda reason: self._post("send", (process, ("granted", number, reason)))

    def _close_socket(self, process: JobProcess) -> None:
        if process.is_open:
            process.is_open = False
            fd = process.channel.fileno()
            del self._by_fd[fd]
            self._epoll.unregister(fd)
            process.channel.close()

    # --- end

    def _on_next(self, process: JobProcess, cpu_s: float) -> None:
        """Handle a warm process that has completed its job and can run another one."""
        if process.is_terminated or process.ending is None:
            return  # its end completes the job
        attempt, ending = process.attempt, process.ending
        process.cpu_s += cpu_s
        process.ending = None
        process.is_idle = True
        del self._by_key[attempt.key]
        self._logs.close(process.log)
        self._warm.learn(attempt, process.used_models)
        if is_worn(process.runs, self._recycle_jobs, self._recycle_bytes, partial(self._own_bytes, process)):
            self._end_warm(process)
        else:
            self._warm.add(process)
            for surplus in self._warm.expired():
                self._end_warm(surplus)
        completion = attempt.completion(ending, round(1000 * cpu_s))
        code = 0 if ending.outcome is Outcome.SUCCEEDED else None
        self._sink.finish(attempt, completion._replace(exit_code=code, peak_memory_bytes=process.peak_bytes or None))

    def _own_bytes(self, process: JobProcess) -> int:
        """Memory of a process without its cached models."""
        if process.pid is None:
            return 0
        return private_bytes([process.pid]).get(process.pid, 0) - self._model_bytes(process)

    def _end_warm(self, process: JobProcess) -> None:
        """Ask an idle process to close its models and exit; kill it if it does not."""
        self._warm.discard(process)
        self._send(process, ("end",))
        process.server.client.flush()
        process.is_ending = True
        self._set_timer(self._kill_grace_s, process, "kill")

    def _on_exit(
        self, process: JobProcess, status: int, error: str, peak_bytes: int, cpu_s: float, cause: str = ""
    ) -> None:
        self._read_process(process)
        self._close_socket(process)
        attempt = process.attempt
        self._processes.pop(process.number, None)
        self._warm.discard(process)
        if process.host is not None:
            self._models.remove_host(process.host)
        if process.is_idle:
            return
        self._by_key.pop(attempt.key, None)
        self._logs.close(process.log, has_writers=status != CLEAN_EXIT_CODE)
        if status == -1:
            self._on_start_failed(error)
            self._sink.finish(attempt, attempt.released())
            return
        peak_bytes = process.peak_bytes if process.runs > 1 else max(peak_bytes, process.peak_bytes)
        cpu_ms = max(0, round(1000 * (cpu_s - process.cpu_s)))
        exit_code = os.waitstatus_to_exitcode(status)
        if process.ending is not None:
            completion = attempt.completion(process.ending, cpu_ms)
            code = 0 if process.ending.outcome is Outcome.SUCCEEDED else None
            completion = completion._replace(exit_code=code, peak_memory_bytes=peak_bytes or None)
        elif attempt.is_stopping():
            completion = attempt.stopped(
                exit_code=exit_code, cpu_ms=cpu_ms, peak_bytes=peak_bytes, memory_limit=self._memory_limit_bytes
            )
        else:
            completion = self._death(attempt, status, peak_bytes, cpu_ms, cause)
        self._sink.finish(attempt, completion)

    def _death(self, attempt: RunningAttempt, status: int, peak_bytes: int, cpu_ms: int, cause: str) -> Completion:
        """The process ended without a result: it was killed, has crashed, or has exited by itself."""
        kind, text = describe_exit(status, self._oom_kills)
        is_memory = kind is LossCause.OUT_OF_MEMORY
        shape = next_shape(attempt.shape, peak_bytes, self._memory_limit_bytes) if is_memory else None
        return Completion(
            *attempt.key[:2],
            Outcome.OUT_OF_MEMORY if is_memory else Outcome.LOST,
            rank=attempt.key.rank,
            error=cause or f"the process of the job ended without a result: {text}",
            shape=shape,
            exit_code=os.waitstatus_to_exitcode(status),
            cpu_ms=cpu_ms,
            peak_memory_bytes=peak_bytes or None,
        )

    # --- limits

    def _stop(self, attempt: RunningAttempt, reason: StopReason, detail: str) -> None:
        process = self._by_key.get(attempt.key)
        is_new = attempt.try_stop(reason, detail)
        if process is None or not (is_new or reason is StopReason.SHUTDOWN):
            return
        self._read_process(process)  # what it has sent until now
        preempted = reason is StopReason.PREEMPTED
        polls = attempt.polls_checkpoint if preempted else process.polls_cancelled
        grace_s = attempt.preemption_grace_s if preempted else self._kill_grace_s
        if (preempted or reason is StopReason.CANCELLED) and polls and process.is_open:
            # it is terminated if it does not end by itself; a job that has never checked would only waste the grace
            self._send(process, (CHECKPOINT if preempted else CANCEL,))
            self._set_timer(grace_s, process, "terminate")
        else:
            self._terminate(process, grace_s)

    def _set_timer(self, delay_s: float, process: JobProcess, kind: TimerKind) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, process.number, process.runs, kind))

    def _on_timer(self, process: JobProcess, kind: TimerKind) -> None:
        match kind:
            case "timeout":
                if process.ending is None and process.attempt.try_stop(StopReason.TIMEOUT):
                    self._terminate(process)
            case "terminate":
                self._terminate(process)
            case "kill":
                process.server.client.kill(process.number)
            case _:
                assert_never(kind)

    def _terminate(self, process: JobProcess, grace_s: float | None = None) -> None:
        """SIGTERM to the process group now, SIGKILL after the grace; None: that of the worker."""
        if not process.is_terminated:
            process.is_terminated = True
            process.server.client.kill(process.number, signal.SIGTERM)
            self._set_timer(self._kill_grace_s if grace_s is None else grace_s, process, "kill")

    def _check(self, now: float) -> None:
        """Memory of jobs that have requested some, memory of the machine, and sizes of logs."""
        for process in self._warm.expired():
            self._end_warm(process)
        running = [process for process in self._processes.values() if process.pid is not None and not process.is_idle]
        limited = {process.pid: process for process in running if process.attempt.shape.memory_bytes and process.pid}
        if limited:
            sizes = private_bytes(limited)
            for pid, process in limited.items():
                self._check_memory(process, sizes.get(pid, 0))
        sessions = {
            process.number: (process.attempt.spec.function, (process.pid,)) for process in running if process.pid
        }
        asked = {process.number: process.attempt.shape.memory_bytes for process in running}
        chosen = self._memory_watch.check(now, sessions, asked)
        if chosen is not None:
            self._end_for_memory(self._processes[chosen[0]], chosen[1])
        for process in running:
            self._logs.check(process.log)

    def _check_memory(self, process: JobProcess, size: int) -> None:
        """Measure the memory of the attempt, and end it above its request (`memory_limit`)."""
        used = used_bytes(size, process.base_bytes, self._model_bytes(process), process.base_model_bytes)
        process.peak_bytes = max(process.peak_bytes, used)
        excess = excess_text(used, process.attempt.shape.memory_bytes)
        if excess:
            self._end_for_memory(process, excess)

    def _end_for_memory(self, process: JobProcess, detail: str) -> None:
        """Kill at once: a process that cleans up may first exhaust the memory of the machine."""
        if process.attempt.try_stop(StopReason.OUT_OF_MEMORY, detail):
            process.is_terminated = True
            process.server.client.kill(process.number)


def _thread_count(environment: Mapping[str, str]) -> int:
    """Threads that libraries may start, by the variables of the process."""
    text = environment.get(THREAD_VARIABLES[0], "")
    return int(text) if text.isascii() and text.isdecimal() and 0 < int(text) < MAX_THREADS else 1
