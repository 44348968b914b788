"""NVIDIA GPUs through NVML: cards, MIG instances, CUDA_VISIBLE_DEVICES, and current utilisation."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HIDE_ALL_VALUES = ("", "-1", "NoDevFiles")
# CUDA parses numbers like strtoul: characters behind the digits are ignored.
_NUMBER = re.compile(r"\+?0*([0-9]{1,9})(?![0-9])", re.ASCII)
_OLD_MIG_NAME = re.compile(r"MIG-GPU-[^/]+/[0-9]+/[0-9]+", re.ASCII)
_MIG_PROFILE = re.compile(r"\bMIG (\S+)$")
_MIG_MEMORY_SLICES = 8


@dataclass(frozen=True, slots=True)
class CardFacts:
    """One GPU, or one MIG instance, that can be assigned to a process through CUDA_VISIBLE_DEVICES."""

    model: str
    """NVML's name: "NVIDIA A100-SXM4-80GB"; of a MIG instance, the name of its card."""
    memory_bytes: int
    uuid: str
    """Value for CUDA_VISIBLE_DEVICES: "GPU-..." or "MIG-..."."""
    nvdecs: int | None = None
    """None: unknown; a MIG instance reports its own."""
    nvencs: int | None = None
    mig: str = ""
    """The MIG profile, such as "1g.10gb"; empty for a whole card."""
    index: int | None = None
    """NVML index of the physical card, which does not change when an earlier card is lost."""


class GpuReader(Protocol):
    """Source of GPU data: NVML, or a script in a test."""

    def cards(self) -> tuple[list[CardFacts], list[str]]:
        """All cards in NVML order, with a card in MIG mode replaced by its instances; and notes."""
        ...


DRIVER_PATHS = ("dev/nvidiactl", "dev/nvidia0", "proc/driver/nvidia", "dev/dxg", "dev/nvhost-gpu")
"""Paths that exist when a driver is installed: on Linux, under WSL, on a Jetson."""


class NvmlReader:
    """Cards as the NVIDIA driver reports them. Never raises: unreadable cards are left out, with a note."""

    def __init__(self, library: Any = None, root: Path = Path("/")) -> None:
        """`library` has the interface of the module pynvml, which is imported by default."""
        self._library = library
        self._root = root

    def cards(self) -> tuple[list[CardFacts], list[str]]:
        if self._library is None and not self._has_driver_paths():
            return [], []  # importing pynvml would cost more than everything else here
        nvml = self._library or _import_pynvml()
        if nvml is None:
            fix = "pip install 'dovetail-ml[gpu]'"
            return [], self._note_if_nvidia(f"NVML not installed: GPUs are not detected; {fix}")
        try:
            nvml.nvmlInit()
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as error:
            return [], self._note_if_nvidia(f"NVIDIA driver missing ({error}): GPUs are not detected")
        except nvml.NVMLError as error:
            return [], [f"NVML failed to initialise ({error}): GPUs are not detected"]
        cards: list[CardFacts] = []
        notes: list[str] = []
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                cards += _read_card(nvml, index, notes)
        except nvml.NVMLError as error:
            notes.append(f"NVML failed to count GPUs ({error}): GPUs are not detected")
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
        return cards, notes

    def _note_if_nvidia(self, note: str) -> list[str]:
        """The note, unless the machine has no NVIDIA hardware."""
        return [note] if self._has_driver_paths() else []

    def _has_driver_paths(self) -> bool:
        """Whether NVIDIA hardware or a driver is present."""
        return any((self._root / sign).exists() for sign in DRIVER_PATHS)


def _import_pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _read_card(nvml: Any, index: int, notes: list[str]) -> list[CardFacts]:
    """The card, or its instances in MIG mode, or nothing and a note if the driver cannot reach it."""
    name = f"GPU {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _decode(nvml.nvmlDeviceGetUUID(handle))
        name += f" ({uuid})"
        model = _decode(nvml.nvmlDeviceGetName(handle))
        card = CardFacts(model=model, memory_bytes=0, uuid=uuid, index=index)
        if _in_mig_mode(nvml, handle):
            return _read_instances(nvml, handle, card, notes)
        return [replace(card, memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total)]
    except nvml.NVMLError_GpuIsLost:
        notes.append(f"{name} is lost: left out")
    except nvml.NVMLError as error:
        notes.append(f"{name} cannot be read ({error}): left out")
    return []


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # a card or a driver without MIG support
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _read_instances(nvml: Any, parent: Any, card: CardFacts, notes: list[str]) -> list[CardFacts]:
    instances: list[CardFacts] = []
    failures = 0
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, slot)
            instances.append(_read_instance(nvml, parent, handle, card))
        except nvml.NVMLError_NotFound:  # an empty slot
            continue
        except nvml.NVMLError_GpuIsLost:  # the whole card
            raise
        except nvml.NVMLError as error:
            failures += 1
            notes.append(f"GPU {card.index} ({card.uuid}) MIG {slot} cannot be read ({error}): left out")
    if not instances and not failures:
        notes.append(f"GPU {card.index} ({card.uuid}) is in MIG mode and has no instances: left out")
    split = [instance.uuid for instance in instances if re.match(r"[0-9]+c\.", instance.mig)]
    if split:
        shared = "compute instances of one GPU instance share its memory and decoders, here counted for each"
        notes.append(f"GPU {card.index} ({card.uuid}): {', '.join(split)}: {shared}")
    return instances


