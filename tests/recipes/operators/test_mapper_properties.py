"""Properties of text mappers, found by Hypothesis, compared with simple slow patterns."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from recipes.mapper_aids import changed, create_mapper, texts_of
from text_operators import LINK

PLAIN_EMAIL = re.compile(r"[A-Za-z0-9.\-+_]+@[a-z0-9.\-+_]+\.[a-z]+")
HEADING = r"\*?(?:\[.*?\])?\{.*?\}"
PLAIN_HEADING = re.compile(
    rf"\\(?:chapter{HEADING}|part{HEADING}|(?:sub)?(?:sub)?section{HEADING}|paragraph{HEADING}\\subparagraph{HEADING})",
    re.DOTALL,
)
PLAIN_END = re.compile(
    r"(?:\\appendix|\\begin\{(?:references|REFERENCES|thebibliography)\}|\\bibliography\{.*\}).*", re.DOTALL
)


def made_of(*pieces: str, most: int = 14) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), max_size=most).map("".join)


@given(st.text())
def test_one_pass_normalises_all_spaces(text: str) -> None:
    once = changed("whitespace_normalization_mapper", text)
    assert not set(once) & set("\t\x84\xa0\u2003\u200b\u3000\ufffc")
    # an unusual space at an end becomes a plain one, which the second pass strips
    assert changed("whitespace_normalization_mapper", once) == once.strip()


@given(st.text(), st.integers(1, 9))
def test_chunks_without_overlap_are_the_text(text: str, max_len: int) -> None:
    pieces = texts_of(create_mapper("text_chunk_mapper", max_len=max_len, split_pattern=None), text)
    assert "".join(pieces) == text
    assert all(len(piece) == max_len for piece in pieces[:-1])


@given(st.text(min_size=1), st.integers(2, 9), st.data())
def test_chunks_overlap_the_previous_chunk(text: str, max_len: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(1, max_len - 1))
    mapper = create_mapper("text_chunk_mapper", max_len=max_len, split_pattern="\n\n\n", overlap_len=overlap)
    pieces = texts_of(mapper, text.replace("\n", " "))
    for one, other in pairwise(pieces):
        assert one[-overlap:] == other[:overlap]


@given(made_of("ab", "\n\n", " ", "\n"), st.integers(3, 9))
def test_no_chunk_is_longer_than_max_len(text: str, max_len: int) -> None:
    pieces = texts_of(create_mapper("text_chunk_mapper", max_len=max_len), text)
    assert all(len(piece) <= max_len for piece in pieces)
    assert "".join(pieces).replace("\n", "") == text.replace("\n", "")


@given(st.text(), st.lists(st.characters(), max_size=5))
def test_only_the_given_characters_are_removed(text: str, characters: list[str]) -> None:
    result = changed("remove_specific_chars_mapper", text, chars_to_remove=characters)
    assert result == "".join(character for character in text if character not in characters)


@given(
    made_of(
        "http", "://", ":", "/", "www", ".", "com", "a", "b-", "-", " ", "(", ")", "(x)", "<", "!", "x.co/", "1", "é"
    )
)
def test_links_are_those_of_the_plain_pattern(text: str) -> None:
    assert changed("clean_links_mapper", text, repl="<L>") == LINK.sub("<L>", text)


@given(made_of("a", "b.", "@", "x@y.z", "com", ".", "A", "9", "_", " ", "é", "@a.b"))
def test_addresses_are_those_of_the_plain_pattern(text: str) -> None:
    assert changed("clean_email_mapper", text, repl="<E>") == PLAIN_EMAIL.sub("<E>", text)


@given(made_of("a", "b", " ", "|", "\t", "\n", "a b\n", "a|b\n", "c d e\n", "| a | b |\n", "\r", "\xa0", most=10))
def test_tables_are_those_of_the_plain_pattern(text: str) -> None:
    expected = text
    for separators in range(1, 20):
        expected = re.sub(rf"(?<=\n)(?:\S+?(?:[ |\t]\S+?){{{separators}}}\n+){{2,}}", "", expected)
    assert changed("remove_table_text_mapper", text) == expected


@given(
    made_of(
        "\\section", "\\part[", "*", "[", "]", "{", "}", "a", "\n", "\\paragraph", "\\subparagraph", "\\subsection{"
    )
)
def test_the_first_heading_is_that_of_the_plain_pattern(text: str) -> None:
    heading = PLAIN_HEADING.search(text)
    assert changed("remove_header_mapper", text) == (text[heading.start() :] if heading else "")


@given(made_of("\\appendix", "\\begin{references}", "\\bibliography{", "}", "a", "\n", "\\begin{thebibliography}"))
def test_the_bibliography_starts_at_the_match_of_the_plain_pattern(text: str) -> None:
    assert changed("remove_bibliography_mapper", text) == PLAIN_END.sub("", text)


@given(made_of("ab", ". ", "!", "\n", "cd", "？", "”", " "))  # noqa: RUF001
def test_no_sentence_is_repeated_after_one_pass_and_no_line_is_lost(text: str) -> None:
    once = changed("remove_repeat_sentences_mapper", text)
    assert once.count("\n") == text.count("\n")
    assert changed("remove_repeat_sentences_mapper", text, min_repeat_sentence_length=10**9) == text


@given(made_of("a", "bcd", " ", "  ", "\t", "\n", "(", "«", "😀", "efghi"), st.integers(0, 3), st.integers(3, 6))
def test_remaining_words_fit_and_a_second_pass_changes_nothing(text: str, least: int, most: int) -> None:
    once = changed("remove_long_words_mapper", text, min_len=least, max_len=most)
    assert changed("remove_long_words_mapper", once, min_len=least, max_len=most) == once
    kept = iter(text.split())
    assert all(word in kept for word in once.split())
    assert all(len(word.strip("(«😀")) <= most for word in once.split())
