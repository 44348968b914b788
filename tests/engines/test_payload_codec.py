"""Payload codec: round trips of items, unpicklable items, recovery of readable items."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import threading
import tracemalloc
from collections import OrderedDict, deque
from typing import Any, NoReturn, Self

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.engines.local import payload_codec
from dovetail.engines.local.payload_codec import (
    ALIGN_BYTES,
    MIN_OUT_OF_BAND_BYTES,
    PackedPayload,
    Unpicklable,
    find_unpicklable,
    join_layout,
    layout_bytes,
    pack_items,
    part_lengths,
    part_offsets,
    split_layout,
    unpack_payload,
)
from dovetail.engines.local.payload_recovery import BrokenItem, recover_items

MB = 1_000_000


def received(packed: PackedPayload) -> tuple[memoryview, list[memoryview]]:
    """The items as a worker receives them in a message."""
    return split_layout(memoryview(bytearray(join_layout(packed))), part_lengths(packed))


def there_and_back(item: Any) -> Any:
    _, items = unpack_payload(*received(pack_items((), [item])))
    return items[0]


# --------------------------------------------------------------------------------------------------------- plain data

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
data = st.recursive(
    scalars | st.binary(min_size=MIN_OUT_OF_BAND_BYTES - 1, max_size=MIN_OUT_OF_BAND_BYTES + 1).map(bytearray),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.integers()), st.lists(data, max_size=6))
def test_plain_data_round_trips(keys: list[int], items: list[Any]) -> None:
    packed = pack_items(keys, items)
    assert packed.items == len(items)
    assert unpack_payload(*received(packed)) == (keys, items)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_the_layout_is_aligned_and_nothing_overlaps(sizes: list[int]) -> None:
    starts = part_offsets(sizes)
    assert [start % ALIGN_BYTES for start in starts] == [0] * len(sizes)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(end <= start < end + ALIGN_BYTES for end, start in zip(ends, starts[1:], strict=False))
    assert layout_bytes(sizes) == ends[-1]


@given(st.binary(min_size=1), st.lists(st.binary(max_size=200), max_size=5))
def test_a_joined_layout_can_be_split_again(stream: bytes, buffers: list[bytes]) -> None:
    packed = PackedPayload(0, [stream[:1], stream[1:]], [memoryview(buffer) for buffer in buffers])
    joined = join_layout(packed)
    assert packed.size == len(stream) + sum(map(len, buffers))
    assert len(joined) == layout_bytes(part_lengths(packed))
    back, parts = split_layout(memoryview(joined), part_lengths(packed))
    assert (bytes(back), [bytes(part) for part in parts]) == (stream, buffers)


def test_large_bytes_are_not_copied_before_they_are_sent() -> None:
    items = [bytes(10 * MB), bytearray(10 * MB), "x" * 100]
    tracemalloc.start()
    try:
        packed = pack_items((), items)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MB
    assert [id(chunk) for chunk in packed.chunks if len(chunk) > MB] == [id(items[0]), id(items[1])]
    assert packed.size > 20 * MB
    assert unpack_payload(*received(packed))[1] == items


def test_items_shared_before_packing_are_shared_after_it() -> None:
    one, other = there_and_back([shared := [1], shared])
    assert one is other


# ------------------------------------------------------------------------------------------------------------- arrays

ARRAYS = {
    "c": np.arange(40_000.0).reshape(200, 200),
    "fortran": np.asfortranarray(np.arange(40_000).reshape(200, 200)),
    "strided": np.arange(40_000)[::2],
    "small": np.arange(3, dtype=np.uint8),
    "scalar": np.array(7),
    "empty": np.empty((0, 5)),
    "structured": np.array([(1, 2.5)] * 2000, dtype=[("a", "i4"), ("b", "f8")]),
    "datetimes": np.arange("2020-01-01", "2060-01-01", dtype="M8[D]"),
    "strings": np.array(["a", "bc"] * 2000),
    "booleans": np.ones(20_000, bool),
    "unaligned length": np.ones(MIN_OUT_OF_BAND_BYTES + 3, np.uint8),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_round_trips_and_is_writable(name: str) -> None:
    array = ARRAYS[name]
    back = there_and_back(array)
    assert (back.dtype, back.shape, back.flags.writeable) == (array.dtype, array.shape, True)
    assert back.flags.aligned
    assert np.array_equal(back, array)
    before = array.copy()
    if back.size:
        back.flat[0] = back.flat[-1]
    assert np.array_equal(array, before)


def test_an_array_of_objects_round_trips() -> None:
    back = there_and_back(np.array([{"a": 1}, None, "x"], dtype=object))
    assert back.tolist() == [{"a": 1}, None, "x"]


def test_a_read_only_array_stays_read_only() -> None:
    array = np.arange(MIN_OUT_OF_BAND_BYTES)
    array.flags.writeable = False
    assert not there_and_back(array).flags.writeable


def test_only_large_buffers_are_out_of_band_and_not_copied() -> None:
    small, large = np.zeros(MIN_OUT_OF_BAND_BYTES - 1, np.uint8), np.zeros(MIN_OUT_OF_BAND_BYTES, np.uint8)
    packed = pack_items((), [small, large, small])
    assert [len(buffer) for buffer in packed.buffers] == [MIN_OUT_OF_BAND_BYTES]
    large[:] = 7
    assert bytes(packed.buffers[0]) == bytes([7] * MIN_OUT_OF_BAND_BYTES)
    assert [view.format for view in packed.buffers] == ["B"]


def test_a_table_round_trips_out_of_band() -> None:
    table = pa.table({"n": list(range(10_000)), "s": [str(n) for n in range(10_000)], "none": [None] * 10_000})
    packed = pack_items((), [table, pa.array([[1, 2], [], None]), table.to_batches()[0]])
    assert part_lengths(packed)[0] < 10_000
    _, (back, nested, batch) = unpack_payload(*received(packed))
    assert back.equals(table)
    assert nested.to_pylist() == [[1, 2], [], None]
    assert batch.equals(table.to_batches()[0])


# ------------------------------------------------------------------------------------------------------------ tensors

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3,), (100, 200)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_round_trips_and_is_writable(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(math.prod(shape)) % 100).reshape(shape).to(dtype)
    back = there_and_back(tensor)
    assert (back.dtype, back.shape, back.requires_grad) == (dtype, tensor.shape, False)
    assert back.tolist() == tensor.tolist()
    back.zero_()
    assert not back.reshape(-1).view(torch.uint8).any()


def test_a_large_tensor_is_out_of_band_and_not_copied() -> None:
    tensor = torch.ones(10_000)
    packed = pack_items((), [tensor])
    assert [len(buffer) for buffer in packed.buffers] == [40_000]
    assert part_lengths(packed)[0] < 300
    tensor[0] = 3
    assert unpack_payload(*received(packed))[1][0][0] == 3


def test_a_slice_of_a_large_tensor_takes_only_its_own_bytes() -> None:
    whole = torch.arange(1_000_000)
    packed = pack_items((), [whole[10:20], whole.reshape(1000, 1000)[:, 3]])
    assert packed.size < 10_000
    one, column = unpack_payload(*received(packed))[1]
    assert one.tolist() == list(range(10, 20))
    assert torch.equal(column, whole.reshape(1000, 1000)[:, 3])


def test_an_expanded_tensor_does_not_grow() -> None:
    packed = pack_items((), [torch.ones(1).expand(1_000_000)])
    assert packed.size < 10_000
    assert unpack_payload(*received(packed))[1][0].shape == (1_000_000,)


def test_requires_grad_of_a_leaf_tensor_is_kept() -> None:
    back = there_and_back(torch.ones(5000, requires_grad=True))
    assert back.requires_grad
    assert back.is_leaf


def test_unusual_tensors_are_pickled_by_torch() -> None:
    leaf = torch.ones(5000, requires_grad=True)
    marked = torch.ones(3)
    marked.note = "kept"  # type: ignore[attr-defined]
    sparse = torch.eye(100).to_sparse()
    conjugate = torch.ones(3, dtype=torch.complex64).conj() * 1j
    items = [torch.nn.Parameter(torch.ones(5000)), leaf * 2, marked, sparse, conjugate.conj()]
    parameter, product, noted, thin, turned = unpack_payload(*received(pack_items((), items)))[1]
    assert type(parameter) is torch.nn.Parameter
    assert torch.equal(product, torch.full((5000,), 2.0))
    assert noted.note == "kept"
    assert torch.equal(thin.to_dense(), torch.eye(100))
    assert turned.tolist() == [-1j] * 3


def test_a_tensor_in_read_only_bytes_is_copied_without_a_warning() -> None:
    packed = pack_items((), [torch.ones(10_000), torch.ones(3)])
    _, (large, small) = unpack_payload(*split_layout(memoryview(join_layout(packed)), part_lengths(packed)))
    large += 1
    small += 1
    assert (large.sum(), small.sum()) == (20_000, 6)


def test_pickles_of_other_code_do_not_change() -> None:
    pack_items((), [torch.ones(3)])
    assert b"dovetail" not in pickle.dumps(torch.ones(3))


def test_importing_the_modules_loads_nothing_heavy() -> None:
    heavy = ["numpy", "torch", "pyarrow", "cloudpickle", "ctypes", "tempfile", "dataclasses", "pathlib"]
    modules = (
        "dovetail.engines.local.payload_codec, dovetail.engines.local.buffer_pool, "
        "dovetail.engines.local.payload_recovery"
    )
    code = f"import sys, dovetail; before = set(sys.modules); import {modules}; "
    code += "from dovetail.engines.local.payload_codec import pack_items; pack_items((), [1, b'x']); "
    code += f"print([name for name in {heavy} if name in set(sys.modules) - before])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"


# -------------------------------------------------------------------------------------------------- unpicklable items


def test_objects_that_pickle_cannot_import_are_pickled_by_value() -> None:
    class Local:
        def __init__(self, array: Any) -> None:
            self.array = array

        def total(self) -> int:
            return int(self.array.sum())

    items = [Local(np.ones(MIN_OUT_OF_BAND_BYTES)), lambda x: x + 1]
    packed = pack_items((), [*items, torch.ones(MIN_OUT_OF_BAND_BYTES)])
    assert [len(buffer) for buffer in packed.buffers] == [8 * MIN_OUT_OF_BAND_BYTES, 4 * MIN_OUT_OF_BAND_BYTES]
    _, (one, two, three) = unpack_payload(
        *split_layout(memoryview(bytearray(join_layout(packed))), part_lengths(packed))
    )
    assert (one.total(), two(1), int(three.sum())) == (8192, 2, 8192)
    packed = pack_items((), items)  # the other process does not import torch, which takes two seconds
    code = "import sys, pickle; from dovetail.engines.local.payload_codec import unpack_payload, split_layout\n"
    code += "joined, lengths = pickle.load(sys.stdin.buffer)\n"
    code += "_, (one, two) = unpack_payload(*split_layout(memoryview(joined), lengths))\n"
    code += "print(one.total(), two(1))"
    sent = pickle.dumps((bytearray(join_layout(packed)), part_lengths(packed)))
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, input=sent)
    assert shown.stdout.split() == [b"8192", b"2"]


@pytest.mark.parametrize("bad", [threading.Lock(), (n for n in range(3))], ids=["lock", "generator"])
@pytest.mark.parametrize("index", [0, 3])
def test_the_item_that_cannot_be_pickled_is_named(bad: object, index: int) -> None:
    items: list[Any] = [lambda: 1, 2, 3, 4]
    items[index] = {"deep": [bad]}
    with pytest.raises(Unpicklable) as caught:
        pack_items((), items)
    assert caught.value.index == index
    assert caught.value.error_text.startswith("TypeError: cannot pickle")
    assert list(find_unpicklable(items)) == [(index, caught.value.error_text)]


def test_all_unpicklable_items_can_be_listed() -> None:
    items = [1, threading.Lock(), lambda: 1, threading.Lock()]
    assert [index for index, _ in find_unpicklable(items)] == [1, 3]


def test_keys_that_cannot_be_pickled_blame_no_item() -> None:
    with pytest.raises(Unpicklable) as caught:
        pack_items([threading.Lock()], [1, 2])
    assert caught.value.index == -1
    assert "as a whole" in str(caught.value)


def test_an_item_nested_too_deeply_is_named() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Unpicklable) as caught:
        pack_items((), [1, deep])
    assert caught.value.index == 1
    while deep:  # otherwise its deallocation would overflow the stack
        deep = deep[0]


class RunsOut:
    def __reduce__(self) -> NoReturn:
        raise MemoryError


class Silent(Exception):
    def __str__(self) -> NoReturn:
        raise ValueError


class Rude:
    def __reduce__(self) -> NoReturn:
        raise Silent


def test_running_out_of_memory_blames_no_item() -> None:
    with pytest.raises(MemoryError):
        pack_items((), [1, RunsOut()])
    with pytest.raises(MemoryError):
        pack_items((), [lambda: 1, RunsOut()])


def test_an_error_without_a_printable_message_has_its_type_name() -> None:
    with pytest.raises(Unpicklable) as caught:
        pack_items((), [Rude()])
    assert caught.value.error_text == "Silent"
    assert pickle.loads(pickle.dumps(caught.value)).error_text == "Silent"


# --------------------------------------------------------------------------------------------------- unreadable items


class Plain:
    def __init__(self, value: Any = None) -> None:
        self.value = value


class BadState(Plain):
    def __setstate__(self, state: object) -> NoReturn:
        raise ValueError("bad state")


def refuse(*args: object) -> NoReturn:
    raise RuntimeError("cannot be made")


def gone() -> None:
    """Deleted from this module by `recovered`, after it was pickled."""


def describe(value: object) -> str:
    return f"value {value!r}"


class Described:
    """An object whose constructor would accept a BrokenItem."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return describe, (self.value,)


