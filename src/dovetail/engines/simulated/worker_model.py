"""Model of simulated units and workers: durations, random outcomes, slots and queued work."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from itertools import accumulate
from math import exp, expm1, log1p, sqrt
from random import Random
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import CONTROL_METHODS
from dovetail.engines.simulated.world import Constant, Lognormal, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.commands import HostedObject, RunBatches, StartWorker
    from dovetail.engines.call_future import WorkerCallFuture
    from dovetail.engines.simulated.message_execution import TrackedMessage
    from dovetail.engines.simulated.world import Behaviour, Spread


class SimulatedUnit:
    """The workers of one unit: their behaviour and random stream.

    Every unit has its own random stream, consumed in the order of events, so that units do not influence each other.
    """

    __slots__ = (
        "_given",
        "_returns",
        "_taken",
        "behaviour",
        "factor",
        "name",
        "random",
        "slowdowns",
        "slowed",
        "workers",
    )

    def __init__(self, name: str, behaviour: Behaviour, seed: int) -> None:
        self.name = name
        self.behaviour = behaviour
        self.random = Random(f"{seed} unit {name}")  # noqa: S311 - a text, because hash() differs between processes
        self.factor = mean_factor(behaviour.spread, self.random)
        self.slowed = 1.0
        self.slowdowns: list[float] = []
        self.workers: dict[int, SimulatedWorker] = {}
        share = Fraction(behaviour.returns).limit_denominator(10**6)
        self._returns = None if share == 1 else share.as_integer_ratio()
        self._taken = self._given = 0

    def output_count(self, items: int) -> int:
        """Number of outputs, such that the sum is exact for any message sizes."""
        if self._returns is None:
            return items
        self._taken += items
        given = self._taken * self._returns[0] // self._returns[1]
        out = given - self._given
        self._given = given
        return out

    def outputs_of_item(self, number: int) -> int:
        """Outputs of item `number`: the same at every attempt; consecutive numbers give `out_of` of them in total."""
        if self._returns is None:
            return 1
        up, down = self._returns
        return (number + 1) * up // down - number * up // down

    def setup_seconds(self) -> float:
        setup = self.behaviour.setup_s
        if isinstance(setup, tuple):
            mean, sigma = setup
            return mean * exp(self.random.gauss(-sigma * sigma / 2, sigma))
        return setup

    def setup_fails(self) -> bool:
        share = self.behaviour.setup_failures
        return share > 0 and self.random.random() < share

    def draw_slowness(self) -> float:
        """Setup seconds of a new worker."""
        share, factor = self.behaviour.stragglers
        return factor if share and self.random.random() < share else 1.0

    def slow_down(self, factor: float) -> None:
        self.slowdowns.append(factor)
        self._update_slowdown()

    def speed_up(self, factor: float) -> None:
        self.slowdowns.remove(factor)
        self._update_slowdown()

    def _update_slowdown(self) -> None:
        self.slowed = 1.0
        for factor in self.slowdowns:
            self.slowed *= factor


def mean_factor(spread: Spread, random: Random) -> Callable[[int], float]:
    """A function of n: the mean factor of the next n calls, from a single random number."""
    match spread:
        case Constant():
            return lambda _: 1.0
        case Trace(factors):
            return _trace_factor(factors)
        case Lognormal(sigma):
            return _lognormal_factor(sigma, random)


def _trace_factor(factors: tuple[float, ...]) -> Callable[[int], float]:
    sums = [0.0, *accumulate(factors)]
    length, place = len(factors), 0

    def mean_of(n: int) -> float:
        nonlocal place
        if n == 1:
            factor = factors[place]
            place = (place + 1) % length
            return factor
        rounds, end = divmod(place + n, length)
        total = rounds * sums[-1] + sums[end] - sums[place]
        place = end
        return total / n

    return mean_of


def _lognormal_factor(sigma: float, random: Random) -> Callable[[int], float]:
    """Approximates the mean of n lognormals by one lognormal with the same mean and variance (Fenton and Wilkinson)."""
    known: dict[int, tuple[float, float]] = {}
    gauss = random.gauss

    def mean_of(n: int) -> float:
        if n not in known:
            variance = log1p(expm1(sigma * sigma) / n)
            known[n] = (-variance / 2, sqrt(variance))
        return exp(gauss(*known[n]))

    return mean_of


class RunningMessage:
    """A message that has started."""

    __slots__ = ("began", "command", "hosting", "live", "seconds", "tracked")

    def __init__(self, command: RunBatches, hosting: SimulatedObject, began: float) -> None:
        self.command = command
        self.hosting = hosting
        self.began = began
        self.seconds = 0.0
        self.live = True
        """False when its worker was lost meanwhile; its entry in the event queue is then ignored."""
        self.tracked: TrackedMessage | None = None

    def call_at(self, now: float, hop_s: float) -> int:
        """The first item of the running call."""
        if self.tracked is not None:
            return self.tracked.index
        command = self.command
        calls = -(-command.items // command.batch_size)
        share = (now - self.began - hop_s) / self.seconds if self.seconds > 0 else 0.0
        return min(max(int(share * calls), 0), calls - 1) * command.batch_size


class CallRequest:
    """A call on a hosted object."""

    __slots__ = ("arguments", "deadline_s", "future", "hosted", "hosting", "live", "method", "named", "takes_slot")

    def __init__(
        self,
        hosted: str,
        method: str,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        future: WorkerCallFuture,
        deadline_s: float | None = None,
    ) -> None:
        self.hosted = hosted
        self.method = method
        self.arguments = arguments
        self.named = named
        self.future = future
        self.deadline_s = deadline_s
        self.takes_slot = method not in CONTROL_METHODS
        self.hosting: SimulatedObject | None = None
        self.live = True
        """Whether it is neither answered nor lost with its worker."""


class SimulatedObject:
    """One object in a worker: free slots, and a queue of work in the order sent."""

    __slots__ = ("_instance", "broken", "free", "hosted", "slower", "unit", "waiting", "worker")

    def __init__(self, worker: SimulatedWorker, hosted: HostedObject, unit: SimulatedUnit) -> None:
        self.worker = worker
        self.hosted = hosted
        self.unit = unit
        self.slower = unit.draw_slowness()
        self.free = hosted.slots
        self.broken = False
        """It got a poison item (`Behaviour.poison`) and raises from then on."""
        self.waiting: deque[RunBatches | CallRequest] = deque()
        self._instance: Any = None

    def poison(self) -> None:
        self.broken = True

    def answer(self, asked: CallRequest) -> Any:
        """Calls are made on the real object; only their duration is simulated. Without an object they return None."""
        if self.hosted.definition is None:
            return None
        if self._instance is None:
            # not before the first call: objects of a stream are never called and may be expensive models
            work: Any = self.hosted.definition
            self._instance = work() if isinstance(work, type) else work
            if isinstance(work, tuple):  # the last stage receives calls
                code = work[-1]
                self._instance = code.run(*code.args, **(code.kwargs or {}))
        return getattr(self._instance, asked.method)(*asked.arguments, **asked.named)


class SimulatedWorker:
    __slots__ = ("calls", "hosting", "nodes", "number", "peak_bytes", "ready", "running", "stopping")

    def __init__(self, command: StartWorker, units: list[SimulatedUnit]) -> None:
        self.number = command.worker
        self.nodes = tuple(dict.fromkeys(seat.node for seat in command.seats))
        self.hosting = {
            hosted.name: SimulatedObject(self, hosted, unit) for hosted, unit in zip(command.hosted, units, strict=True)
        }
        self.running: dict[int, RunningMessage] = {}
        self.calls: dict[int, CallRequest] = {}
        """Started work, by identity of the call."""
        self.peak_bytes = sum([unit.behaviour.peak_bytes for unit in units])
        self.ready = False
        self.stopping = False

    @property
    def idle(self) -> bool:
        return not (self.running or self.calls or any(hosting.waiting for hosting in self.hosting.values()))
