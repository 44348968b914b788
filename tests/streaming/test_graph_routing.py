"""Routing of items in graphs with several parents, children and leaves."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dovetail.control.commands import Deliver
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.world import Behaviour, Gives, LoseNode, Raises, ScriptedEvent
from dovetail.streaming.settings import StreamOptions
from streaming.harness import assert_no_idle_worker, numbers, simulate_stages, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import Key

DIAMOND = [
    stage("a"),
    stage("b", after=["a"], batch_size=3),
    stage("c", after=["a"], batch_size=2),
    stage("d", after=["b", "c"], batch_size=5),
]


def twice(items: int) -> Counter[Key]:
    return numbers(items) + numbers(items)


def test_several_parents_are_a_union_and_an_item_with_two_paths_is_delivered_twice() -> None:
    rig = simulate_stages(DIAMOND, {}, 83, after_step=assert_no_idle_worker)
    assert rig.run_state is RunState.FINISHED
    assert rig.out("d") == twice(83)


def test_a_path_that_drops_its_items_leaves_those_of_the_other() -> None:
    rig = simulate_stages(DIAMOND, {"b": Behaviour(0.1, item=lambda *_: Gives(0))}, 83)
    assert rig.out("d") == numbers(83)


def test_every_leaf_delivers_its_items() -> None:
    rig = simulate_stages(
        [stage("a"), stage("left", after=["a"]), stage("right", after=["a"]), stage("deep", after=["right"])],
        {"right": Behaviour(0.1, item=lambda key, _: Gives(key[0] % 2))},
        40,
    )
    assert rig.out("left") == numbers(40)
    assert rig.out("deep") == Counter((number,) for number in range(1, 40, 2))
    assert set(rig.data.outputs) == {"left", "deep"}


def test_an_inner_stage_delivers_nothing_to_the_sink() -> None:
    rig = simulate_stages([stage("a"), stage("b")], {}, 10)
    assert set(rig.data.outputs) == {"b"}


def test_every_stage_without_a_parent_gets_every_source_item() -> None:
    rig = simulate_stages(
        [stage("x"), stage("y", after=[], batch_size=4), stage("both", after=["x", "y"]), stage("own", after=["y"])],
        {"y": Behaviour(0.3)},
        50,
    )
    assert rig.out("both") == twice(50)
    assert rig.out("own") == numbers(50)


def test_an_edge_that_skips_a_stage_is_a_separate_path() -> None:
    rig = simulate_stages([stage("a"), stage("b", after=["a"]), stage("c", after=["a", "b"], batch_size=4)], {}, 50)
    assert rig.out("c") == twice(50)


def test_an_epoch_of_a_graph_is_delivered_when_all_its_leaves_are_done() -> None:
    rig = simulate_stages(
        [stage("a"), stage("quick", after=["a"]), stage("slow", after=["a"])],
        {"a": Behaviour(0.01), "quick": Behaviour(0.01), "slow": Behaviour(0.5)},
        60,
        options=StreamOptions(target_epoch_batches=2, target_epoch_s=0.01),
        source={"segment_items": 4},
    )
    assert len(rig.all(Deliver)) > 3
    for deliver in rig.all(Deliver):
        items = deliver.last - deliver.first
        assert {leaf: sum(s.items for s in out) for leaf, out in deliver.outputs.items()} == {
            "quick": items,
            "slow": items,
        }


def test_an_item_that_fails_on_one_path_is_delivered_by_the_other() -> None:
    bad = Behaviour(0.1, item=lambda key, _: Raises() if key == (7,) else Gives())
    stages = [*DIAMOND[:2], stage("c", after=["a"], batch_size=2, on_error="skip"), DIAMOND[3]]
    rig = simulate_stages(stages, {"c": bad}, 30)
    assert rig.out("d") == twice(30) - Counter([(7,)])
    assert rig.failed() == Counter([(7,)])


def test_a_node_loss_neither_duplicates_nor_loses_items_with_two_paths() -> None:
    rig = simulate_stages(
        DIAMOND,
        {name: Behaviour(0.3, bytes_out=5) for name in "abcd"},
        200,
        cluster="3x(4cpu, 16GB)",
        script=(ScriptedEvent(6.0, LoseNode("node-1")), ScriptedEvent(11.0, LoseNode("node-2"))),
    )
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.notes("source items restart")
    assert rig.out("d") == twice(200)


def test_fan_out_over_several_stages_multiplies() -> None:
    rig = simulate_stages(
        [stage("a"), stage("b"), stage("c", batch_size=50)],
        {
            "a": Behaviour(0.01, item=lambda *_: Gives(10)),
            "b": Behaviour(0.001, item=lambda *_: Gives(10)),
            "c": Behaviour(0.0001),
        },
        30,
    )
    assert len(rig.out("c")) == rig.data.delivered["c"] == 3000
