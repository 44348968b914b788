"""Waiting for a claim: block until a run is granted its share, and report which runs hold what it needs."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from dovetail.claims.store import Grant
from dovetail.errors import Change, InfeasibleError, Problem
from dovetail.resources.amounts import CPU, CUSTOM_PREFIX, HOST, MEMORY, sum_seats
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
MAX_HOLDERS_SHOWN = 3


class WaitReport:
    """Who holds what somebody waits for, in words."""

    def __init__(self, wait: Wait, need: Amounts, capacity: Amounts) -> None:
        self.will_fit = wait.will_fit
        self._total = _totals_by_resource(capacity)
        self._need, got = _totals_by_resource(need), _totals_by_resource(wait.owner.granted)
        self._missing = [name for name, amount in self._need.items() if amount > got.get(name, 0)] or list(self._need)
        having = [
            other
            for other in wait.others
            if any(_totals_by_resource(other.granted).get(name) for name in self._missing)
        ]
        self._holders = having or [other for other in wait.others if other.granted]
        foreign = _totals_by_resource(wait.foreign)
        self._foreign = foreign if any(foreign.get(name) for name in self._missing) else {}

    @property
    def needs(self) -> str:
        """'4 CPUs, 16GB memory'."""
        return ", ".join(_amount_with_unit(name, self._need[name]) for name in self._missing)

    @property
    def holders(self) -> tuple[str, ...]:
        """'run fill-2026 (pid 123) holds 8 of 8 CPUs', one each."""
        return (*map(self._holder_text, self._holders), *self._foreign_lines())

    @property
    def has_foreign_holders(self) -> bool:
        """Whether some of it is held by those who know nothing of us."""
        return bool(self._foreign)

    def text(self, now: float, strangers: str = "") -> str:
        """All of it for somebody who waits: 'waiting for 4 CPUs: run ... holds ... since 12 s; it gives back ...'.
        `strangers`: their names, if they are known."""
        told = [
            f"{self._holder_text(owner)} since {max(0.0, now - owner.since):.0f} s"
            for owner in self._holders[:MAX_HOLDERS_SHOWN]
        ]
        if len(self._holders) > MAX_HOLDERS_SHOWN:
            told.append(f"and {len(self._holders) - MAX_HOLDERS_SHOWN} more")
        told += [f"{line} ({strangers})" if strangers else line for line in self._foreign_lines()]
        return f"waiting for {self.needs}: {', '.join(told) or 'others come first'}; {self._outlook_text()}"

    def _foreign_lines(self) -> list[str]:
        return [f"others that are not Dovetail's hold {self._amounts_text(self._foreign)}"] if self._foreign else []

    def _outlook_text(self) -> str:
        if self._foreign and not self.will_fit:
            return "this begins when enough of that is free"
        one = len(self._holders) == 1
        if one and self._holders[0].process.pid == os.getpid() and not self.will_fit:
            return "it is a run of this very program: read its results to their end first, or give both of them room"
        if self.will_fit:
            return "it gives back at its next replan" if one else "they give back at their next replans"
        return "it needs that itself: this begins when it ends" if one else "this begins when enough of them have ended"

    def _holder_text(self, owner: Owner) -> str:
        return (
            f"run {owner.name} (pid {owner.process.pid}) holds {self._amounts_text(_totals_by_resource(owner.granted))}"
        )

    def _amounts_text(self, held: dict[str, int]) -> str:
        """'8 of 8 CPUs, 1 of 2 GPUs'."""
        return ", ".join(
            f"{_amount_text(name, held.get(name, 0))} of {_amount_with_unit(name, self._total.get(name, 0))}"
            for name in self._missing
        )


def _totals_by_resource(amounts: Amounts) -> dict[str, int]:
    """By resource, in its own integers."""
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
"""Between two looks at whether somebody wrote."""
RETRY_S = 1.0
"""Although nobody wrote: one of them may have died."""
SETTLE_S = 1.0
"""Once it could begin it waits so long for the rest of its share: a plan for more is a better one."""
MESSAGE_INTERVAL_S = 10.0


def wait_for_claim(
    book: ClaimStore,
    about: ClaimRequest,
    need: Seats,
    ideal: Seats | None = None,
    *,
    say: Callable[[str], None],
    no_wait: bool = False,
    stop: threading.Event | None = None,
    settle_s: float = SETTLE_S,
    strangers: Callable[[], tuple[str, ...]] = tuple,
    void: Callable[[Wait], bool] = lambda _: False,
) -> Grant | None:
    """Returns when the run may begin; None if `stop` was set before, or if what it asks for has become `void`. With
    `no_wait` an InfeasibleError says who holds what. Whoever does not begin leaves nothing in the ledger. `strangers`:
    who they are that know nothing of us."""
    teller = _WaitReporter(book, need, say, strangers)
    could_begin: float | None = None
    grant: Grant | None = None
    try:
        while grant is None and not (stop is not None and stop.is_set()):
            now = time.monotonic()
            hurry = no_wait or (could_begin is not None and now >= could_begin + settle_s)
            answer = book.request(about, need, ideal, hurry=hurry)
            if isinstance(answer, Grant):
                grant = answer
            elif void(answer):
                return None
            elif no_wait:
                raise _held_by_others_error(book, answer, need, strangers)
            elif answer.can_begin:
                could_begin = now if could_begin is None else could_begin
                _wait_for_change(book, stop, could_begin + settle_s)
            else:
                could_begin = None
                teller.report(answer, now)
                _wait_for_change(book, stop, now + RETRY_S)
        return grant
    finally:
        if grant is None:
            book.release(about.id)


def _wait_for_change(book: ClaimStore, stop: threading.Event | None, latest: float) -> None:
    """Waits until somebody wrote into the ledger, or it is time to look anyway."""
    while True:
        if stop is None:
            time.sleep(POLL_S)
        elif stop.wait(POLL_S):
            return
        if book.has_changed() or time.monotonic() >= latest:
            return


class _WaitReporter:
    """Says what is waited for: at once, and when it changes, but not all the time."""

    def __init__(
        self, book: ClaimStore, need: Seats, say: Callable[[str], None], strangers: Callable[[], tuple[str, ...]]
    ) -> None:
        self._book, self._need, self._say, self._strangers = book, sum_seats(need), say, strangers
        self._said: tuple[object, ...] = ()
        self._at = float("-inf")

    def report(self, wait: Wait, now: float) -> None:
        told = WaitReport(wait, self._need, self._book.capacity)
        what = (told.needs, told.holders, told.will_fit)
        if what != self._said and now >= self._at + MESSAGE_INTERVAL_S:
            self._said, self._at = what, now
            named = self._strangers() if told.has_foreign_holders else ()
            self._say(told.text(time.time(), "; ".join(named)))


def _held_by_others_error(
    book: ClaimStore, wait: Wait, need: Seats, strangers: Callable[[], tuple[str, ...]]
) -> InfeasibleError:
    told = WaitReport(wait, sum_seats(need), book.capacity)
    who = f"others on {book.scope}" if wait.foreign else f"other runs of {book.scope}"
    message = f"{told.needs} must be free to begin, and {who} hold too much"
    fixes: tuple[Fix, ...] = (
        Change({"wait": True}, note="the run starts as soon as they are free"),
        *(f"dovetail drain {owner.name}" for owner in wait.others[:1]),
    )
    named = strangers() if told.has_foreign_holders else ()
    return InfeasibleError(Problem("DT120", message, (*told.holders, *named), fixes))
