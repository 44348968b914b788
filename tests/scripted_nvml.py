"""Simulated pynvml of a machine that a test describes."""
# ruff: noqa: N801, N802 -- the names are pynvml's

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar, TypeVar

GIB = 2**30


class NVMLError(Exception):
    text: ClassVar[str] = "Unknown Error"

    def __str__(self) -> str:
        return self.text


ErrorType = type[NVMLError]


class NVMLError_Uninitialized(NVMLError):
    text = "Uninitialized"


class NVMLError_LibraryNotFound(NVMLError):
    text = "NVML Shared Library Not Found"


class NVMLError_DriverNotLoaded(NVMLError):
    text = "Driver Not Loaded"


class NVMLError_LibRmVersionMismatch(NVMLError):
    text = "RM has detected an NVML/RM version mismatch."


class NVMLError_NotSupported(NVMLError):
    text = "Not Supported"


class NVMLError_FunctionNotFound(NVMLError):
    text = "Function Not Found"


class NVMLError_NotFound(NVMLError):
    text = "Not Found"


class NVMLError_NoPermission(NVMLError):
    text = "Insufficient Permissions"


class NVMLError_GpuIsLost(NVMLError):
    text = "GPU is lost"


@dataclass
class ScriptedInstance:
    """A MIG instance; as a handle it stands for itself."""

    uuid: str
    name: str
    memory_bytes: int
    attributes: SimpleNamespace
    fails: dict[str, ErrorType] = field(default_factory=dict)


@dataclass
class ScriptedCard:
    """A card; `slots` is None without MIG, else what is in each MIG slot; `fails` maps a call to its error."""

    uuid: str
    name: str = "NVIDIA L4"
    memory_bytes: int = 24 * GIB
    slots: list[ScriptedInstance | None] | None = None
    fails: dict[str, ErrorType] = field(default_factory=dict)


Handle = TypeVar("Handle", bound=ScriptedCard | ScriptedInstance)


def mig_instance(
    uuid: str, profile: str = "", *, compute: int = 1, slices: int = 1, memory_mb: int = 9856, decoders: int = 0
) -> ScriptedInstance:
    """An instance of an A100-80GB; without a profile its name does not tell it, as if the driver were terse."""
    attributes = SimpleNamespace(
        sharedDecoderCount=decoders,
        sharedEncoderCount=0,
        gpuInstanceSliceCount=slices,
        computeInstanceSliceCount=compute,
        memorySizeMB=memory_mb,
    )
    name = f"NVIDIA A100-SXM4-80GB MIG {profile}" if profile else "NVIDIA A100-SXM4-80GB"
    return ScriptedInstance(uuid, name, memory_mb * 2**20, attributes)


def mig_a100(uuid: str, *slots: ScriptedInstance | None) -> ScriptedCard:
    return ScriptedCard(uuid, "NVIDIA A100-SXM4-80GB", 81920 * 2**20, slots=list(slots))


class ScriptedNvml:
    """Stands in for the module pynvml. `starts_with` is the error of nvmlInit, as on a machine without a driver."""

    NVML_DEVICE_MIG_ENABLE = 1

    NVMLError = NVMLError
    NVMLError_DriverNotLoaded = NVMLError_DriverNotLoaded
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVMLError_GpuIsLost = NVMLError_GpuIsLost
    NVMLError_LibRmVersionMismatch = NVMLError_LibRmVersionMismatch
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVMLError_NoPermission = NVMLError_NoPermission
    NVMLError_NotFound = NVMLError_NotFound
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_Uninitialized = NVMLError_Uninitialized

    def __init__(
        self, *cards: ScriptedCard, starts_with: ErrorType | None = None, bytes_for_text: bool = False
    ) -> None:
        self.card_list = list(cards)
        self.starts_with = starts_with
        self.bytes_for_text = bytes_for_text
        self.counting_fails: ErrorType | None = None
        self.open = 0

    def lose(self, index: int, call: str = "nvmlDeviceGetHandleByIndex") -> None:
        """Let this call of the card, and no other, raise GPU_IS_LOST from now on."""
        self.card_list[index].fails[call] = NVMLError_GpuIsLost

    def nvmlInit(self) -> None:
        if self.starts_with:
            raise self.starts_with
        self.open += 1

    def nvmlShutdown(self) -> None:
        if not self.open:
            raise NVMLError_Uninitialized
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        if not self.open:
            raise NVMLError_Uninitialized
        if self.counting_fails:
            raise self.counting_fails
        return len(self.card_list)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> ScriptedCard:
        return self._answering(self.card_list[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetName(self, handle: ScriptedCard | ScriptedInstance) -> str | bytes:
        return self._text(self._answering(handle, "nvmlDeviceGetName").name)

    def nvmlDeviceGetUUID(self, handle: ScriptedCard | ScriptedInstance) -> str | bytes:
        return self._text(self._answering(handle, "nvmlDeviceGetUUID").uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: ScriptedCard | ScriptedInstance) -> SimpleNamespace:
        return SimpleNamespace(total=self._answering(handle, "nvmlDeviceGetMemoryInfo").memory_bytes)

    def nvmlDeviceGetMigMode(self, device: ScriptedCard) -> list[int]:
        if self._answering(device, "nvmlDeviceGetMigMode").slots is None:
            raise NVMLError_NotSupported
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: ScriptedCard) -> int:
        return len(self._answering(device, "nvmlDeviceGetMaxMigDeviceCount").slots or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: ScriptedCard, index: int) -> ScriptedInstance:
        slots = self._answering(device, "nvmlDeviceGetMigDeviceHandleByIndex").slots or []
        instance = slots[index]
        if instance is None:
            raise NVMLError_NotFound
        return self._answering(instance, "nvmlDeviceGetMigDeviceHandleByIndex")

    def nvmlDeviceGetAttributes(self, device: ScriptedInstance) -> SimpleNamespace:
        return self._answering(device, "nvmlDeviceGetAttributes").attributes

    def _answering(self, handle: Handle, call: str) -> Handle:
        if not self.open:
            raise NVMLError_Uninitialized
        if call in handle.fails:
            raise handle.fails[call]
        return handle

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.bytes_for_text else text
