"""Which runs could be meant? For TAB in the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

MOST = 50


def complete_runs(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
    """Ids that begin so, the youngest first."""
    from dovetail.errors import DovetailError
    from dovetail.observe.folder import LAST, list_runs

    try:
        names = [LAST, *(run.id for run in list_runs())]
    except DovetailError:
        return []
    return [name for name in names if name.startswith(begun)][:MOST]
