"""Waiting for a claim: block until a run is granted its share, and report which runs hold what it needs.

`runtime` calls `wait_for_claim` before a run begins.
"""

from __future__ import annotations

import os
import time
from functools import reduce
from typing import TYPE_CHECKING

from dovetail.claims.store import Grant
from dovetail.errors import Change, InfeasibleError, Problem
from dovetail.resources.amounts import CPU, CUSTOM_PREFIX, HOST, MEMORY, subtract_amounts, sum_seats
from dovetail.resources.sizes import format_milli, format_size

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from dovetail.claims.owner import Owner
    from dovetail.claims.store import ClaimRequest, ClaimStore, Wait
    from dovetail.errors import Fix
    from dovetail.resources.amounts import AmountKey, Amounts
    from dovetail.resources.seat import Seats

RESOURCE_NAMES = {
    (True, CPU): "CPUs",
    (True, MEMORY): "memory",
    (False, "milli"): "GPUs",
    (False, "memory_bytes"): "GPU memory",
    (False, "nvdecs"): "NVDECs",
    (False, "nvencs"): "NVENCs",
}
BYTE_RESOURCES, COUNTED_RESOURCES = ("memory", "GPU memory"), ("NVDECs", "NVENCs")
MAX_HOLDERS_SHOWN, MAX_PIECES_SHOWN = 3, 6


class WaitReport:
    """Text about the holders of what a run waits for."""

    def __init__(self, wait: Wait, need: Amounts, capacity: Amounts) -> None:
        self.will_fit = wait.will_fit
        self._total = _totals_by_resource(capacity)
        self._need, got = _totals_by_resource(need), _totals_by_resource(wait.owner.granted)
        self._missing = [name for name, amount in self._need.items() if amount > got.get(name, 0)] or list(self._need)
        holders = [
            other
            for other in wait.others
            if any(_totals_by_resource(other.granted).get(name) for name in self._missing)
        ]
        self._holders = holders or [other for other in wait.others if other.granted]
        foreign = _totals_by_resource(wait.foreign)
        self._foreign = foreign if any(foreign.get(name) for name in self._missing) else {}

        used = [other.held for other in wait.others] + [wait.foreign]
        self._free = reduce(subtract_amounts, used, capacity)
        """Not used by workers of other runs, though it may be granted to them."""

    @property
    def fragments(self) -> tuple[str, ...]:
        """If enough is free in total, but not in one place: '3 CPUs are free, but as 1 + 1 + 1'."""
        total = _totals_by_resource(self._free)
        if any(total.get(name, 0) < self._need[name] for name in self._missing):
            return ()
        return tuple(map(self._fragment_text, self._missing))

    def _fragment_text(self, name: str) -> str:
        pieces = sorted((amount for key, amount in self._free.items() if _resource_name(key) == name), reverse=True)
        shown = " + ".join(_amount_text(name, amount) for amount in pieces[:MAX_PIECES_SHOWN])
        more = f" + ... ({len(pieces)} pieces)" if len(pieces) > MAX_PIECES_SHOWN else ""
        return f"{_amount_with_unit(name, sum(pieces))} are not in use, but as {shown}{more}"

    @property
    def needs(self) -> str:
        """Missing amounts: '4 CPUs, 16GB memory'."""
        return ", ".join(_amount_with_unit(name, self._need[name]) for name in self._missing)

    @property
    def holders(self) -> tuple[str, ...]:
        """One text per holder: 'run fill-2026 (pid 123) holds 8 of 8 CPUs'."""
        return (*map(self._holder_text, self._holders), *self._foreign_lines())

    @property
    def has_foreign_holders(self) -> bool:
        """Whether programs other than Dovetail hold some of it."""
        return bool(self._foreign)

    def text(self, now: float, foreign_holders: str = "") -> str:
        """'waiting for 4 CPUs: run ... has held 8 of 8 CPUs for 12 s; it will release ...'. `foreign_holders`: names of
        programs other than Dovetail, if known."""
        holders = [
            f"{self._holder_text(owner, 'has held')} for {max(0.0, now - owner.since):.0f} s"
            for owner in self._holders[:MAX_HOLDERS_SHOWN]
        ]
        if len(self._holders) > MAX_HOLDERS_SHOWN:
            holders.append(f"and {len(self._holders) - MAX_HOLDERS_SHOWN} more")
        holders += [f"{line} ({foreign_holders})" if foreign_holders else line for line in self._foreign_lines()]
        return f"waiting for {self.needs}: {', '.join(holders) or 'earlier runs have priority'}; {self._outlook_text()}"

    def _foreign_lines(self) -> list[str]:
        return [f"programs other than Dovetail hold {self._amounts_text(self._foreign)}"] if self._foreign else []

    def _outlook_text(self) -> str:
        if self._foreign and not self.will_fit:
            return "this run begins when enough of that is free"
        one = len(self._holders) == 1
        if one and self._holders[0].process.pid == os.getpid() and not self.will_fit:
            return "it is a run of this program: read all of its results first, or reduce the resources of both"
        if self.will_fit:
            return "it will release them at its next replan" if one else "they will release them at their next replans"
        return "this run begins when that one ends" if one else "this run begins when enough of them have ended"

    def _holder_text(self, owner: Owner, verb: str = "holds") -> str:
        amounts = self._amounts_text(_totals_by_resource(owner.granted))
        return f"run {owner.name} (pid {owner.process.pid}) {verb} {amounts}"

    def _amounts_text(self, held: dict[str, int]) -> str:
        """'8 of 8 CPUs, 1 of 2 GPUs'."""
        return ", ".join(
            f"{_amount_text(name, held.get(name, 0))} of {_amount_with_unit(name, self._total.get(name, 0))}"
            for name in self._missing
        )


