"""Contract suite of actor systems. A test class of an engine subclasses it and says where systems are launched.

One system serves all tests of a class: its roles are idle between them. These tests have no mark `time_limit`, which
would cancel the system; every wait has a limit of its own."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import dovetail as dt
from actors import actor_classes
from actors.actor_classes import Asker, Echo, Gate, GlooRank, Inside, OddError, Rank
from engines.scene import SEVERAL_CHECKS_S
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMALL = dt.Resources(cpus=0.05)
TOKEN = "ACTOR_TOKEN"
"""A variable of the driver that the role `echo` gets."""
LARGE_BYTES = 300_000_000 if LONG else 8_000_000


def make_system() -> dt.ActorSystem:
    process, node = dt.Together("process"), dt.Together("node", "node")
    return dt.ActorSystem(
        [
            dt.Role(
                "echo",
                Echo,
                args=(1,),
                kwargs={"b": 2},
                workers=3,
                slots=4,
                resources=SMALL,
                env={"A": "1"},
                env_from=[TOKEN],
            ),
            dt.Role("gate", Gate, slots=1, resources=SMALL),
            dt.Role("gates", Gate, slots=8, resources=SMALL),
            dt.Role("single", Inside, slots=1, resources=SMALL),
            dt.Role("many", Inside, slots=100, resources=SMALL),
            dt.Role("asker", Asker, slots=4, resources=SMALL),
            dt.Role("pool", Echo, args=("pool",), resources=SMALL, slots=2, together=process),
            dt.Role("pool_size", Echo, args=("pool_size",), resources=SMALL, slots=2, together=process),
            dt.Role("inner", Asker, resources=SMALL, slots=2, together=process),
            dt.Role("left", Asker, resources=SMALL, slots=256, together=node),
            dt.Role("right", Asker, resources=SMALL, slots=256, together=node),
            dt.Role("ring_a", Asker, resources=SMALL),
            dt.Role("ring_b", Asker, resources=SMALL),
            dt.Role("gang", Rank, ranks=2, resources=SMALL),
        ],
        name="contract",
    )


class ActorSuite(ABC):
    """Tests of actor systems on one engine."""

    @staticmethod
    @abstractmethod
    def place(request: pytest.FixtureRequest) -> dict[str, Any]:
        """Arguments of `launch` that say where the system runs."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _classes_by_value(cls) -> Iterator[None]:
        cloudpickle.register_pickle_by_value(actor_classes)
        yield
        cloudpickle.unregister_pickle_by_value(actor_classes)


