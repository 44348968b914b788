"""The likeliest mistakes of beginners: each message names the mistake, and the printed fix works when it is pasted.

A fix is applied in the form in which it is printed: an option is added to the command, a command is run, a line of a
file replaces the entry at the place of the error, a spec replaces the spec, and Python is put into the program.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

import pytest
import yaml

import dovetail as dt
from cli.jobs import CLUSTER, CommandFolder

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "source: in.jsonl\nsink: out.jsonl\nstages:\n"
DOUBLE = '  - {name: double, run: "steps:double"}\n'
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def place(tmp_path: Path, in_process: None) -> CommandFolder:
    return CommandFolder(tmp_path / "project")


def printed_fixes(done: Done) -> list[str]:
    """The fixes without their comments."""
    return [line.partition("  # ")[0].strip() for line in re.findall(r"^  fix  (.*)$", done.stderr, re.MULTILINE)]


def error_place(done: Done) -> tuple[str, int, int]:
    """File, line and column of the first error."""
    found = re.search(r"^error\[DT\d+\] (\S+?):(\d+):(\d+)  ", done.stderr, re.MULTILINE)
    assert found is not None, done.stderr
    return found[1], int(found[2]), int(found[3])


# ---- how a fix is applied


def as_option(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    """Add the option, in place of an option of the same name that can be given only once."""
    words = shlex.split(fix)
    kept = list(command)
    if words[0] in kept and (words[0] != "--set" or "no stage" in done.stderr):
        at = kept.index(words[0])
        del kept[at : at + 2]
    return [*kept, *words]


def as_set_option(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    """Replace the `--set` that is wrong."""
    return as_option(place, as_removal(place, command, done, "remove --set"), done, fix)


def as_removal(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    at = command.index(fix.removeprefix("remove "))
    return [*command[:at], *command[at + 2 :]]


def as_removal_of_share(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    """`--cluster "1x(4cpu, 8GB)", and omit --share`."""
    option, _, omitted = fix.partition(", and omit ")
    assert omitted == "--share"
    return [*as_removal(place, command, done, f"remove {omitted}"), *shlex.split(option)]


def as_command(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    words = shlex.split(fix)
    assert words[0] == "dovetail"
    return words[1:]


def as_argument(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    return [command[0], fix, *command[2:]]


def as_arguments(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    """`p.yaml --source in.jsonl` in place of the file."""
    return [command[0], *shlex.split(fix), *command[2:]]


def as_spec(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    at = command.index("--cluster") + 1
    (spec,) = shlex.split(fix)
    return [*command[:at], spec, *command[at + 1 :]]


def as_line(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    """Put the line into the file, in place of the entry that the error names."""
    name, line, column = error_place(done)
    path = place.folder / name
    text = path.read_text()
    start, end = entry_at(text, line - 1, column - 1)
    path.write_text(text[:start] + fix + text[end:])
    return command


def as_first_line(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    path = place.folder / command[1]
    path.write_text(f"{fix}\n{path.read_text()}")
    return command


def as_end_of_line(place: CommandFolder, command: list[str], done: Done, fix: str) -> list[str]:
    """ "add X at the end of the value"."""
    name, line, _ = error_place(done)
    lines = (place.folder / name).read_text().splitlines()
    lines[line - 1] += fix.split()[1]
    (place.folder / name).write_text("\n".join(lines))
    return command


def entry_at(text: str, line: int, column: int) -> tuple[int, int]:
    """Start and end of the key and value at this place, or of the list around an item."""
    pending = [yaml.compose(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = value.value if isinstance(value, yaml.SequenceNode) and value.flow_style else []
                for one in (key, *inner):
                    if (one.start_mark.line, one.start_mark.column) == (line, column):
                        return key.start_mark.index, value.end_mark.index
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value
    raise AssertionError(f"nothing is at {line}:{column}")


# ---- mistakes on the command line and in files


Apply = Callable[[CommandFolder, list[str], Done, str], list[str]]


@dataclass(frozen=True)
class MistakeCase:
    """A mistake, its expected message, and how the fix with this number is applied."""

    message: str
    apply: Apply
    file: str = HEAD + DOUBLE
    command: tuple[str, ...] = ("run", "p.yaml")
    fix: int = 0
    before: tuple[tuple[str, ...], ...] = ()
    """Commands that succeed first."""
    files: dict[str, str] = field(default_factory=dict)
    code: int = 2
    plain: bool = False
    """Run on this machine, not on two CPUs."""


def existing_sink(sink: str, fix: int = 0) -> MistakeCase:
    """A run whose output file exists."""
    text = HEAD.replace("out.jsonl", sink) + DOUBLE
    return MistakeCase("the file exists", as_option, text, files={"out.jsonl": "{}\n"}, fix=fix)


def stage(text: str) -> str:
    return f'{HEAD}  - {{name: double, run: "steps:double", {text}}}\n'


MISTAKES = {
    "misspelt key": MistakeCase(
        "did you mean 'source'?", as_line, "soruce: in.jsonl\nsink: out.jsonl\nstages:\n" + DOUBLE
    ),
    "misspelt key of a stage": MistakeCase("did you mean 'batch_size'?", as_line, stage("batchsize: 4")),
    "key outside of resources": MistakeCase("it belongs under 'resources'", as_line, stage("cpus: 1")),
    "key of a stage at the top": MistakeCase(
        "it belongs to a stage, or to 'defaults'", as_line, f"on_error: skip\n{HEAD}{DOUBLE}"
    ),
    "misspelt function": MistakeCase(
        "steps has no 'duoble' (did you mean 'double'?)", as_line, HEAD + '  - {name: a, run: "steps:duoble"}\n'
    ),
    "misspelt module": MistakeCase(
        "no module named 'step' (did you mean 'steps'?)", as_line, HEAD + '  - {name: a, run: "step:double"}\n'
    ),
    "function of a file": MistakeCase("is not the module", as_line, HEAD + '  - {name: a, run: "steps.py:double"}\n'),
    "misspelt file": MistakeCase("no such file (did you mean 'p.yaml'?)", as_argument, command=("run", "pp.yaml")),
    "code instead of a pipeline": MistakeCase("is Python code", as_argument, command=("run", "steps.py")),
    "data instead of a pipeline": MistakeCase("is data, not a pipeline", as_arguments, command=("run", "in.jsonl")),
    "misspelt stage in after": MistakeCase(
        "did you mean 'double'?", as_line, HEAD + DOUBLE + '  - {name: even, run: "steps:even", after: [duoble]}\n'
    ),
    "misspelt stage in --set": MistakeCase(
        "no stage 'duoble' (did you mean 'double'?)",
        as_option,
        command=("run", "p.yaml", "--set", "stages.duoble.workers=1"),
    ),
    "misspelt GPU": MistakeCase(
        "did you mean 'H100'?", as_spec, command=("plan", "p.yaml", "--cluster", "1x(8cpu, 2xH10O)")
    ),
    "misspelt GPU of a stage": MistakeCase(
        "did you mean 'H100'?",
        as_line,
        stage("resources: {gpus: 1, accelerator: H10O}"),
        ("plan", "p.yaml", "--cluster", "p5.48xlarge"),
    ),
    "GPU model that the cluster does not have": MistakeCase(
        "H100 here, mi300x needed",
        as_option,
        stage("resources: {gpus: 1, accelerator: MI300X}"),
        ("plan", "p.yaml", "--cluster", "p5.48xlarge"),
        fix=1,
        code=3,
    ),
    "missing brackets in a cluster": MistakeCase(
        "the brackets around '8cpu, 32GB' are missing", as_spec, command=("plan", "p.yaml", "--cluster", "2x8cpu, 32GB")
    ),
    "setting of all stages in --set": MistakeCase(
        "it belongs to a stage, or to 'defaults'", as_set_option, command=("run", "p.yaml", "--set", "batch_size=4")
    ),
    "setting of resources in --set": MistakeCase(
        "it belongs under 'resources'", as_set_option, command=("run", "p.yaml", "--set", "stages.double.cpus=1")
    ),
    "misspelt instance type": MistakeCase(
        "did you mean 'p5.48xlarge'?", as_spec, command=("plan", "p.yaml", "--cluster", "2xp5.48xlrge")
    ),
    "missing comma in a cluster": MistakeCase(
        "a comma is missing", as_spec, command=("plan", "p.yaml", "--cluster", "2x(8cpu, 32GB 2xL40S)")
    ),
    "unclosed bracket in a cluster": MistakeCase(
        "is not closed", as_spec, command=("plan", "p.yaml", "--cluster", "2x(8cpu, 32GB")
    ),
    "missing data file": MistakeCase("did you mean 'in.jsonl'?", as_option, HEAD.replace("in.", "inn.") + DOUBLE),
    "no source": MistakeCase("no source", as_first_line, "sink: out.jsonl\nstages:\n" + DOUBLE),
    "no source, as an option": MistakeCase("no source", as_option, "sink: out.jsonl\nstages:\n" + DOUBLE, fix=1),
    "too many CPUs": MistakeCase(
        "fits on 0 of 1 nodes", as_option, stage("resources: {cpus: 4000}"), code=3, plain=True
    ),
    "worker larger than every node": MistakeCase(
        "fits on 0 of 2 nodes",
        as_option,
        stage("resources: {gpus: 2}") + '  - {name: even, run: "steps:even", resources: {memory: 90GB}}\n',
        ("plan", "p.yaml", "--cluster", "2x(4cpu, 16GB)"),
        code=3,
    ),
    "another interpreter on this machine": MistakeCase(
        "the local engine does not support 'py_executable' of runtime_env",
        as_option,
        stage("runtime_env: {py_executable: /opt/python, env_vars: {A: '1'}}"),
        fix=2,
    ),
    "variable of a gang": MistakeCase(
        "RANK is set by Dovetail for every rank", as_line, stage("ranks: 2, env: {RANK: '0', A: '1'}")
    ),
    "two stages of one name": MistakeCase("are both called 'double'", as_line, HEAD + DOUBLE + DOUBLE),
    "cycle": MistakeCase(
        "form a cycle",
        as_line,
        stage("after: [even]") + '  - {name: even, run: "steps:even", after: [double]}\n',
    ),
    "wrong type": MistakeCase("is not a whole number", as_line, stage("batch_size: many")),
    "wrong type in --set": MistakeCase(
        "is not a whole number", as_option, command=("run", "p.yaml", "--set", "stages.double.batch_size=many")
    ),
    "unknown suffix of the source": MistakeCase(
        "unknown format", as_option, HEAD.replace("in.jsonl", "in.rows") + DOUBLE, files={"in.rows": '{"n": 1}\n'}
    ),
    "unknown suffix of the sink": MistakeCase(
        "no known format suffix", as_option, HEAD.replace("out.jsonl", "out.rows") + DOUBLE
    ),
    "format of the sink": MistakeCase(
        "no known format suffix", as_option, HEAD.replace("out.jsonl", "out.rows") + DOUBLE, fix=1
    ),
    "sink exists": existing_sink("{path: out.jsonl, exists: fail}"),
    "sink exists, appended to": existing_sink("{path: out.jsonl, exists: fail}", fix=1),
    "sink of a leaf exists": existing_sink("{stages: {double: {path: out.jsonl, exists: fail}}}"),
    "sink of a leaf exists, appended to": existing_sink("{stages: {double: {path: out.jsonl, exists: fail}}}", fix=1),
    "unknown suffix of the sink of a leaf": MistakeCase(
        "no known format suffix", as_option, HEAD.replace("out.jsonl", "{stages: {double: out.rows}}") + DOUBLE
    ),
    "misspelt format": MistakeCase(
        "did you mean 'jsonl'?", as_option, HEAD.replace("in.jsonl", "{path: in.jsonl, format: jsnl}") + DOUBLE
    ),
    "misspelt on_error": MistakeCase("stage 'double': on_error='skp' is not", as_line, stage("on_error: skp")),
    "stages that are no list": MistakeCase(
        "stages should be a list", as_line, HEAD.replace("stages:\n", "stages: {name: a, run: 'steps:double'}\n")
    ),
    "a folder": MistakeCase("is a folder, not a file", as_argument, command=("run", ".")),
    "share of a local run": MistakeCase(
        "--share 0.5 applies to Ray clusters only",
        as_removal_of_share,
        command=("run", "p.yaml", "--share", "0.5"),
        fix=1,
    ),
    "sink is the source": MistakeCase(
        "the sink is a part of the source", as_option, HEAD.replace("out.", "in.") + DOUBLE
    ),
    "unclosed quote": MistakeCase(
        'the quote " is not closed', as_end_of_line, HEAD.replace("out.jsonl", '"out.jsonl') + DOUBLE
    ),
    "resume of a finished run": MistakeCase(
        "is already finished", as_command, command=("run", "--resume", "last"), before=(("run", "p.yaml"),)
    ),
    "retry of rows that cannot be parsed": MistakeCase(
        "no failed items to retry",
        as_command,
        command=("run", "--retry-errors", "last"),
        before=(("run", "p.yaml"),),
        files={"in.jsonl": '{"n": 1}\nnot JSON\n'},
    ),
    "an item that fails": MistakeCase(
        "a seven: 7", as_option, HEAD + '  - {name: a, run: "steps:no_sevens"}\n', fix=1, code=1
    ),
    "an item of a recipe that fails": MistakeCase(
        "a seven: 7",
        as_option,
        "dataset_path: in.jsonl\nexport_path: out.jsonl\nskip_op_error: false\nprocess: ['mine:check']\n",
        ("run", "p.yaml", "--no-probe"),
        files={"mine.py": "def check(row):\n    assert row['n'] != 7, 'a seven: 7'\n    return row\n"},
        fix=1,
        code=1,
    ),
    "too many items that fail": MistakeCase(
        "more than max_errors allows",
        as_option,
        HEAD + '  - {name: a, run: "steps:no_sevens", on_error: skip}\n',
        ("run", "p.yaml", "--max-errors", "1"),
        fix=1,
        code=1,
    ),
    "too many items that fail, in the file": MistakeCase(
        "more than max_errors allows",
        as_option,
        "max_errors: 1\n" + HEAD + '  - {name: a, run: "steps:no_sevens", on_error: skip}\n',
        fix=1,
        code=1,
    ),
    "a cluster on Ray": MistakeCase(
        "cannot be combined",
        as_removal,
        command=("plan", "p.yaml", "--cluster", "1x(4cpu)", "--engine", "ray:auto"),
        fix=1,
    ),
    "misspelt engine": MistakeCase("did you mean 'local'?", as_option, command=("run", "p.yaml", "--engine", "locl")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_printed_fix_works_when_it_is_pasted(
    place: CommandFolder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MISTAKES[name]
    (place.folder / "p.yaml").write_text(case.file)
    for file, text in case.files.items():
        (place.folder / file).write_text(text)
    if not case.plain:
        monkeypatch.setenv("DOVETAIL_CLUSTER", CLUSTER[1])
    for command in case.before:
        assert place.run(*command).returncode == 0
    failed = place.run(*case.command)
    assert failed.returncode == case.code, failed.stderr
    assert case.message in failed.stderr
    fix = printed_fixes(failed)[case.fix]
    corrected = case.apply(place, list(case.command), failed, fix)
    done = place.run(*corrected)
    assert done.returncode == 0, f"{fix}\n{corrected}\n{done.stderr}"


def test_nothing_that_cannot_be_retried_is_offered_to_be_retried(place: CommandFolder) -> None:
    def offered() -> re.Match[str] | None:
        done = place.run("run", "p.yaml", *CLUSTER)
        assert done.returncode == 0, done.stderr
        return re.search(r"dovetail (run --retry-errors \S+)", done.stderr + text_of_command(place, "status"))

    (place.folder / "in.jsonl").write_text('{"n": 1}\nnot JSON\n')
    assert offered() is None
    place.file("source: in.jsonl\nsink: out.jsonl", "no_sevens", more=", on_error: skip")
    (place.folder / "in.jsonl").write_text('{"n": 7}\nnot JSON\n')
    retry = offered()
    assert retry is not None
    (place.folder / "steps.py").write_text("def no_sevens(rows):\n    return rows\n")
    assert place.run(*retry[1].split()).returncode == 0
    assert place.result() == [{"n": 7}]


def text_of_command(place: CommandFolder, *command: str) -> str:
    done = place.run(*command)
    return done.stdout + done.stderr


def test_an_empty_source_is_named(place: CommandFolder) -> None:
    (place.folder / "in.jsonl").write_text("")
    (place.folder / "other.jsonl").write_text('{"n": 1}\n')
    done = place.run("run", "p.yaml", *CLUSTER)
    assert "the source is empty; --source PATH reads another one" in done.stderr
    assert "is empty" not in place.run("run", "p.yaml", *CLUSTER, "--source", "other.jsonl").stderr


def test_a_misspelt_command_is_named(place: CommandFolder) -> None:
    failed = place.run("rnu", "p.yaml")
    meant = re.search(r"did you mean '(\w+)'\?", failed.stderr)
    assert failed.returncode == 2
    assert meant is not None
    assert place.run(meant[1], "p.yaml", *CLUSTER).returncode == 0


def test_a_file_without_a_command_is_run(place: CommandFolder) -> None:
    failed = place.run("p.yaml")
    meant = re.search(r"did you mean '([^']+)'\?", failed.stderr)
    assert failed.returncode == 2
    assert meant is not None
    assert place.run(*meant[1].split(), *CLUSTER).returncode == 0


def test_a_line_of_the_project_file_works(place: CommandFolder) -> None:
    file = place.folder / "dovetail.toml"
    file.write_text('clutser = "1x(2cpu, 4GB)"\n')
    failed = place.run("run", "p.yaml")
    assert failed.returncode == 2
    assert f"{file}:1  unknown key 'clutser' (did you mean 'cluster'?)" in failed.stderr
    file.write_text(printed_fixes(failed)[0])
    assert place.run("run", "p.yaml").returncode == 0


def test_a_variable_that_is_printed_works(place: CommandFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = place.run("run", "p.yaml", DOVETAIL_VERBOSITY="loud")
    name, value = printed_fixes(failed)[0].split("=")
    monkeypatch.setenv(name, value)
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 0


def test_a_function_that_expects_one_item_gets_the_decorator(place: CommandFolder) -> None:
    code = 'def first(row):\n    return row["n"]\n'
    (place.folder / "mine.py").write_text(code)
    (place.folder / "p.yaml").write_text(HEAD + '  - {name: first, run: "mine:first"}\n')
    failed = place.run("run", "p.yaml", *CLUSTER)
    decorator = re.search(r"decorate it with (@\S+)", failed.stderr)
    assert failed.returncode == 1
    assert decorator is not None
    (place.folder / "mine.py").write_text(f"import dovetail as dt\n\n{decorator[1]}\n{code}")
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 0


def test_a_result_that_cannot_be_printed_names_the_plain_types(place: CommandFolder) -> None:
    (place.folder / "p.yaml").write_text("source: in.jsonl\nstages:\n" + '  - {name: a, run: "steps:objects"}\n')
    failed = place.run("run", "p.yaml", *CLUSTER)
    assert failed.returncode == 1
    (fix,) = printed_fixes(failed)
    types = re.search(r"\((.*)\)", fix)
    assert types is not None
    assert {"dict", "list", "str", "None"} <= set(types[1].split(", "))
    place.file("source: in.jsonl", "double")
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 0


# ---- mistakes in Python


def same(items: list[int]) -> list[int]:
    return items


def rows() -> object:
    yield from (1, 2, 3)


def fixes_of(wrong: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(dt.DovetailError) as caught:
        wrong()
    return tuple(fix.partition("  # ")[0] for fix in caught.value.problems[0].fix_texts)


def keywords(fix: str) -> dict[str, object]:
    """The keywords of a fix such as `source=rows()`."""
    call = ast.parse(f"f({fix})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {one.arg or "": eval(ast.unparse(one.value), {"dt": dt, "rows": rows}) for one in call.keywords}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> Path:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DOVETAIL_CLUSTER", CLUSTER[1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_generator_for_two_runs(home: Path) -> None:
    pipeline, source = dt.Pipeline([dt.Stage("same", same)]), rows()
    assert sorted(dt.run(pipeline, source)) == [1, 2, 3]
    (fix,) = fixes_of(lambda: dt.run(pipeline, source))
    assert sorted(dt.run(pipeline, **keywords(fix))) == [1, 2, 3]  # type: ignore[arg-type]


def test_a_misspelt_engine_in_python(home: Path) -> None:
    pipeline = dt.Pipeline([dt.Stage("same", same)])
    fix, *_ = fixes_of(lambda: dt.run(pipeline, [1], engine="locl"))
    assert list(dt.run(pipeline, [1], **keywords(fix))) == [1]  # type: ignore[arg-type]


def test_a_missing_data_file_in_python(home: Path) -> None:
    (home / "in.jsonl").write_text('{"n": 1}\n')
    pipeline = dt.Pipeline([dt.Stage("same", same)])
    (fix,) = fixes_of(lambda: dt.run(pipeline, "inn.jsonl"))
    assert list(dt.run(pipeline, **keywords(fix))) == [{"n": 1}]  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"workers": 0}, {"on_error": "skp"}, {"retries": -1}])
def test_a_wrong_value_of_a_stage_in_python(settings: dict[str, object]) -> None:
    fix, *_ = fixes_of(lambda: dt.Pipeline([dt.Stage("same", same, **settings)]))  # type: ignore[arg-type]
    dt.Pipeline([dt.Stage("same", same, **keywords(fix))])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"batchsize": 4}, {"batch_size": 4}),
        ({"cpus": 2}, {"resources": dt.Resources(cpus=2)}),
        ({"num_gpus": 1, "cpu": 2}, {"resources": dt.Resources(cpus=2, gpus=1)}),
        ({"resources": dt.Resources(memory="1GB"), "gpu": 1}, {"resources": dt.Resources(gpus=1, memory="1GB")}),
    ],
)
def test_an_unknown_argument_of_a_stage_in_python(settings: dict[str, object], wanted: dict[str, object]) -> None:
    (fix,) = fixes_of(lambda: dt.Stage("same", same, **settings))  # type: ignore[arg-type]
    assert keywords(fix) == wanted
    dt.Pipeline([dt.Stage("same", same, **keywords(fix))])  # type: ignore[arg-type]


def test_all_unknown_arguments_of_a_stage_are_reported() -> None:
    with pytest.raises(dt.PipelineError) as caught:
        dt.Stage("same", same, batchsize=4, gpus=1, nothing=5)  # type: ignore[call-arg]
    assert caught.value.codes == ("DT011",) * 3
    assert "'gpus': what a worker needs belongs to `resources`" in str(caught.value)
    assert "remove nothing=" in str(caught.value)


def test_an_unknown_argument_of_resources_in_python() -> None:
    (fix,) = fixes_of(lambda: dt.Resources(gpu=2, cpus=1))  # type: ignore[call-arg]
    assert dt.Resources(**keywords(fix)) == dt.Resources(gpus=2)  # type: ignore[arg-type]


def test_a_sink_in_the_place_of_the_engine_in_python(home: Path) -> None:
    pipeline = dt.Pipeline([dt.Stage("same", same)])
    (fix,) = fixes_of(lambda: dt.run(pipeline, [1], "out.jsonl"))
    dt.run(pipeline, [1], **keywords(fix)).wait()  # type: ignore[arg-type]
    assert (home / "out.jsonl").read_text() == "1\n"


def test_a_source_in_the_place_of_the_pipeline_in_python(home: Path) -> None:
    first, *_ = fixes_of(lambda: dt.run(range(3), [same]))  # type: ignore[arg-type]
    assert first == "dt.run([function], source)"
    assert sorted(dt.run([same], range(3))) == [0, 1, 2]


def test_a_file_in_the_place_of_the_pipeline_in_python(home: Path) -> None:
    (home / "p.yaml").write_text('stages: [{name: copy, run: "copy:copy"}]\n')
    fix, _ = fixes_of(lambda: dt.run("p.yaml", [1, 2]))
    assert fix == 'dt.run(dt.Pipeline.load("p.yaml"), source)'
    assert sorted(eval(fix, {"dt": dt, "source": [1, 2]})) == [1, 2]


def test_a_spec_in_the_place_of_nodes_in_python() -> None:
    (fix,) = fixes_of(lambda: dt.Cluster("2x(4cpu)"))  # type: ignore[arg-type]
    assert len(eval(fix, {"dt": dt}).nodes) == 2


def test_two_stages_of_one_name_in_python() -> None:
    (fix,) = fixes_of(lambda: dt.Pipeline([dt.Stage("same", same), dt.Stage("same", same)]))
    dt.Pipeline([dt.Stage("same", same), dt.Stage(run=same, **keywords(fix))])  # type: ignore[arg-type]


def test_a_function_that_holds_a_lock_becomes_a_class_with_a_setup(home: Path) -> None:
    lock = Lock()

    def guarded(items: list[int]) -> list[int]:
        with lock:
            return items

    (fix,) = fixes_of(lambda: list(dt.run([guarded], [1, 2])))
    assert "open files, locks and connections in the setup(worker) of a class" in fix
    assert sorted(dt.run([Guarded], [1, 2])) == [1, 2]


class Guarded:
    def setup(self, worker: object) -> None:
        self._lock = Lock()

    def __call__(self, items: list[int]) -> list[int]:
        with self._lock:
            return items


def locks(items: list[int]) -> list[object]:
    return [Lock() for _ in items]


def forgets_to_return(items: list[int]) -> list[int]:
    sorted(items)
    return None  # type: ignore[return-value]


def counts(items: list[int]) -> list[int]:
    return len(items)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("wrong", "message", "how"),
    [
        (
            locks,
            "the result cannot be pickled: TypeError: cannot pickle '_thread.lock'",
            "return data (numbers, texts,",
        ),
        (forgets_to_return, "returned None", "return a list ([] drops the items)"),
        (counts, "returned an int (1)", "return a list ([] drops the items)"),
    ],
)
def test_a_result_of_the_wrong_kind_becomes_a_list_of_data(
    home: Path, wrong: Callable[[list[int]], list[int]], message: str, how: str
) -> None:
    with pytest.raises(dt.RunError) as caught:
        list(dt.run([wrong], [1, 2]))
    assert message in str(caught.value)
    assert how in str(caught.value)
    assert sorted(dt.run([same], [1, 2])) == [1, 2]


def test_resources_that_fit_nowhere_in_python() -> None:
    pipeline = dt.Pipeline([dt.Stage("same", same, dt.Resources(cpus=64))])
    fix, *_ = fixes_of(lambda: dt.plan(pipeline, "1x(4cpu)"))
    dt.plan(dt.Pipeline([dt.Stage("same", same, dt.Resources(**keywords(fix)))]), "1x(4cpu)")  # type: ignore[arg-type]
