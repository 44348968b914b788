"""Parameters of text mappers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dovetail.recipes.operators.support.regex import compile_pattern, expand_escapes
from recipes.mapper_aids import changed, create_mapper, texts_of

ADAPTER = "run this operator through Data-Juicer: adapter: data_juicer"


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "clean_email_mapper",
            {"pattern": "a(b"},
            "pattern 'a(b' is not a regular expression of Python's re: missing ), ",
        ),
        ("clean_ip_mapper", {"pattern": "a(b"}, "unterminated subpattern at position 1: '(b'"),
        (
            "clean_links_mapper",
            {"pattern": r"\p{Han}+"},
            "bad escape \\p at position 0: '\\\\p{Han}+'; if it is one",
        ),
        ("clean_links_mapper", {"pattern": r"\p{Han}+"}, ADAPTER),
        ("clean_links_mapper", {"pattern": 3}, "pattern must be a string, not 3"),
        ("clean_links_mapper", {"repl": r"\2"}, "repl '\\\\2' is not a valid replacement"),
        ("clean_links_mapper", {"repl": None}, "repl must be a string, not None"),
        ("clean_email_mapper", {"repl": r"\1"}, "invalid group reference 1"),
        ("clean_ip_mapper", {"repl": "\\"}, "bad escape (end of pattern)"),
        (
            "fix_unicode_mapper",
            {"normalization": "XYZ"},
            "normalization must be one of NFC, NFKC, NFD, NFKD, not 'XYZ'",
        ),
        ("fix_unicode_mapper", {"normalization": 5}, "normalization must be a string, not 5"),
        ("remove_comments_mapper", {"doc_type": "html"}, "doc_type must be 'tex', the only kind"),
        ("remove_comments_mapper", {"doc_type": ["tex", "md"]}, "not ['tex', 'md']"),
        ("remove_long_words_mapper", {"min_len": "3"}, "min_len must be a whole number, not '3'"),
        ("remove_long_words_mapper", {"min_len": 5, "max_len": 4}, "min_len 5 must not be greater than max_len 4"),
        ("remove_repeat_sentences_mapper", {"min_repeat_sentence_length": 2.5}, "must be a whole number, not 2.5"),
        ("remove_repeat_sentences_mapper", {"tokenizer": "lambda text: [text]"}, ADAPTER),
        ("remove_specific_chars_mapper", {"chars_to_remove": [1]}, "must be a string or a list of strings, not [1]"),
        ("remove_table_text_mapper", {"min_col": 1}, "min_col must be a whole number from 2 to 20, not 1"),
        ("remove_table_text_mapper", {"max_col": 21}, "max_col must be a whole number from 2 to 20, not 21"),
        ("remove_table_text_mapper", {"min_col": 5, "max_col": 4}, "min_col 5 must not be greater than max_col 4"),
        ("remove_words_with_incorrect_substrings_mapper", {"tokenization": True}, "needs a sentencepiece model"),
        ("remove_words_with_incorrect_substrings_mapper", {"tokenization": True}, ADAPTER),
        ("remove_words_with_incorrect_substrings_mapper", {"substrings": 3}, "a list of strings, not 3"),
        ("replace_content_mapper", {"pattern": ["a", "b"], "repl": ["x"]}, "there are 2 patterns and 1 replacements"),
        ("replace_content_mapper", {"pattern": "a", "repl": ["x", "y"]}, "there are 1 patterns and 2 replacements"),
        ("replace_content_mapper", {"pattern": ["a", "[b"]}, "pattern[1] '[b' is not a regular expression"),
        ("replace_content_mapper", {"pattern": ["a"], "repl": [r"\9"]}, "repl[0] '\\\\9' is not a valid replacement"),
        ("text_chunk_mapper", {"max_len": 0}, "max_len must be a whole number of at least 1, not 0"),
        ("text_chunk_mapper", {"max_len": True}, "max_len must be a whole number of at least 1, not True"),
        ("text_chunk_mapper", {"overlap_len": -1}, "overlap_len must be a whole number of at least 0, not -1"),
        ("text_chunk_mapper", {"max_len": 10, "overlap_len": 10}, "overlap_len 10 must be less than max_len 10"),
        ("text_chunk_mapper", {"max_len": None, "split_pattern": None}, "must not both be null"),
        (
            "text_chunk_mapper",
            {"split_pattern": "(["},
            "is not a regular expression: unterminated character set at position 1",
        ),
        ("text_chunk_mapper", {"tokenizer": "gpt2"}, ADAPTER),
    ],
)
def test_an_invalid_parameter_is_reported_when_the_mapper_is_created(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        create_mapper(name, **params)


@pytest.mark.parametrize(
    "name", ["clean_email_mapper", "clean_ip_mapper", "clean_links_mapper", "replace_content_mapper"]
)
@pytest.mark.parametrize("pattern", ["b.", "r'b.'", 'r"b."'])
def test_a_custom_pattern_replaces_the_default(name: str, pattern: str) -> None:
    text = "ab\n me@x.org 1.2.3.4 http://x.org"
    assert changed(name, text, pattern=pattern, repl=r"[\g<0>]") == "a[b\n] me@x.org 1.2.3.4 http://x.org"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("clean_links_mapper", "see http://x.org/a now", "http://x.org/a"),
        ("clean_email_mapper", "see me@x.org now", "me@x.org"),
        ("clean_ip_mapper", "see 10.0.0.1 now", "10.0.0.1"),
    ],
)
def test_a_replacement_can_contain_the_match(name: str, text: str, found: str) -> None:
    assert changed(name, text, repl=r"<\g<0>>\t") == text.replace(found, f"<{found}>\t")


def test_a_link_is_its_own_first_group_as_in_data_juicer() -> None:
    assert changed("clean_links_mapper", "é.b.com/xy, www.x.org", repl=r"[\1]") == "é[.b.com/xy], [www.x.org]"


def test_one_replacement_applies_to_all_patterns() -> None:
    assert changed("replace_content_mapper", "a1b2", pattern=["a", r"\d"], repl="-") == "--b-"
    assert changed("replace_content_mapper", "a1b2", pattern=["a", "-1"], repl=["-", "+"]) == "+b2"


def test_an_empty_list_of_characters_removes_nothing() -> None:
    assert changed("remove_specific_chars_mapper", "a|b", chars_to_remove=[]) == "a|b"
    assert changed("remove_specific_chars_mapper", "a|b", chars_to_remove="") == "a|b"


def test_an_empty_substring_is_in_every_word() -> None:
    assert changed("remove_words_with_incorrect_substrings_mapper", "a b", substrings=[""]) == ""


def test_chunks_have_copies_of_the_other_fields() -> None:
    mapper = create_mapper("text_chunk_mapper", max_len=2, split_pattern=None)
    given = mapper({"text": "aabb", "stats": {"list": [1]}, "id": 7})
    assert not isinstance(given, dict)
    one, other = given
    assert one == {"text": "aa", "stats": {"list": [1]}, "id": 7}
    assert other == {"text": "bb", "stats": {"list": [1]}, "id": 7}
    one["stats"]["list"].append(2)
    assert other["stats"] == {"list": [1]}


def test_an_empty_match_at_the_start_does_not_loop() -> None:
    assert texts_of(create_mapper("text_chunk_mapper", max_len=3, split_pattern="^"), "abcdefgh") == [
        "abc",
        "def",
        "gh",
    ]


def test_marks_are_part_of_words_and_separators_are_not_spaces() -> None:
    assert changed("replace_content_mapper", "हिन्दी, ที่!", pattern=r"[^\w\s]") == "हिन्दी ที่"
    assert changed("replace_content_mapper", "a \x1c b", pattern=r"\s+", repl="_") == "a_\x1c_b"
    assert changed("replace_content_mapper", "ที่ab ½ab", pattern=r"\bab", repl="_") == "ที่ab ½_"
    assert changed("clean_links_mapper", "ที่http://x.org/a") == "ที่http://x.org/a"


ASCII_PATTERNS = (
    r"\w+ | \W | \bab\b | \Ba | [\w-]+ | [^\W_] | [\s,] | [^\s] | [\S]b | []\w] | [^]\s] | \[\w\] | \\w | [\]\s] | "
    r"(?i)\bA | (?x)\w\s | a[\[]\w?"
)


@pytest.mark.parametrize("pattern", ASCII_PATTERNS.split(" | "))
def test_a_translated_pattern_matches_the_same_ascii_text(pattern: str) -> None:
    text = "ab, a-b [a] ]b \\w a_b\tA\n  [x] []\n" * 2
    assert re.findall(expand_escapes(pattern), text) == re.findall(pattern, text)
    assert [found[0] for found in compile_pattern("pattern", pattern).finditer(text)] == [
        found[0] for found in re.finditer(pattern, text, re.DOTALL)
    ]
