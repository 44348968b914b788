"""Claim rows in memory, for tests of the store's decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dovetail.errors import EngineError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.claims.store import Row

T = TypeVar("T")


class MemoryRows:
    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.news = True

    def read(self) -> list[Row]:
        return sorted(self.rows.values(), key=lambda row: (row[6], row[0]))

    def transact(self, decide: Callable[[list[Row]], tuple[list[str], Row | None, T]]) -> T:
        void, row, answer = decide(self.read())
        for owner in void:
            self.delete(owner)
        if row is not None:
            self.rows[row[0]] = row
            self.news = True
        return answer

    def delete(self, owner: str) -> None:
        self.news |= self.rows.pop(owner, None) is not None

    def has_changed(self) -> bool:
        news, self.news = self.news, False
        return news

    def damaged_error(self, reason: str) -> EngineError:
        return EngineError(Problem("DT397", reason))
