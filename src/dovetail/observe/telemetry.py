"""What do the workers of a running run use? A thread that looks once per second, and costs next to nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from dovetail.machine.host_use import HostMeter, HostUse
from dovetail.machine.network import TcpMeter, Traffic
from dovetail.machine.usage import Sampler, Use
from dovetail.observe.advice import Advice, Adviser, Asked, overuse
from dovetail.observe.use import Accounts, Process, Sample, UnitUse, WorkerUse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.machine.gpu_use import CardUse, GpuMeter, GpuReading

__all__ = ["Telemetry", "Snapshot", "Process", "Asked", "WorkerUse", "UnitUse", "overuse"]

MOST_SHARE = 0.01
"""Of a core, at most, for looking at workers; with thousands of them the looks come less often."""
NETWORK_SHARE = 0.002
"""And of that for their connections."""
ADVICE_KEPT = 100


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one look gave. Nothing of it ever changes."""

    workers: Mapping[int, WorkerUse] = field(default_factory=lambda: MappingProxyType({}))
    units: Mapping[str, UnitUse] = field(default_factory=lambda: MappingProxyType({}))
    machine: HostUse | None = None
    gpus: tuple[CardUse, ...] = ()


class Telemetry:
    """Everything may be asked at any time from any thread; answers are as old as the last look.

    `workers`: who is there now, called from the thread. `asked`: what a worker asked for, if that is known.
    """

    def __init__(
        self,
        workers: Callable[[], Mapping[int, Process]],
        asked: Callable[[int], Asked | None] = lambda _: None,
        every_s: float = 1.0,
        gpu: GpuMeter | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every_s = every_s
        self.problem = ""
        """Why the last look failed; empty if it did not."""
        self._workers, self._asked, self._gpu, self._clock = workers, asked, gpu, clock
        self._sampler, self._tcp, self._host = Sampler(clock), TcpMeter(), HostMeter(clock=clock)
        self._accounts, self._adviser = Accounts(), Adviser()
        self._traffic: dict[int, Traffic] | None = {}
        self._network_due = float("-inf")
        self._asked_of: dict[str, Asked] = {}
        self._snapshot = Snapshot()
        self._advice: deque[Advice] = deque(maxlen=ADVICE_KEPT)
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- what is known

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def latest(self) -> Mapping[int, WorkerUse]:
        """The workers that were there at the last look."""
        return self._snapshot.workers

    def units(self) -> Mapping[str, UnitUse]:
        """All units that ever had a worker."""
        return self._snapshot.units

    def machine(self) -> HostUse | None:
        return self._snapshot.machine

    def gpus(self) -> Sequence[CardUse]:
        return self._snapshot.gpus

    def peak(self, worker: int) -> int:
        """The largest USS that was seen of a worker, also of one that is gone; 0: it never was."""
        return self._accounts.peak(worker)

    def advice(self) -> list[Advice]:
        """What is new since this was asked last: workers that use more than they asked for."""
        found: list[Advice] = []
        while self._advice:
            found.append(self._advice.popleft())
        return found

    # ---- looking

    def start(self) -> None:
        """May be called once."""
        assert self._thread is None, "it runs already"
        self._thread = threading.Thread(target=self._run, name="dovetail-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and waits for that. May be called twice, and without a start."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._gpu is not None:
            self._gpu.close()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            began = time.thread_time()
            self.look()
            pause_s = max(self.every_s, (time.thread_time() - began) / MOST_SHARE)

    def look(self) -> None:
        """Now; the thread calls it again and again. A look that fails is left out: a run must not suffer from it."""
        with self._looking:
            try:
                self._snapshot = self._taken()
                self.problem = ""
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"

    def _taken(self) -> Snapshot:
        workers = dict(self._workers())
        uses = self._sampler.sample(pid for process in workers.values() for pid in process.pids)
        traffic = self._read_traffic(uses)
        reading = self._gpu.read() if self._gpu is not None else None
        seen = {
            worker: (process, _sample([uses[pid] for pid in process.pids], process.pids, traffic, reading))
            for worker, process in workers.items()
            if all(pid in uses for pid in process.pids)
        }
        of_workers, of_units = self._accounts.take(self._clock(), seen)
        self._advise(workers, of_units)
        cards = reading.cards if reading is not None else ()
        return Snapshot(MappingProxyType(of_workers), MappingProxyType(of_units), self._host.read(), cards)

    def _read_traffic(self, uses: Mapping[int, Use]) -> dict[int, Traffic] | None:
        """As it was last, while reading it again would cost too much."""
        if self._traffic is not None and self._clock() >= self._network_due:
            began = time.thread_time()
            self._traffic = self._tcp.sample({session: use.pids for session, use in uses.items()})
            self._network_due = self._clock() + (time.thread_time() - began) / NETWORK_SHARE
        return self._traffic

    def _advise(self, workers: Mapping[int, Process], units: Mapping[str, UnitUse]) -> None:
        for worker, process in workers.items():
            if asked := self._asked(worker):
                self._asked_of[process.unit] = asked
        for name, use in units.items():
            if name in self._asked_of:
                self._advice.extend(self._adviser.news(use, self._asked_of[name]))


def _sample(
    ranks: Sequence[Use], pids: Sequence[int], traffic: Mapping[int, Traffic] | None, reading: GpuReading | None
) -> Sample:
    """A worker: all its ranks."""
    moved = None if traffic is None else sum((traffic.get(pid, Traffic()) for pid in pids), Traffic())
    return Sample(
        cpu_s=sum(use.cpu_s for use in ranks),
        uss_bytes=sum(use.uss_bytes for use in ranks),
        read_bytes=sum(use.read_bytes for use in ranks),
        write_bytes=sum(use.write_bytes for use in ranks),
        sent_bytes=None if moved is None else moved.sent_bytes,
        received_bytes=None if moved is None else moved.received_bytes,
        gpu_bytes=None if reading is None else reading.of({pid for use in ranks for pid in use.pids}),
        processes=sum(use.processes for use in ranks),
    )
