"""Catalogue: every operator of Data-Juicer, and the parameters of those that Dovetail implements."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
import time
from collections import Counter
from typing import ClassVar

import pytest

from dovetail.recipes import catalogue
from dovetail.recipes.catalogue import (
    BASE_PARAMETERS,
    FILTER_PARAMETERS,
    REQUIRED,
    Parameter,
    availability_problem,
    class_name,
    known_operators,
    native_class,
)
from dovetail.recipes.operators.base import Filter, Operator
from dovetail.recipes.parameter_types import parse_types
from recipes.golden_aids import cases, errors

OURS = [name for name in known_operators() if native_class(name) is not None]


def test_there_are_228_registered_operators_and_one_more() -> None:
    kinds = Counter(entry.kind for entry in known_operators().values())
    assert len(known_operators()) == 229
    assert kinds == {
        "mapper": 141,
        "filter": 62,
        "deduplicator": 10,
        "selector": 6,
        "aggregator": 4,
        "grouper": 3,
        "pipeline": 3,
    }
    assert list(known_operators()) == sorted(known_operators())


def test_an_entry_has_kind_parameters_and_device() -> None:
    entry = known_operators()["image_text_similarity_filter"]
    assert (entry.name, entry.kind, entry.cuda, entry.note) == ("image_text_similarity_filter", "filter", True, "")
    assert entry.parameters["min_score"] == Parameter("min_score", "float", 0.1, nullable=False)
    assert entry.parameters["reduce_mode"] == Parameter("reduce_mode", "'avg'|'max'|'min'", "avg", nullable=False)
    assert known_operators()["clean_links_mapper"].parameters["pattern"] == Parameter(
        "pattern", "text", None, nullable=True
    )
    assert known_operators()["clean_links_mapper"].batched
    assert not known_operators()["clean_links_mapper"].cuda
    assert known_operators()["document_minhash_deduplicator"].parameters["jaccard_threshold"].kind == "float 0..1"


def test_an_unregistered_operator_is_marked() -> None:
    entry = known_operators()["image_maniqa_filter"]
    assert entry.cuda
    assert list(entry.parameters) == ["min_score", "max_score", "any_or_all"]
    assert "not part of Data-Juicer 1.6.1" in entry.note


def test_a_required_parameter_has_no_default_also_after_pickling() -> None:
    needed = {
        (name, key)
        for name in known_operators()
        for key, p in known_operators()[name].parameters.items()
        if p.default is REQUIRED
    }
    assert needed == {("llm_extract_mapper", "input_keys"), ("llm_extract_mapper", "output_schema")}
    assert pickle.loads(pickle.dumps(REQUIRED)) is REQUIRED


def test_every_type_word_is_valid() -> None:
    tables = [BASE_PARAMETERS, FILTER_PARAMETERS, *(entry.parameters for entry in known_operators().values())]
    for parameter in (parameter for table in tables for parameter in table.values()):
        assert parse_types(parameter.kind)
        assert not parameter.kind.endswith("?")


def test_own_parameters_take_precedence_over_common_ones() -> None:
    assert known_operators()["sentence_augmentation_mapper"].accepted["text_key"].nullable
    assert not known_operators()["clean_ip_mapper"].accepted["text_key"].nullable
    assert "reversed_range" in known_operators()["text_length_filter"].accepted
    assert "reversed_range" not in known_operators()["clean_ip_mapper"].accepted


def test_the_catalogue_is_read_in_less_than_10_ms() -> None:
    def seconds() -> float:
        began = time.process_time()
        found = catalogue.known_operators.__wrapped__()
        assert [found[name] for name in ("clean_ip_mapper", "text_length_filter")]
        return time.process_time() - began

    assert min(seconds() for _ in range(5)) < 0.01


@pytest.mark.parametrize("name", OURS)
def test_native_operators_have_the_parameters_and_defaults_of_the_catalogue(name: str) -> None:
    made = native_class(name)
    assert made is not None
    taken = {key: parameter.default for key, parameter in inspect.signature(made).parameters.items()}
    taken = {key: list(default) if isinstance(default, tuple) else default for key, default in taken.items()}
    assert taken == {key: parameter.default for key, parameter in known_operators()[name].parameters.items()}
    assert issubclass(made, Filter) is (known_operators()[name].kind == "filter")


def test_every_operator_with_golden_results_is_known_with_the_parameters_it_was_run_with() -> None:
    for case in [*cases(), *errors()]:
        entry = known_operators()[case["op"]]
        assert case.get("kind", entry.kind) == entry.kind
        assert case["params"].keys() <= entry.accepted.keys()


def test_a_name_that_is_not_in_the_table_is_never_imported() -> None:
    for name in ("base", "support", "..catalogue", "os", "json.tool", "", "base:Filter"):
        assert native_class(name) is None
        with pytest.raises(KeyError):
            availability_problem(name)


def test_only_the_module_of_the_operator_is_imported() -> None:
    script = (
        "import sys, json\n"
        "from dovetail.recipes.catalogue import availability_problem, known_operators, native_class\n"
        "known_operators()['clean_ip_mapper'], native_class('text_length_filter')\n"
        "availability_problem('image_text_similarity_filter'), availability_problem('fix_unicode_mapper')\n"
        "print(json.dumps([name for name in sys.modules]))\n"
    )
    found = json.loads(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout)
    operators = {name.rpartition(".")[2] for name in found if name.startswith("dovetail.recipes.operators.")}
    asked = {"text_length_filter", "image_text_similarity_filter", "fix_unicode_mapper"}
    assert {name for name in operators if name in known_operators()} == asked
    assert not {"torch", "transformers", "ftfy", "PIL", "numpy", "selectolax", "data_juicer"} & set(found)


def test_a_class_is_named_like_its_module() -> None:
    assert class_name("clean_links_mapper") == "CleanLinksMapper"
    assert class_name("video_audio_ASR_mapper") == "VideoAudioASRMapper"


def test_an_operator_of_data_juicer_only_is_reported_with_the_adapter() -> None:
    problem = availability_problem("audio_size_filter")
    assert problem is not None
    assert problem.code == "DT414"
    assert problem.fix_texts == ("adapter: data_juicer", "pip install py-data-juicer==1.6.1 aiohttp ray")


def test_an_operator_that_the_adapter_cannot_run_is_reported_without_the_adapter() -> None:
    for name in ("ray_bts_minhash_deduplicator", "llm_ray_vllm_engine_pipeline", "general_fused_op"):
        problem = availability_problem(name)
        assert problem is not None
        assert problem.code == "DT414"
        assert problem.fix_texts == (f"remove {name} from process",)
        assert problem.evidence == (f"{name}: {known_operators()[name].note}",)


class _Wanting(Operator):
    extra = "models"
    needs: ClassVar[tuple[str, ...]] = ("json", "no_such_module", "no.such.package")


def test_a_missing_extra_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "native_class", lambda _name: _Wanting)
    problem = availability_problem("image_text_similarity_filter")
    assert problem is not None
    assert problem.code == "DT413"
    assert problem.message == (
        "image_text_similarity_filter needs no_such_module and no.such.package, which are not installed"
    )
    assert problem.fix_texts == ("pip install 'dovetail-ml[models]'",)


def test_an_operator_without_extras_is_available() -> None:
    assert availability_problem("text_length_filter") is None
