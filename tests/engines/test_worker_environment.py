"""User code in workers: scripts, notebooks, modules; environment variables, cards, logs, slots."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.engines.local.worker_environment import gpu_indices, visible_cards
from dovetail.resources.seat import CardShare, Seat
from runtime.aids import Script, run_of
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.time_limit
by_value = pytest.mark.usefixtures("by_value")
"""For tests in which workers need not import this module."""


HEAD = "import dovetail as dt\n"
CLUSTER = 'cluster="1x(2cpu, 4GB)"'

NO_GUARD = f"""
import dovetail as dt
print("main runs")
def double(items):
    return [2 * item for item in items]
print(sorted(dt.run(dt.Pipeline([dt.Stage("double", double)]), range(5), {CLUSTER})))
"""
CLASSES = f"""
import dataclasses, enum, typing
import dovetail as dt

@dataclasses.dataclass(frozen=True)
class In:
    number: int

@dataclasses.dataclass(order=True)
class Out:
    number: int
    colour: "Colour"

class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2

class Point(typing.NamedTuple):
    x: int
    y: int

class Outer:
    class Inner:
        def __init__(self, n):
            self.n = n

class Paint:
    colour = Colour.BLUE
    def setup(self, worker):
        self.stage = worker.stage
    def __call__(self, items):
        assert all(isinstance(item, In) for item in items)
        return [Out(item.number, self.colour) for item in items]

def points(items):
    assert all(type(item) is Out for item in items)
    return [(Point(item.number, int(item.colour)), Outer.Inner(item.number), In(item.number)) for item in items]

pipe = dt.Pipeline([dt.Stage("paint", Paint, fuse=False), dt.Stage("points", points, fuse=False)])
found = list(dt.run(pipe, [In(n) for n in range(20)], {CLUSTER}))
assert all(type(p) is Point and type(i) is Outer.Inner and type(n) is In for p, i, n in found)
print(sorted(p.x for p, _, _ in found) == list(range(20)), len({{n for _, _, n in found}}))
"""
CLOSURES = f"""
import math
import dovetail as dt
FACTOR = 3
TABLE = {{"a": 1}}
def helper(n):
    return n * FACTOR + TABLE["a"]
def make(offset):
    seen = []
    def shift(items):
        seen.extend(items)
        return [helper(item) + offset + math.floor(0.5) for item in items]
    return shift
print(sorted(dt.run(dt.Pipeline([dt.Stage("shift", make(100))]), range(4), {CLUSTER})))
print(sorted(dt.run(dt.Pipeline([dt.Stage("l", lambda items: [i + FACTOR for i in items])]), range(4), {CLUSTER})))
"""


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    with Script(tmp_path, NO_GUARD) as script:
        assert script.finish() == "main runs\n[0, 2, 4, 6, 8]\n"


def test_a_script_read_from_a_pipe_works(tmp_path: Path) -> None:
    with Script(tmp_path, NO_GUARD + CLASSES, stdin=True) as script:
        assert script.finish() == "main runs\n[0, 2, 4, 6, 8]\nTrue 20\n"


def test_items_may_be_objects_of_classes_of_the_script(tmp_path: Path) -> None:
    with Script(tmp_path, CLASSES, warm=True) as script:
        assert script.finish() == "True 20\n"


def test_functions_of_a_script_may_have_closures_and_globals(tmp_path: Path) -> None:
    with Script(tmp_path, CLOSURES, warm=True) as script:
        assert script.finish() == "[101, 104, 107, 110]\n[3, 4, 5, 6]\n"


def test_a_notebook_may_redefine_functions_between_runs(tmp_path: Path) -> None:
    cells = [
        "import dovetail as dt",
        "class Item:\n    def __init__(self, n):\n        self.n = n\n",
        "def stage(items):\n    return [Item(item.n + 1) for item in items]\n",
        "def go():\n    pipe = dt.Pipeline([dt.Stage('stage', stage)])\n"
        f"    return sorted(item.n for item in dt.run(pipe, [Item(n) for n in range(3)], {CLUSTER}))\n",
        "print(go())",
        "def stage(items):\n    return [Item(item.n + 10) for item in items]\n",
        "print(go())",
        "class Item:\n    def __init__(self, n):\n        self.n = n * 100\n",
        "print(go())",
    ]
    text = f"import code, sys\nshell = code.InteractiveConsole(vars(sys.modules['__main__']))\nfor cell in {cells!r}:\n"
    text += "    exec(compile(cell, '<cell>', 'exec'), shell.locals)\n"
    with Script(tmp_path, text, warm=True) as script:
        # an item of 0, 100 or 200 becomes one of (n + 10) * 100
        assert script.finish().splitlines() == ["[1, 2, 3]", "[10, 11, 12]", "[1000, 11000, 21000]"]


def test_code_executed_in_its_own_namespace_works(tmp_path: Path) -> None:
    text = f"space = {{'__name__': 'elsewhere'}}\nexec({NO_GUARD!r}, space)\n"
    with Script(tmp_path, text, warm=True) as script:
        assert script.finish() == "main runs\n[0, 2, 4, 6, 8]\n"


def test_workers_import_modules_next_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "def triple(n):\n    return 3 * n\ndef triples(items):\n    return [triple(item) for item in items]\n"
    )
    text = f"""
