from __future__ import annotations

import ast
import copy
import os
import pickle
import re
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dovetail
from dovetail.errors import ResourceError
from dovetail.resources.resources import CPUS_LIMIT, CUSTOM_LIMIT, GPUS_LIMIT, RANKS_LIMIT, Resources
from dovetail.resources.shape import Shape, ShapeKind

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
NAN, INF = float("nan"), float("inf")
GB = 1024**3

KINDS: list[tuple[dict[str, Any], ShapeKind, int, int]] = [
    ({}, ShapeKind.CPU_ONLY, 0, 0),
    ({"cpus": 0, "memory": "4GB"}, ShapeKind.CPU_ONLY, 0, 0),
    ({"cpus": 0, "custom": {"licence": 1}}, ShapeKind.CPU_ONLY, 0, 0),
    ({"gpus": 0}, ShapeKind.CPU_ONLY, 0, 0),
    ({"nvdecs": 1}, ShapeKind.CODEC, 1, 0),
    ({"nvencs": 2, "cpus": 0}, ShapeKind.CODEC, 1, 0),
    ({"gpus": 0.25}, ShapeKind.FRACTIONAL_GPU, 1, 250),
    ({"gpus": 0.25, "gpu_memory": "4GB"}, ShapeKind.FRACTIONAL_GPU, 1, 250),
    ({"gpus": 0.25, "nvdecs": 1}, ShapeKind.FRACTIONAL_GPU, 1, 250),
    ({"gpu_memory": "4GB"}, ShapeKind.FRACTIONAL_GPU, 1, 0),
    ({"gpu_memory": "4GB", "nvdecs": 1}, ShapeKind.FRACTIONAL_GPU, 1, 0),
    ({"gpus": 0.001}, ShapeKind.FRACTIONAL_GPU, 1, 1),
    ({"gpus": 0.999}, ShapeKind.FRACTIONAL_GPU, 1, 999),
    ({"gpus": 1}, ShapeKind.WHOLE_NUMBERED_GPU, 1, 1000),
    ({"gpus": 1.0}, ShapeKind.WHOLE_NUMBERED_GPU, 1, 1000),
    ({"gpus": 8, "gpu_memory": "40GB"}, ShapeKind.WHOLE_NUMBERED_GPU, 8, 1000),
    ({"gpus": Fraction(2)}, ShapeKind.WHOLE_NUMBERED_GPU, 2, 1000),
    ({"entire_gpu": True}, ShapeKind.ENTIRE_GPU, 1, 1000),
    ({"entire_gpu": True, "gpus": 1}, ShapeKind.ENTIRE_GPU, 1, 1000),
    ({"entire_gpu": True, "gpus": 3}, ShapeKind.ENTIRE_GPU, 3, 1000),
    ({"entire_gpu": True, "cpus": 0}, ShapeKind.ENTIRE_GPU, 1, 1000),
]

