"""Real NVIDIA GPUs (`make test-gpu`); skipped where there are none."""

from __future__ import annotations

import os

import pytest

from dovetail.machine.gpus import GpuReading, NvmlMeter, NvmlReader

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found() -> GpuReading:
    meter = NvmlMeter()
    read = meter.read()
    meter.close()
    if read is None:
        pytest.skip("no NVIDIA driver on this machine (or no pynvml)")
    if not read.cards:
        pytest.skip("the NVIDIA driver shows no GPU")
    return read


def test_every_card_reports_its_name_and_memory(found: GpuReading) -> None:
    for card in found.cards:
        assert card.uuid is not None
        assert card.uuid.startswith("GPU-")
        assert card.memory_bytes is not None
        assert card.memory_used_bytes is not None
        assert 0 <= card.memory_used_bytes <= card.memory_bytes


def test_figures_of_a_card_are_within_bounds(found: GpuReading) -> None:
    for card in found.cards:
        for percent in (card.use_percent, card.encoder_percent, card.decoder_percent):
            assert percent is None or 0 <= percent <= 100
        assert card.power_w is None or 0 <= card.power_w < 2000
        assert card.temperature_c is None or -40 < card.temperature_c < 150


def test_the_cards_are_those_that_the_machine_has(found: GpuReading) -> None:
    cards, _ = NvmlReader().cards()
    whole = {card.uuid: card.memory_bytes for card in cards if not card.mig}
    used = {card.uuid: card.memory_bytes for card in found.cards}
    assert whole.items() <= used.items()


@pytest.mark.usefixtures("found")  # before torch, which takes seconds to import
def test_memory_that_this_process_takes_is_put_to_it() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    held = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    meter = NvmlMeter()
    found = meter.read()
    meter.close()
    assert found is not None
    if not any(pid == os.getpid() for pid, _ in found.processes):
        pytest.skip("the driver tells the pids of the host, not those of this container")
    assert (found.memory_of({os.getpid()}) or 0) >= held.numel()
