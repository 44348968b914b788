"""Profile store: speeds, setup times and memory of stages measured in earlier runs.

Nothing here raises: what cannot be read was not measured, and what cannot be written is not kept.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.observe.run_folder import home_folder, read_json_object, write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROFILE_VERSION = 1
MAX_FILES = 2000
MIN_ITEMS = 8
MIN_SECONDS = 0.05
"""Less of either says little: it never takes the place of what is known better."""
NEW_RUN_WEIGHT = 0.7
SHORT_RUN_WEIGHT = 0.3
"""How much the newest run counts beside all before it; less if it was a short one."""
LONG_RUN_S = 1.0
PEAK_DECAY = 0.9
_WRITE_LOCK = Lock()
"""Runs of one process would write to the same temporary file."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a measurement holds for."""

    code: str
    """As pipeline.code.code_hash tells it."""
    batch_size: int
    slots: int
    cpu_milli: int
    gpu: str
    """What it takes of a card, in the shape's own numbers; empty: nothing."""
    card: str
    """The model; empty: none."""
    reads: str = ""
    """For stages that read the source: its kind."""
    writes: str = ""
    """For stages that write to the sink: its kind."""

    @property
    def file(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """What runs measured of a stage, the later ones counting more."""

    seconds_per_item: float
    """Of one worker, for each item that it takes in."""
    returns: float
    """Items out per item in."""
    items: int
    """That were seen, in all runs."""
    seconds: float
    """Of work that was seen, in all runs."""
    setup_s: float | None = None
    """Of one worker; None: not seen."""
    peak_bytes: int | None = None
    """Of one worker; None: nobody measured."""
    runs: int = 1
    when: float = 0.0
    """Of the last run; seconds since 1970."""

    @property
    def is_small_sample(self) -> bool:
        return self.items < MIN_ITEMS or self.seconds < MIN_SECONDS


def profiles_folder() -> Path:
    return home_folder() / "profiles"


def read_profile(key: ProfileKey) -> StageMeasurement | None:
    """None: nothing was measured yet, or it cannot be read."""
    try:
        data = read_json_object(profiles_folder() / key.file)
    except (OSError, RuntimeError):
        return None
    if data.get("version") != PROFILE_VERSION or data.get("key") != asdict(key):
        return None
    return _parse_measurement(data)


def _parse_measurement(data: Mapping[str, Any]) -> StageMeasurement | None:
    values: dict[str, Any] = {item.name: data.get(item.name) for item in fields(StageMeasurement)}
    for name, value in values.items():
        missing = value is None and name in ("setup_s", "peak_bytes")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not missing and not (number and math.isfinite(value) and value >= 0):
            return None
    found = StageMeasurement(**values)
    return found if found.seconds_per_item > 0 and found.items > 0 else None


def write_profiles(measured: Mapping[ProfileKey, StageMeasurement], wall: float | None = None) -> str:
    """Blends each with what is known of it. What went wrong, in words; nothing if all is well or the home is not to be
    written."""
    when = time.time() if wall is None else wall
    folder = profiles_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _WRITE_LOCK:
            for key, new in measured.items():
                kept = blend(read_profile(key), replace(new, when=when))
                text = json.dumps({"version": PROFILE_VERSION, "key": asdict(key), **asdict(kept)}, indent=1)
                write_atomically(folder / key.file, text)
            delete_oldest(folder)
    except PermissionError:
        return ""
    except OSError as error:
        quiet = error.errno == errno.EROFS  # a read-only home is a choice
        return "" if quiet else f"what this run measured could not be kept in {folder}: {error.strerror or error}"
    return ""


def blend(old: StageMeasurement | None, new: StageMeasurement) -> StageMeasurement:
    """Recent runs count more; little never takes the place of much."""
    if old is None or (old.is_small_sample and not new.is_small_sample):
        return new
    if new.is_small_sample and not old.is_small_sample:
        return old
    share = NEW_RUN_WEIGHT if new.seconds >= min(LONG_RUN_S, old.seconds) else SHORT_RUN_WEIGHT

    def mix(before: float, now: float) -> float:
        return (1 - share) * before + share * now

    setup = (
        new.setup_s if old.setup_s is None else old.setup_s if new.setup_s is None else mix(old.setup_s, new.setup_s)
    )
    peak = max(round(PEAK_DECAY * (old.peak_bytes or 0)), new.peak_bytes or 0) or None
    return StageMeasurement(
        seconds_per_item=mix(old.seconds_per_item, new.seconds_per_item),
        returns=mix(old.returns, new.returns),
        items=old.items + new.items,
        seconds=old.seconds + new.seconds,
        setup_s=setup,
        peak_bytes=peak,
        runs=old.runs + 1,
        when=new.when,
    )


def delete_oldest(folder: Path, most: int = MAX_FILES) -> None:
    """Down to so many; other runs may do the same at this moment."""
    files = [path for path in folder.iterdir() if path.suffix == ".json"]
    if len(files) <= most:
        return
    ages = []
    for path in files:
        with suppress(OSError):
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages)[: max(0, len(ages) - most)]:
        with suppress(OSError):
            path.unlink()
