from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dovetail as dt
from dovetail.errors import DovetailError, PipelineError, Problem
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.pipeline_file import PIPELINE_FILE, schema
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.units import fuse_stages
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """# a comment
name: video
stages:
  - name: read
    run: pkg.video:read
    resources: {cpus: 4, memory: 2GB}
    rate: 6
  - name: decode
    run: pkg.video:decode
    resources:
      cpus: 2
      nvdecs: 1
    returns: 8
    env: {A: "1"}
  - {name: caption, run: "pkg.video:Caption", after: [decode, read], batch_size: 16, workers: [1, 4], timeout: 5m}
  - {name: write, run: "pkg.video:write", workers: auto, on_error: skip, recycle: 1h, runtime_env: {pip: [x]}}
"""


def load(folder: Path, text: str, name: str = "p.yaml") -> Pipeline:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return Pipeline.load(path)


def problems(folder: Path, text: str, name: str = "p.yaml") -> list[Problem]:
    """Problems of a file, with places shortened to line:column."""
    with pytest.raises(PipelineError) as caught:
        load(folder, text, name)
    found = caught.value.problems
    assert all(problem.place.startswith(str(folder / name)) and problem.fix_texts for problem in found)
    return [problem.at(problem.place.removeprefix(f"{folder / name}:")) for problem in found]


def one_stage(key: str, value: str) -> str:
    """A file whose stage 'a' has this on line 3, column 5."""
    rest = [f"    {name}: {text}" for name, text in (("name", "a"), ("run", "m:f")) if name != key]
    return "\n".join(["stages:", "  - retries: 3", f"    {key}: {value}", *rest])


# ---- what is right


def test_a_file_says_what_the_stages_are(tmp_path: Path) -> None:
    pipe = load(tmp_path, TEXT)
    assert pipe == Pipeline(
        [
            Stage("read", "pkg.video:read", Resources(cpus=4, memory="2GB"), rate=6),
            Stage("decode", "pkg.video:decode", Resources(cpus=2, nvdecs=1), returns=8, env={"A": "1"}),
            Stage(
                "caption", "pkg.video:Caption", after=["decode", "read"], batch_size=16, workers=(1, 4), timeout="5m"
            ),
            Stage("write", "pkg.video:write", on_error="skip", recycle="1h", runtime_env={"pip": ["x"]}),
        ],
        "video",
    )


def test_a_json_file_says_the_same(tmp_path: Path) -> None:
    pipe = load(tmp_path, TEXT)
    assert load(tmp_path, json.dumps(yaml.safe_load(TEXT)), "p.json") == pipe
    assert load(tmp_path, yaml.safe_dump(pipe.to_dict(), sort_keys=False)) == pipe
    assert load(tmp_path, json.dumps(pipe.to_dict()), "q.json") == pipe


def test_what_is_empty_by_default_may_be_written_as_null(tmp_path: Path) -> None:
    empty = [item.name for item in fields(Stage) if item.default is None]
    assert len(empty) > 5
    text = "stages:\n  - {name: a, run: 'm:f', " + ", ".join(f"{name}: null" for name in empty) + "}"
    assert load(tmp_path, text) == Pipeline([Stage("a", "m:f")], "p")


@pytest.mark.parametrize(
    ("file", "name"), [("clean.yaml", "clean"), ("clean.v2.json", "clean.v2"), ("a b.yaml", "pipeline")]
)
def test_without_a_name_a_pipeline_has_that_of_its_file(tmp_path: Path, file: str, name: str) -> None:
    stages = '"stages": [{"name": "a", "run": "m:f"}]'
    assert load(tmp_path, f"{{{stages}}}", file).name == name
    assert load(tmp_path, f'{{"name": "own", {stages}}}', file).name == "own"


def test_merge_keys_and_aliases_are_followed(tmp_path: Path) -> None:
    text = "stages:\n  - &a {name: a, run: 'm:f', rate: 5}\n  - {<<: *a, name: b}\n"
    assert [stage.rate for stage in load(tmp_path, text)] == [5, 5]


# ---- what is wrong, and where


