"""Code of roles: what is found before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

import dovetail as dt
from dovetail.actors.role_code import inspect_roles


class Pool:
    def __init__(self, size: int, *, kind: str = "fifo") -> None:
        self.size, self.kind = size, kind

    def fill(self) -> float:
        return 0.5


def make_pool(size: int) -> Pool:
    return Pool(size)


class Anything:
    def __getattr__(self, name: str) -> Any:
        return name


def problems(*roles: dt.Role, is_local: bool = True) -> list[str]:
    return [problem.render() for problem in inspect_roles(dt.ActorSystem(roles).roles, is_local=is_local).problems]


@pytest.mark.parametrize(
    ("role", "texts"),
    [
        (dt.Role("a", "no_such_module_of_tests:Pool"), ("cls='no_such_module_of_tests:Pool'", "there is no module")),
        (dt.Role("a", f"{__name__}:Pol", args=(1,)), ("has no 'Pol' (did you mean 'Pool'?)",)),
        (dt.Role("a", Pool), ("Pool() cannot be called", "missing a required argument: 'size'", "Pool(size: ")),
        (dt.Role("a", f"{__name__}:Pool", args=(1, 2)), ("Pool() cannot be called", "too many positional")),
        (dt.Role("a", make_pool, kwargs={"sice": 1}), ("make_pool() cannot be called", "size")),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(role: dt.Role, texts: tuple[str, ...]) -> None:
    (found,) = problems(role)
    for text in ("role 'a'", *texts, "  fix  "):
        assert text in found


def test_all_roles_are_reported_at_once() -> None:
    assert len(problems(dt.Role("a", Pool), dt.Role("b", f"{__name__}:Pol"), dt.Role("c", Pool, args=(1,)))) == 2


def test_other_machines_may_have_modules_that_are_missing_here() -> None:
    assert problems(dt.Role("a", "no_such_module_of_tests:Pool"), is_local=False) == []
    assert len(problems(dt.Role("a", Pool), is_local=False)) == 1


@pytest.mark.parametrize(
    ("signal", "fix"),
    [("fil", "fix  signal='fill'"), ("pool.fil", "fix  signal='fill'"), ("other.fil", "fix  signal='other.fill'")],
)
def test_a_signal_that_is_no_method_is_refused(signal: str, fix: str) -> None:
    scaled = dt.Role("pool", Pool, args=(1,), workers=(1, 2), scale=dt.Scale(0.5, signal))
    (found,) = problems(scaled, dt.Role("other", Pool, args=(1,)))
    assert "its signal 'fil' is not a method" in found
    assert fix.replace("'", '"') in found


@pytest.mark.parametrize("signal", ["outstanding", "fill", "any.thing", "made.unknown", lambda live: 1.0])
def test_signals_that_are_methods_or_may_be_are_accepted(signal: Any) -> None:
    scaled = dt.Role("pool", Pool, args=(1,), workers=(1, 2), scale=dt.Scale(0.5, signal))
    assert problems(scaled, dt.Role("any", Anything), dt.Role("made", make_pool, args=(1,))) == []
