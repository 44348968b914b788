"""`@dt.udf`: options, signatures, checks against a table, references and pickling."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import pyarrow as pa
import pytest

from dovetail.backfill.udf import ErrorPolicy, Retry, Udf, load_udf, parse_error_policy, udf
from dovetail.errors import ConfigError
from dovetail.pipeline.code_hash import code_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("n", pa.int32()),
        ("score", pa.float32()),
        ("vector", pa.list_(pa.float32(), 3)),
        ("small", pa.int8()),
    ]
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module("udf_module")
    sys.modules.pop("udf_module", None)


def messages(error: ConfigError) -> str:
    return "\n".join(problem.render() for problem in error.problems)


# --- options


def test_a_decorator_with_and_without_parentheses_gives_the_same() -> None:
    @udf
    def one(text: str) -> str:
        """Docs."""
        return text + "!"

    @udf()
    def two(text: str) -> str:
        return text + "!"

    assert one("a") == two("a") == "a!"
    assert one.resources == two.resources
    assert one.__doc__ == "Docs."
    assert getattr(one, "__name__", "") == one.name == "one"
    assert list(inspect.signature(one).parameters) == ["text"]


def test_options_are_kept_and_the_other_spellings_are_taken() -> None:
    made = udf(str.upper, num_cpus=2, num_gpus=0.5, timeout="30s", batch_size=8, slots=4, version="v2", on_error="skip")
    assert (made.resources.cpus, made.resources.gpus) == (2, 0.5)
    assert (made.timeout_s, made.batch_size, made.slots) == (30.0, 8, 4)
    assert (made.version, made.explicit_version) == ("v2", True)
    assert made.on_error == ErrorPolicy("skip")
    assert udf(str.upper).resources.cpus == 1


@pytest.mark.processes
def test_all_problems_of_options_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        udf(  # type: ignore[call-overload]
            str.upper,
            cpus=-1,
            batch_size=0,
            version=3,
            on_error="skipp",
            timeout="soon",
            input_columns="text",
            data_type="strin",
            slots=True,
            on_failure={"ValueError": "stop"},
            max_setup_failures=-1,
            batchsize=3,
            workers=2,
        )
    text = messages(caught.value)
    assert len(caught.value.problems) == 12
    for part in (
        "cpus=-1",
        "batch_size=0",
        'version="3"',
        "'skip'",
        "timeout='soon'",
        'input_columns=["text"]',
        "strin",
        "on_failure={",
        "max_setup_failures=-1",
    ):
        assert part in text
    assert "slots=True" in text
    assert "did you mean 'batch_size'?" in text
    assert "table.backfill(column, workers=4)" in text


def test_cpus_and_its_alias_together_are_rejected() -> None:
    with pytest.raises(ConfigError, match="num_cpus=2 and cpus=1 are the same option"):
        udf(str.upper, cpus=1, num_cpus=2)


@pytest.mark.parametrize("wrong", [3, "name", None])
def test_only_functions_and_classes_are_decorated(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="is not a function or a class"):
        udf()(wrong)


def test_a_udf_is_not_made_of_a_udf() -> None:
    with pytest.raises(ConfigError, match="is already a UDF"):
        udf(udf(str.upper))


# --- on_error


def test_on_error_takes_texts_and_retries() -> None:
    assert parse_error_policy("fail") == ErrorPolicy("fail")
    assert parse_error_policy("skip") == ErrorPolicy("skip")
    retry = Retry(ConnectionError, "requests.HTTPError", times=2, backoff="100ms", then="skip")
    assert parse_error_policy(retry) == ErrorPolicy("skip", ("ConnectionError", "HTTPError"), 2, 0.1)
    assert parse_error_policy(Retry()).retry == ("*",)
    assert eval(repr(retry)).policy == retry.policy


def test_retries_match_base_classes_of_an_exception() -> None:
    how = parse_error_policy(Retry(ConnectionError, times=5))
    assert how.retries_for(ConnectionResetError()) == 5
    assert how.retries_for(ValueError()) == 0
    assert parse_error_policy(Retry()).retries_for(ValueError()) == 3
    assert parse_error_policy("skip").retries_for(ValueError()) == 0
    assert [how.wait_s(tried) for tried in range(4)] == [1, 2, 4, 8]


def test_all_problems_of_a_retry_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Retry(3, int, times=0, backoff="now", then="stop")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 5
    with pytest.raises(ConfigError, match="did you mean Retry"):
        parse_error_policy(ConnectionError)


# --- kinds, inputs, outputs


def arrays_one(text: pa.Array, n: pa.Int32Array) -> pa.StringArray:
    return text


def batch_one(batch: pa.RecordBatch) -> pa.Array:
    return batch.column(0)


async def awaited(text: str) -> str | None:
    return text


def unannotated(text):  # type: ignore[no-untyped-def]
    return text


def defaults(text: str, sep: str = " ", *, strict: bool = True) -> int:
    return len(text.split(sep))


class Scorer:
    def setup(self) -> None: ...

    async def __call__(self, score: float) -> float:
        return score


class Pair(NamedTuple):
    word: str
    count: int  # type: ignore[assignment]


def pair(text: str) -> Pair | None:
    return Pair(text, 1)


@pytest.mark.parametrize(
    ("fn", "options", "kind", "is_async", "inputs", "outputs"),
    [
        (arrays_one, {}, "arrays", False, ("text", "n"), (("", pa.string()),)),
        (batch_one, {"data_type": "list<float32>"}, "batch", False, (), (("", pa.list_(pa.float32())),)),
        (batch_one, {"data_type": int, "input_columns": ["n"]}, "batch", False, ("n",), (("", pa.int64()),)),
        (awaited, {}, "scalar", True, ("text",), (("", pa.string()),)),
        (unannotated, {"data_type": pa.int8()}, "scalar", False, ("text",), (("", pa.int8()),)),
        (defaults, {}, "scalar", False, ("text",), (("", pa.int64()),)),
        (defaults, {"input_columns": ["a", "b"]}, "scalar", False, ("a", "b"), (("", pa.int64()),)),
        (Scorer, {}, "scalar", True, ("score",), (("", pa.float64()),)),
        (pair, {}, "scalar", False, ("text",), (("word", pa.string()), ("count", pa.int64()))),
        (
            pair,
            {"data_type": {"count": "int8"}},
            "scalar",
            False,
            ("text",),
            (("word", pa.string()), ("count", pa.int8())),
        ),
    ],
)
def test_a_function_has_inputs_and_outputs(
    fn: Any, options: Any, kind: str, is_async: bool, inputs: tuple[str, ...], outputs: Any
) -> None:
    made = udf(fn, **options)
    assert (made.kind, made.is_async, made.inputs) == (kind, is_async, inputs)
    assert made.is_class is (fn is Scorer)
    assert made.outputs() == outputs


def test_arrow_may_be_imported_for_type_checkers_only(module: Any) -> None:
    assert module.arrays.kind == "arrays"
    assert module.parts.outputs() == (("first", pa.string()), ("length", pa.int64()))


@pytest.mark.processes
def test_importing_it_does_not_import_arrow() -> None:
    code = "import sys, dovetail.backfill.udf; print({'pyarrow', 'lance', 'numpy', 'cloudpickle'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def wrong_mix(text: pa.Array, n: int) -> pa.StringArray:
    return text


def wrong_keyword(*, text: str) -> str:
    return text


def wrong_nothing() -> str:
    return ""


class WrongInit:
    def __init__(self, model: str) -> None: ...

    def __call__(self, text: str) -> str:
        return text


class WrongCall:
    pass


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (wrong_mix, {}, "n is annotated with int, but other parameters are arrays"),
        (wrong_keyword, {}, "text is keyword-only"),
        (wrong_nothing, {}, "reads no column"),
        (WrongInit, {}, "its __init__ needs model"),
        (WrongCall, {"data_type": "string"}, "no method __call__"),
        (unannotated, {}, "has no return annotation"),
        (batch_one, {}, "Array has no element type"),
        (defaults, {"input_columns": ["a", "b", "c"]}, "has 3 names, the function takes 1 to 2"),
        (pair, {"data_type": {"cuont": "int8"}}, "did you mean 'count'?"),
    ],
)
def test_a_missing_annotation_is_a_problem(fn: Any, options: Any, message: str) -> None:
    found = udf(fn, **options).check(SCHEMA, ["out"] if fn is not pair else ["a", "b"])
    assert message in "\n".join(problem.render() for problem in found)


# --- against a table


def several(txet: str, n: str, vector: list[float]) -> int:
    return 0


def test_all_mismatches_with_the_table_are_reported_at_once() -> None:
    found = udf(several).check(SCHEMA, ["text"])
    assert [problem.code for problem in found] == ["DT444", "DT445", "DT446"]
    text = "\n".join(problem.render() for problem in found)
    assert "no column 'txet' (did you mean 'text'?)" in text
    assert '@dt.udf(input_columns=["text", "n", "vector"])' in text
    assert "takes str for n, but the column is int32" in text
    assert "returns int64, but column 'text' is string" in text


def test_a_function_that_fits_has_no_problem() -> None:
    assert udf(awaited).check(SCHEMA, ["new"]) == []
    assert udf(defaults).check(SCHEMA, ["small"]) == []
    assert udf(arrays_one).check(SCHEMA, ["new"]) == []
    assert udf(pair).check(SCHEMA, ["a", "b"]) == []


def test_the_number_of_columns_is_checked() -> None:
    (found,) = udf(pair).check(SCHEMA, ["a"])
    assert "returns 2 columns (word, count), but 1 are to be filled: a" in found.message


def test_a_type_that_was_written_must_be_the_columns() -> None:
    (found,) = udf(defaults, data_type="int64").check(SCHEMA, ["small"])
    assert "returns int64, but column 'small' is int8" in found.message


def test_a_function_cannot_read_the_column_that_it_fills() -> None:
    (found,) = udf(awaited).check(SCHEMA, ["text"])
    assert "the column that it fills" in found.message


# --- calls


def test_async_functions_give_their_coroutine() -> None:
    assert asyncio.run(udf(awaited)("a")) == "a"


def test_a_class_is_made_and_set_up_at_its_first_call(module: Any) -> None:
    assert module.Scaled(2) == 20
    assert module.Scaled(3) == 30
    assert "A class with a setup." in module.Scaled.__doc__


def test_an_async_setup_is_waited_for() -> None:
    class Late:
        ready = False

        async def setup(self, worker: Any) -> None:
            await asyncio.sleep(0)
            self.ready = worker.id == 0

        async def __call__(self, text: str) -> str:
            return text if self.ready else ""

    made = udf(Late)
    assert asyncio.run(made("a")) == "a"
    assert asyncio.run(made("b")) == "b"


# --- by name, and into other processes


def test_a_reference_leads_to_the_udf(module: Any) -> None:
    assert module.marked.reference == "udf_module:marked"
    assert load_udf("udf_module:marked") is module.marked
    assert module.other.reference == "udf_module:other"
    assert udf(module.plain).reference == "udf_module:plain"
    assert load_udf("udf_module:plain").fn is module.plain
    assert udf(lambda text: text).reference == ""


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("udf_module", "is not of the form module:name"),
        ("udf_module:markd", "did you mean 'marked'?"),
        ("no_such_module_here:f", "no module named 'no_such_module_here'"),
        ("udf_module:PREFIX", "is of type str"),
    ],
)
def test_a_reference_without_a_target_is_reported(module: Any, reference: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_udf(reference)
    assert message in messages(caught.value)
    assert caught.value.codes == ("DT443",)


def test_a_module_that_fails_to_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_module.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_udf("failing_module:f")


LOADED = "import sys, cloudpickle; made = cloudpickle.loads(sys.stdin.buffer.read()); "


def run_in_new_process(data: bytes, code: str, *, beside: bool) -> str:
    """Output of a new process that runs `code` with the unpickled UDFs as `made`."""
    path = f"sys.path.insert(0, {str(HERE)!r}); " if beside else ""
    call = [sys.executable, "-c", f"import sys; {path}{LOADED}{code}"]
    done = subprocess.run(call, input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_a_udf_of_a_module_travels_by_name(module: Any) -> None:
    for data in (cloudpickle.dumps(module.marked), pickle.dumps(module.marked)):
        assert len(data) < 200
        same = "import udf_module; print(made('a'), made is udf_module.marked, made.resources.cpus)"
        assert run_in_new_process(data, same, beside=True) == ">a True 2"
    assert run_in_new_process(cloudpickle.dumps(module.Scaled), "print(made(1))", beside=True) == "10"


def test_a_udf_whose_name_refers_to_another_object_is_pickled_by_value(module: Any) -> None:
    made = udf(module.marked.fn, cpus=4, version="7")
    data = cloudpickle.dumps(made)
    assert run_in_new_process(data, "print(made('a'), made.resources.cpus, made.version)", beside=True) == ">a 4 7"

    by = 3

    @udf
    def local(n: int) -> int:
        return n * by

    assert (
        run_in_new_process(cloudpickle.dumps(local), "print(made(2), made.inputs, made.name)", beside=False)
        == "6 ('n',) local"
    )


def test_a_module_that_workers_cannot_import_travels_by_value(module: Any) -> None:
    cloudpickle.register_pickle_by_value(module)
    try:
        datas = [cloudpickle.dumps(one) for one in (module.marked, module.countdown, module.Scaled)]
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    found = [
        run_in_new_process(data, f"print(made({value!r}))", beside=False)
        for data, value in zip(datas, ["a", 3, 2], strict=True)
    ]
    assert found == [">a", "3", "20"]


@pytest.mark.processes
def test_a_udf_of_a_script_travels_by_value(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import cloudpickle, sys\nfrom dovetail.backfill.udf import udf\n"
        "@udf(memory='1GB')\ndef f(n: int) -> int:\n    return 1 if n < 2 else n * f(n - 1)\n"
        "@udf\nclass C:\n    def __call__(self, n: int) -> int:\n        return f(n) + 1\n"
        "assert f.reference == ''\n"
        "sys.stdout.buffer.write(cloudpickle.dumps([f, C, f.code]))\n"
    )
    data = subprocess.run([sys.executable, str(script)], capture_output=True, check=True).stdout
    statement = "print(made[0](4), made[1](3), made[0].resources.memory, made[0].outputs(), made[0].version == made[2])"
    assert run_in_new_process(data, statement, beside=False) == "24 7 1GB (('', DataType(int64)),) True"


# --- versions

SOURCE = """
from dovetail.backfill.udf import udf
LIMIT = 3
def helper(x): return x + LIMIT
{decorator}
def work(n: int, by: int = 2) -> int:
    return helper(n) * by
