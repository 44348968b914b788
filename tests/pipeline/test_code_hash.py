"""The hash of a stage changes exactly when its code changes."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.pipeline.code_hash import code_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SOURCE = """
import math
LIMIT = 3
OTHER = 4

def helper(x):
    return x + LIMIT

def work(items):
    return [helper(item) for item in items]

class Base:
    def __call__(self, items):
        return self.each(items)

class Worker(Base):
    scale = 2
    def setup(self, worker):
        self.table = [1, 2]
    def each(self, items):
        return items

def unrelated(x):
    return x
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that can be imported, and forgets it again; the name is the same every time."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> str:
        (tmp_path / "hashed_steps.py").write_text(source, encoding="utf-8")
        sys.modules.pop("hashed_steps", None)
        importlib.invalidate_caches()
        return "hashed_steps"

    yield write
    sys.modules.pop("hashed_steps", None)


@pytest.mark.parametrize("name", ["work", "Worker"])
@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("LIMIT = 3", "LIMIT = 3  # a comment", True),
        ("def work(items):\n", 'def work(items):\n    """A docstring."""\n', True),
        ("def helper", "# moved\n\n\n\ndef helper", True),
        ("return x\n", "return x + 1\n", True),
        ("OTHER = 4", "OTHER = 5", True),
        ("LIMIT = 3", "LIMIT = 30", "Worker"),
        ("x + LIMIT", "x - LIMIT", "Worker"),
        ("scale = 2", "scale = 3", "work"),
        ("[1, 2]", "[1, 2, 3]", "work"),
        ("self.each(items)", "self.each(items[:])", "work"),
    ],
)
def test_only_what_a_stage_uses_changes_its_hash(
    module: Callable[[str], str], name: str, old: str, new: str, same: bool | str
) -> None:
    text = f"{module(SOURCE)}:{name}"
    before = code_hash(text)
    assert old in SOURCE
    module(SOURCE.replace(old, new))
    assert (code_hash(text) == before) is (same is True or same == name)
    loaded = getattr(importlib.import_module("hashed_steps"), name)
    after = code_hash(loaded)
    module(SOURCE)
    loaded = getattr(importlib.import_module("hashed_steps"), name)
    assert (code_hash(loaded) == after) is (same is True or same == name)


def test_a_text_is_not_imported(module: Callable[[str], str]) -> None:
    name = module("raise SystemExit('imported')\ndef work(items):\n    return items\n")
    first = code_hash(f"{name}:work")
    assert name not in sys.modules
    module("raise SystemExit('imported')\ndef work(items):\n    return items[:1]\n")
    assert code_hash(f"{name}:work") != first


def test_a_function_has_the_same_hash_as_its_name(module: Callable[[str], str]) -> None:
    name = module(SOURCE)
    text = code_hash(f"{name}:work")
    assert code_hash(importlib.import_module(name).work) == text
    assert code_hash(importlib.import_module(name).Worker) == code_hash(f"{name}:Worker")


def adder(by: Any) -> Callable[[int], int]:
    return lambda x: x + by


def test_what_a_function_holds_counts() -> None:
    assert code_hash(adder(1)) == code_hash(adder(1))
    assert code_hash(adder(1)) != code_hash(adder(2))
    assert code_hash(adder(adder(1))) != code_hash(adder(adder(2)))
    assert code_hash(adder({"a": [1]})) != code_hash(adder({"a": [2]}))
    assert code_hash(functools.partial(adder, 1)) != code_hash(functools.partial(adder, 2))
    assert code_hash(functools.partial(adder, by=1)) != code_hash(functools.partial(adder, by=2))
    assert code_hash(dt.each(adder)) != code_hash(adder)
    assert code_hash(lambda x: x + 1) != code_hash(lambda x: x + 2)


def test_objects_count_by_class_and_plain_data() -> None:
    class Scale:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, x: int) -> int:
            return x * self.by

        def times(self, x: int) -> int:
            return x * self.by

    assert code_hash(Scale(1)) == code_hash(Scale(1))
    assert code_hash(Scale(1)) != code_hash(Scale(2))
    assert code_hash(Scale(1).times) != code_hash(Scale(2).times)
    assert code_hash(Scale) == code_hash(Scale)


class Awkward:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self, items: list[int]) -> list[int]:
        return items


def test_it_never_raises_and_stays_the_same() -> None:
    loop: list[Any] = []
    loop.append(loop)
    awkward: list[Any] = [
        None,
        3,
        "",
        "no_such_module:f",
        "no such text",
        ":",
        "os:path.join",
        len,
        print,
        int,
        object(),
        Awkward(),
        adder(loop),
        adder(object()),
        adder(list(range(100_000))),
        adder("\udcff"),
        functools.partial(len),
        dt.each(str.upper),
        [].append,
    ]
    assert [code_hash(it) for it in awkward] == [code_hash(it) for it in awkward]
    assert all(len(code_hash(it)) == 20 for it in awkward)


def test_sets_have_no_order() -> None:
    words = [f"word{n}" for n in range(50)]
    backwards = words[::-1]
    assert code_hash(adder(set(words))) == code_hash(adder(set(backwards)))
