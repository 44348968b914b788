from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dovetail
from dovetail.documents.document import Document
from dovetail.documents.parser import DEPTH_LIMIT, SIZE_LIMIT_BYTES, parse_document, read_document
from dovetail.documents.validation import validate_document
from dovetail.errors import ConfigError, DovetailError, Problem


@dataclass(frozen=True)
class Leaf:
    size: int
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Branch:
    name: str
    leaves: list[Leaf] = field(default_factory=list)
    best: Leaf | None = None
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tree:
    branches: list[Branch]
    height: float = 1


def only_problem(text: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f.yaml")
    (problem,) = caught.value.problems
    assert problem.fix_texts
    return problem


def mismatches(text: str, schema: type[Any] = Tree) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        validate_document(parse_document(text, "f.yaml"), schema)
    found = {problem.place: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems)
    return found


def refused(path: Path) -> Problem:
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    (problem,) = caught.value.problems
    assert problem.fix_texts
    assert problem.place.startswith(str(path))
    return problem


# ---- where something was written

TEXT = """# a comment
branches:
  - name: oak
    leaves:
      - size: 1
        tags: [a, "b b", c]
      - {size: 2, tags: [d]}
  - {name: elm, best: {size: 3}}
height: 2
"""


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ((), "2:1"),
        (("branches",), "2:1"),
        (("branches", 0), "3:5"),
        (("branches", 0, "name"), "3:5"),
        (("branches", 0, "leaves", 0, "tags", 1), "6:19"),
        (("branches", 0, "leaves", 1, "tags", 0), "7:26"),
        (("branches", 1, "best"), "8:17"),
        (("branches", 1, "best", "size"), "8:24"),
        (("height",), "9:1"),
        # what is not there is near what is
        (("branches", 1, "best", "nothing"), "8:17"),
        (("branches", 7), "2:1"),
        (("branches", -1), "2:1"),
        (("height", "nothing"), "9:1"),
        (("branches", 0, 0), "3:5"),
        ((0,), "2:1"),
        (("nothing", "at", "all"), "2:1"),
        (("branches", "name"), "2:1"),
    ],
)
def test_every_part_knows_its_line_and_column(path: tuple[str | int, ...], place: str) -> None:
    assert parse_document(TEXT, "f.yaml").place(path) == f"f.yaml:{place}"


def test_data_without_a_file_is_placed_by_its_path() -> None:
    document = Document("cluster", {"nodes": [1]})
    assert document.place(("nodes", 2, "memory")) == "cluster.nodes[2].memory"
    assert document.place() == "cluster"


def test_columns_count_letters_not_bytes() -> None:
    text = "{é: 1, 日本語: 2, size: 3}"
    assert parse_document(text, "f.yaml").place(("size",)) == f"f.yaml:1:{text.index('size') + 1}"


def test_windows_lines_are_lines() -> None:
    assert parse_document("a: 1\r\nb: 2\r\n", "f.yaml").place(("b",)) == "f.yaml:2:1"


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.integers(0, 3), st.integers(0, 2)),
        min_size=1,
        max_size=8,
        unique_by=lambda row: row[0],
    )
)
def test_the_place_of_a_key_is_where_the_key_stands(rows: list[tuple[str, int, int]]) -> None:
    lines: list[str] = []
    where: dict[str, int] = {}
    for key, blank, comment in rows:
        lines += [""] * blank + ["# nothing"] * comment
        where[key] = len(lines) + 1
        lines.append(f"'{key}': [1, 2]")
    document = parse_document("\n".join(lines), "f.yaml")
    assert {key: document.place((key,)) for key in where} == {key: f"f.yaml:{line}:1" for key, line in where.items()}
    assert document.data == {key: [1, 2] for key in where}


# ---- files that cannot be read


@pytest.mark.parametrize("text", ["", "\n \n", "# only a comment\n", "\ufeff"])
def test_an_empty_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8")
    assert refused(path).message == "is empty"


