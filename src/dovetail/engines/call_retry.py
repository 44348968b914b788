"""Retries of a failed call with backoff, in the worker that made the call. Used by stages and UDFs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dovetail.pipeline.error_policy import ErrorPolicy

T = TypeVar("T")


def retry_call(
    policy: ErrorPolicy,
    error: BaseException,
    call: Callable[[], T],
    is_final: Callable[[BaseException], bool] = lambda _: False,
) -> T:
    """Repeat a call that raised `error` as often as the policy allows; raises the last exception. Exceptions for which
    `is_final` is true are not retried."""
    retries = 0
    while not is_final(error) and retries < policy.retries_for(error):
        time.sleep(policy.wait_s(retries))
        retries += 1
        try:
            return call()
        except BaseException as raised:  # user code may raise anything
            error = raised
    raise error


async def retry_call_async(
    policy: ErrorPolicy,
    error: BaseException,
    call: Callable[[], Awaitable[T]],
    is_final: Callable[[BaseException], bool],
) -> T:
    """The same for a coroutine."""
    import asyncio  # not every worker needs it

    retries = 0
    while not is_final(error) and retries < policy.retries_for(error):
        await asyncio.sleep(policy.wait_s(retries))
        retries += 1
        try:
            return await call()
        except BaseException as raised:  # user code may raise anything
            error = raised
    raise error
