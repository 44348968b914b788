"""pynvml for GPUs that a test describes."""
# ruff: noqa: N802 -- the names are pynvml's

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from scripted_nvml import ScriptedCard, ScriptedNvml

GIB = 2**30


@dataclass
class BusyCard(ScriptedCard):
    use: int = 70
    used_bytes: int = 6 * GIB
    milliwatts: int = 61_500
    encoder: int = 5
    decoder: int = 40
    celsius: int = 55
    processes: dict[int, int | None] = field(default_factory=dict)
    """pid -> bytes; None: the driver does not know."""


class BusyNvml(ScriptedNvml):
    """The module pynvml, of cards that work."""

    NVML_TEMPERATURE_GPU = 0

    def _busy(self, handle: ScriptedCard, call: str) -> BusyCard:
        answering = self._answering(handle, call)
        assert isinstance(answering, BusyCard)
        return answering

    def nvmlDeviceGetUtilizationRates(self, handle: ScriptedCard) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._busy(handle, "nvmlDeviceGetUtilizationRates").use, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: ScriptedCard) -> SimpleNamespace:  # type: ignore[override]
        card = self._busy(handle, "nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=card.memory_bytes, used=card.used_bytes)

    def nvmlDeviceGetPowerUsage(self, handle: ScriptedCard) -> int:
        return self._busy(handle, "nvmlDeviceGetPowerUsage").milliwatts

    def nvmlDeviceGetEncoderUtilization(self, handle: ScriptedCard) -> list[int]:
        return [self._busy(handle, "nvmlDeviceGetEncoderUtilization").encoder, 167_000]

    def nvmlDeviceGetDecoderUtilization(self, handle: ScriptedCard) -> list[int]:
        return [self._busy(handle, "nvmlDeviceGetDecoderUtilization").decoder, 167_000]

    def nvmlDeviceGetTemperature(self, handle: ScriptedCard, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._busy(handle, "nvmlDeviceGetTemperature").celsius

    def nvmlDeviceGetComputeRunningProcesses(self, handle: ScriptedCard) -> list[SimpleNamespace]:
        held = self._busy(handle, "nvmlDeviceGetComputeRunningProcesses").processes
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held.items()]