def test_a_missing_file_is_an_error_that_names_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("a: 1")
    assert refused(tmp_path / "clutser.yaml").message == "no such file (did you mean 'cluster.yaml'?)"
    assert refused(tmp_path / "Cluster.YAML").message == "no such file (did you mean 'cluster.yaml'?)"
    assert refused(tmp_path / "zzzzzzzz").message == "no such file"
    assert refused(tmp_path / "nowhere" / "cluster.yaml").message == "no such file"


def test_a_file_that_is_in_a_folder_beside_it_is_the_one_that_was_meant(tmp_path: Path) -> None:
    """`dovetail init actors` writes actors/actors.yaml."""
    (tmp_path / "actors").mkdir()
    assert refused(tmp_path / "actors.yaml").message == "no such file"
    (tmp_path / "actors" / "actors.yaml").write_text("a: 1")
    problem = refused(tmp_path / "actors.yaml")
    assert problem.message == "no such file (did you mean 'actors/actors.yaml'?)"
    assert problem.fix_texts == (str(tmp_path / "actors" / "actors.yaml"),)


def test_a_python_program_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text('"""Launches."""\nimport dovetail\n')
    problem = refused(tmp_path / "main.py")
    assert problem.message == "is a Python program, not a YAML file"
    assert problem.fix_texts == (f"python {tmp_path / 'main.py'}",)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert refused(tmp_path).message == "is a folder, not a file"


@pytest.mark.parametrize("name", ["file/inside", "a\x00b", "x" * 300])
def test_a_path_that_cannot_be_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("a: 1")
    assert refused(tmp_path / name).message.startswith("cannot be read: ")


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"a: 1\nb: caf\xe9\n", 2), (b"\xff\xfea\x00:\x00", 1), (b"\n\n\n\xc3", 4), (b"a: \xed\xa0\x80", 1)],
)
def test_bytes_that_are_no_utf_8_are_an_error_with_their_line(tmp_path: Path, content: bytes, line: int) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    problem = refused(path)
    assert problem.place == f"{path}:{line}"
    assert "is not UTF-8" in problem.message
    assert "iconv" in problem.fix_texts[0]


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    document = read_document(path)
    assert document.data == {"a": 1}
    assert document.place(("a",)) == f"{path}:1:1"


def test_a_file_that_is_no_configuration_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    with path.open("wb") as file:
        file.truncate(SIZE_LIMIT_BYTES + 1)
    assert "larger than 16 MB" in refused(path).message


# ---- text that is no document


@pytest.mark.parametrize(
    ("text", "place", "expected_message"),
    [
        ("a: 1\n\tb: 2\n", "2:1", r"'\t'"),
        ("a:\n\t- b\n", "2:1", r"'\t'"),
        ("a: [1, 2\nb: 3\n", "1:4", "the bracket [ is not closed"),
        ("a: 'b\n", "1:4", "the quote ' is not closed"),
        ("a: 1\n b: 2\n", "2:3", "mapping values are not allowed"),
        ("- a\nb: 1\n", "2:1", "expected"),
        ("a: *unknown\n", "1:4", "undefined alias"),
        ("a: 1\n---\nb: 2\n", "2:1", "another document"),
        ("--- a\n--- b\n", "2:1", "another document"),
        ("a: @x\n", "1:4", "'@'"),
    ],
)
def test_what_is_no_yaml_is_an_error_with_line_and_column(text: str, place: str, expected_message: str) -> None:
    problem = only_problem(text)
    assert (problem.code, problem.place) == ("DT010", f"f.yaml:{place}")
    assert expected_message in problem.message


