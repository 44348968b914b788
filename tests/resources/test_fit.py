from __future__ import annotations

import signal
from contextlib import contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.fit import CardAssignment, Fit
from dovetail.resources.ledger import Ledger
from dovetail.resources.resources import Resources
from dovetail.resources.seat import CardShare
from dovetail.resources.shape import Shape, ShapeKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.resources.free_resources import FreeResources

GB, MB = 1024**3, 1024**2


def ledger_of(spec: str) -> Ledger:
    return Ledger(Cluster.parse(spec))


def assignments_on(ledger: Ledger, node: int = 0, **asked: Any) -> tuple[CardAssignment, ...]:
    return Fit(Resources(**asked).shape()).assignments(ledger.free[node])


def first_assignment(ledger: Ledger, **asked: Any) -> CardAssignment:
    """First assignment on the first node."""
    return assignments_on(ledger, **asked)[0]


def take_first(ledger: Ledger, node: int = 0, **asked: Any) -> CardAssignment | None:
    """Take the first assignment on a node, if there is one."""
    fit = Fit(Resources(**asked).shape())
    assignments = fit.assignments(ledger.free[node])
    if not assignments:
        return None
    ledger.take(fit.seat(ledger.cluster.nodes[node].name, assignments[0]))
    return assignments[0]


