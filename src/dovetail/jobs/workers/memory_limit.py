"""Memory limit of jobs: when a job that uses more memory than it requested is killed, and what does not count. Pure.

`process_runner` measures and kills. What happens when the memory of the machine runs out is decided in
`engines/local/memory_watch.py`.
"""

from __future__ import annotations

from dovetail.resources.sizes import format_size


def used_bytes(size: int, base: int, models: int, base_models: int) -> int:
    """Memory that a job uses, of the `size` of its process. Memory from before the job (`base`) and cached models that
    it has loaded (`models` now, `base_models` before), which are reserved separately, do not count."""
    loaded = models - base_models
    return max(0, size - base - max(0, loaded))


def excess_text(used: int, requested: int) -> str:
    """Why a job is killed; empty: it uses no more than it requested."""
    return (
        f"it used {format_size(used)} of memory and had requested {format_size(requested)}" if used > requested else ""
    )