@pytest.mark.parametrize("letter", ["\x00", "\x07", "\x1b", "\x7f", "\ufffe"])
def test_a_letter_that_yaml_forbids_is_an_error_that_names_it_and_its_line(letter: str) -> None:
    problem = only_problem(f"a: 1\nb: x{letter}y\n")
    assert problem.code == "DT010"
    assert any(text in problem.message for text in (f"{ord(letter):04x}", repr(letter), f"character {ord(letter)} "))
    assert problem.place.startswith("f.yaml:2")


@pytest.mark.parametrize(
    "value",
    [
        "!!bool maybe",
        "!!int ''",
        "!!int _",
        "!!int x",
        "!!float ''",
        "!!float x",
        "!!binary aGE=",
        "!!set {b}",
        "!!omap [b: 1]",
        "!!omap 1",
        "!!python/object/apply:os.system [ls]",
        "!!python/name:os.system",
        "!unknown x",
        "0b_",
        "0x_",
        "9" * 5000,
        "[1, !!int x]",
    ],
)
def test_a_value_that_is_no_plain_data_is_an_error_with_its_line(value: str) -> None:
    problem = only_problem(f"# first\n\na: {value}\n")
    assert problem.place.startswith("f.yaml:3:")
    assert len(problem.render()) < 600


@pytest.mark.parametrize("text", ['a: "\\U99999999"', 'a: "\\U00110000"', f"%YAML 1.{'9' * 5000}\n---\na: 1"])
def test_a_number_that_no_letter_or_version_has_is_an_error(text: str) -> None:
    assert only_problem(text).place.startswith("f.yaml")


def test_all_values_that_are_no_plain_data_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document("a: !x 1\nb: [!!int x, 2, !!bool y]\nc: {d: !!set {e}}\n", "f.yaml")
    lines = [problem.place.split(":")[1] for problem in caught.value.problems]
    assert lines == ["1", "2", "2", "3"]


def test_dates_are_texts_and_large_numbers_are_numbers() -> None:
    text = "a: 2024-02-29\nb: " + "9" * 400 + "\nc: 2024-13-45\nd: 2001-12-14 21:59:43.1-25:00\n"
    assert parse_document(text, "f.yaml").data == {
        "a": "2024-02-29",
        "b": 10**400 - 1,
        "c": "2024-13-45",
        "d": "2001-12-14 21:59:43.1-25:00",
    }


def test_keys_are_the_texts_that_were_written() -> None:
    data = parse_document("yes: 1\ntrue: 2\n16: 3\n0x10: 4\n~: 5\n2024-01-01: 6\n=: 7\n'<<': 8\n", "f.yaml").data
    assert list(data.items()) == [
        *[("yes", 1), ("true", 2), ("16", 3), ("0x10", 4)],
        *[("~", 5), ("2024-01-01", 6), ("=", 7), ("<<", 8)],
    ]


def test_scalars_are_what_yaml_says() -> None:
    text = "[1, -2, 0x10, 0o7, 1_000, 1.5, .inf, true, no, null, ~, x, '1', \"\\u00e9\", , =]"
    assert parse_document(text.replace(", ,", ","), "f.yaml").data == [
        *[1, -2, 16, "0o7", 1000, 1.5, float("inf"), True, False, None, None, "x", "1", "\u00e9", "="]
    ]


# ---- documents that are not what they look like


@pytest.mark.parametrize(
    ("text", "place", "first"),
    [
        ("a: 1\nb: 2\na: 3\n", "3:1", 1),
        ("a: {x: 1, y: 2, x: 3}\n", "1:17", 1),
        ("- {x: 1,\n   x: 1}\n", "2:4", 1),
        ('{"a": 1, "a": 1}', "1:10", 1),
        ("a: 1\n'a': 2\n", "2:1", 1),
        ("b: &b {x: 1}\nc: {<<: *b, y: 1, y: 2}\n", "2:19", 2),
    ],
)
def test_a_key_that_is_given_twice_is_an_error_that_shows_both(text: str, place: str, first: int) -> None:
    problem = only_problem(text)
    assert (problem.code, problem.place) == ("DT014", f"f.yaml:{place}")
    assert "given twice" in problem.message
    assert f"line {first}" in problem.message


