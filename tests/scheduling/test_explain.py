"""Misfits are explained with true numbers, and every fix works when pasted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.errors import UNSET, AddNodes, Change, Fix
from dovetail.resources.fit import Fit
from dovetail.scheduling.diagnose.feasibility import (
    WorkerRequest,
    count_that_fit,
    find_fit_problems,
    find_misfit,
    require_fit,
)
from dovetail.scheduling.diagnose.misfit import fits_on_some_node, misfit_reasons, smallest_fitting_node
from scheduling.leftover_scores import BestFit, Spread
from scheduling.strategies import clusters, expected, gangs, resources, shapes


def ledger_of(spec: str, *taken: tuple[dt.Resources, int]) -> dt.Ledger:
    ledger = dt.Ledger(dt.Cluster.parse(spec))
    spread = dt.Placer(ledger, Spread(ledger.cluster))
    for asked, count in taken:
        assert len(spread.fill(asked.shape(), count)) == count
    return ledger


def only(problems: list[dt.Problem]) -> dt.Problem:
    assert len(problems) == 1, [problem.render() for problem in problems]
    return problems[0]


def problem_of(spec: str, asked: dt.Resources, count: int = 1, ranks: int = 1) -> dt.Problem:
    return only(find_fit_problems([WorkerRequest("stage 'x'", asked.shape(ranks), count)], ledger_of(spec)))


def pasted(asked: dt.Resources, fix: Fix) -> dt.Resources | None:
    """The request with a fix applied; None for fixes that change the cluster or the run."""
    if not isinstance(fix, Change) or fix.values.keys() & {"workers", "ranks"}:
        return None
    given_: dict[str, Any] = {name: value for name, value in asdict(asked).items() if value or name == "cpus"}
    changes: dict[str, Any] = {name: value for name, value in fix.values.items() if value is not UNSET}
    if len(changes) == len(fix.values):
        assert eval(f"dict({fix})") == changes
    return dt.Resources(**{name: value for name, value in given_.items() if name not in fix.values}, **changes)


def test_a_card_that_is_too_small_is_named_with_its_size() -> None:
    problem = problem_of("2x(32cpu, 2xgpu:20GB)", dt.Resources(gpu_memory="25GB"))
    assert problem.code == "DT111"
    assert problem.evidence[0] == "2 of 2 nodes: gpu has 20GB per card, 25GB needed"
    assert 'gpu_memory="20GB"' in problem.fix_texts


def test_nvenc_on_an_h100_names_cards_that_have_it() -> None:
    problem = problem_of("4x(64cpu, 8xH100)", dt.Resources(nvencs=1))
    assert problem.code == "DT112"
    assert problem.evidence == ("4 of 4 nodes: H100 has no NVENC, 1 needed",)
    assert any("L40S" in fix and "L4," in fix for fix in problem.fix_texts)


def test_reasons_are_counted_over_nodes_and_each_node_once() -> None:
    ledger = ledger_of("2x(8cpu, 2xA100) + 1x(8cpu) + 1x(0.5cpu, 2xA100)", (dt.Resources(cpus=1, gpus=1), 2))
    problem = only(find_fit_problems([WorkerRequest("stage 'caption'", dt.Resources(gpus=2).shape())], ledger))
    assert problem.code == "DT110"
    assert problem.message == "stage 'caption' (2 GPUs, 1 CPU) fits on 0 of 4 nodes"
    assert problem.evidence[:3] == (
        "2 of 4 nodes: 1 whole GPU free, 2 needed",
        "1 of 4 nodes: 0.5 CPUs in all, 1 needed",
        "1 of 4 nodes: no GPU",
    )


def test_what_is_free_but_split_is_shown_in_pieces() -> None:
    ledger = ledger_of("2x(32cpu, 1xgpu:20GB)", (dt.Resources(gpus=0.4), 2))
    problem = only(find_fit_problems([WorkerRequest("stage 'x'", dt.Resources(gpus=0.7).shape())], ledger))
    assert "1.2 GPUs are free, but as 0.6 + 0.6" in problem.evidence
    assert problem.fix_texts[0] == "gpus=0.6"


def test_host_memory_is_never_added_across_nodes() -> None:
    problem = problem_of("4x(8cpu, 16GB)", dt.Resources(memory="30GB"))
    assert problem.code == "DT115"
    assert "64GB of memory are free, but as 16GB + 16GB + 16GB + 16GB" in problem.evidence


def test_too_many_workers_get_the_largest_count_that_fits() -> None:
    problem = problem_of("1x(64cpu, 2xgpu:20GB)", dt.Resources(gpu_memory="8GB"), count=5)
    assert problem.code == "DT103"
    assert problem.fix_texts[0] == "workers=4"


def test_seven_filters_with_two_whole_gpus_each_get_the_sums_as_evidence() -> None:
    wishes = [WorkerRequest(f"filter {i}", dt.Resources(cpus=4, gpus=1).shape(), 2) for i in range(7)]
    problem = only(find_fit_problems(wishes, ledger_of("1x(32cpu, 128GB, 2xgpu:20GB)")))
    assert problem.code == "DT101"
    assert problem.message == "7 kinds of workers need 14 GPUs and 56 CPUs at once; 2 and 32 are free"
    assert problem.fix_texts[-1] == "add 6 nodes like 1x(32cpu, 128GB, 2xgpu:20GB)"


def test_requests_that_fit_in_total_but_not_together_name_the_unplaced_ones() -> None:
    wishes = [WorkerRequest("a", dt.Resources(gpus=2).shape(), 2), WorkerRequest("b", dt.Resources(gpus=2).shape())]
    problem = only(find_fit_problems(wishes, ledger_of("2x(8cpu, 3xH100)")))
    assert problem.code == "DT102"
    assert problem.evidence == ("b: 1 of 1 workers do not fit",)
    assert problem.fix_texts == ("add a node like 1x(8cpu, 3xH100)",)


def test_a_gang_that_is_too_large_gets_the_number_of_ranks_that_fit() -> None:
    problem = problem_of("2x(8cpu, 8xH100)", dt.Resources(gpus=1), ranks=32)
    assert problem.code == "DT116"
    assert problem.fix_texts == ("ranks=8", "add 2 nodes like 1x(8cpu, 8xH100)")


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (dt.Resources(gpus=1, accelerator="H100"), "DT113"),
        (dt.Resources(labels={"pool": "gpu"}), "DT114"),
        (dt.Resources(cpus=100), "DT115"),
        (dt.Resources(custom={"licence": 1}), "DT115"),
        (dt.Resources(nvdecs=9), "DT112"),
    ],
)
def test_each_kind_of_misfit_has_its_code(asked: dt.Resources, code: str) -> None:
    assert problem_of("2x(32cpu, 64GB, 2xA100){pool=cpu}", asked).code == code


def test_every_problem_is_reported_at_once() -> None:
    wishes = [
        WorkerRequest("a", dt.Resources(gpu_memory="90GB").shape()),
        WorkerRequest("b", dt.Resources(labels={"zone": "z"}).shape()),
        WorkerRequest("c", dt.Resources(gpus=0.5).shape(), 9),
    ]
    with pytest.raises(dt.InfeasibleError) as raised:
        require_fit(wishes, ledger_of("2x(32cpu, 64GB, 2xA100)"))
    assert raised.value.codes == ("DT111", "DT114", "DT103")
    assert raised.value.exit_code == 3


def test_memory_that_was_not_given_is_not_guessed() -> None:
    problem = problem_of("1x(8cpu, 1xgpu)", dt.Resources(memory="1GB", gpu_memory="1GB"))
    assert "is not given in the cluster's description" in problem.evidence[0]


def test_explaining_takes_nothing() -> None:
    ledger = ledger_of("2x(32cpu, 64GB, 2xA100)")
    before = list(ledger.free)
    find_fit_problems(
        [WorkerRequest("a", dt.Resources(gpus=2).shape(), 5), WorkerRequest("b", dt.Resources(gpus=1).shape(ranks=9))],
        ledger,
    )
    assert list(ledger.free) == before


@given(clusters(), resources(), expected())
def test_every_fix_works_when_pasted(
    cluster: dt.Cluster, asked: dt.Resources, others: list[tuple[dt.Shape, int]]
) -> None:
    ledger = dt.Ledger(cluster)
    placer = dt.Placer(ledger, Spread(cluster))
    for shape, count in others:
        placer.fill(shape, count)
    problem = find_misfit(WorkerRequest("one", asked.shape()), ledger)
    if problem is None:
        assert placer.find(asked.shape()) is not None
        return
    assert problem.fix_texts
    for fix in problem.fixes:
        changed = pasted(asked, fix)
        if changed is not None:
            assert fits_on_some_node(changed.shape(), ledger), fix
        elif isinstance(fix, AddNodes):
            node = dt.Cluster.parse(f"{fix.count}x{fix.node}")
            assert fits_on_some_node(asked.shape(), dt.Ledger(node)), fix
        elif isinstance(fix, str) and "stop other workers" in fix:
            assert fits_on_some_node(asked.shape(), dt.Ledger(cluster)), fix


@given(clusters(), resources(), expected(), st.integers(1, 6))
def test_counts_and_added_nodes_work_when_pasted(
    cluster: dt.Cluster, asked: dt.Resources, others: list[tuple[dt.Shape, int]], count: int
) -> None:
    ledger = dt.Ledger(cluster)
    placer = dt.Placer(ledger, Spread(cluster))
    for shape, taken in others:
        placer.fill(shape, taken)
    problem = find_misfit(WorkerRequest("one", asked.shape(), count), ledger)
    if problem is None or problem.code != "DT103":
        return
    for fix in problem.fixes:
        if isinstance(fix, Change) and "workers" in fix.values:
            assert count_that_fit(asked.shape(), ledger) == fix.values["workers"]
        elif isinstance(fix, Change):
            changed = pasted(asked, fix)
            assert changed is not None
            assert count_that_fit(changed.shape(), ledger) >= count
        elif isinstance(fix, AddNodes):
            more, node = fix.count, dt.Cluster.parse(f"1x{fix.node}").nodes[0]
            room = Fit(asked.shape()).capacity(dt.Ledger(dt.Cluster((node,))).free[0])
            assert count_that_fit(asked.shape(), ledger) + more * room >= count
            assert count_that_fit(asked.shape(), ledger) + (more - 1) * room < count


@given(clusters(), shapes(), expected())
def test_the_largest_count_is_what_placement_reaches(
    cluster: dt.Cluster, shape: dt.Shape, others: list[tuple[dt.Shape, int]]
) -> None:
    ledger = dt.Ledger(cluster)
    placer = dt.Placer(ledger, BestFit(cluster))
    for other, count in others:
        placer.fill(other, count)
    if shape.cards > 1 and (shape.nvdecs or shape.nvencs):
        return  # there the order in which whole cards are taken decides
    predicted = count_that_fit(shape, ledger)
    assert len(placer.fill(shape, 2_000)) == min(predicted, 2_000)


@given(clusters(), shapes(), expected())
def test_a_node_has_reasons_exactly_if_the_worker_does_not_fit(
    cluster: dt.Cluster, shape: dt.Shape, others: list[tuple[dt.Shape, int]]
) -> None:
    ledger = dt.Ledger(cluster)
    placer = dt.Placer(ledger, Spread(cluster))
    for other, count in others:
        placer.fill(other, count)
    fit = Fit(shape)
    able = set(placer.fitting_positions(shape))
    for position, free in enumerate(ledger.free):
        assert bool(misfit_reasons(fit, free)) == (position not in able)


@given(clusters(), gangs(), expected())
def test_a_gang_is_explained_exactly_if_it_finds_no_place(
    cluster: dt.Cluster, gang: dt.Shape, others: list[tuple[dt.Shape, int]]
) -> None:
    ledger = dt.Ledger(cluster)
    placer = dt.Placer(ledger, dt.FragmentationScore(dt.Workload([(gang, 1)])))
    for other, count in others:
        placer.fill(other, count)
    problem = find_misfit(WorkerRequest("gang", gang), ledger)
    assert (problem is None) == (placer.find(gang) is not None)


@given(resources())
def test_the_node_that_would_fit_is_one_that_can_be_described(asked: dt.Resources) -> None:
    spec = smallest_fitting_node(asked.shape())
    if spec:
        assert fits_on_some_node(asked.shape(), dt.Ledger(dt.Cluster.parse(f"1x{spec}")))
    else:
        assert asked.shape().cards
