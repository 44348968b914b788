"""Batches: one call of a function for several jobs. The declaration, and the mark by which such jobs share a bucket.

A mark is a custom resource of amount 0 in the shape of a job: it fits everywhere, and gives the jobs of one function
and one value of the key a bucket of their own, in every store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dovetail.pipeline.durations import parse_duration
from dovetail.resources.sizes import parse_size

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape

SIZE_LIMIT = 1_000
MARK = "batch "
SHAPES_CACHED = 1_000


@dataclass(frozen=True, slots=True)
class Batch:
    """One call for many jobs: `@dt.job(batch=dt.Batch(size=32, wait="10ms", key="model"))`.

    The function gets a list for each parameter, with an item per job, and returns a list with a result per job; the
    parameter `key` has one value instead, which all jobs of the call have in common. A call is made when it has `size`
    jobs or `bytes` of arguments, or `wait` after its first job was claimed.
    """

    size: int = 32
    """Maximum number of jobs."""
    wait: str | float = "10ms"
    """How long the first job waits for others."""
    bytes: str | int | None = None
    """Size of the encoded arguments from which no more jobs are added."""
    key: str | None = None
    """Parameter that must be equal."""

    @property
    def wait_s(self) -> float:
        return parse_duration(self.wait) if self.wait else 0.0

    @property
    def bytes_limit(self) -> int | None:
        return None if self.bytes is None else parse_size(self.bytes)


def mark_of(function: str, key: str | None, arguments: dict[str, object]) -> str:
    """The mark of a job: its function, and a digest of the value of its key."""
    if key is None:
        return MARK + function
    from hashlib import blake2b  # late, as in `job_function.py`

    value = json.dumps(arguments.get(key), sort_keys=True, default=repr)
    return f"{MARK}{function} {blake2b(value.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


@lru_cache(SHAPES_CACHED)
def marked_shape(shape: Shape, mark: str) -> Shape:
    return replace(shape, custom=tuple(sorted((*shape.custom, (mark, 0)))))


@lru_cache(SHAPES_CACHED)
def unmarked_shape(shape: Shape) -> Shape:
    """What the call for such a job needs."""
    custom = tuple(item for item in shape.custom if not (item[0].startswith(MARK) and not item[1]))
    return shape if custom == shape.custom else replace(shape, custom=custom)


def is_marked(shape: Shape) -> bool:
    return unmarked_shape(shape) is not shape
