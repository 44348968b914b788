"""GPUs of this machine: usable ones, and others with the reason."""

from __future__ import annotations

import builtins
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.machine.gpus import CardFacts, NvmlReader
from scripted_nvml import (
    GIB,
    NVMLError,
    NVMLError_DriverNotLoaded,
    NVMLError_FunctionNotFound,
    NVMLError_LibraryNotFound,
    NVMLError_LibRmVersionMismatch,
    NVMLError_NoPermission,
    NVMLError_NotFound,
    ScriptedCard,
    ScriptedNvml,
    mig_a100,
    mig_instance,
)

if TYPE_CHECKING:
    from pathlib import Path

CARD_CALLS = [
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo",
]


def two_cards(**script: Any) -> ScriptedNvml:
    return ScriptedNvml(ScriptedCard("GPU-aaa"), ScriptedCard("GPU-bbb", "NVIDIA A100-SXM4-80GB", 80 * GIB), **script)


def uuids(cards: list[CardFacts]) -> list[str]:
    return [card.uuid for card in cards]


# Reading


def test_two_plain_cards_are_read_in_order() -> None:
    library = two_cards()
    assert NvmlReader(library).cards() == (
        [
            CardFacts("NVIDIA L4", 24 * GIB, "GPU-aaa", index=0),
            CardFacts("NVIDIA A100-SXM4-80GB", 80 * GIB, "GPU-bbb", index=1),
        ],
        [],
    )
    assert library.open == 0


def test_an_old_pynvml_that_returns_bytes_reads_the_same() -> None:
    assert NvmlReader(two_cards(bytes_for_text=True)).cards() == NvmlReader(two_cards()).cards()


@pytest.mark.parametrize("call", CARD_CALLS)
def test_a_lost_card_is_left_out_with_a_note(call: str) -> None:
    library = two_cards()
    library.lose(0, call)
    cards, notes = NvmlReader(library).cards()
    assert uuids(cards) == ["GPU-bbb"]
    name = "GPU 0" if call in CARD_CALLS[:2] else "GPU 0 (GPU-aaa)"
    assert notes == [f"{name} is lost: left out"]
    assert library.open == 0


def test_a_card_that_vanishes_between_two_reads_leaves_the_number_of_the_other_alone() -> None:
    library = two_cards()
    nvml = NvmlReader(library)
    before, _ = nvml.cards()
    library.lose(0)
    after, notes = nvml.cards()
    assert after == before[1:]
    assert notes == ["GPU 0 is lost: left out"]


def test_a_card_that_is_not_ours_to_read_is_left_out_with_the_reason() -> None:
    library = two_cards()
    library.card_list[1].fails["nvmlDeviceGetMemoryInfo"] = NVMLError_NoPermission
    cards, notes = NvmlReader(library).cards()
    assert uuids(cards) == ["GPU-aaa"]
    assert notes == ["GPU 1 (GPU-bbb) cannot be read (Insufficient Permissions): left out"]


def test_a_driver_from_before_mig_is_enough() -> None:
    library = two_cards()
    for card in library.card_list:
        card.fails["nvmlDeviceGetMigMode"] = NVMLError_FunctionNotFound
    assert NvmlReader(library).cards() == NvmlReader(two_cards()).cards()


def test_without_a_card_count_no_card_is_listed_and_nvml_is_shut_down() -> None:
    library = two_cards()
    library.counting_fails = NVMLError
    assert NvmlReader(library).cards() == (
        [],
        ["NVML failed to count GPUs (Unknown Error): GPUs are not detected"],
    )
    assert library.open == 0


def test_a_failing_shutdown_does_not_lose_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    library = two_cards()

    def fail() -> None:
        raise NVMLError

    monkeypatch.setattr(library, "nvmlShutdown", fail)
    assert uuids(NvmlReader(library).cards()[0]) == ["GPU-aaa", "GPU-bbb"]


# MIG


