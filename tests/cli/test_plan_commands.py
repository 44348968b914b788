"""`dovetail plan` and `dovetail explain`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import dovetail as dt
from command import run_command as run

VIDEO = str(Path(__file__).parents[2] / "examples" / "video.yaml")
SPEC = "1x(32cpu, 128GB, 2xL40S:48GB)"
GPU_PIPELINE = """
name: many
stages:
  - {name: a, run: "m:a", resources: {cpus: 4, gpus: 1}, workers: 2}
  - {name: b, run: "m:b", resources: {cpus: 4, gpus: 1}, workers: 2}
"""


def test_json_on_stdout_is_the_plan_and_nothing_else() -> None:
    shown = run("plan", VIDEO, "--cluster", SPEC, "--json")
    assert shown.returncode == 0
    data = json.loads(shown.stdout)
    assert {"rate", "bound", "bottleneck", "workers", "units", "seats", "notes"} <= data.keys()
    made = dt.plan(dt.Pipeline.load(VIDEO), SPEC)
    assert shown.stdout == made.to_json() + "\n"


def test_a_plan_is_shown_to_people() -> None:
    shown = run("plan", VIDEO, "--cluster", SPEC)
    assert shown.returncode == 0
    made = dt.plan(dt.Pipeline.load(VIDEO), SPEC)
    assert f"bottleneck: {made.bottleneck}" in shown.stdout
    assert all(name in shown.stdout for name in made.workers)
    assert "% of the bound" in shown.stdout
    assert "dovetail explain" in shown.stderr


def test_a_written_plan_is_explained_and_leaves_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("an older plan")
    written = run("plan", VIDEO, "--cluster", SPEC, "--out", str(file))
    assert written.returncode == 0
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]
    made = dt.plan(dt.Pipeline.load(VIDEO), SPEC)
    assert dt.Plan.from_json(file.read_text()) == made
    result = run("explain", str(file), "caption")
    assert result.returncode == 0
    assert result.stdout == made.explain("caption") + "\n"
    assert run("explain", str(file), COLUMNS="200").stdout == made.explain() + "\n"
    assert all(len(line) <= 80 for line in run("explain", str(file)).stdout.splitlines()[4:9])
    assert run("explain", str(file), "--cluster", SPEC).returncode == 0


def test_a_plan_that_cannot_be_written_is_exit_code_2_and_leaves_nothing(tmp_path: Path) -> None:
    shown = run("plan", VIDEO, "--cluster", SPEC, "--out", str(tmp_path / "no" / "plan.json"))
    assert shown.returncode == 2
    assert "DT025" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_refused_on_another_cluster(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert run("plan", VIDEO, "--cluster", SPEC, "--out", str(file)).returncode == 0
    shown = run("explain", str(file), "--cluster", "1x(16cpu, 128GB, 2xL40S:48GB)")
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert "error[DT037]" in shown.stderr
    assert "16cpu" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", VIDEO, "--cluster", SPEC, "--mode", "bogus"), "is not one of"),
        (("plan", VIDEO, "--cluster", SPEC, "--mode", "streeming"), "did you mean 'streaming'?"),
        (("plan", VIDEO, "--cluster", SPEC, "--headroom", "0.5"), "DT036"),
        (("plan", VIDEO, "--cluster", SPEC, "--headroom", "nan"), "DT036"),
        (("plan", VIDEO, "--cluster", "1x(32gpu)"), "error["),
        (("plan", "no-such-file.yaml", "--cluster", SPEC), "no-such-file.yaml"),
        (("explain", "no-such-plan.json"), "no-such-plan.json"),
        (("explain", VIDEO, "captoin", "--cluster", SPEC), "did you mean 'caption'?"),
        (("plan",), "FILE"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_message_and_no_traceback(arguments: tuple[str, ...], message: str) -> None:
    shown = run(*arguments)
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', "\0"])
def test_a_plan_file_that_holds_no_plan_is_exit_code_2(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    shown = run("explain", str(file))
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "error[DT038]" in shown.stderr


def test_a_plan_file_with_a_text_for_its_rate_is_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    data = dt.plan(dt.Pipeline.load(VIDEO), SPEC).to_dict()
    file.write_text(json.dumps(data | {"rate": "fast"}))
    shown = run("explain", str(file))
    assert "Traceback" not in shown.stderr
    assert (shown.returncode, shown.stdout) == (2, "")


def test_what_does_not_fit_is_exit_code_3_with_nothing_on_stdout(tmp_path: Path) -> None:
    file = tmp_path / "many.yaml"
    file.write_text(GPU_PIPELINE)
    out = tmp_path / "plan.json"
    shown = run(
        "plan", str(file), "--cluster", "1x(32cpu, 2xgpu:20GB)", "--mode", "streaming", "--out", str(out), "--json"
    )
    assert shown.returncode == 3
    assert shown.stdout == ""
    assert "4 GPUs" in shown.stderr
    assert "--mode waves" in shown.stderr
    assert not out.exists()
    waves = run("plan", str(file), "--cluster", "1x(32cpu, 2xgpu:20GB)", "--mode", "waves", "--json")
    assert json.loads(waves.stdout)["waves"] == [["a"], ["b"]]


def test_cards_without_encoders_are_exit_code_3_with_cards_that_have_them() -> None:
    shown = run("plan", VIDEO, "--cluster", "1x(32cpu, 128GB, 2xH100)")
    assert (shown.returncode, shown.stdout) == (3, "")
    assert "error[DT112]" in shown.stderr
    assert "L40S" in shown.stderr


def test_explain_json_has_the_gain_of_one_more_node() -> None:
    shown = run("explain", VIDEO, "--cluster", SPEC, "--json")
    data = json.loads(shown.stdout)
    assert [entry["what"].split()[0] for entry in data["one_more"]] == ["node", "GPU", "CPU"]
    assert all(entry["rate"] >= data["rate"] for entry in data["one_more"])


def test_notes_are_printed_for_people(tmp_path: Path) -> None:
    file = tmp_path / "cpu.yaml"
    file.write_text('stages: [{name: a, run: "m:a"}, {name: b, run: "m:b", fuse: false}]')
    shown = run("plan", str(file), "--cluster", "8x(64cpu, 8xgpu:20GB)")
    assert "note: 64 of 64 GPUs stay idle" in shown.stdout
    assert "rate unknown: no stage has been measured" in shown.stdout
    assert "items/s," not in shown.stdout


ORDERED_PIPELINE = """
sink: {path: out.jsonl, ordered: true}
stages:
  - {name: keep, run: "m:a", returns: 0.1}
  - {name: embed, run: "m:b", batch_size: 32, fuse: false}
