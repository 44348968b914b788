"""How do finished files get their names at once, so that nobody ever sees half of one?"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from typing import TYPE_CHECKING

from dovetail.data.writing.parts import sync_folder

if TYPE_CHECKING:
    from pathlib import Path

PACKINGS = ("gz", "zst")


def stem_and_suffix(name: str) -> tuple[str, str]:
    """'x' and '.jsonl.gz' of 'x.jsonl.gz'."""
    cut = name.rfind(".")
    if name[cut + 1 :].lower() in PACKINGS:
        cut = name.rfind(".", 0, cut) if name.rfind(".", 0, cut) > 0 else cut
    return (name[:cut], name[cut:]) if cut > 0 else (name, "")


def shard_name(name: str, number: int) -> str:
    stem, suffix = stem_and_suffix(name)
    return f"{stem}-{number:05d}{suffix}"


def shard_numbers(names: list[str], name: str) -> list[int]:
    """The numbers of those that are shards of `name`."""
    stem, suffix = stem_and_suffix(name)
    form = re.compile(re.escape(stem) + r"-(\d{5,})" + re.escape(suffix), re.DOTALL)
    found = [match for match in map(form.fullmatch, names) if match]
    return sorted(int(match[1]) for match in found if shard_name(name, int(match[1])) == match[0])


def parts_name(name: str, run_id: str) -> str:
    """Of the folder for parts beside the final file; names may be as long as they are."""
    if len(os.fsencode(name)) > 120:
        name = f"{name[:24]}-{hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()}"
    return f".{name}.{run_id}.parts"


def give_name(made: Path, final: Path) -> None:
    """From now on it is there, complete, and what was there before is not. Keeps the permissions of that."""
    with contextlib.suppress(OSError):
        made.chmod(final.stat().st_mode & 0o7777)
    made.replace(final)


def give_name_to_folder(made: Path, final: Path, aside: Path) -> None:
    """The same for a folder. Both change places at once where the kernel can do that; where it cannot, there is a
    moment without any. `aside`: a name for the old one."""
    if not final.exists():
        made.rename(final)
    elif not _exchange(made, final):
        final.rename(aside)
        made.rename(final)


def _exchange(one: Path, other: Path) -> bool:
    import ctypes

    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange)
    except (OSError, AttributeError):
        return False
    return bool(done == 0)


def place_files(made: list[Path], final: Path, *, sharded: bool, first: int = 0) -> list[Path]:
    """Gives the files their names. Each appears at once; shards, one after another, and those of an earlier run that
    are not replaced by a new one go last: a file system cannot do more."""
    names = [final.with_name(shard_name(final.name, first + at)) for at in range(len(made))] if sharded else [final]
    for path, name in zip(made, names, strict=True):
        give_name(path, name)
    if sharded:
        present = [path.name for path in final.parent.iterdir()]
        for number in shard_numbers(present, final.name):
            if number >= first + len(made):
                final.with_name(shard_name(final.name, number)).unlink(missing_ok=True)
    sync_folder(final.parent)
    return names


def remove(folder: Path) -> None:
    from shutil import rmtree

    rmtree(folder, ignore_errors=True)