def test_mig_instances_take_the_place_of_their_card() -> None:
    a100 = mig_a100(
        "GPU-aaa",
        mig_instance("MIG-1", "3g.40gb", compute=3, slices=3, memory_mb=40192, decoders=2),
        None,
        mig_instance("MIG-2", "1g.10gb"),
    )
    cards, notes = NvmlReader(ScriptedNvml(a100, ScriptedCard("GPU-bbb"))).cards()
    assert cards == [
        CardFacts("NVIDIA A100-SXM4-80GB", 40192 * 2**20, "MIG-1", nvdecs=2, nvencs=0, mig="3g.40gb", index=0),
        CardFacts("NVIDIA A100-SXM4-80GB", 9856 * 2**20, "MIG-2", nvdecs=0, nvencs=0, mig="1g.10gb", index=0),
        CardFacts("NVIDIA L4", 24 * GIB, "GPU-bbb", index=1),
    ]
    assert notes == []


def test_the_profile_is_what_the_driver_calls_it() -> None:
    cards, _ = NvmlReader(ScriptedNvml(mig_a100("GPU-aaa", mig_instance("MIG-1", "1g.10gb+me")))).cards()
    assert [card.mig for card in cards] == ["1g.10gb+me"]


@pytest.mark.parametrize(
    ("compute", "slices", "memory_mb", "card_mb", "profile"),
    [
        (1, 1, 9856, 81920, "1g.10gb"),
        (3, 3, 40192, 81920, "3g.40gb"),
        (1, 3, 40192, 81920, "1c.3g.40gb"),
        (7, 7, 81152, 81920, "7g.80gb"),
        (1, 1, 4864, 40536, "1g.5gb"),
        (1, 1, 16384, 143771, "1g.18gb"),
    ],
)
def test_a_mig_profile_missing_in_the_name_is_derived_from_the_slices(
    compute: int, slices: int, memory_mb: int, card_mb: int, profile: str
) -> None:
    instance = mig_instance("MIG-1", compute=compute, slices=slices, memory_mb=memory_mb)
    card = replace(mig_a100("GPU-aaa", instance), memory_bytes=card_mb * 2**20)
    assert [card.mig for card in NvmlReader(ScriptedNvml(card)).cards()[0]] == [profile]


def test_mig_mode_without_instances_is_noted() -> None:
    assert NvmlReader(ScriptedNvml(mig_a100("GPU-aaa", None, None))).cards() == (
        [],
        ["GPU 0 (GPU-aaa) is in MIG mode and has no instances: left out"],
    )


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetAttributes"]
)
def test_an_instance_that_cannot_be_read_leaves_the_others(call: str) -> None:
    denied = mig_instance("MIG-1", "1g.10gb")
    denied.fails[call] = NVMLError_NoPermission
    cards, notes = NvmlReader(ScriptedNvml(mig_a100("GPU-aaa", denied, mig_instance("MIG-2", "1g.10gb")))).cards()
    assert uuids(cards) == ["MIG-2"]
    assert notes == ["GPU 0 (GPU-aaa) MIG 0 cannot be read (Insufficient Permissions): left out"]


def test_a_card_with_unreadable_mig_instances_is_not_reported_as_having_none() -> None:
    denied = mig_instance("MIG-1", "1g.10gb")
    denied.fails["nvmlDeviceGetUUID"] = NVMLError_NoPermission
    assert NvmlReader(ScriptedNvml(mig_a100("GPU-aaa", denied))).cards() == (
        [],
        ["GPU 0 (GPU-aaa) MIG 0 cannot be read (Insufficient Permissions): left out"],
    )


def test_an_instance_destroyed_while_it_is_read_is_an_empty_slot() -> None:
    gone = mig_instance("MIG-1", "1g.10gb")
    gone.fails["nvmlDeviceGetMemoryInfo"] = NVMLError_NotFound
    cards, notes = NvmlReader(ScriptedNvml(mig_a100("GPU-aaa", gone, mig_instance("MIG-2", "1g.10gb")))).cards()
    assert (uuids(cards), notes) == (["MIG-2"], [])


