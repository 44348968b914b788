"""How does a run get its place beside others, and what does it say while it waits?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dovetail.claims.book import Grant
from dovetail.claims.words import Told
from dovetail.errors import InfeasibleError, Problem
from dovetail.resources.amounts import amounts_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from dovetail.claims.book import About, Book, Wait
    from dovetail.resources.seat import Seats

POLL_S = 0.1
"""Between two looks at whether somebody wrote."""
ASK_AGAIN_S = 1.0
"""Although nobody wrote: one of them may have died."""
SETTLE_S = 1.0
"""Once it could begin it waits so long for the rest of its share: a plan for more is a better one."""
SAY_AGAIN_S = 10.0


def wait_for_claim(
    book: Book,
    about: About,
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
    teller = _Teller(book, need, say, strangers)
    could_begin: float | None = None
    grant: Grant | None = None
    try:
        while grant is None and not (stop is not None and stop.is_set()):
            now = time.monotonic()
            hurry = no_wait or (could_begin is not None and now >= could_begin + settle_s)
            answer = book.ask(about, need, ideal, hurry=hurry)
            if isinstance(answer, Grant):
                grant = answer
            elif void(answer):
                return None
            elif no_wait:
                raise _held_by_others(book, answer, need, strangers)
            elif answer.fits:
                could_begin = now if could_begin is None else could_begin
                _until_news(book, stop, could_begin + settle_s)
            else:
                could_begin = None
                teller.tell(answer, now)
                _until_news(book, stop, now + ASK_AGAIN_S)
        return grant
    finally:
        if grant is None:
            book.release(about.id)


def _until_news(book: Book, stop: threading.Event | None, latest: float) -> None:
    """Waits until somebody wrote into the ledger, or it is time to look anyway."""
    while True:
        if stop is None:
            time.sleep(POLL_S)
        elif stop.wait(POLL_S):
            return
        if book.changed() or time.monotonic() >= latest:
            return


class _Teller:
    """Says what is waited for: at once, and when it changes, but not all the time."""

    def __init__(
        self, book: Book, need: Seats, say: Callable[[str], None], strangers: Callable[[], tuple[str, ...]]
    ) -> None:
        self._book, self._need, self._say, self._strangers = book, amounts_of(need), say, strangers
        self._said: tuple[object, ...] = ()
        self._at = float("-inf")

    def tell(self, wait: Wait, now: float) -> None:
        told = Told(wait, self._need, self._book.capacity)
        what = (told.needs, told.holders, told.comes)
        if what != self._said and now >= self._at + SAY_AGAIN_S:
            self._said, self._at = what, now
            named = self._strangers() if told.by_strangers else ()
            self._say(told.line(time.time(), "; ".join(named)))


def _held_by_others(book: Book, wait: Wait, need: Seats, strangers: Callable[[], tuple[str, ...]]) -> InfeasibleError:
    told = Told(wait, amounts_of(need), book.capacity)
    who = f"others on {book.where}" if wait.foreign else f"other runs of {book.where}"
    message = f"{told.needs} must be free to begin, and {who} hold too much"
    ends = tuple(f"or end run {owner.name}" for owner in wait.others[:1])
    fixes = ("wait=True: it begins as soon as they give back", *ends)
    named = strangers() if told.by_strangers else ()
    return InfeasibleError(Problem("DT120", message, (*told.holders, *named), fixes))