import dovetail as dt
import beside
def stage(items):
    import beside as again
    assert again is beside
    return [beside.triple(item) for item in items]
print(sorted(dt.run(dt.Pipeline([dt.Stage("a", stage)]), range(3), {CLUSTER})))
print(sorted(dt.run(dt.Pipeline([dt.Stage("b", dt.each(beside.triple))]), range(3), {CLUSTER})))
print(sorted(dt.run(dt.Pipeline([dt.Stage("c", "beside:triples")]), range(3), {CLUSTER})))
"""
    with Script(tmp_path, text, warm=True) as script:
        assert script.finish() == "[0, 3, 6]\n" * 3


def test_a_stage_may_be_given_as_a_string(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "stages.py").write_text(
        "class Adds:\n    def setup(self):\n        self.n = 5\n"
        "    def __call__(self, items):\n        return [i + self.n for i in items]\n"
    )
    text = f"""
import dovetail as dt, sys
print(sorted(dt.run(dt.Pipeline([dt.Stage("a", "pkg.stages:Adds")]), range(3), {CLUSTER})), "pkg" in sys.modules)
try:
    list(dt.run(dt.Pipeline([dt.Stage("a", "pkg.stages:Add")]), range(3), {CLUSTER}))
except dt.DovetailError as error:
    print("Adds" in str(error), "'a'" in str(error))
"""
    with Script(tmp_path, text, warm=True) as script:
        assert script.finish() == "[5, 6, 7] False\nTrue True\n"


def test_the_script_is_not_imported_by_workers(tmp_path: Path) -> None:
    text = f"""
import os
import dovetail as dt
with open("imports", "a") as file:
    file.write("x")
def stage(items):
    return [os.getpid() for _ in items]
pids = set(dt.run(dt.Pipeline([dt.Stage("a", stage, workers=2)]), range(50), {CLUSTER}))
print(os.getpid() not in pids)
"""
    with Script(tmp_path, text, warm=True) as script:
        assert script.finish() == "True\n"
        assert (tmp_path / "imports").read_text() == "x"


# From a test module, which pytest imports by path


def add(items: list[int], number: int) -> list[int]:
    return [item + number for item in items]


class Adder:
    def __init__(self, number: int = 1) -> None:
        self.number = number

    def __call__(self, items: list[int]) -> list[int]:
        return add(items, self.number)

    def method(self, items: list[int]) -> list[int]:
        return add(items, 7)


def kept(function: Callable[[list[int]], list[int]]) -> Callable[[list[int]], list[int]]:
    @functools.wraps(function)
    def inner(items: list[int]) -> list[int]:
        return function(items)

    return inner


@kept
def cached(items: list[int]) -> list[int]:
    return add(items, 0)


class Item:
    def __init__(self, number: int) -> None:
        self.number = number


def items_of(items: list[Item]) -> list[Item]:
    return [Item(item.number + 1) for item in items]


def test_any_callable_can_be_a_stage() -> None:
    work: dict[str, Callable[..., Any]] = {
        "partial": functools.partial(add, number=5),
        "lambda": lambda items: add(items, 2),
        "class": Adder,
        "object": Adder(4),
        "method": Adder().method,
        "partial_of_partial": functools.partial(functools.partial(add), number=1),
        "each": dt.each(lambda item: item * item),
        "wrapped": cached,
    }
    run = run_of(*(dt.Stage(name, stage, workers=1) for name, stage in work.items()), source=range(3))
    assert sorted(run) == [(item + 5 + 2 + 1 + 4 + 7 + 1) ** 2 for item in range(3)]


def test_items_may_be_objects_of_classes_of_a_test_module() -> None:
    found = list(run_of(dt.Stage("s", items_of), source=[Item(n) for n in range(5)]))
    assert {type(item) for item in found} == {Item}
    assert sorted(item.number for item in found) == [1, 2, 3, 4, 5]


# Seats


def variables(items: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Append the value of the variable that is the first element."""
    return [(*item, os.environ.get(item[0])) for item in items]


