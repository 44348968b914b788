"""Known GPU models, their memory and codecs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

__all__ = [
    "KNOWN_CARDS",
    "CardModel",
    "card_model",
    "look_alike_model",
    "model_key",
    "model_name",
    "models_with_memory",
    "similar_model",
]


@dataclass(frozen=True, slots=True)
class CardModel:
    """A GPU model: marketed memory, video decoders and encoders."""

    name: str
    memory_gb: int
    nvdecs: int
    nvencs: int


# Engines are those of one GPU, as "total number of NVDEC/NVENC" over "number of chips" in NVIDIA's "Video Encode and
# Decode GPU Support Matrix". The matrix itself could not be read when this was written. Checked against:
#   D  NVIDIA Dynamo documentation, "Video Decode GPU Requirements"
#   M  NVIDIA "Multi-Instance GPU User Guide", supported profiles
#   N  NVIDIA Video Codec SDK, "NVENC Application Note", "NVDEC Application Note" and its FAQ: one NVENC on Turing,
#      two on GP104 and AD104; one NVDEC on Pascal and Volta
#   S  rows of the support matrix, as others quote them
#   P  reviews and users' reports, nothing from NVIDIA
# A letter speaks for both engines, after `d:` for the decoders only, after `e:` for the encoders only. What has no
# letter is remembered, or taken from a sibling on the same chip. Sizes are as marketed; of a card that is sold in
# several the usual default, and a spelling that states another gets that.
KNOWN_CARDS: dict[str, CardModel] = {
    model.name: model
    for model in (
        # data centre: name, GB, NVDEC, NVENC
        CardModel("B300", 288, 7, 0),
        CardModel("B200", 180, 7, 0),  # D
        CardModel("GB200", 186, 7, 0),  # D
        CardModel("H200", 141, 7, 0),  # D
        CardModel("H100", 80, 7, 0),  # D, e:S
        CardModel("H100NVL", 94, 7, 0),
        CardModel("GH200", 96, 7, 0),
        CardModel("H20", 96, 7, 0),
        CardModel("H800", 80, 7, 0),
        CardModel("A100", 40, 5, 0),  # D, e:S
        CardModel("A800", 80, 5, 0),
        CardModel("A30", 24, 4, 0),  # d:M
        CardModel("L40S", 48, 3, 3),  # D, d:S
        CardModel("L40", 48, 3, 3),  # D
        CardModel("L20", 48, 3, 3),
        CardModel("L4", 24, 4, 2),  # D, e:N
        CardModel("A40", 48, 2, 1),
        CardModel("A10", 24, 2, 1),
        CardModel("A10G", 24, 2, 1),
        CardModel("A16", 16, 2, 1),  # one of the four GPUs of the board
        CardModel("A2", 16, 2, 1),
        CardModel("T4", 16, 2, 1),  # e:N
        CardModel("V100", 16, 1, 3),  # d:N
        CardModel("P100", 16, 1, 3),  # d:N
        CardModel("P40", 24, 1, 2),  # d:N
        CardModel("P4", 8, 1, 2),  # N
        # workstation
        CardModel("RTXPRO6000", 96, 4, 4),  # P
        CardModel("RTX6000Ada", 48, 3, 3),  # D
        CardModel("RTX5000Ada", 32, 2, 2),
        CardModel("RTX4500Ada", 24, 2, 2),
        CardModel("RTX4000Ada", 20, 2, 2),  # P
        CardModel("RTXA6000", 48, 2, 1),
        CardModel("RTXA5000", 24, 2, 1),
        CardModel("RTXA4000", 16, 1, 1),
        CardModel("RTX8000", 48, 1, 1),  # e:N
        CardModel("RTX6000", 24, 1, 1),  # e:N; the Turing one
        # GeForce
        CardModel("RTX5090", 32, 2, 3),  # e:P
        CardModel("RTX5080", 16, 2, 2),  # d:P
        CardModel("RTX5070Ti", 16, 1, 2),
        CardModel("RTX5070", 12, 1, 1),
        CardModel("RTX4090", 24, 1, 2),  # P
        CardModel("RTX4080", 16, 1, 2),
        CardModel("RTX4070Ti", 12, 1, 2),
        CardModel("RTX4070", 12, 1, 1),
        CardModel("RTX4060Ti", 8, 1, 1),
        CardModel("RTX4060", 8, 1, 1),
        CardModel("RTX3090", 24, 1, 1),  # e:S
        CardModel("RTX3080", 10, 1, 1),
        CardModel("RTX3070", 8, 1, 1),
        CardModel("RTX3060", 12, 1, 1),
        CardModel("RTX2080Ti", 11, 1, 1),  # e:N
    )
}

# Keys of the table: names in lower case without the words below.
_BY_SPELLING: dict[str, CardModel] = {
    **{name.lower(): model for name, model in KNOWN_CARDS.items()},
    **{name[3:].lower(): model for name, model in KNOWN_CARDS.items() if name.startswith("RTXA")},  # "A6000"
    "h200nvl": KNOWN_CARDS["H200"],
}

_LOOKS = str.maketrans("oil", "011")
_BY_LOOKS = {spelling.translate(_LOOKS): model for spelling, model in _BY_SPELLING.items()}

# Words that do not distinguish models: brand, form factor, kind of memory, and the memory of a GH200's processor, which
# NVML puts into its name. "Laptop", "Super" and "MIG" are not here: those are other cards, or slices of one.
_NOISE = re.compile(
    r"nvidia|tesla|geforce|quadro|generation|blackwell|server|workstation|edition|max|q"
    r"|sxm[0-9]?|ac|pcie|hbm[0-9]?e?|480gb"
)
_SIZE = re.compile(r"([1-9][0-9]{0,2}) ?gi?b|([1-9][0-9]{1,2})g")  # "80GB", "80 GB", "144G"; "1g" is a MIG slice
_WORD = re.compile(r"\b[1-9][0-9]{0,2} gi?b\b|[^\W_]+")


def card_model(name: str) -> CardModel | None:
    """The model for a name as used by people, clouds or NVML; None if it is not in the table."""
    spelling, memory_gb = _read(name)
    model = _BY_SPELLING.get(spelling)
    return model if model is None or memory_gb is None else replace(model, memory_gb=memory_gb)


def model_key(name: str) -> str:
    """A key that is the same for all spellings of one model, in the table or not; sizes are ignored."""
    spelling, _ = _read(name)
    model = _BY_SPELLING.get(spelling)
    return model.name.lower() if model else spelling or name.strip().lower()


def model_name(key: str) -> str:
    """The display name of a key."""
    model = _BY_SPELLING.get(key)
    return model.name if model else key


def similar_model(name: str) -> str | None:
    """The model of the table that a misspelt name resembles; None for a model of the table, or if none is similar."""
    spelling, _ = _read(name)
    if spelling in _BY_SPELLING:
        return None
    import difflib  # late: workers import this module

    near = difflib.get_close_matches(spelling, _BY_SPELLING, n=1, cutoff=0.6)
    return look_alike_model(name) or (_BY_SPELLING[near[0]].name if near else None)


def look_alike_model(name: str) -> str | None:
    """The model of the table whose name differs only in characters that look alike: H10O for H100."""
    spelling, _ = _read(name)
    if spelling in _BY_SPELLING:
        return None
    found = _BY_LOOKS.get(spelling.translate(_LOOKS))
    return found.name if found is not None else None


def models_with_memory(*, nvdecs: int = 0, nvencs: int = 0) -> tuple[str, ...]:
    """Models with at least these codecs, data centre models first."""
    return tuple(name for name, model in KNOWN_CARDS.items() if model.nvdecs >= nvdecs and model.nvencs >= nvencs)


def _read(name: str) -> tuple[str, int | None]:
    """The name without brand and form factor, and the memory that it states."""
    memory_gb: int | None = None
    kept: list[str] = []
    for word in _WORD.findall(name.lower()):
        if _NOISE.fullmatch(word):
            continue
        if size := _SIZE.fullmatch(word):
            memory_gb = int(size[1] or size[2])
        else:
            kept.append(word)
    return "".join(kept), memory_gb