@pytest.mark.parametrize(
    ("key", "value", "code", "expected_message", "fix"),
    [
        ("name", "5", "DT034", "stage 1: name=5 is not a string", 'name: "5"'),
        ("name", "a b", "DT034", "stage 'a b': name=", "name: a_b"),
        ("run", "pkg.read", "DT034", "stage 'a': run='pkg.read'", 'run: "pkg:read"'),
        ("batch_size", "0", "DT034", "stage 'a': batch_size=0", "batch_size: 1"),
        ("batch_size", "null", "DT034", "stage 'a': batch_size=None", "batch_size: 1"),
        ("batch_size", "'16'", "DT034", "stage 'a': batch_size='16'", "batch_size: 16"),
        ("workers", "[4, 2]", "DT034", "stage 'a': workers=(4, 2)", "workers: [2, 4]"),
        ("workers", "autto", "DT034", "did you mean 'auto'", "workers: auto"),
        ("rate", ".nan", "DT034", "stage 'a': rate=nan", "rate: 1"),
        ("on_error", "skp", "DT034", "did you mean 'skip'", "on_error: skip"),
        ("timeout", "'90'", "DT034", "stage 'a': timeout='90'", "timeout: 90s"),
        ("env", "{A: 1, B: x}", "DT034", "env['A']=1 is not a string", 'env: {A: "1", B: x}'),
        ("after", "b", "DT034", "after='b' is not a list", "after: [b]"),
        ("fuse", "3", "DT034", "fuse=3 is not True or False", "fuse: true"),
        ("resources", "4", "DT013", "stages[0].resources should be a mapping, not 4", "resources: {cpus: 1}"),
        ("resources", "null", "DT013", "stages[0].resources should be a mapping", "resources: {cpus: 1}"),
    ],
)
def test_a_bad_value_has_its_place_and_a_fix_in_yaml(
    tmp_path: Path, key: str, value: str, code: str, expected_message: str, fix: str
) -> None:
    problem = next(found for found in problems(tmp_path, one_stage(key, value)) if found.code == code)
    assert (problem.place, problem.fix_texts[0]) == ("3:5", fix)
    assert expected_message in problem.message
    if (key, value) != ("after", "b"):
        load(tmp_path, one_stage(key, fix.removeprefix(f"{key}: ")))


@pytest.mark.parametrize(
    ("value", "code", "place", "expected_message", "fix"),
    [
        ("{memory: 4}", "DT007", "3:17", "memory=4 has no unit", "memory: 4GB"),
        ("{cpus: 1, gpu_memory: 10}", "DT007", "3:26", "gpu_memory=10 has no unit", "gpu_memory: 10GB"),
        ("{cpus: '2'}", "DT001", "3:17", "cpus='2' is not a number", "cpus: 2"),
        ("{cpus: -1}", "DT003", "3:17", "cpus=-1 is negative", "cpus: 1"),
        ("{gpus: 1.5}", "DT006", "3:17", "gpus=1.5", "gpus: 2"),
        ("{nvdecs: true}", "DT001", "3:17", "nvdecs=True", "nvdecs: 1"),
        ("{cpus: 1, accelerator: A100}", "DT009", "3:26", "accelerator='A100' without", "gpus: 1"),
        ("{cpus: 0}", "DT009", "3:17", "needs nothing", "cpus: 1"),
        ("{custom: {x: -1}}", "DT003", "3:17", "custom['x']=-1 is negative", "custom: {x: 1}"),
        ("{labels: [a]}", "DT001", "3:17", "labels=['a']", "labels: {pool: gpu}"),
    ],
)
def test_a_mistake_of_resources_keeps_its_code_and_gets_its_place_and_stage(
    tmp_path: Path, value: str, code: str, place: str, expected_message: str, fix: str
) -> None:
    (problem,) = problems(tmp_path, one_stage("resources", value))
    assert (problem.code, problem.place) == (code, place)
    assert problem.message.startswith("stage 'a': ")
    assert expected_message in problem.message
    assert problem.fix_texts[0].startswith(fix)


