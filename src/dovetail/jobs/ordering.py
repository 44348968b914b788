"""Order in which jobs are claimed. Pure.

The order key is static: `enqueued_ms - priority x 60 s`. Two jobs that wait never change places, because both age at
the same rate, so no key is ever computed again. A job waits behind one of a higher priority only if that one was
enqueued less than 60 s per priority step after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.jobs.job import JobRecord

AGEING_MS_PER_STEP = 60_000


def order_key(enqueued_ms: int, priority: int) -> int:
    """Order key: jobs with the smallest key are claimed first, those with equal keys in the order of their ids."""
    return enqueued_ms - priority * AGEING_MS_PER_STEP


def order_of(record: JobRecord) -> tuple[int, str]:
    return order_key(record.enqueued_ms, record.spec.priority), record.spec.id
