"""Creation, setup, calls and teardown of users' objects."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.engines.unit_executor import UnitExecutor, make_executor
from dovetail.engines.worker_context import Worker
from dovetail.errors import PipelineError
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_function import each
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from pathlib import Path


def crumb() -> memoryview:
    return memoryview(bytearray(64)).cast("q")


def host(*work: Any) -> UnitExecutor:
    stages = tuple(one if isinstance(one, Stage) else Stage(f"s{i}", one) for i, one in enumerate(work))
    return make_executor(stages, Worker(3, "+".join(stage.name for stage in stages)))


def ran(hosted: UnitExecutor, items: list[Any], batch_size: int = 1) -> list[Any]:
    outcome = hosted.run(range(len(items)), items, batch_size, crumb(), 1)
    assert outcome.failures == []
    return outcome.items


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


@each
def plus_one(item: int) -> int:
    return item + 1


class Adds:
    """A stage class with constructor, setup and teardown."""

    amount = 0
    log: list[str]

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.log = ["setup"]
        self.amount = 10

    def __call__(self, items: list[int]) -> list[int]:
        return [item + self.amount for item in items]

    def teardown(self) -> None:
        self.log.append("teardown")

    def total(self, a: int, *, b: int) -> int:
        return self.amount + a + b


class AddsToEach:
    def __call__(self, item: int) -> int:
        return item + 100


class Static:
    @staticmethod
    def __call__(items: list[int]) -> list[int]:
        return items[:]


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (double, [2, 4]),
        (Static, [1, 2]),
        (Adds().__call__, [1, 2]),
        (plus_one, [2, 3]),
        (each(AddsToEach), [101, 102]),
        (each(AddsToEach()), [101, 102]),
        (functools.partial(map, lambda item: item * 3), [3, 6]),
        (Adds(), [11, 12]),
        (Adds, [11, 12]),
    ],
)
def test_functions_classes_and_objects_can_be_stages(work: Any, expected: list[int]) -> None:
    hosted = host(work)
    hosted.setup()
    assert ran(hosted, [1, 2]) == expected
    assert hosted.stages == ("s0",)
    assert not hosted.is_async


def test_a_hosted_object_that_is_no_stage_is_called_with_lists() -> None:
    for work in (double, lambda items: [2 * item for item in items]):
        assert ran(make_executor(work, Worker(1, "job")), [1, 2, 3], 2) == [2, 4, 6]
    hosted = make_executor(Adds, Worker(1, "role"))
    hosted.setup()
    assert hosted.target.worker.stage == "role"
    assert hosted.call("total", 1, b=2) == 13
    with pytest.raises(AttributeError, match="totally"):
        hosted.call("totally")


def test_an_object_that_cannot_be_called_can_be_hosted_but_not_run() -> None:
    class Silent:
        def hello(self) -> str:
            return "hello"

    hosted = make_executor(Silent, Worker(1, "role"))
    assert hosted.call("hello") == "hello"
    (failure,) = hosted.run(range(1), [1], 1, crumb(), 1).failures
    assert failure.error == "TypeError: 'Silent' object is not callable"


def test_calls_go_to_the_last_of_fused_stages() -> None:
    hosted = host(double, Adds)
    hosted.setup()
    assert hosted.call("total", 0, b=0) == 10


def test_setup_is_given_the_worker_with_its_own_stage() -> None:
    seat = Seat("n1", 2000)
    worker = Worker(9, "a+b", node="n1", seat=seat, gpus=(0, 1), cpus=2.0, memory_bytes=5, rank=1, ranks=2)
    hosted = make_executor((Stage("a", Adds), Stage("b", Adds)), worker)
    hosted.setup()
    kept = [one.target.worker for one in hosted._objects]
    assert [one.stage for one in kept] == ["a", "b"]
    for one in kept:
        assert (one.id, one.unit, one.node, one.seat, one.gpus) == (9, "a+b", "n1", seat, (0, 1))
        assert (one.cpus, one.memory_bytes, one.rank, one.ranks, one.local_rank) == (2.0, 5, 1, 2, 0)
        assert one.item_keys == ()
    assert worker.stage == ""


def _with_setup(setup: Any) -> type:
    return type("Made", (), {"setup": setup, "__call__": lambda self, items: items})


def test_setup_may_take_no_argument() -> None:
    got: list[Any] = []
    variants = [
        lambda self: got.append("none"),
        lambda self, worker: got.append(worker.id),
        lambda self, w, more=1: got.append((w.id, more)),
        lambda self, *, worker: got.append(worker.id),
        lambda self, *all_: got.append(all_[0].id),
        lambda self, device="cuda": got.append(device),
        lambda self, worker=None: got.append(worker.id),
        lambda self, **named: got.append(named),
        staticmethod(lambda worker: got.append(worker.id)),
    ]
    for setup in variants:
        host(_with_setup(setup)).setup()
    assert got == ["none", 3, (3, 1), 3, 3, "cuda", 3, {}, 3]


def test_an_attribute_named_setup_that_is_not_callable_is_ignored() -> None:
    hosted = host(_with_setup(True))
    hosted.setup()
    assert hosted.teardown() == []


def test_every_object_is_torn_down_even_if_one_raises() -> None:
    order: list[str] = []

    class Bad(Adds):
        def teardown(self) -> None:
            order.append("bad")
            raise SystemExit(4)

    class Good(Adds):
        def teardown(self) -> None:
            order.append("good")

    hosted = host(Good, Bad, Good)
    hosted.setup()
    (summary,) = hosted.teardown()
    assert order == ["good", "bad", "good"]
    assert summary.line == "SystemExit: 4"
    assert "in the teardown of stage 's1'" in summary.detail
    assert hosted.teardown() == []


def test_a_setup_that_raises_names_its_stage_and_tears_down_what_was_set_up() -> None:
    order: list[str] = []

    class First(Adds):
        def teardown(self) -> None:
            order.append("first")

    class Second(Adds):
        def setup(self, worker: Worker) -> None:
            raise OSError("no model")

        def teardown(self) -> None:
            order.append("second")

    with pytest.raises(OSError, match="no model") as caught:
        host(First, Second).setup()
    assert caught.value.__notes__ == ["in the setup of stage 's1'"]
    assert order == ["first"]


def test_a_class_with_required_arguments_is_an_error_that_names_its_stage() -> None:
    class Wants:
        def __init__(self, path: str) -> None: ...

    with pytest.raises(TypeError, match="path") as caught:
        host(Wants)
    assert caught.value.__notes__ == ["while stage 's0' was created"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my_steps"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "text.py").write_text(
        textwrap.dedent("""
        import dovetail as dt

        def double(items):
            return [2 * item for item in items]

        @dt.each
        def plus_one(item):
            return item + 1

        class Group:
            class Inner:
                def __call__(self, items):
                    return items[::-1]

        async def later(items):
            return items

        alias = "my_steps.text:double"
        LIMIT = 5
        """)
    )
    (folder / "broken.py").write_text("import surely_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("my_steps")]:
        monkeypatch.delitem(sys.modules, name)
    return folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [("double", [2, 4]), ("plus_one", [2, 3]), ("Group.Inner", [2, 1]), ("alias", [2, 4])],
)
def test_a_string_refers_to_a_function_or_class(package: Path, text: str, expected: list[int]) -> None:
    assert ran(host(f"my_steps.text:{text}"), [1, 2], 2) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my_steps.text:dubble", r"stage 's0'.* my_steps\.text has no 'dubble' \(did you mean 'double'\?\)"),
        ("my_steps.txt:double", r"there is no module 'my_steps\.txt' \(did you mean 'text'\?\)"),
        ("my_stebs.text:double", r"there is no module 'my_stebs' \(did you mean 'my_steps'\?\)"),
        ("my_steps.text.more:x", r"there is no module 'my_steps\.text\.more'"),
        ("my_steps.text:Group.Iner", r"Group has no 'Iner' \(did you mean 'Inner'\?\)"),
        ("my_steps.text:LIMIT", r"is of type int, not a function or class"),
        ("my_steps.text", r"is not the module and name"),
    ],
)
def test_a_string_that_refers_to_nothing_is_an_error_that_names_the_missing_part(
    package: Path, text: str, message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        host(text)


def test_an_import_error_inside_a_referenced_module_is_raised_unchanged(package: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="surely_not_there"):
        host("my_steps.broken:x")


def test_an_async_stage_cannot_be_fused(package: Path) -> None:
    assert host("my_steps.text:later").is_async
    with pytest.raises(PipelineError, match=r"stage 's1'.* cannot be fused"):
        host(double, "my_steps.text:later")


def test_async_objects_may_have_async_setup_and_teardown() -> None:
    log: list[str] = []

    class Client:
        async def setup(self, worker: Worker) -> None:
            await asyncio.sleep(0)
            log.append(f"setup {worker.stage}")

        async def __call__(self, items: list[int]) -> list[int]:
            return items

        async def teardown(self) -> None:
            await asyncio.sleep(0)
            raise ValueError("too late")

    async def life() -> list[str]:
        hosted = host(Client)
        assert hosted.is_async
        await hosted.setup_async()
        return [summary.line for summary in await hosted.teardown_async()]

    assert asyncio.run(life()) == ["ValueError: too late"]
    assert log == ["setup s0"]


def test_an_async_setup_of_an_object_with_plain_calls_is_rejected() -> None:
    class Odd(Adds):
        async def setup(self, worker: Worker) -> None:  # type: ignore[override]
            await asyncio.sleep(0)

    with pytest.raises(TypeError, match="require an `async def"):
        host(Odd).setup()


def test_a_worker_without_async_stages_does_not_load_asyncio() -> None:
    code = """
        import sys
        from dovetail.engines.unit_executor import make_executor
        from dovetail.engines.worker_context import Worker
        make_executor((lambda items: items), Worker(1, "u")).run(range(1), [1], 1, [0] * 4, 1)
        heavy = ["asyncio", "pydantic", "rich", "psutil", "yaml", "click", "traceback", "importlib.metadata"]
        print([name for name in heavy if name in sys.modules])
    """
    shown = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"
