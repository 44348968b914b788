"""`dt.serve`: every request gets its own result promptly, failures stay with their request, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import dovetail as dt
from dovetail.data.request_queue import ItemFailed, RequestFuture, ServiceClosed, TooManyRequests
from dovetail.observe.control_socket import send_request
from dovetail.runtime.run_handle import _ACTIVE_RUNS
from dovetail.runtime.service import Service, serve
from runtime.aids import CLUSTER, Script, is_there
from stage_functions import same
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MAX_WAIT_S = 0.02


@contextmanager
def serving(*stages: dt.Stage, **settings: Any) -> Iterator[Service]:
    """A service that is gone at the end, whatever the test did."""
    service = serve(dt.Pipeline(list(stages)), **({"cluster": CLUSTER} | settings))
    try:
        yield service
    finally:
        service.cancel("its test is over")
        assert service._over.wait(PATIENCE_S), "a service hangs"
        assert service not in _ACTIVE_RUNS


def pids_of(service: Service) -> list[int]:
    return [pid for _, pids in service._engine.processes().values() for pid in pids]


def busy_pids_of(service: Service) -> list[int]:
    """Process ids of workers that are in a call of the user's code."""
    engine: Any = service._engine
    return [pid for worker, (_, pids) in engine.processes().items() if engine.running(worker) for pid in pids]


def answer(ticket: RequestFuture) -> Any:
    return ticket.result(PATIENCE_S)


def failure(ticket: RequestFuture) -> BaseException:
    error = ticket.exception(PATIENCE_S)
    assert error is not None
    return error


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def odd_only(item: int) -> int | None:
    return item if item % 2 else None


def copies(item: int) -> Iterator[tuple[int, int]]:
    return iter([(item, number) for number in range(item)])


# What a ticket gives


@pytest.mark.processes
def test_every_request_gets_its_own_result() -> None:
    with serving(dt.Stage("double", double, batch_size=8), dt.Stage("again", double, fuse=False)) as service:
        tickets = [service.submit(number) for number in range(100)]
        assert [answer(ticket) for ticket in tickets] == [4 * number for number in range(100)]
        until(lambda: service.pending == 0, "answered requests are not counted")
        assert list(service.map(range(300), in_flight=7)) == [4 * number for number in range(300)]


def test_what_was_dropped_is_none_and_many_gives_all_in_order() -> None:
    with serving(dt.Stage("odd", dt.each(odd_only)), dt.Stage("copies", dt.each(copies), fuse=False)) as service:
        tickets = {number: service.submit(number, many=True) for number in range(6)}
        dropped, single, several = service.submit(2), service.submit(1), service.submit(3)
        wanted = {number: [(number, n) for n in range(number)] if number % 2 else [] for number in range(6)}
        assert {number: answer(ticket) for number, ticket in tickets.items()} == wanted
        assert answer(dropped) is None
        assert answer(single) == (1, 0)
        error = failure(several)
        assert isinstance(error, ItemFailed)
        assert error.codes == ("DT379",)


def test_a_ticket_has_the_results_of_all_leaves_and_ways() -> None:
    stages = [
        dt.Stage("in", double),
        dt.Stage("left", lambda items: [("left", item) for item in items], after=["in"]),
        dt.Stage("right", lambda items: [("right", item) for item in items], after=["in"]),
        dt.Stage("both", lambda items: items, after=["left", "right"]),
        dt.Stage("odd", dt.each(odd_only), after=["in"]),
    ]
    with serving(*stages, cluster="1x(5cpu, 4GB)") as service:
        assert sorted(answer(service.submit(5, many=True))) == [("left", 10), ("right", 10)]
        assert failure(service.submit(5)).codes == ("DT379",)  # type: ignore[attr-defined]


def evens_only(items: list[int]) -> list[int]:
    return [item for item in items if item % 2 == 0]


