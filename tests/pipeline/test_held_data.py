"""The hash of a function depends on the data that it holds, and only on its value."""

from __future__ import annotations

import array
import datetime
import decimal
import re
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dovetail.pipeline.code_hash import code_hash, describe_data

if TYPE_CHECKING:
    from collections.abc import Callable


def holding(data: Any) -> Callable[[int], Any]:
    return lambda x: (x, data)


@dataclass(slots=True)
class Slotted:
    by: int


DAY = datetime.date(2024, 1, 1)
MANY = list(range(2000))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (re.compile("a"), re.compile("b")),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (re.compile("a"), re.compile(b"a")),
        (bytearray(b"a"), bytearray(b"b")),
        (memoryview(b"a"), memoryview(b"b")),
        (array.array("i", [1]), array.array("i", [2])),
        (array.array("i", [1]), array.array("I", [1])),
        (DAY, datetime.date(2024, 1, 2)),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (Path("a"), Path("b")),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
        (range(3), range(4)),
        (deque([1]), deque([2])),
        (MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
        (SimpleNamespace(a=1), SimpleNamespace(a=2)),
        (Slotted(1), Slotted(2)),
        (np.array([1.0]), np.array([2.0])),
        (np.array([1]), np.array([[1]])),
        (np.array([1], np.int32), np.array([1], np.uint32)),
        (np.array(["a", None], object), np.array(["b", None], object)),
        (np.array([(1, 2.0)], "i1,f8"), np.array([(1, 3.0)], "i1,f8")),
        (np.array(["2024-01-01"], "M8[D]"), np.array(["2024-01-02"], "M8[D]")),
        (np.array([1], np.longdouble), np.array([2], np.longdouble)),
        (np.int32(1), np.int32(2)),
        (pa.array([1]), pa.array([2])),
        (pa.array([1]), pa.array([1], pa.int32())),
        (pa.array(["a", None]), pa.array(["b", None])),
        (pa.array(["a"]).dictionary_encode(), pa.array(["b"]).dictionary_encode()),
        (pa.table({"a": [1]}), pa.table({"b": [1]})),
        (pa.record_batch({"a": [1]}), pa.record_batch({"a": [2]})),
        (pa.scalar(1), pa.scalar(2)),
        (pa.int8(), pa.int16()),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [2]})),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]})),
        (pd.Series([1], index=[1]), pd.Series([1], index=[2])),
        (MANY, [*MANY[:-1], -1]),
        (MANY, MANY[::-1]),
        (set(MANY), {*MANY[:-1], -1}),
        (dict.fromkeys(MANY, 1), {**dict.fromkeys(MANY, 1), 7: 2}),
        ([[n] for n in MANY], [[n + 1] for n in MANY]),
        ([*MANY, DAY], [*MANY, datetime.date(2024, 1, 2)]),
        ([*MANY, "\udcff"], [*MANY, "\udcfe"]),
        ({"deep": [np.array([1])]}, {"deep": [np.array([2])]}),
    ],
)
def test_other_data_is_another_function(one: Any, two: Any) -> None:
    assert code_hash(holding(one)) == code_hash(holding(one))
    assert code_hash(holding(one)) != code_hash(holding(two))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (np.arange(10)[::2], np.array([0, 2, 4, 6, 8])),
        (np.asfortranarray([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]])),
        (pa.array(range(10)).slice(2, 3), pa.array([2, 3, 4])),
        (pa.array(["a", "b", None, "c"]).slice(1), pa.array(["b", None, "c"])),
        (pa.chunked_array([[1], [2, 3]]), pa.chunked_array([[1, 2, 3]])),
        (pa.Table.from_pandas(pd.DataFrame({"a": [1]})), pa.table({"a": [1]})),
        (set(MANY), {*MANY[::-1]}),
        (dict.fromkeys(MANY), dict.fromkeys(MANY[::-1])),
    ],
)
def test_the_same_data_is_the_same_function_however_it_lies_in_memory(one: Any, two: Any) -> None:
    assert code_hash(holding(one)) == code_hash(holding(two))


class Strange(decimal.Decimal):
    __slots__ = ()
    __repr__ = object.__repr__


def test_objects_that_are_not_data_are_described_by_their_type() -> None:
    for other in (object(), iter([1]), np.random.default_rng(), Strange()):
        assert describe_data(other) is None
    first, second = np.random.default_rng(1), np.random.default_rng(2)
    assert code_hash(holding(first)) == code_hash(holding(second)), "its state is another in every process"


def test_a_recursive_container_is_described_once() -> None:
    parent: list[Any] = []
    parent += [{"number": n, "parent": parent} for n in range(2000)]
    began = time.process_time()
    assert code_hash(holding(parent)) == code_hash(holding(parent))
    other = [*parent[:-1], {"number": -1, "parent": parent}]
    assert code_hash(holding(other)) != code_hash(holding(parent))
    assert time.process_time() - began < 20
