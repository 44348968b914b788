"""Profile store: speeds, setup times and memory of stages measured in earlier runs.

Nothing here raises: an unreadable profile is ignored, and a profile that cannot be written is dropped.
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

from dovetail.machine.private_files import make_private_folder
from dovetail.observe.run_folder import home_folder, read_json_object, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

PROFILE_VERSION = 2
MAX_FILES = 2000
SMALL_SAMPLE_ITEMS = 7
SMALL_SAMPLE_S = 0.05
"""A measurement of at most this many items, or fewer seconds, never replaces a larger one."""
HALF_LIFE_S = 5.0
"""Worker-seconds of a new measurement after which earlier items count half."""
PEAK_DECAY = 0.9
OPTIONAL_NUMBERS = ("setup_s", "peak_bytes", "cpu_s_per_item", "source_rate", "standard_error")
_WRITE_LOCK = Lock()
"""Runs of one process would write to the same temporary file."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Identity of a measurement: code, settings and hardware that it applies to."""

    code: str
    """As returned by pipeline.code.code_hash."""
    batch_size: int
    slots: int
    cpu_milli: int
    gpu: str
    """GPU share in integers of the shape; empty: none."""
    card: str
    """GPU model; empty: none."""
    reads: str = ""
    """Kind of the source, for stages that read it."""
    writes: str = ""
    """Kind of the sink, for stages that write to it."""

    @property
    def file(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Measurements of a stage, averaged over items; earlier items count less, by the length of later runs."""

    seconds_per_item: float
    """Seconds of one worker per input item."""
    returns: float
    """Output items per input item."""
    items: int
    """Items that the averages stand for."""
    seconds: float
    """Worker-seconds that the averages stand for."""
    setup_s: float | None = None
    """Setup seconds of one worker; None: not measured."""
    peak_bytes: int | None = None
    """Memory of one worker; None: not measured."""
    cpu_s_per_item: float | None = None
    """CPU seconds per input item; None: not measured."""
    source_rate: float | None = None
    """Items per second of the source, of a stage that reads one; None: not measured, or too fast to measure."""
    standard_error: float | None = None
    """Standard error of the seconds per item in the last run, as a share of them; None: too few messages."""
    runs: int = 1
    when: float = 0.0
    """Time of the last run, in seconds since the epoch."""
    stage: str = ""
    """Name of the stage in the last run."""
    probed: bool = False
    """The last run was a probe, which someone asked for: it replaces earlier measurements."""

    @property
    def is_small_sample(self) -> bool:
        return self.items <= SMALL_SAMPLE_ITEMS or self.seconds < SMALL_SAMPLE_S


def profiles_folder() -> Path:
    return home_folder() / "profiles"


def read_profile(key: ProfileKey) -> StageMeasurement | None:
    """None: not measured yet, or not readable."""
    try:
        data = read_json_object(profiles_folder() / key.file)
    except (OSError, RuntimeError):
        return None
    if data.get("version") != PROFILE_VERSION or data.get("key") != asdict(key):
        return None
    return _parse_measurement(data)


def _parse_measurement(data: Mapping[str, Any]) -> StageMeasurement | None:
    values: dict[str, Any] = {item.name: data.get(item.name) for item in fields(StageMeasurement)}
    if not isinstance(values["stage"], str) or not isinstance(values["probed"], bool):
        return None
    for name, value in values.items():
        if name in ("stage", "probed"):
            continue
        missing = value is None and name in OPTIONAL_NUMBERS
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not missing and not (number and math.isfinite(value) and value >= 0):
            return None
    found = StageMeasurement(**values)
    return found if found.seconds_per_item > 0 and found.items > 0 else None


def write_profiles(measured: Mapping[ProfileKey, StageMeasurement], wall: float | None = None) -> str:
    """Merge each measurement into its profile. Returns the error; empty if everything was written or the home is
    read-only."""
    when = time.time() if wall is None else wall
    folder = profiles_folder()
    try:
        make_private_folder(home_folder())
        make_private_folder(folder)
        with _WRITE_LOCK:
            for key, new in measured.items():
                kept = blend(read_profile(key), replace(new, when=when))
                text = json.dumps({"version": PROFILE_VERSION, "key": asdict(key), **asdict(kept)}, indent=1)
                write_atomically(folder / key.file, text)
            delete_oldest(folder)
    except PermissionError:
        return ""
    except OSError as error:
        quiet = error.errno == errno.EROFS  # a read-only home is intended
        return "" if quiet else f"measurements of this run could not be saved in {folder}: {error.strerror or error}"
    return ""


def blend(old: StageMeasurement | None, new: StageMeasurement) -> StageMeasurement:
    """Average of both, weighted by items; the longer the new measurement, the less earlier items count. A small sample
    never replaces a larger one, unless it is that of a probe."""
    if old is None or new.probed or (old.is_small_sample and not new.is_small_sample):
        return new
    if new.is_small_sample and not old.is_small_sample:
        return old
    decay: float = 0.5 ** (new.seconds / HALF_LIFE_S)
    old_items = decay * old.items
    share = new.items / (old_items + new.items)

    def mix(before: float, now: float) -> float:
        return (1 - share) * before + share * now

    def mix_known(before: float | None, now: float | None) -> float | None:
        return now if before is None else before if now is None else mix(before, now)

    peak = max(round(PEAK_DECAY * (old.peak_bytes or 0)), new.peak_bytes or 0) or None
    return StageMeasurement(
        seconds_per_item=mix(old.seconds_per_item, new.seconds_per_item),
        returns=mix(old.returns, new.returns),
        items=round(old_items) + new.items,
        seconds=decay * old.seconds + new.seconds,
        setup_s=mix_known(old.setup_s, new.setup_s),
        peak_bytes=peak,
        cpu_s_per_item=mix_known(old.cpu_s_per_item, new.cpu_s_per_item),
        source_rate=old.source_rate if new.source_rate is None and new.seconds < HALF_LIFE_S else new.source_rate,
        standard_error=new.standard_error,
        runs=old.runs + 1,
        when=new.when,
        stage=new.stage,
    )


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A profile with what it applies to."""

    key: ProfileKey
    measured: StageMeasurement
    path: Path


def stored_profiles() -> list[StoredProfile]:
    """All readable profiles, the latest first."""
    try:
        paths = [path for path in profiles_folder().iterdir() if path.suffix == ".json"]
    except OSError:
        return []
    found = []
    for path in paths:
        with suppress(OSError, RuntimeError, TypeError):
            data = read_json_object(path)
            key, measured = ProfileKey(**data.get("key", {})), _parse_measurement(data)
            if data.get("version") == PROFILE_VERSION and measured is not None and path.name == key.file:
                found.append(StoredProfile(key, measured, path))
    return sorted(found, key=lambda profile: -profile.measured.when)


def forget_profiles(profiles: Iterable[StoredProfile]) -> int:
    """Delete these profiles. Returns how many files were deleted; another process may have deleted some."""
    count = 0
    for profile in profiles:
        with suppress(FileNotFoundError):
            profile.path.unlink()
            count += 1
    return count


def delete_oldest(folder: Path, most: int = MAX_FILES) -> None:
    """Delete the oldest profiles beyond the limit; other runs may do the same concurrently."""
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