def _totals_by_resource(amounts: Amounts) -> dict[str, int]:
    """Resource -> total amount in its integer unit."""
    found: dict[str, int] = {}
    for key, amount in amounts.items():
        found[_resource_name(key)] = found.get(_resource_name(key), 0) + amount
    return found


def _resource_name(key: AmountKey) -> str:
    _, card, what = key
    return RESOURCE_NAMES.get((card == HOST, what), what.removeprefix(CUSTOM_PREFIX))


def _amount_text(name: str, amount: int) -> str:
    return (
        format_size(amount)
        if name in BYTE_RESOURCES
        else str(amount)
        if name in COUNTED_RESOURCES
        else format_milli(amount)
    )


def _amount_with_unit(name: str, amount: int) -> str:
    one = amount == (1 if name in COUNTED_RESOURCES else 1000)
    return f"{_amount_text(name, amount)} {name.removesuffix('s') if one and name in RESOURCE_NAMES.values() else name}"


POLL_S = 0.1
"""Interval for checking whether another run has written."""
RETRY_S = 1.0
"""Interval for a new request without changes: another run may have died."""
SETTLE_S = 1.0
"""Once it could begin, a run waits this long for the rest of its share, because a plan for more is better."""
MESSAGE_INTERVAL_S = 10.0


def wait_for_claim(
    store: ClaimStore,
    about: ClaimRequest,
    need: Seats,
    ideal: Seats | None = None,
    *,
    say: Callable[[str], None],
    no_wait: bool = False,
    timeout_s: float | None = None,
    stop: threading.Event | None = None,
    settle_s: float = SETTLE_S,
    foreign_holders: Callable[[], tuple[str, ...]] = tuple,
    is_obsolete: Callable[[Wait], bool] = lambda _: False,
) -> Grant | None:
    """Return when the run may begin; None if `stop` was set before, or if the request `is_obsolete`. With `no_wait`,
    or after `timeout_s`, raise an InfeasibleError that names the holders. A run that does not begin leaves no row.
    `foreign_holders`: names of programs other than Dovetail."""
    reporter = _WaitReporter(store, need, say, foreign_holders)
    could_begin: float | None = None
    grant: Grant | None = None
    end = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while grant is None and not (stop is not None and stop.is_set()):
            now = time.monotonic()
            no_wait = no_wait or (end is not None and now >= end)
            accept_minimum = no_wait or (could_begin is not None and now >= could_begin + settle_s)
            answer = store.request(about, need, ideal, accept_minimum=accept_minimum)
            if isinstance(answer, Grant):
                grant = answer
            elif is_obsolete(answer):
                return None
            elif no_wait:
                raise _held_by_others_error(store, answer, need, foreign_holders)
            elif answer.can_begin:
                could_begin = now if could_begin is None else could_begin
                _wait_for_change(store, stop, could_begin + settle_s)
            else:
                could_begin = None
                reporter.report(answer, now)
                _wait_for_change(store, stop, now + RETRY_S if end is None else min(now + RETRY_S, end))
        return grant
    finally:
        if grant is None:
            store.release(about.id)


def _wait_for_change(store: ClaimStore, stop: threading.Event | None, latest: float) -> None:
    """Wait until another run has written, or the time has come."""
    while True:
        if stop is None:
            time.sleep(POLL_S)
        elif stop.wait(POLL_S):
            return
        if store.has_changed() or time.monotonic() >= latest:
            return


class _WaitReporter:
    """Prints what the run waits for: at once, and after changes, at most every MESSAGE_INTERVAL_S."""

    def __init__(
        self, store: ClaimStore, need: Seats, say: Callable[[str], None], foreign_holders: Callable[[], tuple[str, ...]]
    ) -> None:
        self._store, self._need, self._say, self._foreign_holders = store, sum_seats(need), say, foreign_holders
        self._last_content: tuple[object, ...] = ()
        self._at = float("-inf")

    def report(self, wait: Wait, now: float) -> None:
        report = WaitReport(wait, self._need, self._store.capacity)
        content = (report.needs, report.holders, report.will_fit)
        if content != self._last_content and now >= self._at + MESSAGE_INTERVAL_S:
            self._last_content, self._at = content, now
            names = self._foreign_holders() if report.has_foreign_holders else ()
            self._say(report.text(time.time(), "; ".join(names)))


def _held_by_others_error(
    store: ClaimStore, wait: Wait, need: Seats, foreign_holders: Callable[[], tuple[str, ...]]
) -> InfeasibleError:
    report = WaitReport(wait, sum_seats(need), store.capacity)
    who = f"other programs on {store.scope}" if wait.foreign else f"other runs on {store.scope}"
    message = f"the run needs {report.needs} to begin, but {who} hold too much"
    fixes: tuple[Fix, ...] = (
        Change({"wait": True}, note="the run starts as soon as they are free"),
        *(f"dovetail drain {owner.name}" for owner in wait.others[:1]),
    )
    names = foreign_holders() if report.has_foreign_holders else ()
    return InfeasibleError(Problem("DT120", message, (*report.holders, *names, *report.fragments), fixes))
