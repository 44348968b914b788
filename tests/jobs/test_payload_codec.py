"""Arguments and results as bytes: what JSON keeps, what is refused, pickle, and large data in files."""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.jobs.payload_codec import (
    MAX_DEPTH,
    PayloadCodec,
    call_problems,
    decode_call,
    decode_result,
    encode_call,
    encode_result,
)
from dovetail.jobs.payload_files import open_files

if TYPE_CHECKING:
    from pathlib import Path

CODEC = PayloadCodec()
PICKLE = PayloadCodec(allow_pickle=True)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


def same(left: object, right: object) -> bool:
    """Equal in value and type: 1 is not 1.0 or True, and 0.0 is not -0.0."""
    return repr(left) == repr(right)


@given(st.lists(json_values, max_size=4), st.dictionaries(st.text(), json_values, max_size=4))
def test_json_values_are_kept_exactly(args: list[Any], kwargs: dict[str, Any]) -> None:
    for codec in (CODEC, PICKLE):
        payload, encoding = encode_call(args, kwargs, codec)
        assert encoding == "json"
        assert same(decode_call(payload, encoding, codec), (tuple(args), kwargs))
        assert same(decode_result(*encode_result(args, codec), codec), args)


@given(
    st.recursive(
        json_values, lambda inner: st.tuples(inner) | st.sets(st.integers(), max_size=1) | st.binary(), max_leaves=10
    )
)
def test_pickle_keeps_what_json_does_not(value: object) -> None:
    assert same(decode_result(*encode_result(value, PICKLE), PICKLE), value)
    assert same(decode_call(*encode_call((value,), {}, PICKLE), PICKLE), ((value,), {}))


@given(json_values)
def test_a_value_is_encoded_or_has_problems(value: object) -> None:
    assert call_problems([value], {}) == []
    assert len(call_problems([value, {1: value}], {})) == 1


def test_a_tuple_becomes_a_list() -> None:
    assert decode_result(*encode_result({"shape": (3, (224, 224))}, CODEC), CODEC) == {"shape": [3, [224, 224]]}


def test_subclasses_and_scalars_of_numpy_become_the_plain_value_that_is_equal() -> None:
    numpy = pytest.importorskip("numpy")

    class Level(enum.IntEnum):
        HIGH = 3

    values = [
        numpy.float64(0.1),
        numpy.float32(0.1),
        numpy.int64(7),
        numpy.bool_(True),
        Level.HIGH,
        collections.OrderedDict(a=1),
        collections.Counter("aab"),
    ]
    found = decode_result(*encode_result(values, CODEC), CODEC)
    assert found == values
    assert isinstance(found, list)
    assert [type(one) for one in found] == [float, float, int, bool, int, dict, dict]


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Model:
    def model_dump(self, mode: str) -> dict[str, object]:
        return {"mode": mode}


class Colour(enum.Enum):
    RED = "red"


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 - the plain kind


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (b"abc", 'base64.b64encode(value).decode("ascii")'),
        ({1, 2}, "sorted(value)"),
        (datetime.datetime(2030, 1, 31, tzinfo=datetime.UTC), "value.isoformat()"),
        (datetime.timedelta(seconds=3), "value.total_seconds()"),
        (decimal.Decimal("1.5"), "str(value)"),
        (uuid.UUID(int=5), "str(value)"),
        (pathlib.PurePosixPath("a/b"), "str(value)"),
        (Config(), "dataclasses.asdict(value)"),
        (Model(), 'value.model_dump(mode="json")'),
        (Point(1, 2), "value._asdict()"),
        (Colour.RED, "value.value"),
        (range(3), "list(value)"),
        (2j, "[value.real, value.imag]"),
        (math.nan, "None"),
        (-math.inf, "None"),
        ({1: 2}, "{str(key): value for key, value in value.items()}"),
        pytest.param(10**4300, "hex(value)", id="digits"),
    ],
)
def test_what_is_not_json_is_refused_with_what_to_pass_instead(value: object, fix: str) -> None:
    with pytest.raises(dt.ConfigError, match="args\\[0\\]") as caught:
        encode_call((value,), {}, CODEC)
    [problem] = caught.value.problems
    assert (problem.code, problem.fix_texts[0]) == ("DT605", f"pass {fix}")
    instead = eval(fix, {"value": value, "base64": base64, "dataclasses": dataclasses, "str": str})
    encode_call((instead,), {}, CODEC)
    if isinstance(value, int):
        assert decode_result(*encode_result(value, PICKLE), PICKLE) == value
    elif not isinstance(value, Model):  # without a repr of its own
        assert same(decode_result(*encode_result(value, PICKLE), PICKLE), value)


def test_all_mistakes_are_named_with_their_paths() -> None:
    config = {"model": {"weights": {1}, "shape": (3, b"x")}, "my key": [math.inf]}
    with pytest.raises(dt.ConfigError) as caught:
        encode_call((0, config), {"when": datetime.date(2030, 1, 1)}, CODEC)
    paths = [problem.message.split()[5] for problem in caught.value.problems]
    assert paths == ["args[1].model.weights", "args[1].model.shape[1]", "args[1]['my", "kwargs.when"]
    with pytest.raises(dt.ConfigError, match=r"the result is not JSON: result\[2\]"):
        encode_result([1, 2, {3}], CODEC)


def test_a_value_that_contains_itself_or_is_too_deep_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(MAX_DEPTH - 5):
        deep = [deep]
    for value in (endless, [[[[[[[deep]]]]]]]):
        with pytest.raises(dt.ConfigError, match="contains itself") as caught:
            encode_result(value, CODEC)
        assert len(str(caught.value)) < 1000
    assert decode_result(*encode_result(deep, CODEC), CODEC) == deep


def test_half_of_a_surrogate_pair_is_kept() -> None:
    assert decode_result(*encode_result("a\ud800é", CODEC), CODEC) == "a\ud800é"


def test_pickled_data_is_refused_where_pickle_is_not_allowed() -> None:
    data, encoding = encode_result({1, 2}, PICKLE)
    with pytest.raises(dt.ConfigError, match="pickle is not allowed") as caught:
        decode_result(data, encoding, CODEC)
    assert caught.value.codes == ("DT606",)
    with pytest.raises(dt.ConfigError, match="unknown encoding 'msgpack'"):
        decode_result(b"", "msgpack", CODEC)


def test_large_data_is_in_a_file_of_its_job(tmp_path: Path) -> None:
    codec = PayloadCodec(allow_pickle=True, files=open_files(tmp_path), inline_limit_bytes=100).of_job("0123abc")
    small, large = ["x"] * 10, ["x" * 1000, {1}]
    assert encode_result(small, codec)[1] == "json"
    data, encoding = encode_result(large, codec)
    assert (encoding, data.startswith(b"bc/0123abc/")) == ("pickle+file", True)
    assert decode_result(data, encoding, codec) == large
    call = encode_call(("x" * 1000,), {}, codec)
    assert decode_call(*call, codec) == (("x" * 1000,), {})


def test_large_data_without_a_folder_is_refused() -> None:
    codec = PayloadCodec(inline_limit_bytes=100)
    with pytest.raises(dt.ConfigError, match="result of 1000B: the queue has no folder") as caught:
        encode_result("x" * 998, codec)
    assert caught.value.codes == ("DT618",)
    with pytest.raises(dt.ConfigError, match="this queue has no folder"):
        decode_result(b"ab/ab/x", "json+file", codec)
