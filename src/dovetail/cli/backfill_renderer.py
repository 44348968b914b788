"""Fixes, messages and notes of a backfill as options and commands of `dovetail backfill`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import dovetail as dt
from dovetail.errors import Renderer, RunError, with_note
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.pipeline.secret_settings import is_secret_storage_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.errors import AddNodes, AnyError, Call

UDF_PLACEHOLDER = "package.module:function"
COMMANDS = {
    "table.backfill": "run",
    "table.add_column": "run",
    "table.errors": "errors",
    "table.history": "history",
    "table.retry_errors": "retry",
    "table.plan_backfill": "plan",
}
"""Call of a method of the table -> command of `dovetail backfill`."""
COMMANDS_MADE = {"run": ("run",), "plan": ("run", "plan"), "retry": ("retry",)}
"""Command with options -> the commands for whose calls these options are; `plan` has the options of `run`."""
OPTION_NAMES = {"storage_options": "--storage-option", "then": "--on-error"}
"""Settings whose option has another name; `then` is the last argument of a `Retry`, which --retry builds."""


class BackfillRenderer(OptionRenderer):
    """Spelling of one command `dovetail backfill ACTION TABLE COLUMN`.

    `udf` and `storage` are the values of its options --udf and --storage-option. A call that the command itself makes,
    with other arguments, becomes the options to add to the command. Every other call becomes a command.
    """

    def __init__(
        self,
        table: str,
        column: str,
        action: str = "run",
        udf: str | None = None,
        storage: Sequence[str] = (),
        *,
        trust_table: bool = False,
    ) -> None:
        super().__init__()
        self.table, self.column, self.action, self.udf, self.trust_table = table, column, action, udf, trust_table
        self._storage = [text for text in storage if not is_secret_storage_option(text.partition("=")[0])]

    def command(self, action: str, *words: str) -> str:
        """Another command for the same table. Storage options that may be secrets are left out."""
        storage = [word for text in self._storage for word in ("--storage-option", text)]
        return shlex.join(["dovetail", "backfill", action, self.table, *words, *storage])

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
        return Renderer.add_nodes(self, fix)

    def call(self, fix: Call) -> str:
        if fix.function == "@dt.udf":  # written in the user's module
            return Renderer.call(self, fix)
        text = self._retry_options(fix) if fix.function == "Retry" else self._table_call(fix)
        return with_note(text, fix.note) if text else ""

    def _retry_options(self, fix: Call) -> str:
        typed = [self.option("retry", exception) for exception in fix.arguments]
        if "then" in fix.keywords:
            typed.append(self.option("then", fix.keywords["then"]))
        return " ".join(typed)

    def _table_call(self, fix: Call) -> str:
        """A call of a method of the table; "" for functions that no command calls."""
        command = COMMANDS.get(fix.function)
        made = COMMANDS_MADE.get(self.action, ())
        if command is None or (fix.function == "table.add_column" and not made):
            return ""
        if not fix.arguments:
            return self.command(command)
        column, *functions = fix.arguments
        columns = ",".join(column) if isinstance(column, list) else str(column)
        known = [self.column]
        if fix.function != "table.add_column":  # of columns that are filled together, the first one stands for all
            known.append(self.column.partition(",")[0].strip())
        options = [self.option(name, value) for name, value in fix.keywords.items()]
        udf = [f"--udf {shlex.quote(self.udf or UDF_PLACEHOLDER)}"] * bool(functions)
        if command in made and columns in known:
            missing = options if self.udf else [*udf, *options]
            if missing:
                return " ".join(missing)
        if not udf and columns in known and command in ("run", "retry"):
            udf = self._function_options()
        return " ".join([self.command(command, columns), *udf, *options])

    def _function_options(self) -> list[str]:
        """The function of this command, for another command on the same column."""
        if self.udf:
            return [f"--udf {shlex.quote(self.udf)}"]
        return ["--trust-table"] if self.trust_table else []

    def error(self, error: AnyError) -> AnyError:
        """The same error in this spelling. A RowFailed is also of the type that the function raised, which click may
        treat as its own (EOFError): it becomes a plain RunError."""
        if isinstance(error, dt.RowFailed):
            return RunError(map(self.problem, error.problems))  # type: ignore[return-value]
        return super().error(error)
