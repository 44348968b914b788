"""Routing of calls, with an engine whose futures the tests complete."""

from __future__ import annotations

import pickle
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.actors.call_router import ActorCallRouter
from dovetail.actors.handles import RoleHandle
from dovetail.actors.instance_directory import Directory, InstanceAddress, InstanceState, RoleEntry, RoleMethods
from dovetail.control.engine import CallNotSentError, DeadlineExceededError, WorkerLostError
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from dovetail.control.engine import CallOptions

METHODS = RoleMethods(frozenset({"act", "read"}), frozenset({"read"}))


class FakeEngine:
    """Records calls; `gone` workers refuse them."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, tuple[Any, ...], CallOptions, Future[Any]]] = []
        self.gone: set[int] = set()

    def call(
        self, options: CallOptions, worker: int, hosted: str, method: str, /, *args: Any, **_named: Any
    ) -> Future[Any]:
        assert hosted == "a"
        future: Future[Any] = Future()
        if worker in self.gone:
            future.set_exception(CallNotSentError(f"worker {worker} is gone"))
        else:
            self.sent.append((worker, method, args, options, future))
        return future

    @property
    def targets(self) -> list[tuple[int, Any]]:
        return [(worker, args[0]) for worker, _, args, _, _ in self.sent]


def directory(version: int, *workers: int | str | None) -> Directory:
    """A number is a worker, None an instance that waits for its restart, a text the state of one without calls."""
    found = []
    for number, worker in enumerate(workers):
        if isinstance(worker, str):
            found.append(InstanceAddress(InstanceState(worker), None, "a", 1, "for a reason"))
        else:
            state = InstanceState.STARTING if worker is None else InstanceState.READY
            found.append(InstanceAddress(state, worker, "a", number + 1))
    return Directory(version, {"a": RoleEntry(tuple(found), METHODS)})


class Scene:
    def __init__(self, *workers: int | str | None, sends_deadlines: bool = True) -> None:
        self.engine = FakeEngine()
        self.version = 1
        self.router = ActorCallRouter(self.engine.call, directory(1, *workers), sends_deadlines=sends_deadlines)
        self.handle = RoleHandle(self.router, "a")

    def update(self, *workers: int | str | None) -> None:
        self.version += 1
        self.router.update(directory(self.version, *workers))


def test_calls_wait_for_a_restart_and_are_sent_in_their_order() -> None:
    scene = Scene(None)
    futures = [scene.handle[0].act(number) for number in range(3)]
    assert scene.engine.sent == []
    assert scene.router.outstanding("a", 0) == 3
    scene.update(7)
    scene.handle[0].act(3)
    assert scene.engine.targets == [(7, 0), (7, 1), (7, 2), (7, 3)]
    for _, _, args, _, future in scene.engine.sent:
        future.set_result(args[0] * 10)
    assert [future.result(0) for future in futures] == [0, 10, 20]
    assert scene.router.outstanding("a", 0) == 0


def test_a_call_that_was_not_sent_waits_for_the_next_incarnation() -> None:
    scene = Scene(7)
    scene.engine.gone = {7}
    future = scene.handle[0].act("x")
    assert not future.done()
    scene.update(None)
    scene.update(8)
    assert scene.engine.targets == [(8, "x")]


def test_a_call_that_was_not_sent_goes_to_another_instance_if_it_may() -> None:
    scene = Scene(7, 8, 9)
    scene.engine.gone = {7, 8}
    for number in range(3):
        scene.handle.one.act(number)
    assert [worker for worker, _ in scene.engine.targets] == [9, 9, 9]


def test_without_any_instance_calls_wait_and_do_not_go_in_circles() -> None:
    scene = Scene(7, 8)
    scene.engine.gone = {7, 8}
    future = scene.handle.one.act("x")
    assert not future.done()
    scene.update(17, 18)
    assert [args for _, args in scene.engine.targets] == ["x"]


def test_a_call_whose_instance_dies_fails_and_is_not_repeated() -> None:
    scene = Scene(7)
    future = scene.handle[0].act("x")
    scene.engine.sent[0][-1].set_exception(WorkerLostError("gone"))
    with pytest.raises(dt.ActorLostError, match=r"a\[0\], incarnation 1, died during the call: act\(\)"):
        future.result(0)
    scene.update(8)
    assert len(scene.engine.sent) == 1


def test_an_idempotent_call_is_repeated_as_often_as_it_may() -> None:
    scene = Scene(7)
    future = scene.handle.options(retries=2)[0].read("x")
    for worker in (8, 9):
        scene.engine.sent[-1][-1].set_exception(WorkerLostError("gone"))
        assert not future.done()
        scene.update(worker)
        assert scene.engine.targets[-1] == (worker, "x")
    scene.engine.sent[-1][-1].set_exception(WorkerLostError("gone"))
    with pytest.raises(dt.ActorLostError):
        future.result(0)


def test_an_idempotent_call_is_repeated_on_another_instance() -> None:
    scene = Scene(7, 8)
    future = scene.handle.options(retries=1).one.read("x")
    scene.engine.gone = {scene.engine.sent[0][0]}
    scene.engine.sent[0][-1].set_exception(WorkerLostError("gone"))
    assert {worker for worker, _ in scene.engine.targets} == {7, 8}
    scene.engine.sent[1][-1].set_result("found")
    assert future.result(0) == "found"


def test_the_late_result_of_an_earlier_incarnation_is_refused() -> None:
    scene = Scene(7)
    early = scene.handle.options(retries=1)[0].read("x")
    first = scene.engine.sent[0][-1]
    first.set_exception(WorkerLostError("gone"))
    scene.update(8)
    scene.engine.sent[1][-1].set_result("of incarnation 2")
    assert early.result(0) == "of incarnation 2"


@pytest.mark.parametrize("state", ["dead", "draining"])
def test_calls_to_an_instance_that_takes_none_fail_with_the_reason(state: str) -> None:
    scene = Scene(state, 8)
    with pytest.raises(dt.ActorLostError, match=rf"a\[0\].*is {state} \(for a reason\)"):
        scene.handle[0].act("x").result(0)
    for _ in range(3):
        scene.handle.one.act("x")
        scene.handle.next.act("x")
    assert {worker for worker, _ in scene.engine.targets} == {8}


def test_waiting_calls_fail_or_move_when_their_instance_dies() -> None:
    scene = Scene(None, None)
    own, any_of_them = scene.handle[0].act("own"), scene.handle.one.act("any")
    other = scene.handle.one.act("other")
    scene.update("dead", 8)
    with pytest.raises(dt.ActorLostError):
        own.result(0)
    assert sorted(args for _, args in scene.engine.targets) == ["any", "other"]
    assert not any_of_them.done()
    assert not other.done()


def test_the_deadline_is_passed_to_the_engine_and_its_error_is_named() -> None:
    scene = Scene(7)
    future = scene.handle.options(deadline="5s")[0].act("x")
    deadline_s = scene.engine.sent[0][3].deadline_s
    assert deadline_s is not None
    assert 0 < deadline_s <= 5
    scene.engine.sent[0][-1].set_exception(DeadlineExceededError())
    with pytest.raises(dt.CallTimeoutError, match=r"a\[0\].act\(\) was not answered before its deadline"):
        future.result(0)


def test_a_deadline_ends_a_call_that_waits_for_its_instance() -> None:
    scene = Scene(None, sends_deadlines=False)
    with pytest.raises(dt.CallTimeoutError):
        scene.handle.options(deadline="10ms")[0].act("x").result(PATIENCE_S)
    scene.update(8)
    assert scene.engine.targets == []


def test_a_deadline_cancels_a_call_that_was_sent() -> None:
    scene = Scene(7, sends_deadlines=False)
    for deadline in ("10ms", "1s", "10s"):  # on a busy machine it may pass before the call is sent
        with pytest.raises(dt.CallTimeoutError):
            scene.handle.options(deadline=deadline)[0].act("x").result(PATIENCE_S)
        if scene.engine.sent:
            break
    until(scene.engine.sent[0][-1].cancelled, "the call is cancelled at the engine")
    scene.update(8)
    assert scene.engine.targets == [(7, "x")]


def test_a_cancelled_call_is_cancelled_at_the_engine_or_never_sent() -> None:
    scene = Scene(7, None)
    sent, waiting = scene.handle[0].act("x"), scene.handle[1].act("y")
    assert sent.cancel()
    assert waiting.cancel()
    assert scene.engine.sent[0][-1].cancelled()
    scene.update(7, 8)
    assert scene.engine.targets == [(7, "x")]
    with pytest.raises(CancelledError):
        waiting.result(0)


def test_a_closed_router_refuses_calls_and_ends_those_that_wait() -> None:
    scene = Scene(None)
    waiting = scene.handle[0].act("x")
    scene.router.close("is stopped")
    for future in (waiting, scene.handle[0].act("y")):
        with pytest.raises(dt.ActorLostError, match="is stopped"):
            future.result(0)


def test_errors_survive_pickling() -> None:
    scene = Scene("dead")
    error = scene.handle[0].act("x").exception(0)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_key_keeps_its_instance_when_others_are_added() -> None:
    scene = Scene(*range(1, 9))
    keys = [f"user-{number}" for number in range(100)]
    for key in keys:
        scene.handle.keyed(key).act(key)
    before = {key: worker for worker, key in scene.engine.targets}
    scene.engine.sent.clear()
    scene.update(*range(1, 10))
    for key in keys:
        scene.handle.keyed(key).act(key)
    after = {key: worker for worker, key in scene.engine.targets}
    assert len(set(before.values())) == 8
    assert {after[key] for key in keys if after[key] != before[key]} <= {9}