INVALID: list[tuple[dict[str, Any], str]] = [
    ({"cpus": "4"}, "DT001"),
    ({"cpus": None}, "DT001"),
    ({"cpus": True}, "DT001"),
    ({"cpus": [1]}, "DT001"),
    ({"cpus": 1j}, "DT001"),
    ({"cpus": Decimal(1)}, "DT001"),
    ({"gpus": "1"}, "DT001"),
    ({"gpus": False}, "DT001"),
    ({"gpus": None}, "DT001"),
    ({"nvdecs": "1"}, "DT001"),
    ({"nvencs": True}, "DT001"),
    ({"entire_gpu": 1}, "DT001"),
    ({"entire_gpu": "yes"}, "DT001"),
    ({"entire_gpu": None}, "DT001"),
    ({"cpus": NAN}, "DT002"),
    ({"cpus": INF}, "DT002"),
    ({"cpus": -INF}, "DT002"),
    ({"gpus": NAN}, "DT002"),
    ({"gpus": INF}, "DT002"),
    ({"nvdecs": NAN}, "DT002"),
    ({"nvencs": INF}, "DT002"),
    ({"custom": {"licence": NAN}}, "DT002"),
    ({"cpus": -1}, "DT003"),
    ({"cpus": -0.5}, "DT003"),
    ({"gpus": -1}, "DT003"),
    ({"gpus": -0.25}, "DT003"),
    ({"nvdecs": -1}, "DT003"),
    ({"nvencs": -2}, "DT003"),
    ({"custom": {"licence": -1}}, "DT003"),
    ({"cpus": CPUS_LIMIT + 1}, "DT004"),
    ({"cpus": 1e300}, "DT004"),
    ({"gpus": GPUS_LIMIT + 1}, "DT004"),
    ({"nvdecs": 10**6}, "DT004"),
    ({"custom": {"licence": 10 * CUSTOM_LIMIT}}, "DT004"),
    ({"cpus": 0.0001}, "DT005"),
    ({"gpus": 0.0009}, "DT005"),
    ({"cpus": 5e-324}, "DT005"),
    ({"custom": {"licence": 0.0001}}, "DT005"),
    ({"gpus": 1.5}, "DT006"),
    ({"gpus": 1.0000001}, "DT006"),
    ({"gpus": 7.25}, "DT006"),
    ({"entire_gpu": True, "gpus": 0.5}, "DT006"),
    ({"entire_gpu": True, "gpus": 2.5}, "DT006"),
    ({"nvdecs": 0.5}, "DT006"),
    ({"nvencs": 1.5}, "DT006"),
    ({"memory": "-2GB"}, "DT007"),
    ({"memory": 4}, "DT007"),
    ({"memory": "4"}, "DT007"),
    ({"memory": ""}, "DT007"),
    ({"memory": "nan"}, "DT007"),
    ({"memory": NAN}, "DT007"),
    ({"memory": True}, "DT007"),
    ({"memory": "5000PB"}, "DT007"),
    ({"gpu_memory": "four"}, "DT007"),
    ({"gpu_memory": 20}, "DT007"),
    ({"gpu_memory": "0GB"}, "DT007"),
    ({"gpu_memory": "0.2B"}, "DT007"),
    ({"accelerator": ""}, "DT001"),
    ({"gpus": 1, "accelerator": "  "}, "DT001"),
    ({"gpus": 1, "accelerator": "A100||H100"}, "DT001"),
    ({"gpus": 1, "accelerator": "A100|"}, "DT001"),
    ({"gpus": 1, "accelerator": 100}, "DT001"),
    ({"gpus": 1, "accelerator": ["A100"]}, "DT001"),
    ({"accelerator": "A100"}, "DT009"),
    ({"labels": None}, "DT001"),
    ({"labels": "pool=gpu"}, "DT001"),
    ({"labels": [("pool", "gpu")]}, "DT001"),
    ({"labels": {"pool": 1}}, "DT001"),
    ({"labels": {"pool": None}}, "DT001"),
    ({"labels": {"pool": " "}}, "DT001"),
    ({"labels": {"": "gpu"}}, "DT001"),
    ({"labels": {1: "gpu"}}, "DT001"),
    ({"labels": {"pool": "|"}}, "DT001"),
    ({"labels": {"pool": " | "}}, "DT001"),
    ({"custom": None}, "DT001"),
    ({"custom": "licence"}, "DT001"),
    ({"custom": {"": 1}}, "DT001"),
    ({"custom": {3: 1}}, "DT001"),
    ({"custom": {"licence": "1"}}, "DT001"),
    ({"custom": {"licence": True}}, "DT001"),
    ({"cpus": 0}, "DT009"),
    ({"cpus": 0.0, "gpus": 0, "memory": "0GB", "nvdecs": 0, "custom": {"licence": 0}}, "DT009"),
    ({"cpus": -0.0}, "DT009"),
    ({"cpus": 0, "labels": {"pool": "gpu"}}, "DT009"),
]

# types and sizes that a check may forget about
STRANGE: list[Any] = [
    10**400,
    -(10**400),
    Fraction(10**400),
    Fraction(1, 3),
    Decimal("NaN"),
    1j,
    b"4GB",
    bytearray(b"x"),
    dict,
    str,
    object(),
    ...,
    len,
    (),
    {"a": {"b": 1}},
    {(): ()},
    {None: None},
    {"a": 10**400},
    "\x00",
    "\ud800",
    "9" * 5000,
    range(3),
    Resources,
]


