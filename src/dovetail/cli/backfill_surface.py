"""Fixes, messages and notes of a backfill as options and commands of `dovetail backfill`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import dovetail as dt
from dovetail.errors import RunError, Surface, with_note
from dovetail.pipeline.option_surface import OptionSurface

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.errors import AddNodes, AnyError, Call

UDF_OPTION = "--udf package.module:function"
ACTION_OPTIONS = {
    "table.errors": "--errors",
    "table.history": "--history",
    "table.retry_errors": "--retry-errors",
    "table.drop": "--drop",
}
"""Call -> option that replaces filling the column."""
CALLS_BY_ACTION = {"": "table.backfill", "plan": "table.backfill", "retry_errors": "table.retry_errors"}
"""Action of the command -> the call that it makes, for the actions that take --udf and further options."""
TABLE_CALLS = frozenset({"table.backfill", "table.add_column", *ACTION_OPTIONS})
OPTION_NAMES = {"storage_options": "--storage-option", "then": "--on-error"}
"""Settings whose option has another name; `then` is the last argument of a `Retry`, which --retry builds."""


class BackfillSurface(OptionSurface):
    """Spelling of one command `dovetail backfill TABLE COLUMN`; `action` is "" if it fills the column.

    A call that the command itself makes, with other arguments, becomes the options to add to the command. Every other
    call becomes a command.
    """

    def __init__(self, table: str, column: str, action: str = "") -> None:
        super().__init__()
        self.table, self.column, self.action = table, column, action

    def name(self, setting: str) -> str:
        return OPTION_NAMES.get(setting) or super().name(setting)

    def option(self, name: str, value: object) -> str:
        match name, value:
            case "storage_options", dict():
                return " ".join(f"--storage-option {shlex.quote(f'{key}={part}')}" for key, part in value.items())
            case "env_from", list():
                return " ".join(f"--env-from {shlex.quote(str(one))}" for one in value)
            case _:
                return super().option(name, value)

    def add_nodes(self, fix: AddNodes) -> str:
        return Surface.add_nodes(self, fix)

    def call(self, fix: Call) -> str:
        if fix.function == "@dt.udf":  # written in the user's module
            return Surface.call(self, fix)
        text = self._retry_options(fix) if fix.function == "Retry" else self._table_call(fix)
        return with_note(text, fix.note) if text else ""

    def _retry_options(self, fix: Call) -> str:
        typed = [self.option("retry", exception) for exception in fix.arguments]
        if "then" in fix.keywords:
            typed.append(self.option("then", fix.keywords["then"]))
        return " ".join(typed)

    def _table_call(self, fix: Call) -> str:
        """A call of a method of the table; "" for functions that no command of this name calls."""
        if fix.function not in TABLE_CALLS:
            return ""
        column, *functions = fix.arguments
        columns = ",".join(column) if isinstance(column, list) else str(column)
        options = self._options(fix.keywords, has_udf=bool(functions))
        adds_column = fix.function == "table.add_column"
        if adds_column and self.action not in CALLS_BY_ACTION:
            return ""
        called = "table.backfill" if adds_column else fix.function
        if options and columns == self.column and called == CALLS_BY_ACTION.get(self.action):
            return " ".join(options)
        command = shlex.join(["dovetail", "backfill", self.table, columns])
        action = [ACTION_OPTIONS[called]] if called in ACTION_OPTIONS else []
        return " ".join([command, *action, *options])

    def _options(self, keywords: Mapping[str, object], *, has_udf: bool) -> list[str]:
        return [UDF_OPTION] * has_udf + [self.option(name, value) for name, value in keywords.items()]

    def error(self, error: AnyError) -> AnyError:
        """The same error in this spelling. A RowFailed is also of the type that the function raised, which click may
        treat as its own (EOFError): it becomes a plain RunError."""
        if isinstance(error, dt.RowFailed):
            return RunError(map(self.problem, error.problems))  # type: ignore[return-value]
        return super().error(error)