def _read_instance(nvml: Any, parent: Any, handle: Any, card: CardFacts) -> CardFacts:
    attributes = nvml.nvmlDeviceGetAttributes(handle)
    named = _MIG_PROFILE.search(_decode(nvml.nvmlDeviceGetName(handle)))
    return replace(
        card,
        uuid=_decode(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        nvdecs=attributes.sharedDecoderCount,
        nvencs=attributes.sharedEncoderCount,
        mig=named[1] if named else _mig_profile(attributes, nvml.nvmlDeviceGetMemoryInfo(parent).total),
    )


def _mig_profile(attributes: Any, parent_bytes: int) -> str:
    """NVIDIA's name of an instance: "3g.40gb", or "1c.3g.40gb" for one compute slice of it.

    The gigabytes are those of the slices that the instance occupies, not the usable ones: an H200's 1g.18gb has 16.
    """
    compute, slices = attributes.computeInstanceSliceCount, attributes.gpuInstanceSliceCount
    eighths = math.ceil(attributes.memorySizeMB * 2**20 * _MIG_MEMORY_SLICES / parent_bytes)
    gigabytes = round(math.ceil(parent_bytes / 2**30) * eighths / _MIG_MEMORY_SLICES)
    return f"{f'{compute}c.' if compute < slices else ''}{slices}g.{gigabytes}gb"


def _decode(value: str | bytes) -> str:
    # Old releases of pynvml return bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@dataclass(frozen=True, slots=True)
class _NoMatch:
    why: str
    ends_the_list: bool = True


def visible_cards(cards: Sequence[CardFacts], value: str | None) -> tuple[list[CardFacts], list[str]]:
    """The cards that CUDA_VISIBLE_DEVICES=value selects, in its order; and notes.

    CUDA's rules: an entry is a number or the prefix of exactly one UUID; the first invalid entry ends the list; a card
    named twice selects none. Two cases that CUDA leaves open are decided here. A number of a lost card or of a card in
    MIG mode is skipped, so that it neither ends the list nor selects the next card, which may belong to another user.
    And several MIG instances may be selected: CUDA uses one per process, but each worker is a process.
    """
    if value is None or not cards:
        return list(cards), []
    setting = f"CUDA_VISIBLE_DEVICES={_printable(value)}"
    chosen: list[int] = []
    notes: list[str] = []
    for entry in [] if value.strip() in _HIDE_ALL_VALUES else value.split(","):
        found = _find_card(entry.strip(), cards)
        if isinstance(found, _NoMatch):
            effect = "CUDA ignores it and all that follows" if found.ends_the_list else "passed over"
            notes.append(f"{setting}: '{_printable(entry.strip())}' {found.why}: {effect}")
            if found.ends_the_list:
                break
        elif found in chosen:
            return [], [f"{setting} names {cards[found].uuid} twice: CUDA then sees no GPU at all"]
        else:
            chosen.append(found)
    if hidden := len(cards) - len(chosen):
        notes.append(f"{setting} hides {hidden} of {len(cards)} GPUs")
    return [cards[position] for position in chosen], notes


def _find_card(entry: str, cards: Sequence[CardFacts]) -> int | _NoMatch:
    """Position in `cards` of the card that an entry names."""
    if number := _NUMBER.match(entry):
        return _find_numbered_card(int(number[1]), cards)
    if not entry.startswith(("GPU-", "MIG-")):
        return _NoMatch("is neither the number nor the UUID of a GPU")
    exact = [position for position, card in enumerate(cards) if card.uuid == entry]
    begun = [position for position, card in enumerate(cards) if card.uuid.startswith(entry)]
    if len(exact or begun) == 1:
        return (exact or begun)[0]
    if begun:
        return _NoMatch(f"is a prefix of {len(begun)} UUIDs")
    if _OLD_MIG_NAME.fullmatch(entry):
        why = "is a MIG name of drivers before R470, use the UUID that nvidia-smi -L prints"
        return _NoMatch(why, ends_the_list=False)
    mig = " (select MIG instances by their UUIDs)" if any(card.mig for card in cards) else ""
    return _NoMatch(f"names no GPU of this machine{mig}")


def _find_numbered_card(number: int, cards: Sequence[CardFacts]) -> int | _NoMatch:
    numbers = [position if card.index is None else card.index for position, card in enumerate(cards)]
    if number > max(numbers):
        return _NoMatch("names no GPU of this machine")
    if number not in numbers:
        return _NoMatch("is a GPU that was left out", ends_the_list=False)
    position = numbers.index(number)
    if cards[position].mig:
        return _NoMatch("is a GPU in MIG mode: select MIG instances by UUID", ends_the_list=False)
    return position


def card_order_notes(cards: Sequence[CardFacts], value: str | None, order: str | None) -> list[str]:
    """A note if CUDA, which orders cards by speed by default, may number these cards differently."""
    numbered = any(_NUMBER.match(entry.strip()) for entry in (value or "").split(","))
    if not numbered or order == "PCI_BUS_ID" or len({card.model for card in cards}) < 2:
        return []
    fix = "set CUDA_DEVICE_ORDER=PCI_BUS_ID or name the cards by UUID"
    return [
        f"CUDA_VISIBLE_DEVICES={_printable(value or '')} is read in PCI order, but CUDA may number different "
        f"cards in another order: {fix}"
    ]


def _printable(value: str) -> str:
    """Printable on any terminal, and shortened to the length of a note."""
    text = value.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class CardUsage:
    """State of one physical card. Unknown values are None."""

    index: int
    uuid: str | None = None
    use_percent: int | None = None
    """Percentage of the last sample period in which a kernel ran: 100 does not mean that the card is saturated."""
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    temperature_c: int | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    cards: tuple[CardUsage, ...] = ()
    processes: tuple[tuple[int, int], ...] = ()
    """(pid, bytes) of each process on the card. In a container, the driver may report pids of the host."""

    def memory_of(self, pids: set[int]) -> int | None:
        """Bytes used by these processes together; None if they use no card."""
        held = [size for pid, size in self.processes if pid in pids]
        return sum(held) if held else None


class GpuMeter(Protocol):
    """Source of GPU usage: NVML, or a script in a test."""

    def read(self) -> GpuReading | None:
        """None: unknown. Never raises."""
        ...

    def close(self) -> None: ...


class NvmlMeter:
    """Usage as the NVIDIA driver reports it. NVML stays open between readings, because opening it is slow."""

    def __init__(self, library: Any = None) -> None:
        """`library` has the interface of the module pynvml, which is imported by default."""
        self._library = library
        self._open: bool | None = None
        """None: not tried yet."""

    def read(self) -> GpuReading | None:
        nvml = self._nvml()
        if nvml is None:
            return None
        count = _query(nvml, nvml.nvmlDeviceGetCount) or 0
        found = [_read_usage(nvml, index) for index in range(count)]
        held = (pair for _, processes in found for pair in processes)
        return GpuReading(tuple(card for card, _ in found), tuple(held))

    def close(self) -> None:
        if self._open:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlShutdown()
        self._open = False

    def _nvml(self) -> Any:
        if self._open is None:
            self._library = self._library or _import_pynvml()
            self._open = self._library is not None and _nvml_starts(self._library)
        return self._library if self._open else None


def _nvml_starts(nvml: Any) -> bool:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    return True


def _read_usage(nvml: Any, index: int) -> tuple[CardUsage, list[tuple[int, int]]]:
    handle = _query(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return CardUsage(index), []
    uuid = _query(nvml, nvml.nvmlDeviceGetUUID, handle)
    rates = _query(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    milliwatts = _query(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    encoder = _query(nvml, nvml.nvmlDeviceGetEncoderUtilization, handle)
    decoder = _query(nvml, nvml.nvmlDeviceGetDecoderUtilization, handle)
    card = CardUsage(
        index,
        uuid.decode(errors="replace") if isinstance(uuid, bytes) else uuid,
        use_percent=None if rates is None else rates.gpu,
        memory_used_bytes=None if memory is None else memory.used,
        memory_bytes=None if memory is None else memory.total,
        power_w=None if milliwatts is None else milliwatts / 1000,
        # each is [percent, sample period in microseconds]
        encoder_percent=None if encoder is None else encoder[0],
        decoder_percent=None if decoder is None else decoder[0],
        temperature_c=_query(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
    )
    return card, _read_processes(nvml, handle)


def _read_processes(nvml: Any, handle: Any) -> list[tuple[int, int]]:
    listed = _query(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    # the driver may know a process but not its memory
    return [(process.pid, process.usedGpuMemory) for process in listed if process.usedGpuMemory is not None]


def _query(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer; None if not supported or not available."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None