def test_a_batch_whose_length_changes_is_run_again_item_by_item() -> None:
    with serving(dt.Stage("evens", evens_only, batch_size=4, workers=1)) as service:
        found = [answer(ticket) for ticket in [service.submit(number) for number in range(10)]]
    assert found == [0, None, 2, None, 4, None, 6, None, 8, None]


class Model:
    """A class with every optional method of a worker class."""

    def setup(self, worker: Any) -> None:
        self.stage = worker.stage

    def __call__(self, items: list[int]) -> Iterator[tuple[str, int]]:
        return iter([(self.stage, item) for item in items])


class AsyncModel:
    async def setup(self) -> None:
        await asyncio.sleep(0)
        self.ready = True

    async def __call__(self, items: list[int]) -> list[bool]:
        await asyncio.sleep(0.001)
        return [self.ready for _ in items]


async def awaited(items: list[int]) -> AsyncIterator[int]:
    for item in items:
        yield item + 1


@pytest.mark.parametrize(
    ("run", "result"),
    [(Model, ("stage", 7)), (AsyncModel, True), (awaited, 8), ("operator:index", None), ("copy:copy", 7)],
)
def test_batches_of_classes_coroutines_and_names_are_paired_too(run: Any, result: Any) -> None:
    with serving(dt.Stage("stage", run, batch_size=4)) as service:
        tickets = [service.submit(7) for _ in range(9)]
        if result is None:
            assert isinstance(failure(tickets[0]), ItemFailed)
        else:
            assert [answer(ticket) for ticket in tickets] == [result] * 9


def test_asyncio() -> None:
    async def ask(service: Service) -> list[Any]:
        return list(await asyncio.gather(*[service.ask(number) for number in range(50)]))

    with serving(dt.Stage("double", double, batch_size=4), max_pending=8) as service:
        assert asyncio.run(ask(service)) == [2 * number for number in range(50)]


# Waiting