def kwargs_id(value: object) -> str:
    return re.sub(r"\s+", "", repr(value))[:40] if isinstance(value, dict) else ""


def value_or_error(make: Callable[[], T]) -> T | ResourceError:
    """Any other exception is not meant to be."""
    try:
        return make()
    except ResourceError as error:
        return error


def raised_by(asked: dict[str, Any]) -> ResourceError:
    with pytest.raises(ResourceError) as caught:
        Resources(**asked)
    return caught.value


def assert_is_plain(shape: Shape) -> None:
    """Only non-negative integers inside."""
    amounts = [
        shape.cpu_milli,
        shape.memory_bytes,
        shape.cards,
        shape.gpu_milli,
        shape.gpu_memory_bytes,
        shape.nvdecs,
        shape.nvencs,
        *(amount for _name, amount in shape.custom),
    ]
    assert all(type(amount) is int and amount >= 0 for amount in amounts), shape
    assert type(shape.ranks) is int
    assert shape.ranks >= 1
    assert shape.gpu_milli <= 1000
    assert all(values for _name, values in shape.labels), f"no node will ever do: {shape.labels}"


@pytest.mark.parametrize(("asked", "kind", "cards", "gpu_milli"), KINDS, ids=kwargs_id)
def test_each_request_has_its_kind(asked: dict[str, Any], kind: ShapeKind, cards: int, gpu_milli: int) -> None:
    shape = Resources(**asked).shape()
    assert (shape.kind, shape.cards, shape.gpu_milli) == (kind, cards, gpu_milli)
    assert shape.computes_on_gpu is (gpu_milli > 0 or shape.gpu_memory_bytes > 0)
    assert_is_plain(shape)


@pytest.mark.parametrize(("asked", "code"), INVALID, ids=kwargs_id)
def test_a_request_that_makes_no_sense_is_an_error_with_code_and_fix(asked: dict[str, Any], code: str) -> None:
    error = raised_by(asked)
    assert code in error.codes
    for problem in error.problems:
        assert re.fullmatch(r"DT00\d", problem.code)
        assert problem.message
        assert problem.fix_texts, f"no way out of: {problem.message}"
        assert all(fix.strip() for fix in problem.fix_texts)


@pytest.mark.parametrize(
    ("asked", "code"),
    [pair for pair in INVALID if pair[0] not in ({"entire_gpu": True, "gpus": 2.5}, {"accelerator": ""})],
    ids=kwargs_id,
)
def test_one_mistake_is_reported_once(asked: dict[str, Any], code: str) -> None:
    assert raised_by(asked).codes == (code,)


@pytest.mark.parametrize(("asked", "code"), INVALID, ids=kwargs_id)
def test_the_message_shows_the_name_and_the_value(asked: dict[str, Any], code: str) -> None:
    problem = next(problem for problem in raised_by(asked).problems if problem.code == code)
    if code == "DT009" and "accelerator" not in asked:
        assert "zero" in problem.message
    else:
        assert any(name in problem.message for name in asked)