def maker(by, extra=1):
    {decorator}
    def inner(n: int) -> int:
        return helper(n) * by
    return inner
{decorator}
class Made:
    def __call__(self, n: int) -> int:
        return [helper(f"{{m!r:>{{n}}}}") for m in range(n) if (lambda q: q)(m)]
chosen = [lambda x: x + 1, lambda x: x + 2]
"""
HASHES = """
import sys; sys.path[:0] = {paths!r}
from dovetail.pipeline.code_hash import code_hash
import versioned as m
print(code_hash(m.work), code_hash(m.maker(2)), code_hash(m.maker(3)), code_hash(m.Made), *map(code_hash, m.chosen))
"""


@pytest.fixture
def versioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # bytecode of a source of the same size and second is stale

    def write(decorator: str = "@udf", old: str = "", new: str = "") -> Any:
        assert old in SOURCE
        source = SOURCE.replace(old, new) if old else SOURCE
        (tmp_path / "versioned.py").write_text(
            source.replace("{decorator}", decorator).replace("{{", "{").replace("}}", "}")
        )
        sys.modules.pop("versioned", None)
        importlib.invalidate_caches()
        return importlib.import_module("versioned")

    yield write
    sys.modules.pop("versioned", None)


def versions(module: Any) -> list[str]:
    return [code_hash(one) for one in (module.work, module.maker(2), module.Made)]


def test_resources_do_not_change_a_version(versioned: Callable[..., Any]) -> None:
    bare = versions(versioned(""))
    for decorator in ("@udf", "@udf(cpus=LIMIT)", "@udf(gpus=1, memory='4GB')"):
        made = versioned(decorator)
        assert versions(made) == bare
        assert isinstance(made.work, Udf)
        assert made.work.version == made.work.code == code_hash(made.work.fn) == bare[0]


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return x + LIMIT", "return x - LIMIT", [True, True, True]),
        ("LIMIT = 3", "LIMIT = 4", [True, True, True]),
        ("by: int = 2", "by: int = 3", [True, False, False]),
        ("helper(n) * by\ndef maker", "helper(n) * by + 1\ndef maker", [True, False, False]),
        (
            "        return helper(n) * by\n    return",
            "        return helper(n) + by\n    return",
            [False, True, False],
        ),
        ("!r:>", "!s:>", [False, False, True]),
        ("LIMIT = 3\n", "LIMIT = 3  # three\n\n\n", [False, False, False]),
    ],
)
def test_the_version_changes_with_the_functions_that_are_used(
    versioned: Callable[..., Any], old: str, new: str, changed: list[bool]
) -> None:
    before = versions(versioned())
    after = versions(versioned("@udf", old, new))
    assert [one != two for one, two in zip(before, after, strict=True)] == changed


def test_closures_and_defaults_change_the_version(versioned: Callable[..., Any]) -> None:
    made = versioned()
    assert code_hash(made.maker(2)) == code_hash(made.maker(2))
    assert code_hash(made.maker(2)) != code_hash(made.maker(3))
    assert code_hash(made.chosen[0]) != code_hash(made.chosen[1])

    def with_default(value: int) -> Any:
        return lambda x, y=value: x + y

    assert code_hash(with_default(1)) != code_hash(with_default(2))


def other_pythons() -> list[str]:
    found = [Path.home() / ".pyenv" / "versions"]
    return sorted(str(one) for root in found for one in root.glob("3.1[123]*/bin/python3.1[123]"))


@pytest.mark.processes
@pytest.mark.skipif(not other_pythons(), reason="no other version of Python is on this machine")
def test_a_version_is_the_same_on_every_python(versioned: Callable[..., Any], tmp_path: Path) -> None:
    versioned("@udf(cpus=2)")
    source = str(Path(inspect.getfile(code_hash)).parents[2])
    code = HASHES.format(paths=[source, str(tmp_path)])
    outputs = {
        python: subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        for python in [sys.executable, *other_pythons()]
    }
    assert len(set(outputs.values())) == 1, outputs


HOLDS = """
import array, collections, datetime, decimal, fractions, pathlib, re, sys, types, uuid
sys.path[:0] = {paths!r}
from dovetail.pipeline.code_hash import code_hash
words = ["word%d" % n for n in range(3000)]
held = [
    re.compile("a+", re.I | re.M), bytearray(b"x"), memoryview(b"x"), array.array("d", [1.5]), range(1, 9, 2),
    datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc), datetime.timedelta(1, 2),
    datetime.timezone.utc, decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=7), pathlib.Path("/a/b"),
    collections.deque([1, 2], 5), types.MappingProxyType({{"a": 1}}), types.SimpleNamespace(a=1), set(words), words,
    {{word: word for word in words}}, uuid.SafeUUID.safe,
]
def holding(data):
    return lambda x: data
