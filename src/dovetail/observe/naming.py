"""What is typed to mean a run? Its id if it lies with the others, else its folder, quoted for a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from dovetail.observe.folder import runs_folder


def name_for(folder: str | Path) -> str:
    path = Path(folder)
    return shlex.quote(path.name if path.parent == runs_folder() else str(path))