class BadReduce:
    def __reduce__(self) -> Any:
        return refuse, (1,)


class BadSetter(Plain):
    def __reduce__(self) -> Any:
        return Plain, (), {"x": 1}, None, None, refuse


class BadList(list[Any]):
    def extend(self, values: Any) -> NoReturn:
        raise ValueError("no more")

    append = extend


class BadHash(Plain):
    bad = False

    def __hash__(self) -> int:
        if BadHash.bad:
            raise ValueError("no hash")
        return 1


class BadNew:
    bad = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if BadNew.bad:
            raise ValueError("not new")
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> Any:
        return (1,), {"two": 2}


def recovered(items: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The items as they are recovered after the loading of their payload failed."""
    stream, buffers = received(pack_items(list(range(len(items))), items))
    with monkeypatch.context() as patch:
        patch.setattr(BadHash, "bad", True)
        patch.setattr(BadNew, "bad", True)
        patch.delattr(sys.modules[__name__], "gone")
        with pytest.raises((ValueError, RuntimeError, AttributeError)):
            unpack_payload(stream, buffers)
        keys, found = recover_items(stream, buffers)
    assert keys == list(range(len(items)))
    assert len(found) == len(items)
    return found


BAD: dict[str, Any] = {
    "state": (lambda: BadState(1), "ValueError: bad state"),
    "reduce": (BadReduce, "RuntimeError: cannot be made"),
    "missing": (lambda: gone, "AttributeError: "),
    "setter": (BadSetter, "RuntimeError: cannot be made"),
    "list": (lambda: BadList([1, 2]), "ValueError: no more"),
    "key": (lambda: {BadHash(): 1}, "ValueError: no hash"),
    "member": (lambda: {1, BadHash()}, "ValueError: no hash"),
    "frozen member": (lambda: frozenset([1, BadHash()]), "ValueError: no hash"),
    "new": (BadNew, "ValueError: not new"),
}
WRAPS: dict[str, Any] = {
    "bare": lambda bad: bad,
    "list": lambda bad: [1, [bad]],
    "tuple": lambda bad: (1, 2, 3, 4, (bad, 5)),
    "value": lambda bad: {"a": {"b": bad}},
    "object": lambda bad: Plain([Plain(bad)]),
    "deque": lambda bad: deque([1, [bad]]),
    "ordered": lambda bad: OrderedDict(a=bad),
    "array": lambda bad: np.array([1, [bad]], dtype=object),
    "described": lambda bad: Described([bad]),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", BAD)
def test_exactly_the_unreadable_items_are_broken(kind: str, wrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, text = BAD[kind]
    array = np.arange(MIN_OUT_OF_BAND_BYTES)
    good: list[Any] = [1, Plain([2]), array, deque([3]), Described(4), {5}, frozenset([6]), {"k": Plain(7)}]
    for place in (0, 4, len(good)):
        found = recovered([*good[:place], WRAPS[wrap](make()), *good[place:]], monkeypatch)
        broken = found.pop(place)
        assert type(broken) is BrokenItem
        assert broken.error_text.startswith(text)
        assert not any(type(item) is BrokenItem for item in found)
        assert (found[0], found[1].value, found[3], found[4]) == (1, [2], deque([3]), "value 4")
        assert (found[5], found[6], found[7]["k"].value) == ({5}, {6}, 7)
        assert np.array_equal(found[2], array)
        found[2][0] = 1


def test_all_items_that_share_a_broken_object_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = BadState(1)
    kinds = [type(item) for item in recovered([Plain(shared), 1, [shared], Plain(2)], monkeypatch)]
    assert kinds == [BrokenItem, int, BrokenItem, Plain]


def test_an_object_that_gets_a_broken_member_later_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: list[Any] = []
    inner = Plain(loop)  # complete before the list that it refers to
    loop += [inner, BadReduce()]
    kinds = [type(item) for item in recovered([loop, inner, 3], monkeypatch)]
    assert kinds == [BrokenItem, BrokenItem, int]


def test_a_missing_class_breaks_every_item_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Plain(gone) if index % 3 else index for index in range(3000)]
    found = recovered(items, monkeypatch)
    assert [index for index, item in enumerate(found) if type(item) is not BrokenItem] == list(range(0, 3000, 3))


def test_a_stream_of_cloudpickle_is_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Plain):
        pass

    captured = BadReduce()
    found = recovered([Local(1), lambda: captured, lambda: 5, Local(captured)], monkeypatch)
    assert [type(item) is BrokenItem for item in found] == [False, True, False, True]
    assert (found[0].value, found[2]()) == (1, 5)


@pytest.mark.parametrize("keep", [0, 1, 20, -1])
def test_a_damaged_stream_is_not_recovered(keep: int) -> None:
    stream = bytes(received(pack_items([1, 2], ["one", "two"]))[0])
    with pytest.raises(pickle.UnpicklingError, match="damaged"):
        recover_items(stream[:keep], [])


def test_a_stream_that_is_no_payload_is_not_recovered() -> None:
    with pytest.raises(pickle.UnpicklingError, match="not a payload"):
        recover_items(pickle.dumps([1, 2]), [])


def test_broken_keys_are_not_recovered() -> None:
    stream, _ = received(pack_items([BadReduce()], [1]))
    with pytest.raises(pickle.UnpicklingError, match="the keys cannot be loaded: RuntimeError: cannot be made"):
        recover_items(stream, [])


def test_running_out_of_memory_is_not_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*args: object) -> NoReturn:
        raise MemoryError

    stream, _ = received(pack_items([1], [BadReduce()]))
    monkeypatch.setattr(sys.modules[__name__], "refuse", run_out)
    with pytest.raises(MemoryError):
        recover_items(stream, [])


def test_the_size_limits_are_consistent() -> None:
    assert MIN_OUT_OF_BAND_BYTES < payload_codec.MAX_INLINE_BYTES