def pasted(fix: str) -> dict[str, Any] | None:
    """The arguments that a fix says to write, where it is nothing but arguments."""
    try:
        call = ast.parse(f"f({fix})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            return None
        return {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        return None


@pytest.mark.parametrize(
    "asked",
    [
        *(asked for asked, code in INVALID if code != "DT007" and len(asked) == 1 and "accelerator" not in asked),
        {"gpus": -1.5},
        {"gpus": -5000},
        {"cpus": -1e9},
        {"cpus": -0.0001},
        {"cpus": "-4"},
        {"cpus": "1e9"},
        {"gpus": "1.5"},
        {"nvdecs": "0.5"},
        {"nvdecs": -0.5},
        {"custom": {"licence": -1e12}},
        {"custom": {"a b": "x"}},
        {"custom": {'a"b': "x"}},
    ],
    ids=kwargs_id,
)
def test_a_fix_works_when_pasted(asked: dict[str, Any]) -> None:
    error = raised_by(asked)
    tried = [arguments for fix in error.problems[0].fix_texts if (arguments := pasted(fix)) is not None]
    for arguments in tried:
        assert_is_plain(Resources(**{**asked, **arguments}).shape())
    if error.codes[0] in ("DT001", "DT002", "DT003", "DT004", "DT005") and "custom" not in asked:
        assert tried, f"nothing to paste in {error.problems[0].fix_texts}"


def test_all_problems_are_reported_at_once() -> None:
    error = raised_by(
        {
            "cpus": -1,
            "gpus": 1.5,
            "gpu_memory": 4,
            "memory": "lots",
            "nvdecs": 0.5,
            "nvencs": NAN,
            "entire_gpu": "yes",
            "accelerator": "",
            "labels": {"pool": 1, "": "x"},
            "custom": {"a": INF, "b": "1", "c": 1},
        }
    )
    reported = [(problem.code, re.split(r"[=:]", problem.message)[0]) for problem in error.problems]
    assert sorted(reported) == sorted(
        [
            ("DT003", "cpus"),
            ("DT006", "gpus"),
            ("DT001", "entire_gpu"),
            ("DT007", "memory"),
            ("DT007", "gpu_memory"),
            ("DT006", "nvdecs"),
            ("DT002", "nvencs"),
            ("DT001", "accelerator"),
            ("DT001", "labels"),
            ("DT001", "labels['pool']"),
            ("DT002", "custom['a']"),
            ("DT001", "custom['b']"),
        ]
    )


@pytest.mark.parametrize("name", ["cpus", "gpus", "nvdecs", "nvencs", "memory", "gpu_memory"])
@pytest.mark.parametrize(
    "amount", [10**400, -(10**400), 10**5000, Fraction(10**400)], ids=["1e400", "-1e400", "1e5000", "fraction"]
)
def test_a_number_beyond_any_float_is_an_error_like_any_other(name: str, amount: Any) -> None:
    assert raised_by({name: amount}).problems[0].fix_texts


@pytest.mark.parametrize("amount", [10**400, 10**5000], ids=["1e400", "1e5000"])
def test_a_custom_amount_beyond_any_float_is_an_error_like_any_other(amount: int) -> None:
    assert raised_by({"custom": {"licence": amount}}).problems[0].fix_texts


@pytest.mark.parametrize("name", ["labels", "custom"])
def test_a_type_in_place_of_a_mapping_is_an_error_like_any_other(name: str) -> None:
    assert raised_by({name: dict}).codes == ("DT001",)


class WithoutTruth:
    """An object whose truth value raises, like that of an array."""

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")


@pytest.mark.parametrize("name", ["cpus", "gpus", "nvdecs", "nvencs", "entire_gpu", "gpu_memory", "memory", "custom"])
def test_an_array_in_place_of_a_number_is_an_error_like_any_other(name: str) -> None:
    error = raised_by({"accelerator": "A100", name: WithoutTruth()})
    assert any(name in problem.message for problem in error.problems)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.fractions(),
    st.decimals(),
    st.complex_numbers(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.none()), st.one_of(st.text(), st.floats())),
    st.sampled_from(STRANGE),
)
amounts = st.one_of(st.integers(0, 8), st.floats(0, 4), st.sampled_from([0.5, 0.25, 1 / 3, 1, 2, 1e-3]))
sizes = st.one_of(st.none(), st.sampled_from(["1GB", "1.5g", "0B", "20 MiB", "300m"]))
names = st.sampled_from(["pool", "zone", "licence"])
sensible: dict[str, st.SearchStrategy[Any]] = {
    "cpus": amounts,
    "gpus": amounts,
    "gpu_memory": sizes,
    "memory": sizes,
    "nvdecs": st.integers(0, 3),
    "nvencs": st.integers(0, 3),
    "entire_gpu": st.booleans(),
    "accelerator": st.sampled_from([None, "A100", "a100 | NVIDIA H100"]),
    "labels": st.dictionaries(names, st.sampled_from(["a", "a|b", " b "]), max_size=2),
    "custom": st.dictionaries(names, amounts, max_size=2),
}


