"""Usage of GPUs, field by field, with fields that the driver does not report."""

from __future__ import annotations

import builtins
from dataclasses import replace
from typing import Any

import pytest

from dovetail.machine.gpus import CardUsage, GpuMeter, GpuReading, NvmlMeter
from machine.scripted_use import GIB, BusyCard, BusyNvml
from scripted_nvml import (
    ErrorType,
    NVMLError,
    NVMLError_DriverNotLoaded,
    NVMLError_FunctionNotFound,
    NVMLError_GpuIsLost,
    NVMLError_LibraryNotFound,
    NVMLError_NoPermission,
    NVMLError_NotSupported,
)

BUSY = CardUsage(
    0,
    "GPU-aaa",
    use_percent=70,
    memory_used_bytes=6 * GIB,
    memory_bytes=24 * GIB,
    power_w=61.5,
    encoder_percent=5,
    decoder_percent=40,
    temperature_c=55,
)
FIELDS: dict[str, dict[str, None]] = {
    "nvmlDeviceGetUUID": {"uuid": None},
    "nvmlDeviceGetUtilizationRates": {"use_percent": None},
    "nvmlDeviceGetMemoryInfo": {"memory_used_bytes": None, "memory_bytes": None},
    "nvmlDeviceGetPowerUsage": {"power_w": None},
    "nvmlDeviceGetEncoderUtilization": {"encoder_percent": None},
    "nvmlDeviceGetDecoderUtilization": {"decoder_percent": None},
    "nvmlDeviceGetTemperature": {"temperature_c": None},
    "nvmlDeviceGetComputeRunningProcesses": {},
}


def reading(library: BusyNvml) -> GpuReading:
    found = NvmlMeter(library).read()
    assert found is not None
    return found


def test_a_card_and_its_processes_are_read() -> None:
    card = BusyCard("GPU-aaa", processes={10: 2 * GIB, 11: GIB})
    assert reading(BusyNvml(card)) == GpuReading((BUSY,), ((10, 2 * GIB), (11, GIB)))
    assert reading(BusyNvml(card, bytes_for_text=True)).cards == (BUSY,)


@pytest.mark.parametrize("error", [NVMLError_NotSupported, NVMLError_FunctionNotFound, NVMLError_NoPermission])
@pytest.mark.parametrize("call", FIELDS)
def test_figures_that_the_driver_does_not_report_are_none(call: str, error: ErrorType) -> None:
    card = BusyCard("GPU-aaa", processes={10: GIB}, fails={call: error})
    found = reading(BusyNvml(card))
    changes: dict[str, Any] = FIELDS[call]
    assert found.cards == (replace(BUSY, **changes),)
    assert found.processes == (() if "Processes" in call else ((10, GIB),))


def test_a_lost_card_keeps_its_number_and_the_others_are_read() -> None:
    library = BusyNvml(BusyCard("GPU-aaa"), BusyCard("GPU-bbb"))
    library.card_list[0].fails["nvmlDeviceGetHandleByIndex"] = NVMLError_GpuIsLost
    assert reading(library).cards == (CardUsage(0), replace(BUSY, index=1, uuid="GPU-bbb"))
    library.counting_fails = NVMLError
    assert reading(library) == GpuReading()


def test_gpu_memory_is_attributed_to_its_process_on_all_cards() -> None:
    library = BusyNvml(
        BusyCard("GPU-aaa", processes={10: 2 * GIB, 11: None}), BusyCard("GPU-bbb", processes={10: GIB, 12: 5})
    )
    found = reading(library)
    assert found.memory_of({10}) == 3 * GIB
    assert found.memory_of({10, 12, 99}) == 3 * GIB + 5
    assert found.memory_of({11}) is None
    assert found.memory_of(set()) is None


def test_nvml_is_opened_once_and_closed_at_the_end() -> None:
    library = BusyNvml(BusyCard("GPU-aaa"))
    meter: GpuMeter = NvmlMeter(library)
    assert library.open == 0
    assert meter.read() == meter.read()
    assert library.open == 1
    meter.close()
    meter.close()
    assert library.open == 0
    assert meter.read() is None


@pytest.mark.parametrize("error", [NVMLError_LibraryNotFound, NVMLError_DriverNotLoaded, NVMLError])
def test_without_a_driver_nothing_is_known_and_it_is_asked_only_once(error: ErrorType) -> None:
    library = BusyNvml(BusyCard("GPU-aaa"), starts_with=error)
    meter = NvmlMeter(library)
    assert meter.read() is None
    library.starts_with = None
    assert meter.read() is None
    meter.close()


def test_without_pynvml_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "pynvml":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    meter = NvmlMeter()
    assert meter.read() is None
    meter.close()