def test_all_keys_that_are_given_twice_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document("a: {x: 1, x: 2}\nb: [{y: 1, y: 2}, {? [z] : 1}]\na: 1\n", "f.yaml")
    places = sorted(problem.place for problem in caught.value.problems)
    assert places == ["f.yaml:1:11", "f.yaml:2:12", "f.yaml:2:22", "f.yaml:3:1"]


def test_the_same_key_in_different_places_is_fine() -> None:
    assert parse_document("a: {a: {a: 1}}\nb: [{a: 1}, {a: 2}]\n", "f.yaml").data["b"] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("mine", "data"),
    [
        ("{<<: *b, y: 3}", {"x": 1, "y": 3}),
        ("{y: 3, <<: *b}", {"x": 1, "y": 3}),
        ("{<<: [*b, *c]}", {"x": 1, "y": 2, "z": 5}),
        ("{<<: [*c, *b]}", {"x": 4, "y": 2, "z": 5}),
        ("{<<: [*c, *b], x: 0}", {"x": 0, "y": 2, "z": 5}),
        ("{<<: []}", {}),
    ],
)
def test_a_merge_fills_in_and_the_earlier_wins(mine: str, data: dict[str, int]) -> None:
    text = f"b: &b {{x: 1, y: 2}}\nc: &c {{x: 4, z: 5}}\nmine: {mine}\n"
    assert parse_document(text, "f.yaml").data["mine"] == data


@pytest.mark.parametrize("value", ["1", "x", "[1]", "[[]]", "null"])
def test_only_mappings_can_be_merged(value: str) -> None:
    problem = only_problem(f"a: 1\n<<: {value}\n")
    assert problem.place.startswith("f.yaml:2:")
    assert "merge" in problem.message


