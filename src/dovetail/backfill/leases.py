"""Who fills several columns now? One lease for each, always in the same order: nobody waits for who waits for him."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from dovetail.backfill.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dovetail.backfill.store import Store


@contextmanager
def held(
    store: Store, columns: Iterable[str], run: str, *, wait: bool, say: Callable[[str], None]
) -> Iterator[list[Lease]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Lease.take(store, column, run, wait=wait, say=say)) for column in sorted({*columns})]
