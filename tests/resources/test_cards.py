from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.resources.gpu_models import KNOWN_CARDS, card_model, model_key, models_with_memory

SPELLINGS = [
    ("a100", "A100"),
    ("A100-80GB", "A100"),
    ("A100 80 GB", "A100"),
    ("A100-SXM4-80GB", "A100"),
    ("NVIDIA A100-SXM4-80GB", "A100"),
    ("NVIDIA A100-PCIE-40GB", "A100"),
    ("NVIDIA A100 80GB PCIe", "A100"),
    ("nvidia-tesla-a100", "A100"),
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA H100 PCIe", "H100"),
    ("H100 SXM", "H100"),
    ("NVIDIA H100 NVL", "H100NVL"),
    ("NVIDIA H200", "H200"),
    ("NVIDIA H200 NVL", "H200"),
    ("NVIDIA GH200 480GB", "GH200"),
    ("NVIDIA GH200 144G HBM3e", "GH200"),
    ("NVIDIA B200", "B200"),
    ("NVIDIA B300 SXM6 AC", "B300"),
    ("NVIDIA GB200", "GB200"),
    ("NVIDIA L40S", "L40S"),
    ("NVIDIA L40", "L40"),
    ("nvidia-l4", "L4"),
    ("NVIDIA A10", "A10"),
    ("NVIDIA A10G", "A10G"),
    ("Tesla T4", "T4"),
    ("Tesla V100-SXM2-16GB", "V100"),
    ("Tesla P100-PCIE-16GB", "P100"),
    ("Tesla P4", "P4"),
    ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ("RTX 4090", "RTX4090"),
    ("rtx4090", "RTX4090"),
    ("RTX_4090", "RTX4090"),
    ("NVIDIA GeForce RTX 4070 Ti", "RTX4070Ti"),
    ("GeForce RTX 4070", "RTX4070"),
    ("GeForce RTX 2080 Ti", "RTX2080Ti"),
    ("NVIDIA RTX A6000", "RTXA6000"),
    ("A6000", "RTXA6000"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
    ("RTX6000-Ada", "RTX6000Ada"),
    ("Quadro RTX 6000", "RTX6000"),
    ("Quadro RTX 8000", "RTX8000"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTXPRO6000"),
]
UNKNOWN = [
    "",
    "gpu",
    "NVIDIA",
    "80GB",
    "A1000",
    "A100X",
    "MI300X",
    "4090",
    "6000",
    "Quadro P4000",
    "Tesla V100S-PCIE-32GB",
    "GeForce RTX 3080 Ti",
    "NVIDIA GeForce RTX 4070 SUPER",
    "NVIDIA GeForce RTX 4070 Ti SUPER",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "A100-1g.5gb",
]
any_text = st.text() | st.text(alphabet="aAhHlLtTrRxX0123456789gGbB -_:.")


def in_any_case(name: str) -> st.SearchStrategy[str]:
    return st.tuples(*(st.sampled_from([letter.lower(), letter.upper()]) for letter in name)).map("".join)


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS)
def test_a_card_is_found_by_the_spellings_of_people_clouds_and_nvml(spelling: str, name: str) -> None:
    found = card_model(spelling)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("spelling", UNKNOWN)
def test_a_spelling_that_is_not_in_the_table_is_not_guessed_at(spelling: str) -> None:
    assert card_model(spelling) is None


@pytest.mark.parametrize("name", KNOWN_CARDS)
def test_a_card_is_kept_under_its_own_name(name: str) -> None:
    assert card_model(name) is KNOWN_CARDS[name]
    assert KNOWN_CARDS[name].name == name
    assert name.isalnum()


def test_an_l40_is_not_taken_for_an_l40s() -> None:
    assert card_model("L40") is KNOWN_CARDS["L40"]
    assert card_model("L40S") is KNOWN_CARDS["L40S"]


def test_an_a10_is_not_taken_for_an_a10g_or_an_a100() -> None:
    assert card_model("A10") is KNOWN_CARDS["A10"]
    assert card_model("A10G") is KNOWN_CARDS["A10G"]
    assert card_model("A100") is KNOWN_CARDS["A100"]


def test_the_four_models_called_6000_are_different() -> None:
    found = [card_model(name) for name in ("Quadro RTX 6000", "RTX A6000", "RTX 6000 Ada", "RTX PRO 6000")]
    assert found == [KNOWN_CARDS[name] for name in ("RTX6000", "RTXA6000", "RTX6000Ada", "RTXPRO6000")]


@pytest.mark.parametrize(
    ("spelling", "memory_gb"),
    [
        ("A100", 40),
        ("A100-80GB", 80),
        ("A100 80 GB", 80),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("V100", 16),
        ("V100-32GB", 32),
        ("H100 NVL", 94),
        ("GH200 144G HBM3e", 144),
    ],
)
def test_a_size_in_the_name_is_the_size_of_the_card(spelling: str, memory_gb: int) -> None:
    found = card_model(spelling)
    assert found is not None
    assert found.memory_gb == memory_gb


def test_the_processor_memory_in_the_name_of_a_gh200_is_not_taken_for_the_card_s() -> None:
    assert card_model("NVIDIA GH200 480GB") is KNOWN_CARDS["GH200"]


def test_no_card_of_the_table_is_without_memory_or_decoders() -> None:
    assert all(model.memory_gb >= 8 and model.nvdecs >= 1 and model.nvencs >= 0 for model in KNOWN_CARDS.values())


def test_all_cards_have_no_engines_at_least() -> None:
    assert models_with_memory() == tuple(KNOWN_CARDS)


def test_cards_with_many_decoders_are_those_of_data_centres() -> None:
    assert models_with_memory(nvdecs=5) == (
        "B300",
        "B200",
        "GB200",
        "H200",
        "H100",
        "H100NVL",
        "GH200",
        "H20",
        "H800",
        "A100",
        "A800",
    )


def test_cards_must_have_the_decoders_and_the_encoders_asked_for() -> None:
    names = models_with_memory(nvdecs=3, nvencs=3)
    assert names == ("L40S", "L40", "L20", "RTXPRO6000", "RTX6000Ada")
    assert models_with_memory(nvdecs=8) == ()


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS)
def test_all_spellings_of_a_card_have_one_key(spelling: str, name: str) -> None:
    assert model_key(spelling) == model_key(name) == name.lower()


def test_an_unknown_card_has_one_key_too() -> None:
    assert model_key("NVIDIA GeForce RTX 3080 Ti") == model_key("rtx-3080-ti") == "rtx3080ti"


def test_different_cards_have_different_keys() -> None:
    assert len({model_key(name) for name in KNOWN_CARDS}) == len(KNOWN_CARDS)


@given(any_text)
def test_no_text_makes_the_search_for_a_card_fail(text: str) -> None:
    found = card_model(text)
    assert found is None or found.name in KNOWN_CARDS
    assert (found is None) or model_key(text) == found.name.lower()


@given(st.sampled_from(sorted(KNOWN_CARDS)).flatmap(lambda name: st.tuples(st.just(name), in_any_case(name))))
def test_every_card_is_found_by_its_name_in_any_case(pair: tuple[str, str]) -> None:
    name, spelling = pair
    assert card_model(spelling) is KNOWN_CARDS[name]