@pytest.mark.parametrize(
    ("text", "place", "expected_message"),
    [
        ("{stages: [{name: a, run: 'm:f'}], nmae: x}", "1:35", "unknown key 'nmae' (did you mean 'name'?)"),
        ("{stages: [{name: a, run: 'm:f', btch_size: 1}]}", "1:33", "'btch_size' (did you mean 'batch_size'?)"),
        ("{stages: [{name: a, run: 'm:f', resources: {gpu: 1}}]}", "1:45", "'gpu' (did you mean 'gpus'?)"),
        ("{stages: [{name: a, run: 'm:f', gpus: 1}]}", "1:33", "'gpus': it belongs under 'resources'"),
        ("{stages: [{name: a, run: 'm:f', resources: {rate: 1}}]}", "1:45", "'rate': it belongs to the stage"),
        ("{stages: [{name: a, run: 'm:f', 1: 2}]}", "1:33", "unknown key '1'"),
        ("{stages: [{name: a, run: 'm:f'}], retries: 2}", "1:35", "'retries': it belongs to a stage, or to 'defaults'"),
        ("{stages: [{name: a, run: 'm:f'}], after: [a]}", "1:35", "unknown key 'after': it belongs to a stage"),
    ],
)
def test_an_unknown_key_has_its_place_and_its_likely_spelling(
    tmp_path: Path, text: str, place: str, expected_message: str
) -> None:
    (problem,) = problems(tmp_path, text)
    assert (problem.code, problem.place) == ("DT011", place)
    assert expected_message in problem.message
    assert problem.evidence[0].startswith("keys here: ")


@pytest.mark.parametrize(
    ("text", "code", "place", "expected_message"),
    [
        ("name: a", "DT012", "1:1", "stages is missing"),
        ("stages: []", "DT030", "1:1", "without stages"),
        ("stages: 5", "DT013", "1:1", "stages should be a list, not 5"),
        ("stages: {name: a, run: 'm:f'}", "DT013", "1:1", "stages should be a list"),
        ("stages: null", "DT013", "1:1", "stages should be a list"),
        ("- {name: a, run: 'm:f'}", "DT013", "1:1", "the file should be a mapping"),
        ("stages: [read]", "DT013", "1:10", "stages[0] should be a mapping, not 'read'"),
        ("stages: [{name: a}]", "DT012", "1:10", "stages[0].run is missing"),
        ("stages: [{run: 'm:f'}]", "DT012", "1:10", "stages[0].name is missing"),
        ("{name: '', stages: [{name: a, run: 'm:f'}]}", "DT034", "1:2", "pipeline: name=''"),
    ],
)
def test_a_file_of_another_form_is_one_problem(
    tmp_path: Path, text: str, code: str, place: str, expected_message: str
) -> None:
    (problem,) = problems(tmp_path, text)
    assert (problem.code, problem.place) == (code, place)
    assert expected_message in problem.message


def test_the_fix_for_a_missing_part_works(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "name: a")
    assert len(load(tmp_path, f"name: a\n{problem.fix_texts[0]}")) == 1


@pytest.mark.parametrize(
    ("changed", "code", "place", "fix"),
    [
        (("after: [decode, read]", "after: [decode, reed]"), "DT032", "15:63", "after: [decode, read]"),
        (("after: [decode, read]", "after: [decode, caption]"), "DT033", "15:63", "after: [decode]"),
        (("after: [decode, read]", "after: [read, read]"), "DT034", "15:61", "after: [read]"),
        (("name: decode", "name: read"), "DT031", "8:5", "name: read_2"),
        (("    rate: 6", "    after: [write]"), "DT033", "7:13", "after: []"),
    ],
)
def test_a_mistake_between_stages_has_its_place(
    tmp_path: Path, changed: tuple[str, str], code: str, place: str, fix: str
) -> None:
    text = TEXT.replace(*changed)
    assert text != TEXT
    problem = next(found for found in problems(tmp_path, text) if found.code == code)
    assert (problem.place, problem.fix_texts[0]) == (place, fix)


@pytest.mark.parametrize("text", ["", "a: [", "\tx", "stages: [*a]", "stages: []\nstages: []"])
def test_what_is_no_yaml_is_a_pipeline_error(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, text)


def test_a_missing_file_is_a_pipeline_error(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="no such file"):
        Pipeline.load(tmp_path / "nothing.yaml")


def test_everything_wrong_is_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
name: my pipe
stages:
  - name: read
    run: pkg.read
    btch_size: 3
    resources: {memory: 4, gpuss: 1, cpus: "2"}
    rate: 0
  - read
  - {run: "m:f", after: [reed], on_error: skp, resources: 5}
  - {name: a, run: "m:f", after: [b], retries: -1}
  - {name: b, run: "m:f", wrokers: 2}
