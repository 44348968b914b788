"""How many of the words of a text are on a list? Lists are files of the user; nothing is ever downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dovetail.recipes.operators.figures import bound, count, no_tokenization
from dovetail.recipes.operators.words import WordFilter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.engines.worker import Worker

ALL = "all"
"""The language that means all of them."""


def folder_of_lists() -> Path:
    """Where Data-Juicer keeps its lists, if it was ever run here."""
    home = Path(os.environ.get("CACHE_HOME", "~/.cache"))
    cache = Path(os.environ.get("DATA_JUICER_CACHE_HOME", home / "data_juicer"))
    return Path(os.environ.get("DATA_JUICER_ASSETS_CACHE", cache / "assets")).expanduser()


class WordListFilter(WordFilter):
    """Keeps texts by the share of their words that are on the list of a language; 0.0 if there are no words.

    With `use_words_aug`, neighbouring words are put together in groups, too, and each group is one more word: for
    languages that do not part words by spaces, or that do so within words.
    """

    kind: ClassVar[str]
    """What the words on the list are. All files with names that have it in them, and end in ".json", are read."""

    def __init__(
        self,
        folder: str | None,
        lang: str,
        *,
        tokenization: bool,
        bounds: tuple[float | None, float | None],
        groups: tuple[bool, Sequence[int], str],
    ) -> None:
        no_tokenization(tokenization)
        if not isinstance(lang, str):
            raise ValueError(f"lang is {lang!r}, which is not a language, such as en")  # noqa: TRY004
        self.lang = lang
        self.folder = folder
        self.low = bound("min_ratio", bounds[0])
        self.high = bound("max_ratio", bounds[1])
        wanted, sizes, self.between = groups
        if not isinstance(sizes, list | tuple) or not sizes:
            raise ValueError(f"words_aug_group_sizes is {sizes!r}, which is not a list of sizes, such as [2]")
        checked = tuple(count("each of words_aug_group_sizes", size) for size in sizes)
        self.sizes = checked if wanted else ()
        if not isinstance(self.between, str):
            raise ValueError(f"words_aug_join_char is {self.between!r}, which is not a text")  # noqa: TRY004
        self.listed: frozenset[str] | None = None

    def absent(self) -> str:
        try:
            read_list(self.kind, self.folder, self.lang)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        self.listed = read_list(self.kind, self.folder, self.lang)

    def figure_of(self, text: str) -> float:
        if self.listed is None:
            self.listed = read_list(self.kind, self.folder, self.lang)
        words = self.words(text)
        if not words:
            return 0.0
        if self.sizes:
            words = [*words, *(group for size in self.sizes for group in self._groups(words, size))]
        return sum(map(self.listed.__contains__, words)) / len(words)

    def _groups(self, words: Sequence[str], size: int) -> Iterator[str]:
        return (self.between.join(words[at : at + size]) for at in range(len(words) - size + 1))


def read_list(kind: str, folder: str | None, lang: str) -> frozenset[str]:
    """The words of one language in all files about this kind of words in a folder."""
    where = Path(folder).expanduser() if folder else folder_of_lists()
    files = sorted(file for file in where.glob("*.json") if kind in file.name) if where.is_dir() else []
    words: dict[str, set[str]] = {}
    for file in files:
        for language, more in _words_in(file).items():
            words.setdefault(language, set()).update(more)
    if not words:
        raise FileNotFoundError(
            f"there is no list of {kind} in {where}; put {kind}.json there, such as"
            f' {{"en": ["one", "two"]}}, or set {kind}_dir to the folder that has it'
        )
    if lang in words:
        return frozenset(words[lang])
    if lang == ALL:
        return frozenset().union(*words.values())
    raise ValueError(f"lang is {lang!r}, but {where} has {kind} for {', '.join(sorted(words))} only")


def _words_in(file: Path) -> dict[str, list[str]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if isinstance(found, dict) and all(map(_is_a_list_of_words, found.values())):
        return found
    raise ValueError(f'{file} does not map languages to lists of words, such as {{"en": ["one", "two"]}}')


def _is_a_list_of_words(words: object) -> bool:
    return isinstance(words, list) and all(isinstance(word, str) for word in words)