@given(st.fixed_dictionaries({}, optional={name: st.one_of(it, anything) for name, it in sensible.items()}))
@settings(max_examples=10 * settings().max_examples)
def test_any_arguments_of_any_type_give_whole_numbers_or_a_resource_error(asked: dict[str, Any]) -> None:
    found = value_or_error(lambda: Resources(**asked))
    if isinstance(found, Resources):
        assert_is_plain(found.shape())
        assert found.shape().describe()
    else:
        assert all(problem.fix_texts and problem.code.startswith("DT00") for problem in found.problems)


@given(st.fixed_dictionaries({}, optional=sensible))
@example({"gpus": 1 / 3, "cpus": 2.5, "custom": {"licence": 1 / 7}})
def test_the_shape_holds_what_was_asked_rounded_down(asked: dict[str, Any]) -> None:
    try:
        shape = Resources(**asked).shape()
    except ResourceError:
        return
    exact = Fraction(asked.get("cpus", 1)) * 1000
    assert exact - 1 < shape.cpu_milli <= exact + Fraction(1, 10**6)
    assert shape.nvdecs == asked.get("nvdecs", 0)
    assert shape.nvencs == asked.get("nvencs", 0)
    assert (shape.gpu_memory_bytes > 0) == (asked.get("gpu_memory") is not None)
    assert {name for name, _ in shape.custom} == {name for name, amount in asked.get("custom", {}).items() if amount}
    assert {name for name, _ in shape.labels} == set(asked.get("labels", {}))
    assert list(shape.labels) == sorted(shape.labels)
    assert list(shape.custom) == sorted(shape.custom)


@given(anything)
def test_any_number_of_ranks_is_a_shape_or_a_resource_error(ranks: Any) -> None:
    found = value_or_error(lambda: Resources().shape(ranks))
    if isinstance(found, Shape):
        assert found.ranks == ranks
        assert type(found.ranks) is int
        assert 1 <= found.ranks <= RANKS_LIMIT
    else:
        assert found.codes == ("DT008",)


@pytest.mark.parametrize(
    "ranks", [0, -1, 1.5, NAN, INF, True, None, "2", RANKS_LIMIT + 1, 10**400], ids=lambda it: str(it)[:9]
)
def test_a_number_of_ranks_that_makes_no_sense_is_an_error(ranks: Any) -> None:
    with pytest.raises(ResourceError) as caught:
        Resources().shape(ranks)
    assert caught.value.codes == ("DT008",)


def test_spellings_and_orders_that_mean_the_same_give_one_shape() -> None:
    one = Resources(
        gpus=1,
        memory="1GB",
        accelerator="H100 | nvidia-tesla-a100",
        labels={"zone": "b|a", "pool": "x"},
        custom={"b": 1, "a": 2, "none": 0},
    )
    other = Resources(
        gpus=1.0,
        memory="1024MiB",
        accelerator="A100|NVIDIA H100 80GB HBM3|a100",
        labels={"pool": " x ", "zone": "a|b|a"},
        custom={"a": 2.0, "b": 1},
    )
    assert one.shape() == other.shape()
    assert hash(one.shape()) == hash(other.shape())
    assert one.shape().accelerators == ("a100", "h100")
    assert one.shape().labels == (("pool", ("x",)), ("zone", ("a", "b")))
    assert one.shape().custom == (("a", 2000), ("b", 1000))


def test_what_is_done_to_the_arguments_later_changes_nothing() -> None:
    labels, custom = {"pool": "a"}, {"licence": 1.0}
    resources = Resources(labels=labels, custom=custom)
    labels["pool"], custom["licence"] = "b", 5.0
    assert resources == Resources(labels={"pool": "a"}, custom={"licence": 1})


def test_equal_resources_are_one_key() -> None:
    assert {Resources(gpus=1): "x"}[Resources(gpus=1.0)] == "x"
    assert Resources(gpus=1) != Resources(gpus=2)


def test_a_gang_has_ranks_that_each_need_the_same() -> None:
    gang = Resources(gpus=2, custom={"licence": 1}).shape(4)
    assert gang.ranks == 4
    assert gang.rank == Resources(gpus=2, custom={"licence": 1}).shape()
    assert gang != gang.rank
    assert hash(gang) != hash(gang.rank)