"""


def test_a_plan_says_where_ordered_results_cost_full_batches_and_its_fix_works_when_pasted(tmp_path: Path) -> None:
    file = tmp_path / "ordered.yaml"
    file.write_text(ORDERED_PIPELINE)
    words = ["plan", str(file), "--cluster", "1x(4cpu, 8GB)"]
    notes = [line for line in run(*words).stdout.splitlines() if "batch_size" in line]
    assert len(notes) == 1
    assert notes[0].startswith("note: results are ordered, so the last batch of each epoch (about 1.0 s of input")
    assert "may be smaller than batch_size in embed;" in notes[0]
    fix = notes[0].partition("for full batches: ")[2]
    assert fix == "--set sink.ordered=false"
    assert "batch_size" not in run(*words, *shlex.split(fix)).stdout
    assert sum("batch_size" in note for note in json.loads(run(*words, "--json").stdout)["notes"]) == 1
    assert "batch_size in embed" in run("explain", *words[1:]).stdout
    assert "--set ordered=false" in run(*words, "--set", "ordered=true").stdout


def test_an_infeasible_stage_is_reported_with_its_line_and_fixes_for_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("stages:\n  - {name: a, run: 'm:a'}\n  - {name: b, run: 'm:b', resources: {cpus: 9}}\n")
    shown = run("plan", str(file), "--cluster", "1x(4cpu, 8GB)")
    assert shown.returncode == 3
    assert f"{file}:3:5  stage 'b'" in shown.stderr
    assert "fix  --set stages.b.resources.cpus=4\n" in shown.stderr
    for command in ("plan", "explain", "simulate"):
        pasted = run(command, str(file), "--cluster", "1x(4cpu, 8GB)", "--set", "stages.b.resources.cpus=4")
        assert pasted.returncode == 0, pasted.stderr
    bigger = shown.stderr.rpartition("--cluster ")[2].strip().strip('"')
    assert run("plan", str(file), "--cluster", bigger).returncode == 0


def test_the_next_command_works_when_pasted() -> None:
    shown = run("plan", VIDEO, "--cluster", "1x(32cpu, 128GB, 2xL40S:48GB)", "--headroom", "1", "--mode", "streaming")
    command = shlex.split(shown.stderr.rpartition("Next:  ")[2])
    assert command[0] == "dovetail"
    assert run(*command[1:]).returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "stages.a.resources.cpus=2", "--no-profiles"),
        ("--cluster", "2x(4cpu, 8GB)", "--mode", "sequential", "--headroom", "2"),
        ("--engine", "ray", "--set", "stages.b.workers=1"),
    ],
)
def test_the_next_command_has_the_options_that_were_given(tmp_path: Path, options: tuple[str, ...]) -> None:
    file = tmp_path / "my pipeline.yaml"
    file.write_text("source: in.jsonl\nstages:\n  - {name: a, run: 'm:a'}\n  - {name: b, run: 'm:b'}\n")
    shown = run("plan", str(file), *options)
    assert shown.returncode == 0, shown.stderr
    command = shlex.split(shown.stderr.rpartition("Next:  ")[2])
    assert command[:3] == ["dovetail", "explain", str(file)]
    assert sorted(command[3:]) == sorted(options)
    explained = run(*command[1:], "--json")
    assert explained.returncode == 0, explained.stderr
    assert (
        json.loads(explained.stdout)["units"] == json.loads(run("plan", str(file), *options, "--json").stdout)["units"]
    )


def test_the_source_of_a_recipe_may_be_given_to_plan_explain_and_simulate(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "r.yaml").write_text("process: [text_length_filter]\n")
    source = ("--source", "rows.jsonl", "--cluster", "1x(2cpu, 4GB)")
    shown = run("plan", "r.yaml", *source, "--no-probe", cwd=tmp_path, DOVETAIL_HOME=str(tmp_path))
    command = shlex.split(shown.stderr.rpartition("Next:  ")[2])
    assert "--source" in command
    for words in (command[1:], ("simulate", "r.yaml", *source, "--limit", "100")):
        done = run(*words, cwd=tmp_path, DOVETAIL_HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["plan", "explain", "simulate"])
def test_a_fix_does_not_offer_an_engine_that_the_command_lacks(command: str) -> None:
    shown = run(command, VIDEO, "--cluster", "1x(4cpu)", "--engine", "ray:auto")
    assert shown.returncode == 2
    assert "fix  remove --cluster" in shown.stderr
    assert "sim" not in shown.stderr.partition("fix")[2]


def test_one_stage_is_explained_as_data_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    run("plan", VIDEO, "--cluster", "1x(32cpu, 128GB, 2xL40S:48GB)", "--out", str(out))
    data = json.loads(run("explain", str(out), "caption", "--json").stdout)
    assert data["stage"] == "caption"
    assert len(data["seats"]) == data["unit"]["workers"]
    for arguments in (("captoin", "--json"), ("--mode", "waves"), ("--headroom", "2")):
        refused = run("explain", str(out), *arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
    assert "dovetail explain" in run("plan", str(out)).stderr


def test_an_error_code_is_explained_as_text_and_as_data() -> None:
    shown = run("explain", "dt110")
    assert shown.returncode == 0
    assert shown.stdout.startswith("DT110 (exit code 3)\n  cause   One worker fits on no node now")
    assert json.loads(run("explain", "DT403", "--json").stdout)["exit_codes"] == [1, 2]
    unknown = run("explain", "DT999")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "unknown error code 'DT999'" in unknown.stderr
