"""Live systems on the local engine, with workers in threads where no process is the point."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.actors import heartbeat_monitor
from dovetail.observe.control_socket import send_request
from dovetail.observe.run_header import run_kind
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = dt.Resources(cpus=0.05)
CLUSTER = "1x(4cpu, 8GB)"

pytestmark = pytest.mark.usefixtures("by_value")


class Counter:
    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value, self.step = start, step

    def setup(self, worker: Any) -> None:
        self.worker = worker

    def add(self, amount: int = 1) -> int:
        self.value += amount * self.step
        return self.value

    def load(self) -> int:
        return self.value

    def index(self) -> int:
        return int(self.worker.index)

    def incarnation(self) -> int:
        return int(self.worker.incarnation)

    def pid(self) -> int:
        return os.getpid()

    def part(self, items: list[int], more: int = 0) -> tuple[int, int]:
        return self.worker.index, sum(items) + more

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def wait_for(self, gate: str) -> str:
        until(Path(gate).exists)
        return gate

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @dt.idempotent
    def die_in_first_life(self) -> int:
        if self.worker.incarnation == 1:
            self.die()
        return int(self.worker.incarnation)


class Frail:
    def __init__(self, path: str) -> None:
        self.path = path

    def health(self) -> None:
        if Path(self.path).exists():
            raise OSError("too hot")


class AsyncSession:
    """Its methods use what its async setup made in the same event loop."""

    async def setup(self) -> None:
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()

    async def is_same_loop(self) -> bool:
        await asyncio.sleep(0)
        return asyncio.get_running_loop() is self.loop

    async def on_restart(self) -> None:
        self.restarted = True

    async def teardown(self) -> None:
        await asyncio.sleep(0)
        print("closed")  # noqa: T201 - its log

    def was_restarted(self) -> bool:
        return getattr(self, "restarted", False)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Unprepared:
    def __init__(self) -> None:
        raise OSError("no model in this folder")


class Asker:
    worker: Any

    def ask(self, role: str, method: str, *args: Any) -> Any:
        return getattr(self.worker.actors[role].one, method)(*args).result(PATIENCE_S)

    async def ask_async(self, role: str, method: str, *args: Any) -> Any:
        return await getattr(self.worker.actors[role].one, method)(*args)


class DefaultAsker(Asker):
    worker = None


class LastAsker(Asker):
    def teardown(self) -> None:
        print("counted", self.worker.actors.counter.one.add(100).result(PATIENCE_S))  # noqa: T201 - its log


def make_counter(start: int) -> Counter:
    return Counter(start)


def role(name: str, cls: Any = Counter, **more: Any) -> dt.Role:
    return dt.Role(name, cls, **({"resources": SMALL} | more))


def launch(*roles: dt.Role, **more: Any) -> dt.LiveSystem:
    settings: dict[str, Any] = {"cluster": CLUSTER, "deadline": PATIENCE_S} | more
    return dt.ActorSystem(roles, name="counts").launch(**settings)


@pytest.fixture
def live(in_process: None) -> Iterator[dt.LiveSystem]:
    with launch(role("counter", workers=3, args=(10,), kwargs={"step": 2}, slots=2), role("other")) as live:
        yield live


def test_instances_are_called_in_every_way(live: dt.LiveSystem) -> None:
    assert live.other.one.add(5).result(PATIENCE_S) == 5
    assert live["counter"][1].add().result(PATIENCE_S) == 12
    assert live.counter.all.index().result(PATIENCE_S) == [0, 1, 2]
    turns = [live.counter.next.index().result(PATIENCE_S) for _ in range(6)]
    assert turns == turns[:3] * 2
    assert sorted(turns[:3]) == [0, 1, 2]
    assert live.counter.shard([1, 2, 3, 4]).part(more=1).result(PATIENCE_S) == [(0, 4), (1, 4), (2, 5)]
    keys = {live.counter.keyed("user-7").index().result(PATIENCE_S) for _ in range(5)}
    assert len(keys) == 1
    assert list(live.other.map("add", [1, 1, 1], window=2)) == [6, 7, 8]


def test_calls_are_awaited(live: dt.LiveSystem) -> None:
    async def ask() -> tuple[Any, Any]:
        return await live.other.one.add(3), await live.counter.all.index()

    assert asyncio.run(ask()) == (3, [0, 1, 2])


def test_the_least_loaded_instance_gets_the_call(live: dt.LiveSystem, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    held = [live.counter[index].wait_for(str(gate)) for index in (0, 2)]
    try:
        assert {live.counter.one.index().result(PATIENCE_S) for _ in range(4)} == {1}
    finally:
        gate.touch()
    assert [future.result(PATIENCE_S) for future in held] == [str(gate)] * 2


def test_mistakes_fail_at_the_caller(live: dt.LiveSystem) -> None:
    with pytest.raises(AttributeError, match=r"role 'counter' has no method 'ad' \(did you mean 'add'\?\)"):
        live.counter.one.ad()
    with pytest.raises(AttributeError, match="did you mean 'counter'"):
        live.countr  # noqa: B018
    with pytest.raises(KeyError, match="did you mean 'counter'"):
        live["countr"]
    with pytest.raises(IndexError, match="has 3 instances"):
        live.counter[3]
    with pytest.raises(ValueError, match="is not marked"):
        live.counter.options(retries=1).one.add()
    with pytest.raises(ValueError, match="2 parts for 3 instances"):
        live.counter.shard([1], split=lambda _items, _n: [[], []]).part()
    with pytest.raises(IndexError, match="has 1 ranks"):
        live.counter[0].rank(1)


def test_an_exception_has_its_type_the_instance_and_the_remote_traceback(live: dt.LiveSystem) -> None:
    with pytest.raises(ValueError, match="odd") as raised:
        live.counter[2].fail("odd").result(PATIENCE_S)
    notes = "\n".join(raised.value.__notes__)
    assert "raised by counter[2], incarnation 1" in notes
    assert "raise ValueError(text)" in notes


def test_a_call_that_is_late_fails_at_its_deadline(live: dt.LiveSystem, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    late = live.other.options(deadline="50ms").one.wait_for(str(gate))
    with pytest.raises(dt.CallTimeoutError, match=r"other\[0\].wait_for\(\) was not answered before its deadline"):
        late.result(PATIENCE_S)
    assert isinstance(late.exception(), TimeoutError)
    gate.touch()
    assert live.other.one.index().result(PATIENCE_S) == 0


def test_a_function_may_make_the_object(in_process: None) -> None:
    with launch(role("counter", make_counter, args=(5,))) as live:
        assert live.counter.one.add().result(PATIENCE_S) == 6
        with pytest.raises(AttributeError, match="did you mean 'add'"):
            live.counter.one.ad().result(PATIENCE_S)


def test_roles_in_one_process_have_objects_of_their_own(in_process: None) -> None:
    with launch(role("counter", args=(1,), together="g"), role("count", args=(7,), together="g", workers=2)) as live:
        assert live.counter.one.add().result(PATIENCE_S) == 2
        assert live.count.all.add().result(PATIENCE_S) == [8, 8]
        assert live.count.all.index().result(PATIENCE_S) == [0, 1]
        assert len({row.worker for row in live.status().instances}) == 1


def test_a_class_may_declare_its_worker_as_none(in_process: None) -> None:
    with launch(role("asker", DefaultAsker), role("counter")) as live:
        assert live.asker.one.ask("counter", "add").result(PATIENCE_S) == 1


def test_a_role_is_scaled_and_the_handles_follow(in_process: None) -> None:
    with launch(role("counter", workers=(1, 3), scale=dt.Scale(1e9))) as live:
        live.scale(counter=3)
        assert live.counter.all.index().result(PATIENCE_S) == [0, 1, 2]
        live.scale(counter=1)
        assert live.counter.all.index().result(PATIENCE_S) == [0]
        with pytest.raises(dt.ConfigError, match="1 to 3 workers"):
            live.scale(counter=4)
        with pytest.raises(dt.ConfigError, match=r"no role 'countr' \(did you mean 'counter'\?\); roles: counter"):
            live.scale(countr=1)


@pytest.mark.parametrize("by", ["method", "other role", "function", "outstanding"])
def test_a_role_follows_its_signal(in_process: None, tmp_path: Path, by: str) -> None:
    gate = tmp_path / "gate"

    def one_outstanding(live: dt.LiveSystem) -> float:
        return 3.0 / live.counts()["counter"]

    signals = {"method": "load", "other role": "other.load", "function": one_outstanding, "outstanding": "outstanding"}
    signal: Any = signals[by]
    scale = dt.Scale(1.0, signal, interval="20ms", cooldown="100ms")
    with launch(role("counter", workers=(1, 3), scale=scale, slots=6), role("other", args=(3,))) as live:
        if by == "method":
            live.counter.one.add(3).result(PATIENCE_S)
        held = [live.counter.one.wait_for(str(gate)) for _ in range(3)] if by == "outstanding" else []
        until(lambda: live.counts()["counter"] == 3, "there are more instances")
        gate.touch()
        assert [one.result(PATIENCE_S) for one in held] == [str(gate)] * len(held)
    notes = [line for line in (live.folder / "events.jsonl").read_text().splitlines() if '"what":"scale"' in line]
    assert "target 1" in notes[0]


def test_a_signal_that_cannot_be_measured_is_reported_and_used_when_it_can(in_process: None, tmp_path: Path) -> None:
    path = tmp_path / "load"

    def load(live: dt.LiveSystem) -> float:
        return float(path.read_text())

    with launch(role("counter", workers=(1, 2), scale=dt.Scale(1.0, load, interval="20ms", cooldown="100ms"))) as live:
        until(lambda: live.status().warnings, "it is reported")
        (warning,) = live.status().warnings
        assert warning.startswith("counter is not scaled: its signal cannot be measured: FileNotFoundError")
        assert f"warning: {warning}" in str(live.status())
        path.write_text("5")
        until(lambda: live.counts()["counter"] == 2, "it is scaled")
        assert live.status().warnings == ()
    journal = (live.folder / "events.jsonl").read_text()
    assert journal.count("counter is not scaled: its signal cannot be measured") == 1
    assert "counter is scaled again" in journal


def test_a_signal_that_is_no_number_does_not_end_scaling(in_process: None) -> None:
    signals: list[Any] = ["three", None, [1], "4"]

    def signal(live: dt.LiveSystem) -> Any:
        return signals.pop() if signals else 5.0

    scale = dt.Scale(1.0, signal, interval="10ms", cooldown="50ms")
    with launch(role("counter", workers=(1, 2), scale=scale)) as live:
        until(lambda: live.counts()["counter"] == 2, "it is scaled")
    assert "a signal is a number, True or False, not" in (live.folder / "events.jsonl").read_text()


def test_the_status_counts_all_calls_without_waiting_for_a_heartbeat(
    in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_monitor, "HEARTBEAT_S", 1e9)
    with launch(role("counter", workers=3), role("other")) as live:
        for _ in range(5):
            live.other.one.add().result(PATIENCE_S)
        live.counter.all.add().result(PATIENCE_S)
        expected = [("counter", 1)] * 3 + [("other", 5)]
        until(lambda: [(row.role, row.calls) for row in live.status().instances] == expected, "all calls are counted")


def test_a_finished_system_has_the_calls_of_all_its_instances(
    in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_monitor, "CLOSE_TIMEOUT_S", PATIENCE_S)
    scaled = role("counter", workers=(1, 2), scale=dt.Scale(1e9))
    with launch(scaled, role("other"), run_dir=tmp_path / "run") as live:
        live.scale(counter=2)
        live.counter.all.add().result(PATIENCE_S)
        live.scale(counter=1)
        live.other.one.add().result(PATIENCE_S)
    progress = json.loads((tmp_path / "run" / "run.json").read_text())["progress"]
    assert (progress["finished"], progress["noun"]) == (3, "calls")


def test_the_status_shows_every_instance_and_what_it_does(live: dt.LiveSystem, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    held = live.counter[1].wait_for(str(gate))
    live.other.one.add().result(PATIENCE_S)

    def row(role: str, index: int) -> Any:
        return next(one for one in live.status().instances if (one.role, one.index) == (role, index))

    until(lambda: row("counter", 1).doing == "wait_for" and row("other", 0).calls == 1, "the status shows the call")
    assert row("counter", 1).outstanding == 1
    assert row("counter", 1).node == "node-0"
    assert live.status().state == "ready"
    assert "counter[1]" in str(live.status())
    gate.touch()
    held.result(PATIENCE_S)


def test_an_instance_whose_health_is_bad_is_degraded(
    in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_monitor, "HEARTBEAT_S", 0.05)
    patient = dt.Health(period="50ms", failure_threshold=1_000_000)
    with launch(role("frail", Frail, args=(str(tmp_path / "ill"),), health=patient), role("counter")) as live:
        (tmp_path / "ill").touch()
        until(lambda: live.status().instances[0].state == "degraded", "it is degraded")
        assert live.status().instances[0].reason == "health: OSError: too hot"
        assert live.status().state == "degraded"
        assert live.status().instances[1].state == "ready"
        (tmp_path / "ill").unlink()
        until(lambda: live.status().state == "ready", "it has recovered")


def test_an_instance_that_stays_unhealthy_is_restarted(
    in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_monitor, "HEARTBEAT_S", 0.05)
    frail = role("frail", Frail, args=(str(tmp_path / "ill"),), health=dt.Health(period="50ms", failure_threshold=2))
    with launch(replace(frail, restart=dt.Restart(limit=1_000_000, backoff="10ms"))) as live:
        (tmp_path / "ill").touch()
        until(lambda: live.status().instances[0].restarts > 0, "it is restarted")
        (tmp_path / "ill").unlink()
        until(lambda: live.status().state == "ready", "it has recovered")
        assert live.status().instances[0].incarnation > 1
    journal = (live.folder / "events.jsonl").read_text()
    assert "frail[0] is degraded: health: OSError: too hot" in journal
    assert "frail[0] died: not healthy: health: OSError: too hot; 2 health checks in succession failed" in journal


def test_the_control_socket_answers_with_the_status_and_scales(in_process: None) -> None:
    with launch(role("counter", workers=(1, 3), scale=dt.Scale(1e9))) as live:
        found = send_request(live.folder, "status")["status"]
        assert [(row["role"], row["state"]) for row in found["instances"]] == [("counter", "ready")]
        send_request(live.folder, "scale", workers={"counter": 2})
        assert live.counts() == {"counter": 2}
        with pytest.raises(dt.DovetailError, match=r"(?s)DT524.*1 to 3 workers"):
            send_request(live.folder, "scale", workers={"counter": 9})


def test_a_system_is_a_run_with_a_folder(live: dt.LiveSystem) -> None:
    header = json.loads((live.folder / "run.json").read_text())
    assert run_kind(header) == "actors"
    assert (header["name"], header["status"]) == ("counts", "running")
    live.stop()
    header = json.loads((live.folder / "run.json").read_text())
    assert header["status"] == "finished"


def test_a_setup_that_fails_ends_the_launch(in_process: None) -> None:
    expected = r"(?s)DT522.*counts did not start: bad\[0\].*no model.*in the setup of bad\[0\].*dovetail logs"
    with pytest.raises(dt.RunError, match=expected):
        launch(role("counter"), role("bad", Unprepared))


def test_mistakes_in_the_code_of_roles_are_reported_before_anything_starts(tmp_path: Path) -> None:
    roles = [role("bad", args=(1, 2, 3)), role("other", workers=(1, 2), scale=dt.Scale(1, "laod"))]
    with pytest.raises(dt.ConfigError, match=r"(?s)'bad': Counter\(\) cannot be called.*'laod'.*did you mean 'load'"):
        launch(*roles, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_durations_are_checked(live: dt.LiveSystem) -> None:
    with pytest.raises(dt.ConfigError, match=r'(?s)deadline=-1 is not above 0.*deadline="60s"'):
        launch(role("counter"), deadline=-1)
    with pytest.raises(dt.ConfigError, match="deadline='soon' is not a time"):
        live.counter.options(deadline="soon")
    with pytest.raises(dt.ConfigError, match="deadline=0 is not above 0"):
        live.stop(deadline=0)
    assert live.counter.one.index().result(PATIENCE_S) in (0, 1, 2)


def test_a_system_that_does_not_fit_is_refused_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(dt.InfeasibleError, match=r"'large'.*99 CPUs"):
        launch(role("counter"), role("large", resources=dt.Resources(cpus=99)))
    assert time.monotonic() - began < PATIENCE_S


def test_a_system_waits_for_others_until_its_deadline_and_names_its_roles(in_process: None) -> None:
    most = dt.Resources(cpus=3)
    with launch(role("counter", resources=most)):
        with pytest.raises(dt.InfeasibleError, match=r"(?s)hold too much.*second: 1 x \(3 CPUs\)"):
            launch(role("second", resources=most), wait=False)
        with pytest.raises(dt.InfeasibleError, match="hold too much"):
            launch(role("second", resources=most), deadline="300ms")


def test_a_fragmented_cluster_is_named_as_the_reason(in_process: None) -> None:
    """Once by the plan of the system, once by what another system uses."""
    filler = role("filler", workers=3, spread=True, resources=dt.Resources(cpus=3))
    large = role("large", resources=dt.Resources(cpus=2))
    with pytest.raises(dt.InfeasibleError, match=r"(?s)'large'.*3 CPUs are free, but as 1 \+ 1 \+ 1"):
        launch(filler, large, cluster="3x(4cpu, 8GB)")
    with (
        launch(filler, cluster="3x(4cpu, 8GB)"),
        pytest.raises(
            dt.InfeasibleError, match=r"(?s)3 CPUs are not in use, but as 1 \+ 1 \+ 1.*large: 1 x \(2 CPUs\)"
        ),
    ):
        launch(large, cluster="3x(4cpu, 8GB)", wait=False)


def test_calls_after_a_stop_are_refused(in_process: None) -> None:
    live = launch(role("counter"))
    live.stop()
    with pytest.raises(dt.ActorLostError, match="is stopped"):
        live.counter.one.add().result(PATIENCE_S)


# --- real processes


def test_roles_call_each_other_also_in_a_teardown(tmp_path: Path) -> None:
    with launch(role("asker", LastAsker, after=["counter"]), role("counter"), run_dir=tmp_path / "run") as live:
        assert live.asker.one.ask("counter", "add", 3).result(PATIENCE_S) == 3
    assert any("counted 103" in log.read_text() for log in (tmp_path / "run" / "logs").iterdir())


@pytest.mark.parametrize("together", [None, "train"])
def test_roles_that_wait_for_each_other_fail_and_are_named(together: str | None) -> None:
    with launch(
        role("trainer", Asker, together=together), role("pool", Asker, together=together), role("counter")
    ) as live:
        for ask in ("ask", "ask_async"):
            with pytest.raises(dt.CallCycleError, match=r"pool\[0\] -> trainer\[0\] -> pool\[0\]"):
                getattr(live.trainer.one, ask)("pool", ask, "trainer", ask, "counter", "add").result(PATIENCE_S)
            assert getattr(live.trainer.one, ask)("pool", ask, "counter", "add").result(PATIENCE_S) in (1, 2)


def test_a_killed_instance_is_restarted_and_calls_wait_for_it() -> None:
    quick = dt.Restart(backoff="10ms", limit=100)
    with launch(role("counter", workers=2, restart=quick), role("asker", Asker)) as live:
        other = live.counter[1].pid().result(PATIENCE_S)
        with pytest.raises(dt.ActorLostError, match=r"counter\[0\], incarnation 1, died during the call: die\(\)"):
            live.counter[0].die().result(PATIENCE_S)
        until(lambda: live.status().instances[0].incarnation == 2, "it is started again")
        assert live.counter[0].incarnation().result(PATIENCE_S) == 2
        assert live.counter[1].pid().result(PATIENCE_S) == other
        again = live.counter.options(retries=1)[1].die_in_first_life().result(PATIENCE_S)
        assert again == 2
        assert live.asker.one.ask("counter", "incarnation").result(PATIENCE_S) == 2
        assert live.status().instances[0].restarts == 1
    assert "counter[0] died" in (live.folder / "events.jsonl").read_text()


def test_setup_teardown_and_on_restart_may_be_async(tmp_path: Path) -> None:
    session = role("session", AsyncSession, restart=dt.Restart(backoff="10ms"))
    with launch(session, run_dir=tmp_path / "run") as live:
        assert live.session.one.is_same_loop().result(PATIENCE_S)
        assert not live.session.one.was_restarted().result(PATIENCE_S)
        with pytest.raises(dt.ActorLostError):
            live.session.one.die().result(PATIENCE_S)
        until(lambda: live.status().instances[0].incarnation == 2, "it is started again")
        assert live.session.one.was_restarted().result(PATIENCE_S)
    assert any("closed" in log.read_text() for log in (tmp_path / "run" / "logs").iterdir())


def test_the_death_of_an_instance_may_end_the_system(tmp_path: Path) -> None:
    live = launch(role("counter", restart="fail"), role("other"), run_dir=tmp_path / "run")
    with pytest.raises(dt.ActorLostError):
        live.counter.one.die().result(PATIENCE_S)
    with pytest.raises(dt.RunError, match=r"DT523.*counts failed: counter\[0\] died"):
        live.wait(PATIENCE_S)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
