"""How do results get to stdout? One JSON value per line, each as soon as it comes."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from dovetail.errors import Problem, RunError, shown

if TYPE_CHECKING:
    import dovetail as dt

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def print_rows(run: dt.Run) -> bool:
    """False: whoever read them left (`| head`), and the run was told to stop."""
    encode = json.JSONEncoder(ensure_ascii=False, default=_plain).encode
    out = sys.stdout.buffer
    try:
        for item in run:
            out.write(_line(item, encode))
            out.flush()
    except BrokenPipeError:
        run.cancel("nobody reads the results any more")
        # what is still in the buffer must not be written at exit, when nobody is there to hear of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise  # the source's, or somebody else's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        message = f"results cannot be written to stdout: {error.strerror}"
        raise RunError(Problem("DT369", message, fixes=("--sink with a path where there is room",))) from None
    return True


def _line(item: object, encode: Any) -> bytes:
    try:
        text: str = encode(item)
        return text.encode("utf-8", "surrogatepass") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        message = f"a result cannot be printed as JSON: {error}: {shown(item)}"
        fixes = ("return plain values from the last stage", "--sink out.parquet, which takes more kinds of values")
        raise RunError(Problem("DT369", message, fixes=fixes)) from None


def _plain(value: Any) -> Any:
    """Of numpy and dates, which many rows hold."""
    for name in ("tolist", "isoformat"):
        convert = getattr(value, name, None)
        if callable(convert):
            return convert()
    raise TypeError(f"{type(value).__name__} is not JSON")
