"""JSON lines, text and CSV give the rows that a naive reader gives, however they are cut."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.aids import check_seeks, opened, plain, rows_of, send
from dovetail.control.payload import BLANK_ROW, BadRow, SourceSinkError
from dovetail.data.readers import block_reader, row_parser, text_lines
from dovetail.data.sources import source
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

FAST = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.lists(st.integers(1, 5), max_size=20)
SEEKS = st.lists(st.tuples(st.integers(0, 60), st.lists(st.booleans(), max_size=12)), max_size=4)
LINE = st.one_of(
    st.sampled_from(
        [b"", b" ", b"\r", b"\t\r", b"{", b'{"a":1},{"b":2}', b"[1", b"2]", b"1,2", b"]", b"[", b"NaN", b"\xff"]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ).map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"")),
)
LINES = st.tuples(st.lists(LINE, max_size=30), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans())


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, so that rows cross the boundaries of blocks, pieces and stretches."""
    monkeypatch.setattr(block_reader, "BLOCK_BYTES", 37)
    monkeypatch.setattr(text_lines, "MAX_SPAN_BYTES", 90)
    monkeypatch.setattr(row_parser, "JSON_CHUNK_BYTES", 20)


def content(lines: tuple[list[bytes], bytes, bool, bool]) -> bytes:
    rows, end, last, mark = lines
    return (b"\xef\xbb\xbf" if mark else b"") + end.join(rows) + (end if last and rows else b"")


def naive_json(raw: bytes, path: str) -> list[Any]:
    found: list[Any] = []
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(io.BytesIO(raw), 1):
        if not line.strip():
            found.append("BLANK")
            continue
        try:
            found.append(json.loads(line.decode("utf-8")))
        except ValueError:
            found.append(("bad", f"{path}:{number}"))
    return found


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)  # NaN is not equal to itself


@FAST
@given(LINES, SIZES, SEEKS)
def test_jsonl_rows_equal_json_loads_of_every_line(tmp_path: Path, lines: Any, sizes: list[int], seeks: Any) -> None:
    with tempfile.NamedTemporaryFile(dir=tmp_path, suffix=".jsonl") as file:
        file.write(content(lines))
        file.flush()
        cursor = opened(file.name)
        found: list[Any] = []
        ahead = iter(sizes)
        while (split := cursor.take(next(ahead, 9))) is not None:
            found += map(plain, send(split)[0].read())
        cursor.close()
        assert same(found, naive_json(content(lines), file.name))
        if "nan" not in repr(found):
            check_seeks(file.name, sizes, seeks)


