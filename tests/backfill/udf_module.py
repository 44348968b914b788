"""UDFs in a module that can be imported, for tests in other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.backfill.udf import udf

if TYPE_CHECKING:
    import pyarrow as pa

PREFIX = ">"


def helper(text: str) -> str:
    return PREFIX + text


@udf(cpus=2)
def marked(text: str) -> str:
    """Puts a mark before it."""
    return helper(text)


@udf
def countdown(n: int) -> int:
    return 0 if n <= 0 else countdown(n - 1) + 1


def plain(text: str) -> str:
    return text.upper()


other = udf(plain, cpus=3)


class Parts(NamedTuple):
    first: str
    length: int


@udf
def parts(text: str) -> Parts:
    return Parts(text[:1], len(text))


@udf
class Scaled:
    """A class with a setup."""

    def __init__(self) -> None:
        self.ready = 0

    def setup(self) -> None:
        self.ready += 1

    def __call__(self, n: int) -> int:
        return n * 10 * self.ready


@udf(data_type="string")
def arrays(text: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    return pc.utf8_upper(text)
