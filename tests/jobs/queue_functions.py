"""Functions that the tests of the queue submit."""

from __future__ import annotations

import dovetail as dt

calls: list[object] = []
"""What `note` was called with, in order. Emptied by the fixture `queue`."""


@dt.job
def add(a: int, b: int = 0) -> int:
    return a + b


@dt.job
def scale(value: float, factor: float) -> float:
    return value * factor


@dt.job
def note(value: object) -> object:
    calls.append(value)
    return value


@dt.job
def fail(message: str) -> None:
    raise ValueError(message)


@dt.job(
    resources=dt.Resources(cpus=2, gpus=1), queue="gpu", priority="high", timeout="1h", retries=0, isolation="process"
)
def train(config: dict[str, object], timeout: float = 3.0, *, epochs: int = 1) -> dict[str, object]:
    return {**config, "timeout": timeout, "epochs": epochs}


def undeclared(value: int) -> int:
    return value


class Model:
    def fit(self) -> None: ...


def make_function() -> object:
    def inner() -> None: ...

    return inner


square = dt.job(lambda number: number * number)
"""A declared function whose own name is not the name in the module."""