@FAST
@given(LINES, SIZES, SEEKS, st.sampled_from([".gz", ".zst"]), st.integers(1, 3))
def test_packed_lines_are_the_lines(
    tmp_path: Path, lines: Any, sizes: list[int], seeks: Any, packed: str, parts: int
) -> None:
    raw = content(lines)
    pack = gzip.compress if packed == ".gz" else zstandard.ZstdCompressor().compress
    cut = [raw[at * len(raw) // parts : (at + 1) * len(raw) // parts] for at in range(parts)]
    with tempfile.NamedTemporaryFile(dir=tmp_path, suffix=f".jsonl{packed}") as file:
        file.write(b"".join(pack(piece) for piece in cut))  # several members, several frames
        file.flush()
        found = [plain(row) for row in rows_of(file.name, sizes, then=9)]
        naive = [row for row in naive_json(raw, file.name) if row != "BLANK"]
        assert same(found, naive)
        if "nan" not in repr(found):
            check_seeks(file.name, sizes, seeks)


@FAST
@given(LINES, SIZES, SEEKS)
def test_text_is_every_line_without_its_end(tmp_path: Path, lines: Any, sizes: list[int], seeks: Any) -> None:
    with tempfile.NamedTemporaryFile(dir=tmp_path, suffix=".txt") as file:
        file.write(content(lines))
        file.flush()
        naive: list[Any] = []
        for number, line in enumerate(io.BytesIO(content(lines).removeprefix(b"\xef\xbb\xbf")), 1):
            try:
                naive.append(line.decode().removesuffix("\n").removesuffix("\r"))
            except UnicodeDecodeError:
                naive.append(("bad", f"{file.name}:{number}"))
        assert [plain(row) for row in rows_of(file.name, sizes, then=9)] == naive
        check_seeks(file.name, sizes, seeks)


CSV = st.lists(
    st.sampled_from(['"', '""', ",", "\n", "\r\n", "\r", "a", "bc", "é", "\0", ' "', '",', '\n"']), max_size=60
)


def naive_csv(text: str) -> list[Any]:
    """Rows by csv.DictReader, with invalid rows in their places."""
    reader = csv.reader(io.StringIO(text, newline="\n"))
    found: list[Any] = []
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return found
        except csv.Error:
            found.append("bad")
        else:
            row = dict(zip("xyz", record, strict=False)) | dict.fromkeys("xyz"[len(record) :])
            found.append("BLANK" if not record else "bad" if len(record) > 3 else row)


@FAST
@given(CSV, st.booleans(), st.booleans(), SIZES, SEEKS)
def test_csv_is_what_the_csv_module_says(
    tmp_path: Path, pieces: list[str], mark: bool, packed: bool, sizes: list[int], seeks: Any
) -> None:
    text = "".join(pieces)
    raw = (b"\xef\xbb\xbf" if mark else b"") + b"x,y,z\n" + text.encode()
    with tempfile.NamedTemporaryFile(dir=tmp_path, suffix=".csv.gz" if packed else ".csv") as file:
        file.write(gzip.compress(raw) if packed else raw)
        file.flush()
        cursor = opened(file.name)
        found: list[Any] = []
        ahead = iter(sizes)
        while (split := cursor.take(next(ahead, 9))) is not None:
            found += ["bad" if isinstance(row, BadRow) else plain(row) for row in send(split)[0].read()]
        cursor.close()
        assert found == naive_csv(text)
        check_seeks(file.name, sizes, seeks)


def test_csv_without_a_header_and_with_columns(tmp_path: Path) -> None:
    path = tmp_path / "a b\nü.csv"
    path.write_bytes(b'1;"a\nb"\r\n\r\n2;\r\n3\r\n4;5;6\r\n')
    assert [plain(row) for row in rows_of(source(path, header=False, delimiter=";"))] == [
        {"c0": "1", "c1": "a\nb"},
        {"c0": "2", "c1": ""},
        {"c0": "3", "c1": None},
        ("bad", f"{path}:6"),
    ]
    assert rows_of(source(path, header=False, delimiter=";", columns=["n", "t"], limit=1)) == [{"n": "1", "t": "a\nb"}]
    (tmp_path / "t.tsv").write_bytes(b"a\tb\tc\n1\t2,3\t4\n")
    assert rows_of(source(tmp_path / "t.tsv", columns=["c", "a"])) == [{"c": "4", "a": "1"}]


def test_errors_of_a_header_are_reported_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(ConfigError, match="duplicate names in the header: 'a'"):
        opened(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("text,b\n1,2\n")
    with pytest.raises(ConfigError, match="did you mean 'text'"):
        opened(source(tmp_path / "b.csv", columns=["txt"]))


def test_several_files_come_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "sub dir").mkdir()
    for name, rows in (("b.jsonl", "3\n4"), ("a.jsonl", "1\n2\n"), ("sub dir/c.jsonl", ""), ("sub dir/d.jsonl", "5")):
        (tmp_path / name).write_text(rows)
    (tmp_path / "_SUCCESS").touch()
    assert rows_of(tmp_path) == [1, 2, 3, 4, 5]
    assert rows_of(str(tmp_path / "**" / "*.jsonl")) == [1, 2, 3, 4, 5]
    assert rows_of({"path": [str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")], "limit": 3}) == [3, 4, 1]
    assert rows_of(tmp_path, limit=2) == [1, 2]
    check_seeks(tmp_path, [1, 1, 3], [(at, kept) for at in range(7) for kept in ([], [True] * 4, [False, True])])


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt", "jsonl.gz", "jsonl.zst", "csv.gz"])
def test_an_empty_file_has_no_rows(tmp_path: Path, suffix: str) -> None:
    raw = gzip.compress(b"") if suffix.endswith("gz") else b""
    raw = zstandard.ZstdCompressor().compress(b"") if suffix.endswith("zst") else raw
    (tmp_path / f"empty.{suffix}").write_bytes(raw)
    cursor = opened(tmp_path / f"empty.{suffix}")
    assert cursor.take(5) is None
    assert cursor.row == 0
    cursor.seek(3, {})
    assert cursor.row == 0
    (tmp_path / f"nothing.{suffix}").touch()
    if suffix.endswith("gz"):
        assert rows_of(tmp_path / f"nothing.{suffix}") == []


def test_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = [{"n": number, "text": "ü" * (1 << 20)} for number in range(12)]
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert rows_of(tmp_path / "long.jsonl") == rows
    first = opened(tmp_path / "long.jsonl").take(1000)
    assert first is not None
    assert first.items < 12  # not all of them in the hands of one worker
    with (tmp_path / "long.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["n", "text"])
        writer.writeheader()
        writer.writerows([{"n": "1", "text": 'a "quote"\n' * 100_000}] * 3)
    assert rows_of(tmp_path / "long.csv") == [{"n": "1", "text": 'a "quote"\n' * 100_000}] * 3


def test_invalid_lines_have_a_place_and_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": \n\xff\xfe\n' + b"[" * 100_000 + b"\n" + b"9" * 5000 + b'\n{"a": 2}\n')
    rows = rows_of(path)
    assert [plain(row) for row in rows] == [{"a": 1}, *[("bad", f"{path}:{line}") for line in (3, 4, 5, 6)], {"a": 2}]
    assert rows[1].raw == '{"a": '
    assert "not JSON: Expecting value" in rows[1].error_text
    assert "not utf-8" in rows[2].error_text
    assert "nested too deeply" in rows[3].error_text
    assert len(rows[3].raw) == row_parser.MAX_RAW_CHARACTERS


def test_lines_that_are_values_only_side_by_side(tmp_path: Path) -> None:
    """The number of values is right, and each line is wrong."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"a": 1},{"b": 2}\n[1\n2]\n{"a": [{}\n{}]}\n')
    assert [plain(row) for row in rows_of(path)] == [("bad", f"{path}:{line}") for line in (1, 2, 3, 4, 5)]


def test_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("näme;wert\nü;1\n".encode("latin-1"))
    assert rows_of(source(tmp_path / "a.csv", encoding="latin-1", delimiter=";")) == [{"näme": "ü", "wert": "1"}]
    (tmp_path / "b.csv").write_bytes(b"a,b\n1,2\n\xff,3\n4,5\n")
    assert [plain(row) for row in rows_of(tmp_path / "b.csv")] == [
        {"a": "1", "b": "2"},
        ("bad", f"{tmp_path / 'b.csv'}:3"),
        {"a": "4", "b": "5"},
    ]
    with pytest.raises(ConfigError, match="cannot be read line by line"):
        source(tmp_path / "a.csv", encoding="utf-16")


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def begun() -> tuple[Any, Any]:
        path.write_text('{"row": 1}\n' * 100)
        cursor = opened(path)
        return cursor, cursor.take(5)

    cursor, split = begun()
    with path.open("a") as file:
        file.write('{"row": 2}\n')
    for act in (split.read, lambda: rows_of_rest(cursor)):
        with pytest.raises(SourceSinkError, match="had 1100 bytes and has 1111 now") as caught:
            act()
        assert caught.value.code == "DT344"
    cursor, split = begun()
    path.write_text("")
    with pytest.raises(SourceSinkError, match="changed while it was read"):
        split.read()
    cursor, split = begun()
    path.rename(tmp_path / "b.jsonl")
    with pytest.raises(SourceSinkError, match="it is gone"):
        split.read()
    cursor, split = begun()
    path.with_suffix(".new").write_text('{"row": 3}\n' * 100)
    path.with_suffix(".new").rename(path)
    with pytest.raises(SourceSinkError, match=r"replaced|written"):
        split.read()


def rows_of_rest(cursor: Any) -> None:
    while cursor.take(5) is not None:
        pass


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_an_archive_that_is_cut_off_or_damaged(tmp_path: Path, packed: str) -> None:
    raw = b"".join(b'{"n": %d}\n' % (number * 7919 % 1000) for number in range(5000))
    whole = gzip.compress(raw) if packed == "gz" else zstandard.ZstdCompressor().compress(raw)
    path = tmp_path / f"a.jsonl.{packed}"
    for broken in (whole[: len(whole) // 2], whole[:-3], b"not at all an archive" * 10, whole + b"garbage behind it"):
        path.write_bytes(broken)
        with pytest.raises(SourceSinkError, match=r"a.jsonl.* damaged or truncated") as caught:
            rows_of(path)
        assert caught.value.code == "DT345"


def test_what_travels_is_small(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"row": 1}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"row": 1}\n' * 1000))
    for name in ("a.jsonl", "a.jsonl.gz"):
        split = opened(tmp_path / name).take(1000)
        assert split is not None
        assert send(split)[1] < 600  # the lines themselves are beside the pickle, or not sent at all


def test_what_is_known_of_the_number_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"row": 1}\n' * 1000)
    cursor = opened(tmp_path / "a.jsonl")
    assert (cursor.total, cursor.expected, cursor.kind) == (None, None, "jsonl")
    cursor.take(10)
    assert cursor.expected == 1000
    assert BLANK_ROW not in rows_of(tmp_path / "a.jsonl")
    assert cursor.describe() == f"{tmp_path / 'a.jsonl'}: 1 file, 10.7KB"