def seen(names: list[str], *stages: dt.Stage) -> list[dict[str, str | None]]:
    """Variables as the workers of these stages see them."""
    found = list(run_of(*stages, source=[(name,) for name in names], cluster="1x(4cpu, 8GB)"))
    return [{item[0]: item[number] for item in found} for number in range(1, len(stages) + 1)]


THREADS = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]


@by_value
def test_thread_counts_are_those_of_the_seat_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    large = dt.Stage("large", variables, dt.Resources(cpus=3), workers=1)
    small = dt.Stage("small", variables, dt.Resources(cpus=0.5), workers=1)
    assert seen(THREADS, large, small) == [dict.fromkeys(THREADS, "3"), dict.fromkeys(THREADS, "1")]
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert seen(THREADS, large) == [{**dict.fromkeys(THREADS, "3"), "OMP_NUM_THREADS": "17"}]


@by_value
def test_variables_of_workers_are_those_of_the_driver_their_seat_and_their_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gang = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    for name in gang:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OTHER", "kept")
    monkeypatch.setenv("COLOUR", "red")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    env = {"COLOUR": "blue", "OMP_NUM_THREADS": "9", "CUDA_VISIBLE_DEVICES": "5", "ITS_OWN": "1"}
    stages = [dt.Stage("own", variables, workers=1, env=env), dt.Stage("plain", variables, workers=1)]
    own, plain = seen(["OTHER", "OMP_NUM_THREADS", "COLOUR", "CUDA_VISIBLE_DEVICES", "ITS_OWN", *gang], *stages)
    assert own == {"OTHER": "kept", **env, **dict.fromkeys(gang)}, "variables of a stage have precedence"
    assert (plain["OTHER"], plain["COLOUR"], plain["ITS_OWN"]) == ("kept", "red", None), "and reach no other stage"
    assert plain["CUDA_VISIBLE_DEVICES"] == "", "a worker without cards sees none"
    assert [plain[name] for name in gang] == [None] * 5, "the driver may be a rank of a gang; its workers are not"


@by_value
def test_variables_read_at_interpreter_start_take_effect() -> None:
    stage = dt.Stage("hash", lambda items: [hash(item) for item in items], env={"PYTHONHASHSEED": "0"}, workers=1)
    (found,) = run_of(stage, source=["dovetail"])
    command = [sys.executable, "-c", "print(hash('dovetail'))"]
    result = subprocess.run(command, env={"PYTHONHASHSEED": "0"}, capture_output=True, check=True)
    assert found == int(result.stdout)


class Cards:
    def setup(self, worker: Any) -> None:
        time.sleep(0.05)
        self.found = (os.environ["CUDA_VISIBLE_DEVICES"], worker.gpus, worker.id)

    def __call__(self, items: list[int]) -> list[Any]:
        time.sleep(0.02)
        return [self.found] * len(items)


@by_value
@pytest.mark.parametrize(
    ("resources", "workers", "per_card"),
    [
        (dt.Resources(cpus=0.5, gpus=0.5), 4, 2),
        (dt.Resources(cpus=0.5, gpus=1), 2, 1),
        (dt.Resources(cpus=0.5, gpu_memory="8GB"), 4, 2),
    ],
)
def test_workers_see_the_logical_cards_of_their_seats(resources: dt.Resources, workers: int, per_card: int) -> None:
    found: set[Any] = set()

    def count_until_all_reported() -> Iterator[int]:
        while len(found) < workers:
            yield len(found)

    stage = dt.Stage("cards", Cards, resources, workers=workers)
    for reported in run_of(stage, source=count_until_all_reported(), cluster="1x(4cpu, 8GB, 2xgpu:20GB)"):
        found.add(reported)
    assert {cards for cards, _, _ in found} == {"0", "1"}
    assert {gpus for _, gpus, _ in found} == {(0,)}
    for card in "01":
        assert sum(cards == card for cards, _, _ in found) == per_card


@by_value
def test_a_worker_may_have_several_cards() -> None:
    stage = dt.Stage("cards", Cards, dt.Resources(gpus=2))
    found = set(run_of(stage, source=range(10), cluster="1x(4cpu, 8GB, 2xgpu:20GB)"))
    assert {(cards, gpus) for cards, gpus, _ in found} == {("0,1", (0, 1))}


