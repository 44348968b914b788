"""Warm processes that wait for a job, the choice of one by the models that it holds, and when one is ended."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from dovetail.jobs.payload_codec import JSON, decode_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.payload_codec import PayloadCodec
    from dovetail.jobs.workers.process_runner import JobProcess
    from dovetail.jobs.workers.running_attempt import RunningAttempt

MAX_IDLE_PROCESSES = 32
IDLE_LIMIT_S = 600.0
"""Time without a job after which a process is ended."""
REMEMBERED = 10_000
"""Maximum number of functions, or values of their model parameters, whose models are remembered."""


def is_worn(runs: int, recycle_jobs: int | None, recycle_bytes: int | None, own_bytes: Callable[[], int]) -> bool:
    """Whether a process is ended after its job: it has run enough jobs, or has grown too large. `own_bytes` measures
    its memory without cached models, and is called only if that decides."""
    if recycle_jobs is not None and runs >= recycle_jobs:
        return True
    return recycle_bytes is not None and own_bytes() >= recycle_bytes


class WarmPool:
    """Idle processes in the order of their last use. Thread: runner."""

    def __init__(self, keys_of: Callable[[int], Mapping[str, int]], codec: PayloadCodec) -> None:
        """`keys_of`: models of a host, with their bytes."""
        self._keys_of = keys_of
        self._codec = codec
        self._idle: list[JobProcess] = []
        self._used: OrderedDict[tuple[str, object], frozenset[str]] = OrderedDict()
        """Models that a function used in its latest job, by the value of its model parameter."""

    def add(self, process: JobProcess) -> None:
        process.idle_since = time.monotonic()
        self._idle.append(process)

    def discard(self, process: JobProcess) -> None:
        if process in self._idle:
            self._idle.remove(process)

    def take(self, attempt: RunningAttempt, environment: Mapping[str, str]) -> JobProcess | None:
        """Take an idle process with this environment: the one with the most bytes of the models that the job will use,
        as far as that is known, and of several the one that was used last. None: start another one."""
        fitting = [process for process in self._idle if process.is_open and process.environment == environment]
        if not fitting:
            return None
        wanted = self._used.get(self._subject(attempt), frozenset())
        chosen = max(fitting, key=lambda process: (self._held_bytes(process, wanted), process.idle_since))
        self._idle.remove(chosen)
        return chosen

    def learn(self, attempt: RunningAttempt, keys: Iterable[str]) -> None:
        """Remember which models a job has used."""
        subject = self._subject(attempt)
        self._used[subject] = frozenset(keys)
        self._used.move_to_end(subject)
        if len(self._used) > REMEMBERED:
            self._used.popitem(last=False)

    def expired(self) -> Sequence[JobProcess]:
        """Processes to end: idle for too long, or too many."""
        now = time.monotonic()
        old = [process for process in self._idle if now - process.idle_since >= IDLE_LIMIT_S]
        surplus = self._idle[: max(0, len(self._idle) - MAX_IDLE_PROCESSES)]
        return list(dict.fromkeys([*old, *surplus]))

    def _held_bytes(self, process: JobProcess, wanted: frozenset[str]) -> int:
        if not wanted or process.host is None:
            return 0
        held = self._keys_of(process.host)
        return sum(held.get(key, 0) for key in wanted)

    def _subject(self, attempt: RunningAttempt) -> tuple[str, object]:
        return attempt.spec.function, self._model_value(attempt.function, attempt)

    def _model_value(self, function: JobFunction, attempt: RunningAttempt) -> object:
        """The argument that names the model, if the function has declared one."""
        name = function.model_parameter
        spec = attempt.first_spec
        if name is None or spec.encoding != JSON:
            return None
        try:
            args, kwargs = decode_call(spec.payload, JSON, self._codec)
            value = function.arguments(args, kwargs).get(name)
        except Exception:  # the process reports what is wrong with them
            return None
        return value if isinstance(value, str | int | float | None) else repr(value)