class ActorContract(ActorSuite):
    """Every engine behaves like this."""

    @pytest.fixture(scope="class")
    @classmethod
    def live(cls, request: pytest.FixtureRequest, _classes_by_value: None) -> Iterator[dt.LiveSystem]:
        place = cls.place(request)  # before the variable is set: a Ray that is started now would inherit it
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TOKEN, "secret")
            with make_system().launch(deadline="120s", **place) as live:
                yield live

    @pytest.fixture
    def launch(self, request: pytest.FixtureRequest) -> Any:
        """Launch a system of these roles for one test."""

        def start(*roles: dt.Role, **more: Any) -> dt.LiveSystem:
            return dt.ActorSystem(roles).launch(**({"deadline": "120s"} | self.place(request) | more))

        return start

    # Ways of calling

    @pytest.mark.parametrize("method", ["echo", "echo_async"])
    def test_a_call_has_arguments_and_a_result(self, live: dt.LiveSystem, method: str) -> None:
        future = getattr(live.echo.one, method)(1, "two", three=[3])
        assert future.result(PATIENCE_S) == (1, "two", ("three", [3]))
        assert future.done()
        assert future.exception() is None

    def test_instances_get_the_arguments_and_variables_of_their_role(self, live: dt.LiveSystem) -> None:
        assert live.echo.all.given().result(PATIENCE_S) == [((1,), {"b": 2})] * 3
        assert live.echo.all.variable("A").result(PATIENCE_S) == ["1"] * 3
        assert live.echo.all.variable(TOKEN).result(PATIENCE_S) == ["secret"] * 3
        assert live.asker.one.ask("echo", "variable", "A").result(PATIENCE_S) == "1"

    def test_an_instance_is_called_by_its_index(self, live: dt.LiveSystem) -> None:
        assert [live.echo[number].index().result(PATIENCE_S) for number in range(3)] == [0, 1, 2]
        with pytest.raises(IndexError):
            live.echo[3]

    def test_a_role_is_found_by_name(self, live: dt.LiveSystem) -> None:
        assert live["echo"][1].index().result(PATIENCE_S) == 1
        with pytest.raises(AttributeError, match="did you mean 'echo'"):
            live.ecko  # noqa: B018
        with pytest.raises(KeyError, match="did you mean 'echo'"):
            live["ecko"]

    def test_a_broadcast_answers_in_the_order_of_the_instances(self, live: dt.LiveSystem) -> None:
        calls = live.echo.all.index()
        assert calls.result(PATIENCE_S) == [0, 1, 2]
        assert [call.result(PATIENCE_S) for call in calls] == [0, 1, 2]

    def test_next_is_round_robin(self, live: dt.LiveSystem) -> None:
        seen = [live.echo.next.index().result(PATIENCE_S) for _ in range(6)]
        assert sorted(seen[:3]) == [0, 1, 2]
        assert seen[:3] == seen[3:]

    def test_one_is_the_least_loaded(self, live: dt.LiveSystem, tmp_path: Path) -> None:
        pids = live.echo.all.pid().result(PATIENCE_S)
        assert len(set(pids)) == 3
        seen = [live.echo.one.index() for _ in range(3)]
        assert sorted(future.result(PATIENCE_S) for future in seen) == [0, 1, 2]

    def test_shards_are_even_and_in_order(self, live: dt.LiveSystem) -> None:
        assert live.echo.shard(range(7)).part().result(PATIENCE_S) == [(0, [0, 1, 2]), (1, [3, 4]), (2, [5, 6])]

    def test_shards_may_be_dealt_in_turn_or_by_a_function(self, live: dt.LiveSystem) -> None:
        dealt = live.echo.shard(range(5), split="round_robin").part().result(PATIENCE_S)
        assert dealt == [(0, [0, 3]), (1, [1, 4]), (2, [2])]
        own = live.echo.shard(range(4), split=lambda items, count: [list(items), *([[]] * (count - 1))])
        assert own.part().result(PATIENCE_S) == [(0, [0, 1, 2, 3]), (1, []), (2, [])]

    def test_a_splitter_with_the_wrong_number_of_parts_is_refused(self, live: dt.LiveSystem) -> None:
        with pytest.raises(ValueError, match="3"):
            live.echo.shard(range(4), split=lambda items, count: [list(items)]).part()

    def test_a_key_stays_with_its_instance(self, live: dt.LiveSystem) -> None:
        seen = {key: live.echo.keyed(key).index().result(PATIENCE_S) for key in ("user-7", "user-8", 9)}
        for key, index in seen.items():
            assert [live.echo.keyed(key).index().result(PATIENCE_S) for _ in range(3)] == [index] * 3

    def test_many_keys_use_all_instances(self, live: dt.LiveSystem) -> None:
        calls = [live.echo.keyed(f"user-{number}").index() for number in range(60)]
        assert {call.result(PATIENCE_S) for call in calls} == {0, 1, 2}

    def test_a_map_is_in_the_order_of_its_input(self, live: dt.LiveSystem) -> None:
        assert list(live.echo.map("echo", range(50), window=8)) == [(number,) for number in range(50)]

    def test_a_map_reads_no_more_than_its_window_ahead(self, live: dt.LiveSystem) -> None:
        read = []

        def numbers() -> Iterator[int]:
            for number in range(100):
                read.append(number)
                yield number

        results = live.echo.map("echo", numbers(), window=5)
        assert next(results) == (0,)
        assert len(read) <= 6

    def test_calls_of_one_caller_to_one_instance_arrive_in_order(self, live: dt.LiveSystem) -> None:
        for number in range(200):
            live.pool.one.record(number)
        assert live.pool.one.recorded().result(PATIENCE_S) == list(range(200))

    def test_calls_are_awaited(self, live: dt.LiveSystem) -> None:
        async def ask() -> tuple[Any, ...]:
            one = await live.echo.one.echo_async("one")
            every = await live.echo.all.index()
            at_once = await asyncio.gather(*(live.echo.next.echo(number) for number in range(20)))
            return one, every, at_once

        assert asyncio.run(ask()) == (("one",), [0, 1, 2], [(number,) for number in range(20)])

    def test_a_callback_gets_the_future(self, live: dt.LiveSystem) -> None:
        received: list[Any] = []
        future = live.echo.one.echo("x")
        future.add_done_callback(lambda done: received.append(done.result()))
        until(lambda: received == [("x",)], "the callback has been called")

    def test_a_callback_may_call(self, live: dt.LiveSystem) -> None:
        received: list[Any] = []
        live.echo.one.echo("x").add_done_callback(
            lambda done: received.append(live.echo.one.echo(*done.result(), "y").result(PATIENCE_S))
        )
        until(lambda: received == [("x", "y")], "the callback has called")

    def test_large_arguments_and_results_arrive(self, live: dt.LiveSystem) -> None:
        assert live.echo.one.size(bytes(LARGE_BYTES)).result(4 * PATIENCE_S) == LARGE_BYTES
        assert len(live.echo.one.zeros(LARGE_BYTES).result(4 * PATIENCE_S)) == LARGE_BYTES
        assert live.asker.one.ask("echo", "size", bytes(LARGE_BYTES)).result(4 * PATIENCE_S) == LARGE_BYTES

    # Mistakes and exceptions

    def test_a_typo_fails_at_the_caller(self, live: dt.LiveSystem) -> None:
        with pytest.raises(AttributeError, match="did you mean 'echo'"):
            live.echo.one.ecko(1)
        with pytest.raises(AttributeError, match="did you mean 'echo'"):
            live.echo.all.ecko(1)
        with pytest.raises(AttributeError, match="did you mean 'echo'"):
            live.echo.map("ecko", [1])

    @pytest.mark.parametrize("method", ["fail", "fail_async"])
    def test_an_exception_arrives_with_type_traceback_and_instance(self, live: dt.LiveSystem, method: str) -> None:
        future = getattr(live.echo[1], method)("broken pole")
        with pytest.raises(OddError, match="broken pole") as raised:
            future.result(PATIENCE_S)
        notes = "\n".join(raised.value.__notes__)
        assert "echo[1]" in notes
        assert "raise OddError(text)" in notes
        assert isinstance(future.exception(), OddError)

    def test_wrong_arguments_are_a_type_error(self, live: dt.LiveSystem) -> None:
        with pytest.raises(TypeError, match="size"):
            live.echo.one.size().result(PATIENCE_S)

    def test_an_exception_of_one_instance_fails_a_broadcast(self, live: dt.LiveSystem) -> None:
        with pytest.raises(OddError):
            live.echo.all.fail("all of them").result(PATIENCE_S)

    def test_an_exception_ends_a_map_at_its_item(self, live: dt.LiveSystem) -> None:
        results = live.echo.map("fail", ["a", "b"], window=2)
        with pytest.raises(OddError, match="a"):
            next(results)

    def test_an_argument_that_cannot_be_sent_fails_at_the_caller(self, live: dt.LiveSystem) -> None:
        import threading

        with pytest.raises((TypeError, dt.DovetailError), match="lock"):
            live.echo.one.echo(threading.Lock()).result(PATIENCE_S)
        assert live.echo.one.echo(1).result(PATIENCE_S) == (1,)

    # Cancellation and deadlines

    def test_a_call_that_has_not_begun_is_cancelled(self, live: dt.LiveSystem, tmp_path: Path) -> None:
        first = live.gate.one.hold(str(tmp_path / "first"))
        until((tmp_path / "first.begun").exists, "the first call is inside")
        second = live.gate.one.hold(str(tmp_path / "second"))
        assert second.cancel()
        with pytest.raises(CancelledError):
            second.result(PATIENCE_S)
        live.gate.one.health().result(PATIENCE_S)  # sent after the cancellation: the worker has received that, too
        (tmp_path / "first").touch()
        assert first.result(PATIENCE_S) == str(tmp_path / "first")
        begun, _ = live.gate.one.history().result(PATIENCE_S)
        assert str(tmp_path / "second") not in begun

    def test_an_async_method_is_cancelled_while_it_runs(self, live: dt.LiveSystem, tmp_path: Path) -> None:
        held = live.gates.one.hold_async(str(tmp_path / "held"))
        until((tmp_path / "held.begun").exists, "the call is inside")
        held.cancel()
        with pytest.raises(CancelledError):
            held.result(PATIENCE_S)
        until(
            lambda: str(tmp_path / "held") in live.gates.one.history().result(PATIENCE_S)[1],
            "the method has been cancelled",
        )

    def test_a_deadline_ends_a_call(self, live: dt.LiveSystem, tmp_path: Path) -> None:
        late = live.gates.options(deadline="200ms").one.hold_async(str(tmp_path / "late"))
        with pytest.raises(dt.CallTimeoutError):
            late.result(PATIENCE_S)
        (tmp_path / "late").touch()
        assert live.gates.one.health().result(PATIENCE_S) == "well"

    def test_a_timeout_of_the_caller_leaves_the_call_running(self, live: dt.LiveSystem, tmp_path: Path) -> None:
        held = live.gates.one.hold_async(str(tmp_path / "held"))
        with pytest.raises(TimeoutError):
            held.result(timeout=0.05)
        (tmp_path / "held").touch()
        assert held.result(PATIENCE_S) == str(tmp_path / "held")

    # Slots

    def test_one_slot_never_overlaps(self, live: dt.LiveSystem) -> None:
        calls = [live.single.one.enter() for _ in range(200 if LONG else 50)]
        assert {call.result(PATIENCE_S) for call in calls} == {1}

    def test_one_slot_of_an_async_method_never_overlaps(self, live: dt.LiveSystem) -> None:
        calls = [live.single.one.stay(0.002) for _ in range(20)]
        assert {call.result(PATIENCE_S) for call in calls} == {1}

    def test_a_hundred_slots_are_used_at_once(self, live: dt.LiveSystem) -> None:
        calls = [live.many.one.meet(100) for _ in range(100)]
        assert {call.result(PATIENCE_S) for call in calls} == {100}

    @pytest.mark.long
    def test_a_hundred_calls_of_50_ms_take_less_than_a_second(self, live: dt.LiveSystem) -> None:
        live.many.one.stay(0).result(PATIENCE_S)
        began = time.monotonic()
        for call in [live.many.one.stay(0.05) for _ in range(100)]:
            call.result(PATIENCE_S)
        assert time.monotonic() - began < 1

    def test_health_answers_while_the_only_slot_is_busy(self, live: dt.LiveSystem, tmp_path: Path) -> None:
        held = live.gate.one.hold(str(tmp_path / "held"))
        until((tmp_path / "held.begun").exists, "the call is inside")
        assert live.gate.one.health().result(PATIENCE_S) == "well"
        assert not held.done()
        (tmp_path / "held").touch()
        held.result(PATIENCE_S)

    # Colocation

    def test_roles_in_one_process_keep_their_own_state(self, live: dt.LiveSystem) -> None:
        """The name of one role is the prefix of the other's, and both have a method `size`."""
        pids = [handle.one.pid().result(PATIENCE_S) for handle in (live.pool, live.pool_size, live.inner)]
        assert len(set(pids)) == 1
        assert live.pool.one.given().result(PATIENCE_S) == (("pool",), {})
        assert live.pool_size.one.given().result(PATIENCE_S) == (("pool_size",), {})
        assert live.pool.one.size(b"123").result(PATIENCE_S) == 3

    @pytest.mark.parametrize("method", ["echo", "echo_async"])
    def test_methods_of_roles_in_one_process_are_sync_or_async(self, live: dt.LiveSystem, method: str) -> None:
        assert getattr(live.pool.one, method)(1).result(PATIENCE_S) == (1,)
        assert getattr(live.pool_size.one, method)(2).result(PATIENCE_S) == (2,)

    @pytest.mark.parametrize("method", ["ask", "ask_async"])
    def test_roles_in_one_process_call_each_other(self, live: dt.LiveSystem, method: str) -> None:
        assert getattr(live.inner.one, method)("pool", "echo", 1).result(PATIENCE_S) == (1,)
        assert getattr(live.inner.one, method)("pool_size", "echo_async", 2).result(PATIENCE_S) == (2,)

    def test_roles_on_one_node_are_processes_of_one_node(self, live: dt.LiveSystem) -> None:
        assert live.left.one.pid().result(PATIENCE_S) != live.right.one.pid().result(PATIENCE_S)
        nodes = {row["role"]: row["node"] for row in live.status().to_dict()["instances"]}
        assert nodes["left"] == nodes["right"]

    # Calls between roles

    @pytest.mark.parametrize("method", ["ask", "ask_async"])
    def test_a_role_calls_another(self, live: dt.LiveSystem, method: str) -> None:
        assert getattr(live.asker.one, method)("echo", "echo", 1, 2).result(PATIENCE_S) == (1, 2)
        assert getattr(live.asker.one, method)("echo", "echo_async", 3).result(PATIENCE_S) == (3,)

    def test_a_role_calls_all_instances_or_one_of_them(self, live: dt.LiveSystem) -> None:
        assert live.asker.one.ask_all("echo", "index").result(PATIENCE_S) == [0, 1, 2]
        assert live.asker.one.ask_index("echo", 2, "index").result(PATIENCE_S) == 2

    def test_exceptions_and_typos_reach_the_calling_role(self, live: dt.LiveSystem) -> None:
        with pytest.raises(OddError, match="inner trouble"):
            live.asker.one.ask("echo", "fail", "inner trouble").result(PATIENCE_S)
        with pytest.raises(AttributeError, match="did you mean 'echo'"):
            live.asker.one.ask("echo", "ecko").result(PATIENCE_S)

    def test_roles_call_each_other_in_both_directions_at_once(self, live: dt.LiveSystem) -> None:
        rounds = 100 if LONG else 20
        calls = [
            handle.one.ask(other, "index")
            for _ in range(rounds)
            for handle, other in ((live.left, "right"), (live.right, "left"))
        ]
        assert [call.result(PATIENCE_S) for call in calls] == [0] * (2 * rounds)

    @pytest.mark.parametrize("first", ["ask", "ask_async"])
    @pytest.mark.parametrize("second", ["ask", "ask_async"])
    def test_calls_that_wait_for_each_other_fail_and_name_the_cycle(
        self, live: dt.LiveSystem, first: str, second: str
    ) -> None:
        """Every slot of both roles is taken by a call that waits for the other role."""
        asked = getattr(live.ring_a.one, first)("ring_b", second, "ring_a", "index")
        error = asked.exception(PATIENCE_S)
        assert isinstance(error, dt.CallCycleError)
        assert "ring_a" in str(error)
        assert "ring_b" in str(error)
        assert live.ring_a.one.index().result(PATIENCE_S) == 0

    def test_a_call_that_is_awaited_for_long_is_no_cycle(self, live: dt.LiveSystem) -> None:
        """Both roles have one slot; the one that is called is at work, then it calls a third one."""
        assert live.ring_a.one.ask_async("ring_b", "linger", SEVERAL_CHECKS_S).result(PATIENCE_S) == 0
        asked = live.ring_a.one.ask_async("ring_b", "ask_async", "left", "linger", SEVERAL_CHECKS_S)
        assert asked.result(PATIENCE_S) == 0

    # Gangs

    def test_every_rank_of_a_gang_is_called(self, live: dt.LiveSystem) -> None:
        assert live.gang[0].ranks.rank().result(PATIENCE_S) == [0, 1]
        assert live.gang[0].rank(1).rank().result(PATIENCE_S) == 1
        assert live.gang.one.rank().result(PATIENCE_S) == 0

    def test_ranks_have_the_variables_of_torch(self, live: dt.LiveSystem) -> None:
        first, second = live.gang[0].ranks.environment().result(PATIENCE_S)
        assert (first[:3], second[:3]) == (("0", "2", "0"), ("1", "2", "1"))
        assert first[3:] == second[3:]
        assert first[4].isdigit()

    @pytest.mark.long
    def test_a_gang_is_a_process_group_of_torch(self, launch: Any) -> None:
        with launch(dt.Role("gloo", GlooRank, ranks=2, resources=SMALL)) as live:
            assert live.gloo[0].ranks.sum_over_ranks(1.0).result(PATIENCE_S) == [1002.0, 1002.0]

    # Status

    def test_the_status_lists_every_instance(self, live: dt.LiveSystem) -> None:
        status = live.status()
        rows = status.to_dict()["instances"]
        assert len([row for row in rows if row["role"] == "echo"]) == 3
        assert {row["state"] for row in rows} == {"ready"}
        assert {row["incarnation"] for row in rows} == {1}
        assert "echo[2]" in str(status) or "echo" in str(status)
