"""Execution of a message by fused stages, compared with a naive reference."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.control.engine import UnsendableItemError
from dovetail.engines import result_stream
from dovetail.engines.item_keys import Keys, as_tuple
from dovetail.engines.result_stream import ResultsNotStoredError, StoredPiece
from dovetail.engines.unit_executor import UnitExecutor, make_executor
from dovetail.engines.worker_context import Worker
from dovetail.pipeline.error_policy import Retry
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_function import each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dovetail.engines.stage_chain import MessageOutcome

Row = tuple[tuple[int, ...], int]


def crumb() -> memoryview:
    return memoryview(bytearray(64)).cast("q")


def host(*stages: Stage) -> UnitExecutor:
    hosted = make_executor(stages, Worker(1, "+".join(stage.name for stage in stages)))
    hosted.setup()
    return hosted


def run(hosted: UnitExecutor, items: list[Any], batch_size: int = 1, keys: Keys | None = None) -> MessageOutcome:
    return hosted.run(range(len(items)) if keys is None else keys, items, batch_size, crumb(), 5)


def same(items: list[Any]) -> list[Any]:
    return items


# a naive reference


@dataclass(frozen=True)
class Spec:
    """A stage by its table: value % len -> number of results (-1: it raises)."""

    each: bool
    batch_size: int
    table: tuple[int, ...]
    form: str = "list"

    def of(self, value: int) -> list[int]:
        count = self.table[value % len(self.table)]
        if count < 0:
            raise ValueError(value)
        return [3 * value + number + 1 for number in range(count)]

    def stage(self, name: str) -> Stage:
        def one(item: int) -> Any:
            made = self.of(item)
            return None if not made else made[0] if len(made) == 1 else iter(made)

        def many(items: list[int]) -> Any:
            made = [new for item in items for new in self.of(item)]
            items.clear()
            return made if self.form == "list" else tuple(made) if self.form == "tuple" else (new for new in made)

        return Stage(name, each(one) if self.each else many, batch_size=self.batch_size)

    def rows(self, rows: list[Row], size: int) -> list[Row]:
        out: list[Row] = []
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            made = [new for _, value in batch for new in self.of(value)]
            same = len(made) == len(batch)
            first = batch[0][0]
            out += [(batch[i][0] if same else (*first, i), new) for i, new in enumerate(made)]
        return out


def naive(specs: list[Spec], rows: list[Row], batch_size: int) -> tuple[list[Row], list[tuple[int, int]], list[Any]]:
    sizes = []
    for position, spec in enumerate(specs):
        small = spec.each or (position and spec.batch_size == 1)
        sizes.append(1 if small else batch_size if spec.batch_size == specs[0].batch_size else spec.batch_size)
    sizes = [min(size, batch_size) for size in sizes]

    def through(part: list[Row]) -> tuple[list[Row], list[tuple[int, int]]]:
        counts = []
        for spec, size in zip(specs, sizes, strict=True):
            after = spec.rows(part, size)
            counts.append((len(part), len(after)))
            part = after
        return part, counts

    try:
        out, counts = through(rows)
    except ValueError:
        pass
    else:
        return out, [], counts
    out, failed, total = [], [], [(0, 0)] * len(specs)
    for start in range(0, len(rows), max(sizes)):
        part = rows[start : start + max(sizes)]
        try:
            made, counts = through(part)
        except ValueError:
            failed.append((start, start + len(part)))
            continue
        out += made
        total = [(a + c, b + d) for (a, b), (c, d) in zip(total, counts, strict=True)]
    return out, failed, total


ACTIONS = st.sampled_from([1, 1, 1, 1, 0, 2, 3, -1])
TABLE = st.one_of(
    st.lists(ACTIONS, min_size=1, max_size=7).map(tuple),
    st.just((1,)),
    st.lists(st.sampled_from([1, 1, 1, 1, 1, -1]), min_size=7, max_size=13).map(tuple),
)
SPEC = st.builds(Spec, st.booleans(), st.sampled_from([1, 4]), TABLE, st.sampled_from(["list", "tuple", "generator"]))


@given(
    st.lists(SPEC, min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=30),
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
)
def test_random_pipelines_match_a_naive_reference(
    specs: list[Spec], items: list[int], batch_size: int, children: bool
) -> None:
    keys: Keys = [(7, i) for i in range(len(items))] if children else range(100, 100 + len(items))
    rows = list(zip([as_tuple(key) for key in keys], items, strict=True))
    given_items = list(items)
    outcome = run(host(*[spec.stage(f"s{i}") for i, spec in enumerate(specs)]), given_items, batch_size, keys)
    out, failed, counts = naive(specs, rows, batch_size)
    assert list(zip(map(as_tuple, outcome.keys), outcome.items, strict=True)) == out
    assert [(failure.start, failure.stop) for failure in outcome.failures] == failed
    assert [failure.keys for failure in outcome.failures] == [
        tuple(key for key, _ in rows[start:stop]) for start, stop in failed
    ]
    assert [stage[:2] for stage in outcome.stages] == counts
    assert outcome.seconds == pytest.approx(sum(seconds for _, _, seconds in outcome.stages))
    assert len(set(map(as_tuple, outcome.keys))) == len(out)
    assert given_items == items


class Pieces:
    """Stores large results; a piece of at most two items if they are cut."""

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self.largest = 0

    def __call__(self, keys: Keys, items: list[Any]) -> list[StoredPiece]:
        self.largest = max(self.largest, len(items))
        starts = range(0, len(items), self.most)
        pieces = [(keys[at : at + self.most], items[at : at + self.most]) for at in starts]
        return [StoredPiece(len(its_items), (list(its_keys), its_items)) for its_keys, its_items in pieces]


def opened(outcome: MessageOutcome) -> list[Row]:
    """The results, with those that are stored."""
    rows: list[Row] = []
    for key, item in zip(outcome.keys, outcome.items, strict=True):
        keys, items = item.place if type(item) is StoredPiece else ([key], [item])
        rows += zip(map(as_tuple, keys), items, strict=True)
    return rows


@contextmanager
def small_pieces(items: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_stream, "MIN_ITEMS", 1)
        patch.setattr(result_stream, "SAMPLE_STEP", 1)
        patch.setattr(result_stream, "MAX_PIECE_ITEMS", items)
        yield


@given(
    st.lists(SPEC, min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=30),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 4),
)
def test_results_stored_piece_by_piece_are_those_of_a_naive_reference(
    specs: list[Spec], items: list[int], batch_size: int, most: int
) -> None:
    # behind a stage that changes counts, fused stages get one item per call (see `fuse_stages`)
    specs = [specs[0], *(replace(spec, batch_size=1) for spec in specs[1:])]
    rows: list[Row] = [((number,), item) for number, item in enumerate(items)]
    pieces = Pieces()
    hosted = host(*[spec.stage(f"s{i}") for i, spec in enumerate(specs)])
    with small_pieces(most):
        outcome = hosted.run(range(len(items)), list(items), batch_size, crumb(), 5, store=pieces)
    out, failed, counts = naive(specs, rows, batch_size)
    assert opened(outcome) == out
    assert [(failure.start, failure.stop) for failure in outcome.failures] == failed
    assert [stage[:2] for stage in outcome.stages] == counts
    assert all(seconds >= 0 for _, _, seconds in outcome.stages)


def test_results_after_pieces_that_a_later_stage_drops_keep_their_number() -> None:
    """The first piece of the generator is dropped as a whole; the key of the last result still has its number."""
    stages = [
        Stage("explode", lambda items: iter(range(5))),
        Stage("keep", each(lambda item: item if item > 3 else None)),
    ]
    with small_pieces(2):
        outcome = host(*stages).run(range(1), [0], 1, crumb(), 5, store=Pieces())
    assert opened(outcome) == [((0, 4), 4)]
    assert [stage[:2] for stage in outcome.stages] == [(1, 5), (5, 1)]


@pytest.mark.parametrize("behind", [[], [each(lambda item: item + 1)], [lambda items: iter([items[0], -1])]])
def test_a_generator_that_a_message_gets_is_never_in_memory_as_a_whole(behind: list[Any]) -> None:
    alive = most = 0

    class Item:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

        def __add__(self, other: int) -> Item:
            return self

    class Counts(Pieces):
        def __call__(self, keys: Keys, items: list[Any]) -> list[StoredPiece]:
            return [StoredPiece(len(items), None)]

    stages = [Stage("explode", lambda items: (Item() for _ in range(1000)))]
    stages += [Stage(f"s{number}", one) for number, one in enumerate(behind)]
    with small_pieces(10):
        outcome = host(*stages).run(range(1), [0], 1, crumb(), 5, store=Counts())
    assert sum(piece.items for piece in outcome.items) >= 1000
    assert most < 40, alive


def test_large_items_are_stored_before_they_are_many() -> None:
    pieces = Pieces(1000)
    hosted = host(Stage("explode", lambda items: (bytes(1 << 22) for _ in range(20))))
    outcome = hosted.run(range(1), [0], 1, crumb(), 5, store=pieces)
    assert len(opened(outcome)) == 20
    assert pieces.largest <= 8


def test_a_result_that_cannot_be_stored_fails_its_call_only() -> None:
    def store(keys: Keys, items: list[Any]) -> list[StoredPiece]:
        if 13 in items:
            raise UnsendableItemError(items.index(13), "TypeError: cannot pickle 13")
        return [StoredPiece(len(items), items)]

    hosted = host(Stage("explode", lambda items: iter(range(items[0], items[0] + 10))))
    with small_pieces(4):
        outcome = hosted.run(range(3), [0, 10, 20], 1, crumb(), 5, store=store)
    assert [item for piece in outcome.items for item in piece.place] == [*range(10), *range(20, 30)]
    (failure,) = outcome.failures
    assert (failure.start, failure.stop) == (1, 2)
    assert failure.error == "the result cannot be pickled: TypeError: cannot pickle 13"


def test_a_full_disk_while_results_are_stored_ends_the_message() -> None:
    def store(keys: Keys, items: list[Any]) -> list[StoredPiece]:
        raise ResultsNotStoredError from OSError(28, "No space left on device")

    hosted = host(Stage("explode", lambda items: iter(range(10))), Stage("b", each(lambda item: item)))
    with small_pieces(4), pytest.raises(OSError, match="No space"):
        hosted.run(range(1), [0], 1, crumb(), 5, store=store)


def test_a_retried_call_returns_the_results_of_its_last_attempt_only() -> None:
    attempts: list[int] = []

    def explode(items: list[int]) -> Iterator[tuple[int, int]]:
        attempts.append(items[0])
        for number in range(10):
            if len(attempts) < 3 and number == 7:
                raise ConnectionError
            yield len(attempts), number

    stage = Stage("explode", explode, on_error=Retry(ConnectionError, times=3, backoff=0))
    with small_pieces(2):
        outcome = host(stage).run(range(1), [0], 1, crumb(), 5, store=Pieces())
    assert outcome.items[0].place == ([(0, 0), (0, 1)], [(3, 0), (3, 1)])
    assert [item for piece in outcome.items for item in piece.place[1]] == [(3, number) for number in range(10)]
    assert [stage[:2] for stage in outcome.stages] == [(1, 10)]


def test_keys_stay_a_range_while_item_counts_do_not_change() -> None:
    hosted = host(Stage("a", each(lambda item: str(item))), Stage("b", same), Stage("c", lambda items: tuple(items)))
    outcome = run(hosted, [1, 2, 3], keys=range(40, 43))
    assert outcome.keys == range(40, 43)
    assert outcome.items == ["1", "2", "3"]


def test_items_of_an_iterator_get_child_keys_even_if_there_is_only_one() -> None:
    outcome = run(host(Stage("a", each(lambda item: iter(range(item))))), [1, 0, 2])
    assert outcome.keys == [(0, 0), (2, 0), (2, 1)]
    assert outcome.items == [0, 0, 1]


def test_strings_dicts_and_lists_are_one_item_each() -> None:
    items = ["text", {"a": 1}, [1, 2], b"bytes", (1,), 0, "", [], False]
    assert run(host(Stage("a", each(lambda item: item))), items).items == items


# batch sizes


def sizes_of(hosted: Callable[[Callable[[str], Callable[..., Any]]], UnitExecutor], items: int, batch_size: int) -> Any:
    seen: dict[str, list[int]] = {}

    def noting(name: str) -> Callable[[list[int]], list[int]]:
        def fn(items: list[int]) -> list[int]:
            seen.setdefault(name, []).append(len(items))
            return items

        return fn

    assert run(hosted(noting), list(range(items)), batch_size).failures == []
    return seen


def test_the_command_sets_the_batch_size_of_all_stages_that_share_it() -> None:
    seen = sizes_of(
        lambda fn: host(Stage("a", fn("a"), batch_size=8), Stage("b", fn("b"), batch_size=8), Stage("c", fn("c"))), 5, 2
    )
    assert seen == {"a": [2, 2, 1], "b": [2, 2, 1], "c": [1] * 5}


def test_a_barrier_gets_all_items_in_one_call_and_may_yield() -> None:
    def dedup(items: list[int]) -> Iterator[int]:
        assert len(items) == 6
        yield from dict.fromkeys(items)
        yield from ()

    outcome = run(host(Stage("a", dedup, barrier=True)), [3, 3, 1, 3, 2, 1])
    assert outcome.items == [3, 1, 2]
    assert outcome.keys == [(0, 0), (0, 1), (0, 2)]


def test_an_empty_message_has_an_empty_result() -> None:
    for stage in (Stage("a", same), Stage("a", same, barrier=True), Stage("a", each(same))):
        outcome = run(host(stage), [], 4)
        assert (list(outcome.keys), outcome.items, outcome.failures) == ([], [], [])


# arguments and results of functions


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_function_may_modify_the_list_it_gets(batch_size: int) -> None:
    kept: list[list[int]] = []

    def rude(items: list[int]) -> list[int]:
        out = [item + 1 for item in items]
        items[:] = ["rubbish"] * 10  # type: ignore[list-item]
        kept.append(out)
        return out

    def later(items: list[int]) -> list[int]:
        for old in kept:
            old.clear()
        return items

    items = [1, 2, 3, 4]
    stages = (Stage("a", rude, batch_size=batch_size), Stage("b", later, batch_size=batch_size))
    assert run(host(*stages), items, batch_size).items == [2, 3, 4, 5]
    assert items == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("returned", "named"), [(None, "None"), ("ab", "a str ('ab')"), (b"", "a bytes"), ({}, "a dict"), (5, "an int (5)")]
)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_return_value_that_is_no_list_is_rejected_with_a_fix(returned: Any, named: str, batch_size: int) -> None:
    stage = Stage("clean", lambda items: returned, batch_size=batch_size)
    outcome = run(host(stage), [1, 2], batch_size)
    assert outcome.items == []
    error = outcome.failures[0].error
    assert error.startswith(f"TypeError: stage 'clean' returned {named}")
    assert error.endswith("([] drops the items); to map one item to one item, use dt.each")
    assert len(outcome.failures) == 2 // batch_size


@pytest.mark.parametrize("wrap", [each, lambda fn: fn])
def test_a_coroutine_returned_by_a_plain_function_is_rejected(wrap: Any) -> None:
    async def later(items: Any) -> Any:
        return items

    (failure,) = run(host(Stage("a", wrap(lambda items: later(items)))), [1]).failures
    assert "stage 'a' returned a coroutine" in failure.error
    assert "async def" in failure.error


def test_numpy_rows_and_sets_are_passed_on_as_items() -> None:
    numpy = pytest.importorskip("numpy")
    assert run(host(Stage("a", numpy.array, batch_size=3)), [1, 2, 3], 3).items == [1, 2, 3]
    assert run(host(Stage("a", lambda items: set(items), batch_size=3)), [1, 1, 1], 3).items == [1]


def test_a_generator_that_raises_fails_its_batch_and_adds_no_items() -> None:
    def spread(item: int) -> Iterator[int]:
        yield item
        if item == 2:
            raise ValueError("two")

    def batches(items: list[int]) -> Iterator[int]:
        for item in items:
            yield from spread(item)

    outcome = run(host(Stage("a", each(spread))), [1, 2, 3])
    assert outcome.items == [1, 3]
    assert [(failure.start, failure.stop) for failure in outcome.failures] == [(1, 2)]
    outcome = run(host(Stage("a", batches, batch_size=2)), [1, 2, 3], 2)
    assert outcome.items == [3]
    assert [(failure.start, failure.stop, failure.keys) for failure in outcome.failures] == [(0, 2, ((0,), (1,)))]


def test_items_modified_in_place_are_reloaded_before_a_second_attempt() -> None:
    def count(item: dict[str, int]) -> dict[str, int]:
        item["n"] += 1
        return item

    def check(item: dict[str, int]) -> dict[str, int]:
        if item["id"] == 2:
            raise ValueError("two")
        return item

    def fresh() -> list[Any]:
        return [{"id": i, "n": 0} for i in range(4)]

    hosted = host(Stage("a", each(count)), Stage("b", each(check)))
    outcome = hosted.run(range(4), fresh(), 1, crumb(), 1, fresh)
    assert outcome.items == [{"id": i, "n": 1} for i in (0, 1, 3)]
    assert [(failure.start, failure.stop) for failure in outcome.failures] == [(2, 3)]
    assert "in stage 'b'" in outcome.failures[0].detail
