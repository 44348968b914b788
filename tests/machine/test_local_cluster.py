"""This machine as a cluster."""

from __future__ import annotations

import pytest

import dovetail as dt
from dovetail.machine.gpus import NvmlReader
from scripted_nvml import GIB, ScriptedCard, ScriptedNvml, mig_a100, mig_instance


@pytest.fixture(autouse=True)
def _every_card_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def local(library: ScriptedNvml) -> dt.Cluster:
    return dt.Cluster.local(gpus=NvmlReader(library=library))


def test_two_cards_have_the_drivers_memory_and_the_tables_codecs() -> None:
    cluster = local(ScriptedNvml(ScriptedCard("GPU-a"), ScriptedCard("GPU-b", "NVIDIA H100 PCIe", 79 * GIB)))
    first, second = cluster.nodes[0].gpus
    assert (first.model, first.memory_bytes, first.nvdecs, first.nvencs, first.uuid) == ("L4", 24 * GIB, 4, 2, "GPU-a")
    assert (second.model, second.memory_bytes, second.nvdecs, second.nvencs) == ("H100", 79 * GIB, 7, 0)


def test_a_request_for_a_whole_model_never_gets_a_mig_instance() -> None:
    library = ScriptedNvml(mig_a100("GPU-a", mig_instance("MIG-1"), mig_instance("MIG-2")))
    cluster = local(library)
    assert [gpu.uuid for gpu in cluster.nodes[0].gpus] == ["MIG-1", "MIG-2"]
    placer = dt.Placer(dt.Ledger(cluster), dt.FragmentationScore(dt.Workload()))
    assert placer.find(dt.Resources(gpus=1, accelerator="A100").shape()) is None
    assert len(placer.fill(dt.Resources(cpus=0.1, gpus=1).shape(), 9)) == 2
    assert dt.Cluster.parse(cluster.spec()).nodes[0].gpus == cluster.nodes[0].gpus


def test_a_card_that_vanishes_between_two_readings_is_left_out_with_a_note() -> None:
    library = ScriptedNvml(ScriptedCard("GPU-a"), ScriptedCard("GPU-b"))
    assert len(local(library).nodes[0].gpus) == 2
    library.lose(1)
    later = local(library)
    assert [gpu.uuid for gpu in later.nodes[0].gpus] == ["GPU-a"]
    assert any("lost" in note for note in later.notes)


def test_cards_that_are_hidden_are_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    cluster = local(ScriptedNvml(ScriptedCard("GPU-a"), ScriptedCard("GPU-b")))
    assert [gpu.uuid for gpu in cluster.nodes[0].gpus] == ["GPU-b"]
    assert any("CUDA_VISIBLE_DEVICES" in note for note in cluster.notes)


def test_this_machine_has_cpus_and_memory_and_can_be_written_down() -> None:
    cluster = dt.Cluster.local()
    node = cluster.nodes[0]
    assert node.cpu_milli >= 1000
    assert node.memory_bytes > 1 << 28
    assert dt.Cluster.from_dict(cluster.to_dict()) == cluster