@pytest.mark.parametrize(
    ("cards", "visible", "own"),
    [
        ([(3,), (1,)], (3, 1), [(0,), (1,)]),
        ([(4, 5), (6, 7)], (4, 6, 5, 7), [(0, 2), (1, 3)]),
        ([(2,), (2,), (0,), (0,)], (2, 0), [(0,), (0,), (1,), (1,)]),
        ([(), ()], (), [(), ()]),
    ],
    ids=["one card each", "two cards each", "shared cards", "no cards"],
)
def test_ranks_of_one_node_see_the_cards_of_all_in_one_order(
    cards: list[tuple[int, ...]], visible: tuple[int, ...], own: list[tuple[int, ...]]
) -> None:
    seats = [Seat("a", cards=tuple(map(CardShare, one))) for one in cards]
    others = [Seat("b", cards=(CardShare(0),))]
    ranks = range(len(cards))
    assert {visible_cards([*seats, *others], rank) for rank in ranks} == {visible}
    assert [gpu_indices([*seats, *others], rank) for rank in ranks] == own


@by_value
def test_output_of_workers_is_in_their_logs(tmp_path: Path) -> None:
    run = run_of(dt.Stage("speak", speaks, workers=1), source=range(3), run_dir=tmp_path / "run")
    list(run)
    (log,) = (tmp_path / "run" / "logs").glob("*.log")
    text = log.read_text()
    for line in ("out 0", "out 2", "err 1", "from a program 1"):
        assert line in text


def speaks(items: list[int]) -> list[int]:
    for item in items:
        print("out", item)  # noqa: T201
        print("err", item, file=sys.stderr)  # noqa: T201
        os.system(f"echo from a program {item}")
    return items


@by_value
def test_a_worker_has_the_working_folder_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    stage = dt.Stage("where", lambda items: [(os.getcwd(), sys.path[0], sys.stdin.read()) for _ in items])  # noqa: PTH109
    assert set(run_of(stage, source=range(2))) == {(str(tmp_path), str(tmp_path / "more"), "")}


# Slots


class Together:
    """Returns only after a number of calls run at the same time."""

    def __init__(self, count: int) -> None:
        self._count = count

    def setup(self) -> None:
        self._inside = 0
        self._most = 0
        self._changed = threading.Condition()

    def __call__(self, items: list[int]) -> list[tuple[int, int]]:
        with self._changed:
            self._inside += 1
            self._most = max(self._most, self._inside)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._most >= self._count, PATIENCE_S)
            self._inside -= 1
            return [(item, self._most) for item in items]


@pytest.mark.usefixtures("in_process")
def test_a_stage_with_slots_runs_that_many_calls_at_once() -> None:
    found = list(run_of(dt.Stage("together", Together(4), slots=4, workers=1), source=range(80)))
    assert sorted(item for item, _ in found) == list(range(80))
    assert max(most for _, most in found) == 4


class TogetherAwaited:
    """The same for async calls."""

    def __init__(self, count: int) -> None:
        self._count = count

    async def setup(self, worker: Any) -> None:
        await asyncio.sleep(0)
        self._loop = asyncio.get_running_loop()
        self._inside = 0
        self._most = 0
        self._all = asyncio.Event()

    async def __call__(self, items: list[int]) -> list[tuple[int, int]]:
        assert asyncio.get_running_loop() is self._loop
        self._inside += 1
        self._most = max(self._most, self._inside)
        if self._most == self._count:
            self._all.set()
        await asyncio.wait_for(self._all.wait(), PATIENCE_S)
        self._inside -= 1
        return [(item, self._most) for item in items]

    async def teardown(self) -> None:
        await asyncio.sleep(0)
        print("torn down in its loop", asyncio.get_running_loop() is self._loop)  # noqa: T201


@by_value
def test_an_async_stage_runs_one_call_per_slot_at_once(tmp_path: Path) -> None:
    stage = dt.Stage("together", TogetherAwaited(8), slots=8, workers=1)
    run = run_of(stage, source=range(80), run_dir=tmp_path / "run")
    found = list(run)
    assert sorted(item for item, _ in found) == list(range(80))
    assert max(most for _, most in found) == 8
    assert "torn down in its loop True" in "".join(
        path.read_text() for path in (tmp_path / "run" / "logs").glob("*.log")
    )


async def double_awaited(items: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return [2 * item for item in items]


@pytest.mark.usefixtures("in_process")
def test_an_async_function_is_a_stage() -> None:
    stages = [dt.Stage("a", double_awaited, batch_size=3), dt.Stage("b", double_awaited)]
    assert sorted(run_of(*stages, source=range(100))) == [4 * number for number in range(100)]


class AwaitsBadly:
    async def __call__(self, items: list[int]) -> list[int]:
        if 5 in items:
            raise asyncio.CancelledError("of its own")
        return items


@pytest.mark.usefixtures("in_process")
def test_an_async_call_that_cancels_itself_is_an_exception() -> None:
    run = run_of(dt.Stage("bad", AwaitsBadly, slots=3, on_error="skip"), source=range(20))
    assert sorted(run) == [number for number in range(20) if number != 5]
    assert [error.item for error in run.errors] == [5]
