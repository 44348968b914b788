"""Summaries of user exceptions: tracebacks, limits, out-of-memory errors."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from dovetail.engines.exception_summary import (
    MAX_DETAIL_CHARS,
    MAX_LINE_CHARS,
    MAX_MESSAGE_DETAIL_CHARS,
    summarize_exception,
)
from dovetail.engines.out_of_memory import classify_memory_error
from dovetail.engines.unit_executor import make_executor
from dovetail.engines.worker_context import Worker
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_function import each

if TYPE_CHECKING:
    from pathlib import Path

OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})
CupyOutOfMemory = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})


def failed(raises: BaseException | type[BaseException], *, fused: bool = False) -> Any:
    """The failure of the second of three items; the others succeed."""

    def bad(item: int) -> int:
        if item == 1:
            raise raises
        return item

    stages = (Stage("a", each(bad)), *([Stage("b", each(bad))] if fused else ()))
    outcome = make_executor(stages, Worker(1, "u")).run(range(3), [0, 1, 2], 1, [0] * 4, 1)
    assert outcome.items == [0, 2]
    (failure,) = outcome.failures
    assert (failure.start, failure.stop, failure.keys) == (1, 2, ((1,),))
    return failure


class Mute(Exception):
    def __str__(self) -> NoReturn:
        raise KeyboardInterrupt


class Liar(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


def _fails(_self: object) -> NoReturn:
    raise RuntimeError


class Nameless(type):
    @property
    def __name__(cls) -> NoReturn:  # type: ignore[override]
        raise RuntimeError


Torn = type("Torn", (Exception,), {"__notes__": property(_fails)})


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("raises", "line"),
    [
        (ValueError("no\n  good"), "ValueError: no good"),
        (ValueError(), "ValueError"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit("enough"), "GeneratorExit: enough"),
        (StopIteration(1), "StopIteration: 1"),
        (Mute(), "Mute: unprintable: __str__ failed"),
        (Liar(), "Liar: unprintable: __str__ failed"),
        (Torn("x"), "Torn: x"),
        (Nameless("None", (Exception,), {})(), "unprintable exception"),
    ],
)
def test_any_exception_fails_only_its_item(raises: BaseException, line: str, fused: bool) -> None:
    failure = failed(raises, fused=fused)
    assert failure.error == line
    assert line.split(":")[0] in failure.detail or not failure.detail


def test_the_traceback_starts_with_the_users_frames() -> None:
    for fused in (False, True):
        detail = failed(ValueError("no"), fused=fused).detail
        assert detail.startswith("in stage 'a'\nTraceback" if fused else "Traceback")
        assert "in bad" in detail
        assert "raise raises" in detail
        assert "/dovetail/engines/" not in detail
        assert detail.endswith("ValueError: no\n")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("FACTOR", 'hint: FACTOR is assigned in line 4, under `if __name__ == "__main__":`'),
        ("FACTORS", ""),
        ("OTHER", ""),
    ],
)
def test_a_name_that_only_the_program_assigns_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    text = f"def use(rows):\n    return [row * {name} for row in rows]\nif __name__ == '__main__':\n    FACTOR = 3\n"
    (tmp_path / "guarded.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "guarded", raising=False)
    stages = (Stage("a", importlib.import_module("guarded").use),)
    (failure,) = make_executor(stages, Worker(1, "u")).run(range(1), [1], 1, [0] * 4, 1).failures
    assert f"NameError: name '{name}' is not defined" in failure.detail
    assert failure.detail.count("hint:") == bool(hint)
    assert hint in failure.detail


def test_an_exception_object_raised_repeatedly_collects_no_frames() -> None:
    error = ValueError("the only one")

    def bad(item: int) -> int:
        raise error

    for stages in ((Stage("a", each(bad)),), (Stage("a", each(bad)), Stage("b", each(bad)))):
        failures = make_executor(stages, Worker(1, "u")).run(range(50), list(range(50)), 1, [0] * 4, 1).failures
        assert {failure.detail.count("in bad") for failure in failures} == {1}
    assert error.__traceback__ is None


def test_error_lines_and_tracebacks_have_a_maximum_length() -> None:
    def deep(depth: int) -> NoReturn:
        if depth == 0:
            raise ValueError("é" * 10_000_000)
        deeper(depth - 1)

    def deeper(depth: int) -> NoReturn:
        deep(depth)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        deep(5_000)
    except ValueError as error:
        summary = summarize_exception(error)
    finally:
        sys.setrecursionlimit(limit)
    assert len(summary.line) == MAX_LINE_CHARS
    assert MAX_DETAIL_CHARS - 100 < len(summary.detail) <= MAX_DETAIL_CHARS
    assert summary.detail.startswith("Traceback")
    assert "characters omitted" in summary.detail


def test_an_infinite_recursion_is_reported() -> None:
    def endless(item: Any) -> Any:
        return endless(item)

    (failure,) = make_executor(each(endless), Worker(1, "u")).run(range(1), [1], 1, [0] * 4, 1).failures
    assert failure.error.startswith("RecursionError: maximum recursion depth")
    assert len(failure.detail) <= MAX_DETAIL_CHARS


def test_many_failures_in_one_message_use_little_memory() -> None:
    def bad(item: int) -> int:
        raise ValueError("x" * MAX_DETAIL_CHARS)

    failures = make_executor(each(bad), Worker(1, "u")).run(range(100), list(range(100)), 1, [0] * 4, 1).failures
    assert len(failures) == 100
    assert sum(len(failure.detail) for failure in failures) < MAX_MESSAGE_DETAIL_CHARS + MAX_DETAIL_CHARS
    assert failures[0].detail
    assert failures[-1].error == failures[0].error


def _from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "out_of_memory", "on_gpu"),
    [
        (MemoryError(), True, False),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True, True),
        (CupyOutOfMemory("Out of memory allocating 8 bytes"), True, True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), True, True),
        (RuntimeError("CUDA error: out of memory"), True, True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True, False),
        (_from(ValueError("batch failed"), MemoryError()), True, False),
        (ExceptionGroup("tasks", [ValueError(), OutOfMemoryError("x")]), True, True),
        (ValueError("CUDA out of memory"), False, False),
        (RuntimeError("out of luck"), False, False),
        (_from(Mute(), RuntimeError()), False, False),
    ],
)
def test_out_of_memory_errors_are_recognised(error: BaseException, out_of_memory: bool, on_gpu: bool) -> None:
    assert classify_memory_error(error) == (out_of_memory, on_gpu)
    if isinstance(error, Exception):
        failure = failed(error)
        assert (failure.out_of_memory, failure.on_gpu) == (out_of_memory, on_gpu)


def test_a_cyclic_exception_chain_ends() -> None:
    one, two = ValueError(), ValueError()
    one.__cause__, two.__cause__ = two, one
    assert classify_memory_error(one) == (False, False)
    assert "ValueError" in summarize_exception(one).detail


def test_out_of_memory_errors_of_torch_are_recognised() -> None:
    torch = pytest.importorskip("torch")
    assert classify_memory_error(torch.OutOfMemoryError("CUDA out of memory")) == (True, True)