@pytest.mark.parametrize("text", ["? [a, b]\n: 1\n", "{[a]: 1}\n", "? {a: 1}\n: 2\n"])
def test_a_key_that_is_no_word_is_an_error(text: str) -> None:
    problem = only_problem(text)
    assert problem.code == "DT014"
    assert "key" in problem.message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: &a [*a]\n", "1:"),
        ("a: &a\n  b: *a\n", ""),
        ("&a {x: [1, *a]}\n", "1:"),
        ("a: &a {<<: *a}\n", "1:"),
        ("a: &a {x: &b {y: *a, z: *b}}\n", "1:"),
    ],
)
def test_an_alias_that_contains_itself_is_an_error(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f.yaml")
    assert set(caught.value.codes) == {"DT014"}
    assert caught.value.problems[0].place.startswith(f"f.yaml:{place}")
    assert "contains itself" in caught.value.problems[0].message


def test_an_alias_that_is_used_twice_is_fine() -> None:
    assert parse_document("a: &a [1]\nb: [*a, *a]\n", "f.yaml").data == {"a": [1], "b": [[1], [1]]}


@pytest.mark.parametrize("depth", [DEPTH_LIMIT + 2, 150, 250])
@pytest.mark.parametrize("block", [False, True])
def test_deep_nesting_is_an_error_with_its_place(depth: int, block: bool) -> None:
    text = "- " * depth + "x\n" if block else "[" * depth + "]" * depth
    problem = only_problem(text)
    assert problem.code == "DT014"
    assert problem.place.startswith("f.yaml:1:")


@pytest.mark.parametrize("name", ["f.yaml", "f.json"])
def test_nesting_up_to_the_limit_is_fine(name: str) -> None:
    assert parse_document("[" * DEPTH_LIMIT + "]" * DEPTH_LIMIT, name).data


@pytest.mark.parametrize("depth", [DEPTH_LIMIT + 2, 150, 990])
def test_json_has_the_depth_limit_of_yaml(depth: int) -> None:
    for text in ("[" * depth + "]" * depth, '{"a": ' * depth + "1" + "}" * depth):
        with pytest.raises(ConfigError, match=f"more than {DEPTH_LIMIT} levels deep"):
            parse_document(text, "f.json")


@pytest.mark.parametrize(
    ("name", "text", "place", "expected_message"),
    [
        ("f.yaml", 'name: "x\nsource: y\nsink: z\n', "1:7", 'the quote " is not closed'),
        ("f.yaml", "a: 1\nname: 'x\nsource: 'y'\nsink: z\n", "2:7", "the quote ' is not closed"),
        ("f.yaml", "stages:\n  - {name: a, run: 'm:f'\n  - {name: b}\n", "2:5", "the bracket { is not closed"),
        ("f.yaml", "stages:\n  - name: a\n    after: [x, y\nsink: z\n", "3:12", "the bracket [ is not closed"),
        ("f.json", '{"a": [1, 2\n', "1:7", "the bracket [ is not closed"),
        ("f.json", '{"a": {"b]": 2},\n "c": {"d": 1\n', "2:7", "the bracket { is not closed"),
    ],
)
def test_an_unclosed_quote_or_bracket_is_reported_where_it_begins(
    name: str, text: str, place: str, expected_message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, name)
    (problem,) = caught.value.problems
    assert expected_message in problem.message
    assert problem.place == f"{name}:{place}"
    assert problem.fix_texts


@pytest.mark.parametrize("text", ["[" * 1100, "{a: " * 1100, "- " * 1100 + "x", "[" * 1100 + "]" * 1100])
def test_nesting_without_end_is_an_error(text: str) -> None:
    assert only_problem(text).place.startswith("f.yaml")


# ---- documents that would never be done with

LAUGHS = "a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12))

BOUNDED = """
import resource, sys
from pathlib import Path
from dovetail.resources.cluster import Cluster
from dovetail.errors import DovetailError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
try:
    Cluster.load(sys.argv[1])
except DovetailError as error:
    print(len(str(error)), error)
"""


def load_within_bounds(path: Path | str) -> str:
    """Error of loading this as a cluster, in a process limited to 1 GB and 20 CPU-seconds."""
    env = {**os.environ, "PYTHONPATH": str(Path(dovetail.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(path)], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-300:]}"
    return done.stdout


@pytest.mark.parametrize(
    "bomb", [pytest.param(LAUGHS, marks=pytest.mark.long, id="laughs"), pytest.param(MERGES, id="merges")]
)
def test_a_billion_laughs_are_an_error_and_not_a_billion_laughs(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(bomb + "nodes: [{cpus: 4, labels: *a11}]\n")
    message = load_within_bounds(path)
    assert "error[DT0" in message
    assert int(message.split()[0]) < 10_000, "the laughs are in the message"


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_file_without_end_is_an_error() -> None:
    assert "error[DT010] /dev/zero" in load_within_bounds("/dev/zero")


# ---- JSON

json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@given(json_values, st.sampled_from([None, 0, 2, "\t"]), st.booleans())
@settings(max_examples=3 * settings().max_examples)
def test_json_is_read_as_json(value: Any, indent: int | str | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert parse_document(text, "f.json").data == value


@given(json_values, st.sampled_from([None, 2, "\t"]))
@settings(max_examples=3 * settings().max_examples)
def test_a_wrong_shape_in_json_is_a_deliberate_error_with_a_place(value: Any, indent: int | str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_document(parse_document(json.dumps({"branch": value}, indent=indent), "f.json"), Tree)
    assert all(problem.place.startswith("f.json") for problem in caught.value.problems)


@pytest.mark.parametrize("number", ["1e3", "1E3", "1e+16", "1e-7", "-2.5e10", "0.5", "-0.0"])
def test_the_numbers_of_json_are_numbers_in_json(number: str) -> None:
    assert parse_document(f'{{"a": {number}}}', "f.json").data == {"a": float(number)}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "1:2"),
        ('{"a": 1,}', "1:9"),
        ('{\n"a": x}', "2:6"),
        ("a: 1", "1:1"),
        ('{"a": 1} x', "1:10"),
        ('["\t"]', "1:3"),
    ],
)
def test_what_is_no_json_is_an_error_with_line_and_column(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f.json")
    assert caught.value.codes == ("DT010",)
    assert caught.value.problems[0].place.startswith("f.json:" + place.split(":")[0])


@pytest.mark.parametrize("text", ["[" * 50_000, '{"a":' * 50_000, "[" * 50_000 + "]" * 50_000, "9" * 5000])
def test_json_without_end_or_measure_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f.json")
    assert str(caught.value).startswith("error[DT010] f.json")
    assert len(str(caught.value)) < 600


def test_a_key_that_is_given_twice_in_json_is_an_error_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document('{"a": 1,\n "b": [{"c": 1, "c": 2}],\n "a": 3}', "f.json")
    found = {problem.message.split()[1]: problem.place for problem in caught.value.problems}
    assert {key: place.split(":")[1:2] for key, place in found.items()} == {"'a'": ["3"], "'c'": ["2"]}


# ---- the shape that is wanted


def test_a_document_of_the_right_shape_is_that_shape() -> None:
    tree = validate_document(parse_document(TEXT, "f.yaml"), Tree)
    oak, elm = tree.branches
    assert tree.height == 2
    assert oak == Branch("oak", [Leaf(1, ["a", "b b", "c"]), Leaf(2, ["d"])])
    assert elm == Branch("elm", best=Leaf(3))


def test_every_mismatch_is_reported_at_once_with_its_place() -> None:
    found = mismatches("""branches:
  - name: oak
    leafs: []
    leaves:
      - {size: 1, tgas: [a]}
      - {tags: [1, b, null]}
      - {size: "1"}
  - {leaves: 4, best: {size: 1.5, siez: 2}}
  - [x]
height: yes
hieght: 3
""")
    assert {place.removeprefix("f.yaml:"): problem.code for place, problem in found.items()} == {
        "3:5": "DT011",
        "5:19": "DT011",
        "6:9": "DT012",
        "6:17": "DT013",
        "6:23": "DT013",
        "7:10": "DT013",
        "8:5": "DT012",
        "8:6": "DT013",
        "8:24": "DT013",
        "8:35": "DT011",
        "9:5": "DT013",
        "10:1": "DT013",
        "11:1": "DT011",
    }
    assert all(problem.fix_texts for problem in found.values())


@pytest.mark.parametrize(
    ("text", "place", "meant", "keys"),
    [
        ("{branches: [], hieght: 1}", "1:16", "height", "branches, height"),
        ("branches: [{name: a, laeves: []}]", "1:22", "leaves", "best, leaves, name, weights"),
        ("branches: [{name: a, leaves: [{size: 1, tag: x}]}]", "1:41", "tags", "size, tags"),
        ("branches: [{name: a, best: {size: 1, tgas: x}}]", "1:38", "tags", "size, tags"),
    ],
)
def test_an_unknown_key_however_deep_gets_did_you_mean_and_the_keys_there(
    text: str, place: str, meant: str, keys: str
) -> None:
    problem = mismatches(text)[f"f.yaml:{place}"]
    assert problem.code == "DT011"
    assert problem.message.endswith(f"(did you mean '{meant}'?)")
    assert problem.evidence == (f"keys here: {keys}",)


def test_an_unknown_key_like_no_other_gets_the_keys_only() -> None:
    problem = mismatches("{branches: [], zzzz: 1}")["f.yaml:1:16"]
    assert problem.message == "unknown key 'zzzz'"
    assert problem.evidence


@pytest.mark.parametrize("value", ["'x'", "true", "null", "[1]", "{a: 1}", "1.5", "2024-01-01", "1e3"])
def test_a_value_of_another_type_is_shown_with_its_path(value: str) -> None:
    problem = mismatches(f"branches: [{{name: a, leaves: [{{size: {value}}}]}}]")["f.yaml:1:32"]
    assert problem.code == "DT013"
    assert problem.message.startswith("branches[0].leaves[0].size should be a whole number, ")


def test_a_long_value_is_shortened_in_the_message() -> None:
    (problem,) = mismatches(f"{{branches: {'x' * 1000}}}").values()
    assert len(problem.message) < 150


@pytest.mark.parametrize("text", ["4", "[]", "x", "null", "[{branches: []}]", "true"])
def test_a_document_that_is_no_mapping_is_an_error(text: str) -> None:
    (problem,) = mismatches(text).values()
    assert problem.place == "f.yaml:1:1"


@pytest.mark.parametrize(
    "data",
    [{(1, 2): 3}, {"branches": {1, 2}}, {"branches": 10**5000}, {"branches": ["\ud800"]}, {"branches": b"x"}, object()],
    ids=["tuple key", "set", "5000 digits", "surrogate", "bytes", "object"],
)
def test_data_that_is_not_plain_is_an_error(data: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_document(Document("tree", data), Tree)
    assert caught.value.problems[0].place.startswith("tree")
    assert caught.value.problems[0].fix_texts


def test_data_that_contains_itself_is_an_error() -> None:
    data: dict[str, Any] = {"branches": []}
    data["branches"].append(data)
    with pytest.raises(ConfigError):
        validate_document(Document("tree", data), Tree)


# ---- anything at all

TOKENS = [
    *"[]{}:,-?&*!|>'\"%@`#~=<. \n\t0x_",
    *[
        "\r\n",
        "\x00",
        "\x07",
        "\x85",
        "\ufeff",
        "\ud83d",
        "\u2028",
        "é",
        ": ",
        "- ",
        "? ",
        "<<: ",
        "&a ",
        "*a",
        "---\n",
    ],
    *["...\n", "!!int ", "!!bool ", "!!float ", "!!timestamp ", "!!binary ", "!!set ", "!!omap ", "!!null ", "!x "],
    *["2024-01-01", "2024-13-45", "1e3", ".inf", ".nan", "0b1", "1:60", "%YAML 9.9\n", "%TAG ! x\n", "\\U99999999"],
]
edits = st.lists(
    st.tuples(st.integers(0, len(TEXT)), st.integers(0, 6), st.one_of(st.sampled_from(TOKENS), st.text(max_size=2))),
    min_size=1,
    max_size=6,
)


def read(text: str) -> Tree | DovetailError:
    """Any other exception is not meant to be."""
    try:
        return validate_document(parse_document(text, "f.yaml"), Tree)
    except DovetailError as error:
        return error


def check_reading(text: str) -> None:
    found = read(text)
    if isinstance(found, DovetailError):
        assert found.exit_code == 2
        assert all(problem.place.startswith("f.yaml") for problem in found.problems)
        assert all(problem.message and problem.fix_texts for problem in found.problems)
    else:
        assert isinstance(found, Tree)


@given(edits)
@settings(max_examples=15 * settings().max_examples)
def test_yaml_with_a_few_places_changed_is_a_document_or_a_deliberate_error(
    changes: list[tuple[int, int, str]],
) -> None:
    text = TEXT
    for at, gone, new in changes:
        text = text[:at] + new + text[at + gone :]
    check_reading(text)


@given(st.one_of(st.lists(st.sampled_from(TOKENS), max_size=15).map("".join), st.text(max_size=20)))
@example("!!bool maybe")
@example("!!int ''")
@example('"\\U99999999"')
@example("\x00")
@settings(max_examples=15 * settings().max_examples)
def test_any_text_is_a_document_or_a_deliberate_error(text: str) -> None:
    check_reading(text)