def count_until_full(ledger: Ledger, **asked: Any) -> int:
    """Number of workers on the first node when it is full."""
    count = 0
    while take_first(ledger, cpus=0, **asked) is not None:
        count += 1
        assert count <= 10_000
    return count


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Upper limit of the time of work that could otherwise take very long."""

    def stop(_signal: int, _frame: object) -> NoReturn:
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- the arithmetic of a card


@pytest.mark.parametrize(
    ("gpus", "milli"), [(0.25, 250), (0.5, 500), (0.001, 1), (1 / 3, 333), (1 / 7, 142), (0.999, 999)]
)
def test_a_share_of_a_gpu_takes_that_share_of_milli_and_of_bytes(gpus: float, milli: int) -> None:
    (assignment,) = assignments_on(ledger_of("(4cpu, gpu:20GB)"), gpus=gpus)
    assert assignment == (CardShare(0, milli, 20 * GB * milli // 1000),)


def test_a_share_with_memory_takes_exactly_both() -> None:
    assert first_assignment(ledger_of("(4cpu, gpu:20GB)"), gpus=0.25, gpu_memory="4GB") == (CardShare(0, 250, 4 * GB),)
    assert first_assignment(ledger_of("(4cpu, gpu:20GB)"), gpus=0.9, gpu_memory="1B") == (CardShare(0, 900, 1),)


def test_memory_alone_takes_exactly_its_bytes_and_its_part_of_the_milli_of_each_card() -> None:
    (small,), (large,) = assignments_on(ledger_of("(4cpu, gpu:20GB, gpu:80GB)"), gpu_memory="8GB")
    assert small == CardShare(0, 400, 8 * GB)
    assert large == CardShare(1, 100, 8 * GB)


@pytest.mark.parametrize(
    ("spec", "gpu_memory", "workers"),
    [
        ("2xgpu:20GB", "8GB", 4),
        ("gpu:80GB", "1500MB", 54),
        ("2xgpu:20GB", "1500MB", 26),
        ("2xgpu:20GB", "25GB", 0),
        ("2xgpu:20GB", "20GB", 2),
        ("2xgpu:20GB", "10.001GB", 2),
        ("gpu:20GB, gpu:5GB", "6GB", 3),
        ("gpu", "1B", 0),
    ],
)
def test_memory_is_never_added_across_cards(spec: str, gpu_memory: str, workers: int) -> None:
    assert count_until_full(ledger_of(f"(4cpu, {spec})"), gpu_memory=gpu_memory) == workers


@given(st.integers(1, 2**40), st.integers(1, 150), st.integers(0, 2**40))
@example(20 * GB, 13, 0)
@example(7, 3, 0)
@example(1, 1, 0)
@example(85_094_825_984, 54, 0)
def test_as_many_workers_fit_as_the_card_divided_by_their_memory(card: int, parts: int, more: int) -> None:
    least, most = card // (parts + 1) + 1, max(1, card // parts)
    asked = min(most, least + more % max(1, most - least + 1))
    ledger = Ledger(Cluster((Node("n", 1000, gpus=(Gpu("gpu", card),)),)))
    if card // asked <= 200:
        assert count_until_full(ledger, gpu_memory=f"{asked}B") == card // asked


def test_n_shares_of_one_nth_fit_on_a_card_whatever_its_size() -> None:
    for card in (1, 999, 20 * GB, 85_094_825_984):
        ledger = Ledger(Cluster((Node("n", 1000, gpus=(Gpu("gpu", card),)),)))
        for parts in range(2, 1001):
            (share,) = first_assignment(ledger, gpus=1 / parts)
            assert share.milli * parts <= 1000
            assert share.memory_bytes * parts <= card
            assert share.milli > 0


@pytest.mark.parametrize("parts", [2, 3, 7, 49, 1000])
def test_n_shares_of_one_nth_really_sit_on_a_card_together(parts: int) -> None:
    assert count_until_full(ledger_of("(4cpu, gpu:24GB)"), gpus=1 / parts) >= parts


@pytest.mark.parametrize(
    ("first", "whole_fits"),
    [
        ({"gpus": 0.001}, False),
        ({"gpu_memory": "1B"}, False),
        ({"gpus": 0.5, "gpu_memory": "1B"}, False),
        ({"nvdecs": 1}, True),
        ({"nvdecs": 5}, True),
        ({"gpus": 0}, True),
        ({"gpus": 1}, False),
        ({"entire_gpu": True}, False),
    ],
)
def test_a_whole_gpu_is_free_only_if_compute_and_memory_are_untouched(first: dict[str, Any], whole_fits: bool) -> None:
    ledger = ledger_of("(4cpu, A100)")
    assert take_first(ledger, **first) is not None
    assert bool(assignments_on(ledger, gpus=1)) is whole_fits


def test_a_gpu_is_whole_again_after_all_workers_left() -> None:
    ledger = ledger_of("(4cpu, A100)")
    untouched = ledger.free[0]
    fit = Fit(Resources(gpus=0.3, gpu_memory="7GB").shape())
    seats = [fit.seat("node-0", fit.assignments(untouched)[0]) for _ in range(3)]
    for seat in seats:
        ledger.take(seat)
    assert not assignments_on(ledger, gpus=1)
    for seat in seats:
        ledger.give_back(seat)
    assert ledger.free[0] == untouched
    assert assignments_on(ledger, gpus=1)


def test_a_whole_gpu_takes_all_milli_and_bytes_but_only_the_codecs_it_asked_for() -> None:
    assert first_assignment(ledger_of("(4cpu, A100)"), gpus=1) == (CardShare(0, 1000, 40 * GB),)
    assert first_assignment(ledger_of("(4cpu, A100)"), gpus=1, nvdecs=2) == (CardShare(0, 1000, 40 * GB, 2),)
    ledger = ledger_of("(4cpu, A100)")
    take_first(ledger, gpus=1, nvdecs=2)
    assert count_until_full(ledger, nvdecs=1) == 3


def test_an_entire_gpu_takes_every_codec_and_needs_every_codec() -> None:
    assert first_assignment(ledger_of("(4cpu, L4)"), entire_gpu=True) == (CardShare(0, 1000, 24 * GB, 4, 2),)
    ledger = ledger_of("(4cpu, L4)")
    take_first(ledger, nvdecs=1)
    assert not assignments_on(ledger, entire_gpu=True)
    ledger = ledger_of("(4cpu, L4)")
    take_first(ledger, entire_gpu=True)
    assert not assignments_on(ledger, nvdecs=1)
    assert not assignments_on(ledger, nvencs=1)


def test_entire_gpus_need_together_the_codecs_that_are_asked_for_too() -> None:
    assert assignments_on(ledger_of("(4cpu, 2xL4)"), entire_gpu=True, gpus=2, nvdecs=8)
    assert not assignments_on(ledger_of("(4cpu, 2xL4)"), entire_gpu=True, gpus=2, nvdecs=9)
    assert first_assignment(ledger_of("(4cpu, A100, L4)"), entire_gpu=True, nvencs=1)[0].card == 1


def test_a_codec_worker_takes_codecs_of_one_card_and_nothing_else() -> None:
    assert first_assignment(ledger_of("(4cpu, L4)"), nvdecs=3, nvencs=1) == (CardShare(0, 0, 0, 3, 1),)
    assert not assignments_on(ledger_of("(4cpu, 8xL4)"), nvdecs=5)
    assert assignments_on(ledger_of("(4cpu, gpu:nvdec=1)"), nvdecs=1)
    assert count_until_full(ledger_of("(4cpu, 2xL4)"), nvdecs=3) == 2


def test_a_codec_worker_fits_beside_workers_that_compute() -> None:
    ledger = ledger_of("(4cpu, L4)")
    take_first(ledger, gpus=1)
    assert count_until_full(ledger, nvdecs=1) == 4


def test_the_codecs_of_a_share_come_from_its_own_card() -> None:
    ledger = ledger_of("(4cpu, 2xL4)")
    take_first(ledger, nvdecs=4)
    assert assignments_on(ledger, gpus=0.5, nvdecs=1) == ((CardShare(1, 500, 12 * GB, 1),),)
    take_first(ledger, gpus=0.6)
    take_first(ledger, gpus=0.6)
    # card 0 has no decoder left, card 1 has no half left
    assert [card.milli for card in ledger.free[0].cards.free] == [400, 400]
    assert not assignments_on(ledger, gpus=0.5, nvdecs=1)
    assert [assignment[0].card for assignment in assignments_on(ledger, gpus=0.4, nvdecs=1)] == [1]


def test_the_codecs_of_whole_gpus_come_from_any_of_its_own_cards() -> None:
    ledger = ledger_of("(4cpu, H100, L4, L4)")
    take_first(ledger, nvencs=2)
    (assignment,) = assignments_on(ledger, gpus=2, nvencs=1)
    assert [share.card for share in assignment][-1] == 2
    assert sum(share.nvencs for share in assignment) == 1
    assert assignment[-1].nvencs == 1
    assert not assignments_on(ledger, gpus=1, nvencs=3)
    assert not assignments_on(ledger, gpus=3, nvencs=3)
    assert assignments_on(ledger, gpus=3, nvencs=2)


@pytest.mark.parametrize("entire_gpu", [False, True])
@pytest.mark.parametrize(
    ("spec", "asked", "cards"),
    [
        ("2xgpu:8GB, L4", {"gpus": 2, "nvencs": 2}, {2}),
        ("L4, 3xgpu:8GB", {"gpus": 2, "nvdecs": 3}, {0}),
        ("gpu:nvdec=1:nvenc=1, gpu:nvdec=2, gpu:nvenc=2", {"gpus": 2, "nvdecs": 2, "nvencs": 2}, {1, 2}),
        ("gpu:nvdec=9, gpu:nvdec=2:nvenc=2, gpu:nvdec=2:nvenc=1", {"gpus": 2, "nvdecs": 4, "nvencs": 3}, {1, 2}),
    ],
)
def test_whole_gpus_are_chosen_so_that_both_kinds_of_codecs_suffice(
    spec: str, asked: dict[str, Any], cards: set[int], entire_gpu: bool
) -> None:
    (assignment,) = assignments_on(ledger_of(f"(4cpu, {spec})"), entire_gpu=entire_gpu, **asked)
    assert {share.card for share in assignment} >= cards
    assert sum(share.nvdecs for share in assignment) >= asked.get("nvdecs", 0)
    assert sum(share.nvencs for share in assignment) >= asked.get("nvencs", 0)


def test_whole_gpus_with_memory_need_cards_that_have_at_least_that() -> None:
    ledger = ledger_of("(4cpu, A100, A100:80GB, gpu)")
    assert first_assignment(ledger, gpus=1, gpu_memory="41GB") == (CardShare(1, 1000, 80 * GB),)
    assert first_assignment(ledger, gpus=2, gpu_memory="40GB") == (
        CardShare(0, 1000, 40 * GB),
        CardShare(1, 1000, 80 * GB),
    )
    assert not assignments_on(ledger, gpus=2, gpu_memory="41GB")
    assert not assignments_on(ledger, gpus=3, gpu_memory="1B")
    assert assignments_on(ledger, gpus=3)


def test_a_card_of_unknown_memory_can_be_shared_by_milli_only() -> None:
    ledger = ledger_of("(4cpu, gpu)")
    assert first_assignment(ledger, gpus=0.25) == (CardShare(0, 250, 0),)
    assert not assignments_on(ledger, gpu_memory="1B")
    assert count_until_full(ledger, gpus=0.25) == 4


@pytest.mark.parametrize(
    ("accelerator", "cards"),
    [
        (None, [0, 1, 2]),
        ("A100", [0]),
        ("nvidia-tesla-a100", [0]),
        ("a100|NVIDIA L4", [0, 1]),
        ("L4 | H100", [1]),
        ("H100", []),
        ("foo 9", [2]),
        ("FOO-9", [2]),
    ],
)
@pytest.mark.parametrize("asked", [{"gpus": 0.5}, {"gpu_memory": "1GB"}, {"nvdecs": 1}])
def test_only_the_cards_that_are_asked_for_will_do(
    asked: dict[str, Any], accelerator: str | None, cards: list[int]
) -> None:
    ledger = ledger_of("(4cpu, A100, L4, Foo 9:8GB:nvdec=1)")
    assert [assignment[0].card for assignment in assignments_on(ledger, accelerator=accelerator, **asked)] == cards


@pytest.mark.parametrize(
    ("labels", "nodes"),
    [
        ({}, [0, 1, 2]),
        ({"pool": "a"}, [0]),
        ({"pool": "a|b"}, [0, 1]),
        ({"pool": "b", "zone": "x"}, [1]),
        ({"pool": "a", "zone": "x"}, []),
        ({"zone": "y"}, []),
        ({"nothing": "a"}, []),
    ],
)
@pytest.mark.parametrize("asked", [{}, {"gpus": 0.5}, {"nvdecs": 1}, {"gpus": 1}, {"entire_gpu": True}])
def test_only_nodes_with_the_labels_will_do(asked: dict[str, Any], labels: dict[str, str], nodes: list[int]) -> None:
    ledger = ledger_of("(4cpu, L4){pool=a} + (4cpu, L4){pool=b, zone=x} + (4cpu, L4)")
    assert [node for node in range(3) if assignments_on(ledger, node, labels=labels, **asked)] == nodes


def test_custom_resources_are_counted() -> None:
    assert count_until_full(ledger_of("(4cpu, licence=2.5)"), custom={"licence": 0.5}) == 5
    assert count_until_full(ledger_of("(4cpu, a=3, b=2)"), custom={"a": 1, "b": 1}) == 2
    assert not assignments_on(ledger_of("(4cpu, licence=1)"), custom={"other": 0.001})
    assert not assignments_on(ledger_of("(4cpu)"), custom={"licence": 1})
    assert assignments_on(ledger_of("(4cpu)"), custom={"licence": 0})


def test_cpus_and_memory_are_counted() -> None:
    ledger = ledger_of("(4cpu, keep 1cpu, 8GB)")
    assert assignments_on(ledger, cpus=3, memory="8GB") == ((),)
    assert not assignments_on(ledger, cpus=3.001)
    assert not assignments_on(ledger, cpus=1, memory="8.001GB")
    assert not assignments_on(ledger_of("(4cpu)"), memory="1B")


def test_a_worker_without_cards_sits_on_any_node_in_one_way() -> None:
    assert assignments_on(ledger_of("(4cpu, 2xA100)")) == ((),)
    assert assignments_on(ledger_of("(4cpu)")) == ((),)


def test_cards_that_are_alike_now_are_one_way() -> None:
    ledger = ledger_of("(4cpu, 4xA100, L4)")
    assert [assignment[0].card for assignment in assignments_on(ledger, gpus=0.5)] == [0, 4]
    take_first(ledger, gpus=0.25)
    assert [assignment[0].card for assignment in assignments_on(ledger, gpus=0.5)] == [0, 1, 4]


def test_a_gang_sits_rank_by_rank() -> None:
    gang = Resources(gpus=2).shape(4)
    assert Fit(gang).assignments(ledger_of("(4cpu, 2xA100)").free[0]) == assignments_on(
        ledger_of("(4cpu, 2xA100)"), gpus=2
    )


@pytest.mark.parametrize("entire_gpu", [False, True])
def test_codecs_that_no_cards_have_are_refused_quickly(entire_gpu: bool) -> None:
    ledger = ledger_of("(64cpu, 64xH100)")
    with at_most(2):
        assert not assignments_on(ledger, gpus=32, nvencs=1, entire_gpu=entire_gpu)


@pytest.mark.parametrize("entire_gpu", [False, True])
def test_codecs_that_only_the_last_cards_have_are_found_quickly(entire_gpu: bool) -> None:
    ledger = ledger_of("(64cpu, 40xH100, 8xL4)")
    with at_most(2):
        (assignment,) = assignments_on(ledger, gpus=16, nvencs=16, entire_gpu=entire_gpu)
    assert sum(share.nvencs for share in assignment) == 16


@pytest.mark.parametrize("name", ["cpus", "memory"])
def test_a_custom_resource_may_be_called_like_one_that_is_not(name: str) -> None:
    ledger = Ledger(Cluster((Node("n", 4000, 4 * GB, custom=((name, 2000),)),)))
    assert Fit(Resources(cpus=1, memory="1GB").shape()).capacity(ledger.free[0]) == 4


@pytest.mark.parametrize(
    ("spec", "asked", "room"),
    [
        ("(4cpu)", {"cpus": 0.5}, 8),
        ("(4cpu, 2xgpu:20GB)", {"gpu_memory": "8GB", "cpus": 0.1}, 4),
        ("(4cpu, 2xgpu:20GB)", {"gpu_memory": "8GB", "cpus": 2}, 2),
        ("(4cpu, 3xL4)", {"gpus": 2}, 1),
        ("(4cpu, 3xL4)", {"entire_gpu": True}, 3),
        ("(9cpu, 3xL4)", {"nvdecs": 3}, 3),
        ("(4cpu, licence=2)", {"custom": {"licence": 1}}, 2),
        ("(4cpu)", {"custom": {"licence": 1}}, 0),
        ("(4cpu){pool=a}", {"labels": {"pool": "b"}}, 0),
        ("(4cpu)", {"gpus": 1}, 0),
    ],
)
def test_room_is_how_many_fit(spec: str, asked: dict[str, Any], room: int) -> None:
    assert Fit(Resources(**asked).shape()).capacity(ledger_of(spec).free[0]) == room


# ---- against an oracle that knows only the rules


def able_cards(shape: Shape, node: Node, free: FreeResources) -> list[int]:
    """Cards that this worker may use, by the rules of architecture.md section 4."""
    found = []
    for index, gpu in enumerate(node.gpus):
        milli, memory_bytes, nvdecs, nvencs = free.cards.free[index]
        computes = shape.kind in (ShapeKind.WHOLE_NUMBERED_GPU, ShapeKind.ENTIRE_GPU)
        untouched = milli == 1000 and memory_bytes == gpu.memory_bytes
        if shape.kind is ShapeKind.ENTIRE_GPU:
            untouched = untouched and nvdecs == gpu.nvdecs and nvencs == gpu.nvencs
        if shape.accelerators and gpu.key not in shape.accelerators:
            continue
        if shape.gpu_memory_bytes > gpu.memory_bytes or (computes and not untouched):
            continue
        if not computes:
            need = needed(shape, gpu)
            if need[0] > milli or need[1] > memory_bytes or shape.nvdecs > nvdecs or shape.nvencs > nvencs:
                continue
        found.append(index)
    return found


def needed(shape: Shape, gpu: Gpu) -> tuple[int, int]:
    """Share (in thousandths) and bytes that one worker takes of a card."""
    if shape.kind is ShapeKind.CODEC:
        return 0, 0
    if shape.kind is not ShapeKind.FRACTIONAL_GPU:
        return 1000, gpu.memory_bytes
    milli = shape.gpu_milli or 1000 * shape.gpu_memory_bytes // gpu.memory_bytes
    return milli, shape.gpu_memory_bytes or gpu.memory_bytes * shape.gpu_milli // 1000


def can_fit(shape: Shape, node: Node, free: FreeResources) -> bool:
    labels, custom = dict(node.labels), dict(free.custom)
    if shape.cpu_milli > free.cpu_milli or shape.memory_bytes > free.memory_bytes:
        return False
    if any(labels.get(name) not in values for name, values in shape.labels):
        return False
    if any(custom.get(name, 0) < amount for name, amount in shape.custom):
        return False
    if shape.kind is ShapeKind.CPU_ONLY:
        return True
    able = able_cards(shape, node, free)
    cards = free.cards.free
    return any(
        sum(cards[index].nvdecs for index in chosen) >= shape.nvdecs
        and sum(cards[index].nvencs for index in chosen) >= shape.nvencs
        for chosen in combinations(able, shape.cards)
    )


def check_assignment(shape: Shape, node: Node, assignment: CardAssignment) -> None:
    """Assert that an assignment takes exactly the requested resources."""
    assert len(assignment) == shape.cards
    assert [share.card for share in assignment] == sorted({share.card for share in assignment})
    for share in assignment:
        assert (share.milli, share.memory_bytes) == needed(shape, node.gpus[share.card])
        assert not shape.accelerators or node.gpus[share.card].key in shape.accelerators
    nvdecs, nvencs = sum(share.nvdecs for share in assignment), sum(share.nvencs for share in assignment)
    if shape.kind is ShapeKind.ENTIRE_GPU:
        assert [(s.nvdecs, s.nvencs) for s in assignment] == [
            (node.gpus[s.card].nvdecs, node.gpus[s.card].nvencs) for s in assignment
        ]
        assert nvdecs >= shape.nvdecs
        assert nvencs >= shape.nvencs
    else:
        assert (nvdecs, nvencs) == (shape.nvdecs, shape.nvencs)


cards = st.builds(
    Gpu,
    st.sampled_from(["A100", "L4", "gpu"]),
    st.sampled_from([0, 1, 7, 10, 20 * GB]),
    st.integers(0, 3),
    st.integers(0, 2),
)
labels = st.dictionaries(st.sampled_from(["pool", "zone"]), st.sampled_from(["a", "b"]), max_size=2)
nodes = st.builds(
    lambda cpu, memory, gpus, labels, custom: Node(
        "n", cpu, memory, tuple(gpus), tuple(sorted(labels.items())), tuple(sorted(custom.items()))
    ),
    st.integers(1, 4000),
    st.sampled_from([0, 5, 8 * GB]),
    st.one_of(st.lists(cards, max_size=4), st.builds(lambda card, count: [card] * count, cards, st.integers(1, 4))),
    labels,
    st.dictionaries(st.sampled_from(["x", "y"]), st.integers(1, 3000), max_size=2),
)
shapes = st.builds(
    lambda on_card, host, many: Resources(**on_card, **host, **many).shape(),
    st.one_of(
        st.just({}),
        st.builds(lambda f: {"gpus": f}, st.sampled_from([0.001, 0.1, 1 / 3, 0.5, 0.999, 1, 2, 3])),
        st.builds(lambda b: {"gpu_memory": b}, st.sampled_from(["1B", "2B", "3B", "7B", "10GB", "6.9GB"])),
        st.builds(
            lambda f, b: {"gpus": f, "gpu_memory": b},
            st.sampled_from([0.1, 0.5, 1, 2]),
            st.sampled_from(["1B", "7B", "10GB"]),
        ),
        st.builds(lambda n: {"entire_gpu": True, "gpus": n}, st.integers(0, 3)),
    ),
    st.fixed_dictionaries(
        {"cpus": st.sampled_from([0.001, 0.5, 1])}, optional={"memory": st.sampled_from(["1B", "5B", "4GB"])}
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "nvdecs": st.integers(0, 4),
            "nvencs": st.integers(0, 3),
            "labels": st.dictionaries(st.sampled_from(["pool", "zone"]), st.sampled_from(["a", "a|b"]), max_size=1),
            "custom": st.dictionaries(st.sampled_from(["x", "y"]), st.sampled_from([0.001, 1, 2]), max_size=1),
        },
    ),
)
light = st.builds(
    lambda on_card: Resources(cpus=0.001, **on_card).shape(),
    st.sampled_from(
        [
            {"gpus": 0.1},
            {"gpus": 0.5},
            {"gpus": 1},
            {"gpu_memory": "1B"},
            {"gpu_memory": "6GB"},
            {"nvdecs": 1},
            {"nvencs": 1},
        ]
    ),
)


def seated(node: Node, workers: list[tuple[Shape, int]]) -> Ledger:
    """A node with some workers, each in one of its possible assignments."""
    ledger = Ledger(Cluster((node,)))
    for shape, choice in workers:
        fit = Fit(shape)
        if found := fit.assignments(ledger.free[0]):
            ledger.take(fit.seat("n", found[choice % len(found)]))
    return ledger


seated_before = st.lists(st.tuples(light, st.integers(0, 3)), max_size=5)


@given(nodes, seated_before, shapes)
@settings(max_examples=15 * settings().max_examples)
def test_ways_are_what_the_rules_allow_and_each_can_be_taken(
    node: Node, before: list[tuple[Shape, int]], shape: Shape
) -> None:
    ledger = seated(node, before)
    free = ledger.free[0]
    fit = Fit(shape)
    assignments = fit.assignments(free)
    assert bool(assignments) is can_fit(shape, node, free)
    assert len(set(assignments)) == len(assignments)
    assert fit.assignments(free) == Fit(shape).assignments(free)
    for assignment in assignments:
        check_assignment(shape, node, assignment)
        trial = ledger.copy()
        trial.take(fit.seat("n", assignment))
        trial.give_back(fit.seat("n", assignment))
        assert trial.free[0] == free


codec_nodes = st.builds(
    lambda gpus: Node("n", 4000, gpus=tuple(gpus)),
    st.lists(st.builds(Gpu, st.just("gpu"), st.just(7), st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=5),
)
codec_shapes = st.builds(
    lambda gpus, nvdecs, nvencs, entire: Resources(
        cpus=0.001, gpus=gpus, nvdecs=nvdecs, nvencs=nvencs, entire_gpu=entire
    ).shape(),
    st.integers(2, 3),
    st.integers(0, 8),
    st.integers(0, 8),
    st.booleans(),
)


@given(codec_nodes, st.lists(st.tuples(light, st.integers(0, 3)), max_size=2), codec_shapes)
@settings(max_examples=5 * settings().max_examples)
def test_several_gpus_have_together_the_codecs_that_some_cards_have_together(
    node: Node, before: list[tuple[Shape, int]], shape: Shape
) -> None:
    free = seated(node, before).free[0]
    assignments = Fit(shape).assignments(free)
    assert bool(assignments) is can_fit(shape, node, free)
    for assignment in assignments:
        check_assignment(shape, node, assignment)


@given(nodes, seated_before, shapes.filter(lambda shape: shape.cards == 1))
@settings(max_examples=5 * settings().max_examples)
def test_every_card_that_will_do_is_a_way_or_is_like_one_that_is(
    node: Node, before: list[tuple[Shape, int]], shape: Shape
) -> None:
    if shape.kind in (ShapeKind.WHOLE_NUMBERED_GPU, ShapeKind.ENTIRE_GPU):
        return
    free = seated(node, before).free[0]
    if not can_fit(shape, node, free):
        return
    like = {
        (free.cards.free[assignment[0].card], node.gpus[assignment[0].card])
        for assignment in Fit(shape).assignments(free)
    }
    assert like == {(free.cards.free[index], node.gpus[index]) for index in able_cards(shape, node, free)}


@given(nodes, seated_before, shapes)
@settings(max_examples=5 * settings().max_examples)
def test_room_is_how_many_can_sit_down_one_after_the_other(
    node: Node, before: list[tuple[Shape, int]], shape: Shape
) -> None:
    ledger = seated(node, before)
    fit = Fit(shape)
    room = fit.capacity(ledger.free[0])
    for _ in range(min(room, 50)):
        ledger.take(fit.seat("n", fit.assignments(ledger.free[0])[0]))
    assert room > 50 or not fit.assignments(ledger.free[0])
