"""What is said when the disk is full, a folder is gone, or a package is missing?"""

from __future__ import annotations

import errno
import shlex
from pathlib import Path

from dovetail.control.splits import Unusable
from dovetail.errors import ConfigError, Problem

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


def resume(run_id: str) -> str:
    return f"dovetail run --resume {run_id}"


def unusable(error: OSError, path: str, run_id: str) -> Unusable:
    """The error that ends a run because of its sink; what was committed so far stays."""
    folder = shlex.quote(str(Path(path).parent))
    again = f"then go on with: {resume(run_id)}"
    said = error.strerror or str(error)
    # pyarrow and lance give the number only as text
    if error.errno in FULL or "No space left" in said or "File too large" in said:
        message = f"no room for the results: {said}"
        return Unusable("DT353", message, f"make room (df -h {folder} shows how much there is), {again}", path)
    if error.errno in GONE:
        return gone(path, run_id)
    return Unusable("DT355", f"the results cannot be written: {said}", f"see that it can be, {again}", path)


def gone(path: str, run_id: str, what: str = "results that were written are not there any more") -> Unusable:
    fix = f"compute them again, and go on, with: {resume(run_id)}"
    return Unusable("DT354", what, fix, path)


def missing(package: str, extra: str, path: str) -> ConfigError:
    return ConfigError(
        Problem(
            "DT358", f"{package} is needed for this sink", fixes=(f"pip install 'dovetail-ml[{extra}]'",), place=path
        )
    )