print(*(code_hash(holding(one)) for one in held))
"""


@pytest.mark.processes
def test_the_hash_of_data_in_a_function_is_the_same_in_every_process_and_python(tmp_path: Path) -> None:
    script = tmp_path / "holds.py"
    script.write_text(HOLDS.format(paths=[str(Path(inspect.getfile(code_hash)).parents[2])]))
    hashes = {
        (python, seed): subprocess.run(
            [python, str(script)], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for python in [sys.executable, *other_pythons()]
        for seed in ("1", "2")
    }
    assert len(set(hashes.values())) == 1, hashes
    assert len(set(next(iter(hashes.values())).split())) == 20


def test_a_column_name_that_lance_cannot_commit_is_rejected() -> None:
    (found,) = udf(awaited).check(SCHEMA, ["back`tick"])
    assert found.code == "DT453"
    assert "'back`tick'" in found.message
    assert "'backtick'" in found.fix_texts[0]


def test_a_column_name_that_lance_cannot_read_is_rejected() -> None:
    def batches(batch: pa.RecordBatch) -> pa.StringArray:
        return batch["text"]

    schema = pa.schema([("text", pa.string()), ("back`tick", pa.string())])
    named = udf(lambda text: text, input_columns=["back`tick"], data_type="string")
    for made, fix in ((named, "read another column"), (udf(batches), '@dt.udf(input_columns=["text"])')):
        (found,) = made.check(schema, ["new"])
        assert found.code == "DT444"
        assert "reads 'back`tick'" in found.message
        assert found.fix_texts == (fix,)
    assert udf(awaited).check(schema, ["new"]) == [], "it does not read it"
