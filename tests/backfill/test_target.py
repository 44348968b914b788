"""Identity of results in data file names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.backfill.lance_table import DataFileInfo, Fragment
from dovetail.backfill.target import HASH_DIGITS, current_identity, files_hash, is_done, make_identity

names = st.text(max_size=6)
outputs = st.lists(st.tuples(names, names), min_size=1, max_size=3)
identity_inputs = st.tuples(outputs, names, st.lists(names, max_size=3), st.one_of(st.none(), names), st.integers(0, 5))


@given(identity_inputs, identity_inputs)
def test_identities_are_equal_only_if_all_inputs_are(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    assert (make_identity(*one) == make_identity(*other)) == (one == other)
    assert len(make_identity(*one)) == HASH_DIGITS
    assert make_identity(*one).isalnum()


def test_no_condition_differs_from_an_empty_condition() -> None:
    assert make_identity([("n", "int64")], "1", ["id"], None, 0) != make_identity([("n", "int64")], "1", ["id"], "", 0)


def test_the_identity_is_the_same_in_every_process_and_version() -> None:
    """Stored results depend on it: a change would recompute every column of every user."""
    assert make_identity([("n", "int64")], "v1", ["id", "text"], "id > 3", 2) == "4d56e11538b6eda0"


def fragment(*files: tuple[str, tuple[int, ...]], number: int = 3, rows: int = 10, deleted: int = 0) -> Fragment:
    return Fragment(number, rows, deleted, tuple(DataFileInfo(path, fields, 1) for path, fields in files))


def test_the_input_hash_depends_on_the_files_of_the_input_columns() -> None:
    before = fragment(("a", (0,)), ("b", (1,)), ("c", (2,)))
    found = files_hash(before, {0, 1})
    assert found == files_hash(fragment(("b", (1,)), ("a", (0,)), ("other", (2,))), {0, 1})
    assert found == files_hash(fragment(("a", (0,)), ("b", (1,)), deleted=7), {0, 1})
    assert found != files_hash(fragment(("a", (0,)), ("b2", (1,))), {0, 1})
    assert found != files_hash(fragment(("a", (0,)), ("b", (1,)), number=4), {0, 1})
    assert found != files_hash(fragment(("a", (0,)), ("b", (1,)), rows=11), {0, 1})


def test_a_fragment_is_done_if_its_file_name_has_the_identity() -> None:
    name = "dt-one-inputs-uuid.lance"
    assert is_done(fragment(("a", (0,)), (name, (5,))), "one", "inputs", {5})
    assert not is_done(fragment(("a", (0,)), (name, (5,))), "two", "inputs", {5})
    assert not is_done(fragment(("a", (0,)), (name, (5,))), "one", "others", {5})
    assert not is_done(fragment(("a", (0, 5))), "one", "inputs", {5})
    assert not is_done(fragment(("a", (0,))), "one", "inputs", {5})
    assert not is_done(fragment((name, (5,)), ("a", (6,))), "one", "inputs", {5, 6})
    assert not is_done(fragment(("dt-one-inputsmore-uuid.lance", (5,))), "one", "inputs", {5})


def test_a_fragment_with_one_column_written_by_others_is_not_done() -> None:
    name = "dt-one-inputs-uuid.lance"
    assert not is_done(fragment((name, (5,))), "one", "inputs", {5, 6})
    assert is_done(fragment((name, (5, 6))), "one", "inputs", {5, 6})


def test_the_current_identity_is_read_from_the_file_name() -> None:
    assert current_identity(fragment(("dt-one-inputs-uuid.lance", (5,))), {5}) == "one"
    assert current_identity(fragment(("dt-one-inputs-uuid.lance", (5,))), {6}) == ""
    assert current_identity(fragment(("a-b-c-d.lance", (5,))), {5}) == ""
    assert current_identity(fragment(("dt-one.lance", (5,))), {5}) == ""
