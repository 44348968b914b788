"""Adapter: operators of an installed Data-Juicer give their own results and install nothing."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.engines.worker_context import Worker
from dovetail.recipes.catalogue import known_operators
from dovetail.recipes.data_juicer_adapter import (
    AdaptedMapper,
    AdaptedOperator,
    adapt_operator,
    batch_to_rows,
    to_plain_types,
)
from dovetail.recipes.install_guard import command_text, is_install_command
from dovetail.recipes.operators.base import (
    HASH_FIELD,
    STATS_FIELD,
    DatasetOperator,
    Deduplicator,
    Filter,
    Mapper,
    Selector,
)
from recipes.golden_aids import WORDS, cases, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = "py-data-juicer==1.6.1 aiohttp ray scipy ftfy selectolax"
"""The last three are packages that some operators with golden results would install."""
MODULES = ("data_juicer", "aiohttp", "ray", "scipy", "ftfy", "selectolax")
HAVE = all(importlib.util.find_spec(name) for name in MODULES)
needs_data_juicer = pytest.mark.skipif(not HAVE, reason=f"needs pip install {PACKAGES}")
quietly = pytest.mark.filterwarnings("ignore")
"""Data-Juicer and its dependencies emit many warnings."""


def create_operator(name: str, params: dict[str, Any] | None = None, keys: dict[str, str] | None = None) -> Any:
    operator, _ = adapt_operator(known_operators()[name], params or {}, keys)
    assert operator is not None
    return operator


def ready(name: str, params: dict[str, Any] | None = None, **fields: str) -> Any:
    """The operator as in a worker: pickled and set up."""
    operator = create_operator(name, params)
    for key, field in fields.items():
        setattr(operator, key, field)
    operator = pickle.loads(pickle.dumps(operator))
    operator.setup(Worker(0, "unit"))
    return operator


def in_batches(operator: Any, given: list[dict[str, Any]], size: int = 16) -> Iterator[dict[str, Any]]:
    for start in range(0, len(given), size):
        yield from operator(given[start : start + size])


def ids(kind: str, *skipped: str) -> list[Any]:
    found = [case for case in cases(kind=kind) if case["op"] not in skipped and not case["op"].startswith("image_")]
    return [pytest.param(case, id=case["name"]) for case in found]


# --- without Data-Juicer


def test_adapted_operators_have_the_kind_of_the_catalogue() -> None:
    kinds = {
        "mapper": Mapper,
        "filter": Filter,
        "deduplicator": Deduplicator,
        "selector": Selector,
        "grouper": DatasetOperator,
    }
    for name, entry in known_operators().items():
        operator, problem = adapt_operator(entry, {})
        if entry.adapter:
            wanted = DatasetOperator if name == "document_line_deduplicator" else kinds.get(entry.kind, AdaptedMapper)
            assert isinstance(operator, wanted), name
            assert isinstance(operator, AdaptedOperator)
        else:
            assert operator is None
            assert problem is not None
            assert problem.code == "DT414"
            assert entry.note in problem.message


@pytest.mark.skipif(importlib.util.find_spec("data_juicer") is not None, reason="here it is installed")
def test_without_data_juicer_adapted_operators_can_be_planned_and_report_what_to_install() -> None:
    operator, problem = adapt_operator(known_operators()["audio_size_filter"], {})
    assert operator is not None
    assert problem is not None
    assert problem.code == "DT414"
    assert problem.fix_texts == ("pip install py-data-juicer==1.6.1 aiohttp ray",)


def test_creating_an_adapted_operator_imports_nothing_and_it_can_be_pickled() -> None:
    script = (
        "import sys, pickle\n"
        "from dovetail.recipes.data_juicer_adapter import adapt_operator\n"
        "from dovetail.recipes.catalogue import known_operators\n"
        "one, _ = adapt_operator(known_operators()['clean_links_mapper'], {'repl': 'X'})\n"
        "assert pickle.loads(pickle.dumps(one)).recipe_parameters == {'repl': 'X'}\n"
        "assert not {'data_juicer', 'datasets', 'numpy', 'ray'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": ""})


def test_operators_with_the_same_parameters_have_different_code_keys() -> None:
    keys = {
        create_operator(name, params).code_key()
        for name in ("clean_ip_mapper", "clean_email_mapper")
        for params in ({}, {"repl": "x"})
    }
    assert len(keys) == 4


def test_whole_floats_are_passed_as_integers() -> None:
    assert repr(create_operator("text_length_filter", {"min_len": 1e1}).recipe_parameters["min_len"]) == "10"


def test_a_batch_becomes_rows_for_any_number_of_rows() -> None:
    assert batch_to_rows({"a": [1, 2], "b": ["x", None]}) == [{"a": 1, "b": "x"}, {"a": 2, "b": None}]
    assert batch_to_rows({"a": [], "b": []}) == []
    with pytest.raises(ValueError, match="'a': 2, 'b': 1"):
        batch_to_rows({"a": [1, 2], "b": [1]})


def test_numpy_types_and_subclasses_of_dict_become_plain_types() -> None:
    numpy = pytest.importorskip("numpy")

    class Theirs(dict[str, Any]):
        pass

    found = to_plain_types(
        Theirs(a=Theirs(b=numpy.float64(0.5)), c=[numpy.int64(3), "x"], d=numpy.array([1, 2]), e=b"x")
    )
    assert found == {"a": {"b": 0.5}, "c": [3, "x"], "d": [1, 2], "e": b"x"}
    assert type(found) is type(found["a"]) is dict
    assert type(found["a"]["b"]) is float
    assert type(found["c"][0]) is int


@pytest.mark.parametrize(
    ("command", "does"),
    [
        (["pip", "install", "torch"], True),
        ([sys.executable, "-m", "pip", "install", "-U", "x"], True),
        ([sys.executable, "-m", "uv", "pip", "install", "x"], True),
        ("pip3 uninstall x -y", True),
        ([sys.executable, "-m", "mim", "install", "mmpose"], True),
        ("git clone https://example.org/x.git", True),
        (["git", "-C", "/tmp", "clone", "x"], True),
        ("python setup.py install", True),
        (b"pip install x", True),
        (["ffmpeg", "-i", "a.mp4", "install.mp4"], False),
        (["nvidia-smi", "-L"], False),
        ("git status", False),
        (["ls", "/usr/lib/pip"], False),
    ],
)
def test_commands_that_install_are_recognised(command: Any, does: bool) -> None:
    assert is_install_command(command_text(command)) is does


# --- with Data-Juicer: its operators made the golden results


@needs_data_juicer
@quietly
@pytest.mark.parametrize("case", ids("mapper"))
def test_mappers_give_the_golden_texts(case: dict[str, Any]) -> None:
    operator = ready(case["op"], case["params"])
    given = rows()
    if case["op"] == "text_chunk_mapper":
        texts = [[found["text"] for found in operator([dict(row)])] for row in given]
        assert texts == [[row["text"]] if want is None else want for row, want in zip(given, case["rows"], strict=True)]
        return
    wanted = [row["text"] if want is None else want for row, want in zip(given, case["rows"], strict=True)]
    found = list(in_batches(operator, given))
    assert [row["text"] for row in found] == wanted
    assert [row["meta"] for row in found] == [row["meta"] for row in rows()]


@needs_data_juicer
@quietly
@pytest.mark.parametrize("case", ids("filter"))
def test_filters_give_the_golden_stats_and_rows(case: dict[str, Any]) -> None:
    params = {key: str(WORDS) if key.endswith("_dir") else value for key, value in case["params"].items()}
    operator = ready(case["op"], params)
    found = {row["id"]: row.get(STATS_FIELD, {}) for row in in_batches(operator, rows())}
    wanted = {number: want["stats"] for number, want in enumerate(case["rows"]) if want["keep"]}
    assert found == wanted


@needs_data_juicer
@quietly
@pytest.mark.parametrize("case", ids("deduplicator"))
def test_deduplicators_keep_the_golden_rows(case: dict[str, Any]) -> None:
    operator = ready(case["op"], case["params"])
    hashed = [operator(row) for row in rows()]
    kept = list(operator.process_rows(hashed))
    assert [row["id"] for row in kept] == case["rows"]
    assert kept[0] == {field: value for field, value in rows()[kept[0]["id"]].items() if field != HASH_FIELD}
    originals = operator.originals([operator.compute_hash(row) for row in rows()])
    assert all(originals[original] == original for original in originals)


@needs_data_juicer
@quietly
@pytest.mark.parametrize("case", ids("selector"))
def test_selectors_give_the_golden_rows_in_order(case: dict[str, Any]) -> None:
    found = list(ready(case["op"], case["params"]).process_rows(rows()))
    assert [row["id"] for row in found] == case["rows"]
    assert found == [rows()[row["id"]] for row in found]


@needs_data_juicer
@quietly
@pytest.mark.parametrize("case", ids("grouper"))
def test_groupers_make_the_golden_groups(case: dict[str, Any]) -> None:
    found = ready(case["op"], case["params"]).process_rows(rows())
    assert [row["id"] for row in found] == case["rows"]


@needs_data_juicer
@quietly
def test_the_text_may_be_in_another_or_a_nested_field() -> None:
    one = ready("clean_email_mapper", {"repl": "-"}, text_key="body")
    assert one([{"body": "to a@b.org", "text": "c@d.org"}]) == [{"body": "to -", "text": "c@d.org"}]
    inside = ready("text_length_filter", {"min_len": 3}, text_key="meta.text")
    assert inside([{"meta": {"text": "abcd"}}, {"meta": {"text": "a"}}]) == [
        {"meta": {"text": "abcd"}, STATS_FIELD: {"text_len": 4}}
    ]


@needs_data_juicer
@quietly
def test_filters_use_the_bounds_of_the_recipe() -> None:
    given = [{"text": "a" * length} for length in range(9, 14)]
    operator = create_operator("text_length_filter", {"min_len": 10, "max_len": 12})
    operator.reversed_range = True  # then the closed bounds of Data-Juicer apply to the outside
    assert [len(row["text"]) for row in operator(given)] == [9, 10, 12, 13]
    operator = create_operator("text_length_filter", {"min_len": 10, "max_len": 12})
    operator.min_closed_interval = operator.max_closed_interval = False
    assert [len(row["text"]) for row in operator(given)] == [11]


@needs_data_juicer
@quietly
def test_existing_stats_are_not_computed_again_by_the_adapter() -> None:
    operator = ready("text_length_filter", {"min_len": 10})
    assert operator([{"text": "a", STATS_FIELD: {"text_len": 50}}]) == [{"text": "a", STATS_FIELD: {"text_len": 50}}]


@needs_data_juicer
@quietly
def test_rows_with_only_lists_are_not_batches() -> None:
    operator = ready("document_deduplicator", {"lowercase": True})
    same = [{"text": "A", "tags": ["x"]}, {"text": "a", "tags": ["y"]}]
    assert list(operator.process_rows([operator(row) for row in same])) == [{"text": "A", "tags": ["x"]}]


@needs_data_juicer
@quietly
def test_repeated_lines_are_removed() -> None:
    again = "this line stands in every one of the documents"
    given = [{"id": number, "text": f"{again}\nonly here {number} and nowhere else at all"} for number in range(20)]
    found = list(ready("document_line_deduplicator").process_rows(given))
    assert sum(again in row["text"] for row in found) < 20
    assert {*found[0]} == {"id", "text"}


@needs_data_juicer
@quietly
def test_a_group_can_be_reversed() -> None:
    given = [{"id": number, "text": f"text {number}"} for number in range(3)]
    (group,) = ready("naive_grouper").process_rows(given)
    assert group == {"id": [0, 1, 2], "text": ["text 0", "text 1", "text 2"]}
    assert list(ready("naive_reverse_grouper").process_rows([group])) == given


@needs_data_juicer
@quietly
def test_operators_accept_an_empty_dataset() -> None:
    for name in ("document_deduplicator", "document_minhash_deduplicator", "random_selector", "naive_grouper"):
        assert list(ready(name).process_rows([])) == []


@needs_data_juicer
@quietly
def test_a_row_is_processed_like_a_batch_of_one() -> None:
    mapper = ready("text_chunk_mapper", {"max_len": 2, "split_pattern": None})
    assert [row["text"] for row in mapper({"text": "abcde"})] == ["ab", "cd", "e"]
    keeps = ready("text_length_filter", {"min_len": 3})
    assert keeps({"text": "a"}) is None
    assert keeps({"text": "abc"}) == {"text": "abc", STATS_FIELD: {"text_len": 3}}


@needs_data_juicer
@quietly
def test_a_row_that_fails_raises() -> None:
    operator = ready("clean_links_mapper")
    with pytest.raises(TypeError):
        operator([{"text": "fine"}, {"text": 5}])
    assert operator([{"text": "fine"}]) == [{"text": "fine"}]


@needs_data_juicer
@quietly
def test_an_operator_that_the_installed_data_juicer_lacks_is_reported() -> None:
    with pytest.raises(Exception, match="has no operator image_maniqa_filter"):
        ready("image_maniqa_filter")


@needs_data_juicer
def test_operators_cannot_install_packages() -> None:
    script = (
        "import subprocess\n"
        "from dovetail.recipes.data_juicer_adapter import adapt_operator\n"
        "from dovetail.recipes.catalogue import known_operators\n"
        "one, _ = adapt_operator(known_operators()['clean_links_mapper'], {})\n"
        "one.data_juicer_operator()\n"
        "from data_juicer.utils.lazy_loader import LazyLoader\n"
        "for wanted in ('no-such-package-of-anyone', 'git+https://example.org/x.git'):\n"
        "    try:\n"
        "        LazyLoader.check_packages([wanted])\n"
        "    except ImportError as error:\n"
        "        assert 'Dovetail installs nothing during a run' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(wanted)\n"
        "try:\n"
        "    subprocess.run(['pip', 'install', 'no-such-package-of-anyone'])\n"
        "except ImportError as error:\n"
        "    assert 'run it yourself' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('pip ran')\n"
        "subprocess.run(['true'], check=True)\n"
        "LazyLoader.check_packages(['aiohttp', 'beautifulsoup4'])\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120)
