"""GPUs selected by CUDA_VISIBLE_DEVICES, as CUDA selects them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.machine.gpus import CardFacts, card_order_notes, visible_cards

GIB = 2**30
A, B, C = (CardFacts("NVIDIA L4", 24 * GIB, f"GPU-{letter}", index=i) for i, letter in enumerate(["aa1", "aa2", "bb"]))
M1, M2 = (CardFacts("NVIDIA A100", 10 * GIB, uuid, mig="1g.10gb", index=3) for uuid in ("MIG-1", "MIG-2"))
CARDS = [A, B, C]


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("0,1,2", [A, B, C]),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("+1,002", [B, C]),
        ("1gpu", [B]),
        ("GPU-b", [C]),
        ("GPU-bb,GPU-aa2", [C, B]),
        ("GPU-bb,0", [C, A]),
    ],
)
def test_cards_are_chosen_by_number_or_beginning_of_the_uuid_in_the_order_asked(
    value: str, chosen: list[CardFacts]
) -> None:
    assert visible_cards(CARDS, value)[0] == chosen


def test_an_unset_variable_shows_all() -> None:
    assert visible_cards(CARDS, None) == (CARDS, [])


def test_naming_all_cards_needs_no_note() -> None:
    assert visible_cards(CARDS, "2,1,0") == ([C, B, A], [])


def test_hidden_cards_are_counted() -> None:
    assert visible_cards(CARDS[:2], "0") == ([A], ["CUDA_VISIBLE_DEVICES=0 hides 1 of 2 GPUs"])


@pytest.mark.parametrize("value", ["", " ", "-1", "NoDevFiles"])
def test_the_values_that_hide_all_hide_all(value: str) -> None:
    assert visible_cards(CARDS, value) == ([], [f"CUDA_VISIBLE_DEVICES={value} hides 3 of 3 GPUs"])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0,7,1", "'7' names no GPU of this machine"),
        ("0,-1,1", "'-1' is neither the number nor the UUID of a GPU"),
        ("0,,1", "'' is neither the number nor the UUID of a GPU"),
        ("0,all,1", "'all' is neither the number nor the UUID of a GPU"),
        ("0,GPU-zz,1", "'GPU-zz' names no GPU of this machine"),
        ("0,GPU-aa,1", "'GPU-aa' is a prefix of 2 UUIDs"),
        ("0,\u0661,1", "'\\u0661' is neither the number nor the UUID of a GPU"),
        ("0,bb,1", "'bb' is neither the number nor the UUID of a GPU"),
    ],
)
def test_the_first_invalid_entry_ends_the_list(value: str, why: str) -> None:
    chosen, notes = visible_cards(CARDS, value)
    assert chosen == [A]
    assert notes[0].endswith(f"{why}: CUDA ignores it and all that follows")
    assert notes[1].endswith("hides 2 of 3 GPUs")


@pytest.mark.parametrize("value", ["0,0", "0,1,GPU-aa1", "GPU-b,GPU-bb"])
def test_a_card_named_twice_leaves_none(value: str) -> None:
    chosen, notes = visible_cards(CARDS, value)
    assert chosen == []
    assert notes[0].endswith("twice: CUDA then sees no GPU at all")


def test_a_card_named_again_after_the_end_of_the_list_is_no_duplicate() -> None:
    assert visible_cards(CARDS, "0,-1,0")[0] == [A]


def test_a_full_uuid_wins_over_a_longer_one_that_begins_with_it() -> None:
    short, long = replace(A, uuid="GPU-a"), replace(B, uuid="GPU-ab")
    assert visible_cards([long, short], "GPU-a")[0] == [short]


def test_the_number_of_a_lost_card_is_passed_over_and_never_slides_to_another_card() -> None:
    chosen, notes = visible_cards([B, C], "0,1")
    assert chosen == [B]
    assert "'0' is a GPU that was left out: passed over" in notes[0]


def test_cards_without_a_number_are_counted_by_position() -> None:
    first, second = replace(A, index=None), replace(B, index=None)
    assert visible_cards([first, second], "1")[0] == [second]


def test_mig_instances_are_chosen_by_uuid() -> None:
    assert visible_cards([A, M1, M2], "MIG-2,GPU-a")[0] == [M2, A]


def test_the_number_of_a_card_in_mig_mode_chooses_none_of_its_instances() -> None:
    chosen, notes = visible_cards([A, M1, M2], "3,0")
    assert chosen == [A]
    assert "'3' is a GPU in MIG mode: select MIG instances by UUID: passed over" in notes[0]


def test_the_uuid_of_a_card_in_mig_mode_is_explained() -> None:
    _, notes = visible_cards([A, M1], "GPU-parent")
    assert "names no GPU of this machine (select MIG instances by their UUIDs)" in notes[0]


def test_the_old_form_of_a_mig_name_is_taken_if_the_driver_still_uses_it() -> None:
    old = replace(M1, uuid="MIG-GPU-aa1/1/0")
    assert visible_cards([old], "MIG-GPU-aa1/1/0") == ([old], [])


def test_the_old_form_of_a_mig_name_is_passed_over_with_advice_otherwise() -> None:
    chosen, notes = visible_cards([M1, M2], "MIG-GPU-aa1/1/0,MIG-2")
    assert chosen == [M2]
    assert "is a MIG name of drivers before R470, use the UUID that nvidia-smi -L prints: passed over" in notes[0]


@pytest.mark.parametrize("value", ["0", "", "rubbish", None])
def test_a_machine_without_cards_is_not_nagged(value: str | None) -> None:
    assert visible_cards([], value) == ([], [])


def test_a_long_value_is_cut_in_the_notes() -> None:
    _, notes = visible_cards(CARDS, "7" * 5000)
    assert notes[1] == f"CUDA_VISIBLE_DEVICES={'7' * 77}... hides 3 of 3 GPUs"
    assert all(len(note) < 300 for note in notes)


@given(
    st.lists(st.sampled_from(CARDS), unique=True).map(lambda some: [*some, M1, M2]),
    st.text(st.characters(exclude_categories=[]))
    | st.lists(st.sampled_from(["0", "1", "GPU-", "MIG-1", "9" * 5000, "é"])).map(",".join),
)
def test_any_text_gives_some_of_the_cards_each_once_and_notes_that_can_be_printed(
    cards: list[CardFacts], value: str
) -> None:
    chosen, notes = visible_cards(cards, value)
    assert Counter(chosen) <= Counter(cards)
    assert all(note.isascii() for note in notes)
    assert len(chosen) == len(cards) or notes


@given(st.permutations(CARDS), st.integers(0, 3), st.lists(st.booleans(), min_size=3, max_size=3))
def test_distinct_valid_entries_choose_exactly_those_cards_in_that_order(
    order: list[CardFacts], length: int, by_uuid: list[bool]
) -> None:
    asked = order[:length]
    entries = [card.uuid if uuid else str(card.index) for card, uuid in zip(asked, by_uuid, strict=False)]
    assert visible_cards(CARDS, ",".join(entries))[0] == asked


# CUDA_DEVICE_ORDER


@pytest.mark.parametrize(
    ("cards", "value", "order", "doubtful"),
    [
        ([A, M1], "0", None, True),
        ([A, M1], "GPU-a, 0", "FASTEST_FIRST", True),
        ([A, M1], "0", "PCI_BUS_ID", False),
        ([A, M1], "GPU-a", None, False),
        ([A, M1], None, None, False),
        ([A, B], "0", None, False),
    ],
)
def test_numbers_of_unlike_cards_are_doubted_unless_the_order_is_set(
    cards: list[CardFacts], value: str | None, order: str | None, doubtful: bool
) -> None:
    assert bool(card_order_notes(cards, value, order)) == doubtful
