"""Shape: what one worker needs, in integers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from dovetail.resources.gpu_models import model_name
from dovetail.resources.sizes import format_milli, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping


class ShapeKind(Enum):
    """How a worker uses cards, which determines the suitable cards."""

    CPU_ONLY = "cpu only"
    """Uses no card."""
    CODEC = "codec"
    """Uses NVDECs or NVENCs of one card, and none of its compute or memory."""
    FRACTIONAL_GPU = "fractional gpu"
    """A share of one card, which other workers use too; its codecs come from that card."""
    WHOLE_NUMBERED_GPU = "whole-numbered gpu"
    """One or more cards that no other worker computes on; codecs that it did not request stay free for others."""
    ENTIRE_GPU = "entire gpu"
    """One or more cards with everything on them, codecs included."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`Resources` normalised: milli-CPUs, bytes, whole codecs. For a gang, what each of its `ranks` processes needs."""

    kind: ShapeKind
    cpu_milli: int = 0
    memory_bytes: int = 0
    cards: int = 0
    """Number of cards."""
    gpu_milli: int = 0
    """Share of each card; 0 for a FRACTIONAL_GPU that is sized by `gpu_memory_bytes` alone."""
    gpu_memory_bytes: int = 0
    """Memory of each card; 0 if not requested. For whole and entire cards: the minimum that a card must have."""
    nvdecs: int = 0
    nvencs: int = 0
    accelerators: tuple[str, ...] = ()
    """Accepted card models, as `gpu_models.model_key` writes them; empty: any."""
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Node labels and their accepted values."""
    custom: tuple[tuple[str, int], ...] = ()
    """Custom resources in thousandths."""
    ranks: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # computed once: placement looks shapes up for every worker
        card = (self.kind.value, self.cards, self.gpu_milli, self.gpu_memory_bytes, self.nvdecs, self.nvencs)
        rest = (self.cpu_milli, self.memory_bytes, self.accelerators, self.labels, self.custom, self.ranks)
        object.__setattr__(self, "_hash", hash((card, rest)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Shape], tuple[object, ...]]:
        # not pickled: another process has other hashes of strings
        return Shape, tuple(getattr(self, item.name) for item in fields(self) if item.init)

    @property
    def rank(self) -> Shape:
        """The shape of one process of the gang."""
        return self if self.ranks == 1 else replace(self, ranks=1)

    @property
    def on_cards(self) -> Shape:
        """The part of the shape that determines the suitable cards; shapes with an equal part share cached results."""
        return replace(self, cpu_milli=0, memory_bytes=0, custom=(), ranks=1)

    @property
    def computes_on_gpu(self) -> bool:
        return self.kind not in (ShapeKind.CPU_ONLY, ShapeKind.CODEC)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return data | {
            "kind": self.kind.value,
            "accelerators": list(self.accelerators),
            "labels": {name: list(values) for name, values in self.labels},
            "custom": dict(self.custom),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Shape:
        """The inverse of `to_dict`."""
        known = {item.name: data[item.name] for item in fields(cls) if item.init}
        return cls(
            **known
            | {
                "kind": ShapeKind(data["kind"]),
                "accelerators": tuple(data["accelerators"]),
                "labels": tuple((name, tuple(values)) for name, values in sorted(data["labels"].items())),
                "custom": tuple(sorted(data["custom"].items())),
            }
        )

    def describe(self) -> str:
        """For messages: '0.25 GPU with 4GB, 1 CPU, 1 NVDEC'."""
        parts = [text for text in (self._gpu_text(), *self._host_texts()) if text]
        text = ", ".join(parts)
        return text if self.ranks == 1 else f"{self.ranks} ranks of ({text})"

    def _gpu_text(self) -> str:
        on = f" {'|'.join(map(model_name, self.accelerators))}" if self.accelerators else ""
        size = format_size(self.gpu_memory_bytes) if self.gpu_memory_bytes else ""
        match self.kind:
            case ShapeKind.CPU_ONLY:
                return ""
            case ShapeKind.CODEC:
                return f"a card{on} for its codecs"
            case ShapeKind.FRACTIONAL_GPU if not self.gpu_milli:
                return f"{size} of a GPU{on}"
            case ShapeKind.FRACTIONAL_GPU:
                return f"{format_milli(self.gpu_milli)} GPU{on}" + (f" with {size}" if size else "")
            case ShapeKind.WHOLE_NUMBERED_GPU | ShapeKind.ENTIRE_GPU:
                entire = "entire " if self.kind is ShapeKind.ENTIRE_GPU else ""
                return f"{self.cards} {entire}GPU{'s' if self.cards > 1 else ''}{on}" + (
                    f" of at least {size}" if size else ""
                )

    def _host_texts(self) -> list[str]:
        texts = []
        if self.cpu_milli:
            texts.append(f"{format_milli(self.cpu_milli)} CPU{'s' if self.cpu_milli > 1000 else ''}")
        if self.memory_bytes:
            texts.append(f"{format_size(self.memory_bytes)} memory")
        if self.nvdecs:
            texts.append(f"{self.nvdecs} NVDEC{'s' if self.nvdecs > 1 else ''}")
        if self.nvencs:
            texts.append(f"{self.nvencs} NVENC{'s' if self.nvencs > 1 else ''}")
        texts += [f"{format_milli(amount)} {name}" for name, amount in self.custom]
        texts += [f"{name}={'|'.join(values)}" for name, values in self.labels]
        return texts