def test_a_card_lost_among_its_instances_is_lost_whole() -> None:
    lost = mig_instance("MIG-2", "1g.10gb")
    lost.fails["nvmlDeviceGetMemoryInfo"] = ScriptedNvml.NVMLError_GpuIsLost
    library = ScriptedNvml(mig_a100("GPU-aaa", mig_instance("MIG-1", "1g.10gb"), lost), ScriptedCard("GPU-bbb"))
    cards, notes = NvmlReader(library).cards()
    assert (uuids(cards), notes) == (["GPU-bbb"], ["GPU 0 (GPU-aaa) is lost: left out"])


def test_compute_instances_that_share_one_memory_are_noted() -> None:
    halves = [mig_instance(uuid, "1c.2g.20gb", compute=1, slices=2) for uuid in ("MIG-1", "MIG-2")]
    cards, notes = NvmlReader(ScriptedNvml(mig_a100("GPU-aaa", *halves))).cards()
    assert uuids(cards) == ["MIG-1", "MIG-2"]
    assert len(notes) == 1
    assert notes[0].startswith("GPU 0 (GPU-aaa): MIG-1, MIG-2: compute instances of one GPU instance share")


# No driver, no library


def with_nvidia(root: Path, sign: str) -> Path:
    (root / sign).mkdir(parents=True)
    return root


@pytest.mark.parametrize("error", [NVMLError_LibraryNotFound, NVMLError_DriverNotLoaded])
def test_a_missing_driver_is_noted_only_if_the_machine_has_a_card(tmp_path: Path, error: type[NVMLError]) -> None:
    library = ScriptedNvml(starts_with=error)
    assert NvmlReader(library, tmp_path).cards() == ([], [])
    note = f"NVIDIA driver missing ({error.text}): GPUs are not detected"
    assert NvmlReader(library, with_nvidia(tmp_path, "dev/nvidia0")).cards() == ([], [note])


def test_a_driver_that_does_not_match_its_library_is_always_noted(tmp_path: Path) -> None:
    cards, notes = NvmlReader(ScriptedNvml(starts_with=NVMLError_LibRmVersionMismatch), tmp_path).cards()
    assert cards == []
    assert notes == ["NVML failed to initialise (RM has detected an NVML/RM version mismatch.): GPUs are not detected"]


def test_a_missing_pynvml_is_noted_only_if_the_machine_has_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without_pynvml(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pynvml":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pynvml)
    assert NvmlReader(root=tmp_path).cards() == ([], [])
    note = "NVML not installed: GPUs are not detected; pip install 'dovetail-ml[gpu]'"
    assert NvmlReader(root=with_nvidia(tmp_path, "proc/driver/nvidia")).cards() == ([], [note])


# The script against the real library


def test_the_scripted_library_has_the_shape_of_the_real_one() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in dir(ScriptedNvml) if name.lower().startswith("nvml")]
    assert len(names) > 15
    for name in names:
        scripted, real = getattr(ScriptedNvml, name), getattr(pynvml, name)
        if isinstance(scripted, type):
            assert issubclass(real, pynvml.NVMLError)
        elif callable(scripted):
            required = [p for p in inspect.signature(real).parameters.values() if p.default is p.empty]
            assert [p.name for p in required] == list(inspect.signature(scripted).parameters)[1:]
        else:
            assert real == scripted


def test_the_scripted_structures_have_fields_of_the_real_ones() -> None:
    pynvml = pytest.importorskip("pynvml")
    library = two_cards()
    library.nvmlInit()
    memory = library.nvmlDeviceGetMemoryInfo(library.card_list[0])
    assert vars(memory).keys() <= {name for name, _ in pynvml.c_nvmlMemory_t._fields_}
    attributes = mig_instance("MIG-1").attributes
    assert vars(attributes).keys() <= {name for name, _ in pynvml.c_nvmlDeviceAttributes._fields_}


@pytest.mark.parametrize("error", [NVMLError_LibraryNotFound, NVMLError_DriverNotLoaded])
def test_the_errors_of_the_real_library_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[NVMLError]
) -> None:
    pynvml = pytest.importorskip("pynvml")

    def fail() -> None:
        raise getattr(pynvml, error.__name__)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    note = f"NVIDIA driver missing ({error.text}): GPUs are not detected"
    assert NvmlReader(root=with_nvidia(tmp_path, "dev/nvidia0")).cards() == ([], [note])
