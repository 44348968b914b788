"""Text mappers: the results of Data-Juicer on all golden rows, and unusual texts."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dovetail.recipes.operators.base import BadField
from recipes.golden_aids import cases, errors, rows
from recipes.mapper_aids import MAPPERS, changed, create_mapper, texts_of
from waiting import LONG

MEGABYTE = 1_000_000
MANY = MEGABYTE if LONG else MEGABYTE // 4
"""Characters of texts that would take minutes in quadratic time."""
TESTS = Path(__file__).parents[2]
ADDRESSES = "not ips: {} 999.999.999.999 1.2.3 01.02.03.04 {}.5"
RIGHT = {
    ("clean_ip_mapper__0", 329): ADDRESSES.format("256.1.1.1", ""),
    ("clean_ip_mapper__1", 329): ADDRESSES.format("256.1.1.1", "<IP>"),
    ("punctuation_normalization_mapper__0", 343): (
        '这是１２３全角数字,ＡＢＣ全角字母;"书名"[注](括号)"引用"~波浪...省略 - 破折'
    ),
    ("punctuation_normalization_mapper__0", 358): "ｆｕｌｌｗｉｄｔｈ\u3000ＴＥＸＴ\u3000１２３!?",  # noqa: RUF001
    ("punctuation_normalization_mapper__0", 366): ',.,"""""１""""\'::?!();- - . ~\'...-<>[]%-',  # noqa: RUF001
}
"""Correct results where those of Data-Juicer are wrong."""


def without_comments(text: str, *, eats: bool) -> str:
    """Remove inline comments, then comment lines. `eats`: also remove the character before an inline comment, as
    Data-Juicer does; a % at the start or a line end before it are part of the comment in both cases."""

    def before(found: re.Match[str]) -> str:
        character = found[0][0]
        return "" if eats or character == "\n" or (character == "%" and found.start() == 0) else character

    return re.sub(r"^%.*\n?", "", re.sub(r"[^\\]%.+$", before, text, flags=re.MULTILINE), flags=re.MULTILINE)


@pytest.mark.parametrize("case", cases(kind="mapper"), ids=lambda case: case["name"])
def test_all_golden_rows_have_the_texts_of_data_juicer(case: dict[str, Any]) -> None:
    mapper = create_mapper(case["op"], **case["params"])
    different = []
    for row, golden in zip(rows(), case["rows"], strict=True):
        text = row["text"]
        theirs = [text] if golden is None else golden if isinstance(golden, list) else [golden]
        expected = [RIGHT[case["name"], row["id"]]] if (case["name"], row["id"]) in RIGHT else theirs
        if case["name"] == "remove_comments_mapper__0":
            assert theirs == [without_comments(text, eats=True)]
            expected = [without_comments(text, eats=False)]
        assert texts_of(mapper, **row) == expected, row["id"]
        if expected != theirs:
            different.append(row["id"])
    named = [number for name, number in RIGHT if name == case["name"]]
    assert len(different) == (23 if case["name"] == "remove_comments_mapper__0" else len(named))


@pytest.mark.parametrize(
    ("name", "text", "right", "theirs"),
    [
        ("clean_ip_mapper", "at 256.1.1.1 now", "at 256.1.1.1 now", "at 2 now"),
        ("clean_ip_mapper", "at 10.0.0.300 now", "at 10.0.0.300 now", "at 0 now"),
        ("punctuation_normalization_mapper", "１！", "１!", '"!'),  # noqa: RUF001
        ("remove_comments_mapper", "50% of", "50", "5"),
        ("remove_comments_mapper", "a\\%% b", "a\\%", "a\\"),
    ],
)
def test_errors_of_data_juicer_are_not_repeated(name: str, text: str, right: str, theirs: str) -> None:
    assert changed(name, text) == right != theirs


@pytest.mark.parametrize(
    "error", [error for error in errors() if error["op"] in MAPPERS], ids=lambda error: error["op"]
)
def test_configurations_that_data_juicer_refuses_are_refused_before_the_first_row(error: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|lists of one length"):
        create_mapper(error["op"], **error["params"])


@pytest.mark.parametrize("name", MAPPERS)
def test_an_empty_text_remains_empty(name: str) -> None:
    assert texts_of(create_mapper(name), "") == ([] if name == "text_chunk_mapper" else [""])


@pytest.mark.parametrize("name", MAPPERS)
@pytest.mark.parametrize("value", [None, 7, b"bytes", ["list"]], ids=str)
def test_a_value_that_is_not_a_string_is_reported_with_its_type(name: str, value: object) -> None:
    with pytest.raises(BadField, match=f"'text' is {type(value).__name__}, not a string"):
        create_mapper(name)({"text": value})


@pytest.mark.parametrize("name", MAPPERS)
def test_a_missing_field_is_reported_with_the_existing_ones(name: str) -> None:
    with pytest.raises(BadField, match="no field 'text'; fields of the row: 'content'"):
        create_mapper(name)({"content": "x"})


@pytest.mark.parametrize("name", MAPPERS)
def test_the_text_may_be_in_another_field(name: str) -> None:
    mapper = create_mapper(name)
    mapper.text_key = "content"
    assert mapper.columns() == ("content",)
    given = mapper({"content": "Some text.", "text": 3})
    [row] = [given] if isinstance(given, dict) else list(given)
    assert row == {"content": "" if name == "remove_header_mapper" else "Some text.", "text": 3}


STRANGE = {
    "emoji": "👨\u200d👩\u200d👧 I ❤️ 🍕 🇫🇷",
    "right to left": "\u202bمرحبا بالعالم، שלום\u202c",  # noqa: RUF001
    "NUL": "a\x00b\x00",
    "lone surrogates": "a\ud800b \udfff",
    "controls": "".join(map(chr, range(32))) + "\x7f\x85",
}


@pytest.mark.parametrize("name", MAPPERS)
@pytest.mark.parametrize("kind", STRANGE)
def test_unusual_texts_are_processed(name: str, kind: str) -> None:
    """With letters around them that must be there afterwards."""
    for text in texts_of(create_mapper(name), f"before {STRANGE[kind]} after"):
        assert isinstance(text, str)
        assert name == "remove_header_mapper" or ("before" in text and "after" in text)


UNTOUCHED_SURROGATES = sorted({*MAPPERS} - {"clean_html_mapper", "fix_unicode_mapper", "remove_header_mapper"})


@pytest.mark.parametrize("name", UNTOUCHED_SURROGATES)
def test_lone_surrogates_are_kept(name: str) -> None:
    assert texts_of(create_mapper(name), "a\ud800b \udfff") == ["a\ud800b \udfff"]


NASTY = {
    "spaces": " ",
    "one letter": "a",
    "links": "http://",
    "less": "<",
    "percent": "%",
    "addresses": "a@",
    "digits and dots": "1.",
    "numbers": "192.168.",
    "colons": "ab:",
    "hyphens": "a-",
    "brackets": "a:b(",
    "sentences": "ab. ",
    "quotes": ".”",
    "lines": "a b\n",
    "line ends": "\n",
    "bars": "|",
    "rows of bars": "| a | b |\n",
    "comments": "/*",
    "stars": "/**",
    "hashes": "#\n",
    "definitions": "\\def\\a{",
    "commands": "\\newcommand{\\a}{",
    "sections": "\\section[",
    "paragraphs": "\\paragraph{",
    "bibliographies": "\\bibliography{",
    "escaped": "\\%",
    "ideographs": "好",
    "entities": "&lt;",
    "emoji": "😀",
}


LONGEST = list(NASTY)[:7]


@pytest.mark.parametrize("name", MAPPERS)
def test_long_texts_of_any_kind_take_seconds(name: str) -> None:
    """Alone, and behind and before something that makes quick ways out impossible."""
    mapper = create_mapper(name)
    for kind, piece in NASTY.items():
        many, fewer = (piece * (size // len(piece)) for size in (MANY if kind in LONGEST else MANY // 5, MANY // 10))
        for text in (many, f"x: www.{fewer}", f"{fewer}@ :x/ % \n a.b\n1.1.1 "):
            start = time.process_time()
            texts_of(mapper, text)
            assert time.process_time() - start < 5, kind


@pytest.mark.parametrize("max_len", [None, 100])
def test_a_megabyte_is_split_into_chunks_in_seconds(max_len: int | None) -> None:
    mapper = create_mapper("text_chunk_mapper", max_len=max_len, split_pattern=" ")
    start = time.process_time()
    assert len(texts_of(mapper, "abcd " * (MEGABYTE // 5))) == (200_000 if max_len is None else 10_000)
    assert time.process_time() - start < 5


def test_a_link_with_many_full_stops_takes_linear_time() -> None:
    """With Python's `re`, Data-Juicer's pattern doubles its time with each full stop here."""
    assert changed("clean_links_mapper", "www" + "." * 5000 + " end") == "www" + "." * 5000 + " end"


def test_html_with_too_many_open_elements_is_refused() -> None:
    with pytest.raises(BadField, match="200,000 elements of HTML are never closed"):
        create_mapper("clean_html_mapper")({"text": "<div>" * 200_000})
    closed = "<div>x</div>" * 50_000
    assert changed("clean_html_mapper", closed) == "x" * 50_000
    assert changed("clean_html_mapper", "a<br>" * 50_000) == "a" * 50_000


def test_macros_that_expand_exponentially_are_refused() -> None:
    doubling = "".join(f"\\def\\m{number}{{\\m{number + 1} \\m{number + 1} }}\n" for number in range(40))
    with pytest.raises(BadField, match="exceed 10,000,000 characters"):
        create_mapper("expand_macro_mapper")({"text": f"{doubling}\\m0 "})
    many = "".join(f"\\def\\m{number}{{}}\n" for number in range(40_000))
    with pytest.raises(BadField, match="40,000 macros in a text of"):
        create_mapper("expand_macro_mapper")({"text": many})


@pytest.mark.parametrize("case", cases(kind="mapper"), ids=lambda case: case["name"])
def test_a_mapper_can_be_pickled_before_and_after_its_first_row(case: dict[str, Any]) -> None:
    mapper = create_mapper(case["op"], **case["params"])
    text = rows()[10]["text"]
    for _ in range(2):
        travelled = pickle.loads(pickle.dumps(mapper))
        assert texts_of(travelled, text) == texts_of(mapper, text)


@pytest.mark.parametrize(("name", "module"), [("clean_html_mapper", "selectolax"), ("fix_unicode_mapper", "ftfy")])
def test_packages_of_an_extra_are_imported_with_the_first_row(name: str, module: str) -> None:
    assert (create_mapper(name).extra, create_mapper(name).needs) == ("recipes", (module,))
    code = (
        "import sys; from recipes.mapper_aids import create_mapper, texts_of; "
        f"mapper = create_mapper({name!r}); print({module!r} in sys.modules); "
        f"texts_of(mapper, 'caf\xe9 <b>'); print({module!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True, cwd=TESTS)
    assert done.stdout.split() == ["False", "True"]
