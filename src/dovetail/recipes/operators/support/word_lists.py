"""Filters by word lists (stop words, flagged words) read from local files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dovetail.recipes.operators.support.parameter_checks import (
    check_bound,
    check_int,
    check_text,
    parameter_error,
    reject_tokenization,
)
from dovetail.recipes.operators.support.words import WordFilter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.engines.worker_context import Worker

ALL_LANGUAGES = "all"
"""Name for all languages together."""


def word_list_folder() -> Path:
    """Folder of Data-Juicer's word lists."""
    home = Path(os.environ.get("CACHE_HOME", "~/.cache"))
    cache = Path(os.environ.get("DATA_JUICER_CACHE_HOME", home / "data_juicer"))
    return Path(os.environ.get("DATA_JUICER_ASSETS_CACHE", cache / "assets")).expanduser()


class WordListFilter(WordFilter):
    """Keep texts by the share of their words on the list of a language; 0.0 without words.

    With `use_words_aug`, each group of adjacent words is an additional word: for languages that do not separate words
    by spaces, or have spaces within words.
    """

    kind: ClassVar[str]
    """Kind of words; all .json files with this in their names are read."""

    def __init__(
        self,
        folder: str | None,
        lang: str,
        *,
        tokenization: bool,
        bounds: tuple[float | None, float | None],
        groups: tuple[bool, Sequence[int], str],
    ) -> None:
        reject_tokenization(tokenization)
        self.lang = check_text("lang", lang)
        self.folder = folder
        self.low = check_bound("min_ratio", bounds[0])
        self.high = check_bound("max_ratio", bounds[1])
        wanted, sizes, join_character = groups
        if not isinstance(sizes, list | tuple) or not sizes:
            raise parameter_error("words_aug_group_sizes", "a list of sizes, such as [2]", sizes)
        checked = tuple(check_int("each of words_aug_group_sizes", size, 1) for size in sizes)
        self.sizes = checked if wanted else ()
        self.join_character = check_text("words_aug_join_char", join_character)
        self.word_list: frozenset[str] | None = None

    def missing_assets(self) -> str:
        try:
            read_word_list(self.kind, self.folder, self.lang)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        self.word_list = read_word_list(self.kind, self.folder, self.lang)

    def compute_stat(self, text: str) -> float:
        if self.word_list is None:
            self.word_list = read_word_list(self.kind, self.folder, self.lang)
        words = self.words(text)
        if not words:
            return 0.0
        if self.sizes:
            words = [*words, *(group for size in self.sizes for group in self._groups(words, size))]
        return sum(map(self.word_list.__contains__, words)) / len(words)

    def _groups(self, words: Sequence[str], size: int) -> Iterator[str]:
        return (self.join_character.join(words[at : at + size]) for at in range(len(words) - size + 1))


def read_word_list(kind: str, folder: str | None, lang: str) -> frozenset[str]:
    """The words of one language in all files of this kind in a folder."""
    where = Path(folder).expanduser() if folder else word_list_folder()
    files = sorted(file for file in where.glob("*.json") if kind in file.name) if where.is_dir() else []
    words: dict[str, set[str]] = {}
    for file in files:
        for language, more in _read_word_file(file).items():
            words.setdefault(language, set()).update(more)
    if not words:
        raise FileNotFoundError(
            f"no list of {kind} in {where}; add {kind}.json, such as"
            f' {{"en": ["one", "two"]}}, or set {kind}_dir to the folder that has it'
        )
    if lang in words:
        return frozenset(words[lang])
    if lang == ALL_LANGUAGES:
        return frozenset().union(*words.values())
    raise ValueError(f"lang is {lang!r}, but {where} has {kind} for {', '.join(sorted(words))} only")


def _read_word_file(file: Path) -> dict[str, list[str]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if isinstance(found, dict) and all(map(_is_word_list, found.values())):
        return found
    raise ValueError(f'{file} does not map languages to lists of words, such as {{"en": ["one", "two"]}}')


def _is_word_list(words: object) -> bool:
    return isinstance(words, list) and all(isinstance(word, str) for word in words)