def test_a_batch_that_is_not_full_goes_after_the_longest_wait() -> None:
    """One request at a time and batches of eight: each would wait for seven others that never come."""
    with serving(dt.Stage("double", double, batch_size=8), max_wait=MAX_WAIT_S) as service:
        answer(service.submit(0))
        took = []
        for number in range(100 if LONG else 20):
            time.sleep(0.1 if LONG else 0.02)
            began = time.perf_counter()
            assert answer(service.submit(number)) == 2 * number
            took.append(time.perf_counter() - began)
    took.sort()
    assert took[0] > MAX_WAIT_S / 2, "it did wait for others"
    # on a machine that is busy with other tests it takes longer, but not as long as an epoch grows old: 0.5 s
    assert took[len(took) // 2] < MAX_WAIT_S + (0.02 if LONG else 0.2)
    if LONG:
        assert took[int(0.99 * len(took)) - 1] < MAX_WAIT_S + 0.02


def slow_batch(items: list[int]) -> list[int]:
    time.sleep(0.02)
    return [len(items)] * len(items)


@pytest.mark.parametrize("before", [(), (dt.Stage("before", double, fuse=False),)], ids=["alone", "behind another"])
def test_batches_grow_with_the_load(before: tuple[dt.Stage, ...]) -> None:
    with serving(*before, dt.Stage("slow", slow_batch, batch_size=16, workers=1), max_wait="5ms") as service:
        alone = [answer(service.submit(0)) for _ in range(10)]
        together = list(service.map(range(1600), in_flight=64))
    assert set(alone) == {1}
    sizes = together[len(together) // 4 :]
    calls = sum(1 / size for size in sizes)
    assert len(sizes) / calls > 12, "sixteen fit into a batch, and 64 requests are always pending"


def test_a_dropped_item_is_reported_promptly() -> None:
    with serving(dt.Stage("odd", dt.each(odd_only)), max_wait=MAX_WAIT_S) as service:
        answer(service.submit(1))
        took = []
        for _ in range(10):
            began = time.perf_counter()
            assert answer(service.submit(2)) is None
            took.append(time.perf_counter() - began)
    assert sorted(took)[5] < 0.2, "half a second is how old an epoch becomes elsewhere"


@pytest.mark.processes
def test_an_idle_service_costs_nothing() -> None:
    others = {thread.id for thread in psutil.Process().threads()}  # of earlier tests
    with serving(dt.Stage("double", double, batch_size=8, workers=1)) as service:
        answer(service.submit(1))
        assert service.ready
        time.sleep(1.5)  # its beginning is over: the first replan comes after a second

        def used() -> float:
            threads = [thread[1:] for thread in psutil.Process().threads() if thread.id not in others]
            workers = [psutil.Process(pid).cpu_times()[:2] for pid in pids_of(service)]
            return sum(map(sum, [*threads, *workers]))

        before = used()
        time.sleep(3.0)
        assert used() - before < 0.1, "thirty milliseconds are usual"


# What fails


def picky(items: list[int]) -> list[int]:
    if 13 in items:
        raise ValueError("thirteen is not welcome")
    return items


def test_a_failed_item_raises_its_error_and_other_requests_succeed() -> None:
    with serving(dt.Stage("picky", picky, batch_size=8)) as service:
        tickets = [service.submit(number) for number in range(40)]
        for number, ticket in enumerate(tickets):
            if number != 13:
                assert answer(ticket) == number
        error = failure(tickets[13])
        assert isinstance(error, ItemFailed)
        assert error.codes == ("DT378",)
        assert (error.stage, error.error) == ("picky", "ValueError: thirteen is not welcome")
        assert "in picky" in error.traceback
        assert "raise ValueError" in error.traceback
        assert answer(service.submit(14)) == 14
        service.drain()
        assert service.stats.failed == 1


def waits_for_a_file(item: str) -> str:
    if item == "bad":
        raise ValueError("bad")
    while not Path(item).exists():
        time.sleep(0.005)
    return item


def test_a_failure_is_reported_while_other_requests_are_running(tmp_path: Path) -> None:
    with serving(dt.Stage("wait", dt.each(waits_for_a_file), workers=2)) as service:
        slow = service.submit(str(tmp_path / "there"))
        assert isinstance(failure(service.submit("bad")), ItemFailed)
        assert not slow.done()
        (tmp_path / "there").touch()
        assert answer(slow) == str(tmp_path / "there")


def kills_itself(items: list[int]) -> list[int]:
    if 13 in items:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return items


@pytest.mark.processes
def test_an_item_that_kills_its_worker_every_time_fails_alone() -> None:
    with serving(dt.Stage("stage", kills_itself, batch_size=4)) as service:
        tickets = [service.submit(number) for number in range(20)]
        assert isinstance(failure(tickets[13]), ItemFailed)
        assert [answer(ticket) for number, ticket in enumerate(tickets) if number != 13] == [
            number for number in range(20) if number != 13
        ]


@pytest.mark.processes
def test_no_request_is_lost_with_a_killed_worker(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def pid(items: list[int]) -> list[int]:
        until(gate.exists, "the gate is open")
        return [os.getpid()] * len(items)

    with serving(dt.Stage("pid", pid, batch_size=2, workers=2)) as service:
        tickets = [service.submit(number) for number in range(200)]
        until(lambda: busy_pids_of(service), "a worker has requests in flight")
        victim = busy_pids_of(service)[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: not is_there(victim), "it is dead")
        gate.touch()
        found = [answer(ticket) for ticket in tickets]
    assert len(found) == 200
    assert victim not in found


def test_an_item_that_cannot_be_sent_or_read_raises_an_error() -> None:
    class Local:
        pass

    def give_lock(items: list[Any]) -> list[Any]:
        return [threading.Lock() if item == "lock" else item for item in items]

    with serving(dt.Stage("stage", give_lock)) as service:
        bad, good = service.submit(threading.Lock()), service.submit("good")
        error = failure(bad)
        assert isinstance(error, ItemFailed)
        assert "cannot be sent" in str(error)
        assert answer(good) == "good"
        assert isinstance(failure(service.submit("lock")), ItemFailed)
        assert answer(service.submit("good")) == "good"


class NeverReady:
    def setup(self) -> None:
        raise OSError("no such model")

    def __call__(self, items: list[int]) -> list[int]:
        return items


def test_a_service_that_cannot_start_gives_every_request_the_reason() -> None:
    with serving(dt.Stage("model", NeverReady)) as service:
        error = failure(service.submit(1))
        assert isinstance(error, ServiceClosed)
        assert "no such model" in str(error)
        until(lambda: service.done, "it is over")
        with pytest.raises(ServiceClosed, match="no such model"):
            service.submit(2)
        with pytest.raises(ServiceClosed, match="no such model"):
            service.drain()


def odd_one_out(items: list[int]) -> list[int]:
    time.sleep(0.002)
    if any(item % 20 == 3 for item in items):
        raise ValueError("three")
    return [-item for item in items]


@pytest.mark.parametrize("seed", range(20 if LONG else 2))
@pytest.mark.processes
def test_every_ticket_has_one_end_whatever_happens(seed: int) -> None:
    dice = Random(seed)
    stages = [dt.Stage("a", odd_one_out, batch_size=3, workers=2), dt.Stage("b", same, fuse=False, workers=1)]
    with serving(*stages, cluster="1x(4cpu, 4GB)", max_wait="3ms") as service:
        answer(service.submit(0))
        tickets: list[tuple[str, RequestFuture]] = []
        for number in range(400):
            deadline = 0.005 if number % 20 == 7 else None
            tickets.append((str(number), service.submit(number, deadline=deadline)))
            if number % 20 == 11:
                tickets[-1][1].cancel()
            if number % 150 == 50:
                with suppress(ProcessLookupError, IndexError):
                    os.kill(dice.choice(pids_of(service)), signal.SIGKILL)
        for name, ticket in tickets:
            number = int(name)
            if number % 20 == 3:
                assert isinstance(failure(ticket), ItemFailed)
            elif number % 20 == 11:
                assert ticket.cancelled() or answer(ticket) == -number
            elif number % 20 == 7 and ticket.exception(PATIENCE_S) is not None:
                assert isinstance(failure(ticket), TimeoutError)
            else:
                assert answer(ticket) == -number
        service.drain()
        assert service.pending == 0
        assert not service._source.sent


# Room, time, and giving up


def test_too_many_requests_wait_or_are_refused(tmp_path: Path) -> None:
    name = str(tmp_path / "there")
    with serving(dt.Stage("wait", dt.each(waits_for_a_file), workers=1), max_pending=4) as service:
        tickets = [service.submit(name) for _ in range(4)]
        with pytest.raises(TooManyRequests) as caught:
            service.submit(name, block=False)
        assert caught.value.codes == ("DT377",)
        with pytest.raises(TooManyRequests):
            service.submit(name, timeout=0.01)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(service.submit, name)
            assert not waiting.done()
            tickets[3].cancel()
            tickets.append(waiting.result(PATIENCE_S))
        Path(name).touch()
        assert [answer(ticket) for ticket in (*tickets[:3], tickets[4])] == [name] * 4


@pytest.mark.processes
def test_a_deadline_fails_the_request_and_disturbs_no_worker(tmp_path: Path) -> None:
    name = str(tmp_path / "there")
    with serving(dt.Stage("wait", dt.each(waits_for_a_file), workers=1), deadline="20s") as service:
        with pytest.raises(dt.ConfigError, match="DT375"):
            service.submit(name, deadline="never")
        late = service.submit(name, deadline="100ms")
        until(lambda: pids_of(service), "there is a worker")
        before = pids_of(service)
        assert isinstance(failure(late), TimeoutError)
        Path(name).touch()
        assert answer(service.submit(name)) == name
        assert pids_of(service) == before


def test_a_cancelled_request_gets_no_result_and_frees_its_slot(tmp_path: Path) -> None:
    name = str(tmp_path / "there")
    with serving(dt.Stage("wait", dt.each(waits_for_a_file), workers=1)) as service:
        tickets = [service.submit(name) for _ in range(100)]
        assert all(ticket.cancel() for ticket in tickets[:-1])
        assert service.pending == 1
        Path(name).touch()
        assert answer(tickets[-1]) == name
        with pytest.raises(CancelledError):
            tickets[0].result(0)
        until(lambda: not service._source.sent, "nothing is kept of cancelled requests")


# Ends


@pytest.mark.processes
def test_leaving_answers_what_is_pending_and_stops_the_workers() -> None:
    with serve(dt.Pipeline([dt.Stage("slow", slow_batch, batch_size=4)]), cluster=CLUSTER) as service:
        tickets = [service.submit(number) for number in range(100)]
        until(lambda: pids_of(service), "there are workers")
        pids = pids_of(service)
    assert all(ticket.done() and ticket.exception() is None for ticket in tickets)
    assert service.done
    assert not any(map(is_there, pids))
    assert service.stats.status == "finished"
    with pytest.raises(ServiceClosed) as caught:
        service.submit(1)
    assert caught.value.codes == ("DT376",)


@pytest.mark.parametrize("do", ["drain", "cancel"])
def test_it_can_be_ended_from_outside(do: str) -> None:
    with serving(dt.Stage("double", double)) as service:
        tickets = [service.submit(number) for number in range(200)]
        send_request(service.folder, do, "dovetail " + do)
        assert service._over.wait(PATIENCE_S)
        with pytest.raises(ServiceClosed, match=f"dovetail {do}"):
            service.submit(1)
        if do == "drain":
            assert [answer(ticket) for ticket in tickets] == [2 * number for number in range(200)]


@pytest.mark.processes
def test_cancelling_a_service_fails_all_pending_requests() -> None:
    with serving(dt.Stage("slow", dt.each(lambda _: time.sleep(60)))) as service:
        tickets = [service.submit(number) for number in range(50)]
        service.cancel("enough")
        for ticket in tickets:
            error = failure(ticket)
            assert isinstance(error, ServiceClosed)
            assert "enough" in str(error)
        until(lambda: service.done, "it is over")
        assert service.stats.status == "cancelled"


@pytest.mark.processes
def test_leaving_with_an_error_does_not_wait() -> None:
    service = serve(dt.Pipeline([dt.Stage("slow", dt.each(lambda _: time.sleep(60)))]), cluster=CLUSTER)
    ticket = service.submit(1)
    service.__exit__(KeyError, KeyError("mine"), None)
    assert service.done
    assert "KeyError" in str(failure(ticket))


SCRIPT = """
import sys, time
import dovetail as dt
from dovetail.runtime.service import serve
service = serve(dt.Pipeline([dt.Stage("same", lambda items: items)]), cluster="1x(2cpu, 2GB)")
print(service.submit("answered").result(60), flush=True)
"""


def test_a_program_that_ends_takes_its_workers_with_it(tmp_path: Path) -> None:
    with Script(tmp_path, SCRIPT, warm=True) as script:
        assert "answered" in script.finish()
        script.all_gone()


def test_a_driver_that_is_killed_takes_its_workers_with_it(tmp_path: Path) -> None:
    with Script(tmp_path, SCRIPT + "time.sleep(600)\n", warm=True) as script:
        script.says("answered")
        script.kill()
        script.all_gone()


HTTP = Path(__file__).parents[2] / "examples" / "06_http.py"


def test_ctrl_c_answers_what_is_pending_and_ends(tmp_path: Path) -> None:
    text = f"""
import runpy, sys
sys.argv = ["06_http.py", "--port", "0"]
runpy.run_path({str(HTTP)!r}, run_name="__main__")
"""
    with Script(tmp_path, text, warm=True) as script:
        script.says("Ctrl-C stops it")
        url = script.output.split("serving ")[1].split(",")[0]
        with urllib.request.urlopen(url, b'{"text": "a b c d"}', timeout=PATIENCE_S) as found:
            assert json.loads(found.read()) == {"words": 4}
        script.kill(signal.SIGINT)
        assert script.finish().splitlines()[-2:] == ["draining", "drained"]
        script.all_gone()


@contextmanager
def http_example() -> Iterator[tuple[str, int]]:
    """Address of the server of the example, which answers without a pipeline."""
    module = runpy.run_path(str(HTTP))
    module["Handler"].timeout = 0.2
    server = module["Server"](("127.0.0.1", 0), module["Handler"])
    answered = SimpleNamespace(result=lambda: {"words": 1})
    server.service = SimpleNamespace(submit=lambda item, block: answered)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address
    finally:
        server.shutdown()
        server.server_close()  # waits for all connections
        thread.join()


def test_the_http_example_answers_json_that_is_nested_too_deeply() -> None:
    with http_example() as (host, port):
        request = urllib.request.Request(f"http://{host}:{port}/", b"[" * 100_000)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        assert caught.value.code == 400
        caught.value.close()


def test_the_http_example_ends_although_a_client_sends_no_body() -> None:
    with http_example() as address, socket.create_connection(address, timeout=PATIENCE_S) as client:
        client.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n")
        answer = b""
        while more := client.recv(4096):
            answer += more
    assert answer.startswith(b"HTTP/1.0 504 ")


INTERRUPTED = """
import os, signal, time
import dovetail as dt
from dovetail.runtime.service import serve
def slow(item):
    time.sleep(0.3)
    return item
try:
    with serve(dt.Pipeline([dt.Stage("slow", dt.each(slow))]), cluster="1x(2cpu, 2GB)") as service:
        tickets = [service.submit(number) for number in range(4)]
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
except KeyboardInterrupt:
    print([ticket.result(0) for ticket in tickets])
"""


def test_a_block_that_is_left_by_ctrl_c_is_drained(tmp_path: Path) -> None:
    with Script(tmp_path, INTERRUPTED, warm=True) as script:
        assert "[0, 1, 2, 3]" in script.finish()
        script.all_gone()


# Without end


@pytest.mark.processes
def test_nothing_grows_with_the_number_of_requests() -> None:
    count = 1_000_000 if LONG else 25_000
    with serving(dt.Stage("odd", dt.each(odd_only), fuse=False), dt.Stage("same", same, fuse=False)) as service:
        for _ in service.map(range(count // 5)):
            pass
        before = psutil.Process().memory_info().rss
        cpu = time.process_time()
        for number, result in enumerate(service.map(range(count))):
            assert result == (number if number % 2 else None)
        print(f"{(time.process_time() - cpu) / count * 1e6:.0f} us of the driver per request")  # noqa: T201
        grown = psutil.Process().memory_info().rss - before
        until(lambda: not service._source.sent, "nothing is kept")
    assert grown < 16 << 20, f"{grown >> 20} MB more"


# Arguments


def test_all_invalid_settings_are_reported_together() -> None:
    barrier = dt.Pipeline([dt.Stage("all", same, barrier=True)])
    with pytest.raises(dt.ConfigError) as caught:
        serve(barrier, engine="lokal", max_wait="soon", max_pending=0, deadline=-1, run_dir=3, wait=1)  # type: ignore[arg-type]
    assert sorted(caught.value.codes) == ["DT331", *["DT375"] * 6]
    with pytest.raises(dt.ConfigError) as caught:
        serve([1])  # type: ignore[arg-type]
    assert caught.value.codes == ("DT337",)


def test_a_plan_of_waves_is_refused() -> None:
    pipeline = dt.Pipeline([dt.Stage("a", same, fuse=False), dt.Stage("b", same, fuse=False)])
    with pytest.raises(dt.ConfigError) as caught:
        serve(pipeline, plan=dt.plan(pipeline, CLUSTER, mode="sequential"))
    assert caught.value.codes == ("DT375",)
