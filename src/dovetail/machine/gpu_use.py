"""How busy are the GPUs, and how much of their memory does each process hold?"""

from __future__ import annotations

from dovetail.machine.gpus import _pynvml

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class CardUse:
    """One physical card now. What the driver does not tell of it is None."""

    index: int
    uuid: str | None = None
    use_percent: int | None = None
    """Of the last moments, in how many something ran on it: 100 does not mean that it could do no more."""
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    temperature_c: int | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    cards: tuple[CardUse, ...] = ()
    processes: tuple[tuple[int, int], ...] = ()
    """(pid, bytes), once per card that a process is on. In a container the driver may tell the pids of the host."""

    def of(self, pids: set[int]) -> int | None:
        """Bytes that these processes hold together; None if they are on no card."""
        held = [size for pid, size in self.processes if pid in pids]
        return sum(held) if held else None


class GpuMeter(Protocol):
    """Where the use of GPUs is read from: NVML, or a script in a test."""

    def read(self) -> GpuReading | None:
        """None: it cannot be known. Never raises."""
        ...

    def close(self) -> None: ...


class NvmlMeter:
    """As the NVIDIA driver reports it. NVML stays open between two readings, for opening it is what takes long."""

    def __init__(self, library: Any = None) -> None:
        """`library` is shaped like the module pynvml, which is imported when it is not given."""
        self._library = library
        self._open: bool | None = None
        """None: not tried yet."""

    def read(self) -> GpuReading | None:
        nvml = self._nvml()
        if nvml is None:
            return None
        count = _told(nvml, nvml.nvmlDeviceGetCount) or 0
        found = [_card(nvml, index) for index in range(count)]
        held = (pair for _, processes in found for pair in processes)
        return GpuReading(tuple(card for card, _ in found), tuple(held))

    def close(self) -> None:
        if self._open:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlShutdown()
        self._open = False

    def _nvml(self) -> Any:
        if self._open is None:
            self._library = self._library or _pynvml()
            self._open = self._library is not None and _starts(self._library)
        return self._library if self._open else None


def _starts(nvml: Any) -> bool:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    return True


def _card(nvml: Any, index: int) -> tuple[CardUse, list[tuple[int, int]]]:
    handle = _told(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return CardUse(index), []
    uuid = _told(nvml, nvml.nvmlDeviceGetUUID, handle)
    rates = _told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    milliwatts = _told(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    encoder = _told(nvml, nvml.nvmlDeviceGetEncoderUtilization, handle)
    decoder = _told(nvml, nvml.nvmlDeviceGetDecoderUtilization, handle)
    card = CardUse(
        index,
        uuid.decode(errors="replace") if isinstance(uuid, bytes) else uuid,
        use_percent=None if rates is None else rates.gpu,
        memory_used_bytes=None if memory is None else memory.used,
        memory_bytes=None if memory is None else memory.total,
        power_w=None if milliwatts is None else milliwatts / 1000,
        # each is [percent, the microseconds it is sampled over]
        encoder_percent=None if encoder is None else encoder[0],
        decoder_percent=None if decoder is None else decoder[0],
        temperature_c=_told(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
    )
    return card, _processes(nvml, handle)


def _processes(nvml: Any, handle: Any) -> list[tuple[int, int]]:
    listed = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    # the driver may know that a process is there, and not how much it holds
    return [(process.pid, process.usedGpuMemory) for process in listed if process.usedGpuMemory is not None]


def _told(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """What the driver answers; None for what it does not support or cannot tell now."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None
