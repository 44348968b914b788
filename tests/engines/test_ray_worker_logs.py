"""Worker logs of other nodes in the run folder. No Ray is started."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.engines.ray.worker_logs import (
    MAX_BACKLOG_BYTES,
    READ_LIMIT_BYTES,
    LogShipper,
    LogWriter,
    first_line_start,
    split_limit,
)

if TYPE_CHECKING:
    from pathlib import Path


class Ends:
    """The log folders of a node and of the run, with shipper and writer."""

    def __init__(self, path: Path) -> None:
        self.node, self.run = path / "node", path / "run" / "logs"
        self.node.mkdir()
        self.shipper, self.keeper = LogShipper(self.node), LogWriter(self.run)

    def print(self, name: str, text: str | bytes) -> None:
        with (self.node / name).open("ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    def look(self, *, last: bool = False) -> int:
        """Ship new output once; returns the number of bytes."""
        pieces = self.shipper.read_last(self.keeper.received) if last else self.shipper.read_new()
        self.keeper.write(pieces)
        return sum(len(data) for _, _, _, data, _ in pieces)

    def kept(self, name: str) -> str:
        return (self.run / name).read_text()


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path)


def test_new_output_is_appended_to_the_file_of_the_same_name(ends: Ends) -> None:
    ends.print("1.log", "one\n")
    ends.print("12.3.log", "rank\n")
    ends.look()
    ends.print("1.log", "two\nthr")
    ends.look()
    ends.print("1.log", "ee\n")
    ends.look()
    assert (ends.kept("1.log"), ends.kept("12.3.log")) == ("one\ntwo\nthree\n", "rank\n")
    assert ends.look() == 0
    assert ends.keeper.skipped_bytes == 0


def test_only_worker_logs_are_sent(ends: Ends) -> None:
    for name in ("x.log", ".1.log", "1.txt", "1.log.gz", "ray.out"):
        ends.print(name, "no\n")
    (ends.node / "7.log").mkdir()
    assert ends.shipper.read_new() == []


def test_a_missing_folder_has_no_output(tmp_path: Path) -> None:
    assert LogShipper(tmp_path / "later").read_new() == []
    assert LogShipper(tmp_path / "later").read_last({}) == []


def test_one_read_stays_within_its_limit_and_the_rest_follows(ends: Ends) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    assert READ_LIMIT_BYTES < len(text) < MAX_BACKLOG_BYTES
    ends.print("1.log", text)
    assert 0 < ends.look() <= READ_LIMIT_BYTES
    assert ends.kept("1.log").endswith("\n")  # pieces end after a line
    while ends.look():
        pass
    assert ends.kept("1.log") == text


def test_small_logs_are_not_delayed_by_large_ones(ends: Ends) -> None:
    for number in range(3):
        ends.print(f"{number}.log", "x" * 99 + "\n")
    for number in range(3, 6):
        ends.print(f"{number}.log", ("z" * 99 + "\n") * 1000)
    assert ends.look() <= READ_LIMIT_BYTES
    sizes = {path.name: path.stat().st_size for path in ends.run.iterdir()}
    assert [sizes[f"{number}.log"] for number in range(3)] == [100, 100, 100]
    assert all(READ_LIMIT_BYTES // 3 - 300 < sizes[f"{number}.log"] <= READ_LIMIT_BYTES // 3 for number in range(3, 6))


def test_a_log_that_grows_too_fast_has_a_line_with_the_skipped_bytes(ends: Ends) -> None:
    lines = [f"line {number}\n" for number in range(100_000)]
    printed = "".join(lines)
    ends.print("1.log", "first\n")
    ends.look()
    ends.print("1.log", printed)
    ends.look()
    kept = ends.kept("1.log")
    note = re.search(r"^\[dovetail: (\d+) bytes skipped here: .*\]\n", kept, re.MULTILINE)
    assert note is not None
    before, after = kept[: note.start()], kept[note.end() :]
    assert before == "first\n"
    assert printed.endswith(after)
    assert after.startswith("line ")  # with a whole line
    assert int(note[1]) == len(printed) - len(after) == ends.keeper.skipped_bytes


def test_the_last_lines_are_sent_at_once_at_the_end(ends: Ends) -> None:
    for number in range(2):
        ends.print(f"{number}.log", "z" * 99 + "\n")
        ends.print(f"{number}.log", "y" * 1_500_000 + "\nTraceback\n")
    assert ends.look(last=True) <= 1 << 20
    kept = [ends.kept(f"{number}.log") for number in range(2)]
    assert all(text.endswith("Traceback\n") for text in kept)
    ends.look(last=True)
    assert [ends.kept(f"{number}.log") for number in range(2)] == kept


def test_output_sent_but_not_received_is_sent_again_at_the_end(ends: Ends) -> None:
    ends.print("1.log", "heard\n")
    ends.look()
    ends.print("1.log", "on its way when the listener closed\n")
    assert ends.shipper.read_new()
    ends.print("1.log", "last\n")
    ends.look(last=True)
    assert ends.kept("1.log") == "heard\non its way when the listener closed\nlast\n"


def test_characters_split_between_pieces_are_whole_in_the_file(ends: Ends) -> None:
    text = "\N{SNOWMAN}\N{PILE OF POO}é" * 5000
    data = text.encode()
    for at in range(0, len(data), 7001):
        ends.print("1.log", data[at : at + 7001])
        ends.look()
    assert ends.kept("1.log") == text


def test_without_line_breaks_a_gap_ends_at_a_whole_character(ends: Ends) -> None:
    ends.print("1.log", "\N{SNOWMAN}" * 400_000)
    ends.look()
    note, _, after = ends.kept("1.log").partition("]\n")
    assert note.startswith("[dovetail: ")
    assert set(after) == {"\N{SNOWMAN}"}


def test_a_gap_after_half_a_line_starts_a_new_line(ends: Ends) -> None:
    ends.print("1.log", "half")
    ends.look()
    ends.print("1.log", "x\n" * 400_000)
    ends.look()
    assert ends.kept("1.log").startswith("half\n[dovetail: ")


def test_a_truncated_or_replaced_file_is_read_from_its_start(ends: Ends) -> None:
    ends.print("1.log", "old old old\n")
    ends.look()
    (ends.node / "1.log").write_text("cut\n")
    ends.look()
    (ends.node / "1.log").rename(ends.node / "1.log.1")
    ends.print("1.log", "a rotated file that is longer than the one before\n")
    ends.look()
    assert ends.kept("1.log") == "old old old\ncut\na rotated file that is longer than the one before\n"


def test_a_removed_file_is_ignored_and_may_be_created_again(ends: Ends) -> None:
    ends.print("1.log", "one\n")
    ends.look()
    (ends.node / "1.log").unlink()
    assert ends.look() == 0
    ends.print("1.log", "two\n")
    ends.look()
    assert ends.kept("1.log") == "one\ntwo\n"


def test_names_outside_the_log_folder_are_not_written(tmp_path: Path) -> None:
    keeper = LogWriter(tmp_path / "logs")
    keeper.write([(name, 1, 0, b"text", 4) for name in ("../1.log", "/tmp/1.log", "", "1.log")])
    assert [path.name for path in tmp_path.rglob("*.log")] == ["1.log"]


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    keeper = LogWriter(tmp_path / "logs")
    keeper.write([("1.log", 1, 0, b"lost", 4)])
    assert keeper.problem.startswith("1.log: ")
    assert keeper.skipped_bytes == 4


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 1000), min_size=1), st.integers(0, 3000))
def test_shares_fill_the_limit_evenly(waiting: dict[str, int], limit: int) -> None:
    found = split_limit(waiting, limit)
    assert sum(found.values()) == min(limit, sum(waiting.values()))
    assert all(found.get(name, 0) <= size for name, size in waiting.items())
    wanting = [found.get(name, 0) for name, size in waiting.items() if found.get(name, 0) < size]
    assert max(wanting, default=0) - min(wanting, default=0) <= 1
    assert all(found.get(name, 0) <= min(wanting, default=limit) + 1 for name in waiting)


@pytest.mark.parametrize(
    ("data", "begin"), [(b"ab\ncd", 3), (b"abcd", 0), (b"abcd\n", 0), (b"\x98\x83abc", 2), (b"", 0), (b"\n", 0)]
)
def test_the_start_of_the_first_whole_line_or_character_is_found(data: bytes, begin: int) -> None:
    assert first_line_start(data) == begin


@given(st.lists(st.tuples(st.sampled_from(["1.log", "2.log", "3.1.log"]), st.binary(max_size=300)), max_size=30))
def test_all_output_arrives_unchanged(tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, bytes]]) -> None:
    ends = Ends(tmp_path_factory.mktemp("logs"))
    printed: dict[str, bytes] = {}
    for name, text in texts:
        printed[name] = printed.get(name, b"") + text
        ends.print(name, text)
        ends.keeper.write(ends.shipper.read_new(100))
    while pieces := ends.shipper.read_new(100):
        ends.keeper.write(pieces)
    for name, text in printed.items():
        if text:
            assert (ends.run / name).read_bytes() == text