def test_what_is_on_cards_forgets_the_host_but_not_where_it_may_sit() -> None:
    shape = Resources(cpus=3, memory="1GB", gpus=0.5, labels={"pool": "a"}, custom={"x": 1}).shape(2)
    assert shape.on_cards == Resources(cpus=7, gpus=0.5, labels={"pool": "a"}).shape().on_cards
    assert shape.on_cards != Resources(gpus=0.5).shape().on_cards
    assert shape.on_cards != Resources(gpus=0.25, labels={"pool": "a"}).shape().on_cards


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "1 CPU"),
        ({"cpus": 2.5, "memory": "1.5GB"}, "2.5 CPUs, 1.5GB memory"),
        ({"gpus": 0.25, "gpu_memory": "4GB", "nvdecs": 1}, "0.25 GPU with 4GB, 1 CPU, 1 NVDEC"),
        ({"gpu_memory": "8GB"}, "8GB of a GPU, 1 CPU"),
        ({"gpus": 2}, "2 GPUs, 1 CPU"),
        ({"gpus": 1, "gpu_memory": "40GB", "accelerator": "A100"}, "1 GPU A100 of at least 40GB, 1 CPU"),
        ({"entire_gpu": True, "gpus": 2, "cpus": 0}, "2 entire GPUs"),
        ({"nvdecs": 2, "nvencs": 1, "cpus": 0.5}, "a card for its codecs, 0.5 CPU, 2 NVDECs, 1 NVENC"),
        ({"custom": {"licence": 0.5}, "labels": {"pool": "a|b"}}, "1 CPU, 0.5 licence, pool=a|b"),
    ],
    ids=kwargs_id,
)
def test_a_shape_is_described_for_people(asked: dict[str, Any], text: str) -> None:
    assert Resources(**asked).shape().describe() == text
    assert Resources(**asked).shape(3).describe() == f"3 ranks of ({text})"


FULL: dict[str, Any] = {
    "cpus": 2.5,
    "gpus": 0.25,
    "gpu_memory": "4GB",
    "memory": "8GB",
    "nvdecs": 1,
    "accelerator": "A100|H100",
    "labels": {"pool": "gpu|any"},
    "custom": {"licence": 0.5},
}


@pytest.mark.parametrize("again", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("asked", [{}, FULL], ids=["plain", "full"])
def test_a_copy_is_equal_and_finds_what_the_original_found(again: Any, asked: dict[str, Any]) -> None:
    resources = Resources(**asked)
    for shape in (resources.shape(), resources.shape(3)):
        assert again(shape) == shape
        assert hash(again(shape)) == hash(shape)
        assert {shape: "found"}[again(shape)] == "found"
    assert again(resources) == resources
    assert hash(again(resources)) == hash(resources)


CHILD = """
import pickle, sys
from dovetail.resources.resources import Resources
asked, shape, gang, resources, table = pickle.load(sys.stdin.buffer)
here = Resources(**asked)
assert (shape, gang, resources) == (here.shape(), here.shape(3), here)
assert hash(shape) == hash(here.shape()) and hash(gang) == hash(here.shape(3)) and hash(resources) == hash(here)
assert table[here.shape()] == "one" and table[here.shape(3)] == "gang" and {here.shape(): 1}[shape] == 1
print(hash("a text"))
sys.stdout.flush()
sys.stdout.buffer.write(pickle.dumps((shape, table)))
"""


@pytest.mark.outside
def test_a_pickled_shape_is_found_in_processes_that_hash_texts_differently() -> None:
    resources = Resources(**FULL)
    shape, gang = resources.shape(), resources.shape(3)
    sent = pickle.dumps((FULL, shape, gang, resources, {shape: "one", gang: "gang"}))
    text_hashes = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(dovetail.__file__).parents[1])}
        done = subprocess.run([sys.executable, "-c", CHILD], input=sent, env=env, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        text_hash, _, came_back = done.stdout.partition(b"\n")
        text_hashes.add(text_hash)
        back, table = pickle.loads(came_back)
        assert back == shape
        assert hash(back) == hash(shape)
        assert table[shape] == "one"
        assert table[gang] == "gang"
    assert len(text_hashes) == 2, "the processes did not hash differently, so nothing was shown"