stage: 1
"""
    found = [(problem.code, problem.place) for problem in problems(tmp_path, text)]
    assert found == [
        *[("DT034", "1:1"), ("DT034", "4:5"), ("DT011", "5:5")],
        *[("DT007", "6:17"), ("DT011", "6:28"), ("DT001", "6:38"), ("DT034", "7:5")],
        ("DT013", "8:5"),
        *[("DT012", "9:5"), ("DT032", "9:26"), ("DT034", "9:33"), ("DT013", "9:48")],
        *[("DT033", "10:35"), ("DT034", "10:39"), ("DT011", "11:27"), ("DT011", "12:1")],
    ]


# ---- plain data


def test_data_without_a_file_is_placed_by_its_path() -> None:
    data = {"stages": [{"name": "a", "run": "m:f", "batch_size": 0, "resources": {"memory": 4}}]}
    with pytest.raises(PipelineError) as caught:
        Pipeline.from_dict(data)
    places = [problem.place for problem in caught.value.problems]
    assert places == ["pipeline.stages[0].resources.memory", "pipeline.stages[0].batch_size"]


@pytest.mark.parametrize(
    "data",
    [
        *[None, 5, "x", [], {}, object(), {1: 2}, {(1, 2): 3}, {"stages": {1, 2}}, {"stages": [{1: 2}]}],
        {"stages": [{"name": object(), "run": b"x", "rate": 10**5000, "gpus": 10**5000, "env": {"A": 10**5000}}]},
    ],
    ids=[str(number) for number in range(11)],
)
def test_data_of_another_form_is_a_pipeline_error(data: Any) -> None:
    with pytest.raises(PipelineError) as caught:
        Pipeline.from_dict(data)
    assert all(problem.place.startswith("pipeline") and problem.fix_texts for problem in caught.value.problems)


def test_data_that_contains_itself_is_a_pipeline_error() -> None:
    data: dict[str, Any] = {"stages": []}
    data["stages"].append(data)
    with pytest.raises(PipelineError):
        Pipeline.from_dict(data)


# ---- anything at all

SLOW_TMP = [HealthCheck.function_scoped_fixture]
LINE_AND_COLUMN = re.compile(r":\d+(:\d+)?$")
TOKENS = [
    *"[]{}:,-?&*!|>'\"%@`#~=<. \n\t0x_",
    *["\r\n", "\x00", "\x85", "é", ": ", "- ", "<<: ", "&a ", "*a", "---\n", "!!int ", "!!set ", "!x "],
    *[
        "null",
        "true",
        ".nan",
        ".inf",
        "-1",
        "1e400",
        "1e3",
        "'",
        "9" * 400,
        "1:60",
        "read",
        "decode",
        "auto",
        "[]",
        "{}",
    ],
]


def check_loading(folder: Path, text: str) -> None:
    """A pipeline, or a deliberate error with line and column; any other exception is not meant to be."""
    found: Pipeline | DovetailError
    try:
        found = load(folder, text)
    except DovetailError as error:
        found = error
    if isinstance(found, Pipeline):
        assert Pipeline.from_dict(found.to_dict()) == found
        return
    assert isinstance(found, PipelineError)
    for problem in found.problems:
        assert problem.message
        assert problem.fix_texts
        assert problem.place == str(folder / "p.yaml") or LINE_AND_COLUMN.search(problem.place)
        # only what is wrong with the text as a whole has no line
        assert problem.code == "DT010" or LINE_AND_COLUMN.search(problem.place)


edits = st.lists(
    st.tuples(st.integers(0, len(TEXT)), st.integers(0, 8), st.one_of(st.sampled_from(TOKENS), st.text(max_size=2))),
    min_size=1,
    max_size=5,
)


@given(changes=edits)
@settings(max_examples=4 * settings().max_examples, suppress_health_check=SLOW_TMP)
def test_a_file_with_a_few_places_changed_is_a_pipeline_or_a_pipeline_error(
    tmp_path: Path, changes: list[tuple[int, int, str]]
) -> None:
    text = TEXT.encode("utf-8", "replace").decode()
    for at, gone, new in changes:
        text = text[:at] + new.encode("utf-8", "replace").decode() + text[at + gone :]
    check_loading(tmp_path, text)


values = st.recursive(
    st.one_of(
        *[st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)],
        st.sampled_from(["auto", "1h", "m:f", "read", "4GB", "skip", 10**400, 16, 0.25]),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "run", "cpus", "gpus", "memory", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)
stage_keys = st.sampled_from([*(item.name for item in fields(Stage)), "gpus", "btach_size"])


@given(changes=st.lists(st.tuples(st.integers(0, 3), stage_keys, values), max_size=5))
@settings(max_examples=2 * settings().max_examples, suppress_health_check=SLOW_TMP)
def test_a_file_with_any_values_is_a_pipeline_or_a_pipeline_error(
    tmp_path: Path, changes: list[tuple[int, str, Any]]
) -> None:
    data = yaml.safe_load(TEXT)
    for number, key, value in changes:
        data["stages"][number][key] = value
    check_loading(tmp_path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


MISTAKES = [
    *[("batch_size: 0", "DT034"), ("rate: -1", "DT034"), ("timeout: soon", "DT034"), ("on_error: explode", "DT034")],
    *[("workers: [3, 1]", "DT034"), ("bathc_size: 1", "DT011"), ("gpus: 1", "DT011"), ("resources: 5", "DT013")],
    *[("slots: .nan", "DT034"), ("env: {A: 1}", "DT034"), ("after: [unknown]", "DT032"), ("fuse: maybe", "DT034")],
]


@given(chosen=st.lists(st.lists(st.sampled_from(MISTAKES), unique=True, max_size=4), min_size=1, max_size=5))
@settings(suppress_health_check=SLOW_TMP)
def test_every_mistake_is_reported_at_its_place_however_many_there_are(
    tmp_path: Path, chosen: list[list[tuple[str, str]]]
) -> None:
    lines, expected = ["stages:"], []
    for number, mistakes in enumerate(chosen):
        lines += [f"  - name: s{number}", "    run: m:f"]
        for text, code in mistakes:
            lines.append(f"    {text}")
            column = 5 if code != "DT032" else 5 + text.index("unknown")
            expected.append((code, f"{len(lines)}:{column}"))
    if expected:
        found = [(problem.code, problem.place) for problem in problems(tmp_path, "\n".join(lines))]
        assert found == expected
    else:
        assert len(load(tmp_path, "\n".join(lines))) == len(chosen)


# ---- the schema for editors


def allows(part: dict[str, Any], value: Any, whole: dict[str, Any]) -> bool:
    """Whether a JSON Schema allows a value, for the words that ours uses."""
    types = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if "$ref" in part and not allows(whole["$defs"][part["$ref"].rsplit("/", 1)[-1]], value, whole):
        return False
    kind = part.get("type")
    right_type = kind is None or (
        is_number and (kind == "number" or value == int(value))
        if kind in ("number", "integer")
        else isinstance(value, types[kind])
    )
    checks = [
        right_type,
        "const" not in part or value == part["const"],
        "enum" not in part or value in part["enum"],
        "anyOf" not in part or any(allows(choice, value, whole) for choice in part["anyOf"]),
        "not" not in part or not allows(part["not"], value, whole),
    ]
    if is_number:
        checks += [part.get("minimum", value) <= value <= part.get("maximum", value)]
        checks += [value > part.get("exclusiveMinimum", value - 1)]
    if isinstance(value, str):
        checks += [part.get("minLength", 0) <= len(value) <= part.get("maxLength", len(value))]
        checks += [re.search(part.get("pattern", ""), value) is not None]
    if isinstance(value, list):
        checks += [part.get("minItems", 0) <= len(value) <= part.get("maxItems", len(value))]
        checks += [allows(part.get("items", {}), item, whole) for item in value]
        checks += [not part.get("uniqueItems") or len(set(map(str, value))) == len(value)]
    if isinstance(value, dict):
        known, others = part.get("properties", {}), part.get("additionalProperties", {})
        checks += [key in value for key in part.get("required", ())]
        checks += [len(value) >= part.get("minProperties", 0)]
        for key, item in value.items():
            rule = known.get(key, others)
            checks += [rule is not False and allows(rule, item, whole)]
    return all(checks)


def test_the_schema_describes_every_key_and_no_other() -> None:
    made = schema()
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert made["title"]
    parts = [made, made["$defs"]["stage"], made["$defs"]["resources"]]
    assert [sorted(part["properties"]) for part in parts] == [
        sorted(PIPELINE_FILE.names),
        sorted(item.name for item in fields(Stage)),
        sorted(item.name for item in fields(Resources)),
    ]
    for part in parts:
        assert part["additionalProperties"] is False
        assert all(entry["description"].endswith(".") for entry in part["properties"].values())
    assert json.loads(json.dumps(made)) == made


def test_the_schema_knows_the_defaults() -> None:
    made = schema()["$defs"]["stage"]["properties"]
    assert (made["batch_size"]["default"], made["workers"]["default"], made["fuse"]["default"]) == (1, "auto", True)


AGREED: list[tuple[str, list[Any]]] = [
    ("name", ["a", "", "a b", 5, None, "x" * 101, "-a"]),
    ("run", ["m:f", "a.b:C.d", "f", "a.f", "a.py:f", "", 5, None, ":"]),
    ("resources", [{}, {"cpus": 2}, None, 5, {"gpuss": 1}, {"memory": 4}, {"memory": "4GB"}, {"memory": "x"}]),
    ("resources", [{"memory": "64KiB"}, {"memory": None}, {"cpus": -1}, {"cpus": "1"}, {"nvdecs": 1.5}]),
    ("resources", [{"labels": {"a": "b"}}, {"labels": {"a": 1}}, {"custom": {"a": 1}}, {"custom": {"a": -1}}]),
    ("batch_size", [1, 0, None, "1", True, 10**7, 10**7 + 1, 1.5]),
    ("workers", ["auto", 1, [1, 4], 0, None, "many", [1], [1, 2, 3], [0, 1], True]),
    ("workers_per_node", [1, None, 0, "1"]),
    ("slots", [1, None, 0]),
    ("rate", [1, 0.5, None, 0, -1, "1", True]),
    ("returns", [0, 1, None, -1]),
    ("ranks", [1, 0, None]),
    ("retries", [0, 3, -1, None]),
    ("on_error", ["fail", "skip", "x", None]),
    ("timeout", [5, "5m", "1h30m", None, 0, "5", "x", "", True]),
    ("setup_timeout", [5, "250ms", None, -1, "m"]),
    ("env", [{}, {"A": "1"}, None, {"A": 1}, []]),
    ("runtime_env", [{}, {"pip": ["x"]}, None, []]),
    ("after", [[], None, "a", [1], ["a", "a"]]),
    ("fuse", [True, False, 1, None]),
    ("barrier", [False, 0, None]),
    ("recycle", [1, "1h", None, 0, "1", True, 1.5]),
]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in AGREED for value in values], ids=str)
def test_the_schema_and_the_reader_agree(key: str, value: Any) -> None:
    data = {"stages": [{"name": "s", "run": "m:f", key: value}]}
    try:
        accepted = bool(Pipeline.from_dict(data))
    except PipelineError:
        accepted = False
    assert allows(schema(), data, schema()) is accepted


def test_the_schema_knows_that_only_one_key_says_how_many_workers() -> None:
    for workers, per_node, fine in ((2, 1, False), ("auto", 1, True), (2, None, True), ([1, 2], 3, False)):
        data = {"stages": [{"name": "s", "run": "m:f", "workers": workers, "workers_per_node": per_node}]}
        assert allows(schema(), data, schema()) is fine


def test_a_file_specifies_retries_with_backoff(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    stages = 'stages:\n  - name: api\n    run: "my_module:call"\n    on_error: '
    file.write_text(stages + "{retry: [ConnectionError, TimeoutError], times: 2, backoff: 500ms, then: skip}\n")
    pipeline = dt.Pipeline.load(file)
    wanted = dt.Retry(ConnectionError, "TimeoutError", times=2, backoff="500ms", then="skip")
    assert pipeline.stage("api").on_error == wanted
    assert Pipeline.from_dict(pipeline.to_dict()).stage("api").on_error == wanted
    file.write_text(stages + "{retry: 5, times: 0, bakoff: 1s}\n")
    with pytest.raises(dt.DovetailError) as raised:
        dt.Pipeline.load(file)
    text = str(raised.value)
    assert all(part in text for part in ("Retry(5)", "times=0", "'bakoff' (did you mean 'backoff'?)", "p.yaml:4"))


def test_a_stage_with_retries_is_not_fused_and_a_barrier_has_none() -> None:
    retry = dt.Retry(ConnectionError)
    pipeline = dt.Pipeline([dt.Stage("a", print, on_error=retry), dt.Stage("b", print, on_error=retry)])
    assert [unit.name for unit in fuse_stages(pipeline)] == ["a", "b"]
    with pytest.raises(dt.PipelineError, match="a barrier is retried as a whole"):
        dt.Pipeline([dt.Stage("a", print, barrier=True, on_error=retry)])
